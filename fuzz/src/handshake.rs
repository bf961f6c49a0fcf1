//! Two honest handshakes, each of which may have an attacker where its peer should be: whoever is let in has heard
//! exactly what an honest peer with the same secret and channel said to it.

use super::input::Input;
use kvxfer_proto::handshake::{Config, Handshake, Outcome, Secret};
use kvxfer_proto::msg::{Describe, Purpose, Role};
use kvxfer_proto::wire::{Decoder, HEADER_BYTES, kind};
use kvxfer_proto::{DType, Incarnation, Kind, Order, PageLayout, Reason, ReasonKind, SessionNo, Shard, Side};

struct End {
    h: Handshake,
    decoder: Decoder,
    /// Frames that it said, each whole.
    said: Vec<Vec<u8>>,
    /// Bytes that it was told.
    heard: Vec<u8>,
    transfer: bool,
    /// It took its peer for authenticated at some time.
    is_in: bool,
    /// Frames of the peer that were passed on untouched so far.
    passed: usize,
}

impl End {
    fn new(h: Handshake, transfer: bool) -> Self {
        Self {
            h,
            decoder: Decoder::new(),
            said: Vec::new(),
            heard: Vec::new(),
            transfer,
            is_in: false,
            passed: 0,
        }
    }

    fn listen(&mut self) {
        self.is_in |= self.h.need_describe().is_some()
            || matches!(self.h.outcome(), Some(Outcome::Established(_) | Outcome::Refused { .. }));
        while let Some(raw) = self.h.poll_frame() {
            if !self.is_in {
                let said = raw.get(5).copied().unwrap_or(0);
                assert!(
                    [kind::HELLO, kind::CHALLENGE, kind::PROOF, kind::ACCEPT, kind::REFUSE].contains(&said),
                    "kind {said} to a stranger"
                );
            }
            self.said.push(raw);
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        self.listen();
        if !self.is_in {
            self.heard.extend_from_slice(bytes);
        }
        self.decoder.feed(bytes);
        self.h.handle_input(&mut self.decoder);
        self.listen();
    }

    /// The first two frames of what it was told, with which its peer has proved itself.
    fn proof(&self) -> Option<&[u8]> {
        let mut end = 0;
        for _ in 0..2 {
            let len = self.heard.get(end..)?.first_chunk::<4>()?;
            end += HEADER_BYTES + usize::try_from(u32::from_le_bytes(*len)).ok()?;
        }
        self.heard.get(..end)
    }
}

fn describe(role: Role) -> Describe {
    let layout = PageLayout {
        layers: 1,
        kv_heads: 1,
        head_dim: 8,
        page_tokens: 4,
        dtype: DType::Uint8,
        order: Order::Nhd,
        kind: Kind::Latent,
        ..PageLayout::PLAIN
    };
    let shard = Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 };
    let side = Side { groups: vec![layout], shard };
    Describe {
        name: "n".to_owned(),
        engine: String::new(),
        dp_rank: 0,
        role,
        mode: "push".to_owned(),
        regions: side.regions(&[4]).unwrap_or_default(),
        groups: side.groups,
        shard,
        pages: vec![4],
        model: String::new(),
        fabrics: Vec::new(),
        received: 0,
        link_generation: 0,
        staging: (0, 0),
        process: Vec::new(),
    }
}

