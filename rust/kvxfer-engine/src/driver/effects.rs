//! Carrying out what the state machine wants, and telling it what came of it.

use super::peers::Endpoint;
use super::staging::Ticket;
use super::{Driver, Retry};
use crate::carriers::{Which, mover};
use crate::clock;
use crate::rooms::AgentEvent;
use crate::sched::{FlowEnd, Slice};
use kvxfer_fabric::{FabricError, Piece};
use kvxfer_proto::msg::Frame;
use kvxfer_proto::node::{
    Action, Delivery, DeliveryEnd, DeliveryId, Direction, Event, EventKind, Mover, PeerKey, Stage,
};
use kvxfer_proto::plan::Cursor;
use kvxfer_proto::{Reason, ReasonKind, Time};

impl Driver {
    /// Does everything that the node wants by now. Returns whether there was anything.
    pub(super) fn carry_out(&mut self, now: Time) -> bool {
        let mut any = false;
        while let Some(action) = self.node.poll_action() {
            any = true;
            match action {
                Action::Send { peer, session, number, msg } => {
                    let conn = self.peers.get(&peer).and_then(|io| io.conn);
                    if let Some((conn, _)) = conn.filter(|(_, s)| *s == session) {
                        let frame = Frame { incarnation: self.me.incarnation, session, number, msg };
                        self.control.send(conn, &frame);
                    }
                }
                Action::Event(event) => self.event(now, event),
                Action::Stage(room, stage) => self.stage_changed(room, stage),
                Action::Deliver(delivery) => self.deliver(now, delivery),
                Action::Sum(sum) => self.begin_sum(now, sum),
                Action::Lent { id, slot } => self.sched.lent(id, slot),
                Action::Direct(id) => {
                    self.sched.direct(id);
                    self.stats.packed_fallbacks += 1;
                    self.stats.direct_deliveries += 1;
                }
                Action::Unpack(unpacking) => self.begin_unpacking(now, unpacking),
                Action::Landed { id, slot, bytes } => self.sched.landed(id, slot, bytes),
                Action::Abort(id) => {
                    let end = self.sched.abort(id);
                    self.flow_over(now, id, end);
                }
                Action::Resolve(source) => self.resolve(now, &source),
                Action::Connect(key) => self.connect(now, key),
                Action::DropSession { peer, session, reason } => self.drop_session(peer, session, &reason),
                Action::Fence(key) => self.fence(now, key),
                Action::Forget(key) => self.forget(key),
                Action::TellRefused { peer, rooms } => self.tell_refused(peer, rooms),
            }
        }
        self.drop_stale_addresses();
        any
    }

    fn deliver(&mut self, now: Time, delivery: Delivery) {
        let key = delivery.peer;
        let Some(io) = self.peers.get(&key) else {
            self.node.handle_delivery(now, delivery.id, DeliveryEnd::Aborted);
            return;
        };
        let (Some(Endpoint { template, .. }), Some(describe)) = (&io.endpoint, &io.describe) else {
            self.node.handle_delivery(now, delivery.id, DeliveryEnd::Aborted);
            return;
        };
        let (src, dst) = match key.direction {
            Direction::WeGrant => (&describe.pages, &self.me.pages),
            Direction::TheyGrant => (&self.me.pages, &describe.pages),
        };
        match Cursor::new(template.clone(), delivery.request, src, dst) {
            Ok(cursor) => {
                match self.packs(now, delivery.id, key, &cursor) {
                    Some(bytes) => self.sched.add_packed(delivery.id, key, delivery.room, cursor, bytes),
                    None => self.sched.add(delivery.id, key, delivery.room, cursor),
                }
                let end = self.sched.take_end(delivery.id);
                self.flow_over(now, delivery.id, end);
            }
            Err(e) => {
                let text = format!("room {}: push {}: {e}", delivery.room, delivery.push.0);
                self.node.handle_delivery(
                    now,
                    delivery.id,
                    DeliveryEnd::Failed(Reason::new(ReasonKind::PageError, text)),
                );
            }
        }
    }

