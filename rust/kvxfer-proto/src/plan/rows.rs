//! The rows of one side of a push: one token of one head of one tensor of one layer, wherever they lie.
//!
//! Rows are what both sides have in common whatever their layouts, page sizes and shards: a row is contiguous in
//! every layout, and its [`Place`] is logical. Long rows are cut into cells of [`CELL_BYTES`], so that nothing here
//! depends on how large a row may be.

use super::Template;
use super::segment::{PageList, Walk};
use super::template::{Geometry, Strand};
use crate::layout::LayoutError;
use std::ops::Range;
use std::sync::Arc;

/// Rows longer than this are cut into cells of this size; the last one may be shorter.
pub const CELL_BYTES: u64 = 4096;

/// One row in 64 is sampled: those whose key ends in six zero bits. More would save little over all of them, since each is
/// another line of memory.
const SAMPLE_MASK: u64 = (1 << 6) - 1;

/// A side of a pair of shards.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum End {
    /// Prefill's bytes.
    Source,
    /// Decode's.
    Destination,
}

/// Which rows of one side: those that the template moves, within this range.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Extent {
    /// Whose pages they are.
    pub end: End,
    /// One page list a group.
    pub pages: Vec<Arc<[u32]>>,
    /// The tokens that the page lists hold, as in [`super::Request`].
    pub list: Range<u64>,
    /// The room's tokens, as decode granted them; the end matters where a group holds the last ones.
    pub room: Range<u64>,
    /// Tokens.
    pub tokens: Range<u64>,
    /// Layers, at most; what the template does not hold is left out.
    pub layers: Range<u32>,
    /// Only the first and the last token's rows, and one row in 64 of the others.
    pub sample: bool,
}

/// A cell by its logical coordinates, in the model's numbering.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Place {
    /// Group.
    pub group: u32,
    /// Layer of the group.
    pub layer: u32,
    /// K (0) or V (1), or the latent (0); their scales from 16 on; a row of a block of a state from 65,536 on.
    pub tensor: u32,
    /// Head.
    pub head: u32,
    /// Token of the prompt.
    pub token: u64,
    /// Which cell of a row longer than [`CELL_BYTES`].
    pub cell: u64,
}

/// Spreads every bit over all of them; a bijection.
pub(super) const fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ (x >> 33)).wrapping_mul(0xFF51_AFD7_ED55_8CCD);
    let x = (x ^ (x >> 33)).wrapping_mul(0xC4CE_B9FE_1A85_EC53);
    x ^ (x >> 33)
}

impl Place {
    /// What the places of one head of one tensor have in common. On the wire, in a way: never change it.
    pub(super) const fn line(&self) -> u64 {
        let layer = mix((self.group as u64) << 32 | self.layer as u64);
        mix(layer ^ ((self.tensor as u64) << 32 | self.head as u64))
    }

    /// The key of a cell of this line.
    pub(super) const fn key_in(line: u64, token: u64, cell: u64) -> u64 {
        let row = mix(line ^ token);
        if cell == 0 { row } else { mix(row ^ cell) }
    }
}

/// Cells of equal length that lie one after the other in one region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Run {
    /// Region, as [`crate::layout::Side::regions`] numbers them.
    pub region: u32,
    /// Offset of the first cell.
    pub off: u64,
    /// Bytes of each cell.
    pub cell: u64,
    /// How many.
    pub count: u64,
    /// The first cell's place.
    pub place: Place,
    /// From one cell to the next it is the token that rises, not the head.
    pub by_token: bool,
}

impl Run {
    /// Bytes of all cells.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.cell * self.count
    }

    /// Whether it has no bytes.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Tokens within one page: the offset of the first one's first head, and how many.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Span {
    off: u64,
    token: u64,
    count: u64,
}

/// One group's share.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Work {
    /// Index of the strand in the template.
    strand: usize,
    layers: Range<u32>,
    spans: Vec<Span>,
}

/// The next cell.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct At {
    work: usize,
    layer: u32,
    tensor: u32,
    span: usize,
    outer: u64,
    inner: u64,
    cell: u64,
}

/// Gives the rows of one side of a push, a slice at a time. Clones share everything but their place.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Rows {
    template: Arc<Template>,
    works: Arc<[Work]>,
    end: End,
    tokens: Range<u64>,
    sample: bool,
    at: At,
}

