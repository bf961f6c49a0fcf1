//! Direct or packed: what a push would take either way.

use super::{Cursor, Request, Template};
use crate::layout::Side;
use std::sync::Arc;

/// Pieces that a packed slice has at most, so that a turn of the thread stays short. Part of [`super::ORDER`].
pub const PACKED_PIECES: usize = 4096;

/// Tokens, in pages of the larger side, that a sample holds.
const SAMPLE_PAGES: u64 = 4;

/// What a push has to move.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Load {
    /// Bytes.
    pub bytes: u64,
    /// Contiguous runs: writes if it goes direct, rows to pack and to unpack if it does not.
    pub runs: u64,
}

impl Load {
    /// Of all that this cursor gives from its start.
    #[must_use]
    pub fn of(cursor: &Cursor) -> Self {
        Self { bytes: cursor.total_bytes(), runs: cursor.pieces() }
    }

    /// Bytes of a run, on average.
    #[must_use]
    pub const fn run_bytes(&self) -> u64 {
        match self.bytes.checked_div(self.runs) {
            Some(bytes) => bytes,
            None => 0,
        }
    }
}

/// What a connection's moves take, in nanoseconds: measured when it is made.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Cost {
    /// A write to pages, without its bytes.
    pub put_ns: f64,
    /// A byte of a write to pages.
    pub put_byte_ns: f64,
    /// A write to a slot, without its bytes.
    pub slot_ns: f64,
    /// A byte of a write to a slot.
    pub slot_byte_ns: f64,
    /// A row that is packed, without its bytes.
    pub pack_row_ns: f64,
    /// A byte that is packed.
    pub pack_byte_ns: f64,
    /// A row that is unpacked, without its bytes.
    pub unpack_row_ns: f64,
    /// A byte that is unpacked.
    pub unpack_byte_ns: f64,
    /// A control message, there and back.
    pub trip_ns: f64,
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
const fn float(n: u64) -> f64 {
    n as f64
}

impl Cost {
    /// As one write a run.
    #[must_use]
    pub fn direct_ns(&self, load: Load) -> f64 {
        float(load.runs) * self.put_ns + float(load.bytes) * self.put_byte_ns
    }

    /// Packed, where so many sources write to the destination at once, which unpacks for all of them. Nothing is taken off for
    /// the two sides working at the same time: on one host they share its cores and memory, and between hosts the wire
    /// takes far longer than either. Slots are asked for first, and the last slice is waited for.
    #[must_use]
    pub fn packed_ns(&self, load: Load, slice_bytes: u64, sources: u32) -> f64 {
        let (runs, bytes) = (float(load.runs), float(load.bytes));
        let slices = load.bytes.div_ceil(slice_bytes.max(1)).max(load.runs.div_ceil(PACKED_PIECES as u64));
        let slices = float(slices.max(1));
        let send =
            runs * self.pack_row_ns + bytes * (self.pack_byte_ns + self.slot_byte_ns) + slices * self.slot_ns;
        let unpack = runs * self.unpack_row_ns + bytes * self.unpack_byte_ns;
        2.0 * self.trip_ns + send + unpack * f64::from(sources.max(1))
    }

    /// Whether packing is worth it.
    #[must_use]
    pub fn prefers_packed(&self, load: Load, slice_bytes: u64, sources: u32) -> bool {
        self.packed_ns(load, slice_bytes, sources) < self.direct_ns(load)
    }
}

