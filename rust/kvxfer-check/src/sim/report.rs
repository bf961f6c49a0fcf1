//! What a run came to, and its log.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, Write};

/// Violations that a report keeps in words.
const KEPT: usize = 20;

/// What a run came to. The same options give the same report, byte for byte.
///
/// Each room is one of `succeeded`, `failed`, `cancelled` and `unended`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct SimReport {
    /// The seed.
    pub seed: u64,
    /// Rooms begun.
    pub rooms: u64,
    /// Rooms that every decode rank that lived had whole.
    pub succeeded: u64,
    /// Rooms that failed otherwise than by a cancel.
    pub failed: u64,
    /// Rooms that failed after one of the engines had cancelled them.
    pub cancelled: u64,
    /// Rooms that some living process had no end or no release of.
    pub unended: u64,
    /// Bytes that were wrong: of a successful room, around a room's tokens, or changed while no room held their page.
    pub corrupt_bytes: u64,
    /// Pages that were held in the end.
    pub leaked_pages: u64,
    /// Writes that landed on a page that no room held, or that carried bytes of another room than the page's.
    pub late_writes: u64,
    /// Cancels while a write of the room was in flight.
    pub cancelled_mid_write: u64,
    /// Kills while a write from or to the process was in flight.
    pub kills_mid_write: u64,
    /// Median virtual milliseconds from a room's failure to the release of its pages at a decode rank, where the two
    /// differ; in thousandths.
    pub drain_us_p50: u64,
    /// The same for 99 of 100.
    pub drain_us_p99: u64,
    /// How long the run took in virtual time, in microseconds.
    pub virtual_us: u64,
    /// Faults that were made, by kind.
    pub faults: BTreeMap<&'static str, u64>,
    /// Writes (or copies) that landed.
    pub writes_landed: u64,
    /// Packed slices that were taken out of their slots.
    pub slices_unpacked: u64,
    /// Frames that came through the codec.
    pub frames: u64,
    /// Sessions that came up, fences that were begun and stale messages that were refused, over all processes.
    pub sessions: u64,
    /// Fences begun.
    pub fences: u64,
    /// Messages that named a voided or unknown grant or session.
    pub stale_refused: u64,
    /// How many things went wrong.
    pub violation_count: u64,
    /// The first of them, with their virtual time.
    pub violations: Vec<String>,
    /// Of every line of the log.
    pub digest: u64,
}

impl SimReport {
    /// [`SimReport::drain_us_p50`] in milliseconds.
    #[must_use]
    pub fn drain_ms_p50(&self) -> f64 {
        milliseconds(self.drain_us_p50)
    }

    /// [`SimReport::drain_us_p99`] in milliseconds.
    #[must_use]
    pub fn drain_ms_p99(&self) -> f64 {
        milliseconds(self.drain_us_p99)
    }

    /// [`SimReport::virtual_us`] in milliseconds.
    #[must_use]
    pub fn virtual_ms(&self) -> f64 {
        milliseconds(self.virtual_us)
    }

    /// Whether nothing went wrong.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        (self.unended, self.corrupt_bytes, self.leaked_pages, self.late_writes, self.violation_count)
            == (0, 0, 0, 0, 0)
    }
}

#[expect(clippy::cast_precision_loss, reason = "a run is far shorter than 2^52 microseconds")]
fn milliseconds(us: u64) -> f64 {
    us as f64 / 1000.0
}

/// The log: a digest of every line, the lines themselves if somebody wants them, and the violations.
pub(super) struct Log<'w> {
    out: Option<&'w mut dyn Write>,
    error: Option<io::Error>,
    line: Vec<u8>,
    pub(super) digest: u64,
    pub(super) violations: Vec<String>,
    pub(super) violation_count: u64,
}

impl<'w> Log<'w> {
    pub(super) fn new(out: Option<&'w mut dyn Write>) -> Self {
        Self {
            out,
            error: None,
            line: Vec::new(),
            // The offset basis of 64-bit FNV-1a.
            digest: 0xCBF2_9CE4_8422_2325,
            violations: Vec::new(),
            violation_count: 0,
        }
    }

    pub(super) fn line(&mut self, now: u64, text: fmt::Arguments<'_>) {
        self.line.clear();
        // Writing to memory cannot fail.
        let _ = writeln!(self.line, "{now} {text}");
        for byte in &self.line {
            self.digest = (self.digest ^ u64::from(*byte)).wrapping_mul(0x100_0000_01B3);
        }
        if let Some(out) = &mut self.out
            && self.error.is_none()
            && let Err(e) = out.write_all(&self.line)
        {
            self.error = Some(e);
        }
    }

    pub(super) fn violation(&mut self, now: u64, text: fmt::Arguments<'_>) {
        self.line(now, format_args!("VIOLATION {text}"));
        self.violation_count += 1;
        if self.violations.len() < KEPT {
            self.violations.push(format!("t={now} us: {text}"));
        }
    }

    /// Ends the log.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        if let Some(e) = self.error.take() {
            return Err(e);
        }
        self.out.as_mut().map_or(Ok(()), |out| out.flush())
    }
}

/// The value that `percent` of 100 do not exceed.
pub(super) fn percentile(sorted: &[u64], percent: usize) -> u64 {
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_the_nearest_rank() {
        let v: Vec<u64> = (1..=200).collect();
        assert_eq!((percentile(&v, 50), percentile(&v, 99), percentile(&v, 100)), (100, 198, 200));
        assert_eq!((percentile(&[7], 50), percentile(&[], 99)), (7, 0));
    }

    #[test]
    fn only_the_first_violations_are_kept_and_all_are_counted() {
        let mut text = Vec::new();
        let mut log = Log::new(Some(&mut text));
        let empty = log.digest;
        for i in 0..50 {
            log.violation(i, format_args!("number {i}"));
        }
        log.finish().unwrap();
        assert_eq!((log.violation_count, log.violations.len()), (50, KEPT));
        assert_eq!(log.violations[3], "t=3 us: number 3");
        assert_ne!(log.digest, empty);
        assert_eq!(text.split(|b| *b == b'\n').count(), 51);
    }
}
