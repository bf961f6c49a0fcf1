//! What a layout may say beyond its plain form: layers that share a page, an uneven split over pipeline ranks, scales,
//! and state of a fixed size.

use super::{DType, LayoutError, MAX_PAGE_BYTES};
use std::ops::Range;

/// Most pipeline ranks that a [`LayerSplit`] names.
pub const MAX_SPLIT: usize = 64;
/// Most blocks of a [`State`].
pub const MAX_BLOCKS: usize = 16;
/// Most regions a layer of a state.
pub(super) const MAX_STATE_PARTS: u32 = 8;
/// Most rows of a block.
pub(super) const MAX_ROWS: u32 = 65_535;

/// One region holds all layers of the rank, one after the other within each page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct CrossLayer {
    /// Bytes from one layer of a page to the next; `None`: layers follow each other without a gap.
    pub layer_stride: Option<u64>,
}

/// How many layers each pipeline rank holds, where that is not as even as possible.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct LayerSplit {
    counts: [u16; MAX_SPLIT],
    len: u8,
}

impl LayerSplit {
    /// So many layers on each rank, in order. `None` if there are none, more than [`MAX_SPLIT`], or a count is too
    /// large for any group.
    #[must_use]
    pub fn new(counts: &[u32]) -> Option<Self> {
        let len = u8::try_from(counts.len()).ok().filter(|n| (1..=MAX_SPLIT).contains(&usize::from(*n)))?;
        let mut out = Self { counts: [0; MAX_SPLIT], len };
        for (slot, count) in out.counts.iter_mut().zip(counts) {
            *slot = u16::try_from(*count).ok()?;
        }
        Some(out)
    }

    /// The counts.
    pub fn counts(&self) -> impl Iterator<Item = u32> + '_ {
        self.counts.iter().take(usize::from(self.len)).map(|n| u32::from(*n))
    }

    /// Ranks that it names.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.len as u32
    }

    /// All layers.
    #[must_use]
    pub fn total(&self) -> u32 {
        self.counts().sum()
    }

    /// The layers of a rank; none for a rank that it does not name.
    #[must_use]
    pub fn range(&self, rank: u32) -> Range<u32> {
        if rank >= self.ranks() {
            return 0..0;
        }
        let before = usize::try_from(rank).unwrap_or(usize::MAX);
        let first = self.counts().take(before).sum();
        first..first + self.counts().nth(before).unwrap_or(0)
    }
}

/// Scales of quantized elements, in regions of their own: for each of the layout's regions one more, of the same kind
/// and order, with `dim` numbers for each token of each head.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Scales {
    /// Numbers for each token of each head.
    pub dim: u32,
    /// Their type.
    pub dtype: DType,
    /// Bytes from one page to the next; `None`: pages follow each other without a gap.
    pub page_stride: Option<u64>,
}

/// The factors by which all of a tensor's elements were scaled: they must be the same on both sides.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Factors {
    k: u32,
    v: u32,
}

impl Factors {
    /// Of K and of V.
    #[must_use]
    pub const fn new(k: f32, v: f32) -> Self {
        Self { k: k.to_bits(), v: v.to_bits() }
    }

    /// Of K.
    #[must_use]
    pub const fn k(&self) -> f32 {
        f32::from_bits(self.k)
    }

    /// Of V.
    #[must_use]
    pub const fn v(&self) -> f32 {
        f32::from_bits(self.v)
    }

    /// As they are on the wire.
    pub(crate) const fn bits(&self) -> (u32, u32) {
        (self.k, self.v)
    }

    pub(crate) const fn from_bits((k, v): (u32, u32)) -> Self {
        Self { k, v }
    }

    /// Whether each is a positive, finite number.
    pub(super) fn valid(&self) -> bool {
        [self.k(), self.v()].iter().all(|f| f.is_finite() && *f > 0.0)
    }
}

