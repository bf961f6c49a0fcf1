//! What a pair of shards needs once.

use super::pair::{Share, compatible, intersect};
use crate::layout::{Lay, LayoutError, PageLayout, Side, Strand as Which};
use std::ops::Range;

/// How one side's bytes of one strand lie.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Geometry {
    /// Number of the group's first region.
    first_region: u32,
    /// The first layer that this side holds.
    first_layer: u32,
    /// Regions a layer; none more than the first layer's where layers share pages.
    parts: u32,
    /// Whether the strand's tensors lie in parts of their own.
    apart: bool,
    /// From one layer of a page to the next; zero where each has its own region.
    pub(super) layer: u64,
    /// From one page to the next.
    pub(super) page: u64,
    /// From one tensor to the next within a page.
    pub(super) tensor: u64,
    /// From one head to the next.
    pub(super) head: u64,
    /// From one token of a page to the next.
    pub(super) token: u64,
    /// From the layer's start in the page to the first head that moves.
    pub(super) first: u64,
    /// Tokens a page.
    pub(super) page_tokens: u64,
}

impl Geometry {
    fn new(side: &Side, g: usize, layout: &PageLayout, lay: &Lay, heads: &Range<u32>) -> Self {
        Self {
            first_region: side.regions_before(g) + lay.part,
            first_layer: side.shard.layers(layout).start,
            parts: if layout.cross.is_some() { 0 } else { layout.parts() },
            apart: lay.apart,
            layer: lay.layer,
            page: lay.page,
            tensor: lay.tensor,
            head: lay.head,
            token: lay.token,
            first: lay.first + u64::from(heads.start.saturating_sub(lay.held.start)) * lay.head,
            page_tokens: layout.page_tokens.into(),
        }
    }

    /// Region and offset within the page of a tensor of a layer.
    pub(super) const fn tensor(&self, layer: u32, tensor: u32) -> (u32, u64) {
        let layer = layer - self.first_layer;
        let (region, off) = (self.first_region + layer * self.parts, layer as u64 * self.layer);
        if self.apart { (region + tensor, off) } else { (region, off + tensor as u64 * self.tensor) }
    }
}

/// What moves in one way: a group's data, its scales, or a block of its state.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Strand {
    /// The group, whose pages it lies in.
    pub(super) group: usize,
    /// Layers that both sides hold, and this source writes.
    pub(super) layers: Range<u32>,
    /// Heads (or units) that move, and the first of them in the model's numbering.
    pub(super) heads: u64,
    pub(super) first_head: u32,
    /// Bytes that are one piece in every layout.
    pub(super) row: u64,
    /// The number of its first tensor among all of the layer's, for checksums.
    pub(super) first_tensor: u32,
    /// Tensors a layer that move apart: K and V, or one where both sides have them in one region.
    pub(super) lanes: u32,
    /// Tensors within a lane.
    pub(super) halves: u64,
    /// Which of the tokens this source writes.
    pub(super) share: Share,
    /// The layers of a page move together, because both sides have them in one.
    pub(super) fold: bool,
    /// Only so many of the last tokens are held, or all.
    pub(super) last_tokens: Option<u64>,
    pub(super) src: Geometry,
    pub(super) dst: Geometry,
}

impl Strand {
    /// Tensors a layer, wherever they lie.
    pub(super) fn tensors(&self) -> u32 {
        // At most 65,535 rows.
        self.lanes * u32::try_from(self.halves).unwrap_or(u32::MAX)
    }

    /// The first token that a list holds which was made for `tokens`.
    pub(super) fn list_start(&self, tokens: &Range<u64>) -> u64 {
        self.last_tokens.map_or(tokens.start, |n| tokens.start.max(tokens.end.saturating_sub(n)))
    }

    /// The tokens of `asked` that are held at the end of a room of `room`, without a look at who writes them.
    pub(super) fn held(&self, asked: &Range<u64>, room: &Range<u64>) -> Range<u64> {
        let start = self.last_tokens.map_or(asked.start, |n| asked.start.max(room.end.saturating_sub(n)));
        start.min(asked.end)..asked.end
    }
}

/// What goes from one source shard to one destination shard, before any page is known.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Template {
    /// Groups of each side.
    pub(super) groups: usize,
    /// In the order of groups. Nothing of what the source does not owe.
    pub(super) strands: Vec<Strand>,
}

/// Numbers of tensors, for checksums: on the wire, in a way.
const SCALES: u32 = 16;
const BLOCK: u32 = 1 << 16;

