//! Several nodes in one process under virtual time: real bytes, sessions that die, peers that stop or restart.
//!
//! The harness is the driver that production has in `kvxfer-engine`, cut down to what decides right or wrong:
//! frames keep their order within a session only, writes land some time after they were posted, and every write
//! that lands is checked against the receiver's page book.

#![allow(dead_code, unreachable_pub)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod data;
mod packed;
pub mod rooms;
pub mod solo;
mod sums;

pub use sums::Flip;

use data::{Running, Write};
use kvxfer_proto::msg::{Frame, Msg};
use kvxfer_proto::node::{
    Action, Config, DeliveryId, Direction, Event, EventKind, Mover, Node, PeerKey, Push, RankInfo, SessionUp,
    Source,
};
use kvxfer_proto::{Incarnation, Room, SessionNo, Side, Time};
use packed::Slice;
use std::collections::{BTreeMap, BTreeSet};
use sums::Sums;

/// A small seeded generator: the same seed gives the same run.
#[derive(Clone)]
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, n: u64) -> u64 {
        if n == 0 { 0 } else { self.next() % n }
    }
}

pub struct SimNode {
    pub node: Node,
    pub name: String,
    pub incarnation: Incarnation,
    pub side: Side,
    pub page_counts: Vec<u32>,
    pub memory: Vec<Vec<u8>>,
    pub events: Vec<Event>,
    pub stopped: bool,
    held: Vec<What>,
    running: BTreeMap<DeliveryId, Running>,
    /// Staging slots' bytes.
    ring: Vec<Vec<u8>>,
    sums: Sums,
    connecting: BTreeSet<PeerKey>,
    /// Fences of ours, per peer: a write that was posted before one is dropped.
    endpoint_epoch: BTreeMap<PeerKey, u64>,
    /// The peer's fences when our endpoint was made.
    attached_epoch: BTreeMap<PeerKey, u64>,
}

#[derive(Clone)]
enum What {
    Frame { to: usize, from: PeerKey, frame: Frame },
    SessionDown { to: usize, key: PeerKey, session: SessionNo },
    Connect { from: usize, key: PeerKey },
    Resolve { from: usize, source: Source },
    Post { node: usize, incarnation: Incarnation, id: DeliveryId },
    Land(Write),
    PostSlice { node: usize, incarnation: Incarnation, id: DeliveryId },
    LandSlice(Slice),
    Unpack { node: usize, incarnation: Incarnation, id: DeliveryId },
    Sum { node: usize, incarnation: Incarnation, id: DeliveryId },
    Fenced { node: usize, key: PeerKey },
}

/// The network, the nodes and the clock.
pub struct Net {
    pub now: u64,
    pub nodes: Vec<SimNode>,
    pub mover: Mover,
    pub rng: Rng,
    /// Microseconds, at least and at most: a control frame on its way.
    pub control_us: (u64, u64),
    /// The same for a posted write, for the pause between two posts, and for a fence.
    pub data_us: (u64, u64),
    /// The same for a receiver's own copy.
    pub copy_us: (u64, u64),
    pub directory: BTreeMap<String, Vec<usize>>,
    /// What must never happen and did.
    pub violations: Vec<String>,
    pub writes_landed: u64,
    /// Sums of received bytes that came to an end, and those before which a byte is changed.
    pub sums_ended: u64,
    pub flip: Option<Flip>,
    /// Bytes of a staging slot and how many there are, where the sender writes; then two of three deliveries go packed.
    pub ring: Option<(u64, u32)>,
    /// Slices that were unpacked.
    pub unpacked: u64,
    /// Pings sent by all nodes.
    pub pings: u64,
    sessions: BTreeMap<(Incarnation, Incarnation), SessionNo>,
    /// Connections that are cut: nothing that is sent on them arrives.
    dead: BTreeSet<(Incarnation, Incarnation, SessionNo)>,
    queue: BTreeMap<(u64, u64), What>,
    ticket: u64,
    last_frame: BTreeMap<(usize, PeerKey, u64), u64>,
}

/// The value of a byte: no two rooms, tokens or places in a page are likely to share it.
pub fn page_tag(room: Room, token: u64, byte: u64) -> u8 {
    (room.get().wrapping_mul(31) ^ token.wrapping_mul(7) ^ byte) as u8
}

