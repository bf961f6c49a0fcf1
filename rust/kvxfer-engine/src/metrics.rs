//! What [`Stats`](crate::Stats) has beyond plain counters: durations, failures by stage and reason, link use.

use kvxfer_proto::node::{RoomStats, Stage};
use kvxfer_proto::{ReasonKind, Time};

/// Upper bounds of [`Durations`], microseconds; what is longer is in a bucket of its own.
pub const DURATION_BOUNDS_US: [u64; 20] = [
    50,
    100,
    250,
    500,
    1_000,
    2_500,
    5_000,
    10_000,
    25_000,
    50_000,
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    30_000_000,
    100_000_000,
    300_000_000,
];

/// Durations, sorted into the buckets of [`DURATION_BOUNDS_US`].
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Durations {
    /// How many there were up to each bound (and above the bound before), then those above the last.
    pub counts: [u64; DURATION_BOUNDS_US.len() + 1],
    /// Their sum, microseconds.
    pub sum_us: u64,
}

impl Durations {
    pub(crate) fn add(&mut self, us: u64) {
        let bucket = DURATION_BOUNDS_US.partition_point(|bound| *bound < us);
        if let Some(count) = self.counts.get_mut(bucket) {
            *count += 1;
        }
        self.sum_us = self.sum_us.saturating_add(us);
    }
}

/// Where a room that goes on can be: the stages that callers know, and what follows a failure until the release.
pub const ROOM_STATES: [&str; 4] = ["bootstrapping", "waiting", "transferring", "draining"];
/// The sides of a room: who expects it, and who pushes it.
pub const ROOM_SIDES: [&str; 2] = ["decode", "prefill"];
/// Stages in which a room can fail, and how long each took is kept.
pub const STAGES: [&str; 3] = ["bootstrapping", "waiting", "transferring"];
/// What rooms fail of.
pub const REASONS: [&str; 16] = [
    "internal",
    "layout_mismatch",
    "peer_lost",
    "transfer_timeout",
    "cancelled",
    "stale_grant",
    "auth_error",
    "page_error",
    "room_in_use",
    "tokens_mismatch",
    "fabric_error",
    "checksum_mismatch",
    "version_mismatch",
    "protocol_error",
    "closed",
    "unhealthy",
];

/// How this agent's rooms went.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Outcomes {
    /// How long rooms that ended well were in each of [`STAGES`].
    pub stages: [Durations; STAGES.len()],
    /// From a room's failure until its pages were free.
    pub drains: Durations,
    /// Failed rooms, by the stage that they were in and by reason.
    pub failures: [[u64; REASONS.len()]; STAGES.len()],
}

impl Outcomes {
    pub(crate) fn succeeded(&mut self, stats: &RoomStats) {
        let spent = [stats.bootstrap_us, stats.waiting_us, stats.transfer_us];
        for (stage, us) in self.stages.iter_mut().zip(spent) {
            stage.add(us);
        }
    }

    pub(crate) fn failed(&mut self, stage: Stage, reason: ReasonKind) {
        let row = self.failures.get_mut((stage as usize).min(STAGES.len() - 1));
        if let Some(count) = row.and_then(|row| row.get_mut(reason as usize)) {
            *count += 1;
        }
    }
}

/// Least length of a window over which link use is averaged, microseconds.
const WINDOW_US: u64 = 1_000_000;

/// How much of the time something of ours was in flight. Transfers that overlap count once, so bytes over this time are
/// what the link gave, and not what one transfer saw of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct LinkUse {
    /// Time with anything in flight, microseconds.
    pub busy_us: u64,
    busy: bool,
    at: Time,
    window_at: Time,
    window_bytes: u64,
    window_busy_us: u64,
    before: Rate,
}

/// What a link gave over a while.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Rate {
    /// Bytes a second.
    pub bytes_per_s: u64,
    /// Part of the time with anything in flight, millionths.
    pub busy_ppm: u64,
}

impl LinkUse {
    pub(crate) fn new(now: Time) -> Self {
        Self { at: now, window_at: now, ..Self::default() }
    }

    /// Whether anything is in flight from now on; until now it was as the last call said.
    pub(crate) fn tick(&mut self, now: Time, busy: bool) {
        if self.busy {
            self.busy_us = self.busy_us.saturating_add(now.since_us(self.at));
        }
        // A turn ends with the time at which it began, which may be before that of its copies.
        self.at = self.at.max(now);
        self.busy = busy;
    }