/// Plays an attacker's choices against an initiator and an acceptor.
pub fn handshake(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let flags = input.byte();
    let secret =
        |n: u8| (flags & n == 0).then(|| Secret::new(if n == 1 { b"one" } else { b"two" })).flatten();
    // Both have a secret, the same or not, or one has none; none at all proves nothing, and must only not panic.
    let (mine, theirs) = match flags & 3 {
        0 | 1 => (Secret::new(b"one"), Secret::new(b"one")),
        2 => (Secret::new(b"one"), secret(8)),
        _ => (None, None),
    };
    let same = mine == theirs && mine.is_some();
    let purpose = [Purpose::Transfer, Purpose::Lookup, Purpose::Register][usize::from(flags >> 2 & 3) % 3];
    let channels = [None, Some([1; 32]), Some([2; 32])];
    let (a_channel, b_channel) =
        (channels[usize::from(flags >> 4 & 3) % 3], channels[usize::from(flags >> 6) % 3]);
    let config =
        |n: u64, nonce: u8, secret: &Option<Secret>| Config::new(Incarnation(n), [nonce; 32], secret.clone());
    let transfer = purpose == Purpose::Transfer;
    let initiator = Handshake::initiator(config(1, 1, &mine), purpose, SessionNo(3));
    let mut ends =
        [End::new(initiator, transfer), End::new(Handshake::acceptor(config(2, 2, &theirs)), transfer)];
    for (end, channel) in ends.iter_mut().zip([a_channel, b_channel]) {
        if let Some(channel) = channel {
            end.h.bind(channel);
        }
    }
    // What an earlier, honest meeting of the same two sounded like.
    let record = honest(&config(1, 11, &mine), &config(2, 12, &mine), purpose);
    while !input.is_empty() {
        let choice = input.byte();
        let at = usize::from(choice >> 7);
        let frames: Vec<Vec<u8>> = match choice & 7 {
            // The next frame of the honest peer; or any of it, or of ours, or of the record, whole or changed.
            0 | 1 => {
                ends[1 - at].listen();
                let next = ends[at].passed;
                ends[at].passed += 1;
                ends[1 - at].said.get(next).cloned().into_iter().collect()
            }
            2 => pick(&mut input, &ends[1 - at].said),
            3 => pick(&mut input, &ends[at].said),
            4 => pick(&mut input, &record),
            5 => {
                let len = input.below(64);
                vec![input.take(len).to_vec()]
            }
            6 => {
                let role = if at == 0 { Role::Decode } else { Role::Prefill };
                ends[at].listen();
                ends[at].h.supply_describe(describe(if ends[at].transfer { role } else { Role::Both }));
                vec![]
            }
            _ => {
                match input.below(4) {
                    0 => ends[at].h.handle_eof(),
                    1 => ends[at].h.abort(Reason::new(ReasonKind::Cancelled, "x")),
                    _ => {}
                }
                vec![]
            }
        };
        for mut frame in frames {
            if choice & 0x40 != 0 && !frame.is_empty() {
                let i = input.below(256) % frame.len();
                frame[i] ^= input.byte();
            }
            ends[at].hear(&frame);
        }
        ends[at].listen();
        check(&ends, mine.is_some() && theirs.is_some(), same && a_channel == b_channel);
    }
    for end in &mut ends {
        end.h.handle_eof();
        assert!(end.h.outcome().is_some(), "a handshake whose peer has gone is over");
    }
}

fn pick(input: &mut Input<'_>, frames: &[Vec<u8>]) -> Vec<Vec<u8>> {
    frames.get(input.below(frames.len().max(1))).cloned().into_iter().collect()
}

fn check(ends: &[End; 2], secrets: bool, fit: bool) {
    for (at, end) in ends.iter().enumerate() {
        if !secrets || !end.is_in {
            continue;
        }
        assert!(fit, "somebody without the secret, or on another channel, was let in");
        let peer: Vec<u8> = ends[1 - at].said.iter().take(2).flatten().copied().collect();
        assert_eq!(end.proof(), Some(peer.as_slice()), "what was heard is not what the peer said");
    }
}

/// All frames of a handshake that nobody disturbs.
fn honest(a: &Config, b: &Config, purpose: Purpose) -> Vec<Vec<u8>> {
    let mut ends = [
        End::new(Handshake::initiator(a.clone(), purpose, SessionNo(3)), true),
        End::new(Handshake::acceptor(b.clone()), true),
    ];
    let mut frames = Vec::new();
    for step in 0..4 {
        let [x, y] = &mut ends;
        let (from, to) = if step % 2 == 0 { (x, y) } else { (y, x) };
        from.listen();
        for frame in std::mem::take(&mut from.said) {
            to.hear(&frame);
            frames.push(frame);
        }
    }
    frames
}
