//! Control connections: two streams of bytes, a handshake at each end, frames through the codec.

use super::world::{Job, What, World};
use kvxfer_proto::handshake::{self, Handshake, Met, Outcome, Secret};
use kvxfer_proto::msg::{Frame, Purpose};
use kvxfer_proto::node::PeerKey;
use kvxfer_proto::wire::{self, Decoded, Decoder, MAX_FRAME_BYTES};
use kvxfer_proto::{Reason, ReasonKind, SessionNo};

/// What production gives a handshake, divided by 50 as all times are.
const HANDSHAKE_US: u64 = 200_000;

/// One end of a connection.
#[derive(Debug)]
pub(super) struct End {
    pub(super) agent: usize,
    pub(super) life: u32,
    pub(super) open: bool,
    handshake: Option<Handshake>,
    decoder: Decoder,
    met: Option<Met>,
    described: bool,
    /// The link generation that this end described.
    pub(super) own_generation: u64,
    /// Whom the initiator means to reach.
    pub(super) key: Option<PeerKey>,
    pub(super) session: Option<(PeerKey, SessionNo)>,
    /// When the last bytes on their way to this end arrive: a stream keeps its order.
    last_at: u64,
    /// Bytes that arrive later are lost.
    cutoff: u64,
}

/// A connection; the first end opened it.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) ends: [End; 2],
    cut: bool,
}

