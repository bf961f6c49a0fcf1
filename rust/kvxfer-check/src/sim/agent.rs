//! One process: a production node, and the driver round it that production has in `kvxfer-engine`.

use super::engine::Owner;
use super::geometry::{Geometry, ix};
use super::lane::{InSlot, Lane, SLICES_IN_FLIGHT, Slice, Work};
use super::packing::Packing;
use super::sums::Sums;
use super::world::{Job, What, World};
use kvxfer_fabric::sim::SimFabric;
use kvxfer_fabric::{Completion, EndRole, EpId, Fabric, FabricError, Piece};
use kvxfer_proto::msg::{Describe, Frame};
use kvxfer_proto::node::{
    Action, Config, Delivery, DeliveryEnd, DeliveryId, Direction, Node, PeerKey, Source,
};
use kvxfer_proto::plan::{Cursor, Template};
use kvxfer_proto::{Incarnation, LayoutError, Reason, ReasonKind, Room, SessionNo, Side, Time};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// An endpoint that can carry bytes, and the plan for the two shards.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) ep: EpId,
    pub(super) template: Arc<Template>,
}

/// What the driver knows of a peer.
#[derive(Debug, Default)]
pub(super) struct PeerIo {
    pub(super) address: Option<usize>,
    pub(super) dialling: Option<u64>,
    pub(super) tries: u32,
    pub(super) dialled_at: u64,
    pub(super) quick: u32,
    pub(super) not_before: u64,
    pub(super) conn: Option<(u64, SessionNo)>,
    pub(super) describe: Option<Box<Describe>>,
    pub(super) endpoint: Option<Endpoint>,
    pub(super) attaching: Option<EpId>,
    pub(super) watched: bool,
    pub(super) answered_at: Option<u64>,
    pub(super) in_flight: usize,
}

impl PeerIo {
    pub(super) fn take_endpoint(&mut self) -> Option<EpId> {
        let made = self.endpoint.take().map(|e| e.ep);
        made.or_else(|| self.attaching.take())
    }
}

/// A receiver's own copies out of one peer's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct CopyEnd {
    pub(super) agent: usize,
    pub(super) life: u32,
}

/// One process.
#[derive(Debug)]
pub(super) struct Agent {
    pub(super) name: String,
    pub(super) side: Side,
    pub(super) geo: Geometry,
    pub(super) decode: bool,
    /// Index among the engines of its role.
    pub(super) engine: usize,
    pub(super) life: u32,
    pub(super) alive: bool,
    pub(super) stopped: bool,
    pub(super) incarnation: Incarnation,
    pub(super) node: Node,
    pub(super) fabric: SimFabric,
    pub(super) lane: Lane,
    pub(super) turn_due: bool,
    pub(super) sums: Sums,
    pub(super) peers: BTreeMap<PeerKey, PeerIo>,
    pub(super) endpoints: BTreeMap<EpId, PeerKey>,
    pub(super) copies: BTreeMap<EpId, CopyEnd>,
    pub(super) copies_until: u64,
    pub(super) sessions: BTreeMap<(PeerKey, SessionNo), (u64, usize)>,
    pub(super) resolve_tries: BTreeMap<Source, u32>,
    next_ep: u32,
    pub(super) packing: Packing,
    /// Incarnations of the processes that were here before.
    pub(super) past: Vec<Incarnation>,
    pub(super) tickets: BTreeMap<u64, (DeliveryId, PeerKey)>,
    fences: BTreeMap<u64, PeerKey>,
    next_ticket: u64,
    failures: BTreeMap<DeliveryId, Reason>,
    /// What came while it was stopped.
    pub(super) held: VecDeque<What>,
    // ---- its engine ----
    /// Free pages of each group, the next one to be granted last.
    pub(super) free: Vec<Vec<u32>>,
    pub(super) owner: Vec<Vec<Option<Owner>>>,
    /// How often each page has been blanked.
    pub(super) epoch: Vec<Vec<u64>>,
    /// Who had a page last, for messages.
    pub(super) last: Vec<Vec<Option<(Room, u64)>>>,
    pub(super) next_push: u64,
    /// Rooms that a cancel or a failure has voided here.
    pub(super) voided: BTreeSet<Room>,
}