impl Net {
    pub fn new(seed: u64, mover: Mover) -> Self {
        Self {
            now: 1,
            nodes: Vec::new(),
            mover,
            rng: Rng(seed),
            control_us: (5, 50),
            data_us: (20, 400),
            directory: BTreeMap::new(),
            violations: Vec::new(),
            writes_landed: 0,
            sums_ended: 0,
            flip: None,
            ring: None,
            unpacked: 0,
            pings: 0,
            copy_us: (0, 0),
            sessions: BTreeMap::new(),
            dead: BTreeSet::new(),
            queue: BTreeMap::new(),
            ticket: 0,
            last_frame: BTreeMap::new(),
        }
    }

    pub fn add(&mut self, name: &str, cfg: Config, side: Side, pages: u32) -> usize {
        let counts = vec![pages; side.groups.len()];
        let node = Node::new(cfg, side.clone(), &counts).expect("valid geometry");
        let memory = side.regions(&counts).unwrap().iter().map(|r| vec![0u8; r.len as usize]).collect();
        self.nodes.push(SimNode {
            node,
            name: name.to_owned(),
            incarnation: Incarnation(1000 + self.nodes.len() as u64),
            side,
            page_counts: counts,
            memory,
            events: Vec::new(),
            stopped: false,
            held: Vec::new(),
            running: BTreeMap::new(),
            ring: Vec::new(),
            sums: Sums::default(),
            connecting: BTreeSet::new(),
            endpoint_epoch: BTreeMap::new(),
            attached_epoch: BTreeMap::new(),
        });
        self.nodes.len() - 1
    }

    pub fn time(&self) -> Time {
        Time(self.now)
    }

    fn find(&self, incarnation: Incarnation) -> Option<usize> {
        self.nodes.iter().position(|n| n.incarnation == incarnation)
    }

    fn at(&mut self, delay: u64, what: What) {
        self.ticket += 1;
        self.queue.insert((self.now + delay, self.ticket), what);
    }

    fn draw(&mut self, range: (u64, u64)) -> u64 {
        range.0 + self.rng.below(range.1 - range.0 + 1)
    }

    /// Calls a node and carries out what it wants.
    pub fn order(&mut self, i: usize, f: impl FnOnce(&mut Node, Time)) {
        let now = self.time();
        f(&mut self.nodes[i].node, now);
        self.carry_out(i);
    }

    pub fn push(&mut self, i: usize, push: Push) {
        // The engine fills its pages before it pushes them.
        self.order(i, |n, now| n.handle_push(now, push));
    }

    fn carry_out(&mut self, i: usize) {
        while let Some(action) = self.nodes[i].node.poll_action() {
            match action {
                Action::Event(e) => self.nodes[i].events.push(e),
                Action::Stage(..) | Action::TellRefused { .. } | Action::Forget(_) => {}
                Action::Resolve(source) => {
                    let d = self.draw(self.control_us);
                    self.at(d, What::Resolve { from: i, source });
                }
                Action::Connect(key) => {
                    if self.nodes[i].connecting.insert(key) {
                        let d = self.draw(self.control_us);
                        self.at(d, What::Connect { from: i, key });
                    }
                }
                Action::Send { peer, session, number, msg } => {
                    if matches!(msg, Msg::Ping(_)) {
                        self.pings += 1;
                    }
                    let me = self.nodes[i].incarnation;
                    let Some(to) = self.find(peer.incarnation) else { continue };
                    let from = PeerKey { incarnation: me, direction: opposite(peer.direction) };
                    let (initiator, acceptor) = match peer.direction {
                        Direction::WeGrant => (me, peer.incarnation),
                        Direction::TheyGrant => (peer.incarnation, me),
                    };
                    if self.dead.contains(&(initiator, acceptor, session)) {
                        continue;
                    }
                    let frame = Frame { incarnation: me, session, number, msg };
                    // In order within one direction of one session.
                    let slot = (to, from, session.0);
                    let d = self.draw(self.control_us);
                    let when = (self.now + d).max(self.last_frame.get(&slot).copied().unwrap_or(0) + 1);
                    self.last_frame.insert(slot, when);
                    self.at(when - self.now, What::Frame { to, from, frame });
                }
                Action::DropSession { peer, session, .. } => {
                    let me = self.nodes[i].incarnation;
                    let pair = match peer.direction {
                        Direction::WeGrant => (me, peer.incarnation),
                        Direction::TheyGrant => (peer.incarnation, me),
                    };
                    self.dead.insert((pair.0, pair.1, session));
                    if let Some(to) = self.find(peer.incarnation) {
                        let key = PeerKey {
                            incarnation: self.nodes[i].incarnation,
                            direction: opposite(peer.direction),
                        };
                        let d = self.draw(self.control_us);
                        self.at(d, What::SessionDown { to, key, session });
                    }
                }
                Action::Deliver(delivery) => self.start_delivery(i, delivery),
                Action::Sum(sum) => self.start_sum(i, sum),
                Action::Lent { id, slot } => self.lent(i, id, slot),
                Action::Direct(id) => self.go_direct(i, id),
                Action::Unpack(unpacking) => self.start_unpacking(i, unpacking),
                Action::Landed { id, slot, bytes } => self.landed(i, id, slot, bytes),
                Action::Abort(id) if self.stop_sum(i, id) => {}
                Action::Abort(id) => {
                    if let Some(r) = self.nodes[i].running.get_mut(&id) {
                        r.aborted = true;
                    }
                    self.check_delivery(i, id);
                }
                Action::Fence(key) => {
                    self.nodes[i].sums.retain(|_, s| s.peer() != key);
                    *self.nodes[i].endpoint_epoch.entry(key).or_default() += 1;
                    let d = self.draw(self.data_us);
                    self.at(d, What::Fenced { node: i, key });
                }
            }
        }
    }

