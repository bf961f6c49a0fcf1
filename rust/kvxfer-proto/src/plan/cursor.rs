//! The pieces of one push.

use super::segment::{PageList, SINGLE, Segment, Segments, Shape, segments};
use super::{Piece, Template};
use crate::layout::{LayoutError, Side};
use std::ops::Range;
use std::sync::Arc;

/// What to move: tokens and layers, and the page lists of both sides.
///
/// A list's first token need not be a multiple of the page size: then its first page holds it at its slot
/// `token % page_tokens`, and the tokens before it are not touched. Where a group holds only the last tokens, its list begins
/// with the page of the first token that is still held at the end of the list's range.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Request {
    /// Source page list of each group.
    pub src_pages: Vec<Arc<[u32]>>,
    /// The tokens that the source page lists hold; the end matters only where a group holds the last ones.
    pub src_tokens: Range<u64>,
    /// Destination page list of each group.
    pub dst_pages: Vec<Arc<[u32]>>,
    /// The tokens that the destination page lists hold: its end is the room's.
    pub dst_tokens: Range<u64>,
    /// Tokens to move.
    pub tokens: Range<u64>,
    /// Layers to move, at most; what the template does not hold is left out.
    pub layers: Range<u32>,
}

/// One group's share of a push.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Work {
    /// Index of the strand in the template.
    strand: usize,
    /// Layers to go through; one stands for all that move as an axis.
    layers: Range<u32>,
    segments: Segments,
}

/// The next run: which work, layer, lane, segment, place in the segment's shape, and bytes of it already given.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Place {
    work: usize,
    layer: u32,
    lane: u32,
    segment: usize,
    turns: [u64; 4],
    given: u64,
}

/// Gives a push's pieces, a slice at a time. Clones share everything but their place.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Cursor {
    template: Arc<Template>,
    works: Arc<[Work]>,
    total: u64,
    runs: u64,
    at: Place,
}

impl Cursor {
    /// The pieces of `request`. Groups of which the template moves nothing need no pages. That destination pages
    /// are not repeated is for the caller to check.
    ///
    /// # Errors
    /// When the page lists do not hold the tokens, a page id is not below the group's page count, or a count of
    /// groups differs from the template's.
    pub fn new(
        template: Arc<Template>,
        request: Request,
        src_page_count: &[u32],
        dst_page_count: &[u32],
    ) -> Result<Self, LayoutError> {
        let Request { src_pages, src_tokens, dst_pages, dst_tokens, tokens, layers } = request;
        let groups = template.groups;
        for (name, n) in [
            ("source page lists", src_pages.len()),
            ("destination page lists", dst_pages.len()),
            ("source page counts", src_page_count.len()),
            ("destination page counts", dst_page_count.len()),
        ] {
            if n != groups {
                return Err(LayoutError(format!("{n} {name} for {groups} groups; give one a group")));
            }
        }
        if tokens.start > tokens.end || layers.start > layers.end {
            return Err(LayoutError(format!("tokens {tokens:?} or layers {layers:?} end before they start")));
        }
        let mut works = Vec::new();
        let (mut total, mut runs) = (Some(0_u64), 0_u64);
        for (index, strand) in template.strands.iter().enumerate() {
            let g = strand.group;
            let layers = super::pair::intersect(&strand.layers, &layers);
            let held = strand.held(&tokens, &dst_tokens);
            if layers.is_empty() || held.is_empty() {
                continue;
            }
            let list = |side, pages: &'_ [Arc<[u32]>], counts: &[u32]| {
                Some((side, pages.get(g)?.clone(), *counts.get(g)?))
            };
            let (Some(src), Some(dst)) =
                (list("source", &src_pages, src_page_count), list("destination", &dst_pages, dst_page_count))
            else {
                continue;
            };
            let src = PageList { side: src.0, group: g, pages: &src.1, tokens: &src_tokens, count: src.2 };
            let dst = PageList { side: dst.0, group: g, pages: &dst.1, tokens: &dst_tokens, count: dst.2 };
            let count = layers.len() as u64;
            let fold = if strand.fold { count } else { 1 };
            let segments = segments(strand, &src, &dst, strand.share.tokens(held.clone()), fold)?;
            let through = if strand.fold { layers.start..layers.start + 1 } else { layers };
            let lanes = through.len() as u64 * u64::from(strand.lanes);
            runs = runs.saturating_add(segments.runs.saturating_mul(lanes));
            // At most 4096 layers of 2^31 bytes a token: only the tokens can make it too much.
            let token_bytes = count * u64::from(strand.lanes) * strand.halves * strand.heads * strand.row;
            let bytes = token_bytes.checked_mul(strand.share.count(held));
            total = total.zip(bytes).and_then(|(a, b)| a.checked_add(b));
            works.push(Work { strand: index, layers: through, segments });
        }
        let total = total
            .ok_or_else(|| LayoutError(format!("tokens {tokens:?} are more than 2^64 bytes; split them")))?;
        works.retain(|w| !w.segments.list.is_empty());
        let at = Place { layer: works.first().map_or(0, |w| w.layers.start), ..Place::default() };
        Ok(Self { template, works: works.into(), total, runs, at })
    }

    /// Runs of the whole push before neighbouring ones are joined: each lies within one page on both sides.
    #[must_use]
    pub const fn runs(&self) -> u64 {
        self.runs
    }

    /// Bytes of the whole push, given already or not.
    #[must_use]
    pub const fn total_bytes(&self) -> u64 {
        self.total
    }

    /// The template it was made with.
    #[must_use]
    pub const fn template(&self) -> &Arc<Template> {
        &self.template
    }

    /// Whether nothing remains.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.at.work >= self.works.len()
    }

    /// Appends the next pieces to `out`, at most `max_bytes` and `max_pieces` of them but always one if any
    /// remains; true while more remains. A piece larger than `max_bytes` is cut; pieces that are contiguous on
    /// both sides are one, but never across two calls.
    pub fn fill(&mut self, out: &mut Vec<Piece>, max_bytes: u64, max_pieces: usize) -> bool {
        let mut sink = Sink::new(out, max_bytes, max_pieces);
        let Self { template, works, at, .. } = self;
        while let Some(work) = works.get(at.work) {
            if let Some(strand) = template.strands.get(work.strand) {
                while at.layer < work.layers.end {
                    while at.lane < strand.lanes {
                        let (src, dst) =
                            (strand.src.tensor(at.layer, at.lane), strand.dst.tensor(at.layer, at.lane));
                        if !lane(&work.segments, at, &mut sink, src, dst) {
                            return true;
                        }
                        at.segment = 0;
                        at.lane += 1;
                    }
                    at.lane = 0;
                    at.layer += 1;
                }
            }
            at.work += 1;
            at.layer = works.get(at.work).map_or(0, |w| w.layers.start);
        }
        false
    }
}

