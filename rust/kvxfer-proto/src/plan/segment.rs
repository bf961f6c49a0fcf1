//! One pass over the page lists: runs of tokens within one page on both sides, as boxes of bytes.

use super::template::{Geometry, Strand};
use crate::layout::LayoutError;
use std::collections::BTreeMap;
use std::ops::Range;

/// One axis of a box: how often, and the strides on both sides.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Dim {
    pub(super) count: u64,
    pub(super) src: u64,
    pub(super) dst: u64,
}

/// The outer axes of a box, innermost first; its contiguous axes are in the run's length.
pub(super) type Shape = [Dim; 4];

const ONE: Dim = Dim { count: 1, src: 0, dst: 0 };
/// Number of the shape with a single run.
pub(super) const SINGLE: usize = 0;

/// A box of bytes of one lane: a run of `len` bytes, repeated along its shape's axes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Segment {
    pub(super) src: u64,
    pub(super) dst: u64,
    pub(super) len: u64,
    pub(super) shape: usize,
}

/// The boxes of one group, alike for every layer and lane.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Segments {
    pub(super) list: Vec<Segment>,
    pub(super) shapes: Vec<Shape>,
    /// Runs before neighbouring pages were joined.
    pub(super) runs: u64,
}

/// A side's page list, for messages and checks.
pub(super) struct PageList<'a> {
    pub(super) side: &'static str,
    pub(super) group: usize,
    pub(super) pages: &'a [u32],
    /// The tokens that the list was made for.
    pub(super) tokens: &'a Range<u64>,
    /// Pages of the group's regions.
    pub(super) count: u32,
}

/// Walks along a page list.
pub(super) struct Walk<'a> {
    geometry: &'a Geometry,
    pages: std::slice::Iter<'a, u32>,
    count: u32,
    /// Offset of the current page, and the token within it.
    page: u64,
    slot: u64,
}

impl<'a> Walk<'a> {
    pub(super) fn new(
        list: &PageList<'a>,
        strand: &Strand,
        geometry: &'a Geometry,
        tokens: &Range<u64>,
    ) -> Result<Self, LayoutError> {
        let PageList { side, group, .. } = *list;
        let start = strand.list_start(list.tokens);
        let each = geometry.page_tokens;
        if tokens.start < start {
            return Err(LayoutError(format!(
                "the {side} page list of group {group} starts at token {start}, after token {}",
                tokens.start
            )));
        }
        // Logical pages, counted from the prompt's start.
        let (first, last, base) = (tokens.start / each, tokens.end.saturating_sub(1) / each, start / each);
        let skip = usize::try_from(first - base).ok();
        let need = usize::try_from(last - base).ok();
        let (Some(skip), Some(need)) = (skip, need.filter(|&n| n < list.pages.len())) else {
            return Err(LayoutError(format!(
                "the {side} page list of group {group} has {} pages from token {start}, but tokens {}..{} at {each} a \
                 page need {}",
                list.pages.len(),
                tokens.start,
                tokens.end,
                u128::from(last - base) + 1
            )));
        };
        let used = list.pages.get(skip..=need).unwrap_or_default();
        if let Some(page) = used.iter().find(|&&p| p >= list.count) {
            return Err(LayoutError(format!(
                "{side} page {page} of group {group} is out of range: the group has {} pages",
                list.count
            )));
        }
        let mut walk =
            Self { geometry, pages: used.iter(), count: list.count, page: 0, slot: tokens.start % each };
        walk.turn();
        Ok(walk)
    }

    /// To the next page. Every id has been checked, so the offset lies in a region, whose size is below 2^63.
    fn turn(&mut self) {
        if let Some(&page) = self.pages.next() {
            debug_assert!(page < self.count);
            self.page = u64::from(page) * self.geometry.page;
        }
    }

    /// Offset of the next token's first head.
    pub(super) const fn offset(&self) -> u64 {
        self.page + self.geometry.first + self.slot * self.geometry.token
    }

    /// Tokens left in this page.
    pub(super) const fn left(&self) -> u64 {
        self.geometry.page_tokens - self.slot
    }

    pub(super) fn advance(&mut self, tokens: u64) {
        self.slot += tokens;
        if self.slot == self.geometry.page_tokens {
            self.slot = 0;
            self.turn();
        }
    }
}

/// Builds the list of boxes.
struct Builder<'a> {
    strand: &'a Strand,
    /// Layers that move as an axis of each box.
    layers: u64,
    out: Segments,
    /// Run length and shape for a number of tokens.
    known: BTreeMap<u64, (u64, usize)>,
}

impl Builder<'_> {
    /// Adds a run of tokens within one page on both sides.
    fn push(&mut self, src: u64, dst: u64, tokens: u64) {
        let (len, shape) = match self.known.get(&tokens) {
            Some(&known) => known,
            None => self.learn(tokens),
        };
        let turns = self.out.shapes.get(shape).map_or(1, |s| s.iter().map(|d| d.count).product());
        self.out.runs = self.out.runs.saturating_add(turns);
        if shape == SINGLE
            && let Some(last) = self.out.list.last_mut()
            && last.shape == SINGLE
            && last.src + last.len == src
            && last.dst + last.len == dst
        {
            last.len += len;
            return;
        }
        self.out.list.push(Segment { src, dst, len, shape });
    }

    /// Takes into the run every axis that is contiguous on both sides.
    fn learn(&mut self, tokens: u64) -> (u64, usize) {
        let Strand { heads, halves, row, src, dst, .. } = self.strand;
        let mut shape = [
            Dim { count: tokens, src: src.token, dst: dst.token },
            Dim { count: *heads, src: src.head, dst: dst.head },
            Dim { count: *halves, src: src.tensor, dst: dst.tensor },
            Dim { count: self.layers, src: src.layer, dst: dst.layer },
        ]
        .map(|d| if d.count == 1 { ONE } else { d });
        let mut len = *row;
        while let Some(dim) = shape.iter_mut().find(|d| d.count > 1 && d.src == len && d.dst == len) {
            len *= dim.count;
            *dim = ONE;
        }
        // Real axes first: `fill` turns the first ones fastest, in ascending order of destination addresses.
        shape.sort_by_key(|d| (d.count == 1, d.dst));
        let index = self.out.shapes.iter().position(|s| *s == shape).unwrap_or_else(|| {
            self.out.shapes.push(shape);
            self.out.shapes.len() - 1
        });
        self.known.insert(tokens, (len, index));
        (len, index)
    }
}

/// The boxes of `strand` for each range of `tokens`, none of which may be empty; `layers` of them move as an axis.
pub(super) fn segments(
    strand: &Strand,
    src: &PageList<'_>,
    dst: &PageList<'_>,
    tokens: impl Iterator<Item = Range<u64>>,
    layers: u64,
) -> Result<Segments, LayoutError> {
    let out = Segments { list: Vec::new(), shapes: vec![[ONE; 4]], runs: 0 };
    let mut builder = Builder { strand, layers, out, known: BTreeMap::new() };
    for tokens in tokens {
        let mut from = Walk::new(src, strand, &strand.src, &tokens)?;
        let mut to = Walk::new(dst, strand, &strand.dst, &tokens)?;
        let mut left = tokens.end - tokens.start;
        while left > 0 {
            let n = left.min(from.left()).min(to.left());
            builder.push(from.offset(), to.offset(), n);
            from.advance(n);
            to.advance(n);
            left -= n;
        }
    }
    Ok(builder.out)
}
