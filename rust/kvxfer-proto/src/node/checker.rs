//! What a model checker needs of a [`Node`]: its timers by name, and states without statistics.
//!
//! A checker has no use for a clock. Timeouts are settable, a room's even one by one, and clocks of processes that
//! stop jump: so any pending timer may run out before any other. A checker keeps `now` at one value and says which
//! timer has run out.

use super::{Counters, Node, PeerKey, Timer};
use crate::ids::{Room, Time};

/// A timer that is set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Wait {
    /// An expected room's: for contact, for progress, or for the answers to its cancel.
    Inbound(Room),
    /// A pushed or early granted room's.
    Outbound(Room),
    /// A peer's: for a sign of life, for a new session, or until it is forgotten.
    Peer(PeerKey),
}

impl Node {
    /// Every timer that is set.
    pub fn waits(&self) -> impl Iterator<Item = Wait> {
        self.timers.pending().map(|t| match t {
            Timer::Inbound(room) => Wait::Inbound(room),
            Timer::Outbound(room) => Wait::Outbound(room),
            Timer::Peer(key) => Wait::Peer(key),
        })
    }

    /// This timer runs out now, however much of its time was left, and no other does. Nothing happens if it is not
    /// set. `now` has to be later than the longest time of [`super::Config`].
    pub fn run_out(&mut self, now: Time, wait: Wait) {
        let timer = match wait {
            Wait::Inbound(room) => Timer::Inbound(room),
            Wait::Outbound(room) => Timer::Outbound(room),
            Wait::Peer(key) => Timer::Peer(key),
        };
        if !self.timers.pending().any(|t| t == timer) {
            return;
        }
        self.timers.cancel(timer);
        match timer {
            Timer::Inbound(room) => {
                if let Some(r) = self.inbound.get_mut(&room) {
                    r.progress.patience.at = now;
                }
                self.inbound_timer(now, room);
            }
            Timer::Outbound(room) => {
                if let Some(r) = self.outbound.get_mut(&room) {
                    r.progress.patience.at = now;
                }
                self.outbound_timer(now, room);
            }
            Timer::Peer(key) => {
                if let Some(peer) = self.peers.get_mut(&key) {
                    peer.last_heard = Time(0);
                    peer.lost_since = peer.lost_since.map(|_| Time(0));
                }
                self.peer_timer(now, key);
            }
        }
    }

    /// Sets every statistic back to zero: states that differ in nothing else are one.
    pub fn forget_statistics(&mut self) {
        self.counters = Counters::default();
        for progress in self
            .inbound
            .values_mut()
            .map(|r| &mut r.progress)
            .chain(self.outbound.values_mut().map(|r| &mut r.progress))
        {
            progress.forget_stats();
        }
    }
}
