//! Rooms that ended badly are remembered, so that later grants and pushes for them fail at once.
//!
//! How long depends on what can still come. A room is *settled* once this side's caller has had its end and every
//! decode rank has said its word on it: nothing that honest sides send names it any more, and a short memory serves
//! only callers that have not looked yet. The others are remembered for as long as there is room, and those that exist
//! at a peer's word only within that peer's share: no peer can make us forget what another said.

use super::PeerKey;
use crate::error::Reason;
use crate::ids::Room;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

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
    /// At whose word it was made, if not at our caller's.
    by: Option<PeerKey>,
    /// Its place in the order of open tombs.
    at: u64,
}

impl Tomb {
    pub(super) fn new(reason: Reason, told: bool) -> Self {
        Self { reason, told, heard: Vec::new(), ranks: None, settled: false, by: None, at: 0 }
    }

    /// The same, made at this peer's word.
    pub(super) fn at_word_of(mut self, by: Option<PeerKey>) -> Self {
        self.by = by;
        self
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
    open: BTreeMap<u64, Room>,
    /// Of those, the ones that exist at a peer's word.
    by_peer: BTreeMap<PeerKey, BTreeSet<u64>>,
    next: u64,
    /// Rooms of which everybody knows, in the order in which that became so.
    settled: VecDeque<Room>,
}

/// How many rooms of each kind are remembered.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub(super) open: usize,
    pub(super) settled: usize,
    /// Open ones at one peer's word.
    pub(super) per_peer: usize,
}

impl Tombs {
    pub(super) fn put(&mut self, limits: Limits, room: Room, tomb: Tomb) {
        if let Some(old) = self.by_room.get_mut(&room) {
            old.told |= tomb.told;
            if tomb.by.is_none()
                && let Some(key) = old.by.take()
            {
                // Our caller gives it up too: no peer's words push it out any more.
                let at = old.at;
                self.leave_share(key, at);
            }
            let Some(old) = self.by_room.get_mut(&room) else { return };
            old.ranks = old.ranks.or(tomb.ranks);
            for key in tomb.heard {
                if !old.heard.contains(&key) {
                    old.heard.push(key);
                }
            }
        } else {
            if let Some(key) = tomb.by {
                self.make_room_for(limits.per_peer, key);
            }
            while self.open.len() >= limits.open.max(1) {
                let oldest = self.open.first_key_value().map(|(_, room)| *room);
                let Some(oldest) = oldest.and_then(|room| self.close(room)) else { break };
                self.by_room.remove(&oldest);
            }
            let at = self.next;
            self.next += 1;
            self.open.insert(at, room);
            if let Some(key) = tomb.by {
                self.by_peer.entry(key).or_default().insert(at);
            }
            self.by_room.insert(room, Tomb { at, ..tomb });
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
        self.close(room);
        while self.settled.len() >= limits.settled.max(1) {
            if let Some(oldest) = self.settled.pop_front() {
                self.by_room.remove(&oldest);
            }
        }
        self.settled.push_back(room);
    }

    /// Forgets this peer's oldest, so that it may have one more.
    fn make_room_for(&mut self, share: usize, key: PeerKey) {
        while let Some(mine) = self.by_peer.get(&key).filter(|mine| mine.len() >= share.max(1)) {
            let oldest = mine.first().and_then(|at| self.open.get(at)).copied();
            let Some(oldest) = oldest.and_then(|room| self.close(room)) else { break };
            self.by_room.remove(&oldest);
        }
    }

    /// Takes a room out of the open ones.
    fn close(&mut self, room: Room) -> Option<Room> {
        let tomb = self.by_room.get(&room)?;
        let (at, by) = (tomb.at, tomb.by);
        self.open.remove(&at);
        if let Some(key) = by {
            self.leave_share(key, at);
        }
        Some(room)
    }

    fn leave_share(&mut self, key: PeerKey, at: u64) {
        if let Some(mine) = self.by_peer.get_mut(&key) {
            mine.remove(&at);
            if mine.is_empty() {
                self.by_peer.remove(&key);
            }
        }
    }

    /// For a checker, whose limits are never reached: only which rooms are dead here and whether the caller knows is
    /// looked at, for whatever else is kept says how long to remember them.
    pub(super) fn forget_order(&mut self) {
        self.open.clear();
        self.by_peer.clear();
        self.settled.clear();
        self.next = 0;
        for tomb in self.by_room.values_mut() {
            tomb.heard.clear();
            (tomb.ranks, tomb.settled, tomb.by, tomb.at) = (None, false, None, 0);
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

    const LIMITS: Limits = Limits { open: 8, settled: 2, per_peer: 4 };

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

    #[test]
    fn a_peer_can_make_us_forget_its_own_failed_rooms_only() {
        let limits = Limits { open: 100, settled: 10, per_peer: 10 };
        let mut t = Tombs::default();
        t.put(limits, room(1), tomb(true));
        t.put(limits, room(2), tomb(false).at_word_of(Some(key(1))));
        for n in 1000..2000 {
            t.put(limits, room(n), tomb(false).at_word_of(Some(key(2))));
        }
        assert_eq!(t.len(), 12);
        assert!(t.get(room(1)).is_some() && t.get(room(2)).is_some());
        assert!(t.get(room(1999)).is_some() && t.get(room(1990)).is_some() && t.get(room(1989)).is_none());
        // What settles is in nobody's share any more.
        t.tell(limits, room(1990));
        t.hear(limits, room(1990), key(2), Some(1));
        assert_eq!(t.by_peer.get(&key(2)).map(BTreeSet::len), Some(9));
        // The limit on all of them holds too, oldest first.
        for n in 5000..5090 {
            t.put(limits, room(n), tomb(true));
        }
        assert_eq!((t.len(), t.open.len(), t.settled.len()), (101, 100, 1));
        assert!(t.get(room(1)).is_none());
        assert_eq!(t.by_peer.values().map(BTreeSet::len).sum::<usize>(), 10, "{:?}", t.by_peer);
    }
}
