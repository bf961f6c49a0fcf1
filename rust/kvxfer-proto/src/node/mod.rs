//! The state machine of one agent: what it expects, what it pushes, and what may be reused when.
//!
//! A [`Node`] has no clock, thread or socket. The driver feeds it the caller's orders, frames that passed
//! [`crate::handshake`], and what fabrics report; it carries out the [`Action`]s that come out. The same code runs
//! in production, in the simulator and in the model checker.
//!
//! * [`inbound`](self) rooms: this side granted pages and waits for them (decode).
//! * [`outbound`](self) rooms: this side pushes pages, or was granted some before its engine pushed (prefill).

mod checker;
mod coverage;
mod inbound;
mod outbound;
mod pages;
mod parts;
mod peer;
mod ring;
mod sources;
mod timers;
mod tomb;
mod types;

pub use checker::Wait;
pub use coverage::{CoverError, Coverage, area, intersect};
pub use pages::PageBook;
pub use sources::Resolving;
pub use types::{
    Action, Config, Counters, Delivery, DeliveryEnd, DeliveryId, Direction, Event, EventKind, Expect, Flaw,
    Gauges, Mover, PeerKey, Push, RankInfo, RoomStats, SessionUp, Source, Stage, Summing, Unpacking,
    Unreleased,
};

use crate::error::{Reason, ReasonKind};
use crate::ids::{Incarnation, Room, SessionNo, Time};
use crate::layout::{LayoutError, Side};
use crate::msg::{Frame, Msg};
use inbound::Inbound;
use outbound::Outbound;
use peer::Peer;
use ring::{Packing, Ring};
use sources::SourceState;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;
use timers::{Timer, Timers};
use tomb::{Tomb, Tombs};

/// Whose delivery it is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum DeliveryFor {
    Inbound(Room, PeerKey, crate::ids::PushId),
    Outbound(Room, PeerKey, crate::ids::PushId),
    /// A sum of what came.
    Check(Room, PeerKey),
}

impl DeliveryFor {
    fn peer(&self) -> PeerKey {
        match self {
            Self::Inbound(_, key, _) | Self::Outbound(_, key, _) | Self::Check(_, key) => *key,
        }
    }
}

/// The state machine of one agent.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Node {
    cfg: Config,
    side: Side,
    page_counts: Vec<u32>,
    peers: BTreeMap<PeerKey, Peer>,
    sources: BTreeMap<Source, SourceState>,
    inbound: BTreeMap<Room, Inbound>,
    outbound: BTreeMap<Room, Outbound>,
    tombs: Tombs,
    book: PageBook,
    deliveries: BTreeMap<DeliveryId, DeliveryFor>,
    /// Our staging slots, once there are some.
    ring: Option<Ring>,
    /// Deliveries of ours that go packed.
    packing: BTreeMap<DeliveryId, Packing>,
    next_delivery: u64,
    early_rooms: usize,
    quarantined: u64,
    actions: VecDeque<Action>,
    /// Peers whose link may have something to send.
    dirty: BTreeSet<PeerKey>,
    timers: Timers,
    counters: Counters,
    closing: bool,
    /// New links start in this generation: above that of every peer that was forgotten.
    generation_floor: u64,
}

impl Node {
    /// A node with this geometry and so many pages in each group.
    ///
    /// # Errors
    /// When the geometry is not valid, or the page counts do not fit it.
    pub fn new(cfg: Config, side: Side, page_counts: &[u32]) -> Result<Self, LayoutError> {
        side.validate()?;
        if page_counts.len() != side.groups.len() {
            return Err(LayoutError(format!(
                "{} page counts for {} groups",
                page_counts.len(),
                side.groups.len()
            )));
        }
        Ok(Self {
            cfg,
            side,
            page_counts: page_counts.to_vec(),
            peers: BTreeMap::new(),
            sources: BTreeMap::new(),
            inbound: BTreeMap::new(),
            outbound: BTreeMap::new(),
            tombs: Tombs::default(),
            book: PageBook::new(page_counts),
            deliveries: BTreeMap::new(),
            ring: None,
            packing: BTreeMap::new(),
            next_delivery: 0,
            early_rooms: 0,
            quarantined: 0,
            actions: VecDeque::new(),
            dirty: BTreeSet::new(),
            timers: Timers::default(),
            counters: Counters::default(),
            closing: false,
            generation_floor: 0,
        })
    }

