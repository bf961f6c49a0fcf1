//! The one clock.

use kvxfer_proto::Time;

/// Microseconds of `CLOCK_MONOTONIC`: one clock for every process of a host.
pub(crate) fn now() -> Time {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let us = i128::from(t.tv_sec) * 1_000_000 + i128::from(t.tv_nsec) / 1000;
    Time(u64::try_from(us).unwrap_or(0))
}