impl World<'_> {
    /// Opens a connection from `i` to whoever lives at `to`.
    pub(super) fn open_conn(&mut self, i: usize, to: usize, key: PeerKey, session: SessionNo) -> u64 {
        self.next_conn += 1;
        let id = self.next_conn;
        let end = |agent: usize, w: &mut Self, initiator: bool| {
            let mut nonce = [0; 32];
            for word in nonce.as_chunks_mut::<8>().0 {
                *word = w.rng.next_u64().to_le_bytes();
            }
            let config =
                handshake::Config::new(w.agents[agent].incarnation, nonce, Secret::new(b"simulated"));
            let h = if initiator {
                Handshake::initiator(config, Purpose::Transfer, session)
            } else {
                Handshake::acceptor(config)
            };
            End {
                agent,
                life: w.agents[agent].life,
                open: true,
                handshake: Some(h),
                decoder: Decoder::new(),
                met: None,
                described: false,
                own_generation: 0,
                key: initiator.then_some(key),
                session: None,
                last_at: 0,
                cutoff: u64::MAX,
            }
        };
        let ends = [end(i, self, true), end(to, self, false)];
        self.conns.insert(id, Conn { ends, cut: false });
        for (e, agent) in [(0, i), (1, to)] {
            self.job(HANDSHAKE_US, agent, Job::HandshakeDue { conn: id, end: e });
        }
        self.pump(id, 0);
        id
    }

    /// When bytes that are sent now get to the other end, at the earliest.
    fn arrival(&mut self, a: usize, b: usize) -> u64 {
        let delay = self.draw(self.delays.control);
        let wall = self.walls.get(&(a.min(b), a.max(b))).copied().unwrap_or(0);
        self.now.max(wall) + delay
    }

    fn send_bytes(&mut self, c: u64, from: usize, bytes: Vec<u8>) {
        let Some(conn) = self.conns.get(&c).filter(|conn| conn.ends[from].open && !conn.cut) else { return };
        let (a, b) = (conn.ends[from].agent, conn.ends[1 - from].agent);
        let at = self.arrival(a, b);
        if let Some(conn) = self.conns.get_mut(&c) {
            let to = &mut conn.ends[1 - from];
            let at = at.max(to.last_at + 1);
            to.last_at = at;
            self.at(at, What::Bytes { conn: c, to: 1 - from, bytes });
        }
    }

    pub(super) fn send_frame(&mut self, i: usize, c: u64, frame: &Frame) {
        let Some(conn) = self.conns.get(&c) else { return };
        let from = usize::from(conn.ends[0].agent != i);
        let mut bytes = Vec::new();
        match wire::encode(frame, &mut bytes) {
            Ok(()) => self.send_bytes(c, from, bytes),
            Err(e) => {
                let name = &self.agents[i].name;
                self.log.violation(self.now, format_args!("{name} cannot encode {}: {e}", frame.msg.name()));
            }
        }
    }

    pub(super) fn bytes_arrived(&mut self, c: u64, e: usize, bytes: &[u8]) {
        let Some(end) = self.conns.get_mut(&c).map(|conn| &mut conn.ends[e]) else { return };
        if !end.open || self.now > end.cutoff {
            return;
        }
        end.decoder.feed(bytes);
        self.pump(c, e);
    }

    fn open_end(&mut self, c: u64, e: usize) -> Option<&mut End> {
        self.conns.get_mut(&c).map(|conn| &mut conn.ends[e]).filter(|end| end.open)
    }

    /// Takes out of an end whatever its bytes amount to.
    fn pump(&mut self, c: u64, e: usize) {
        loop {
            let Some(end) = self.open_end(c, e) else { return };
            if let Some(h) = end.handshake.take() {
                if !self.pump_handshake(c, e, h) {
                    return;
                }
                continue;
            }
            let (agent, met) = (end.agent, end.met);
            match end.decoder.next_frame() {
                Ok(None) => return,
                Ok(Some(Decoded::Frame(frame))) => {
                    self.tally.frames += 1;
                    if let Some(Err(reason)) = met.map(|m| m.check(&frame)) {
                        self.log.violation(self.now, format_args!("{reason}"));
                        self.close_end(c, e);
                        return;
                    }
                    self.frame(c, e, frame);
                }
                Ok(Some(Decoded::Unknown(header))) => {
                    let name = &self.agents[agent].name;
                    self.log.violation(self.now, format_args!("{name} does not know frame {header:?}"));
                }
                Err(error) => {
                    let name = &self.agents[agent].name;
                    self.log.violation(self.now, format_args!("{name} cannot decode: {error}"));
                    self.close_end(c, e);
                    return;
                }
            }
        }
    }

    /// Moves a handshake along; whether there is more to do at this end.
    fn pump_handshake(&mut self, c: u64, e: usize, mut h: Handshake) -> bool {
        let Some(end) = self.open_end(c, e) else { return false };
        h.handle_input(&mut end.decoder);
        let need = h.need_describe().copied().filter(|_| !end.described);
        self.send_handshake(c, e, &mut h);
        if let Some(met) = need {
            let Some(describe) = self.describe(c, e, met) else { return false };
            if let Some(end) = self.open_end(c, e) {
                end.described = true;
            }
            h.supply_describe(describe);
            self.send_handshake(c, e, &mut h);
        }
        let outcome = h.outcome().cloned();
        let Some(end) = self.open_end(c, e) else { return false };
        match outcome {
            None => {
                end.handshake = Some(h);
                need.is_some()
            }
            Some(Outcome::Established(established)) => {
                end.decoder.set_cap(MAX_FRAME_BYTES);
                end.met = Some(established.met);
                self.session_up(c, e, *established);
                true
            }
            Some(Outcome::Refused { reason, .. }) => {
                self.log.violation(self.now, format_args!("peers that fit refuse each other: {reason}"));
                self.close_end(c, e);
                false
            }
            Some(Outcome::Failed(reason)) => {
                if !matches!(reason.kind, ReasonKind::TransferTimeout | ReasonKind::PeerLost) {
                    self.log.violation(self.now, format_args!("a handshake failed: {reason}"));
                }
                self.close_end(c, e);
                false
            }
        }
    }

    fn send_handshake(&mut self, c: u64, e: usize, h: &mut Handshake) {
        while let Some(bytes) = h.poll_frame() {
            self.send_bytes(c, e, bytes);
        }
    }

    pub(super) fn handshake_due(&mut self, c: u64, e: usize) {
        let Some(end) = self.open_end(c, e) else { return };
        if let Some(mut h) = end.handshake.take() {
            h.abort(Reason::new(ReasonKind::TransferTimeout, "the peer does not answer"));
            self.send_handshake(c, e, &mut h);
            self.close_end(c, e);
        }
    }

    /// This end closes. The other one sees it once it has read what was on its way.
    pub(super) fn close_end(&mut self, c: u64, e: usize) {
        let Some(conn) = self.conns.get(&c).filter(|conn| conn.ends[e].open) else { return };
        let (a, b) = (conn.ends[e].agent, conn.ends[1 - e].agent);
        let at = self.arrival(a, b);
        let mut tell = None;
        if let Some(conn) = self.conns.get_mut(&c) {
            conn.ends[e].open = false;
            if conn.ends[1 - e].open && !conn.cut {
                let to = &mut conn.ends[1 - e];
                to.last_at = at.max(to.last_at + 1);
                tell = Some(to.last_at);
            }
        }
        if let Some(at) = tell {
            self.at(at, What::Eof { conn: c, to: 1 - e });
        }
        self.closed(c, e);
        self.forget_conn(c);
    }

    /// The end of the stream, or of the connection.
    pub(super) fn eof(&mut self, c: u64, e: usize) {
        let Some(end) = self.open_end(c, e) else { return };
        end.open = false;
        self.closed(c, e);
        self.forget_conn(c);
    }

    fn forget_conn(&mut self, c: u64) {
        if self.conns.get(&c).is_some_and(|conn| conn.ends.iter().all(|e| !e.open)) {
            self.conns.remove(&c);
        }
    }

    /// A connection is lost: a tail of what is on its way never arrives, and each end finds out in its own time.
    pub(super) fn cut_conn(&mut self, c: u64) {
        let reach = 2 * self.delays.control.1;
        let cutoffs = [self.now + self.draw((0, reach)), self.now + self.draw((0, reach))];
        let seen = [self.draw((10, 60_000)), self.draw((10, 60_000))];
        let Some(conn) = self.conns.get_mut(&c) else { return };
        conn.cut = true;
        let mut told = Vec::new();
        for (e, end) in conn.ends.iter_mut().enumerate().filter(|(_, end)| end.open) {
            end.cutoff = cutoffs[e];
            told.push((self.now + seen[e], e));
        }
        for (at, e) in told {
            self.at(at, What::Eof { conn: c, to: e });
        }
    }

    /// The kernel closes what a process leaves behind.
    pub(super) fn close_all_of(&mut self, i: usize) {
        let mine: Vec<(u64, usize)> = self
            .conns
            .iter()
            .flat_map(|(c, conn)| (0..2).map(move |e| (*c, e, &conn.ends[e])))
            .filter(|(_, _, end)| end.agent == i && end.open)
            .map(|(c, e, _)| (c, e))
            .collect();
        for (c, e) in mine {
            if let Some(conn) = self.conns.get_mut(&c) {
                // Nobody is left to be told at this end.
                conn.ends[e].session = None;
                conn.ends[e].key = None;
            }
            self.close_end(c, e);
        }
    }
}
