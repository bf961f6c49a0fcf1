//! The transfer thread's loop: orders in, control channel, state machine, slices of data, events out.

mod directory;
mod effects;
mod gate;
mod peers;
mod rooms;
mod staging;
mod sums;

use crate::address::{DEFAULT_PORT, HostPort};
use crate::carriers::{Carriers, Which};
use crate::clock::now;
use crate::config::{AgentConfig, StartError};
use crate::control::{ConnId, Control, ControlEvent, Guard, Limits, TOKEN_FABRIC, TlsSetup, WatchId};
use crate::metrics::LinkUse;
use crate::primitive::lock;
use crate::queue::Order;
use crate::rooms::RoomShared;
use crate::sched::{InSlot, Scheduler};
use crate::shared::{Shared, panicked};
use crate::stats::Stats;
use directory::Directory;
use gate::Gate;
use kvxfer_fabric::cuda::AgentDevice;
use kvxfer_fabric::{Completion, LocalMemory, Piece};
use kvxfer_proto::handshake::Secret;
use kvxfer_proto::msg::{RegionShape, Role};
use kvxfer_proto::node::{DeliveryId, Flaw, Node, PeerKey, Stage};
use kvxfer_proto::{Incarnation, Reason, ReasonKind, Room, SessionNo, Time};
use peers::PeerIo;
use rustix::fd::AsFd;
use staging::{Packer, Ticket};
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

/// Orders taken in one turn.
const ORDERS_PER_TURN: usize = 64;
/// Slices that may be in flight to one peer: bounds what a drain has to wait for.
const SLICES_IN_FLIGHT: usize = 8;
/// Longest sleep while writes are in flight or pages are not ready.
const IN_FLIGHT_NAP: Duration = Duration::from_micros(50);
/// How long the thread spins, unless the configuration says.
const SPIN_US: u64 = 50;
/// A spin that loses its core for so long ends: who sleeps is run at once when it is woken, who spins waits for its turn.
const CROWDED_US: u64 = 100;
/// Statistics are published at most this often.
const STATS_EVERY_US: u64 = 2_000;
/// Connections whose time is up are looked for this often while the thread is busy.
const EXPIRE_EVERY_US: u64 = 100_000;

/// The transfer thread's state.
pub(crate) struct Driver {
    shared: Arc<Shared>,
    node: Node,
    control: Control,
    carriers: Carriers,
    /// Whose context is current on this thread; after the carriers, which use it to their end.
    device: Option<AgentDevice>,
    /// Our own regions, for checksums and staging.
    memory: LocalMemory,
    staging: Packer,
    flip_a_byte: bool,
    sched: Scheduler,
    directory: Directory,
    peers: HashMap<PeerKey, PeerIo>,
    rooms: rooms::Rooms,
    /// Pushes whose pages may not be read yet.
    gate: Gate,
    /// Dead peers whose pages come back after this time, once the fabrics were idle.
    settling: Vec<(Time, PeerKey)>,
    /// When the fabrics last had nothing to take in.
    fabrics_idle_at: Time,
    /// When this side moved the first byte of a room.
    first_write: HashMap<Room, u64>,
    /// Who is told of a flush.
    tickets: HashMap<u64, Ticket>,
    fences: HashMap<u64, PeerKey>,
    /// Why a flow that is being stopped has failed.
    failures: HashMap<DeliveryId, Reason>,
    /// Sessions that are up, by connection.
    sessions: HashMap<ConnId, (PeerKey, SessionNo)>,
    /// Sessions that were refused and may still tell the peer which rooms failed.
    refused_sessions: HashMap<ConnId, SessionNo>,
    /// Processes of this host that are watched.
    watches: HashMap<WatchId, PeerKey>,
    /// The link generation that we described on a connection under way.
    handshakes: HashMap<ConnId, u64>,
    next_ticket: u64,
    /// The session that was dialled last, of whatever peer.
    dialled: SessionNo,
    retries: BTreeSet<(Time, Retry)>,
    attempts: HashMap<Retry, u32>,
    me: Me,
    stats: Stats,
    stats_at: Time,
    expired_at: Time,
    spin: Option<Duration>,
    /// A room's end was told to callers, who have ordered nothing since.
    told: bool,
    closing: Option<Time>,
    // Reused buffers.
    control_events: Vec<ControlEvent>,
    completions: Vec<(Which, Option<PeerKey>, Completion)>,
    pieces: Vec<Piece>,
}

