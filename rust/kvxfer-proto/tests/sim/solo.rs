//! One node driven by hand: the test plays its peers, its fabric and its clock.

use super::rooms::{PAGES, expect, ids, room, side, source};
use kvxfer_proto::msg::{Done, Frame, Grant, Msg, Owed, Ready, Verify};
use kvxfer_proto::node::{
    Action, Config, Delivery, DeliveryEnd, DeliveryId, Direction, Event, EventKind, Expect, Mover, Node,
    PeerKey, RankInfo, SessionUp, Summing, Unpacking,
};
use kvxfer_proto::{Incarnation, PushId, Reason, Seq, SessionNo, Time};

/// A message that the node sent: to whom, its number (0: none), and what.
pub type Sent = (PeerKey, u64, Msg);

/// The session that a peer has with the node.
struct Session {
    key: PeerKey,
    number: SessionNo,
    /// Numbered messages that the peer has sent.
    sent: u64,
}

/// The node, and all that it wanted done so far.
pub struct Solo {
    pub node: Node,
    pub now: u64,
    pub sent: Vec<Sent>,
    pub delivers: Vec<Delivery>,
    pub sums: Vec<Summing>,
    pub unpackings: Vec<Unpacking>,
    /// Slots of ours that hold a slice, and slots of a peer's that we may write.
    pub landed: Vec<u32>,
    pub lent: Vec<u32>,
    /// Deliveries that go unpacked after all.
    pub directs: Vec<DeliveryId>,
    pub events: Vec<Event>,
    pub aborts: Vec<DeliveryId>,
    pub fences: Vec<PeerKey>,
    /// Peers whose sessions it had closed.
    pub drops: Vec<PeerKey>,
    sessions: Vec<Session>,
}

impl Solo {
    pub fn new(cfg: Config) -> Self {
        Self::of(cfg, 1)
    }

    /// The first of so many ranks.
    pub fn of(cfg: Config, tp: u32) -> Self {
        Self {
            node: Node::new(cfg, side(0, tp), &[PAGES]).unwrap(),
            now: 1,
            sent: Vec::new(),
            delivers: Vec::new(),
            sums: Vec::new(),
            unpackings: Vec::new(),
            landed: Vec::new(),
            lent: Vec::new(),
            directs: Vec::new(),
            events: Vec::new(),
            aborts: Vec::new(),
            fences: Vec::new(),
            drops: Vec::new(),
            sessions: Vec::new(),
        }
    }

    /// A decode node that expects room 99 (tokens 0..4 on page 31) of an engine with these ranks.
    pub fn decode(ranks: &[u64]) -> Self {
        Self::decode_of(ranks, expect(99, &[31], (0, 4)))
    }

    /// The same as the first of two decode ranks, to which only half of the engine's ranks owe something.
    pub fn decode_half(ranks: &[u64]) -> Self {
        Self::decode_on(Self::of(Config::default(), 2), ranks, expect(99, &[31], (0, 4)))
    }

    /// The same with another room.
    pub fn decode_of(ranks: &[u64], expect: Expect) -> Self {
        Self::decode_on(Self::new(Config::default()), ranks, expect)
    }

    fn decode_on(mut s: Self, ranks: &[u64], expect: Expect) -> Self {
        let size = ranks.len() as u32;
        let infos = (0..size)
            .zip(ranks)
            .map(|(rank, n)| RankInfo { incarnation: Incarnation(*n), side: side(rank, size) })
            .collect();
        s.order(|n, now| {
            n.handle_expect(now, expect);
            n.handle_resolved(now, &source(), Ok(infos));
        });
        s
    }

    /// Calls the node, a microsecond after the last call.
    pub fn order(&mut self, f: impl FnOnce(&mut Node, Time)) {
        self.now += 1;
        f(&mut self.node, Time(self.now));
        self.take_actions();
    }

    fn take_actions(&mut self) {
        while let Some(action) = self.node.poll_action() {
            match action {
                Action::Send { peer, number, msg, .. } => self.sent.push((peer, number, msg)),
                Action::Deliver(delivery) => self.delivers.push(delivery),
                Action::Sum(sum) => self.sums.push(sum),
                Action::Unpack(unpacking) => self.unpackings.push(unpacking),
                Action::Landed { slot, .. } => self.landed.push(slot),
                Action::Lent { slot, .. } => self.lent.push(slot),
                Action::Direct(id) => self.directs.push(id),
                Action::Event(event) => self.events.push(event),
                Action::Abort(id) => self.aborts.push(id),
                Action::Fence(key) => self.fences.push(key),
                Action::DropSession { peer, .. } => self.drops.push(peer),
                _ => {}
            }
        }
    }

    /// A session with a source of this incarnation comes up, and the fabric to it.
    pub fn source_up(&mut self, incarnation: u64, mover: Mover) -> PeerKey {
        self.up(incarnation, Direction::WeGrant, Some(mover), (0, 0))
    }

    /// A session with a destination of this incarnation comes up, and the fabric to it.
    pub fn dest_up(&mut self, incarnation: u64, mover: Mover) -> PeerKey {
        self.up(incarnation, Direction::TheyGrant, Some(mover), (0, 0))
    }