impl Rows {
    /// The rows of `extent`. `page_count` has the pages of each group of that side.
    ///
    /// # Errors
    /// When the page lists do not hold the tokens, a page id is not below its group's page count, or a count of
    /// groups differs from the template's.
    pub fn new(template: Arc<Template>, extent: Extent, page_count: &[u32]) -> Result<Self, LayoutError> {
        let Extent { end, pages, list, room, tokens, layers, sample } = extent;
        let groups = template.groups;
        if pages.len() != groups || page_count.len() != groups {
            let (lists, counts) = (pages.len(), page_count.len());
            return Err(LayoutError(format!(
                "{lists} page lists and {counts} page counts for {groups} groups; give one a group"
            )));
        }
        if tokens.start > tokens.end || layers.start > layers.end {
            return Err(LayoutError(format!("tokens {tokens:?} or layers {layers:?} end before they start")));
        }
        let mut works = Vec::new();
        for (index, strand) in template.strands.iter().enumerate() {
            let (Some(pages), Some(&count)) = (pages.get(strand.group), page_count.get(strand.group)) else {
                continue;
            };
            let layers = super::pair::intersect(&strand.layers, &layers);
            let held = strand.held(&tokens, &room);
            if layers.is_empty() || held.is_empty() {
                continue;
            }
            let side = match end {
                End::Source => "source",
                End::Destination => "destination",
            };
            let list = PageList { side, group: strand.group, pages, tokens: &list, count };
            let mut spans = Vec::new();
            for tokens in strand.share.tokens(held) {
                let mut walk = Walk::new(&list, strand, geometry(strand, end), &tokens)?;
                let mut token = tokens.start;
                while token < tokens.end {
                    let count = walk.left().min(tokens.end - token);
                    spans.push(Span { off: walk.offset(), token, count });
                    walk.advance(count);
                    token += count;
                }
            }
            if !spans.is_empty() {
                works.push(Work { strand: index, layers, spans });
            }
        }
        let at = At { layer: works.first().map_or(0, |w| w.layers.start), ..At::default() };
        Ok(Self { template, works: works.into(), end, tokens, sample, at })
    }

    /// Whether nothing remains.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.at.work >= self.works.len()
    }

    /// Appends the next runs to `out`: at most `max_bytes` of them, after a look at no more than `max_cells` cells, but
    /// always at least one cell is looked at. True while more remains.
    pub fn fill(&mut self, out: &mut Vec<Run>, max_bytes: u64, max_cells: u64) -> bool {
        let Self { template, works, end, tokens, sample, at } = self;
        let edges = [tokens.start, tokens.end.saturating_sub(1)];
        let mut sink = Sink {
            first: out.len(),
            out,
            bytes: max_bytes,
            cells: max_cells.max(1),
            sample: sample.then_some(edges),
        };
        while let Some(work) = works.get(at.work) {
            if let Some(strand) = template.strands.get(work.strand) {
                let geometry = geometry(strand, *end);
                let tensors = strand.tensors();
                while at.layer < work.layers.end {
                    while at.tensor < tensors {
                        while let Some(span) = work.spans.get(at.span) {
                            let grid = Grid::new(strand, geometry, at, *span);
                            if !grid.run(at, &mut sink) {
                                return true;
                            }
                            at.span += 1;
                        }
                        at.span = 0;
                        at.tensor += 1;
                    }
                    at.tensor = 0;
                    at.layer += 1;
                }
            }
            at.work += 1;
            at.layer = works.get(at.work).map_or(0, |w| w.layers.start);
        }
        false
    }
}

const fn geometry(strand: &Strand, end: End) -> &Geometry {
    match end {
        End::Source => &strand.src,
        End::Destination => &strand.dst,
    }
}

/// The heads and tokens of one span, of one tensor of one layer.
struct Grid {
    region: u32,
    off: u64,
    row: u64,
    first: Place,
    /// Whether the inner axis is the tokens; else it is the heads.
    by_token: bool,
    /// How many there are of what lies closest together, and of the other axis.
    inner: u64,
    outer: u64,
    /// From one to the next of each.
    step: u64,
    stride: u64,
}