/// What this agent says of itself.
struct Me {
    name: String,
    engine: String,
    dp_rank: u32,
    role: Role,
    model: String,
    incarnation: Incarnation,
    process: Vec<u8>,
    regions: Vec<RegionShape>,
    pages: Vec<u32>,
}

/// Something to try again later.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
enum Retry {
    Connect(PeerKey),
    Resolve(kvxfer_proto::node::Source),
    Register,
    /// A measurement of this peer has taken too long.
    Measure(PeerKey),
}

fn random() -> Result<u64, StartError> {
    let mut bytes = [0u8; 8];
    getrandom::fill(&mut bytes).map_err(|e| StartError::Os { call: "getrandom", why: e.to_string() })?;
    Ok(u64::from_ne_bytes(bytes))
}

impl Driver {
    pub(crate) fn new(config: &AgentConfig, shared: Arc<Shared>) -> Result<Self, StartError> {
        let layout = |e: kvxfer_proto::LayoutError| StartError::Layout(e.to_string());
        let node = Node::new(config.node.clone(), config.side.clone(), &config.pages).map_err(layout)?;
        let mut shapes = config.side.regions(&config.pages).map_err(layout)?;
        if shapes.len() != config.regions.len() {
            return Err(StartError::Layout(format!(
                "the layout has {} regions (groups, layers and parts), but {} were given",
                shapes.len(),
                config.regions.len()
            )));
        }
        for (shape, span) in shapes.iter_mut().zip(&config.regions) {
            if span.len < shape.len {
                return Err(StartError::Layout(format!(
                    "group {} layer {} part {}: the memory has {} bytes, the layout needs {}",
                    shape.group, shape.layer, shape.part, span.len, shape.len
                )));
            }
            // Peers map or read all of it; what follows the last page may be more than the layout asks for.
            (shape.kind, shape.len) = (span.kind, span.len);
        }
        if config.limits.frame_bytes < Limits::LEAST_FRAME_BYTES {
            return Err(StartError::BadArgument(format!(
                "limits: frame_bytes={}: it is at least {}, and more than 4 bytes for each page of the longest room",
                config.limits.frame_bytes,
                Limits::LEAST_FRAME_BYTES
            )));
        }
        let secret = match &config.secret {
            None => None,
            Some(bytes) => {
                Some(Secret::new(bytes).ok_or_else(|| StartError::Auth("the secret is empty".to_owned()))?)
            }
        };
        let listen = HostPort::parse(&config.listen, DEFAULT_PORT).map_err(StartError::BadArgument)?;
        let incarnation = Incarnation(random()?);
        // The port first: a port that is taken must not cost a registration.
        let mut control = Control::new(
            &listen,
            shared.orders.signal.as_fd(),
            incarnation,
            Guard {
                secret,
                tls: config.tls.as_ref().map(TlsSetup::load).transpose()?,
                insecure: config.insecure,
                limits: config.limits,
            },
        )?;
        let fabric = |e: kvxfer_fabric::FabricError| StartError::Fabric(e.to_string());
        let device = AgentDevice::of(&config.regions, config.role != Role::Prefill).map_err(fabric)?;
        let carriers = Carriers::new(config)?;
        control.spare_descriptors = carriers.spare_descriptors();
        let memory = LocalMemory::new(&config.regions).map_err(fabric)?;
        let staging = Packer::new(config).map_err(StartError::BadArgument)?;
        for (i, fd) in (0u64..).zip(carriers.fds()) {
            control.watch(fd, TOKEN_FABRIC + i)?;
        }
        let directory = Directory::new(config.directory.as_deref()).map_err(StartError::BadArgument)?;
        let now = now();
        let mut driver = Self {
            spin: config.spin,
            told: false,
            sched: Scheduler::new(config.slice_bytes),
            shared,
            node,
            control,
            carriers,
            device,
            memory,
            staging,
            flip_a_byte: config.node.flaw == Some(Flaw::FlipAByte),
            directory,
            peers: HashMap::new(),
            rooms: rooms::Rooms::default(),
            gate: Gate::default(),
            settling: Vec::new(),
            fabrics_idle_at: Time(0),
            first_write: HashMap::new(),
            tickets: HashMap::new(),
            fences: HashMap::new(),
            failures: HashMap::new(),
            sessions: HashMap::new(),
            refused_sessions: HashMap::new(),
            watches: HashMap::new(),
            handshakes: HashMap::new(),
            next_ticket: 0,
            dialled: SessionNo(0),
            retries: BTreeSet::new(),
            attempts: HashMap::new(),
            me: Me {
                name: config.name.clone(),
                engine: config.engine.clone(),
                dp_rank: config.dp_rank,
                role: config.role,
                model: config.model.clone(),
                incarnation,
                process: kvxfer_fabric::process::identity(),
                regions: shapes,
                pages: config.pages.clone(),
            },
            stats: Stats { link: LinkUse::new(now), ..Stats::default() },
            stats_at: now,
            expired_at: now,
            closing: None,
            control_events: Vec::new(),
            completions: Vec::new(),
            pieces: Vec::with_capacity(1024),
        };
        driver.register(now);
        Ok(driver)
    }