/// The rest of one lane of one layer; `src` and `dst` are its regions and offsets. False if the sink is full.
#[inline]
fn lane(work: &Segments, at: &mut Place, sink: &mut Sink<'_>, src: (u32, u64), dst: (u32, u64)) -> bool {
    while let Some(segment) = work.list.get(at.segment) {
        let base = Piece {
            src_region: src.0,
            src_off: segment.src + src.1,
            dst_region: dst.0,
            dst_off: segment.dst + dst.1,
            len: segment.len,
        };
        let whole = if segment.shape == SINGLE {
            sink.run(base, &mut at.given)
        } else {
            work.shapes.get(segment.shape).is_none_or(|shape| runs(shape, segment, at, sink, base))
        };
        if !whole {
            return false;
        }
        at.segment += 1;
    }
    true
}

/// The rest of one segment's runs. False if the sink is full.
#[inline]
fn runs(shape: &Shape, segment: &Segment, at: &mut Place, sink: &mut Sink<'_>, base: Piece) -> bool {
    let [inner, middle, outer, outermost] = shape;
    let Place { turns: [x, y, z, w], given, .. } = at;
    while *w < outermost.count {
        while *z < outer.count {
            while *y < middle.count {
                let src_off = base.src_off + *y * middle.src + *z * outer.src + *w * outermost.src;
                let dst_off = base.dst_off + *y * middle.dst + *z * outer.dst + *w * outermost.dst;
                while *x < inner.count {
                    let run = Piece {
                        src_off: src_off + *x * inner.src,
                        dst_off: dst_off + *x * inner.dst,
                        len: segment.len,
                        ..base
                    };
                    if !sink.run(run, given) {
                        return false;
                    }
                    *x += 1;
                }
                *x = 0;
                *y += 1;
            }
            *y = 0;
            *z += 1;
        }
        *z = 0;
        *w += 1;
    }
    *w = 0;
    true
}

/// Where pieces go, and how much more of them fits.
struct Sink<'a> {
    out: &'a mut Vec<Piece>,
    /// Pieces before this one are not ours to join.
    first: usize,
    max_bytes: u64,
    bytes_left: u64,
    pieces_left: usize,
}

impl<'a> Sink<'a> {
    fn new(out: &'a mut Vec<Piece>, max_bytes: u64, max_pieces: usize) -> Self {
        let max_bytes = max_bytes.max(1);
        Self { first: out.len(), out, max_bytes, bytes_left: max_bytes, pieces_left: max_pieces.max(1) }
    }

    /// Takes a run but for the `given` bytes that went before. False if some of it is left; then `given` says how
    /// much is not.
    #[inline]
    fn run(&mut self, run: Piece, given: &mut u64) -> bool {
        let rest = Piece {
            src_off: run.src_off + *given,
            dst_off: run.dst_off + *given,
            len: run.len - *given,
            ..run
        };
        if rest.len <= self.bytes_left {
            let taken = self.put(rest);
            if taken {
                self.bytes_left -= rest.len;
                *given = 0;
            }
            return taken;
        }
        // A run that no call can take whole is cut, but only at the start of a call: then the parts are of full size.
        if self.bytes_left == self.max_bytes {
            let len = if self.max_bytes >= 64 { self.max_bytes & !63 } else { self.max_bytes };
            if self.put(Piece { len, ..rest }) {
                self.bytes_left = 0;
                *given += len;
            }
        }
        false
    }

    #[inline]
    fn put(&mut self, piece: Piece) -> bool {
        if self.out.len() > self.first
            && let Some(last) = self.out.last_mut()
            && last.src_off + last.len == piece.src_off
            && last.dst_off + last.len == piece.dst_off
            && last.src_region == piece.src_region
            && last.dst_region == piece.dst_region
        {
            last.len += piece.len;
            return true;
        }
        if self.pieces_left == 0 {
            return false;
        }
        self.pieces_left -= 1;
        self.out.push(piece);
        true
    }
}

/// All pieces from `src` to `dst` at once.
///
/// # Errors
/// As [`Template::new`] and [`Cursor::new`].
pub fn plan_all(
    src: &Side,
    dst: &Side,
    request: Request,
    src_page_count: &[u32],
    dst_page_count: &[u32],
) -> Result<Vec<Piece>, LayoutError> {
    let mut cursor =
        Cursor::new(Arc::new(Template::new(src, dst)?), request, src_page_count, dst_page_count)?;
    let mut out = Vec::new();
    while cursor.fill(&mut out, u64::MAX, usize::MAX) {}
    Ok(out)
}