    /// A session comes up; the peer says how many of our messages it has `received`, in which link `generation`.
    pub fn up(
        &mut self,
        incarnation: u64,
        direction: Direction,
        mover: Option<Mover>,
        (received, generation): (u64, u64),
    ) -> PeerKey {
        let key = PeerKey { incarnation: Incarnation(incarnation), direction };
        let number = self.node.next_session(key);
        let up = SessionUp {
            peer: key,
            session: number,
            received,
            generation,
            own_generation: self.node.link_state(key).1,
            side: side(0, 1),
            pages: vec![PAGES],
            name: format!("peer-{incarnation}"),
        };
        self.order(|n, now| {
            n.handle_session_up(now, up);
            if let Some(mover) = mover
                && n.session_of(key) == Some(number)
            {
                n.handle_attached(now, key, mover);
            }
        });
        self.sessions.retain(|s| s.key != key);
        self.sessions.push(Session { key, number, sent: self.node.link_state(key).0 });
        key
    }

    /// The peer says something.
    pub fn recv(&mut self, key: PeerKey, msg: Msg) -> Result<(), Reason> {
        let session = self.sessions.iter_mut().find(|s| s.key == key).unwrap();
        let number = if matches!(msg, Msg::Ping(_) | Msg::Pong(_) | Msg::Ack(_) | Msg::Bye(_)) {
            0
        } else {
            session.sent += 1;
            session.sent
        };
        let frame = Frame { incarnation: key.incarnation, session: session.number, number, msg };
        let mut result = Ok(());
        self.order(|n, now| result = n.handle_frame(now, key, frame));
        result
    }

    /// The highest number that was sent to this peer.
    pub fn last_number(&self, key: PeerKey) -> u64 {
        self.sent.iter().filter(|(to, ..)| *to == key).map(|(_, number, _)| *number).max().unwrap_or(0)
    }

    /// Time passes up to then, with every timer on its way.
    pub fn run_until(&mut self, until: u64) {
        while let Some(at) = self.node.poll_timeout().filter(|at| at.0 <= until) {
            self.now = self.now.max(at.0);
            self.node.handle_timeout(Time(self.now));
            self.take_actions();
        }
        self.now = self.now.max(until);
    }

    /// The fabric reports the end of a delivery.
    pub fn end(&mut self, delivery: usize, end: DeliveryEnd) {
        let id = self.delivers[delivery].id;
        self.order(|n, now| n.handle_delivery(now, id, end));
    }

    /// The driver reports the end of a sum.
    pub fn summed(&mut self, sum: usize, end: DeliveryEnd) {
        let id = self.sums[sum].id;
        self.order(|n, now| n.handle_delivery(now, id, end));
    }

    /// How many terminal and how many released events of a room (not of its pushes) there were.
    pub fn endings(&self, r: u64) -> (usize, usize) {
        let events = || self.events.iter().filter(|e| e.room == room(r));
        let terminal =
            events().filter(|e| matches!(e.kind, EventKind::Success | EventKind::Failed(_))).count();
        let released = events().filter(|e| e.released && !matches!(e.kind, EventKind::Retracted(_))).count();
        (terminal, released)
    }

    pub fn released(&self, r: u64) -> usize {
        self.endings(r).1
    }

    /// The rooms of the grants that this peer was sent, in order.
    pub fn granted_to(&self, key: PeerKey) -> Vec<u64> {
        let grants = self.sent.iter().filter(|(to, ..)| *to == key);
        grants
            .filter_map(|(_, _, msg)| match msg {
                Msg::Grant(g) => Some(g.room.get()),
                _ => None,
            })
            .collect()
    }

    /// Why the peer was told that nothing of a room will come, if it was.
    pub fn drained(&self, key: PeerKey, r: u64) -> Option<Reason> {
        self.sent.iter().find_map(|(to, _, msg)| match msg {
            Msg::Drained(d) if *to == key && d.room == room(r) => Some(d.reason.clone()),
            _ => None,
        })
    }
}

/// Both layers of these tokens.
pub fn owed(tokens: (u64, u64)) -> Owed {
    Owed { layers: (0, 2), tokens }
}

/// A source's word that a push of its part is delivered.
pub fn done(r: u64, seq: u64, push: u64, tokens: (u64, u64), last: bool) -> Msg {
    Msg::Done(Done {
        room: room(r),
        seq: Seq(seq),
        push: PushId(push),
        span: owed(tokens),
        last,
        end_token: tokens.1,
        meta: None,
        checksum: None,
        bytes: 0,
        writes: 0,
    })
}

/// A source's word that these pages hold tokens 0..4 of a room and may be copied.
pub fn ready(r: u64, seq: u64, push: u64, pages: &[u32]) -> Msg {
    Msg::Ready(Ready {
        room: room(r),
        seq: Seq(seq),
        push: PushId(push),
        span: owed((0, 4)),
        pages_start: 0,
        pages: ids(pages),
        pages_end: None,
    })
}

/// A destination's only rank grants pages for tokens 0..4 of a room.
pub fn grant(r: u64, seq: u64, pages: &[u32]) -> Msg {
    Msg::Grant(Grant {
        room: room(r),
        seq: Seq(seq),
        tokens: (0, 4),
        owed: Some(owed((0, 4))),
        pages: ids(pages),
        ranks: 1,
        verify: Verify::Off,
        deadline_us: 600_000_000,
        credits: 0,
    })
}
