//! Pack and unpack: a slice's small pieces as one run of bytes, and back.
//!
//! A slice's *packed bytes* are its [`Piece`]s' bytes one after the other, in the order in which [`super::Cursor`] gives
//! them, with nothing between. The sender packs them, one write carries them, the receiver unpacks them.
//!
//! [`Stripes`] holds the copies that this takes: neighbouring pieces of equal length at equal distances become one
//! [`Stripe`], so that a page of NHD takes one entry and not one a token. A CPU walks them ([`Stripes::copies`],
//! [`Stripes::apply`]); a GPU reads them as a [`Table`], which `cuda/pack.cuh` walks. Both do the same copies; a test
//! compares them.
//!
//! Addresses are plain numbers: the process's, a device's, or offsets from anything. What dereferences them is elsewhere.
//!
//! Cost: one pass over the pieces to build, no allocation but the list's own; as many copies as there are rows. A row is
//! copied as a whole, so long rows go at the speed of memcpy.

mod table;

pub use table::{TILE_UNITS, Table, UNIT_BYTES};

use super::{End, Piece};
use thiserror::Error;

/// Why a slice cannot be packed or unpacked.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum PackError {
    /// A piece names a region that its side does not have.
    #[error("a piece names region {region}, and its side has {count} regions")]
    NoSuchRegion {
        /// Region named.
        region: u32,
        /// Regions that there are.
        count: usize,
    },
    /// A piece, or the packed bytes, reach past the end of the memory they are in.
    #[error("{len} bytes at offset {off} do not fit into {what} of {size} bytes")]
    OutOfBounds {
        /// Which memory, in words.
        what: &'static str,
        /// Offset.
        off: u64,
        /// Bytes.
        len: u64,
        /// Bytes of that memory.
        size: u64,
    },
    /// Memory that would end past the last address.
    #[error("{size} bytes at address {addr:#x} would end past the last address")]
    Wraps {
        /// First address.
        addr: u64,
        /// Bytes.
        size: u64,
    },
}

/// Contiguous memory: a region of one side, or a staging slot.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Span {
    /// First address; bit 63 may be set.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
}

impl Span {
    /// The address of `len` bytes at `off`.
    fn at(&self, what: &'static str, off: u64, len: u64) -> Result<u64, PackError> {
        if off.checked_add(len).is_none_or(|end| end > self.len) {
            return Err(PackError::OutOfBounds { what, off, len, size: self.len });
        }
        // The last byte has an address too, so memory may end just before 2^64.
        let wraps = self.len > 0 && self.addr.checked_add(self.len - 1).is_none();
        self.addr
            .checked_add(off)
            .filter(|_| !wraps)
            .ok_or(PackError::Wraps { addr: self.addr, size: self.len })
    }
}

fn region(spans: &[Span], region: u32) -> Result<&Span, PackError> {
    spans.get(region as usize).ok_or(PackError::NoSuchRegion { region, count: spans.len() })
}

/// `rows` rows of `row` bytes: row *r* goes from `src + r * src_stride` to `dst + r * dst_stride`. A single row's strides
/// are 0. The words are read by the kernel: `cuda/pack.cuh` has the same structure, and both say how large it is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(C)]
pub struct Stripe {
    /// First row's address at the source.
    pub src: u64,
    /// First row's address at the destination.
    pub dst: u64,
    /// From one row to the next at the source.
    pub src_stride: u64,
    /// From one row to the next at the destination.
    pub dst_stride: u64,
    /// Bytes of a row.
    pub row: u64,
    /// Rows.
    pub rows: u64,
}

const _: () = assert!(
    size_of::<Stripe>() == 48
        && std::mem::offset_of!(Stripe, src) == 0
        && std::mem::offset_of!(Stripe, dst) == 8
        && std::mem::offset_of!(Stripe, src_stride) == 16
        && std::mem::offset_of!(Stripe, dst_stride) == 24
        && std::mem::offset_of!(Stripe, row) == 32
        && std::mem::offset_of!(Stripe, rows) == 40
);

