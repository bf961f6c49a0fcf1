//! Pushes that go packed: what the driver does with slots, and who may write them.

use super::data::running;
use super::world::{D, NOW, Packet, STRAY, World, Write, address, room, tag};
use super::{Property, Violation};
use kvxfer_proto::node::{Delivery, DeliveryEnd, DeliveryId, Direction, PeerKey};
use kvxfer_proto::staging::Slot;

impl World {
    /// A slot was lent for this delivery; or a piece of it has landed in one of ours.
    pub(super) fn has_slot(&mut self, at: usize, id: DeliveryId, slot: u32) {
        if let Some(r) = self.proc(at).running.get_mut(&id) {
            r.slots.push_back(slot);
        }
    }

    /// A delivery that was to go packed gets no slots.
    pub(super) fn direct(&mut self, at: usize, id: DeliveryId) {
        let Some(r) = self.proc(at).running.get_mut(&id) else { return };
        r.packed = false;
        let key = r.key;
        if let Some(&ep) = self.procs[at].eps.get(&key) {
            self.post(at, id, ep);
        }
    }

    /// A push comes packed.
    pub(super) fn unpacking(&mut self, at: usize, d: &Delivery) {
        let p = self.proc(at);
        if p.eps.contains_key(&d.peer) {
            p.running.insert(d.id, running(d, true));
        } else {
            p.node.handle_delivery(NOW, d.id, DeliveryEnd::Aborted);
        }
    }

    /// What a slot holds that nobody has is of no more use to anybody.
    pub(super) fn empty_free_slots(&mut self) {
        let p = &self.procs[D];
        let slots = p.node.ring_slots().map_or(&[][..], |r| r.slots());
        let stale = |(held, slot): (&Option<Packet>, &Slot)| held.is_some() && *slot == Slot::Free;
        if p.ring.iter().zip(slots).any(stale) {
            let free: Vec<bool> = slots.iter().map(|s| *s == Slot::Free).collect();
            let held = self.proc(D).ring.iter_mut().zip(free);
            held.filter(|(_, free)| *free).for_each(|(held, _)| *held = None);
        }
    }

    /// A packed piece lands: in a slot that its source was lent for its room, and that nobody reads yet.
    pub(super) fn land_in_slot(&mut self, w: &Write, slot: u32) {
        let Some(to) = self.alive(w.to) else { return };
        let source = address(w.from);
        let key = PeerKey { incarnation: w.from, direction: Direction::WeGrant };
        let is = self.procs[to].node.ring_slots().and_then(|r| r.slots().get(slot as usize)).copied();
        let may = matches!(is, Some(Slot::Lent(l) | Slot::Quarantined(l)) if l.peer == key && l.room == room(w.room));
        if !may {
            let text = format!(
                "a packed piece of room {} by source {source} landed in slot {slot}, which is {is:?}",
                room(w.room)
            );
            self.violate(Property::NoLateWrite, text);
        }
        if let Some(held) = self.proc(to).ring.get_mut(slot as usize) {
            *held = Some(Packet { room: w.room, source, piece: w.piece });
        }
    }

    /// Whether the first piece whose slot was written is there.
    pub(super) fn has_flushed(&self, at: usize, id: DeliveryId) -> bool {
        let me = self.me(at);
        let Some(slot) = self.procs[at].running.get(&id).and_then(|r| r.written.front()) else {
            return false;
        };
        !self.writes.iter().any(|w| w.from == me && w.id == id && w.slot == Some(*slot))
    }

    /// The flush of a packed piece comes back.
    pub(super) fn slice_flushed(&mut self, at: usize, id: DeliveryId) {
        let pieces = self.setup.pieces;
        let Some(r) = self.proc(at).running.get_mut(&id) else { return };
        let Some(slot) = r.written.pop_front() else { return };
        let number = u64::from(r.posted) - 1 - r.written.len() as u64;
        let over = r.written.is_empty() && (r.aborted || r.posted >= pieces);
        let aborted = r.aborted;
        if over {
            self.proc(at).running.remove(&id);
        }
        self.order(at, |n| {
            n.handle_packed(NOW, id, slot, 1, number);
            if over {
                n.handle_delivery(NOW, id, end(aborted));
            }
        });
    }

    /// The destination takes the next piece out of its slot.
    pub(super) fn unpack(&mut self, id: DeliveryId) {
        let pieces = self.setup.pieces;
        let Some(r) = self.proc(D).running.get_mut(&id) else { return };
        let Some(slot) = r.slots.pop_front() else { return };
        let (piece, of, source) = (r.posted, r.room, address(r.key.incarnation));
        r.posted += 1;
        let over = r.posted >= pieces;
        if over {
            self.proc(D).running.remove(&id);
        }
        let held = self.procs[D].ring.get(slot as usize).copied().flatten();
        let right = held == Some(Packet { room: of, source, piece });
        self.store(D, of, source, piece, if right { tag(of) } else { STRAY });
        self.order(D, |n| {
            n.handle_unpacked(NOW, id, slot);
            if over {
                n.handle_delivery(NOW, id, end(false));
            }
        });
    }

    /// A slot that somebody still has in the end, for whom nobody waits.
    pub(super) fn lost_slot(&self, held: impl Fn(&[PeerKey]) -> bool) -> Option<Violation> {
        let slots = self.procs[D].node.ring_slots()?.slots();
        let (n, slot) =
            slots.iter().enumerate().find(|(_, s)| s.lease().is_some_and(|l| !held(&[l.peer])))?;
        let text = format!("slot {n} never comes back: {slot:?}");
        Some(Violation { property: Property::EveryPageComesBack, text })
    }
}

fn end(aborted: bool) -> DeliveryEnd {
    if aborted { DeliveryEnd::Aborted } else { DeliveryEnd::Complete { bytes: 0, writes: 0 } }
}