    /// Ends every session between two nodes; frames on their way are lost or, if `late`, arrive afterwards.
    pub fn cut_session(&mut self, a: usize, b: usize, late: bool) {
        let (ia, ib) = (self.nodes[a].incarnation, self.nodes[b].incarnation);
        for (from, to, fi, ti) in [(a, b, ia, ib), (b, a, ib, ia)] {
            if let Some(&session) = self.sessions.get(&(fi, ti)) {
                self.dead.insert((fi, ti, session));
                self.queue.retain(|_, w| {
                    let of_session = matches!(w, What::Frame { to: t, frame, .. }
                        if (*t == to || *t == from) && frame.session == session
                            && (frame.incarnation == fi || frame.incarnation == ti));
                    late || !of_session
                });
                for (at, key) in [
                    (from, PeerKey { incarnation: ti, direction: Direction::WeGrant }),
                    (to, PeerKey { incarnation: fi, direction: Direction::TheyGrant }),
                ] {
                    let d = self.draw(self.control_us);
                    self.at(d, What::SessionDown { to: at, key, session });
                }
            }
        }
    }

    /// Kills a node and starts another at its address, with empty memory and a new incarnation.
    pub fn restart(&mut self, i: usize, cfg: Config) {
        let others: Vec<usize> = (0..self.nodes.len()).filter(|j| *j != i).collect();
        for j in others {
            self.cut_session(i, j, false);
        }
        let fresh = Incarnation(self.nodes[i].incarnation.0 + 100);
        let n = &mut self.nodes[i];
        n.incarnation = fresh;
        n.node = Node::new(cfg, n.side.clone(), &n.page_counts).expect("valid geometry");
        n.running.clear();
        n.sums.clear();
        n.connecting.clear();
        n.held.clear();
        n.stopped = false;
        n.endpoint_epoch.clear();
        n.attached_epoch.clear();
        n.events.clear();
    }

    pub fn stop(&mut self, i: usize) {
        self.nodes[i].stopped = true;
    }

    pub fn cont(&mut self, i: usize) {
        self.nodes[i].stopped = false;
        // Before whatever is still on its way: a session keeps its order.
        let held = std::mem::take(&mut self.nodes[i].held);
        let due = self.now.min(self.queue.keys().next().map_or(self.now, |k| k.0)).saturating_sub(1);
        for what in held {
            self.ticket += 1;
            self.queue.insert((due, self.ticket), what);
        }
    }

    fn target(&self, what: &What) -> Option<usize> {
        match what {
            What::Frame { to, .. } | What::SessionDown { to, .. } => Some(*to),
            What::Connect { from, .. } | What::Resolve { from, .. } => Some(*from),
            What::Post { node, .. }
            | What::PostSlice { node, .. }
            | What::Unpack { node, .. }
            | What::Sum { node, .. }
            | What::Fenced { node, .. } => Some(*node),
            // A posted write needs nobody's processor.
            What::Land(_) | What::LandSlice(_) => None,
        }
    }

    /// Runs until nothing but heartbeats is left, or until this time.
    pub fn run_until(&mut self, until: u64) {
        loop {
            let timer = (0..self.nodes.len())
                .filter(|i| !self.nodes[*i].stopped)
                .filter_map(|i| self.nodes[i].node.poll_timeout().map(|t| (t.0.max(self.now), i)))
                .min();
            let next = self.queue.keys().next().map(|k| k.0);
            let (at, timer_of) = match (timer, next) {
                (Some((t, i)), Some(q)) if t < q => (t, Some(i)),
                (Some((t, i)), None) => (t, Some(i)),
                (_, Some(q)) => (q, None),
                (None, None) => break,
            };
            if at > until {
                break;
            }
            self.now = self.now.max(at);
            if let Some(i) = timer_of {
                let now = self.time();
                self.nodes[i].node.handle_timeout(now);
                self.carry_out(i);
                continue;
            }
            let Some((_, what)) = self.queue.pop_first() else { break };
            if let Some(i) = self.target(&what)
                && self.nodes[i].stopped
            {
                self.nodes[i].held.push(what);
                continue;
            }
            self.happen(what);
        }
        self.now = self.now.max(until);
    }

