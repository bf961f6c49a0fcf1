//! Deliveries that go packed: through slots that the destination lends.

use super::Part;
use crate::error::{Reason, ReasonKind};
use crate::ids::{PushId, Room, Time};
use crate::msg::{Credit, Msg, Owed, Pack, Packed};
use crate::node::coverage::intersect;
use crate::node::ring::Packing;
use crate::node::types::{DeliveryId, Flaw};
use crate::node::{Action, DeliveryFor, Node, PeerKey};

impl Node {
    /// The driver will carry out a delivery packed, in so many slices: the destination is told, and asked for slots.
    /// False if it cannot be; then it goes as any other.
    pub fn handle_pack(
        &mut self,
        now: Time,
        id: DeliveryId,
        bytes: u64,
        slice_bytes: u64,
        slots: u32,
    ) -> bool {
        let Some(DeliveryFor::Outbound(room, key, push)) = self.deliveries.get(&id).copied() else {
            return false;
        };
        if self.peers.get(&key).is_none_or(|p| p.credits.is_none()) || self.packing.contains_key(&id) {
            return false;
        }
        let all_layers = self.own_layers();
        let Some(r) = self.outbound.get_mut(&room).filter(|r| r.failure.is_none()) else { return false };
        let (Some(p), Some(dest)) = (r.pushes.get(&push), r.dests.get_mut(&key)) else { return false };
        if dest.parts.get(&push) != Some(&Part::Writing(id)) {
            return false;
        }
        let pushed = Owed { layers: p.order.layers.unwrap_or(all_layers), tokens: p.order.tokens };
        let Some(span) = dest.owed.as_ref().and_then(|o| intersect(o, &pushed)) else { return false };
        let (pages, pages_end) =
            super::offered_pages(&self.side.groups, &p.order.pages, p.order.tokens, &span);
        let pages_start = p.order.tokens.0;
        // It reads our bytes out of its slots: what replaces this push, if it is taken back, waits for its word.
        dest.unread.insert(push);
        let seq = dest.seq;
        self.packing.insert(id, Packing::default());
        let pack = Pack { room, seq, push, span, pages_start, pages, pages_end, bytes, slice_bytes, slots };
        self.queue(now, key, Msg::Pack(pack));
        true
    }

    /// The destination lends slots.
    pub(in crate::node) fn credit_arrived(
        &mut self,
        now: Time,
        key: PeerKey,
        m: &Credit,
    ) -> Result<(), Reason> {
        let m = &match self.cfg.flaw {
            Some(Flaw::OldCreditsCount) => self.misread(key, m),
            _ => m.clone(),
        };
        let room = m.room;
        let broken = |e: &dyn std::fmt::Display| Reason::new(ReasonKind::ProtocolError, e.to_string());
        let Some(r) = self.outbound.get_mut(&room).filter(|r| r.failure.is_none()) else {
            // Our last word on the room answers for these slots too.
            return Ok(());
        };
        let dest = r.dests.get(&key).filter(|d| d.seq == m.seq && !d.drained && !d.finished);
        let Some(dest) = dest else {
            self.counters.stale_refused += 1;
            return Ok(());
        };
        let part = dest.parts.get(&m.push).copied();
        r.progress.touch(now);
        let packing = match part {
            Some(Part::Writing(id)) => self.packing.get_mut(&id).map(|p| (id, p)),
            _ => None,
        };
        if m.slots == (0, 0) && packing.as_ref().is_none_or(|(_, p)| p.slots.is_empty()) {
            if let Some((id, _)) = packing {
                self.packing.remove(&id);
                self.actions.push_back(Action::Direct(id));
            }
            return Ok(());
        }
        let Some(credits) = self.peers.get_mut(&key).and_then(|p| p.credits.as_mut()) else {
            return Err(broken(&format!("room {room}: slots of a ring that was not announced")));
        };
        credits.grant(room, m.seq, m.slots).map_err(|e| broken(&e))?;
        let mut spare = Vec::new();
        match packing {
            Some((id, packing)) => {
                for _ in 0..m.slots.1 {
                    if let Some(slot) = credits.take(room, m.seq, 0).map_err(|e| broken(&e))? {
                        packing.slots.insert(slot);
                        self.actions.push_back(Action::Lent { id, slot });
                    }
                }
            }
            None => {
                for slot in m.slots.0..m.slots.0.saturating_add(m.slots.1) {
                    credits.release(room, slot).map_err(|e| broken(&e))?;
                    spare.push(slot);
                }
            }
        }
        for slot in spare {
            self.queue(
                now,
                key,
                Msg::Packed(Packed { room, seq: m.seq, push: m.push, slot, bytes: 0, slice: 0 }),
            );
        }
        Ok(())
    }

    /// What [`Flaw::OldCreditsCount`] takes slots for: whatever goes packed to this peer now.
    fn misread(&self, key: PeerKey, m: &Credit) -> Credit {
        let mut packed = self.packing.keys().filter_map(|id| match self.deliveries.get(id)? {
            DeliveryFor::Outbound(room, to, push) if *to == key => {
                let seq = self.outbound.get(room)?.dests.get(&key)?.seq;
                Some(Credit { room: *room, seq, push: *push, slots: m.slots })
            }
            _ => None,
        });
        packed.next_back().unwrap_or_else(|| m.clone())
    }

    /// A slice was written to a slot, and is there. Slices are numbered from zero, and named here in that order.
    pub fn handle_packed(&mut self, now: Time, id: DeliveryId, slot: u32, bytes: u64, slice: u64) {
        let Some(DeliveryFor::Outbound(room, key, push)) = self.deliveries.get(&id).copied() else { return };
        if !self.packing.get_mut(&id).is_some_and(|p| p.slots.remove(&slot)) {
            return;
        }
        self.give_back(now, (room, key, push), slot, Some((id, bytes, slice)));
    }

    /// A delivery that went packed has ended: slots that it did not use go back.
    pub(in crate::node) fn packing_over(&mut self, now: Time, id: DeliveryId, of: (Room, PeerKey, PushId)) {
        let Some(packing) = self.packing.remove(&id) else { return };
        for slot in packing.slots {
            self.give_back(now, of, slot, None);
        }
    }

    /// A slot is the destination's again. It is told, unless the room has failed here or the slot was lent for a grant that is
    /// over: then the drain answers for it.
    fn give_back(
        &mut self,
        now: Time,
        (room, key, push): (Room, PeerKey, PushId),
        slot: u32,
        filled: Option<(DeliveryId, u64, u64)>,
    ) {
        // Ours until now, by what the caller holds.
        let credits = self.peers.get_mut(&key).and_then(|p| p.credits.as_mut());
        let lent_for = credits.and_then(|c| c.release(room, slot).ok());
        let Some(r) = self.outbound.get_mut(&room).filter(|r| r.failure.is_none()) else { return };
        r.progress.touch(now);
        let Some(dest) = r.dests.get(&key).filter(|d| lent_for.is_none_or(|seq| seq == d.seq)) else {
            return;
        };
        // Of a push that is being taken back nothing counts.
        let stands = filled.filter(|(id, ..)| dest.parts.get(&push) == Some(&Part::Writing(*id)));
        let (bytes, slice) = stands.map_or((0, 0), |(_, bytes, slice)| (bytes, slice));
        let seq = dest.seq;
        self.queue(now, key, Msg::Packed(Packed { room, seq, push, slot, bytes, slice }));
    }
}
