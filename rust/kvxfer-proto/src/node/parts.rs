//! Bits that inbound and outbound rooms share.

use super::types::{Patience, RoomStats, Stage};
use crate::ids::Time;

/// When a room reached which stage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Progress {
    pub(super) stage: Stage,
    pub(super) patience: Patience,
    since: Time,
    stats: RoomStats,
}

impl Progress {
    pub(super) fn new(now: Time, bootstrap: std::time::Duration, waiting: std::time::Duration) -> Self {
        Self {
            stage: Stage::Bootstrapping,
            patience: Patience { bootstrap, waiting, at: now.after(bootstrap) },
            since: now,
            stats: RoomStats::default(),
        }
    }

    /// Goes to a later stage; returns whether it was later. The deadline moves with it.
    pub(super) fn advance(&mut self, now: Time, to: Stage) -> bool {
        if to <= self.stage {
            return false;
        }
        let spent = now.since_us(self.since);
        match self.stage {
            Stage::Bootstrapping => self.stats.bootstrap_us = spent,
            Stage::Waiting => self.stats.waiting_us = spent,
            _ => self.stats.transfer_us = spent,
        }
        self.stage = to;
        self.since = now;
        self.touch(now);
        true
    }

    /// Something moved: the waiting time starts again.
    pub(super) fn touch(&mut self, now: Time) {
        if self.stage > Stage::Bootstrapping {
            self.patience.at = now.after(self.patience.waiting);
        }
    }

    pub(super) fn count(&mut self, bytes: u64, writes: u64) {
        self.stats.bytes = self.stats.bytes.saturating_add(bytes);
        self.stats.writes = self.stats.writes.saturating_add(writes);
    }

    pub(super) fn stats(&self) -> RoomStats {
        self.stats
    }

    pub(super) fn forget_stats(&mut self) {
        self.stats = RoomStats::default();
        self.since = Time(0);
        self.patience.at = Time(0);
    }
}
