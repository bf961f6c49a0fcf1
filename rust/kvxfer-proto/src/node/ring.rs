//! Staging slots within a node: who waits for ours, and what we hold of others'.

use super::{DeliveryId, Node, PeerKey};
use crate::ids::{PushId, Room, Seq, Time};
use crate::msg::{Credit, Msg};
use crate::staging::{Credits, Lease, Slot, Slots, StagingError};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound::{Excluded, Unbounded};

/// What a sender wants slots of ours for.
type Want = (Room, Seq, PushId);

/// What one sender wants.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Wants {
    /// Slots still to be lent, for each push that waits.
    left: BTreeMap<Want, u32>,
    /// The push that had its turn last.
    last: Option<Want>,
}

impl Wants {
    /// Whose turn is next, and how many it waits for.
    fn next(&self) -> Option<(Want, u32)> {
        let later = self.last.and_then(|last| self.left.range((Excluded(last), Unbounded)).next());
        later.or_else(|| self.left.first_key_value()).map(|(want, left)| (*want, *left))
    }
}

/// Our staging slots.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Ring {
    slots: Slots,
    wants: BTreeMap<PeerKey, Wants>,
    /// The senders that want any, whose turn it is first.
    turns: VecDeque<PeerKey>,
    /// Slots out of which the driver copies, or will.
    unpacking: BTreeMap<DeliveryId, BTreeSet<u32>>,
}

/// A delivery of ours that goes packed.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Packing {
    /// Slots of the peer's ring that are ours for it.
    pub(super) slots: BTreeSet<u32>,
}

impl Ring {
    pub(super) fn slots(&self) -> &Slots {
        &self.slots
    }

    pub(super) fn slots_mut(&mut self) -> &mut Slots {
        &mut self.slots
    }

    pub(super) fn quarantined(&self) -> u32 {
        self.slots.quarantined()
    }

    pub(super) fn taken(&self) -> u32 {
        let all = u32::try_from(self.slots.slots().len()).unwrap_or(u32::MAX);
        all.saturating_sub(self.slots.free())
    }

    fn new(slots: Slots) -> Self {
        Self { slots, wants: BTreeMap::new(), turns: VecDeque::new(), unpacking: BTreeMap::new() }
    }

    pub(super) fn want(&mut self, lease: Lease, push: PushId, slots: u32) {
        if slots == 0 {
            return;
        }
        let wants = self.wants.entry(lease.peer).or_default();
        if wants.left.is_empty() {
            self.turns.push_back(lease.peer);
        }
        let left = wants.left.entry((lease.room, lease.seq, push)).or_default();
        *left = left.saturating_add(slots);
    }

    /// Slots that this push still waits for.
    pub(super) fn wanted(&self, lease: Lease, push: PushId) -> u32 {
        let wants = self.wants.get(&lease.peer);
        wants.and_then(|w| w.left.get(&(lease.room, lease.seq, push))).copied().unwrap_or(0)
    }

    /// Lends what is free, to each sender in its turn, and of its pushes to each in turn. No sender gets more slots than
    /// are left for the others: one that stops, and whose slots stay in quarantine, leaves half of the ring to them.
    fn lend(&mut self) -> Vec<(Lease, PushId, (u32, u32))> {
        let mut out = Vec::new();
        let mut passed = 0;
        while passed < self.turns.len() && self.slots.free() > 0 {
            let peers = self.turns.len();
            let Some(peer) = self.turns.pop_front() else { break };
            let Some(wants) = self.wants.get_mut(&peer) else { continue };
            let free = self.slots.free();
            // At most as many as each of the others could have too, and of these as many as each of its pushes.
            let may = free.saturating_sub(self.slots.held(peer)).div_ceil(2);
            let may = may.min(free.div_ceil(u32::try_from(peers).unwrap_or(u32::MAX)));
            let may = may.div_ceil(u32::try_from(wants.left.len()).unwrap_or(u32::MAX).max(1));
            passed += 1;
            if may > 0
                && let Some((want, left)) = wants.next()
            {
                let (room, seq, push) = want;
                let lease = Lease { peer, room, seq };
                let mut got = 0u32;
                for run in self.slots.lend(lease, may.min(left)) {
                    got = got.saturating_add(run.1);
                    out.push((lease, push, run));
                }
                wants.last = Some(want);
                if got >= left {
                    wants.left.remove(&want);
                } else {
                    wants.left.insert(want, left - got);
                }
                passed = 0;
            }
            if wants.left.is_empty() {
                self.wants.remove(&peer);
            } else {
                self.turns.push_back(peer);
            }
        }
        out
    }