impl Template {
    /// The template for this pair; empty if `src` owes `dst` nothing (another replica writes, or they share no
    /// head or layer).
    ///
    /// # Errors
    /// When a side is invalid or the two do not fit.
    pub fn new(src: &Side, dst: &Side) -> Result<Self, LayoutError> {
        compatible(src, dst).map_err(|m| LayoutError(m.text))?;
        let mut strands = Vec::new();
        for (g, (a, b)) in src.groups.iter().zip(&dst.groups).enumerate() {
            let layers = intersect(&src.shard.layers(a), &dst.shard.layers(b));
            if layers.is_empty() {
                continue;
            }
            let Some(state) = &a.state else {
                for which in [Some(Which::Data), a.scales.map(|_| Which::Scales)].into_iter().flatten() {
                    strands.extend(strand(g, which, (src, a), (dst, b), layers.clone())?);
                }
                continue;
            };
            for part in 0..state.parts() {
                strands.extend(state_part(g, part, (src, a), (dst, b), &layers)?);
            }
        }
        Ok(Self { groups: src.groups.len(), strands })
    }

    /// Whether the source owes the destination nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.strands.is_empty()
    }

    /// The layers that the source owes: the hull over the groups, as [`super::sources`] gives it.
    #[must_use]
    pub fn layers(&self) -> Option<Range<u32>> {
        let ranges = self.strands.iter().map(|s| s.layers.clone());
        ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
    }
}

/// The strands of one of the source's parts of a state: its blocks, or all of it where both sides hold the same of every
/// one, in the same order, and this source writes all of that.
fn state_part(
    g: usize,
    part: u32,
    (src, a): (&Side, &PageLayout),
    (dst, b): (&Side, &PageLayout),
    layers: &Range<u32>,
) -> Result<Vec<Strand>, LayoutError> {
    let of = |l: &PageLayout| -> Vec<usize> {
        let blocks = l.state.iter().flat_map(|s| s.blocks()).enumerate();
        blocks.filter(|(_, b)| b.part == part).map(|(i, _)| i).collect()
    };
    let mut same = of(a) == of(b);
    let mut out = Vec::new();
    for index in of(a) {
        let which = Which::Block(index);
        let found = strand(g, which, (src, a), (dst, b), layers.clone())?;
        same &= found.as_ref().is_some_and(|s| s.layers == *layers);
        same &= a.lay(&src.shard, which)?.held == b.lay(&dst.shard, which)?.held;
        out.extend(found);
    }
    if same && let Some(first) = out.first() {
        let (from, to) = (a.lay(&src.shard, Which::Part(part))?, b.lay(&dst.shard, Which::Part(part))?);
        let whole = Strand {
            heads: 1,
            first_head: 0,
            row: from.row,
            first_tensor: part,
            halves: 1,
            src: Geometry::new(src, g, a, &from, &(0..1)),
            dst: Geometry::new(dst, g, b, &to, &(0..1)),
            ..first.clone()
        };
        return Ok(vec![whole]);
    }
    Ok(out)
}

/// One strand of group `g`, unless the source owes nothing of it.
fn strand(
    g: usize,
    which: Which,
    (src, a): (&Side, &PageLayout),
    (dst, b): (&Side, &PageLayout),
    layers: Range<u32>,
) -> Result<Option<Strand>, LayoutError> {
    let (from, to) = (a.lay(&src.shard, which)?, b.lay(&dst.shard, which)?);
    let heads = intersect(&from.held, &to.held);
    let share = Share::new(from.units, &src.shard, &dst.shard, (a.page_tokens, b.page_tokens));
    let Some(share) = share.filter(|_| !heads.is_empty()) else { return Ok(None) };
    // A state is one piece: its layers are shared out, not its tokens.
    let (layers, share) = match a.state {
        Some(_) => (share.layers(&layers), share.whole()),
        None => (layers, share),
    };
    if layers.is_empty() {
        return Ok(None);
    }
    let together = !from.apart && !to.apart;
    Ok(Some(Strand {
        group: g,
        layers,
        heads: heads.len() as u64,
        first_head: heads.start,
        row: from.row,
        first_tensor: match which {
            Which::Data => 0,
            Which::Scales => SCALES,
            Which::Block(n) => u32::try_from(n).unwrap_or(u32::MAX).saturating_add(1).saturating_mul(BLOCK),
            Which::Part(n) => n,
        },
        lanes: if together { 1 } else { from.tensors },
        halves: if together { from.tensors.into() } else { 1 },
        share,
        fold: a.cross.is_some() && b.cross.is_some(),
        last_tokens: a.last_tokens(),
        src: Geometry::new(src, g, a, &from, &heads),
        dst: Geometry::new(dst, g, b, &to, &heads),
    }))
}
