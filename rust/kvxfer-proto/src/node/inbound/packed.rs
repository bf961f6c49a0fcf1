//! Pushes that come packed: slices land in slots of our ring, and the driver unpacks them into the room's pages.
//!
//! To the room such a push is a copy of ours under way: until the driver has reported its end, no page is released,
//! and its `Done` is counted (and its bytes are summed) only after that.

use super::{BOX_LIMIT, InGrant, too_many};
use crate::error::{Reason, ReasonKind};
use crate::ids::{PushId, Room, Seq, Time};
use crate::msg::{Credit, Done, Msg, Owed, Pack, Packed};
use crate::node::types::{Delivery, DeliveryId, Mover, Stage, Unpacking};
use crate::node::{Action, DeliveryFor, Node, PeerKey, area, intersect};
use crate::plan::Request;
use crate::staging::{Landing, Lease};

/// One such push.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Packing {
    id: DeliveryId,
    span: Owed,
    /// Bytes of a slice, at most.
    slice_bytes: u64,
    /// Bytes of all slices, as the sender says, and of those that have landed.
    bytes: u64,
    landed: u64,
    /// The number of the next slice.
    next: u64,
    /// Slots that were lent for it and have not come back, filled or not.
    out: u32,
}

impl Packing {
    /// For checkers.
    pub(super) fn id(&self) -> DeliveryId {
        self.id
    }
}

fn broken(room: Room, text: impl std::fmt::Display) -> Reason {
    Reason::new(ReasonKind::ProtocolError, format!("room {room}: {text}"))
}

impl InGrant {
    /// What is wrong with a `Done` of a push that came packed: its slices have not all landed, or were of something else.
    pub(super) fn lacks_slices(&self, m: &Done) -> Option<String> {
        let p = self.packed.get(&m.push)?;
        if p.landed != p.bytes {
            return Some(format!(
                "push {} is said to be done, but {} of its {} packed bytes have come",
                m.push.0, p.landed, p.bytes
            ));
        }
        // An empty box says that the push brings nothing more.
        (area(&m.span) > 0 && m.span != p.span).then(|| {
            format!("push {} is said to be done with {:?}, but {:?} came packed", m.push.0, m.span, p.span)
        })
    }
}