/// A few pages of what goes from `src` to `dst`, no two of them side by side if there are enough: what pushes of this
/// pair are like. `None` if nothing does, or either side has no pages.
#[must_use]
pub fn sample(
    template: &Arc<Template>,
    (src, src_counts): (&Side, &[u32]),
    (dst, dst_counts): (&Side, &[u32]),
) -> Option<Cursor> {
    let groups = || src.groups.iter().zip(src_counts).chain(dst.groups.iter().zip(dst_counts));
    let plain = || groups().filter(|(layout, _)| layout.state.is_none());
    let most = plain().map(|(l, count)| u64::from(l.page_tokens) * u64::from(*count)).min().unwrap_or(1);
    let page = plain().map(|(l, _)| u64::from(l.page_tokens)).max().unwrap_or(1);
    let tokens = most.min(page.saturating_mul(SAMPLE_PAGES));
    let lists = |side: &Side, counts: &[u32]| -> Vec<Arc<[u32]>> {
        let list = |(layout, count): (&crate::layout::PageLayout, &u32)| {
            let held = layout.held(0..tokens);
            let need = crate::node::pages_needed(layout.page_tokens.into(), held.start, held.end);
            let need = if layout.state.is_some() { 1 } else { u32::try_from(need).unwrap_or(u32::MAX) };
            let step = if need.saturating_mul(2) <= *count { 2 } else { 1 };
            (0..need.min(*count)).map(|i| i * step).collect()
        };
        side.groups.iter().zip(counts).map(list).collect()
    };
    let request = Request {
        src_pages: lists(src, src_counts),
        src_tokens: 0..tokens,
        dst_pages: lists(dst, dst_counts),
        dst_tokens: 0..tokens,
        tokens: 0..tokens,
        layers: 0..u32::MAX,
    };
    let cursor = Cursor::new(Arc::clone(template), request, src_counts, dst_counts).ok()?;
    (cursor.total_bytes() > 0).then_some(cursor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{DType, Order, PageLayout, Shard};

    fn side(order: Order, tp_rank: u32, tp_size: u32) -> Side {
        let layout = PageLayout {
            layers: 2,
            kv_heads: 8,
            head_dim: 128,
            page_tokens: 16,
            dtype: DType::Bfloat16,
            order,
            ..PageLayout::PLAIN
        };
        Side { groups: vec![layout], shard: Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 } }
    }

    #[test]
    fn a_sample_shows_what_runs_a_pair_has() {
        for (order, pages, run) in [(Order::Nhd, 64, 256), (Order::Hnd, 64, 4096), (Order::Nhd, 1, 256)] {
            let (src, dst) = (side(order, 0, 8), side(order, 0, 4));
            let template = Arc::new(Template::new(&src, &dst).unwrap());
            let mut cursor = sample(&template, (&src, &[pages]), (&dst, &[pages])).unwrap();
            let load = Load::of(&cursor);
            assert_eq!(load.run_bytes(), run);
            let mut pieces = Vec::new();
            while cursor.fill(&mut pieces, u64::MAX, usize::MAX) {}
            assert_eq!(pieces.len() as u64, load.runs, "pieces are counted without being made");
        }
        let (src, dst) = (side(Order::Nhd, 7, 8), side(Order::Nhd, 0, 4));
        let template = Arc::new(Template::new(&src, &dst).unwrap());
        assert!(sample(&template, (&src, &[9]), (&dst, &[9])).is_none(), "no head in common");
    }

    #[test]
    fn small_runs_are_packed_where_writes_are_dear_and_large_ones_are_not() {
        let dear = Cost {
            put_ns: 2000.0,
            put_byte_ns: 1.0,
            slot_ns: 2000.0,
            slot_byte_ns: 1.0,
            pack_row_ns: 10.0,
            pack_byte_ns: 0.1,
            unpack_row_ns: 10.0,
            unpack_byte_ns: 0.1,
            trip_ns: 10_000.0,
        };
        let cheap = Cost { put_ns: 20.0, put_byte_ns: 0.1, slot_ns: 20.0, slot_byte_ns: 0.1, ..dear };
        // Pages that the transports reach by a detour only, and slots that they reach at once.
        let plain = Cost { put_ns: 200_000.0, put_byte_ns: 25.0, ..cheap };
        let small = Load { bytes: 64 << 20, runs: (64 << 20) / 256 };
        let large = Load { bytes: 64 << 20, runs: 64 };
        let few = Load { bytes: 512, runs: 2 };
        assert!(dear.prefers_packed(small, 256 << 10, 2));
        assert!(!dear.prefers_packed(large, 256 << 10, 2));
        assert!(!dear.prefers_packed(few, 256 << 10, 2), "asking for slots takes longer than two writes");
        assert!(!cheap.prefers_packed(large, 256 << 10, 2));
        assert!(cheap.direct_ns(small) < dear.direct_ns(small));
        assert!(plain.prefers_packed(large, 256 << 10, 2) && plain.prefers_packed(small, 256 << 10, 2));
    }
}
