//! Staging slots: where pieces that would be many small runs travel as one write.
//!
//! The receiver has a ring of equal slots ([`Slots`]) and lends some to a sender for one grant of a room. The sender
//! keeps them as [`Credits`]: it packs into a slot with one write and says so once the write is flushed; the receiver
//! then unpacks into the room's pages and may lend the slot again.
//!
//! A slot is memory that somebody else writes, so it obeys the same contract as pages: a slot that was lent comes back
//! only with the sender's word (the write of that slot has landed, or the room is drained), with a completed fence, or
//! with the sender's death. When its room fails it waits for that in quarantine.
//!
//! A sender asks for slots when it has something to pack ([`crate::msg::Pack`]), not before: a grant may wait long for its
//! push, and must not keep slots from others meanwhile. Neither end has a clock or knows messages; [`crate::node`] has them
//! exchange [`crate::msg::Credit`] and [`crate::msg::Packed`]. [`crate::msg::Describe::staging`] says how large a ring is.

use crate::ids::{Room, Seq};
use crate::node::{Flaw, PeerKey};
use std::collections::BTreeMap;
use thiserror::Error;

/// Slots that a ring may have.
pub const MAX_SLOTS: u32 = 1 << 16;

/// What a peer said, or a caller asked, that cannot be.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum StagingError {
    /// The ring itself is not possible.
    #[error(
        "a ring of {count} slots of {slot_bytes} bytes: there may be 1 to {MAX_SLOTS} slots of at least 1 byte, and less than 2^63 bytes in all"
    )]
    BadRing {
        /// Slots asked for.
        count: u32,
        /// Bytes of each.
        slot_bytes: u64,
    },
    /// A slot number past the end of the ring.
    #[error("slots {first} to {first} + {count} are named, but the ring has slots 0 to {last}", last = ring - 1)]
    NoSuchSlot {
        /// First slot named.
        first: u32,
        /// How many.
        count: u32,
        /// Slots that there are.
        ring: u32,
    },
    /// A slot that is not with whom, or not in the state, that the message says.
    #[error("slot {slot} is {is}, so it cannot be {wanted} for room {room}")]
    WrongSlot {
        /// The slot.
        slot: u32,
        /// How it stands.
        is: &'static str,
        /// What was to be done with it.
        wanted: &'static str,
        /// For which room.
        room: Room,
    },
    /// More bytes than a slot holds.
    #[error("{bytes} bytes do not fit into a slot of {slot_bytes} bytes: pack less at once")]
    TooLong {
        /// Bytes.
        bytes: u64,
        /// What a slot holds.
        slot_bytes: u64,
    },
}

/// Who has a slot, and for what.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Lease {
    /// The sender.
    pub peer: PeerKey,
    /// The room.
    pub room: Room,
    /// The grant it belongs to.
    pub seq: Seq,
}

/// How one of the receiver's slots stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Slot {
    /// Nobody writes to it or reads it.
    Free,
    /// The sender may write to it, once.
    Lent(Lease),
    /// The write is there, so many bytes; it waits to be unpacked.
    Landed(Lease, u64),
    /// We copy out of it.
    Unpacking(Lease),
    /// The same, and its room has failed meanwhile.
    Stopping(Lease),
    /// Its room has failed, and the sender may still write to it.
    Quarantined(Lease),
}

impl Slot {
    const fn name(&self) -> &'static str {
        match self {
            Self::Free => "free",
            Self::Lent(_) => "lent",
            Self::Landed(..) => "filled already",
            Self::Unpacking(_) => "being unpacked",
            Self::Stopping(_) => "being unpacked for a room that has failed",
            Self::Quarantined(_) => "in quarantine",
        }
    }

    /// Whose it is, if it is not free.
    #[must_use]
    pub const fn lease(&self) -> Option<Lease> {
        match self {
            Self::Free => None,
            Self::Lent(l)
            | Self::Landed(l, _)
            | Self::Unpacking(l)
            | Self::Stopping(l)
            | Self::Quarantined(l) => Some(*l),
        }
    }
}

fn check_ring(slot_bytes: u64, count: u32) -> Result<(), StagingError> {
    let total = slot_bytes.checked_mul(u64::from(count));
    let fits = total.is_some_and(|t| t < 1 << 63);
    if count == 0 || count > MAX_SLOTS || slot_bytes == 0 || !fits {
        return Err(StagingError::BadRing { count, slot_bytes });
    }
    Ok(())
}