impl Node {
    /// A push comes packed and wants slots.
    pub(in crate::node) fn pack_arrived(&mut self, now: Time, key: PeerKey, m: Pack) -> Result<(), Reason> {
        let room = m.room;
        if self.peers.get(&key).and_then(|p| p.attached) == Some(Mover::Receiver) {
            return Err(broken(room, "Pack on a fabric on which the receiver copies"));
        }
        let slot_bytes = self.ring.as_ref().map(|r| r.slots().slot_bytes());
        let slots = self.ring.as_ref().map_or(0, |r| r.slots().slots().len());
        if !slot_bytes.is_some_and(|most| (1..=most).contains(&m.slice_bytes)) {
            let have = slot_bytes.unwrap_or(0);
            return Err(broken(room, format!("slices of {} bytes, but slots have {have}", m.slice_bytes)));
        }
        // Its pages may be smaller than ours: of one token at the least.
        let most = m.span.tokens.1.saturating_sub(m.pages_start).saturating_add(1);
        let bad_lists =
            m.pages.len() != self.side.groups.len() || m.pages.iter().any(|list| list.len() as u64 > most);
        let Some((g, failed)) = self.live_grant(room, key, m.seq)? else { return Ok(()) };
        if failed {
            return Ok(());
        }
        let inside = g.owed.as_ref().is_some_and(|o| intersect(o, &m.span).as_ref() == Some(&m.span));
        let problem = if !inside || area(&m.span) == 0 || m.bytes == 0 {
            Some("was not granted")
        } else if bad_lists {
            Some("has other page lists than we have groups, or more pages than tokens")
        } else if g.has_said_last() {
            Some("comes after the last piece was done")
        } else if g.packed.contains_key(&m.push) || g.copies.contains_key(&m.push) {
            Some("is there already")
        } else if g.coverage.meets(&m.span)
            || g.packed.values().any(|p| intersect(&p.span, &m.span).is_some())
        {
            Some("is there in part already")
        } else {
            None
        };
        if let Some(problem) = problem {
            let text = format!("push {} comes packed with {:?}, which {problem}", m.push.0, m.span);
            self.fail_inbound(now, room, broken(room, text));
            return Ok(());
        }
        if g.boxes() + g.packed.len() >= BOX_LIMIT {
            self.fail_inbound(now, room, too_many(room));
            return Ok(());
        }
        let id = self.next_delivery(DeliveryFor::Inbound(room, key, m.push));
        if let Some(r) = self.inbound.get_mut(&room)
            && let Some(g) = r.grants.get_mut(&key)
        {
            g.copies.insert(m.push, id);
            g.packed.insert(
                m.push,
                Packing {
                    id,
                    span: m.span.clone(),
                    slice_bytes: m.slice_bytes,
                    bytes: m.bytes,
                    landed: 0,
                    next: 0,
                    out: 0,
                },
            );
            self.actions.push_back(Action::Unpack(Unpacking {
                delivery: Delivery {
                    id,
                    peer: key,
                    room,
                    push: m.push,
                    request: Request {
                        src_pages: m.pages,
                        src_tokens: m.pages_start..m.pages_end.unwrap_or(m.span.tokens.1),
                        dst_pages: r.pages.clone(),
                        dst_tokens: r.tokens.0..r.tokens.1,
                        tokens: m.span.tokens.0..m.span.tokens.1,
                        layers: m.span.layers.0..m.span.layers.1,
                    },
                },
                bytes: m.bytes,
                slice_bytes: m.slice_bytes,
            }));
        }
        if let Some(ring) = &mut self.ring {
            // More than there are would only be asked for again.
            let want = m.slots.clamp(1, u32::try_from(slots).unwrap_or(u32::MAX).saturating_mul(1024));
            ring.want(Lease { peer: key, room, seq: m.seq }, m.push, want);
        }
        self.lend(now);
        self.inbound_stage(now, room, Stage::Transferring);
        Ok(())
    }