    /// Pushes that wait while every slot is in quarantine: none comes back before its peer answers, which it may never do.
    fn hopeless(&self) -> Vec<(Lease, PushId)> {
        if self.wants.is_empty() || self.slots.slots().iter().any(|s| !matches!(s, Slot::Quarantined(_))) {
            return Vec::new();
        }
        let of = |(peer, w): (&PeerKey, &Wants)| {
            let peer = *peer;
            w.left
                .keys()
                .map(move |(room, seq, push)| (Lease { peer, room: *room, seq: *seq }, *push))
                .collect::<Vec<_>>()
        };
        self.wants.iter().flat_map(of).collect()
    }

    /// The driver has this slot in hand from now on.
    pub(super) fn unpack(&mut self, id: DeliveryId, lease: Lease, slot: u32) -> Result<(), StagingError> {
        self.slots.unpack(lease, slot)?;
        self.unpacking.entry(id).or_default().insert(slot);
        Ok(())
    }

    fn emptied(&mut self, slot: u32) {
        let lease = self.slots.slots().get(slot as usize).and_then(Slot::lease);
        if let Some(lease) = lease {
            // The driver had it in hand, so it was being unpacked.
            let _ = self.slots.unpacked(lease, slot);
        }
    }

    fn unpacked(&mut self, id: DeliveryId, slot: u32) {
        if self.unpacking.get_mut(&id).is_some_and(|slots| slots.remove(&slot)) {
            self.emptied(slot);
        }
    }

    fn over(&mut self, id: DeliveryId) {
        for slot in self.unpacking.remove(&id).unwrap_or_default() {
            self.emptied(slot);
        }
    }

    /// For checkers: the grants for which anything is, or is to be, lent to this peer.
    pub(super) fn seqs_lent(&self, key: PeerKey) -> impl Iterator<Item = Seq> {
        let lent =
            self.slots.slots().iter().filter_map(Slot::lease).filter(move |l| l.peer == key).map(|l| l.seq);
        let wants = self.wants.get(&key).into_iter();
        lent.chain(wants.flat_map(|w| w.left.keys().chain(&w.last)).map(|(_, seq, _)| *seq))
    }

    /// The same, for changes that keep their order.
    pub(super) fn renumber_seqs(&mut self, key: PeerKey, lower: impl Fn(&mut Seq)) {
        self.slots.leases_mut().filter(|l| l.peer == key).for_each(|l| lower(&mut l.seq));
        if let Some(wants) = self.wants.get_mut(&key) {
            let left = std::mem::take(&mut wants.left);
            wants.left = left
                .into_iter()
                .map(|(mut want, n)| {
                    lower(&mut want.1);
                    (want, n)
                })
                .collect();
            wants.last.iter_mut().for_each(|want| lower(&mut want.1));
        }
    }

    fn stop_wanting(&mut self, room: Room, key: PeerKey, push: Option<PushId>) {
        if let Some(wants) = self.wants.get_mut(&key) {
            wants.left.retain(|(r, _, p), _| *r != room || push.is_some_and(|push| *p != push));
            self.forget_content();
        }
    }

    /// Senders that want nothing any more have no turn.
    fn forget_content(&mut self) {
        self.wants.retain(|_, w| !w.left.is_empty());
        let wants = &self.wants;
        self.turns.retain(|key| wants.contains_key(key));
    }
}

