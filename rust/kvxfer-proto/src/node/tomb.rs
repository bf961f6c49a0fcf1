//! Rooms that ended badly are remembered, so that later grants and pushes for them fail at once.
//!
//! How long depends on what can still come. A room is *settled* once this side's caller has had its end and every
//! decode rank has said its word on it: nothing that honest sides send names it any more, and a short memory serves
//! only callers that have not looked yet. The others are remembered for as long as there is room.

use super::PeerKey;
use crate::error::Reason;
use crate::ids::Room;
use std::collections::{BTreeMap, VecDeque};

/// Why a room is dead, and who knows.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Tomb {
    pub(super) reason: Reason,
    /// Whether this side's caller has had its terminal event.
    told: bool,
    /// Decode ranks that have granted the room, or said that they never will.
    heard: Vec<PeerKey>,
    /// How many such ranks there are, once one of them has said so.
    ranks: Option<u32>,
    settled: bool,
}

impl Tomb {
    pub(super) fn new(reason: Reason, told: bool) -> Self {
        Self { reason, told, heard: Vec::new(), ranks: None, settled: false }
    }

    /// The same, with the ranks that were heard before the room ended.
    pub(super) fn with_ranks(mut self, heard: Vec<PeerKey>, ranks: Option<u32>) -> Self {
        self.heard = heard;
        self.ranks = ranks;
        self
    }

    /// No grant is waited for: the room was granted from here.
    pub(super) fn without_ranks(mut self) -> Self {
        self.ranks = Some(0);
        self
    }

    pub(super) fn is_told(&self) -> bool {
        self.told
    }
}

/// The last so many failed rooms of either kind.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Tombs {
    by_room: BTreeMap<Room, Tomb>,
    /// Rooms for which something may still come, oldest first.
    open: VecDeque<Room>,
    /// Rooms of which everybody knows, in the order in which that became so.
    settled: VecDeque<Room>,
}

/// How many rooms of each kind are remembered.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) open: usize,
    pub(super) settled: usize,
}

impl Tombs {
    pub(super) fn put(&mut self, limits: Limits, room: Room, tomb: Tomb) {
        if let Some(old) = self.by_room.get_mut(&room) {
            old.told |= tomb.told;
            old.ranks = old.ranks.or(tomb.ranks);
            for key in tomb.heard {
                if !old.heard.contains(&key) {
                    old.heard.push(key);
                }
            }
        } else {
            Self::make_room(&mut self.by_room, &mut self.open, limits.open);
            self.open.push_back(room);
            self.by_room.insert(room, tomb);
        }
        self.settle(limits, room);
    }

    pub(super) fn get(&self, room: Room) -> Option<&Tomb> {
        self.by_room.get(&room)
    }

    /// This side's caller gets to know the end now.
    pub(super) fn tell(&mut self, limits: Limits, room: Room) {
        if let Some(tomb) = self.by_room.get_mut(&room) {
            tomb.told = true;
            self.settle(limits, room);
        }
    }

    /// The caller begins a room of this number anew, and knows nothing of its end.
    pub(super) fn untell(&mut self, room: Room) {
        if let Some(tomb) = self.by_room.get_mut(&room) {
            tomb.told = false;
        }
    }

    /// A decode rank has said its word on a dead room.
    pub(super) fn hear(&mut self, limits: Limits, room: Room, key: PeerKey, ranks: Option<u32>) {
        if let Some(tomb) = self.by_room.get_mut(&room) {
            tomb.ranks = tomb.ranks.or(ranks);
            if !tomb.heard.contains(&key) {
                tomb.heard.push(key);
            }
            self.settle(limits, room);
        }
    }

    fn settle(&mut self, limits: Limits, room: Room) {
        let Some(tomb) = self.by_room.get_mut(&room) else { return };
        let all = tomb.ranks.is_some_and(|n| tomb.heard.len() as u64 >= u64::from(n));
        if tomb.settled || !tomb.told || !all {
            return;
        }
        tomb.settled = true;
        tomb.heard = Vec::new();
        // Most settle soon after they were made, so the search is short.
        if let Some(at) = self.open.iter().rposition(|r| *r == room) {
            self.open.remove(at);
        }
        Self::make_room(&mut self.by_room, &mut self.settled, limits.settled);
        self.settled.push_back(room);
    }

    fn make_room(by_room: &mut BTreeMap<Room, Tomb>, order: &mut VecDeque<Room>, limit: usize) {
        while order.len() >= limit.max(1) {
            if let Some(oldest) = order.pop_front() {
                by_room.remove(&oldest);
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_room.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ReasonKind;
    use crate::ids::Incarnation;
    use crate::node::Direction;

    const LIMITS: Limits = Limits { open: 8, settled: 2 };

    fn room(n: u64) -> Room {
        Room::new(n).unwrap()
    }

    fn key(n: u64) -> PeerKey {
        PeerKey { incarnation: Incarnation(n), direction: Direction::TheyGrant }
    }

    fn tomb(told: bool) -> Tomb {
        Tomb::new(Reason::new(ReasonKind::Cancelled, "enough"), told)
    }

    #[test]
    fn a_room_settles_once_its_caller_and_every_rank_have_spoken_and_not_before() {
        let mut t = Tombs::default();
        t.put(LIMITS, room(1), tomb(false));
        t.hear(LIMITS, room(1), key(1), Some(2));
        t.hear(LIMITS, room(1), key(1), Some(2));
        t.tell(LIMITS, room(1));
        assert_eq!(
            (t.open.len(), t.settled.len()),
            (1, 0),
            "one rank is missing, however often the other speaks"
        );
        t.hear(LIMITS, room(1), key(2), None);
        assert_eq!((t.open.len(), t.settled.len(), t.len()), (0, 1, 1));
        t.put(LIMITS, room(2), tomb(true));
        assert_eq!((t.open.len(), t.settled.len()), (1, 1), "nobody knows how many ranks there are");
    }

    #[test]
    fn settled_rooms_take_no_place_from_those_for_which_something_may_come() {
        let mut t = Tombs::default();
        for n in 0..8 {
            t.put(LIMITS, room(n), tomb(false));
        }
        for n in 100..200 {
            t.put(LIMITS, room(n), tomb(true).without_ranks());
        }
        // The first of the hundred took the place of the oldest while it was being made, no other did.
        assert_eq!((t.open.len(), t.settled.len(), t.len()), (7, 2, 9));
        assert!(t.get(room(0)).is_none());
        assert!((1..8).all(|n| t.get(room(n)).is_some()));
        assert!(t.get(room(199)).is_some() && t.get(room(198)).is_some());
    }
}
