//! The pieces of one push.

use super::segment::{PageList, SINGLE, Segment, Segments, Shape, segments};
use super::{Piece, Template};
use crate::layout::{LayoutError, Side};
use std::ops::Range;
use std::sync::Arc;

/// What to move: tokens and layers, and the page lists of both sides.
///
/// `start` need not be a multiple of the page size: then the first page holds `start` at its slot
/// `start % page_tokens`, and the tokens before it are not touched.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Request {
    /// Source page list of each group; `src_pages[g][0]` holds token `src_start`.
    pub src_pages: Vec<Arc<[u32]>>,
    /// First token of the source page lists.
    pub src_start: u64,
    /// Destination page list of each group; `dst_pages[g][0]` holds token `dst_start`.
    pub dst_pages: Vec<Arc<[u32]>>,
    /// First token of the destination page lists.
    pub dst_start: u64,
    /// Tokens to move.
    pub tokens: Range<u64>,
    /// Layers to move, at most; what the template does not hold is left out.
    pub layers: Range<u32>,
}

/// One group's share of a push.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct Work {
    /// Index of the group in the template.
    group: usize,
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
    turns: [u64; 3],
    given: u64,
}

/// Gives a push's pieces, a slice at a time. Clones share everything but their place.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Cursor {
    template: Arc<Template>,
    works: Arc<[Work]>,
    total: u64,
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
        let Request { src_pages, src_start, dst_pages, dst_start, tokens, layers } = request;
        let groups = template.groups.len();
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
        let mut total = Some(0_u64);
        let lists = src_pages.iter().zip(&dst_pages).zip(src_page_count.iter().zip(dst_page_count));
        for (g, (group, ((from, to), (&src_count, &dst_count)))) in
            template.groups.iter().zip(lists).enumerate()
        {
            let Some(group) = group else { continue };
            let layers = super::pair::intersect(&group.layers, &layers);
            if layers.is_empty() || tokens.is_empty() {
                continue;
            }
            let src = PageList { side: "source", group: g, pages: from, start: src_start, count: src_count };
            let dst =
                PageList { side: "destination", group: g, pages: to, start: dst_start, count: dst_count };
            let segments = segments(group, &src, &dst, &tokens)?;
            // At most 4096 layers, 2 tensors and 2^31 bytes a token: only the tokens can make it too much.
            let token_bytes =
                layers.len() as u64 * u64::from(group.lanes) * group.halves * group.heads * group.row;
            let bytes = token_bytes.checked_mul(tokens.end - tokens.start);
            total = total.zip(bytes).and_then(|(a, b)| a.checked_add(b));
            works.push(Work { group: g, layers, segments });
        }
        let total = total
            .ok_or_else(|| LayoutError(format!("tokens {tokens:?} are more than 2^64 bytes; split them")))?;
        let at = Place { layer: works.first().map_or(0, |w| w.layers.start), ..Place::default() };
        Ok(Self { template, works: works.into(), total, at })
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
            if let Some(Some(group)) = template.groups.get(work.group) {
                while at.layer < work.layers.end {
                    while at.lane < group.lanes {
                        let (src, dst) =
                            (group.src.tensor(at.layer, at.lane), group.dst.tensor(at.layer, at.lane));
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
    let [inner, middle, outer] = shape;
    let Place { turns: [x, y, z], given, .. } = at;
    while *z < outer.count {
        while *y < middle.count {
            let src_off = base.src_off + *y * middle.src + *z * outer.src;
            let dst_off = base.dst_off + *y * middle.dst + *z * outer.dst;
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
