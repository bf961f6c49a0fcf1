//! The rooms that calls can name. Only callers use it, and only for a look-up.

use crate::primitive::{Fault, Mutex, broken, lock};
use crate::rooms::{AgentEvent, RoomShared};
use kvxfer_proto::node::EventKind;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

/// Failed rooms that the caller has polled, remembered so that a late call on one says why.
const ENDED_ROOMS: usize = 1024;

#[derive(Debug)]
struct Entry {
    shared: Arc<RoomShared>,
    /// Orders for the room that were taken or are on their way: an entry of which all were refused is gone.
    orders: usize,
}

#[derive(Debug, Default)]
struct Inner {
    rooms: HashMap<u64, Entry>,
    /// Failed rooms that were polled, oldest first.
    ended: VecDeque<u64>,
}

/// All rooms of one agent.
#[derive(Debug)]
pub(crate) struct Table(Mutex<Inner>);

impl Table {
    pub(crate) fn new() -> Self {
        Self(Mutex::new(Inner::default()))
    }

    /// A new entry for a room that this call begins, or the one there is.
    pub(crate) fn begin(&self, room: u64, expected: bool) -> Result<Arc<RoomShared>, Arc<RoomShared>> {
        let mut inner = lock(&self.0);
        if let Some(old) = inner.rooms.get(&room) {
            return Err(Arc::clone(&old.shared));
        }
        let shared = Arc::new(RoomShared::new(expected));
        inner.rooms.insert(room, Entry { shared: Arc::clone(&shared), orders: 1 });
        Ok(shared)
    }

    /// The entry for another order of a room, made if it is the first. `may` decides about one that is there.
    pub(crate) fn join<E>(
        &self,
        room: u64,
        may: impl FnOnce(&RoomShared) -> Result<(), E>,
    ) -> Result<Arc<RoomShared>, E> {
        let mut inner = lock(&self.0);
        if let Some(entry) = inner.rooms.get_mut(&room) {
            may(&entry.shared)?;
            entry.orders += 1;
            return Ok(Arc::clone(&entry.shared));
        }
        let shared = Arc::new(RoomShared::new(false));
        inner.rooms.insert(room, Entry { shared: Arc::clone(&shared), orders: 1 });
        Ok(shared)
    }

    /// The order of this call was refused. The entry goes if no other order names it: other callers may have found it
    /// meanwhile, and theirs may have been taken.
    pub(crate) fn refused(&self, room: u64, shared: &Arc<RoomShared>) {
        let mut inner = lock(&self.0);
        let Some(entry) = inner.rooms.get_mut(&room).filter(|e| Arc::ptr_eq(&e.shared, shared)) else {
            return;
        };
        entry.orders = entry.orders.saturating_sub(1);
        if entry.orders == 0 || broken(Fault::EntryTakenBack) {
            inner.rooms.remove(&room);
            drop(inner);
            shared.withdraw();
        }
    }

    pub(crate) fn get(&self, room: u64) -> Option<Arc<RoomShared>> {
        lock(&self.0).rooms.get(&room).map(|e| Arc::clone(&e.shared))
    }

    pub(crate) fn len(&self) -> usize {
        lock(&self.0).rooms.len()
    }

    /// A room is over and its caller knows: a good one is forgotten, a bad one is kept for a while.
    pub(crate) fn over(&self, event: &AgentEvent) {
        let mut inner = lock(&self.0);
        let room = event.room.get();
        if matches!(event.kind, EventKind::Success) {
            inner.rooms.remove(&room);
            return;
        }
        inner.ended.push_back(room);
        while inner.ended.len() > ENDED_ROOMS {
            if let Some(old) = inner.ended.pop_front() {
                inner.rooms.remove(&old);
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use kvxfer_proto::Room;

    #[test]
    fn an_entry_goes_only_when_every_order_for_it_was_refused() {
        let table = Table::new();
        let first = table.begin(7, false).unwrap();
        let second = table.join(7, |_| Ok::<(), ()>(())).unwrap();
        table.refused(7, &first);
        assert!(table.get(7).is_some(), "the second order is still on its way");
        table.refused(7, &second);
        assert_eq!(table.len(), 0);
        assert!(second.wait(None).is_none(), "who waits for it is told");
        // A later room of that number has nothing to do with it.
        let third = table.begin(7, true).unwrap();
        table.refused(7, &second);
        assert!(Arc::ptr_eq(&table.get(7).unwrap(), &third));
    }

    #[test]
    fn failed_rooms_are_remembered_up_to_a_limit() {
        let table = Table::new();
        let limit = ENDED_ROOMS as u64;
        for n in 0..limit + 10 {
            let _ = table.begin(n, true).unwrap();
            table.over(&AgentEvent::released(Room::new(n).unwrap()));
        }
        assert_eq!(table.len(), ENDED_ROOMS);
        assert!(table.get(9).is_none());
        assert!(table.get(10).is_some());
    }
}