impl Agent {
    pub(super) fn new(
        name: String,
        (side, geo): (Side, Geometry),
        decode: bool,
        engine: usize,
        config: &Config,
        incarnation: Incarnation,
        fabric: SimFabric,
    ) -> Result<Self, LayoutError> {
        let node = Node::new(config.clone(), side.clone(), &geo.counts)?;
        let counts: Vec<usize> = geo.counts.iter().map(|n| ix(u64::from(*n))).collect();
        Ok(Self {
            name,
            side,
            decode,
            engine,
            life: 0,
            alive: true,
            stopped: false,
            incarnation,
            node,
            fabric,
            lane: Lane::default(),
            turn_due: false,
            sums: Sums::new(),
            peers: BTreeMap::new(),
            endpoints: BTreeMap::new(),
            copies: BTreeMap::new(),
            copies_until: 0,
            sessions: BTreeMap::new(),
            resolve_tries: BTreeMap::new(),
            next_ep: 0,
            packing: Packing::default(),
            past: Vec::new(),
            tickets: BTreeMap::new(),
            fences: BTreeMap::new(),
            next_ticket: 0,
            failures: BTreeMap::new(),
            held: VecDeque::new(),
            free: geo.counts.iter().map(|n| (0..*n).collect()).collect(),
            owner: counts.iter().map(|n| vec![None; *n]).collect(),
            epoch: counts.iter().map(|n| vec![0; *n]).collect(),
            last: counts.iter().map(|n| vec![None; *n]).collect(),
            next_push: 1,
            voided: BTreeSet::new(),
            geo,
        })
    }

    /// Whether it lives and is not stopped.
    pub(super) fn runs(&self) -> bool {
        self.alive && !self.stopped
    }

    pub(super) fn fresh_ticket(&mut self) -> u64 {
        self.next_ticket += 1;
        self.next_ticket
    }
}