/// A part of a state that is split over tensor-parallel ranks by itself.
///
/// A page of region `part` is a row of blocks, in the order in which they are given: of each, the units that the rank
/// holds. With `rows` above 1 that row is repeated so many times; blocks that follow each other in one region with the
/// same number of rows share them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct StateBlock {
    /// The region, counted from 0.
    pub part: u32,
    /// Units of the whole model: they are split over ranks as KV heads are, or held by several.
    pub units: u32,
    /// Bytes of a unit, in each row.
    pub unit_bytes: u32,
    /// Rows.
    pub rows: u32,
}

/// State of a fixed size that stands for a whole prefix, such as a Mamba layer's: one page a room.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct State {
    blocks: [StateBlock; MAX_BLOCKS],
    len: u8,
}

impl State {
    /// Of these blocks. `None` if there are none or more than [`MAX_BLOCKS`].
    #[must_use]
    pub fn new(blocks: &[StateBlock]) -> Option<Self> {
        let len = u8::try_from(blocks.len()).ok().filter(|n| (1..=MAX_BLOCKS).contains(&usize::from(*n)))?;
        let none = StateBlock { part: 0, units: 0, unit_bytes: 0, rows: 0 };
        let mut out = Self { blocks: [none; MAX_BLOCKS], len };
        for (slot, block) in out.blocks.iter_mut().zip(blocks) {
            *slot = *block;
        }
        Some(out)
    }

    /// The blocks.
    #[must_use]
    pub fn blocks(&self) -> &[StateBlock] {
        self.blocks.get(..usize::from(self.len)).unwrap_or_default()
    }

    /// Regions a layer.
    #[must_use]
    pub fn parts(&self) -> u32 {
        self.blocks().iter().map(|b| b.part.saturating_add(1)).max().unwrap_or(0)
    }

    pub(super) fn validate(&self) -> Result<(), LayoutError> {
        for (i, b) in self.blocks().iter().enumerate() {
            if b.units == 0 || b.unit_bytes == 0 || b.rows == 0 || b.rows > MAX_ROWS {
                return Err(LayoutError(format!(
                    "state block {i} has {} units of {} bytes in {} rows; each is at least 1, and rows at most {MAX_ROWS}",
                    b.units, b.unit_bytes, b.rows
                )));
            }
            if b.part >= MAX_STATE_PARTS {
                return Err(LayoutError(format!(
                    "state block {i} lies in part {}; parts are below {MAX_STATE_PARTS}",
                    b.part
                )));
            }
        }
        for part in 0..self.parts() {
            let mut bytes = 0_u64;
            for b in self.blocks().iter().filter(|b| b.part == part) {
                // At most 2^80: checked.
                let block = u64::from(b.units)
                    .checked_mul(b.unit_bytes.into())
                    .and_then(|n| n.checked_mul(b.rows.into()));
                bytes = bytes.saturating_add(block.unwrap_or(u64::MAX));
            }
            if bytes == 0 || bytes > MAX_PAGE_BYTES {
                return Err(LayoutError(format!(
                    "part {part} of the state has {bytes} bytes; each part up to the last one has some, and at most \
                     {MAX_PAGE_BYTES}"
                )));
            }
        }
        Ok(())
    }

    /// Where block `index` lies in its region's page, if a rank holds `held(units)` units of each: the offset of its first
    /// row, the bytes from row to row, and the page's bytes.
    pub(crate) fn place(
        &self,
        index: usize,
        held: impl Fn(u32) -> Result<u64, LayoutError>,
    ) -> Result<(u64, u64, u64), LayoutError> {
        let part = self.blocks().get(index).map_or(0, |b| b.part);
        let (mut page, mut band, mut rows) = (0_u64, 0_u64, 0_u32);
        // The block's offset in its band, and whether its band is still open.
        let (mut found, mut stride, mut open) = (0_u64, 0_u64, false);
        for (i, b) in self.blocks().iter().enumerate().filter(|(_, b)| b.part == part) {
            if b.rows != rows {
                stride = if open { band } else { stride };
                open = false;
                page += band * u64::from(rows);
                (band, rows) = (0, b.rows);
            }
            if i == index {
                (found, open) = (page + band, true);
            }
            band += held(b.units)? * u64::from(b.unit_bytes);
        }
        stride = if open { band } else { stride };
        Ok((found, stride, page + band * u64::from(rows)))
    }
}