    /// A slot is ours again, filled or not.
    pub(in crate::node) fn packed_arrived(
        &mut self,
        now: Time,
        key: PeerKey,
        m: &Packed,
    ) -> Result<(), Reason> {
        let room = m.room;
        let lease = Lease { peer: key, room, seq: m.seq };
        let Some((_, failed)) = self.live_grant(room, key, m.seq)? else {
            // The room is over, and the slot may be somebody else's; if it is not, nothing is written to it any more.
            if let Some(ring) = &mut self.ring
                && ring.slots_mut().returned(lease, m.slot).is_ok()
            {
                self.lend(now);
            }
            return Ok(());
        };
        let Some(ring) = &mut self.ring else {
            return Err(broken(room, "a slot is filled, but there is no ring"));
        };
        if let Some(p) = self
            .inbound
            .get_mut(&room)
            .and_then(|r| r.grants.get_mut(&key))
            .and_then(|g| g.packed.get_mut(&m.push))
        {
            p.out = p.out.saturating_sub(1);
        }
        if m.bytes == 0 {
            let returned = ring.slots_mut().returned(lease, m.slot);
            self.keep_wanting(lease, m.push);
            self.lend(now);
            return returned.map_err(|e| broken(room, e));
        }
        let landing = ring.slots_mut().landed(lease, m.slot, m.bytes).map_err(|e| broken(room, e))?;
        if failed || landing == Landing::Void {
            self.lend(now);
            return Ok(());
        }
        let packing = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key));
        let packing = packing.and_then(|g| g.packed.get_mut(&m.push));
        let landed = packing.as_ref().and_then(|p| p.landed.checked_add(m.bytes));
        let (Some(p), Some(landed)) = (packing, landed) else {
            let text = format!("slot {} is filled for push {}, which does not come packed", m.slot, m.push.0);
            self.fail_inbound(now, room, broken(room, text));
            return Ok(());
        };
        if landed > p.bytes {
            let text = format!("push {} fills slots with {landed} bytes, but has {}", m.push.0, p.bytes);
            self.fail_inbound(now, room, broken(room, text));
            return Ok(());
        }
        if m.slice != p.next {
            let text = format!("push {}: slice {} came where slice {} was due", m.push.0, m.slice, p.next);
            self.fail_inbound(now, room, broken(room, text));
            return Ok(());
        }
        p.landed = landed;
        p.next += 1;
        let id = p.id;
        if let Some(ring) = &mut self.ring {
            ring.unpack(id, lease, m.slot).map_err(|e| broken(room, e))?;
        }
        self.actions.push_back(Action::Landed { id, slot: m.slot, bytes: m.bytes });
        self.keep_wanting(lease, m.push);
        self.lend(now);
        self.inbound_stage(now, room, Stage::Transferring);
        Ok(())
    }

    /// Slots were lent for a push.
    pub(in crate::node) fn slots_went_out(&mut self, lease: Lease, push: PushId, slots: u32) {
        let g = self.inbound.get_mut(&lease.room).and_then(|r| r.grants.get_mut(&lease.peer));
        if let Some(p) = g.and_then(|g| g.packed.get_mut(&push)) {
            p.out = p.out.saturating_add(slots);
        }
    }

    /// Slices may be more than the sender thought, since not each is full. Whenever fewer slots are out for this push, or
    /// asked for, than it has slices still to come, more are asked for.
    fn keep_wanting(&mut self, lease: Lease, push: PushId) {
        let Some(ring) = &mut self.ring else { return };
        let Some(r) = self.inbound.get(&lease.room).filter(|r| r.failure.is_none()) else { return };
        let Some(p) = r.grants.get(&lease.peer).and_then(|g| g.packed.get(&push)) else { return };
        let slices = p.bytes.saturating_sub(p.landed).div_ceil(p.slice_bytes.max(1));
        let slices = u32::try_from(slices).unwrap_or(u32::MAX);
        if slices > 0 {
            let has = p.out.saturating_add(ring.wanted(lease, push));
            ring.want(lease, push, slices.saturating_sub(has));
        }
    }

    /// There is no slot for a push, and may never be one: it comes unpacked, if nothing of it has come yet.
    pub(in crate::node) fn refuse_slots(&mut self, now: Time, lease: Lease, push: PushId) {
        let Lease { peer, room, seq } = lease;
        let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&peer)) else { return };
        if g.packed.get(&push).is_none_or(|p| p.next > 0) {
            return;
        }
        g.packed.remove(&push);
        if let Some(id) = g.copies.remove(&push) {
            g.stopping.insert(id);
            self.actions.push_back(Action::Abort(id));
        }
        self.stop_wanting(room, peer, Some(push));
        self.queue(now, peer, Msg::Credit(Credit { room, seq, slots: (0, 0), push }));
    }

    /// Every slice of a push is in the room's pages: its `Done`, if it came already, can be looked at.
    pub(super) fn unpacked_whole(&mut self, now: Time, room: Room, key: PeerKey) {
        self.inbound_stage(now, room, Stage::Transferring);
        self.next_check(now, room, key);
    }

    /// A push that was taken back is not unpacked any more: what replaces it may be written.
    pub(super) fn unpack_stopped(&mut self, now: Time, room: Room, key: PeerKey, seq: Seq, push: PushId) {
        // Only of a push that came packed: where we copy, the source needs no word of it.
        self.tell_read(now, room, key, seq, push);
        self.next_check(now, room, key);
    }
}