impl World<'_> {
    /// Does everything that a node wants by now.
    pub(super) fn carry_out(&mut self, i: usize) {
        while let Some(action) = self.agents[i].node.poll_action() {
            match action {
                Action::Send { peer, session, number, msg } => {
                    let a = &self.agents[i];
                    let conn = a.peers.get(&peer).and_then(|io| io.conn).filter(|(_, s)| *s == session);
                    if let Some((conn, _)) = conn {
                        let frame = Frame { incarnation: a.incarnation, session, number, msg };
                        self.send_frame(i, conn, &frame);
                    }
                }
                Action::Event(event) => self.on_event(i, &event),
                Action::Stage(..) | Action::TellRefused { .. } => {}
                Action::Lent { id, slot } => {
                    self.agents[i].lane.has_slot(id, slot, 0);
                    self.want_turn(i);
                }
                Action::Direct(id) => {
                    self.agents[i].lane.direct(id);
                    self.want_turn(i);
                }
                Action::Landed { id, slot, bytes } => {
                    self.agents[i].lane.has_slot(id, slot, bytes);
                    self.want_turn(i);
                }
                Action::Unpack(unpacking) => self.begin_unpacking(i, unpacking),
                Action::Deliver(delivery) => self.deliver(i, delivery),
                Action::Sum(sum) => self.begin_sum(i, sum),
                Action::Abort(id) if self.agents[i].stop_sum(id) => {
                    let now = self.time();
                    self.agents[i].node.handle_delivery(now, id, DeliveryEnd::Aborted);
                }
                Action::Abort(id) => {
                    let end = self.agents[i].lane.abort(id);
                    self.flow_over(i, id, end);
                }
                Action::Resolve(source) => {
                    let delay = self.draw(self.delays.control);
                    self.job(2 * delay, i, Job::Resolve(source));
                }
                Action::Connect(key) => self.connect(i, key),
                Action::DropSession { peer, session, reason } => self.drop_session(i, peer, session, &reason),
                Action::Fence(key) => self.fence(i, key),
                Action::Forget(key) => self.forget(i, key),
            }
        }
    }

    fn deliver(&mut self, i: usize, delivery: Delivery) {
        let (now, key, id) = (self.time(), delivery.peer, delivery.id);
        let a = &mut self.agents[i];
        let io = a.peers.get(&key);
        let ready = io.and_then(|io| Some((io.endpoint.as_ref()?.template.clone(), io.describe.as_ref()?)));
        let Some((template, describe)) = ready else {
            a.node.handle_delivery(now, id, DeliveryEnd::Aborted);
            return;
        };
        let (src, dst) = match key.direction {
            Direction::WeGrant => (&describe.pages, &a.geo.counts),
            Direction::TheyGrant => (&a.geo.counts, &describe.pages),
        };
        match Cursor::new(template, delivery.request, src, dst) {
            Ok(cursor) => {
                let work = self.packs(i, id, key, &cursor).map_or(Work::Move, Work::Pack);
                let a = &mut self.agents[i];
                a.lane.add(id, key, delivery.room, cursor, work);
                let end = a.lane.take_end(id);
                self.flow_over(i, id, end);
                self.want_turn(i);
            }
            Err(e) => {
                let name = &a.name;
                self.log.violation(
                    self.now,
                    format_args!("{name} cannot plan a delivery of room {}: {e}", delivery.room),
                );
                let reason = Reason::new(ReasonKind::PageError, e.to_string());
                a.node.handle_delivery(now, id, DeliveryEnd::Failed(reason));
            }
        }
    }

    pub(super) fn flow_over(&mut self, i: usize, id: DeliveryId, end: Option<DeliveryEnd>) {
        let Some(end) = end else { return };
        let now = self.time();
        let a = &mut self.agents[i];
        a.packing.over(id);
        let end = match (end, a.failures.remove(&id)) {
            (DeliveryEnd::Aborted, Some(reason)) => DeliveryEnd::Failed(reason),
            (end, _) => end,
        };
        a.node.handle_delivery(now, id, end);
    }

    /// Lets the transfer thread have a turn, if it has work.
    pub(super) fn want_turn(&mut self, i: usize) {
        if self.agents[i].lane.has_work() && !std::mem::replace(&mut self.agents[i].turn_due, true) {
            let delay = self.draw(self.delays.turn);
            self.job(delay, i, Job::Turn);
        }
    }

    /// Posts one slice of one room and asks for its flush.
    pub(super) fn turn(&mut self, i: usize) {
        let a = &mut self.agents[i];
        a.turn_due = false;
        let (peers, packing) = (&a.peers, &a.packing);
        let slice = a.lane.next_slice(|key, packed| {
            peers.get(&key).is_some_and(|p| p.endpoint.is_some() && p.in_flight < SLICES_IN_FLIGHT)
                && (!packed || packing.has_buffer(key))
        });
        if let Some(slice) = slice {
            match slice.slot {
                None => {
                    let Slice { id, peer, room, pieces, .. } = slice;
                    self.post(i, (id, peer, room), pieces);
                }
                Some(InSlot::Pack(slot, number)) => self.pack(i, &slice, slot, number),
                Some(InSlot::Unpack(slot, bytes)) => self.unpack(i, &slice, slot, bytes),
            }
            self.carry_out(i);
            self.want_turn(i);
        }
    }

    fn post(&mut self, i: usize, (id, key, room): (DeliveryId, PeerKey, Room), pieces: Vec<Piece>) {
        let now = self.time();
        let a = &mut self.agents[i];
        let Some(ep) = a.peers.get(&key).and_then(|io| io.endpoint.as_ref()).map(|e| e.ep) else {
            a.lane.drop_flow(id);
            a.node.handle_delivery(now, id, DeliveryEnd::Aborted);
            return;
        };
        let ticket = a.fresh_ticket();
        self.log.line(
            self.now,
            format_args!("{} posts {} pieces of room {room} (ticket {ticket})", a.name, pieces.len()),
        );
        let posted = if a.copies.contains_key(&ep) {
            Ok(())
        } else {
            a.fabric.post(ep, &pieces).and_then(|()| a.fabric.flush(ep, ticket))
        };
        match posted {
            Ok(()) => {
                a.tickets.insert(ticket, (id, key));
                if let Some(io) = a.peers.get_mut(&key) {
                    io.in_flight += 1;
                }
                if a.copies.contains_key(&ep) {
                    // One thread copies, one slice after the other.
                    let took = self.draw(self.delays.copy);
                    let a = &mut self.agents[i];
                    a.copies_until = a.copies_until.max(self.now) + took;
                    let delay = a.copies_until - self.now;
                    self.job(delay, i, Job::Copied { ep, ticket, pieces });
                }
            }
            Err(e @ FabricError::OutOfBounds { .. }) => {
                let name = a.name.clone();
                self.log.violation(self.now, format_args!("{name} posts room {room} out of bounds: {e}"));
                let a = &mut self.agents[i];
                a.failures.insert(id, Reason::new(ReasonKind::PageError, e.to_string()));
                a.lane.abort(id);
                let end = a.lane.flushed(id);
                self.flow_over(i, id, end);
            }
            Err(e) => self.endpoint_broke(i, key, &e),
        }
    }

    /// The receiver's thread has copied a slice, if nothing stopped it and the source's process is there.
    pub(super) fn copied(&mut self, i: usize, ep: EpId, ticket: u64, pieces: &[Piece]) {
        let Some(from) = self.agents[i].copies.get(&ep).copied() else { return };
        let source = &self.agents[from.agent];
        let result = if source.alive && source.life == from.life {
            for p in pieces {
                let (src, dst) = (source.fabric.node(), self.agents[i].fabric.node());
                let bytes = self.net.read(src, p.src_region, p.src_off, p.len).unwrap_or_default();
                if let Err(e) = self.net.write(dst, p.dst_region, p.dst_off, &bytes) {
                    self.log.violation(self.now, format_args!("a copy out of bounds: {e}"));
                }
            }
            for p in pieces {
                self.check_landed(from.agent, i, p.dst_region, p.dst_off, p.len);
            }
            Ok(())
        } else {
            Err(FabricError::Closed("the source's process is gone".to_owned()))
        };
        self.flushed(i, ticket, result);
        self.carry_out(i);
    }

    fn flushed(&mut self, i: usize, ticket: u64, result: Result<(), FabricError>) {
        let receiver_copies = !self.sender_writes();
        let a = &mut self.agents[i];
        let Some((id, key)) = a.tickets.remove(&ticket) else { return };
        if let Some(io) = a.peers.get_mut(&key) {
            io.in_flight = io.in_flight.saturating_sub(1);
        }
        if let Err(e) = result {
            if !receiver_copies {
                self.endpoint_broke(i, key, &e);
                return;
            }
            a.failures.insert(id, Reason::new(ReasonKind::FabricError, e.to_string()));
            a.lane.abort(id);
        }
        let now = Time(self.now);
        a.packed(now, id, ticket);
        let end = a.lane.flushed(id);
        self.flow_over(i, id, end);
        self.want_turn(i);
    }

    /// Nothing from this peer may land any more.
    fn fence(&mut self, i: usize, key: PeerKey) {
        let now = self.time();
        let a = &mut self.agents[i];
        self.log.line(self.now, format_args!("{} fences {key:?}", a.name));
        a.lane.drop_peer(key);
        a.sums.retain(|_, s| s.peer != key);
        a.tickets.retain(|_, (_, k)| *k != key);
        a.packing.forget_tickets_of(key);
        let Some(ep) = a.peers.get_mut(&key).and_then(|io| {
            io.in_flight = 0;
            io.take_endpoint()
        }) else {
            a.node.handle_fenced(now, key, Ok(()));
            return;
        };
        if self.options.mover == kvxfer_proto::node::Mover::Receiver {
            a.copies.remove(&ep);
            a.endpoints.remove(&ep);
            let delay = self.draw((1, 100));
            self.job(delay, i, Job::CopyFenced(key));
            return;
        }
        let ticket = a.fresh_ticket();
        match a.fabric.fence(ep, ticket) {
            Ok(()) => {
                a.fences.insert(ticket, key);
            }
            Err(e) => self.fence_result(i, key, Err(e)),
        }
    }

    fn fence_result(&mut self, i: usize, key: PeerKey, result: Result<(), FabricError>) {
        let now = self.time();
        self.log.line(self.now, format_args!("{} has fenced {key:?}: {result:?}", self.agents[i].name));
        self.agents[i].packing.free_buffers_of(key);
        let result = match key.direction {
            Direction::WeGrant => result.map_err(|e| Reason::new(ReasonKind::FabricError, e.to_string())),
            // Our own writes ended when our endpoint was closed, whatever the transport promises its target.
            Direction::TheyGrant => Ok(()),
        };
        self.agents[i].node.handle_fenced(now, key, result);
    }

    fn forget(&mut self, i: usize, key: PeerKey) {
        let a = &mut self.agents[i];
        let Some(mut io) = a.peers.remove(&key) else { return };
        a.packing.forget_tickets_of(key);
        a.packing.free_buffers_of(key);
        if let Some(ep) = io.take_endpoint() {
            self.disconnect(i, ep);
        }
    }

    pub(super) fn disconnect(&mut self, i: usize, ep: EpId) {
        let a = &mut self.agents[i];
        a.endpoints.remove(&ep);
        if a.copies.remove(&ep).is_none() {
            a.fabric.disconnect(ep);
        }
    }

    /// Starts to make an endpoint to a peer that has described itself.
    pub(super) fn open_endpoint(&mut self, i: usize, key: PeerKey) -> Result<EpId, FabricError> {
        let receiver_copies = !self.sender_writes();
        let peer = self.agents.iter().position(|a| a.alive && a.incarnation == key.incarnation);
        let peer = peer.map(|p| CopyEnd { agent: p, life: self.agents[p].life });
        let a = &mut self.agents[i];
        let describe = a.peers.get(&key).and_then(|io| io.describe.as_ref());
        let Some(describe) = describe else { return Err(FabricError::NoEndpoint(0)) };
        a.next_ep += 1;
        let ep = EpId(a.next_ep);
        if receiver_copies {
            let from = peer.ok_or_else(|| FabricError::Closed("its process is gone".to_owned()))?;
            a.copies.insert(ep, from);
        } else {
            let mut lens: Vec<u64> = describe.regions.iter().map(|r| r.len).collect();
            lens.extend(super::packing::region_lens(self.staging));
            let blob = describe.fabrics.first().map(|f| f.blob.clone()).unwrap_or_default();
            let role = match key.direction {
                Direction::TheyGrant => EndRole::Active,
                Direction::WeGrant => EndRole::Passive,
            };
            a.fabric.connect(ep, role, &blob, &lens)?;
        }
        a.endpoints.insert(ep, key);
        Ok(ep)
    }

    /// Sees what the fabric has to say at every process that runs.
    pub(super) fn poll_fabrics(&mut self) {
        let mut out = Vec::new();
        for i in 0..self.agents.len() {
            let a = &mut self.agents[i];
            if !a.runs() || !a.fabric.progress(&mut out) {
                continue;
            }
            for c in out.drain(..) {
                self.completion(i, c);
            }
            self.carry_out(i);
            self.want_turn(i);
        }
    }

    fn completion(&mut self, i: usize, c: Completion) {
        let key_of = |w: &Self, ep: EpId| w.agents[i].endpoints.get(&ep).copied();
        match c {
            Completion::Flushed { ticket, result, .. } => self.flushed(i, ticket, result),
            Completion::Fenced { ep, ticket, result } => {
                self.agents[i].endpoints.remove(&ep);
                if let Some(key) = self.agents[i].fences.remove(&ticket) {
                    self.fence_result(i, key, result);
                }
            }
            Completion::Connected { ep, .. } => {
                if let Some(key) = key_of(self, ep).filter(|k| k.direction == Direction::TheyGrant) {
                    self.endpoint_up(i, key, ep);
                }
            }
            Completion::ConnectFailed { ep, error } => {
                if let Some(key) = key_of(self, ep) {
                    self.agents[i].endpoints.remove(&ep);
                    self.connect_failed(i, key, ep, &error);
                }
            }
            Completion::PeerDied { ep } => {
                if let Some(key) = key_of(self, ep) {
                    self.process_ended(i, key.incarnation);
                }
            }
            Completion::Broken { ep, error } => {
                if let Some(key) = key_of(self, ep) {
                    self.endpoint_broke(i, key, &error);
                }
            }
        }
    }

    pub(super) fn endpoint_broke(&mut self, i: usize, key: PeerKey, error: &FabricError) {
        let now = self.time();
        let reason = Reason::new(ReasonKind::PeerLost, format!("the peer is lost: {error}"));
        self.agents[i].node.handle_fabric_broken(now, key, &reason);
    }
}