    pub(crate) fn address(&self) -> String {
        self.control.address().to_string()
    }

    pub(crate) fn fabrics(&self) -> String {
        self.carriers.names()
    }

    /// Runs until the agent is closed.
    pub(crate) fn run(&mut self) {
        let mut idle_since: Option<Time> = None;
        loop {
            let now = now();
            let busy = self.turn(now, Some(Duration::ZERO));
            if self.is_over(now) {
                return;
            }
            if busy {
                idle_since = None;
                continue;
            }
            let since = *idle_since.get_or_insert(now);
            if now.since_us(since) < self.spin_us() {
                // Whoever else wants this core has something to do: a caller, its event loop, the peer's thread.
                rustix::thread::sched_yield();
                if self::now().since_us(now) < CROWDED_US {
                    continue;
                }
            }
            self.sleep(now);
            if !self.gate.is_waiting() {
                idle_since = None;
            }
            if self.shared.orders.was_woken_here() {
                // The caller goes on first: it must not wait for what it has ordered.
                rustix::thread::sched_yield();
            }
        }
    }

    /// How long to spin before a sleep. Where the end of the last room was just told, nobody is about to answer, and who was
    /// told may need this core.
    fn spin_us(&self) -> u64 {
        match self.spin {
            Some(spin) => u64::try_from(spin.as_micros()).unwrap_or(u64::MAX),
            None if self.told && !self.rooms.any_goes_on() => 0,
            None => SPIN_US,
        }
    }

    /// One round of everything. Returns whether there was anything to do.
    fn turn(&mut self, now: Time, wait: Option<Duration>) -> bool {
        let mut busy = self.take_orders(now);
        let mut events = std::mem::take(&mut self.control_events);
        busy |= self.control.turn(wait, &mut events);
        for event in events.drain(..) {
            busy = true;
            self.control_event(now, event);
        }
        busy |= self.progress_fabrics(now);
        busy |= self.gate.check(now, &mut self.node);
        if self.node.poll_timeout().is_some_and(|t| t <= now) {
            self.node.handle_timeout(now);
        }
        self.run_retries(now);
        if now.since_us(self.expired_at) >= EXPIRE_EVERY_US {
            // Here too: a thread that never sleeps must not keep strangers for ever.
            self.expired_at = now;
            self.control.expire(now);
        }
        busy |= self.carry_out(now);
        if self.run_slice(now) {
            busy = true;
            // What was copied at once is said at once.
            self.carry_out(now);
        }
        // Whatever this turn queued goes out with it; what closes may give the node more to say.
        loop {
            self.control.settle(&mut events);
            if events.is_empty() {
                break;
            }
            busy = true;
            for event in events.drain(..) {
                self.control_event(now, event);
            }
            self.carry_out(now);
        }
        self.control_events = events;
        self.stats.link.tick(now, !self.tickets.is_empty());
        if now.since_us(self.stats_at) >= STATS_EVERY_US {
            self.publish_stats(now);
        }
        busy
    }