/// The widest power of two, at most 16, that divides all of these numbers, given or-ed together.
const fn width(ored: u64) -> u64 {
    1 << (ored | UNIT_BYTES).trailing_zeros()
}

impl Stripe {
    /// Bytes of all rows.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.row.saturating_mul(self.rows)
    }

    /// Whether there is nothing to copy.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.row == 0 || self.rows == 0
    }

    /// Its rows, one by one.
    pub fn copies(&self) -> impl Iterator<Item = RowCopy> + use<> {
        let Self { src, dst, src_stride, dst_stride, row, rows } = *self;
        (0..rows).map(move |r| RowCopy {
            src: src.wrapping_add(r.wrapping_mul(src_stride)),
            dst: dst.wrapping_add(r.wrapping_mul(dst_stride)),
            len: row,
        })
    }

    /// Takes another row in, if it goes on where this ends or lies as far from the last row as that from the one before.
    fn join(&mut self, src: u64, dst: u64, len: u64) -> bool {
        if self.rows == 1 && self.src.wrapping_add(self.row) == src && self.dst.wrapping_add(self.row) == dst
        {
            self.row += len;
            return true;
        }
        if len != self.row {
            return false;
        }
        if self.rows > 1 {
            let next = |at: u64, stride: u64| at.wrapping_add(stride.wrapping_mul(self.rows));
            let joins = next(self.src, self.src_stride) == src && next(self.dst, self.dst_stride) == dst;
            self.rows += u64::from(joins);
            return joins;
        }
        // Rows that overlap, or go down, stay apart; and so do those whose distance would have a GPU copy both in
        // narrower units than each alone.
        let (by_src, by_dst) = (src.wrapping_sub(self.src), dst.wrapping_sub(self.dst));
        let ascends = src > self.src && dst > self.dst && by_src >= len && by_dst >= len;
        let unit = width(self.src.wrapping_sub(self.dst) | len);
        if !ascends || (by_src | by_dst) % unit != 0 {
            return false;
        }
        (self.src_stride, self.dst_stride, self.rows) = (by_src, by_dst, 2);
        true
    }
}

/// One row: a contiguous copy.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RowCopy {
    /// Address at the source.
    pub src: u64,
    /// Address at the destination.
    pub dst: u64,
    /// Bytes.
    pub len: u64,
}

/// The copies of a slice. The sources and the destinations must not overlap: the order of copies is not defined.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Stripes {
    list: Vec<Stripe>,
    bytes: u64,
}

impl Stripes {
    /// None yet.
    #[must_use]
    pub const fn new() -> Self {
        Self { list: Vec::new(), bytes: 0 }
    }

    /// Copies the source's pieces into `slot`, packed, replacing what was here before. `regions` are the source's,
    /// numbered as [`crate::layout::Side::regions`] does.
    ///
    /// # Errors
    /// When a piece is out of its region's bounds, or the packed bytes are out of the slot's. Nothing is here then.
    pub fn pack(&mut self, pieces: &[Piece], regions: &[Span], slot: Span) -> Result<(), PackError> {
        self.staged(pieces, End::Source, regions, slot)
    }

    /// Copies the packed bytes in `slot` to where the destination's pieces lie, replacing what was here before.
    ///
    /// # Errors
    /// As [`Stripes::pack`].
    pub fn unpack(&mut self, pieces: &[Piece], slot: Span, regions: &[Span]) -> Result<(), PackError> {
        self.staged(pieces, End::Destination, regions, slot)
    }

    fn staged(&mut self, pieces: &[Piece], end: End, regions: &[Span], slot: Span) -> Result<(), PackError> {
        self.fill(pieces, |piece, packed| {
            let packed = slot.at("a staging slot", packed, piece.len)?;
            Ok(match end {
                End::Source => (source(regions, piece)?, packed),
                End::Destination => (packed, destination(regions, piece)?),
            })
        })
    }

