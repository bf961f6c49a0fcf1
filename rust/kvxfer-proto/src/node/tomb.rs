//! Rooms that ended badly are remembered, so that later grants and pushes for them fail at once.

use crate::error::Reason;
use crate::ids::Room;
use std::collections::{BTreeMap, VecDeque};

/// Why a room is dead.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Tomb {
    pub(super) reason: Reason,
    /// Whether this side's caller has had its terminal event.
    pub(super) told: bool,
}

/// The last so many failed rooms.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Tombs {
    by_room: BTreeMap<Room, Tomb>,
    order: VecDeque<Room>,
}

impl Tombs {
    pub(super) fn put(&mut self, limit: usize, room: Room, reason: Reason, told: bool) {
        if let Some(old) = self.by_room.get_mut(&room) {
            old.told |= told;
            return;
        }
        while self.order.len() >= limit.max(1) {
            if let Some(oldest) = self.order.pop_front() {
                self.by_room.remove(&oldest);
            }
        }
        self.order.push_back(room);
        self.by_room.insert(room, Tomb { reason, told });
    }

    pub(super) fn get_mut(&mut self, room: Room) -> Option<&mut Tomb> {
        self.by_room.get_mut(&room)
    }

    pub(super) fn len(&self) -> usize {
        self.by_room.len()
    }
}
