//! One pending time for each thing that waits.

use super::PeerKey;
use crate::ids::{Room, Time};
use std::collections::{BTreeMap, BTreeSet};

/// What waits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(super) enum Timer {
    Inbound(Room),
    Outbound(Room),
    Peer(PeerKey),
}

/// Pending timers. Each has one entry however often its deadline moves: one that moves later is found out when the
/// earlier time comes, and set anew.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Timers {
    by_time: BTreeSet<(Time, Timer)>,
    at: BTreeMap<Timer, Time>,
}

impl Timers {
    /// Wakes `timer` at this time at the latest.
    pub(super) fn set(&mut self, at: Time, timer: Timer) {
        match self.at.get(&timer) {
            Some(old) if *old <= at => return,
            Some(old) => {
                self.by_time.remove(&(*old, timer));
            }
            None => {}
        }
        self.at.insert(timer, at);
        self.by_time.insert((at, timer));
    }

    pub(super) fn cancel(&mut self, timer: Timer) {
        if let Some(at) = self.at.remove(&timer) {
            self.by_time.remove(&(at, timer));
        }
    }

    pub(super) fn next(&self) -> Option<Time> {
        self.by_time.first().map(|(at, _)| *at)
    }

    /// Every timer that is set, in a fixed order.
    pub(super) fn pending(&self) -> impl Iterator<Item = Timer> {
        self.at.keys().copied()
    }

    /// Which timers are set stays; for when is forgotten.
    pub(super) fn forget_times(&mut self) {
        if self.at.values().any(|at| at.0 != 0) {
            self.at.values_mut().for_each(|at| *at = Time(0));
            self.by_time = self.at.keys().map(|t| (Time(0), *t)).collect();
        }
    }

    /// Takes a timer that is due.
    pub(super) fn pop_due(&mut self, now: Time) -> Option<Timer> {
        let &(at, timer) = self.by_time.first().filter(|(at, _)| *at <= now)?;
        self.by_time.remove(&(at, timer));
        self.at.remove(&timer);
        Some(timer)
    }

    pub(super) fn len(&self) -> usize {
        debug_assert_eq!(self.by_time.len(), self.at.len());
        self.at.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timer(n: u64) -> Timer {
        Timer::Inbound(Room::new(n).unwrap())
    }

    #[test]
    fn a_deadline_that_moves_keeps_one_entry_and_an_ended_room_none() {
        let mut t = Timers::default();
        for at in [50, 70, 60, 40, 90] {
            t.set(Time(at), timer(1));
        }
        t.set(Time(45), timer(2));
        assert_eq!((t.len(), t.next()), (2, Some(Time(40))));
        assert_eq!(t.pop_due(Time(39)), None);
        assert_eq!(t.pop_due(Time(44)), Some(timer(1)));
        t.cancel(timer(2));
        t.cancel(timer(2));
        assert_eq!((t.len(), t.next()), (0, None));
    }
}