    pub(super) fn flow_over(&mut self, now: Time, id: DeliveryId, end: Option<FlowEnd>) {
        let Some(end) = end else { return };
        let failure = self.failures.remove(&id);
        let end = match (end, failure) {
            (FlowEnd::Aborted, Some(reason)) => DeliveryEnd::Failed(reason),
            (FlowEnd::Aborted, None) => DeliveryEnd::Aborted,
            (FlowEnd::Complete { bytes, writes }, _) => DeliveryEnd::Complete { bytes, writes },
            (FlowEnd::Summed(sum), _) => DeliveryEnd::Summed(sum),
        };
        self.node.handle_delivery(now, id, end);
    }

    /// Posts a slice and asks for its flush.
    pub(super) fn post_slice(&mut self, now: Time, slice: Slice, pieces: &[Piece]) {
        let endpoint = self.peers.get(&slice.peer).and_then(|io| io.endpoint.as_ref());
        let Some((which, ep)) = endpoint.map(|e| (e.which, e.ep)) else {
            self.sched.drop_flow(slice.id);
            self.node.handle_delivery(now, slice.id, DeliveryEnd::Aborted);
            return;
        };
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        // Copies of our own are over when the call is, and need no flush; they count as in flight for as long as it takes.
        let copies = mover(which) == Mover::Receiver;
        if copies {
            self.stats.link.tick(clock::now(), true);
        }
        let posted = self.carriers.post(which, ep, pieces);
        let posted =
            if copies { posted } else { posted.and_then(|()| self.carriers.flush(which, ep, ticket)) };
        if copies {
            self.stats.link.tick(clock::now(), !self.tickets.is_empty());
        }
        match posted {
            Ok(()) => {
                self.stats.slices += 1;
                self.stats.writes += pieces.len() as u64;
                self.stats.moved_bytes += pieces.iter().map(|p| p.len).sum::<u64>();
                self.in_flight(ticket, slice, None);
                if copies {
                    self.flushed(now, ticket, Ok(()));
                }
            }
            Err(e) => self.slice_failed(now, slice, which, &e),
        }
    }

    /// A slice that was not posted: what was posted before it may still be in flight.
    pub(super) fn slice_failed(&mut self, now: Time, slice: Slice, which: Which, error: &FabricError) {
        let kind = match error {
            FabricError::OutOfBounds { .. } => ReasonKind::PageError,
            _ => ReasonKind::FabricError,
        };
        let reason = Reason::new(kind, format!("room {}: {error}", slice.room));
        let own_only = mover(which) == Mover::Receiver || kind == ReasonKind::PageError;
        if own_only {
            self.failures.insert(slice.id, reason);
            self.sched.abort(slice.id);
            let end = self.sched.flushed(slice.id);
            self.flow_over(now, slice.id, end);
        } else {
            self.endpoint_broke(now, slice.peer, error);
        }
    }

    pub(super) fn flushed(&mut self, now: Time, ticket: u64, result: Result<(), FabricError>) {
        let Some(Ticket { id, peer: key, packed }) = self.tickets.remove(&ticket) else {
            self.probed(now, ticket, &result);
            return;
        };
        if let Some(io) = self.peers.get_mut(&key) {
            io.in_flight = io.in_flight.saturating_sub(1);
        }
        if let Err(e) = result {
            let reason = Reason::new(ReasonKind::FabricError, e.to_string());
            let receiver_copies = self
                .peers
                .get(&key)
                .and_then(|io| io.endpoint.as_ref())
                .is_some_and(|e| mover(e.which) == Mover::Receiver);
            if receiver_copies {
                self.failures.insert(id, reason);
                self.sched.abort(id);
            } else {
                self.endpoint_broke(now, key, &e);
                return;
            }
        }
        if let Some(packed) = packed {
            self.staging.free_buffer(packed.buffer);
            self.node.handle_packed(now, id, packed.slot, packed.bytes, packed.number);
        }
        let end = self.sched.flushed(id);
        self.flow_over(now, id, end);
    }