/// The receiver's ring.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Slots {
    slot_bytes: u64,
    slots: Vec<Slot>,
    /// How many each sender has, or had: all that are not free. No sender has none.
    held: BTreeMap<PeerKey, u32>,
    free: u32,
    flaw: Option<Flaw>,
}

/// What became of a slot that a sender says it has filled.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Landing {
    /// It is to be unpacked.
    Unpack,
    /// Its room has failed: the slot is free again, since its one write is over.
    Void,
}

impl Slots {
    /// A ring of so many free slots.
    ///
    /// # Errors
    /// When there are none, too many, or their bytes overflow.
    pub fn new(slot_bytes: u64, count: u32, flaw: Option<Flaw>) -> Result<Self, StagingError> {
        check_ring(slot_bytes, count)?;
        Ok(Self {
            slot_bytes,
            slots: vec![Slot::Free; count as usize],
            held: BTreeMap::new(),
            free: count,
            flaw,
        })
    }

    /// Bytes of a slot.
    #[must_use]
    pub fn slot_bytes(&self) -> u64 {
        self.slot_bytes
    }

    /// All slots, in order.
    #[must_use]
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }

    /// Where a slot begins in the ring's memory.
    #[must_use]
    pub fn offset(&self, slot: u32) -> Option<u64> {
        self.slots.get(slot as usize)?;
        self.slot_bytes.checked_mul(u64::from(slot))
    }

    /// Slots that can be lent.
    #[must_use]
    pub fn free(&self) -> u32 {
        self.free
    }

    /// Slots that wait for a sender's answer, a fence or a death.
    #[must_use]
    pub fn quarantined(&self) -> u32 {
        self.count(|s| matches!(s, Slot::Quarantined(_)))
    }

    /// Whether we still copy out of a slot into this room's pages: until then they must not be released.
    #[must_use]
    pub fn is_unpacking(&self, room: Room) -> bool {
        self.slots.iter().any(|s| matches!(s, Slot::Unpacking(l) | Slot::Stopping(l) if l.room == room))
    }

    /// Slots that each sender has, or had: everything that is not free because of it.
    #[must_use]
    pub fn held_by_peer(&self) -> &BTreeMap<PeerKey, u32> {
        &self.held
    }

    /// The same of one sender.
    #[must_use]
    pub fn held(&self, peer: PeerKey) -> u32 {
        self.held.get(&peer).copied().unwrap_or(0)
    }

    /// Every change of a slot, so that what is counted is true.
    fn set(&mut self, slot: usize, to: Slot) {
        let Some(s) = self.slots.get_mut(slot) else { return };
        let (was, is) = (s.lease().map(|l| l.peer), to.lease().map(|l| l.peer));
        *s = to;
        if was == is {
            return;
        }
        match was {
            None => self.free = self.free.saturating_sub(1),
            Some(peer) => {
                if let Some(n) = self.held.get_mut(&peer) {
                    *n = n.saturating_sub(1);
                    if *n == 0 {
                        self.held.remove(&peer);
                    }
                }
            }
        }
        match is {
            None => self.free = self.free.saturating_add(1),
            Some(peer) => {
                let n = self.held.entry(peer).or_default();
                *n = n.saturating_add(1);
            }
        }
    }

    fn at(&self, slot: u32) -> Result<Slot, StagingError> {
        self.slots.get(slot as usize).copied().ok_or(no_such(slot, 1, self.slots.len()))
    }

    /// Whether this sender may still write to any slot.
    #[must_use]
    pub fn is_writable_by(&self, peer: PeerKey) -> bool {
        self.slots.iter().any(|s| matches!(s, Slot::Lent(l) | Slot::Quarantined(l) if l.peer == peer))
    }

    fn count(&self, f: impl Fn(&Slot) -> bool) -> u32 {
        // At most `MAX_SLOTS`.
        u32::try_from(self.slots.iter().filter(|s| f(s)).count()).unwrap_or(MAX_SLOTS)
    }

    /// Lends at most `want` slots: runs of (first slot, how many), for one `Credit` each. Fewer or none when the ring
    /// is in use.
    pub fn lend(&mut self, lease: Lease, want: u32) -> Vec<(u32, u32)> {
        let mut runs: Vec<(u32, u32)> = Vec::new();
        let all = u32::try_from(self.slots.len()).unwrap_or(MAX_SLOTS);
        let mut left = want.min(self.free);
        for n in 0..all {
            if left == 0 {
                break;
            }
            if self.slots.get(n as usize) != Some(&Slot::Free) {
                continue;
            }
            self.set(n as usize, Slot::Lent(lease));
            left -= 1;
            match runs.last_mut() {
                Some((first, count)) if first.checked_add(*count) == Some(n) => *count += 1,
                _ => runs.push((n, 1)),
            }
        }
        runs
    }

    /// A sender says that its write to this slot is there.
    ///
    /// # Errors
    /// When the slot was not lent for this, or cannot hold so much. Nothing has changed then.
    pub fn landed(&mut self, lease: Lease, slot: u32, bytes: u64) -> Result<Landing, StagingError> {
        let slot_bytes = self.slot_bytes;
        match self.at(slot)? {
            Slot::Lent(l) if l == lease => {
                if bytes > slot_bytes {
                    return Err(StagingError::TooLong { bytes, slot_bytes });
                }
                self.set(slot as usize, Slot::Landed(lease, bytes));
                Ok(Landing::Unpack)
            }
            Slot::Quarantined(l) if l == lease => {
                self.set(slot as usize, Slot::Free);
                Ok(Landing::Void)
            }
            s => Err(StagingError::WrongSlot { slot, is: s.name(), wanted: "filled", room: lease.room }),
        }
    }

    /// A sender gives a slot back that it did not use, or whose bytes count for nothing.
    ///
    /// # Errors
    /// When the slot was not lent for this. Nothing has changed then.
    pub fn returned(&mut self, lease: Lease, slot: u32) -> Result<(), StagingError> {
        match self.at(slot)? {
            Slot::Lent(l) | Slot::Quarantined(l) if l == lease => {
                self.set(slot as usize, Slot::Free);
                Ok(())
            }
            s => Err(StagingError::WrongSlot { slot, is: s.name(), wanted: "given back", room: lease.room }),
        }
    }

    /// We begin to copy out of a slot. Returns how many bytes of it count.
    ///
    /// # Errors
    /// When nothing has landed in it for this lease.
    pub fn unpack(&mut self, lease: Lease, slot: u32) -> Result<u64, StagingError> {
        match self.at(slot)? {
            Slot::Landed(l, bytes) if l == lease => {
                self.set(slot as usize, Slot::Unpacking(l));
                Ok(bytes)
            }
            s => Err(StagingError::WrongSlot { slot, is: s.name(), wanted: "unpacked", room: lease.room }),
        }
    }

    /// We have stopped copying out of a slot, done or not: it is free. Returns whether its bytes count: not if its room
    /// has failed meanwhile.
    ///
    /// # Errors
    /// When we were not.
    pub fn unpacked(&mut self, lease: Lease, slot: u32) -> Result<bool, StagingError> {
        match self.at(slot)? {
            s @ (Slot::Unpacking(l) | Slot::Stopping(l)) if l == lease => {
                self.set(slot as usize, Slot::Free);
                Ok(matches!(s, Slot::Unpacking(_)))
            }
            s => Err(StagingError::WrongSlot { slot, is: s.name(), wanted: "emptied", room: lease.room }),
        }
    }

    /// A room fails. What has landed for it is free; what may still be written waits.
    pub fn fail(&mut self, room: Room) {
        let early = self.flaw == Some(Flaw::StagingSlotFreedEarly);
        for n in 0..self.slots.len() {
            match self.slots[n] {
                Slot::Lent(l) if l.room == room => {
                    self.set(n, if early { Slot::Free } else { Slot::Quarantined(l) });
                }
                Slot::Landed(l, _) if l.room == room => self.set(n, Slot::Free),
                Slot::Unpacking(l) if l.room == room => self.set(n, Slot::Stopping(l)),
                _ => {}
            }
        }
    }

    /// A sender is done with a room, and sends nothing more for grants up to `upto`: the answer to a cancel, or
    /// its last `Done`. Returns how many slots that freed.
    pub fn drained(&mut self, peer: PeerKey, room: Room, upto: Seq) -> u32 {
        self.release(|l| l.peer == peer && l.room == room && l.seq <= upto)
    }

    /// A sender is fenced or dead: nothing of it lands any more. Returns how many slots that freed.
    pub fn fenced(&mut self, peer: PeerKey) -> u32 {
        self.release(|l| l.peer == peer)
    }

    /// For checkers, to number grants anew: whose each slot is that is not free. Its peer stays.
    pub(crate) fn leases_mut(&mut self) -> impl Iterator<Item = &mut Lease> {
        self.slots.iter_mut().filter_map(|s| match s {
            Slot::Free => None,
            Slot::Lent(l)
            | Slot::Landed(l, _)
            | Slot::Unpacking(l)
            | Slot::Stopping(l)
            | Slot::Quarantined(l) => Some(l),
        })
    }

    fn release(&mut self, of: impl Fn(&Lease) -> bool) -> u32 {
        let mut freed = 0;
        for n in 0..self.slots.len() {
            if let Slot::Lent(l) | Slot::Quarantined(l) = self.slots[n]
                && of(&l)
            {
                self.set(n, Slot::Free);
                freed += 1;
            }
        }
        freed
    }
}