impl Grid {
    fn new(strand: &Strand, geometry: &Geometry, at: &At, span: Span) -> Self {
        let (region, tensor_off) = geometry.tensor(at.layer, at.tensor);
        // A state has no tokens to go along.
        let by_token = geometry.token > 0 && (geometry.token < geometry.head || strand.heads == 1);
        let (tokens, heads) = ((span.count, geometry.token), (strand.heads, geometry.head));
        let (inner, outer) = if by_token { (tokens, heads) } else { (heads, tokens) };
        Self {
            region,
            off: tensor_off + span.off,
            row: strand.row,
            first: Place {
                // At most `MAX_GROUPS`.
                group: u32::try_from(strand.group).unwrap_or(u32::MAX),
                layer: at.layer,
                tensor: strand.first_tensor + at.tensor,
                head: strand.first_head,
                token: span.token,
                cell: 0,
            },
            by_token,
            inner: inner.0,
            outer: outer.0,
            step: inner.1,
            stride: outer.1,
        }
    }

    /// The rest of it. False if the sink is full.
    fn run(&self, at: &mut At, sink: &mut Sink<'_>) -> bool {
        while at.outer < self.outer {
            while at.inner < self.inner {
                let row_off = self.off + at.outer * self.stride + at.inner * self.step;
                let (token, head) = if self.by_token { (at.inner, at.outer) } else { (at.outer, at.inner) };
                let place = Place {
                    token: self.first.token + token,
                    // Below the model's number of heads.
                    head: self.first.head + u32::try_from(head).unwrap_or(u32::MAX),
                    cell: at.cell,
                    ..self.first
                };
                let run = |cell, count| Run {
                    region: self.region,
                    off: row_off + at.cell * CELL_BYTES,
                    cell,
                    count,
                    place,
                    by_token: self.by_token,
                };
                if self.row > CELL_BYTES {
                    let done = at.cell * CELL_BYTES;
                    if sink.take(run(CELL_BYTES.min(self.row - done), 1)) == 0 {
                        return false;
                    }
                    at.cell += 1;
                    if at.cell * CELL_BYTES >= self.row {
                        at.cell = 0;
                        at.inner += 1;
                    }
                } else {
                    // Rows that do not touch are runs of one.
                    let count = if self.step == self.row { self.inner - at.inner } else { 1 };
                    let taken = sink.take(run(self.row, count));
                    if taken == 0 {
                        return false;
                    }
                    at.inner += taken;
                }
            }
            at.inner = 0;
            at.outer += 1;
        }
        at.outer = 0;
        true
    }
}

/// Where runs go, and how much more fits.
struct Sink<'a> {
    out: &'a mut Vec<Run>,
    /// Runs before this one are not ours to extend.
    first: usize,
    bytes: u64,
    cells: u64,
    /// The first and the last token, if only a sample is wanted.
    sample: Option<[u64; 2]>,
}

impl Sink<'_> {
    /// Takes as many of the run's cells as fit, at least one if nothing was looked at yet. Returns how many were dealt
    /// with.
    fn take(&mut self, run: Run) -> u64 {
        let fits = self.bytes / run.cell.max(1);
        let fits = if fits == 0 && self.out.len() == self.first { 1 } else { fits };
        let count = run.count.min(fits).min(self.cells);
        if count == 0 {
            return 0;
        }
        let Some(edges) = self.sample else {
            self.put(Run { count, ..run });
            self.cells -= count;
            return count;
        };
        let line = run.place.line();
        for n in 0..count {
            let mut place = run.place;
            let line = if run.by_token {
                place.token += n;
                line
            } else {
                place.head += u32::try_from(n).unwrap_or(u32::MAX);
                place.line()
            };
            let key = Place::key_in(line, place.token, place.cell);
            if key & SAMPLE_MASK == 0 || edges.contains(&place.token) {
                self.put(Run { off: run.off + n * run.cell, count: 1, place, ..run });
            }
        }
        self.cells -= count;
        count
    }

    /// Adds cells, to the last run if they go on where it ends.
    fn put(&mut self, run: Run) {
        self.bytes = self.bytes.saturating_sub(run.len());
        if self.out.len() > self.first
            && let Some(last) = self.out.last_mut()
            && (last.region, last.cell, last.by_token) == (run.region, run.cell, run.by_token)
            && last.off + last.len() == run.off
            && next(last) == run.place
        {
            last.count += run.count;
            return;
        }
        self.out.push(run);
    }
}

/// The place after a run's last cell.
fn next(run: &Run) -> Place {
    let Run { place, count, .. } = *run;
    if run.by_token {
        Place { token: place.token + count, ..place }
    } else {
        Place { head: place.head.saturating_add(u32::try_from(count).unwrap_or(u32::MAX)), ..place }
    }
}
