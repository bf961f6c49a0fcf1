//! What the calls cost whoever makes them: every call is counted, and one in sixteen is timed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Calls that are counted, in the order of [`CallCosts`].
pub const CALLS: [&str; 3] = ["expect", "push", "poll"];

/// Upper bounds of a call's buckets, nanoseconds; what is longer is in a bucket of its own.
pub const CALL_BOUNDS_NS: [u64; 12] =
    [100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 1_000_000, 10_000_000];

/// Looking at the clock twice takes as long as an empty `poll`.
const TIMED_ONE_IN: u64 = 16;

/// A call that is counted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Call {
    /// `expect`.
    Expect = 0,
    /// `push`.
    Push = 1,
    /// `poll`.
    Poll = 2,
}

/// What one kind of call has cost so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct CallCosts {
    /// How many there were.
    pub calls: u64,
    /// Of those that were timed, how many took up to each of [`CALL_BOUNDS_NS`] (and longer than the bound before).
    pub counts: [u64; CALL_BOUNDS_NS.len() + 1],
    /// Sum of those that were timed, nanoseconds.
    pub sum_ns: u64,
}

/// On cache lines of its own: callers of different kinds may be different threads.
#[repr(align(128))]
#[derive(Debug, Default)]
struct Meter {
    calls: AtomicU64,
    sum_ns: AtomicU64,
    counts: [AtomicU64; CALL_BOUNDS_NS.len() + 1],
}

/// All calls of one agent. Nothing here waits, and nothing is ordered by it.
#[derive(Debug, Default)]
pub(crate) struct Calls([Meter; CALLS.len()]);

/// Counts the call that it was made for, and if that is one to be timed, times it until it is dropped.
#[derive(Debug)]
pub struct Timed<'a>(Option<(&'a Meter, Instant)>);

impl Calls {
    pub(crate) fn begin(&self, call: Call) -> Timed<'_> {
        let Some(meter) = self.0.get(call as usize) else { return Timed(None) };
        let number = meter.calls.fetch_add(1, Ordering::Relaxed);
        Timed(number.is_multiple_of(TIMED_ONE_IN).then(|| (meter, Instant::now())))
    }

    pub(crate) fn costs(&self) -> [CallCosts; CALLS.len()] {
        let mut out = [CallCosts::default(); CALLS.len()];
        for (costs, meter) in out.iter_mut().zip(&self.0) {
            costs.calls = meter.calls.load(Ordering::Relaxed);
            costs.sum_ns = meter.sum_ns.load(Ordering::Relaxed);
            for (count, bucket) in costs.counts.iter_mut().zip(&meter.counts) {
                *count = bucket.load(Ordering::Relaxed);
            }
        }
        out
    }
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        let Some((meter, began)) = self.0.take() else { return };
        let ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        meter.sum_ns.fetch_add(ns, Ordering::Relaxed);
        let bucket = CALL_BOUNDS_NS.partition_point(|bound| *bound < ns);
        if let Some(count) = meter.counts.get(bucket) {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_call_is_counted_and_one_in_sixteen_is_timed() {
        let calls = Calls::default();
        for _ in 0..33 {
            drop(calls.begin(Call::Push));
        }
        let slow = calls.begin(Call::Poll);
        while slow.0.as_ref().is_some_and(|(_, began)| began.elapsed().as_micros() < 200) {}
        drop(slow);
        let [expect, push, poll] = calls.costs();
        assert_eq!(expect, CallCosts::default());
        assert_eq!((push.calls, push.counts.iter().sum::<u64>()), (33, 3));
        assert_eq!(poll.calls, 1);
        assert!(poll.sum_ns >= 200_000);
        let over_100_us: u64 = poll.counts[10..].iter().sum();
        assert_eq!(over_100_us, 1);
        assert!(CALL_BOUNDS_NS.is_sorted());
    }
}
