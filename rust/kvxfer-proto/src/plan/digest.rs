//! The checksum of one side's bytes of a push.
//!
//! It is the wrapping sum, over every cell (a row, or a part of a long one), of a 64-bit hash of the cell's bytes
//! that is bound to the cell's logical [`Place`]. A sum does not depend on the order in which cells are visited,
//! and a place not on where the bytes lie: two sides with other layouts, page sizes and shards get the same sum
//! from the same rows, and another one if a byte differs or two rows are swapped.
//!
//! It finds corruption. It is not keyed, so it does not find tampering.

use super::rows::mix;
use super::{Extent, Place, Rows, Run, Template};
use crate::layout::LayoutError;
use std::sync::Arc;
use twox_hash::XxHash3_64;

/// A sum under way: pure, from runs and their bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Sum(u64);

impl Sum {
    /// Adds the cells of a run, whose bytes these are. Cells that `bytes` has no room for are left out.
    pub fn add(&mut self, run: &Run, bytes: &[u8]) {
        let cell = usize::try_from(run.cell).unwrap_or(usize::MAX).max(1);
        let Place { mut token, mut head, .. } = run.place;
        let mut line = run.place.line();
        for bytes in bytes.chunks_exact(cell) {
            let key = Place::key_in(line, token, run.place.cell);
            // The hash of the bytes is unseeded, which costs half as much for 256 bytes; `mix` is a bijection, so
            // that another hash at the same place is another term.
            self.0 = self.0.wrapping_add(mix(XxHash3_64::oneshot(bytes) ^ key));
            if run.by_token {
                token = token.wrapping_add(1);
            } else {
                head = head.wrapping_add(1);
                line = Place { head, ..run.place }.line();
            }
        }
    }

    /// The sum so far.
    #[must_use]
    pub const fn value(self) -> u64 {
        self.0
    }
}

/// A checksum that is computed a slice at a time.
#[derive(Clone, Debug)]
pub struct Digest {
    rows: Rows,
    sum: Sum,
    // Reused.
    runs: Vec<Run>,
    bytes: Vec<u8>,
}

impl Digest {
    /// The digest of `extent`; `page_count` has the pages of each group of that side.
    ///
    /// # Errors
    /// As [`Rows::new`].
    pub fn new(template: Arc<Template>, extent: Extent, page_count: &[u32]) -> Result<Self, LayoutError> {
        let rows = Rows::new(template, extent, page_count)?;
        Ok(Self { rows, sum: Sum::default(), runs: Vec::new(), bytes: Vec::new() })
    }

    /// Whether every row is in.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.rows.is_done()
    }

    /// The sum: final once [`Digest::is_done`].
    #[must_use]
    pub const fn value(&self) -> u64 {
        self.sum.value()
    }

    /// Takes in the next slice, bounded as by [`Rows::fill`]; returns its bytes. `read` fills its buffer from an
    /// offset of a region, each of which lies within the side's regions.
    ///
    /// # Errors
    /// What `read` gives; the digest is of no use then.
    pub fn step<E>(
        &mut self,
        max_bytes: u64,
        max_cells: u64,
        mut read: impl FnMut(u32, u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<u64, E> {
        let Self { rows, sum, runs, bytes } = self;
        runs.clear();
        rows.fill(runs, max_bytes, max_cells);
        let mut total = 0u64;
        for run in runs.iter() {
            // At most a slice.
            let len = usize::try_from(run.len()).unwrap_or(usize::MAX);
            if bytes.len() < len {
                bytes.resize(len, 0);
            }
            let Some(buf) = bytes.get_mut(..len) else { continue };
            read(run.region, run.off, buf)?;
            sum.add(run, buf);
            total += run.len();
        }
        Ok(total)
    }

    /// The whole sum at once.
    ///
    /// # Errors
    /// What `read` gives.
    pub fn finish<E>(mut self, mut read: impl FnMut(u32, u64, &mut [u8]) -> Result<(), E>) -> Result<u64, E> {
        while !self.is_done() {
            self.step(64 << 10, u64::MAX, &mut read)?;
        }
        Ok(self.value())
    }
}
