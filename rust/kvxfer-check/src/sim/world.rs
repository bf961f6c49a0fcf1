//! The clock, everything that is due, and the processes.

use super::SimOptions;
use super::agent::Agent;
use super::conn::Conn;
use super::engine::{Order, RoomRec};
use super::faults::{Fault, Planned};
use super::report::{Log, SimReport, percentile};
use kvxfer_fabric::EpId;
use kvxfer_fabric::sim::{NodeId, SimNet, SplitMix64};
use kvxfer_proto::node::{Config, Mover, PeerKey, Source};
use kvxfer_proto::plan::Piece;
use kvxfer_proto::{Incarnation, Room, Time};
use std::collections::{BTreeMap, BTreeSet};

/// A run without the end of a room for this long is stuck.
const STUCK_US: u64 = 60_000_000;

/// Something that is due at a process, in one of its lives.
#[derive(Debug)]
pub(super) enum Job {
    CloseEnd {
        conn: u64,
        end: usize,
    },
    HandshakeDue {
        conn: u64,
        end: usize,
    },
    Connect(PeerKey),
    Resolve(Source),
    Turn,
    /// A sum goes on.
    Sum(kvxfer_proto::node::DeliveryId),
    Copied {
        ep: EpId,
        ticket: u64,
        pieces: Vec<Piece>,
    },
    CopyFenced(PeerKey),
    ProcessEnded(Incarnation),
    Settled(PeerKey),
    Evict(Incarnation),
    Order(Order),
}

/// Something that is due.
#[derive(Debug)]
pub(super) enum What {
    At(usize, u32, Job),
    Bytes {
        conn: u64,
        to: usize,
        bytes: Vec<u8>,
    },
    Eof {
        conn: u64,
        to: usize,
    },
    Fault(Fault),
    /// A place for a room is free, after a pause if the last one failed.
    Begin,
}

/// Ranges of delays in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Delays {
    pub(super) control: (u64, u64),
    pub(super) copy: (u64, u64),
    pub(super) turn: (u64, u64),
}

/// Ranks that belong together.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    pub(super) name: String,
    pub(super) agents: Vec<usize>,
}

/// What a run counts as it goes.
#[derive(Debug, Default)]
pub(super) struct Tally {
    pub(super) succeeded: u64,
    pub(super) failed: u64,
    pub(super) cancelled: u64,
    pub(super) corrupt_bytes: u64,
    pub(super) late_writes: u64,
    pub(super) leaked_pages: u64,
    pub(super) unended: u64,
    pub(super) cancelled_mid_write: u64,
    pub(super) kills_mid_write: u64,
    pub(super) writes_landed: u64,
    pub(super) slices_unpacked: u64,
    pub(super) frames: u64,
    pub(super) sessions: u64,
    pub(super) fences: u64,
    pub(super) stale_refused: u64,
    pub(super) drains: Vec<u64>,
    pub(super) faults: BTreeMap<&'static str, u64>,
}

pub(super) struct World<'w> {
    pub(super) options: SimOptions,
    pub(super) config: Config,
    pub(super) now: u64,
    pub(super) rng: SplitMix64,
    pub(super) net: SimNet,
    pub(super) delays: Delays,
    /// The death of a process is seen by its peers, as on one host.
    pub(super) near: bool,
    /// Bytes of a staging slot, and slots, if agents have some.
    pub(super) staging: Option<(u64, u32)>,
    pub(super) agents: Vec<Agent>,
    pub(super) prefills: Vec<Engine>,
    pub(super) decodes: Vec<Engine>,
    pub(super) conns: BTreeMap<u64, Conn>,
    pub(super) next_conn: u64,
    /// Pairs of agents between whom no control bytes pass until then.
    pub(super) walls: BTreeMap<(usize, usize), u64>,
    pub(super) rooms: Vec<RoomRec>,
    pub(super) by_room: BTreeMap<Room, usize>,
    pub(super) live: BTreeSet<usize>,
    /// Places for rooms that stay empty for a moment.
    pub(super) pausing: usize,
    pub(super) planned: Vec<Planned>,
    /// Faults that have begun and are not over.
    pub(super) open_faults: u32,
    /// When the last room ended.
    pub(super) progress_at: u64,
    pub(super) tally: Tally,
    pub(super) log: Log<'w>,
    queue: BTreeMap<(u64, u64), What>,
    ticket: u64,
}