impl Node {
    /// There is memory now for a ring of so many slots, which peers may write for pushes that come packed.
    ///
    /// # Errors
    /// When such a ring cannot be.
    pub fn handle_ring(&mut self, slot_bytes: u64, count: u32) -> Result<(), StagingError> {
        if self.ring.is_none() {
            let slots = Slots::new(slot_bytes, count, self.cfg.flaw)?;
            self.ring = Some(Ring::new(slots));
        }
        Ok(())
    }

    /// Deliveries to this peer may go packed: it has a ring of so many slots.
    ///
    /// # Errors
    /// When such a ring cannot be.
    pub fn handle_peer_ring(
        &mut self,
        key: PeerKey,
        slot_bytes: u64,
        count: u32,
    ) -> Result<(), StagingError> {
        let fresh = Credits::new(slot_bytes, count)?;
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.credits.get_or_insert(fresh);
        }
        Ok(())
    }

    /// The driver has read a slot of ours.
    pub fn handle_unpacked(&mut self, now: Time, id: DeliveryId, slot: u32) {
        if let Some(ring) = &mut self.ring {
            ring.unpacked(id, slot);
            self.lend(now);
        }
    }

    /// Nothing is copied out of slots for this delivery any more.
    pub(super) fn unpacking_over(&mut self, now: Time, id: DeliveryId) {
        if let Some(ring) = &mut self.ring {
            ring.over(id);
            self.lend(now);
        }
    }

    /// A room, or one push of it, wants no slots any more.
    pub(super) fn stop_wanting(&mut self, room: Room, key: PeerKey, push: Option<PushId>) {
        if let Some(ring) = &mut self.ring {
            ring.stop_wanting(room, key, push);
        }
    }

    /// Lends what slots are free to whoever waits for some.
    pub(super) fn lend(&mut self, now: Time) {
        let Some(ring) = &mut self.ring else { return };
        for (lease, push, slots) in ring.lend() {
            let Lease { peer, room, seq } = lease;
            self.slots_went_out(lease, push, slots.1);
            self.queue(now, peer, Msg::Credit(Credit { room, seq, slots, push }));
        }
        let hopeless = self.ring.as_ref().map(Ring::hopeless).unwrap_or_default();
        for (lease, push) in hopeless {
            self.refuse_slots(now, lease, push);
        }
    }

    /// A room has failed: its slots wait for the peers' answers.
    pub(super) fn quarantine_slots(&mut self, now: Time, room: Room) {
        if let Some(ring) = &mut self.ring {
            ring.slots.fail(room);
            ring.wants.values_mut().for_each(|w| w.left.retain(|(r, _, _), _| *r != room));
            ring.forget_content();
            // What had landed for it is free.
            self.lend(now);
        }
    }

    /// What to say of a room that waits for slots: that it does, and who has them.
    pub(super) fn slots_waited_for(&self, room: Room) -> String {
        let Some(ring) = self
            .ring
            .as_ref()
            .filter(|r| r.wants.values().any(|w| w.left.keys().any(|(r, _, _)| *r == room)))
        else {
            return String::new();
        };
        let held = ring.slots.held_by_peer();
        let who: Vec<String> =
            held.iter().map(|(key, n)| format!("{n} with {}", self.peer_name(*key))).collect();
        format!(
            ": its pushes wait for staging slots, of which {} are in quarantine and {} are free ({}); evict peers that do not answer, or give \
             staging_slots more",
            ring.slots.quarantined(),
            ring.slots.free(),
            who.join(", ")
        )
    }

    /// Whether this peer may still write to slots of ours.
    pub(super) fn has_slots_of_ours(&self, key: PeerKey) -> bool {
        self.ring.as_ref().is_some_and(|r| r.slots.is_writable_by(key))
    }

    /// A sender has said its last word on a room: whatever it was lent for it is free.
    pub(super) fn slots_drained(&mut self, now: Time, key: PeerKey, room: Room, upto: Seq) {
        if let Some(ring) = &mut self.ring {
            ring.stop_wanting(room, key, None);
            if ring.slots.drained(key, room, upto) > 0 {
                self.lend(now);
            }
        }
    }

    /// A peer was fenced: nothing of it lands any more, and the driver has dropped what it had of it.
    pub(super) fn slots_fenced(&mut self, now: Time, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(&key)
            && let Some(credits) = &mut peer.credits
        {
            credits.lost();
        }
        let deliveries = &self.deliveries;
        self.packing.retain(|id, _| deliveries.contains_key(id));
        let Some(ring) = &mut self.ring else { return };
        let gone: Vec<DeliveryId> =
            ring.unpacking.keys().filter(|id| !deliveries.contains_key(id)).copied().collect();
        for id in gone {
            ring.over(id);
        }
        ring.wants.remove(&key);
        ring.forget_content();
        ring.slots.fenced(key);
        self.lend(now);
    }

    /// For checkers: the slots of our ring.
    #[must_use]
    pub fn ring_slots(&self) -> Option<&Slots> {
        self.ring.as_ref().map(Ring::slots)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{Incarnation, Seq};
    use crate::node::Direction;

    fn lease(peer: u64, room: u64) -> Lease {
        let peer = PeerKey { incarnation: Incarnation(peer), direction: Direction::WeGrant };
        Lease { peer, room: Room::new(room).unwrap(), seq: Seq(1) }
    }

    fn ring(slots: u32) -> Ring {
        Ring::new(Slots::new(64, slots, None).unwrap())
    }

    fn lent(ring: &mut Ring) -> BTreeMap<u64, u32> {
        ring.lend().into_iter().fold(BTreeMap::new(), |mut by, (lease, _, run)| {
            *by.entry(lease.room.get()).or_default() += run.1;
            by
        })
    }

    #[test]
    fn a_peer_that_stops_leaves_slots_for_the_others() {
        let mut r = ring(16);
        r.want(lease(1, 1), PushId(1), 100);
        assert_eq!(lent(&mut r), BTreeMap::from([(1, 8)]), "half of the ring, however many it asks for");
        r.slots.fail(lease(1, 1).room);
        r.want(lease(1, 2), PushId(2), 100);
        assert_eq!(lent(&mut r), BTreeMap::new(), "its quarantine counts as its own");
        r.want(lease(2, 3), PushId(3), 100);
        assert_eq!(lent(&mut r), BTreeMap::from([(3, 4)]));
        r.want(lease(3, 4), PushId(4), 100);
        assert_eq!(lent(&mut r), BTreeMap::from([(4, 2)]));
    }

    #[test]
    fn rooms_take_turns_at_slots_that_come_free() {
        let mut r = ring(8);
        r.want(lease(1, 1), PushId(1), 100);
        assert_eq!(lent(&mut r), BTreeMap::from([(1, 4)]));
        r.want(lease(1, 2), PushId(2), 3);
        r.want(lease(2, 3), PushId(3), 3);
        assert_eq!(lent(&mut r), BTreeMap::from([(3, 2)]), "the other peer has none yet");
        let mut got: BTreeMap<u64, u32> = BTreeMap::new();
        for slot in [0, 1, 2, 3] {
            let owner = r.slots.slots()[slot as usize].lease().unwrap();
            r.slots.returned(owner, slot).unwrap();
            for (room, n) in lent(&mut r) {
                *got.entry(room).or_default() += n;
            }
        }
        assert!(got.get(&2).is_some_and(|n| *n >= 1), "the room that came last has its turn: {got:?}");
    }

    #[test]
    fn a_ring_of_one_slot_serves_everybody_in_turn() {
        let mut r = ring(1);
        for room in 1..=3 {
            r.want(lease(room, room), PushId(room), 2);
        }
        let mut order = Vec::new();
        for _ in 0..6 {
            let runs = r.lend();
            assert_eq!(runs.len(), 1);
            order.push(runs[0].0.room.get());
            r.slots.returned(runs[0].0, 0).unwrap();
        }
        assert_eq!(order, [1, 2, 3, 1, 2, 3]);
        assert!(r.wants.is_empty() && r.slots.free() == 1);
    }
}