    /// The next thing to do, until there is none.
    pub fn poll_action(&mut self) -> Option<Action> {
        if self.actions.is_empty() {
            while let Some(key) = self.dirty.pop_first() {
                self.flush_peer(key);
            }
        }
        self.actions.pop_front()
    }

    /// When [`Node::handle_timeout`] wants to be called next.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Time> {
        self.timers.next()
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Time) {
        while let Some(timer) = self.timers.pop_due(now) {
            match timer {
                Timer::Inbound(room) => self.inbound_timer(now, room),
                Timer::Outbound(room) => self.outbound_timer(now, room),
                Timer::Peer(key) => self.peer_timer(now, key),
            }
        }
    }

    /// A frame came on a session of `peer` that passed its handshake.
    ///
    /// # Errors
    /// The peer broke the protocol: the driver closes the connection (the node has forgotten the session).
    pub fn handle_frame(&mut self, now: Time, peer: PeerKey, frame: Frame) -> Result<(), Reason> {
        let result = self.take_frame(now, peer, frame);
        if result.is_err() {
            self.counters.protocol_errors += 1;
            if let Some(session) = self.peers.get(&peer).and_then(|p| p.session) {
                self.handle_session_down(now, peer, session);
            }
        }
        result
    }

    fn take_frame(&mut self, now: Time, key: PeerKey, frame: Frame) -> Result<(), Reason> {
        let Some(peer) = self.peers.get_mut(&key) else {
            self.counters.stale_refused += 1;
            return Ok(());
        };
        let stale = peer.session != Some(frame.session) && self.cfg.flaw != Some(Flaw::NoSessionCheck);
        if stale || frame.incarnation != key.incarnation {
            self.counters.stale_refused += 1;
            return match &frame.msg {
                Msg::Credit(m) if self.cfg.flaw == Some(Flaw::OldCreditsCount) => {
                    self.credit_arrived(now, key, m)
                }
                _ => Ok(()),
            };
        }
        peer.last_heard = now;
        if frame.number > 0 {
            let fresh = peer.link.handle_number(frame.number)? == crate::link::Arrival::Fresh;
            self.dirty.insert(key);
            if !fresh {
                return Ok(());
            }
        }
        match frame.msg {
            Msg::Ack(n) if frame.number == 0 => peer.link.handle_ack(n)?,
            // A withdrawn message's place holder, an answer to a ping, or a kind of a newer peer.
            Msg::Ack(_) | Msg::Pong(_) => {}
            Msg::Ping(n) => self.send_unnumbered(key, Msg::Pong(n)),
            Msg::Bye(reason) => self.goodbye(now, key, &reason),
            numbered if frame.number > 0 => self.take_numbered(now, key, numbered)?,
            other => {
                return Err(Reason::new(
                    ReasonKind::ProtocolError,
                    format!("unexpected unnumbered message in a session: {}", other.name()),
                ));
            }
        }
        Ok(())
    }

    fn take_numbered(&mut self, now: Time, key: PeerKey, msg: Msg) -> Result<(), Reason> {
        match (key.direction, msg) {
            (Direction::TheyGrant, Msg::Grant(m)) => self.grant_arrived(now, key, m),
            (Direction::TheyGrant, Msg::Cancel(m)) => self.cancel_arrived(now, key, m),
            (Direction::TheyGrant, Msg::Copied(m)) => self.copied_arrived(now, key, m),
            (Direction::TheyGrant, Msg::Finished(m)) => self.finished_arrived(now, key, m)?,
            (Direction::TheyGrant, Msg::RoomFailed(m)) => {
                self.handle_room_failed(now, key, m.room, m.reason);
                self.heard_of(m.room, key, None);
            }
            (Direction::TheyGrant, Msg::Credit(m)) => self.credit_arrived(now, key, &m)?,
            (Direction::WeGrant, Msg::Pack(m)) => self.pack_arrived(now, key, m)?,
            (Direction::WeGrant, Msg::Packed(m)) => self.packed_arrived(now, key, &m)?,
            (Direction::WeGrant, Msg::Drained(m)) => self.drained_arrived(now, key, m),
            (Direction::WeGrant, Msg::Ready(m)) => self.ready_arrived(now, key, m)?,
            (Direction::WeGrant, Msg::Retract(m)) => self.retract_arrived(now, key, &m)?,
            (Direction::WeGrant, Msg::Done(m)) => self.done_arrived(now, key, m)?,
            (_, other) => {
                return Err(Reason::new(
                    ReasonKind::ProtocolError,
                    format!("message {} does not belong into this direction of a session", other.name()),
                ));
            }
        }
        Ok(())
    }

    /// A delivery ended: none of its writes is in flight any more.
    pub fn handle_delivery(&mut self, now: Time, id: DeliveryId, end: DeliveryEnd) {
        match self.deliveries.remove(&id) {
            Some(DeliveryFor::Inbound(room, key, push)) => {
                self.unpacking_over(now, id);
                self.inbound_delivery(now, id, (room, key, push), end);
            }
            Some(DeliveryFor::Outbound(room, key, push)) => {
                self.packing_over(now, id, (room, key, push));
                self.outbound_delivery(now, room, key, push, end);
            }
            Some(DeliveryFor::Check(room, key)) => self.check_over(now, id, room, key, end),
            None => {}
        }
    }

    /// The caller begins a room of this number: what it was told of an earlier one says nothing of this one.
    pub fn handle_anew(&mut self, room: Room) {
        self.tombs.untell(room);
    }

    fn tomb_limits(&self) -> tomb::Limits {
        tomb::Limits {
            open: self.cfg.tombstones,
            settled: self.cfg.settled_tombstones,
            per_peer: self.cfg.tombstones_per_peer,
        }
    }

    /// Remembers a room that failed.
    fn bury(&mut self, room: Room, tomb: Tomb) {
        if self.cfg.flaw != Some(Flaw::NoTombstone) {
            self.tombs.put(self.tomb_limits(), room, tomb);
        }
    }

    /// A decode rank has said its word on a room, which may be dead.
    fn heard_of(&mut self, room: Room, key: PeerKey, ranks: Option<u32>) {
        let ranks = ranks.or_else(|| self.peers.get(&key).and_then(|p| p.ranks));
        self.tombs.hear(self.tomb_limits(), room, key, ranks);
    }

    /// The caller gives a room up.
    pub fn handle_cancel(&mut self, now: Time, room: Room, reason: Reason) {
        if self.inbound.contains_key(&room) {
            self.fail_inbound(now, room, reason);
        } else if self.outbound.contains_key(&room) {
            self.fail_outbound(now, room, reason);
        } else {
            // Nothing is known of it here yet; what comes for it later fails at once.
            self.bury(room, Tomb::new(reason, false));
        }
    }

    /// The agent closes: every room is cancelled, and no new one is taken.
    pub fn handle_close(&mut self, now: Time) {
        self.closing = true;
        let reason = Reason::new(ReasonKind::Closed, "the agent was closed");
        for room in self.inbound.keys().copied().collect::<Vec<_>>() {
            self.fail_inbound(now, room, reason.clone());
        }
        for room in self.outbound.keys().copied().collect::<Vec<_>>() {
            self.fail_outbound(now, room, reason.clone());
        }
    }

    /// Whether every room of this side's caller has ended and every page is free.
    #[must_use]
    pub fn is_quiet(&self) -> bool {
        self.inbound.is_empty() && self.outbound.values().all(|r| !r.local) && self.deliveries.is_empty()
    }

    /// Rooms that have ended and whose pages are not free yet.
    #[must_use]
    pub fn unreleased(&self) -> Vec<Unreleased> {
        let left = |room: &Room, pages, peers: Vec<PeerKey>| {
            let names = peers.iter().map(|key| self.peer_name(*key)).collect();
            Unreleased { room: *room, pages, peers, names }
        };
        let inbound = self.inbound.iter().map(|(room, r)| left(room, r.pages.clone(), r.holders()));
        let outbound = self.outbound.iter().filter(|(_, r)| r.local && !r.released);
        let outbound = outbound.map(|(room, r)| left(room, r.pages(), r.dests.keys().copied().collect()));
        inbound.chain(outbound).collect()
    }

    /// What was counted since the start.
    #[must_use]
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// What is held now.
    #[must_use]
    pub fn gauges(&self) -> Gauges {
        Gauges {
            inbound: self.inbound.len() as u64,
            outbound: self.outbound.len() as u64,
            granted_pages: self.book.granted(),
            quarantined_pages: self.quarantined,
            peers: self.peers.len() as u64,
            tombstones: self.tombs.len() as u64,
            deliveries: self.deliveries.len() as u64,
            timers: self.timers.len() as u64,
            unacknowledged: self.peers.values().map(|p| p.link.unacknowledged() as u64).sum(),
            staging_slots: self.ring.as_ref().map_or(0, |r| r.taken().into()),
            quarantined_slots: self.ring.as_ref().map_or(0, |r| r.quarantined().into()),
        }
    }

    /// This node's geometry.
    #[must_use]
    pub fn side(&self) -> &Side {
        &self.side
    }

    /// The room that holds a page, for checkers.
    #[must_use]
    pub fn page_owner(&self, group: usize, page: u32) -> Option<Room> {
        self.book.owner(group, page)
    }

    /// Session with a peer, for the driver: which number, if one is up.
    #[must_use]
    pub fn session_of(&self, peer: PeerKey) -> Option<SessionNo> {
        self.peers.get(&peer).and_then(|p| p.session)
    }

    /// What `Describe` has to say about the link with this peer: received and generation.
    #[must_use]
    pub fn link_state(&self, peer: PeerKey) -> (u64, u64) {
        self.peers.get(&peer).map_or((0, self.generation_floor), |p| (p.link.received(), p.link.generation()))
    }

    /// Number for the next session with this peer (only for [`Direction::WeGrant`]).
    #[must_use]
    pub fn next_session(&self, peer: PeerKey) -> SessionNo {
        SessionNo(self.peers.get(&peer).map_or(1, |p| p.last_session.0 + 1))
    }

    /// Every peer that is known here, and every rank of a source that rooms may still come from.
    pub fn known(&self) -> impl Iterator<Item = PeerKey> {
        let named = self.sources.values().filter_map(|s| s.ranks.as_ref()).flatten().map(|rank| rank.key);
        self.peers.keys().copied().chain(named)
    }

    /// Peers with this incarnation.
    pub fn keys_of(&self, incarnation: Incarnation) -> impl Iterator<Item = PeerKey> {
        [Direction::WeGrant, Direction::TheyGrant]
            .into_iter()
            .map(move |direction| PeerKey { incarnation, direction })
    }

    fn emit(&mut self, room: Room, kind: EventKind, released: bool, stats: RoomStats) {
        self.actions.push_back(Action::Event(Event { room, kind, released, meta: None, stats }));
    }

    fn next_delivery(&mut self, of: DeliveryFor) -> DeliveryId {
        self.next_delivery += 1;
        let id = DeliveryId(self.next_delivery);
        self.deliveries.insert(id, of);
        id
    }

    fn count_failure(&mut self, reason: &Reason) {
        self.counters.failed += 1;
        match reason.kind {
            ReasonKind::Cancelled => self.counters.cancelled += 1,
            ReasonKind::TransferTimeout => self.counters.timed_out += 1,
            _ => {}
        }
    }

    fn quarantine_full(&self) -> Option<Reason> {
        (self.quarantined > self.cfg.quarantine_limit).then(|| {
            Reason::new(
                ReasonKind::Unhealthy,
                format!(
                    "{} pages are in quarantine, more than the limit of {}: evict the peers that do not answer, or restart",
                    self.quarantined, self.cfg.quarantine_limit
                ),
            )
        })
    }
}