/// What [`World::assemble`] puts together.
pub(super) struct Parts<'w> {
    pub(super) options: SimOptions,
    pub(super) config: Config,
    pub(super) rng: SplitMix64,
    pub(super) net: SimNet,
    pub(super) delays: Delays,
    pub(super) near: bool,
    /// Bytes of a staging slot, and slots, if agents have some.
    pub(super) staging: Option<(u64, u32)>,
    pub(super) agents: Vec<Agent>,
    pub(super) prefills: Vec<Engine>,
    pub(super) decodes: Vec<Engine>,
    pub(super) log: Log<'w>,
}

impl<'w> World<'w> {
    pub(super) fn assemble(p: Parts<'w>) -> Self {
        Self {
            options: p.options,
            config: p.config,
            now: 0,
            rng: p.rng,
            net: p.net,
            delays: p.delays,
            near: p.near,
            staging: p.staging,
            agents: p.agents,
            prefills: p.prefills,
            decodes: p.decodes,
            conns: BTreeMap::new(),
            next_conn: 0,
            walls: BTreeMap::new(),
            rooms: Vec::new(),
            by_room: BTreeMap::new(),
            live: BTreeSet::new(),
            pausing: 0,
            planned: Vec::new(),
            open_faults: 0,
            progress_at: 0,
            tally: Tally::default(),
            log: p.log,
            queue: BTreeMap::new(),
            ticket: 0,
        }
    }

    pub(super) fn time(&self) -> Time {
        Time(self.now)
    }

    pub(super) fn draw(&mut self, range: (u64, u64)) -> u64 {
        self.rng.between(range.0, range.1)
    }

    pub(super) fn chance(&mut self, one_in: u64) -> bool {
        self.rng.between(1, one_in) == 1
    }

    pub(super) fn at(&mut self, when: u64, what: What) {
        self.ticket += 1;
        self.queue.insert((when.max(self.now), self.ticket), what);
    }

    /// Something for an agent's present life.
    pub(super) fn job(&mut self, delay: u64, agent: usize, job: Job) {
        let life = self.agents[agent].life;
        self.at(self.now + delay, What::At(agent, life, job));
    }

    pub(super) fn agent_of(&self, node: NodeId) -> usize {
        super::geometry::ix(u64::from(node.0))
    }

    /// Runs until all is over, or nothing moves any more.
    pub(super) fn run(&mut self) {
        self.plan_faults();
        for agent in 0..self.agents.len() {
            self.blank_all(agent);
        }
        self.begin_rooms();
        while !self.is_over() && self.now < self.progress_at + STUCK_US {
            if !self.step(u64::MAX) {
                break;
            }
        }
        self.conclude();
    }

    /// Lets the next thing happen, if it is due by then; `false` if there is none.
    pub(super) fn step(&mut self, until: u64) -> bool {
        let timer = (0..)
            .zip(&self.agents)
            .filter(|(_, a)| a.runs())
            .filter_map(|(i, a)| a.node.poll_timeout().map(|t| (t.0, i)))
            .min();
        let queued = self.queue.first_key_value().map(|(k, _)| k.0);
        let net = self.net.next_at_us();
        let Some(at) = [timer.map(|t| t.0), queued, net].into_iter().flatten().min() else { return false };
        if at > until {
            return false;
        }
        self.now = self.now.max(at);
        if net == Some(at) {
            self.advance_net();
            return true;
        }
        // Nothing is due there, but what is begun there now takes its time from now on.
        self.net.advance(self.now.saturating_sub(self.net.now_us()));
        if queued == Some(at) {
            if let Some((_, what)) = self.queue.pop_first() {
                self.happen(what);
            }
        } else if let Some((_, i)) = timer {
            let now = self.time();
            self.agents[i].node.handle_timeout(now);
            self.carry_out(i);
        }
        true
    }