    fn since_window(&self, now: Time, moved_bytes: u64) -> Option<Rate> {
        let us = now.since_us(self.window_at);
        if us < WINDOW_US {
            return None;
        }
        let busy = self.busy_us.saturating_sub(self.window_busy_us);
        let bytes = moved_bytes.saturating_sub(self.window_bytes);
        let per = |n: u64| u64::try_from(u128::from(n) * 1_000_000 / u128::from(us)).unwrap_or(u64::MAX);
        Some(Rate { bytes_per_s: per(bytes), busy_ppm: per(busy).min(1_000_000) })
    }

    /// Begins a new window if this one was long enough.
    pub(crate) fn roll(&mut self, now: Time, moved_bytes: u64) {
        if let Some(rate) = self.since_window(now, moved_bytes) {
            self.before = rate;
            self.window_at = now;
            self.window_bytes = moved_bytes;
            self.window_busy_us = self.busy_us;
        }
    }

    /// The rate of the last window that is over, or of this one if it is long enough: a thread that sleeps rolls none.
    #[must_use]
    pub fn rate(&self, now: Time, moved_bytes: u64) -> Rate {
        self.since_window(now, moved_bytes).unwrap_or(self.before)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn durations_are_in_the_bucket_of_the_first_bound_that_is_not_below() {
        let mut d = Durations::default();
        for us in [0, 50, 51, 1_000_000, u64::MAX] {
            d.add(us);
        }
        assert_eq!(d.counts[0], 2);
        assert_eq!(d.counts[1], 1);
        assert_eq!(d.counts[13], 1);
        assert_eq!(d.counts[DURATION_BOUNDS_US.len()], 1);
        assert_eq!(d.sum_us, u64::MAX);
        assert!(DURATION_BOUNDS_US.is_sorted());
    }

    #[test]
    fn every_reason_and_stage_has_a_name_at_its_number() {
        for (n, name) in (0u8..).zip(REASONS) {
            let kind = ReasonKind::from_wire(n);
            assert_eq!(kind as usize, usize::from(n));
            let written: String = format!("{kind:?}")
                .char_indices()
                .flat_map(|(i, c)| {
                    let gap = (i > 0 && c.is_uppercase()).then_some('_');
                    gap.into_iter().chain(c.to_lowercase())
                })
                .collect();
            assert_eq!(written, name);
        }
        let mut o = Outcomes::default();
        o.failed(Stage::Transferring, ReasonKind::Unhealthy);
        o.failed(Stage::Bootstrapping, ReasonKind::Internal);
        assert_eq!((o.failures[2][15], o.failures[0][0]), (1, 1));
    }

    /// Four transfers of 1 GB that overlap within one second are 4 GB/s, and the link is busy once and not four times.
    #[test]
    fn overlapping_transfers_add_up_and_are_not_averaged() {
        const GB: u64 = 1_000_000_000;
        let start = Time(7_000_000);
        let mut link = LinkUse::new(start);
        let mut moved = 0;
        // All four are in flight from 0.1 s on, and end at 0.7, 0.8, 0.9 and 1.0 s.
        for ms in 0..1000 {
            let now = Time(start.0 + ms * 1000);
            if [700, 800, 900].contains(&ms) {
                moved += GB;
            }
            link.tick(now, ms >= 100);
            link.roll(now, moved);
            assert_eq!(link.rate(now, moved), Rate::default(), "the window is not over");
        }
        moved += GB;
        let end = Time(start.0 + 1_000_000);
        link.tick(end, false);
        assert_eq!(link.rate(end, moved), Rate { bytes_per_s: 4 * GB, busy_ppm: 900_000 });
        link.roll(end, moved);
        let soon = Time(end.0 + 500_000);
        assert_eq!(link.rate(soon, moved).bytes_per_s, 4 * GB, "the last window that is over");
        // Nobody rolls while the thread sleeps; nothing moved since.
        assert_eq!(link.rate(Time(end.0 + 1_000_000), moved), Rate::default());
        assert_eq!(link.busy_us, 900_000);
    }

    #[test]
    fn a_long_window_is_an_average() {
        let mut link = LinkUse::new(Time(0));
        link.tick(Time(0), true);
        link.tick(Time(1_000_000), false);
        assert_eq!(link.rate(Time(4_000_000), 400), Rate { bytes_per_s: 100, busy_ppm: 250_000 });
        let mut all_along = LinkUse::new(Time(0));
        all_along.tick(Time(0), true);
        all_along.tick(Time(2_000_000), true);
        assert_eq!(all_along.rate(Time(2_000_000), u64::MAX).busy_ppm, 1_000_000);
    }
}