    /// Copies the pieces with no staging between, where both sides' memory can be addressed (also from one order of
    /// pages to the other), replacing what was here before.
    ///
    /// # Errors
    /// When a piece is out of bounds on either side. Nothing is here then.
    pub fn direct(&mut self, pieces: &[Piece], src: &[Span], dst: &[Span]) -> Result<(), PackError> {
        self.fill(pieces, |piece, _| Ok((source(src, piece)?, destination(dst, piece)?)))
    }

    fn fill(
        &mut self,
        pieces: &[Piece],
        place: impl Fn(&Piece, u64) -> Result<(u64, u64), PackError>,
    ) -> Result<(), PackError> {
        self.clear();
        for piece in pieces {
            let added = place(piece, self.bytes).and_then(|(src, dst)| self.push(src, dst, piece.len));
            if let Err(error) = added {
                self.clear();
                return Err(error);
            }
        }
        Ok(())
    }

    /// Adds one copy.
    ///
    /// # Errors
    /// When either end would be past the last address, or there would be 2^63 bytes in all. Nothing has changed then.
    pub fn push(&mut self, src: u64, dst: u64, len: u64) -> Result<(), PackError> {
        if len == 0 {
            return Ok(());
        }
        for addr in [src, dst] {
            if addr.checked_add(len - 1).is_none() {
                return Err(PackError::Wraps { addr, size: len });
            }
        }
        let total = self.bytes.checked_add(len).filter(|t| *t < 1 << 63);
        self.bytes = total.ok_or(PackError::OutOfBounds {
            what: "a slice",
            off: self.bytes,
            len,
            size: i64::MAX.cast_unsigned(),
        })?;
        if !self.list.last_mut().is_some_and(|last| last.join(src, dst, len)) {
            self.list.push(Stripe { src, dst, src_stride: 0, dst_stride: 0, row: len, rows: 1 });
        }
        Ok(())
    }

    /// Forgets all of them; the memory is kept for the next slice.
    pub fn clear(&mut self) {
        self.list.clear();
        self.bytes = 0;
    }

    /// All stripes, in order.
    #[must_use]
    pub fn list(&self) -> &[Stripe] {
        &self.list
    }

    /// Bytes that are copied: also the packed bytes' length.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// All rows, one by one and in order: what a CPU copies.
    pub fn copies(&self) -> impl Iterator<Item = RowCopy> + '_ {
        self.list.iter().flat_map(Stripe::copies)
    }

    /// Does the copies from one buffer to another; addresses are offsets into them.
    ///
    /// # Errors
    /// When a row is out of bounds. Rows before it are copied.
    pub fn apply(&self, src: &[u8], dst: &mut [u8]) -> Result<(), PackError> {
        for RowCopy { src: from, dst: to, len } in self.copies() {
            let (a, b) =
                (range(from, len, "the source", src.len())?, range(to, len, "the destination", dst.len())?);
            // Both were looked at by `range`.
            if let (Some(a), Some(b)) = (src.get(a), dst.get_mut(b)) {
                b.copy_from_slice(a);
            }
        }
        Ok(())
    }
}

fn source(regions: &[Span], piece: &Piece) -> Result<u64, PackError> {
    region(regions, piece.src_region)?.at("a source region", piece.src_off, piece.len)
}

fn destination(regions: &[Span], piece: &Piece) -> Result<u64, PackError> {
    region(regions, piece.dst_region)?.at("a destination region", piece.dst_off, piece.len)
}

fn range(off: u64, len: u64, what: &'static str, size: usize) -> Result<std::ops::Range<usize>, PackError> {
    let start = usize::try_from(off).ok();
    start
        .zip(off.checked_add(len).and_then(|end| usize::try_from(end).ok()))
        .filter(|(_, end)| *end <= size)
        .map(|(start, end)| start..end)
        .ok_or(PackError::OutOfBounds { what, off, len, size: size as u64 })
}

#[cfg(test)]
mod tests;