    /// Nothing from this peer may land any more.
    fn fence(&mut self, now: Time, key: PeerKey) {
        for id in self.sched.drop_peer(key) {
            self.failures.remove(&id);
        }
        self.tickets.retain(|_, t| t.peer != key);
        self.staging.drop_probe(key);
        let Some(io) = self.peers.get_mut(&key) else {
            self.node.handle_fenced(now, key, Ok(()));
            return;
        };
        io.in_flight = 0;
        let Some((which, ep)) = io.take_endpoint() else {
            // No endpoint was ever made, so the peer was never told to write.
            self.node.handle_fenced(now, key, Ok(()));
            return;
        };
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        match self.carriers.fence(which, ep, ticket) {
            Ok(()) => {
                self.fences.insert(ticket, key);
            }
            // A closed endpoint over which only we read is as good as fenced.
            Err(_) if mover(which) == Mover::Receiver => self.fence_result(now, key, Ok(())),
            Err(e) => self.fence_result(now, key, Err(e)),
        }
    }

    /// Nothing more is wanted of this peer.
    fn forget(&mut self, key: PeerKey) {
        let Some(mut io) = self.peers.remove(&key) else { return };
        if let Some((which, ep)) = io.take_endpoint() {
            self.carriers.disconnect(which, ep);
        }
        self.drop_watch(&mut io);
        // A fence of its former life must not be taken for one of the next. What it was to close may still be read from.
        let closing = self.fences.values().any(|k| *k == key);
        self.fences.retain(|_, k| *k != key);
        self.directory.stale = true;
        self.attempts.remove(&Retry::Connect(key));
        self.tickets.retain(|_, t| t.peer != key);
        self.staging.drop_probe(key);
        if !closing {
            self.staging.free_buffers_of(key);
        }
    }

    pub(super) fn fenced(&mut self, now: Time, ticket: u64, result: Result<(), FabricError>) {
        if let Some(key) = self.fences.remove(&ticket) {
            self.fence_result(now, key, result);
        }
    }

    fn fence_result(&mut self, now: Time, key: PeerKey, result: Result<(), FabricError>) {
        if let (Err(e), Some(io)) = (&result, self.peers.get_mut(&key)) {
            io.tcp = !matches!(e, FabricError::NoFence { transport, .. } if !transport.contains("tcp"));
        }
        // Our endpoint is closed, and with it every write out of these.
        self.staging.free_buffers_of(key);
        let result = match key.direction {
            Direction::WeGrant => result.map_err(|e| Reason::new(ReasonKind::FabricError, e.to_string())),
            // Our own writes ended when our endpoint was closed, whatever the transport promises its target.
            Direction::TheyGrant => Ok(()),
        };
        self.node.handle_fenced(now, key, result);
    }

    fn count_event(&mut self, now: Time, event: &AgentEvent) {
        let outcomes = &mut self.stats.outcomes;
        match &event.kind {
            EventKind::Success => outcomes.succeeded(&event.stats),
            EventKind::Failed(reason) => {
                // It still shows the stage in which it failed.
                let stage = self.rooms.get(&event.room).map_or(Stage::Bootstrapping, |r| r.stage());
                outcomes.failed(stage, reason.kind);
                if event.released {
                    outcomes.drains.add(0);
                } else {
                    self.rooms.set_draining(event.room, now);
                }
            }
            EventKind::Released => {
                if let Some(us) = self.rooms.drained_us(event.room, now) {
                    outcomes.drains.add(us);
                }
            }
            EventKind::Retracted(_) => {}
        }
    }

    fn event(&mut self, now: Time, event: Event) {
        let room = event.room;
        let retracted = matches!(event.kind, EventKind::Retracted(_));
        let out = AgentEvent {
            room,
            released: event.released,
            meta: event.meta,
            stats: event.stats,
            first_write_at_us: self.first_write.get(&room).copied().unwrap_or(0),
            at_us: now.0,
            kind: event.kind,
        };
        let over = event.released && !retracted;
        self.told |= out.is_terminal();
        self.count_event(now, &out);
        self.shared.tell(out, self.rooms.get(&room).map(|shared| &**shared));
        if over {
            self.rooms.remove(&room);
            self.first_write.remove(&room);
            self.sched.forget(room);
        }
    }
}