    fn advance_net(&mut self) {
        let behind = self.now.saturating_sub(self.net.now_us());
        self.net.advance(behind);
        for landed in self.net.take_trace() {
            let (from, to) = (self.agent_of(landed.from), self.agent_of(landed.to));
            self.check_landed(from, to, landed.region, landed.offset, landed.len);
        }
        self.poll_fabrics();
    }

    /// What a process that is not there does not see, and one that is stopped sees later.
    pub(super) fn happen(&mut self, what: What) {
        let target = match &what {
            What::At(i, life, _) => Some((*i, *life)),
            What::Bytes { conn, to, .. } | What::Eof { conn, to } => {
                let Some(conn) = self.conns.get(conn) else { return };
                Some((conn.ends[*to].agent, conn.ends[*to].life))
            }
            What::Fault(_) | What::Begin => None,
        };
        if let Some((i, life)) = target {
            let a = &mut self.agents[i];
            if !a.alive || a.life != life {
                return;
            }
            if a.stopped {
                a.held.push_back(what);
                return;
            }
        }
        match what {
            What::At(i, _, job) => self.do_job(i, job),
            What::Bytes { conn, to, bytes } => self.bytes_arrived(conn, to, &bytes),
            What::Eof { conn, to } => self.eof(conn, to),
            What::Fault(fault) => self.make_fault(fault),
            What::Begin => {
                self.pausing -= 1;
                self.begin_rooms();
            }
        }
    }

    fn do_job(&mut self, i: usize, job: Job) {
        match job {
            Job::CloseEnd { conn, end } => self.close_end(conn, end),
            Job::HandshakeDue { conn, end } => self.handshake_due(conn, end),
            Job::Connect(key) => self.connect(i, key),
            Job::Resolve(source) => self.resolve(i, &source),
            Job::Turn => self.turn(i),
            Job::Sum(id) => self.sum(i, id),
            Job::Copied { ep, ticket, pieces } => self.copied(i, ep, ticket, &pieces),
            Job::CopyFenced(key) => {
                let now = self.time();
                self.agents[i].node.handle_fenced(now, key, Ok(()));
                self.carry_out(i);
            }
            Job::ProcessEnded(incarnation) => self.process_ended(i, incarnation),
            Job::Settled(key) => {
                let now = self.time();
                self.agents[i].node.handle_peer_died(now, key);
                self.carry_out(i);
            }
            Job::Evict(incarnation) => self.evict_at(i, incarnation),
            Job::Order(order) => self.order(i, order),
        }
    }

    fn is_over(&self) -> bool {
        self.live.is_empty()
            && self.rooms.len() as u64 >= u64::from(self.options.rooms)
            && self.open_faults == 0
            && self.planned.is_empty()
            && self.net.in_flight() == 0
            && self.agents.iter().all(|a| {
                let g = a.node.gauges();
                let rest = (g.inbound, g.outbound, g.granted_pages, g.deliveries, g.staging_slots);
                a.runs() && rest == (0, 0, 0, 0, 0)
            })
    }

    pub(super) fn report(&mut self) -> SimReport {
        let t = &mut self.tally;
        t.drains.sort_unstable();
        SimReport {
            seed: self.options.seed,
            rooms: self.rooms.len() as u64,
            succeeded: t.succeeded,
            failed: t.failed,
            cancelled: t.cancelled,
            unended: t.unended,
            corrupt_bytes: t.corrupt_bytes,
            leaked_pages: t.leaked_pages,
            late_writes: t.late_writes,
            cancelled_mid_write: t.cancelled_mid_write,
            kills_mid_write: t.kills_mid_write,
            drain_us_p50: percentile(&t.drains, 50),
            drain_us_p99: percentile(&t.drains, 99),
            virtual_us: self.now,
            faults: t.faults.clone(),
            writes_landed: t.writes_landed,
            slices_unpacked: t.slices_unpacked,
            frames: t.frames,
            sessions: t.sessions,
            fences: t.fences,
            stale_refused: t.stale_refused,
            violation_count: self.log.violation_count,
            violations: self.log.violations.clone(),
            digest: self.log.digest,
        }
    }

    pub(super) fn count(&mut self, fault: &'static str) {
        *self.tally.faults.entry(fault).or_default() += 1;
    }

    pub(super) fn sender_writes(&self) -> bool {
        self.options.mover == Mover::Sender
    }
}
