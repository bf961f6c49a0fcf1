//! What a pair of shards needs once.

use super::pair::{compatible, intersect, writes};
use crate::layout::{Kind, LayoutError, Order, Side, page_bytes};
use std::ops::Range;

/// How one side's bytes of one group lie.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Geometry {
    /// Number of the group's first region.
    first_region: u32,
    /// The first layer that this side holds.
    first_layer: u32,
    /// Regions a layer.
    parts: u32,
    /// From one page to the next.
    pub(super) page: u64,
    /// From K to V within a page; zero unless fused.
    pub(super) half: u64,
    /// From one head to the next.
    pub(super) head: u64,
    /// From one token of a page to the next.
    pub(super) token: u64,
    /// From the page's start to the first head that moves.
    pub(super) first: u64,
    /// Tokens a page.
    pub(super) page_tokens: u64,
}

impl Geometry {
    fn new(side: &Side, g: usize, heads: &Range<u32>) -> Result<Option<Self>, LayoutError> {
        let Some(layout) = side.groups.get(g) else { return Ok(None) };
        let held = side.shard.heads(layout)?;
        let (row, tokens, count) = (layout.row_bytes(), u64::from(layout.page_tokens), held.len() as u64);
        let (head, token) = match layout.order {
            Order::Hnd => (tokens * row, row),
            Order::Nhd => (row, count * row),
        };
        let page = page_bytes(layout, &side.shard)?;
        Ok(Some(Self {
            first_region: side.regions_before(g),
            first_layer: side.shard.layers(layout).start,
            parts: layout.parts(),
            page,
            half: if layout.kind == Kind::Fused { page / 2 } else { 0 },
            head,
            token,
            first: u64::from(heads.start.saturating_sub(held.start)) * head,
            page_tokens: tokens,
        }))
    }

    /// Region and offset within the page of K (0) or V (1) of a layer.
    pub(super) const fn tensor(&self, layer: u32, tensor: u32) -> (u32, u64) {
        let region = self.first_region + (layer - self.first_layer) * self.parts;
        if self.parts > 1 { (region + tensor, 0) } else { (region, tensor as u64 * self.half) }
    }
}

/// What moves of one group.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct GroupTemplate {
    /// Layers that both sides hold.
    pub(super) layers: Range<u32>,
    /// Heads that move, and the first of them in the model's numbering.
    pub(super) heads: u64,
    pub(super) first_head: u32,
    /// Bytes of one token of one head.
    pub(super) row: u64,
    /// Tensors a layer that move apart: K and V, or one where both sides are fused (or latent).
    pub(super) lanes: u32,
    /// Tensors within a lane.
    pub(super) halves: u64,
    pub(super) src: Geometry,
    pub(super) dst: Geometry,
}

impl GroupTemplate {
    /// Tensors a layer, wherever they lie: K and V, or the latent.
    pub(super) const fn tensors(&self) -> u32 {
        if self.halves > 1 { 2 } else { self.lanes }
    }
}

/// What goes from one source shard to one destination shard, before any page is known.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Template {
    /// One a group; `None` where the source owes nothing of the group.
    pub(super) groups: Vec<Option<GroupTemplate>>,
}

impl Template {
    /// The template for this pair; empty if `src` owes `dst` nothing (another replica writes, or they share no
    /// head or layer).
    ///
    /// # Errors
    /// When a side is invalid or the two do not fit.
    pub fn new(src: &Side, dst: &Side) -> Result<Self, LayoutError> {
        compatible(src, dst).map_err(|m| LayoutError(m.text))?;
        let mut groups = Vec::with_capacity(src.groups.len());
        for (g, (a, b)) in src.groups.iter().zip(&dst.groups).enumerate() {
            let layers = intersect(&src.shard.layers(a), &dst.shard.layers(b));
            let heads = intersect(&src.shard.heads(a)?, &dst.shard.heads(b)?);
            if layers.is_empty() || heads.is_empty() || !writes(a, &src.shard, &dst.shard) {
                groups.push(None);
                continue;
            }
            let (Some(from), Some(to)) = (Geometry::new(src, g, &heads)?, Geometry::new(dst, g, &heads)?)
            else {
                return Err(LayoutError(format!("group {g} is missing on one side")));
            };
            let together = a.kind == Kind::Fused && b.kind == Kind::Fused;
            groups.push(Some(GroupTemplate {
                layers,
                heads: heads.len() as u64,
                first_head: heads.start,
                row: a.row_bytes(),
                lanes: if together { 1 } else { a.kind.tensors() },
                halves: if together { 2 } else { 1 },
                src: from,
                dst: to,
            }));
        }
        Ok(Self { groups })
    }

    /// Whether the source owes the destination nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.groups.iter().all(Option::is_none)
    }

    /// The layers that the source owes: the hull over the groups, as [`super::sources`] gives it.
    #[must_use]
    pub fn layers(&self) -> Option<Range<u32>> {
        let ranges = self.groups.iter().flatten().map(|g| g.layers.clone());
        ranges.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
    }
}