fn no_such(first: u32, count: u32, ring: usize) -> StagingError {
    StagingError::NoSuchSlot { first, count, ring: u32::try_from(ring).unwrap_or(MAX_SLOTS) }
}

/// How one of a receiver's slots stands at the sender.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Credit {
    /// Not ours.
    None,
    /// Ours to write to.
    Held(Room, Seq),
    /// Our write is in flight.
    Writing(Room, Seq),
    /// The same, and its grant was voided.
    Stopping(Room, Seq),
}

/// What one receiver has lent to us.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Credits {
    slot_bytes: u64,
    slots: Vec<Credit>,
}

impl Credits {
    /// No slot yet, of a ring as the receiver describes it.
    ///
    /// # Errors
    /// When such a ring cannot be.
    pub fn new(slot_bytes: u64, count: u32) -> Result<Self, StagingError> {
        check_ring(slot_bytes, count)?;
        Ok(Self { slot_bytes, slots: vec![Credit::None; count as usize] })
    }

    /// The receiver lends slots for a grant.
    ///
    /// # Errors
    /// When there are no such slots, or one of them is ours already. Nothing has changed then.
    pub fn grant(&mut self, room: Room, seq: Seq, (first, count): (u32, u32)) -> Result<(), StagingError> {
        let ring = self.slots.len();
        let run = first
            .checked_add(count)
            .filter(|_| count > 0)
            .and_then(|end| self.slots.get_mut(first as usize..end as usize))
            .ok_or(no_such(first, count, ring))?;
        if let Some((s, n)) = run.iter().zip(first..).find(|(s, _)| **s != Credit::None) {
            let is = if matches!(s, Credit::Held(..)) { "lent to us already" } else { "being written by us" };
            return Err(StagingError::WrongSlot { slot: n, is, wanted: "lent", room });
        }
        run.fill(Credit::Held(room, seq));
        Ok(())
    }