    fn happen(&mut self, what: What) {
        let now = self.time();
        match what {
            What::Frame { to, from, frame } => {
                if let Err(e) = self.nodes[to].node.handle_frame(now, from, frame) {
                    self.violations
                        .push(format!("t={}: protocol error at {}: {e}", self.now, self.nodes[to].name));
                }
                self.carry_out(to);
            }
            What::SessionDown { to, key, session } => {
                self.nodes[to].node.handle_session_down(now, key, session);
                self.carry_out(to);
            }
            What::Resolve { from, source } => {
                let ranks = self.directory.get(&*source.address).cloned().unwrap_or_default();
                let infos = ranks
                    .iter()
                    .map(|&r| RankInfo {
                        incarnation: self.nodes[r].incarnation,
                        side: self.nodes[r].side.clone(),
                    })
                    .collect();
                self.nodes[from].node.handle_resolved(now, &source, Ok(infos));
                self.carry_out(from);
            }
            What::Connect { from, key } => self.connect(from, key),
            What::Post { node, incarnation, id } => {
                if self.nodes[node].incarnation == incarnation {
                    self.post(node, id);
                }
            }
            What::Land(write) => self.land(&write),
            What::LandSlice(slice) => self.land_slice(&slice),
            What::PostSlice { node, incarnation, id } => {
                if self.nodes[node].incarnation == incarnation {
                    self.post_slice(node, id);
                }
            }
            What::Unpack { node, incarnation, id } => {
                if self.nodes[node].incarnation == incarnation {
                    self.unpack_slice(node, id);
                }
            }
            What::Sum { node, incarnation, id } => {
                if self.nodes[node].incarnation == incarnation {
                    self.step_sum(node, id);
                }
            }
            What::Fenced { node, key } => {
                self.nodes[node].node.handle_fenced(now, key, Ok(()));
                self.carry_out(node);
            }
        }
    }

    fn connect(&mut self, from: usize, key: PeerKey) {
        self.nodes[from].connecting.remove(&key);
        if !self.nodes[from].node.wants_session(key) {
            return;
        }
        let now = self.time();
        let Some(to) = self.find(key.incarnation) else {
            // The address answers with another incarnation.
            self.nodes[from].node.handle_replaced(now, key);
            self.carry_out(from);
            return;
        };
        if self.nodes[to].stopped {
            self.nodes[from].connecting.insert(key);
            self.at(1000, What::Connect { from, key });
            return;
        }
        let session = self.nodes[from].node.next_session(key);
        let me = self.nodes[from].incarnation;
        let back = PeerKey { incarnation: me, direction: Direction::TheyGrant };
        self.sessions.insert((me, key.incarnation), session);
        let mine = self.nodes[from].node.link_state(key);
        let theirs = self.nodes[to].node.link_state(back);
        for (at, peer_key, peer, own, other) in
            [(to, back, from, theirs, mine), (from, key, to, mine, theirs)]
        {
            let up = SessionUp {
                peer: peer_key,
                session,
                received: other.0,
                generation: other.1,
                own_generation: own.1,
                side: self.nodes[peer].side.clone(),
                pages: self.nodes[peer].page_counts.clone(),
                name: self.nodes[peer].name.clone(),
            };
            self.nodes[at].node.handle_session_up(now, up);
            if self.nodes[at].node.session_of(peer_key) == Some(session) {
                let back = PeerKey {
                    incarnation: self.nodes[at].incarnation,
                    direction: opposite(peer_key.direction),
                };
                let epoch = self.fences_of(peer, back);
                self.nodes[at].attached_epoch.insert(peer_key, epoch);
                self.have_rings(at, peer_key);
                self.nodes[at].node.handle_attached(now, peer_key, self.mover);
            }
            self.carry_out(at);
        }
    }

    pub fn events_of(&self, i: usize, room: Room) -> Vec<&EventKind> {
        self.nodes[i].events.iter().filter(|e| e.room == room).map(|e| &e.kind).collect()
    }
}

pub fn opposite(d: Direction) -> Direction {
    match d {
        Direction::WeGrant => Direction::TheyGrant,
        Direction::TheyGrant => Direction::WeGrant,
    }
}