    /// Sleeps until something happens or a timer is due.
    fn sleep(&mut self, now: Time) {
        self.publish_stats(now);
        let handshakes = self.control.expire(now);
        if self.control.is_unsettled() {
            return;
        }
        let retry = self.retries.first().map(|(at, _)| *at);
        let settled = self.settling.iter().map(|(at, _)| *at).min();
        let timers = [self.node.poll_timeout(), handshakes, retry, settled, self.closing];
        let next = timers.into_iter().flatten().min();
        let mut wait = next.map(|t| Duration::from_micros(t.since_us(now)));
        if !self.tickets.is_empty() || self.gate.is_waiting() || self.staging.is_probing() {
            // Not every transport has an event for the end of a send (UCX's shared memory has none), nor has a GPU's.
            wait = Some(wait.map_or(IN_FLIGHT_NAP, |w| w.min(IN_FLIGHT_NAP)));
        }
        if !self.carriers.arm() {
            return;
        }
        let mut events = std::mem::take(&mut self.control_events);
        let control = &mut self.control;
        let slept = self.shared.orders.sleep(self.closing.is_some(), || {
            control.turn(wait, &mut events);
        });
        self.stats.sleeps += u64::from(slept);
        let now = self::now();
        // They were published before the sleep: what has woken us comes first.
        self.stats_at = now;
        self.told = false;
        for event in events.drain(..) {
            self.control_event(now, event);
        }
        self.control_events = events;
    }

    fn take_orders(&mut self, now: Time) -> bool {
        let mut any = false;
        for _ in 0..ORDERS_PER_TURN {
            let Some(order) = self.shared.orders.take() else { break };
            any = true;
            self.told = false;
            match order {
                Order::Expect(expect, room) => {
                    self.rooms.insert(expect.room, room);
                    self.node.handle_expect(now, *expect);
                }
                Order::Open(room, bootstrap, waiting, shared) => {
                    self.node.handle_anew(room);
                    self.rooms.insert(room, shared);
                    self.node.handle_open(now, room, bootstrap, waiting);
                }
                Order::Push(push, shared, ready) => {
                    if self.rooms.contains_key(&push.room) {
                        // Its end may have come in this very turn.
                        self.carry_out(now);
                    }
                    // A room that is over here was over before this push: its caller has had, or will have, the one
                    // terminal event that covers these pages too. To the state machine it would be a new room.
                    if shared.end().is_some() {
                        continue;
                    }
                    if self.rooms.insert(push.room, shared).is_none() {
                        self.node.handle_anew(push.room);
                    }
                    if let Some(signal) = ready {
                        self.gate.add(push.room, push.id, signal);
                    }
                    self.node.handle_push(now, *push);
                }
                // What is meant for a room that is over would meet its number's next life, whose grant may be here already,
                // or leave a tombstone for it.
                Order::Retract(room, _, shared) | Order::Cancel(room, shared)
                    if !self.is_same(now, room, &shared) => {}
                Order::Retract(room, push, _) => self.node.handle_retract(now, room, push),
                Order::Cancel(room, _) => {
                    let reason = Reason::new(
                        ReasonKind::Cancelled,
                        format!("room {room} was cancelled by {}", self.me.name),
                    );
                    self.node.handle_cancel(now, room, reason);
                }
                Order::Evict(name) => self.evict(now, &name),
            }
        }
        any
    }

    /// Whether this room, and no later one of its number, is still going on.
    fn is_same(&mut self, now: Time, room: Room, shared: &Arc<RoomShared>) -> bool {
        // Its end may have come in this very turn.
        self.carry_out(now);
        shared.end().is_none() && self.rooms.get(&room).is_some_and(|r| Arc::ptr_eq(r, shared))
    }

