//! The thread's table of rooms, which knows how many are in which state without a walk over them.

use crate::metrics::{ROOM_SIDES, ROOM_STATES};
use crate::rooms::RoomShared;
use kvxfer_proto::node::Stage;
use kvxfer_proto::{Room, Time};
use std::collections::HashMap;
use std::sync::Arc;

/// How many rooms of each side are in each state.
pub(crate) type RoomCounts = [[u64; ROOM_STATES.len()]; ROOM_SIDES.len()];

/// Where "draining" is in [`ROOM_STATES`].
const DRAINING: usize = 3;

struct Entry {
    shared: Arc<RoomShared>,
    state: usize,
    failed_at: Time,
}

impl Entry {
    fn side(&self) -> usize {
        usize::from(!self.shared.expected)
    }
}

/// Rooms that callers know and whose pages are not all free.
#[derive(Default)]
pub(super) struct Rooms {
    map: HashMap<Room, Entry>,
    counts: RoomCounts,
}

impl Rooms {
    pub(super) fn counts(&self) -> RoomCounts {
        self.counts
    }

    /// Whether any room, of either side, has not ended.
    pub(super) fn any_goes_on(&self) -> bool {
        self.counts.iter().flat_map(|side| &side[..DRAINING]).any(|n| *n > 0)
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    pub(super) fn contains_key(&self, room: &Room) -> bool {
        self.map.contains_key(room)
    }

    pub(super) fn get(&self, room: &Room) -> Option<&Arc<RoomShared>> {
        self.map.get(room).map(|e| &e.shared)
    }

    /// A room that has just begun, or another order for one that is there.
    pub(super) fn insert(&mut self, room: Room, shared: Arc<RoomShared>) -> Option<Arc<RoomShared>> {
        if let Some(there) = self.map.get_mut(&room).filter(|e| Arc::ptr_eq(&e.shared, &shared)) {
            return Some(Arc::clone(&there.shared));
        }
        let old = self.remove(&room);
        let entry = Entry { shared, state: Stage::Bootstrapping as usize, failed_at: Time(0) };
        count(&mut self.counts, &entry, true);
        self.map.insert(room, entry);
        old
    }

    pub(super) fn remove(&mut self, room: &Room) -> Option<Arc<RoomShared>> {
        let entry = self.map.remove(room)?;
        count(&mut self.counts, &entry, false);
        Some(entry.shared)
    }

    pub(super) fn drain(&mut self) -> impl Iterator<Item = (Room, Arc<RoomShared>)> {
        self.counts = RoomCounts::default();
        self.map.drain().map(|(room, entry)| (room, entry.shared))
    }

    /// The room is in a later stage, but not at its end.
    pub(super) fn set_stage(&mut self, room: Room, stage: Stage) {
        if let Some(entry) = self.map.get_mut(&room).filter(|e| e.state != DRAINING) {
            entry.shared.set_stage(stage);
            count(&mut self.counts, entry, false);
            entry.state = stage as usize;
            count(&mut self.counts, entry, true);
        }
    }

    /// The room has failed and its pages are not free.
    pub(super) fn set_draining(&mut self, room: Room, now: Time) {
        if let Some(entry) = self.map.get_mut(&room) {
            count(&mut self.counts, entry, false);
            entry.state = DRAINING;
            entry.failed_at = now;
            count(&mut self.counts, entry, true);
        }
    }

    /// How long a room has been draining, microseconds.
    pub(super) fn drained_us(&self, room: Room, now: Time) -> Option<u64> {
        self.map.get(&room).filter(|e| e.state == DRAINING).map(|e| now.since_us(e.failed_at))
    }
}

fn count(counts: &mut RoomCounts, entry: &Entry, more: bool) {
    if let Some(n) = counts.get_mut(entry.side()).and_then(|side| side.get_mut(entry.state)) {
        *n = if more { *n + 1 } else { n.saturating_sub(1) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(n: u64) -> Room {
        Room::new(n).unwrap()
    }

    #[test]
    fn rooms_are_counted_by_side_and_state_whatever_happens_to_them() {
        let mut rooms = Rooms::default();
        let (a, b) = (Arc::new(RoomShared::new(true)), Arc::new(RoomShared::new(false)));
        assert!(rooms.insert(room(1), Arc::clone(&a)).is_none());
        assert!(rooms.insert(room(2), Arc::clone(&b)).is_none());
        assert!(rooms.insert(room(2), Arc::clone(&b)).is_some(), "a second push of it");
        assert_eq!(rooms.counts(), [[1, 0, 0, 0], [1, 0, 0, 0]]);
        rooms.set_stage(room(1), Stage::Waiting);
        rooms.set_stage(room(1), Stage::Transferring);
        assert!(rooms.insert(room(1), Arc::clone(&a)).is_some(), "another order does not begin it anew");
        assert_eq!(rooms.counts(), [[0, 0, 1, 0], [1, 0, 0, 0]]);
        assert!(rooms.any_goes_on());
        assert_eq!(a.stage(), Stage::Transferring);
        assert_eq!(rooms.drained_us(room(1), Time(5)), None);
        rooms.set_draining(room(1), Time(1_000));
        rooms.set_stage(room(1), Stage::Waiting);
        assert_eq!(rooms.counts(), [[0, 0, 0, 1], [1, 0, 0, 0]]);
        assert_eq!(rooms.drained_us(room(1), Time(1_500)), Some(500));
        // The number's next life.
        assert!(rooms.insert(room(1), Arc::new(RoomShared::new(false))).is_some());
        assert_eq!(rooms.counts(), [[0; 4], [2, 0, 0, 0]]);
        assert!(rooms.remove(&room(2)).is_some());
        assert!(rooms.remove(&room(2)).is_none());
        assert_eq!((rooms.counts(), rooms.len()), ([[0; 4], [1, 0, 0, 0]], 1));
        rooms.set_draining(room(1), Time(2_000));
        assert!(!rooms.any_goes_on(), "the one that is left has failed");
        assert_eq!(rooms.drain().count(), 1);
        assert_eq!(rooms.counts(), RoomCounts::default());
    }
}