/// Pages of `size` tokens that hold tokens `first..end`.
pub(crate) fn pages_needed(size: u64, first: u64, end: u64) -> u64 {
    let size = size.max(1);
    (first % size).saturating_add(end.saturating_sub(first)).div_ceil(size)
}

/// Whether a list has the pages of all tokens that its group holds of these.
fn enough_pages(
    room: Room,
    group: usize,
    layout: &crate::layout::PageLayout,
    pages: usize,
    tokens: (u64, u64),
) -> Result<(), Reason> {
    let (size, held) = (u64::from(layout.page_tokens), layout.held(tokens.0..tokens.1));
    let need = pages_needed(size, held.start, held.end);
    if held.is_empty() || pages as u64 >= need {
        return Ok(());
    }
    let of = if held.start > tokens.0 {
        format!(", of which it holds the last {}", held.end - held.start)
    } else {
        String::new()
    };
    let text = format!(
        "room {room}: tokens {} to {} need {need} pages of {size} tokens in group {group}{of}, but {pages} were given",
        tokens.0, tokens.1
    );
    Err(Reason::new(ReasonKind::PageError, text))
}

/// The driver's own mistake.
fn unasked_sum(room: Room) -> Reason {
    Reason::new(ReasonKind::Internal, format!("room {room}: a sum came that was not asked for"))
}

/// A caller's timeout, or the default; bounded so that sums cannot overflow.
fn patience(asked: Option<Duration>, default: Duration) -> Duration {
    asked.unwrap_or(default).min(Duration::from_secs(365 * 24 * 3600))
}