    /// Slots that can be written for this grant now.
    #[must_use]
    pub fn held(&self, room: Room, seq: Seq) -> usize {
        self.slots.iter().filter(|s| **s == Credit::Held(room, seq)).count()
    }

    /// Takes a slot for one write of this many bytes; none if the receiver has to lend more first.
    ///
    /// # Errors
    /// When no slot can hold so much.
    pub fn take(&mut self, room: Room, seq: Seq, bytes: u64) -> Result<Option<u32>, StagingError> {
        if bytes > self.slot_bytes {
            return Err(StagingError::TooLong { bytes, slot_bytes: self.slot_bytes });
        }
        let found = self.slots.iter_mut().zip(0u32..).find(|(s, _)| **s == Credit::Held(room, seq));
        Ok(found.map(|(s, n)| {
            *s = Credit::Writing(room, seq);
            n
        }))
    }

    /// A write is flushed. Returns whether the receiver is to be told so: not if the grant was voided meanwhile, since
    /// the drain answers for all its slots.
    ///
    /// # Errors
    /// When none of ours was under way there.
    pub fn written(&mut self, room: Room, slot: u32) -> Result<bool, StagingError> {
        self.end(room, slot, Credit::None)
    }

    /// A write was stopped, and is not in flight any more. Unless the grant was voided, the slot can be taken again.
    ///
    /// # Errors
    /// When none of ours was under way there.
    pub fn stopped(&mut self, room: Room, slot: u32) -> Result<(), StagingError> {
        let seq = match self.slots.get(slot as usize) {
            Some(Credit::Writing(_, seq)) => *seq,
            _ => Seq(0),
        };
        self.end(room, slot, Credit::Held(room, seq)).map(|_| ())
    }

