//! A slice's stripes as a GPU reads them.

use super::{Stripe, Stripes, width};

/// The widest access, in bytes.
pub const UNIT_BYTES: u64 = 16;
/// Units that a warp copies at once; `cuda/pack.cuh` has the same number.
pub const TILE_UNITS: u64 = 128;
/// Rows shorter than this are not cut to be copied in wider units: an entry of the table costs about as much.
const CUT_BYTES: u64 = 64;

/// What `kvxfer_copy_stripes` reads. Each stripe is copied in units of the widest power of two that all its rows allow,
/// and stripes whose rows only start or end badly are cut, so that their middle goes 16 bytes at a time.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Table {
    stripes: Vec<Stripe>,
    /// Tiles before each stripe, and of all of them.
    first: Vec<u64>,
}

impl Table {
    /// The table of these stripes.
    #[must_use]
    pub fn new(stripes: &Stripes) -> Self {
        Self::of(stripes.list())
    }

    /// The table of stripes that [`Stripes`] need not have made.
    #[must_use]
    pub fn of(stripes: &[Stripe]) -> Self {
        let mut table = Self::default();
        table.fill(stripes);
        table
    }

    /// Makes it the table of these stripes; the memory is used again.
    pub fn fill(&mut self, stripes: &[Stripe]) {
        self.stripes.clear();
        self.first.clear();
        self.first.push(0);
        for stripe in stripes {
            self.cut(stripe);
        }
    }

    fn cut(&mut self, s: &Stripe) {
        // What all rows could be copied in if they began and ended well: both ends are equally far from a multiple of it.
        let unit = width(s.src.wrapping_sub(s.dst) | s.src_stride | s.dst_stride);
        if s.row < CUT_BYTES || unit_bytes(s) == unit {
            self.put(*s);
            return;
        }
        let head = s.src.wrapping_neg() % unit;
        let middle = (s.row - head) / unit * unit;
        let part = |from: u64, row: u64| Stripe {
            src: s.src.wrapping_add(from),
            dst: s.dst.wrapping_add(from),
            row,
            ..*s
        };
        self.put(part(0, head));
        self.put(part(head, middle));
        self.put(part(head + middle, s.row - head - middle));
    }

    fn put(&mut self, stripe: Stripe) {
        if stripe.is_empty() {
            return;
        }
        let tiles = stripe.len().div_ceil(unit_bytes(&stripe) * TILE_UNITS);
        let before = self.first.last().copied().unwrap_or(0);
        self.stripes.push(stripe);
        self.first.push(before.saturating_add(tiles));
    }

    /// Its stripes.
    #[must_use]
    pub fn stripes(&self) -> &[Stripe] {
        &self.stripes
    }

    /// Tiles before each stripe, and at the end all of them.
    #[must_use]
    pub fn first(&self) -> &[u64] {
        &self.first
    }

    /// Tiles of all stripes: how much there is to share out among warps.
    #[must_use]
    pub fn tiles(&self) -> u64 {
        self.first.last().copied().unwrap_or(0)
    }

    /// Appends what the kernel reads: the stripes, six words each, then [`Table::first`], all little-endian. The second
    /// list begins at the returned offset from where `out` ended.
    pub fn encode(&self, out: &mut Vec<u8>) -> usize {
        let began = out.len();
        out.reserve((self.stripes.len() * 6 + self.first.len()) * 8);
        for s in &self.stripes {
            for word in [s.src, s.dst, s.src_stride, s.dst_stride, s.row, s.rows] {
                out.extend_from_slice(&word.to_le_bytes());
            }
        }
        let first = out.len() - began;
        for word in &self.first {
            out.extend_from_slice(&word.to_le_bytes());
        }
        first
    }
}

/// Bytes of one access to this stripe, as the kernel works it out.
pub(super) const fn unit_bytes(s: &Stripe) -> u64 {
    width(s.src | s.dst | s.src_stride | s.dst_stride | s.row)
}
