//! What callers can see of a room without asking the transfer thread.

use crate::primitive::{
    AtomicBool, AtomicU8, AtomicU64, Condvar, Fault, Mutex, OnceLock, Ordering, broken, lock,
};
use kvxfer_proto::node::{EventKind, RoomStats, Stage};
use kvxfer_proto::{Reason, Room};
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

/// An event as `poll` gives it.
#[derive(Clone, Debug)]
pub struct AgentEvent {
    /// The room.
    pub room: Room,
    /// What happened.
    pub kind: EventKind,
    /// Whether pages may be reused from now on.
    pub released: bool,
    /// Metadata that came with `Success`.
    pub meta: Option<Arc<[u8]>>,
    /// What it cost.
    pub stats: RoomStats,
    /// `CLOCK_MONOTONIC` when this side moved the first byte, microseconds; zero if it moved none.
    pub first_write_at_us: u64,
    /// `CLOCK_MONOTONIC` of the event, microseconds.
    pub at_us: u64,
}

impl AgentEvent {
    #[cfg(test)]
    pub(crate) fn released(room: Room) -> Self {
        Self {
            room,
            kind: EventKind::Released,
            released: true,
            meta: None,
            stats: RoomStats::default(),
            first_write_at_us: 0,
            at_us: 0,
        }
    }

    /// Why the room failed, if this says so.
    #[must_use]
    pub fn error(&self) -> Option<&Reason> {
        match &self.kind {
            EventKind::Failed(reason) => Some(reason),
            _ => None,
        }
    }

    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self.kind, EventKind::Success | EventKind::Failed(_))
    }
}

/// One room, seen from both sides of the queues.
#[derive(Debug)]
pub(crate) struct RoomShared {
    stage: AtomicU8,
    /// The terminal event.
    end: OnceLock<AgentEvent>,
    /// The terminal event is in the queue, or there will be none: the room's only order was refused.
    published: AtomicBool,
    /// A push with `last` was ordered.
    pub(crate) last_ordered: AtomicBool,
    /// Its number, so that retracting it allows another.
    pub(crate) last_push: AtomicU64,
    /// `expect` began it.
    pub(crate) expected: bool,
    /// How many sleep until the end.
    gate: Mutex<usize>,
    ended: Condvar,
}

impl RoomShared {
    pub(crate) fn new(expected: bool) -> Self {
        Self {
            expected,
            stage: AtomicU8::new(Stage::Bootstrapping as u8),
            end: OnceLock::new(),
            published: AtomicBool::new(false),
            last_ordered: AtomicBool::new(false),
            last_push: AtomicU64::new(0),
            gate: Mutex::new(0),
            ended: Condvar::new(),
        }
    }

    pub(crate) fn stage(&self) -> Stage {
        match self.stage.load(Ordering::Acquire) {
            0 => Stage::Bootstrapping,
            1 => Stage::Waiting,
            2 => Stage::Transferring,
            3 => Stage::Success,
            _ => Stage::Failed,
        }
    }

    pub(crate) fn set_stage(&self, stage: Stage) {
        self.stage.store(stage as u8, Ordering::Release);
    }

    /// Records the terminal event; `false` if there was one already. Waiters sleep on until [`RoomShared::publish`].
    pub(crate) fn finish(&self, event: AgentEvent) -> bool {
        let stage = if event.error().is_some() { Stage::Failed } else { Stage::Success };
        if self.end.set(event).is_err() {
            return false;
        }
        self.set_stage(stage);
        true
    }

    /// Wakes whoever waits for the end. Called once the event is in the queue, so that they find it there.
    pub(crate) fn publish(&self) {
        self.published.store(true, Ordering::Release);
        if broken(Fault::PublishWithoutLock) {
            self.ended.notify_all();
            return;
        }
        // Waiters hold this lock only between their look and their sleep.
        let sleepers = *lock(&self.gate);
        // Almost never are there any, and to wake nobody is a system call too.
        if sleepers > 0 {
            self.ended.notify_all();
        }
    }

    /// The room's only order was refused: nothing will come of it. Whoever waits already wakes, and gets nothing.
    pub(crate) fn withdraw(&self) {
        self.publish();
    }

    /// Whether nothing will come of it.
    pub(crate) fn is_withdrawn(&self) -> bool {
        self.published.load(Ordering::Acquire) && self.end.get().is_none()
    }

    pub(crate) fn end(&self) -> Option<&AgentEvent> {
        self.end.get()
    }

    /// The terminal event, once it is in the queue.
    pub(crate) fn published(&self) -> Option<&AgentEvent> {
        self.end.get().filter(|_| self.published.load(Ordering::Acquire))
    }

    /// Sleeps until the room has ended or the time is up.
    pub(crate) fn wait(&self, timeout: Option<Duration>) -> Option<&AgentEvent> {
        let until = timeout.map(|t| Instant::now() + t.min(Duration::from_secs(365 * 24 * 3600)));
        let mut gate = lock(&self.gate);
        *gate += 1;
        while !self.published.load(Ordering::Acquire) {
            gate = match until {
                None => self.ended.wait(gate).unwrap_or_else(PoisonError::into_inner),
                Some(until) => {
                    let Some(left) = until.checked_duration_since(Instant::now()) else { break };
                    self.ended.wait_timeout(gate, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        *gate -= 1;
        drop(gate);
        self.published()
    }
}

// Not one of `primitive`: it is no part of any protocol, and has to be there before anything else.
static FORKS: AtomicUsize = AtomicUsize::new(0);

/// Tells this crate that it runs in a forked child: agents of the parent answer with an error from now on.
pub fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
}

/// How many forks this process descends from, counted since the crate was loaded.
pub(crate) fn forks() -> usize {
    FORKS.load(Ordering::Relaxed)
}
