//! What the driver does with data: deliveries, writes and where they land.

use super::Property;
use super::world::{D, JUNK, NOW, Running, World, Write, address, index, room, tag};
use kvxfer_proto::node::{Delivery, DeliveryEnd, DeliveryId, Direction, PeerKey};
use kvxfer_proto::{Reason, ReasonKind};
use std::collections::VecDeque;

impl World {
    pub(super) fn deliver(&mut self, at: usize, d: &Delivery) {
        let Some(&ep) = self.procs[at].eps.get(&d.peer) else {
            self.proc(at).node.handle_delivery(NOW, d.id, DeliveryEnd::Aborted);
            return;
        };
        let pieces = u32::from(self.setup.pieces);
        let sends = d.peer.direction == Direction::TheyGrant;
        let p = self.proc(at);
        let packed = sends && p.node.handle_pack(NOW, d.id, pieces.into(), 1, pieces);
        p.running.insert(d.id, running(d, packed));
        if sends && !packed {
            self.post(at, d.id, ep);
        }
    }

    /// Posts the next piece of a delivery.
    pub(crate) fn post(&mut self, at: usize, id: DeliveryId, ep: u8) {
        let from = self.me(at);
        let Some(r) = self.proc(at).running.get_mut(&id) else { return };
        let write = Write {
            from,
            to: r.key.incarnation,
            id,
            room: r.room,
            push: r.push,
            piece: r.posted,
            slot: r.slots.pop_front(),
            ep,
            loose: false,
        };
        r.posted += 1;
        r.written.extend(write.slot);
        if write.slot.is_some() {
            // It is packed now, and its page is not read again.
            self.check_source(at, &write);
        }
        if self.setup.family.is_fenced() && !self.is_live(&write) {
            self.orphan(&[write]);
        } else {
            self.writes.push(write);
        }
    }

    /// Whether a write can still reach its target's memory.
    pub(crate) fn is_live(&self, w: &Write) -> bool {
        let Some(to) = self.alive(w.to) else { return false };
        if !self.setup.family.is_fenced() {
            return true;
        }
        let key = PeerKey { incarnation: w.from, direction: Direction::WeGrant };
        let p = &self.procs[to];
        p.eps.get(&key) == Some(&w.ep) || p.fencing.get(&key) == Some(&w.ep)
    }

    pub(crate) fn land(&mut self, i: usize) {
        let w = self.writes.remove(i);
        if let Some(slot) = w.slot {
            self.land_in_slot(&w, slot);
            return;
        }
        if let Some(from) = self.alive(w.from)
            && !w.loose
        {
            self.check_source(from, &w);
        }
        if let Some(to) = self.alive(w.to) {
            let source = address(w.from);
            self.store(to, w.room, source, w.piece, tag(w.room));
        }
    }

    /// A write in flight reads its source's page: that must not have been given back.
    fn check_source(&mut self, at: usize, w: &Write) {
        if self.procs[at].rooms[w.room].released > 0 {
            let who = self.name(at);
            let text = format!("a write of room {} reads a page that {who} has released", room(w.room));
            self.violate(Property::NoReadAfterRelease, text);
        }
    }

    pub(super) fn store(&mut self, to: usize, r: usize, source: usize, piece: u8, value: u8) {
        let owner = self.procs[to].rooms.iter().position(|s| s.ordered && s.released == 0);
        if owner != Some(r) {
            let holder = owner.map_or("nobody".to_owned(), |o| format!("room {}", room(o)));
            let text = format!(
                "a write of room {} by source {source} landed on the page, which {holder} holds",
                room(r)
            );
            self.violate(Property::NoLateWrite, text);
        }
        self.proc(to).cells[source.min(1)][usize::from(piece).min(1)] = value;
    }

    /// The destination copies the next piece.
    pub(crate) fn copy(&mut self, id: DeliveryId) {
        let Some(r) = self.proc(D).running.get_mut(&id) else { return };
        let (r, piece) = (r.clone(), r.posted);
        let from = address(r.key.incarnation);
        if self.me(from) != r.key.incarnation {
            // Nothing can be read of a process that is gone.
            self.proc(D).running.remove(&id);
            let end = DeliveryEnd::Failed(Reason::new(ReasonKind::FabricError, "no such process"));
            self.order(D, |n| n.handle_delivery(NOW, id, end));
            return;
        }
        if let Some(r) = self.proc(D).running.get_mut(&id) {
            r.posted += 1;
        }
        let value = if self.procs[from].rooms[r.room].released > 0 { JUNK } else { tag(r.room) };
        self.store(D, r.room, from, piece, value);
    }

    pub(crate) fn is_flushed(&self, at: usize, id: DeliveryId) -> bool {
        let me = self.me(at);
        !self.writes.iter().any(|w| w.from == me && w.id == id)
    }

    /// The end of a delivery comes back: all that was posted of it has landed.
    pub(crate) fn complete(&mut self, at: usize, id: DeliveryId) {
        if self.procs[at].running.get(&id).is_some_and(|r| r.packed) {
            self.slice_flushed(at, id);
            return;
        }
        let Some(r) = self.proc(at).running.remove(&id) else { return };
        let end =
            if r.aborted { DeliveryEnd::Aborted } else { DeliveryEnd::Complete { bytes: 0, writes: 0 } };
        self.order(at, |n| n.handle_delivery(NOW, id, end));
    }

    pub(super) fn abort(&mut self, at: usize, id: DeliveryId) {
        let Some(r) = self.proc(at).running.get_mut(&id) else { return };
        r.aborted = true;
        let idle = if r.packed { r.written.is_empty() } else { r.posted == 0 };
        if idle {
            self.proc(at).running.remove(&id);
            self.proc(at).node.handle_delivery(NOW, id, DeliveryEnd::Aborted);
        }
    }
}

pub(super) fn running(d: &Delivery, packed: bool) -> Running {
    Running {
        key: d.peer,
        room: index(d.room),
        push: d.push,
        posted: 0,
        aborted: false,
        packed,
        slots: VecDeque::new(),
        written: VecDeque::new(),
    }
}