    /// A slot goes back to the receiver, written or not: nothing of ours is in flight to it. Returns the grant for which it
    /// was lent.
    ///
    /// # Errors
    /// When it is not ours for this room.
    pub fn release(&mut self, room: Room, slot: u32) -> Result<Seq, StagingError> {
        let ring = self.slots.len();
        let s = self.slots.get_mut(slot as usize).ok_or(no_such(slot, 1, ring))?;
        match *s {
            Credit::Held(r, seq) | Credit::Writing(r, seq) | Credit::Stopping(r, seq) if r == room => {
                *s = Credit::None;
                Ok(seq)
            }
            _ => Err(StagingError::WrongSlot { slot, is: "not ours", wanted: "given back", room }),
        }
    }

    fn end(&mut self, room: Room, slot: u32, then: Credit) -> Result<bool, StagingError> {
        let ring = self.slots.len();
        let s = self.slots.get_mut(slot as usize).ok_or(no_such(slot, 1, ring))?;
        match *s {
            Credit::Writing(r, _) if r == room => {
                *s = then;
                Ok(true)
            }
            Credit::Stopping(r, _) if r == room => {
                *s = Credit::None;
                Ok(false)
            }
            Credit::Held(..) => {
                Err(StagingError::WrongSlot { slot, is: "not being written", wanted: "written", room })
            }
            _ => Err(StagingError::WrongSlot { slot, is: "not ours", wanted: "written", room }),
        }
    }

    /// A room's grants up to `upto` are void, or it has failed here: its unused slots are given up. The receiver may be
    /// told that it is drained once [`Credits::is_writing`] says no.
    pub fn cancel(&mut self, room: Room, upto: Seq) {
        for s in &mut self.slots {
            match *s {
                Credit::Held(r, seq) if r == room && seq <= upto => *s = Credit::None,
                Credit::Writing(r, seq) if r == room && seq <= upto => *s = Credit::Stopping(r, seq),
                _ => {}
            }
        }
    }

    /// Whether a write of ours for this room is in flight.
    #[must_use]
    pub fn is_writing(&self, room: Room) -> bool {
        self.slots.iter().any(|s| matches!(s, Credit::Writing(r, _) | Credit::Stopping(r, _) if *r == room))
    }

    /// For checkers: the grants for which slots were lent.
    pub(crate) fn seqs(&self) -> impl Iterator<Item = Seq> {
        self.slots.iter().filter_map(|s| match *s {
            Credit::None => None,
            Credit::Held(_, seq) | Credit::Writing(_, seq) | Credit::Stopping(_, seq) => Some(seq),
        })
    }

    /// The same, for changes.
    pub(crate) fn seqs_mut(&mut self) -> impl Iterator<Item = &mut Seq> {
        self.slots.iter_mut().filter_map(|s| match s {
            Credit::None => None,
            Credit::Held(_, seq) | Credit::Writing(_, seq) | Credit::Stopping(_, seq) => Some(seq),
        })
    }

