//! Two handshakes and the bytes between them.
#![allow(dead_code, unreachable_pub)]
#![allow(clippy::unwrap_used, clippy::wildcard_imports)]

use kvxfer_proto::handshake::{Config, Handshake, Outcome, Secret};
use kvxfer_proto::layout::{DType, Kind, Order, PageLayout, Shard, Side};
use kvxfer_proto::msg::*;
use kvxfer_proto::wire::{self, Decoded, Decoder};
use kvxfer_proto::{Incarnation, Reason, SessionNo};
use std::collections::VecDeque;

pub const INITIATOR: Incarnation = Incarnation(0x1111);
pub const ACCEPTOR: Incarnation = Incarnation(0x2222);
pub const SESSION: SessionNo = SessionNo(5);

pub fn config(incarnation: Incarnation, secret: Option<&[u8]>) -> Config {
    let nonce = [u8::try_from(incarnation.0 & 0xff).unwrap(); 32];
    Config { features: 0b110, ..Config::new(incarnation, nonce, secret.and_then(Secret::new)) }
}

pub fn initiator(secret: Option<&[u8]>) -> Handshake {
    Handshake::initiator(config(INITIATOR, secret), Purpose::Transfer, SESSION)
}

pub fn acceptor(secret: Option<&[u8]>) -> Handshake {
    Handshake::acceptor(config(ACCEPTOR, secret))
}

pub fn layout() -> PageLayout {
    PageLayout {
        layers: 4,
        kv_heads: 8,
        head_dim: 16,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    }
}

pub fn describe(name: &str, role: Role) -> Describe {
    let shard = Shard { tp_rank: 0, tp_size: 2, pp_rank: 0, pp_size: 1 };
    let side = Side { groups: vec![layout()], shard };
    let pages = vec![8];
    Describe {
        name: name.into(),
        engine: String::new(),
        dp_rank: 0,
        role,
        mode: "push".into(),
        regions: side.regions(&pages).unwrap(),
        groups: side.groups,
        shard,
        pages,
        model: String::new(),
        fabrics: vec![FabricOffer { name: "shm".into(), blob: b"one-time token".to_vec() }],
        received: 3,
        link_generation: 0,
        staging: (0, 0),
        process: Vec::new(),
    }
}

/// One end: a handshake, what it says of itself, and what it has not read yet.
pub struct End {
    pub hs: Handshake,
    pub describe: Describe,
    pub decoder: Decoder,
}

impl End {
    fn new(hs: Handshake, describe: Describe) -> Self {
        Self { hs, describe, decoder: Decoder::new() }
    }

    pub fn feed(&mut self, bytes: &[u8]) {
        self.decoder.feed(bytes);
        self.hs.handle_input(&mut self.decoder);
        if self.hs.need_describe().is_some() {
            self.hs.supply_describe(self.describe.clone());
        }
    }

    pub fn established(&self) -> bool {
        matches!(self.hs.outcome(), Some(Outcome::Established(_)))
    }

    pub fn failure(&self) -> &Reason {
        match self.hs.outcome() {
            Some(Outcome::Failed(reason) | Outcome::Refused { reason, .. }) => reason,
            other => panic!("no failure: {other:?}"),
        }
    }
}

/// Both ends.
pub struct Pair {
    pub i: End,
    pub a: End,
    /// Every frame that was sent, before anything was done to it: from the initiator?, bytes.
    pub sent: Vec<(bool, Vec<u8>)>,
}

impl Pair {
    pub fn new(initiator: Handshake, acceptor: Handshake) -> Self {
        Self {
            i: End::new(initiator, describe("decode-0", Role::Decode)),
            a: End::new(acceptor, describe("prefill-0", Role::Prefill)),
            sent: Vec::new(),
        }
    }

    /// Carries frames until nobody has more to say. `tamper` sees each one's number and bytes.
    pub fn run_with(&mut self, mut tamper: impl FnMut(usize, &mut Vec<u8>)) {
        let mut wire = VecDeque::new();
        loop {
            wire.extend(std::iter::from_fn(|| self.i.hs.poll_frame()).map(|raw| (true, raw)));
            wire.extend(std::iter::from_fn(|| self.a.hs.poll_frame()).map(|raw| (false, raw)));
            let Some((from_initiator, mut raw)) = wire.pop_front() else { return };
            self.sent.push((from_initiator, raw.clone()));
            tamper(self.sent.len() - 1, &mut raw);
            let end = if from_initiator { &mut self.a } else { &mut self.i };
            end.feed(&raw);
        }
    }

    pub fn run(&mut self) {
        self.run_with(|_, _| {});
    }

    /// Both connections end.
    pub fn eof(&mut self) {
        self.i.hs.handle_eof();
        self.a.hs.handle_eof();
    }
}

/// The frame with its message changed.
pub fn reencode(raw: &mut Vec<u8>, change: impl FnOnce(&mut Frame)) {
    let Ok(Decoded::Frame(mut frame)) = wire::decode_frame(raw) else { panic!() };
    change(&mut frame);
    raw.clear();
    wire::encode(&frame, raw).unwrap();
}
