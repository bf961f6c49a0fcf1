//! Counters that the thread writes and anyone may read.

use crate::metrics::{LinkUse, Outcomes, ROOM_SIDES, ROOM_STATES, Rate};
use kvxfer_proto::node::{Counters, Gauges};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// What an agent has done and holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Stats {
    /// The state machine's counters.
    pub counters: Counters,
    /// The state machine's gauges.
    pub gauges: Gauges,
    /// Orders that wait for the thread.
    pub queue_depth: u64,
    /// Rooms that calls can name: under way, or over and not yet forgotten.
    pub known_rooms: u64,
    /// Events that nobody has polled.
    pub queued_events: u64,
    /// Entries of the transfer thread's own tables: rooms, flows, tickets, sessions, watches, retries.
    pub driver_entries: u64,
    /// Bytes that this agent moved.
    pub moved_bytes: u64,
    /// Bytes that this agent summed for checksums.
    pub summed_bytes: u64,
    /// Bytes that this agent packed into staging slots, and unpacked from its own.
    pub packed_bytes: u64,
    /// See `packed_bytes`.
    pub unpacked_bytes: u64,
    /// Deliveries of this agent that were to go packed, and those that went direct though they could have gone packed.
    pub packed_deliveries: u64,
    /// See `packed_deliveries`.
    pub direct_deliveries: u64,
    /// Of `packed_deliveries`, those that got no slot and went direct: they are in `direct_deliveries` too.
    pub packed_fallbacks: u64,
    /// Writes or copies it made.
    pub writes: u64,
    /// System calls for data.
    pub data_syscalls: u64,
    /// Slices of data work.
    pub slices: u64,
    /// Times that the thread slept.
    pub sleeps: u64,
    /// Control connections open now.
    pub connections: u64,
    /// Control frames sent and received.
    pub frames_sent: u64,
    /// Control frames received.
    pub frames_received: u64,
    /// Connections refused or dropped for what came on them.
    pub bad_connections: u64,
    /// Of those, past a limit: too many, too large, too often.
    pub limited_connections: u64,
    /// Of those, silent or too slow.
    pub slow_connections: u64,
    /// Connections that ended for want of the right secret or certificate.
    pub auth_failures: u64,
    /// How rooms went.
    pub outcomes: Outcomes,
    /// Rooms by side ([`ROOM_SIDES`]) and state ([`ROOM_STATES`]).
    pub rooms: [[u64; ROOM_STATES.len()]; ROOM_SIDES.len()],
    /// When anything was in flight.
    pub link: LinkUse,
    /// What the link gives, over the last second or so.
    pub rate: Rate,
}

/// The place where the thread leaves its statistics, at most every few milliseconds.
#[derive(Debug, Default)]
pub(crate) struct StatsCell {
    latest: Mutex<Stats>,
    close_us: AtomicU64,
}

impl StatsCell {
    pub(crate) fn get(&self) -> Stats {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Never waits: if a reader is there, the next time will do.
    pub(crate) fn try_set(&self, stats: &Stats) {
        if let Ok(mut latest) = self.latest.try_lock() {
            *latest = *stats;
        }
    }

    pub(crate) fn set_close_deadline(&self, timeout: Duration) {
        self.close_us.store(u64::try_from(timeout.as_micros()).unwrap_or(u64::MAX), Ordering::SeqCst);
    }

    pub(crate) fn close_timeout(&self) -> Duration {
        Duration::from_micros(self.close_us.load(Ordering::SeqCst))
    }
}