    /// Our endpoint to the receiver is closed and our writes have ended: nothing is ours any more.
    pub fn lost(&mut self) {
        self.slots.fill(Credit::None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Incarnation;
    use crate::node::Direction;
    use proptest::prelude::*;

    fn room(n: u64) -> Room {
        Room::new(n).unwrap()
    }

    fn lease(peer: u64, r: u64, seq: u64) -> Lease {
        let peer = PeerKey { incarnation: Incarnation(peer), direction: Direction::WeGrant };
        Lease { peer, room: room(r), seq: Seq(seq) }
    }

    #[test]
    fn rings_that_cannot_be_are_refused() {
        for (bytes, count) in [(0, 4), (64, 0), (64, MAX_SLOTS + 1), (1 << 62, 2), (u64::MAX, 1)] {
            let err = Slots::new(bytes, count, None).unwrap_err();
            assert_eq!(err, StagingError::BadRing { count, slot_bytes: bytes });
            assert_eq!(Credits::new(bytes, count).unwrap_err(), err);
        }
        let ring = Slots::new(1 << 40, 8, None).unwrap();
        assert_eq!((ring.offset(7), ring.offset(8)), (Some(7 << 40), None));
    }

    #[test]
    fn runs_of_credit_go_round_slots_in_use() {
        let mut ring = Slots::new(64, 5, None).unwrap();
        assert_eq!(ring.lend(lease(1, 1, 1), 2), [(0, 2)]);
        assert_eq!(ring.lend(lease(2, 2, 1), 1), [(2, 1)]);
        assert_eq!(ring.landed(lease(1, 1, 1), 1, 64), Ok(Landing::Unpack));
        ring.unpack(lease(1, 1, 1), 1).unwrap();
        assert_eq!(ring.unpacked(lease(1, 1, 1), 1), Ok(true));
        assert_eq!(ring.lend(lease(3, 3, 1), 9), [(1, 1), (3, 2)], "as many as there are, and no more");
        assert_eq!(ring.lend(lease(3, 3, 1), 1), []);
    }

    #[test]
    fn what_a_hostile_sender_says_changes_nothing() {
        let mut ring = Slots::new(64, 2, None).unwrap();
        let mine = lease(1, 1, 1);
        assert_eq!(ring.lend(mine, 1), [(0, 1)]);
        let before = ring.clone();
        assert!(matches!(ring.landed(mine, 2, 1), Err(StagingError::NoSuchSlot { first: 2, .. })));
        assert!(matches!(ring.landed(mine, u32::MAX, 1), Err(StagingError::NoSuchSlot { .. })));
        assert!(matches!(ring.landed(mine, 1, 1), Err(StagingError::WrongSlot { is: "free", .. })));
        assert_eq!(ring.landed(mine, 0, 65), Err(StagingError::TooLong { bytes: 65, slot_bytes: 64 }));
        for other in [lease(2, 1, 1), lease(1, 2, 1), lease(1, 1, 2)] {
            assert!(matches!(ring.landed(other, 0, 1), Err(StagingError::WrongSlot { is: "lent", .. })));
        }
        assert!(ring.unpack(mine, 0).is_err() && ring.unpacked(mine, 0).is_err());
        assert_eq!(ring, before);
        ring.landed(mine, 0, 64).unwrap();
        assert!(matches!(
            ring.landed(mine, 0, 64),
            Err(StagingError::WrongSlot { is: "filled already", .. })
        ));
    }

    #[test]
    fn what_a_hostile_receiver_says_changes_nothing() {
        let mut credits = Credits::new(64, 4).unwrap();
        credits.grant(room(1), Seq(1), (1, 2)).unwrap();
        let before = credits.clone();
        for run in [(4, 1), (0, 5), (3, u32::MAX), (u32::MAX, 2), (0, 0)] {
            let err = credits.grant(room(2), Seq(1), run).unwrap_err();
            assert_eq!(err, StagingError::NoSuchSlot { first: run.0, count: run.1, ring: 4 });
        }
        let err = credits.grant(room(2), Seq(1), (0, 4)).unwrap_err();
        assert!(err.to_string().contains("slot 1 is lent to us already"), "{err}");
        assert_eq!(credits, before);
        assert_eq!(
            credits.take(room(1), Seq(1), 65),
            Err(StagingError::TooLong { bytes: 65, slot_bytes: 64 })
        );
        assert_eq!(credits.take(room(1), Seq(2), 1), Ok(None), "of another grant");
    }

    #[test]
    fn a_failed_rooms_slots_wait_for_the_senders_answer() {
        let mut ring = Slots::new(64, 4, None).unwrap();
        let (a, b) = (lease(1, 1, 3), lease(2, 1, 3));
        ring.lend(a, 2);
        ring.lend(b, 2);
        ring.landed(a, 0, 1).unwrap();
        ring.unpack(a, 0).unwrap();
        ring.fail(room(1));
        assert_eq!((ring.free(), ring.quarantined()), (0, 3));
        assert!(ring.is_unpacking(room(1)), "its pages are not free either");
        assert_eq!(ring.unpacked(a, 0), Ok(false), "what comes out of it counts for nothing");
        assert_eq!(ring.drained(a.peer, room(1), Seq(2)), 0, "an answer to an earlier cancel");
        assert_eq!(ring.drained(a.peer, room(2), Seq(3)), 0);
        assert_eq!(ring.landed(b, 2, 1), Ok(Landing::Void), "its one write is over");
        assert_eq!(ring.drained(a.peer, room(1), Seq(3)), 1);
        assert_eq!(ring.quarantined(), 1);
        assert_eq!(ring.fenced(b.peer), 1);
        assert_eq!(ring.free(), 4);
    }

    #[test]
    fn a_cancel_in_the_middle_of_a_write_waits_for_it() {
        let mut credits = Credits::new(64, 3).unwrap();
        credits.grant(room(1), Seq(1), (0, 2)).unwrap();
        credits.grant(room(2), Seq(2), (2, 1)).unwrap();
        assert_eq!(credits.take(room(1), Seq(1), 64), Ok(Some(0)));
        credits.cancel(room(1), Seq(1));
        assert!(credits.is_writing(room(1)));
        assert_eq!(credits.take(room(1), Seq(1), 1), Ok(None), "what was not used is void");
        assert_eq!(credits.written(room(1), 0), Ok(false), "the drain answers for it");
        assert!(!credits.is_writing(room(1)));
        assert_eq!(credits.take(room(2), Seq(2), 1), Ok(Some(2)), "another room's stands");
        credits.stopped(room(2), 2).unwrap();
        assert_eq!(
            credits.take(room(2), Seq(2), 1),
            Ok(Some(2)),
            "stopped by itself, it can be written again"
        );
        credits.lost();
        assert!(credits.written(room(2), 2).is_err());
    }

    proptest! {
        /// Whatever is said in whatever order: a slot is with one lease at most, and the sender never writes to a slot
        /// that the receiver takes for free, or has lent to somebody else.
        #[test]
        fn both_ends_agree_on_who_may_write(ops in proptest::collection::vec((0u8..9, 0u64..2, 0u64..3, 0u32..4), 0..120)) {
            let mut ring = Slots::new(8, 3, None).unwrap();
            let mut credits = [Credits::new(8, 3).unwrap(), Credits::new(8, 3).unwrap()];
            let mut failed = std::collections::BTreeSet::new();
            for (op, p, r, slot) in ops {
                let l = lease(p, r, 1);
                let c = &mut credits[usize::from(p != 0)];
                match op {
                    0 | 1 if !failed.contains(&r) => for run in ring.lend(l, slot) {
                        c.grant(l.room, l.seq, run).unwrap();
                    },
                    2 => { c.take(l.room, l.seq, 8).unwrap(); }
                    3 => {
                        let whole = c.written(l.room, slot) == Ok(true);
                        if whole { ring.landed(l, slot, 8).unwrap(); }
                    }
                    4 => { let _ = c.stopped(l.room, slot); }
                    5 => { let _ = ring.unpack(l, slot); }
                    6 => { let _ = ring.unpacked(l, slot); }
                    7 => { failed.insert(r); ring.fail(l.room); }
                    8 if failed.contains(&r) => {
                        c.cancel(l.room, l.seq);
                        if !c.is_writing(l.room) { ring.drained(l.peer, l.room, l.seq); }
                    }
                    _ => {}
                }
                let held = |key| ring.slots().iter().filter(|s| s.lease().is_some_and(|l| l.peer == key)).count();
                for key in [lease(0, 0, 0).peer, lease(1, 0, 0).peer] {
                    prop_assert_eq!(ring.held(key) as usize, held(key));
                }
                let free = ring.slots().iter().filter(|s| **s == Slot::Free).count();
                prop_assert_eq!(ring.free() as usize, free);
                for (p, c) in credits.iter().enumerate() {
                    for (s, owner) in c.slots.iter().zip(ring.slots()) {
                        if let Credit::Held(r, _) | Credit::Writing(r, _) | Credit::Stopping(r, _) = s {
                            prop_assert!(matches!(owner, Slot::Lent(l) | Slot::Quarantined(l)
                                if l.room == *r && l.peer == lease(p as u64, 0, 0).peer));
                        }
                    }
                }
            }
        }
    }
}
