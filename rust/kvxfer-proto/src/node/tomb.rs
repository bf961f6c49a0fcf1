//! Rooms that ended badly are remembered, so that later grants and pushes for them fail at once.

use super::PeerKey;
use crate::error::Reason;
use crate::ids::Room;
use std::collections::{BTreeMap, BTreeSet};

/// Why a room is dead.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Tomb {
    pub(super) reason: Reason,
    /// Whether this side's caller has had its terminal event.
    pub(super) told: bool,
    /// Its place in the order of tombs.
    at: u64,
    /// At whose word it was made.
    by: Option<PeerKey>,
}

/// The last so many failed rooms.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Tombs {
    by_room: BTreeMap<Room, Tomb>,
    /// Oldest first.
    order: BTreeMap<u64, Room>,
    by_peer: BTreeMap<PeerKey, BTreeSet<u64>>,
    next: u64,
}

impl Tombs {
    pub(super) fn put(&mut self, limit: usize, room: Room, reason: Reason, told: bool) {
        self.put_by(limit, room, reason, told, None);
    }

    pub(super) fn put_by(
        &mut self,
        limit: usize,
        room: Room,
        reason: Reason,
        told: bool,
        by: Option<PeerKey>,
    ) {
        if let Some(old) = self.by_room.get_mut(&room) {
            old.told |= told;
            return;
        }
        while self.order.len() >= limit.max(1) {
            let Some((at, _)) = self.order.first_key_value() else { break };
            self.remove(*at);
        }
        let at = self.next;
        self.next += 1;
        self.order.insert(at, room);
        if let Some(key) = by {
            self.by_peer.entry(key).or_default().insert(at);
        }
        self.by_room.insert(room, Tomb { reason, told, at, by });
    }

    /// Forgets this peer's oldest, so that it may have one more: it cannot make us forget another's.
    pub(super) fn make_room_for(&mut self, share: usize, key: PeerKey) {
        while let Some(mine) = self.by_peer.get(&key)
            && mine.len() >= share.max(1)
            && let Some(at) = mine.first().copied()
        {
            self.remove(at);
        }
    }

    fn remove(&mut self, at: u64) {
        let Some(tomb) = self.order.remove(&at).and_then(|room| self.by_room.remove(&room)) else { return };
        if let Some(key) = tomb.by
            && let Some(mine) = self.by_peer.get_mut(&key)
        {
            mine.remove(&tomb.at);
            if mine.is_empty() {
                self.by_peer.remove(&key);
            }
        }
    }

    pub(super) fn get_mut(&mut self, room: Room) -> Option<&mut Tomb> {
        self.by_room.get_mut(&room)
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

    #[test]
    fn a_peer_can_make_us_forget_its_own_failed_rooms_only() {
        let key = |n| PeerKey { incarnation: Incarnation(n), direction: Direction::TheyGrant };
        let room = |n| Room::new(n).unwrap();
        let reason = || Reason::new(ReasonKind::Cancelled, "x");
        let mut tombs = Tombs::default();
        tombs.put(100, room(1), reason(), true);
        tombs.put_by(100, room(2), reason(), false, Some(key(1)));
        for n in 1000..2000 {
            tombs.make_room_for(10, key(2));
            tombs.put_by(100, room(n), reason(), false, Some(key(2)));
        }
        assert_eq!(tombs.len(), 12);
        assert!(tombs.get_mut(room(1)).is_some() && tombs.get_mut(room(2)).is_some());
        assert!(tombs.get_mut(room(1999)).is_some() && tombs.get_mut(room(1989)).is_none());
        // The limit on all of them holds too, oldest first.
        for n in 5000..5090 {
            tombs.put(100, room(n), reason(), true);
        }
        assert_eq!(tombs.len(), 100);
        assert!(tombs.get_mut(room(1)).is_none());
        assert_eq!(tombs.order.len(), 100);
        assert_eq!(tombs.by_peer.values().map(BTreeSet::len).sum::<usize>(), 10, "{:?}", tombs.by_peer);
    }
}