    fn progress_fabrics(&mut self, now: Time) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        let mut busy = self.carriers.progress(&mut completions);
        for (which, key, c) in completions.drain(..) {
            busy = true;
            self.completion(now, which, key, c);
        }
        self.completions = completions;
        if !busy {
            self.fabrics_idle_at = now;
        }
        self.settle_dead(now);
        busy
    }

    /// Posts one slice of one room.
    fn run_slice(&mut self, now: Time) -> bool {
        if !self.sched.has_work() {
            return false;
        }
        let mut pieces = std::mem::take(&mut self.pieces);
        let (peers, staging) = (&self.peers, &self.staging);
        let slice = self.sched.next_slice(&mut pieces, |key, packed| {
            peers.get(&key).is_some_and(|p| p.endpoint.is_some() && p.in_flight < SLICES_IN_FLIGHT)
                && (!packed || staging.has_buffer(key))
        });
        let posted = slice.is_some();
        if let Some(slice) = slice.filter(|s| s.sum.is_some()) {
            self.sum_slice(now, slice);
        } else if let Some(slice) = slice {
            self.first_write.entry(slice.room).or_insert(now.0);
            match slice.slot {
                None => self.post_slice(now, slice, &pieces),
                Some(InSlot::Pack(slot, number)) => self.pack_slice(now, slice, (slot, number), &pieces),
                Some(InSlot::Unpack(slot, bytes)) => self.unpack_slice(now, slice, slot, bytes, &pieces),
            }
        }
        self.pieces = pieces;
        posted
    }

    /// What the tables hold that live and die with rooms, deliveries and connections.
    fn entries(&self) -> usize {
        self.rooms.len()
            + self.gate.len()
            + self.first_write.len()
            + self.sched.len()
            + self.sched.rooms()
            + self.tickets.len()
            + self.fences.len()
            + self.failures.len()
            + self.sessions.len()
            + self.refused_sessions.len()
            + self.watches.len()
            + self.handshakes.len()
            + self.retries.len()
            + self.attempts.len()
            + self.peers.len()
            + self.settling.len()
            + self.directory.len()
            + self.carriers.len()
            + self.staging.entries()
    }

    fn publish_stats(&mut self, now: Time) {
        self.stats_at = now;
        self.stats.counters = self.node.counters();
        self.stats.gauges = self.node.gauges();
        self.stats.rooms = self.rooms.counts();
        self.stats.link.roll(now, self.stats.moved_bytes);
        self.stats.driver_entries = self.entries() as u64;
        self.stats.data_syscalls = self.carriers.data_syscalls();
        self.stats.connections = self.control.len() as u64;
        self.stats.frames_sent = self.control.frames_sent;
        self.stats.frames_received = self.control.frames_received;
        self.stats.bad_connections = self.control.bad_connections;
        self.stats.limited_connections = self.control.limited_connections;
        self.stats.slow_connections = self.control.slow_connections;
        self.stats.auth_failures = self.control.auth_failures;
        self.shared.stats.try_set(&self.stats);
    }

    /// Closing: cancel all, wait for drains and fences while the caller wants to, report what is left.
    fn is_over(&mut self, now: Time) -> bool {
        if !self.shared.orders.is_closed() {
            return false;
        }
        let deadline = self.closing.unwrap_or_else(|| {
            self.node.handle_close(now);
            now.after(self.shared.stats.close_timeout())
        });
        self.closing = Some(deadline);
        if !(self.node.is_quiet() && self.sched.len() == 0) && now < deadline {
            return false;
        }
        while self.take_orders(now) {}
        self.carry_out(now);
        self.end_sessions();
        self.leave();
        self.fail_waiting_rooms(now, &Reason::new(ReasonKind::Closed, "the agent was closed"));
        self.publish_stats(now);
        true
    }

    /// What peers may still use is named to the caller, who keeps it; the staging ring is ours to keep.
    fn leave(&mut self) {
        let left = self.node.unreleased();
        if !left.is_empty() || self.node.gauges().staging_slots > 0 {
            self.staging.keep_ring();
        }
        *lock(&self.shared.unreleased) = left;
    }

    /// Nobody may wait for a room of a closed agent.
    fn fail_waiting_rooms(&mut self, now: Time, reason: &Reason) {
        for (room, shared) in self.rooms.drain() {
            self.shared.fail_room(room, &shared, reason, false, now.0);
        }
    }

    /// The thread panicked: what its rooms' pages are still used for is unknown, so all of them count as held.
    pub(crate) fn died(&mut self) {
        // First, since the state that has just panicked may do so again; nobody may wait for ever.
        self.fail_waiting_rooms(now(), &panicked());
        self.leave();
    }

    fn stage_changed(&mut self, room: Room, stage: Stage) {
        if stage < Stage::Success {
            self.rooms.set_stage(room, stage);
        }
    }

    /// Tries again later, each time twice as late, up to a second.
    fn retry(&mut self, now: Time, what: Retry) {
        let attempt = self.attempts.entry(what.clone()).or_insert(0);
        let ms = 5u64 << (*attempt).min(8);
        *attempt = attempt.saturating_add(1);
        let when = now.after(Duration::from_millis(ms.min(1000)));
        self.retries.insert((when, what));
    }

    fn run_retries(&mut self, now: Time) {
        while let Some((at, _)) = self.retries.first() {
            if *at > now {
                return;
            }
            let Some((_, what)) = self.retries.pop_first() else { return };
            match what {
                Retry::Connect(key) => self.connect(now, key),
                Retry::Resolve(source) => self.resolve(now, &source),
                Retry::Register => self.register(now),
                Retry::Measure(key) => self.stop_measuring(now, key),
            }
        }
    }
}
