//! How a page lies in a region, and which heads and layers a rank holds.
//!
//! Layers are numbered from 0 in each group, over all pipeline ranks. All sizes are capped by
//! [`PageLayout::validate`], [`Shard::validate`] and [`Side::validate`], so that a region of `u32::MAX` pages is
//! smaller than 2^63 bytes and no offset of a validated layout can overflow.

mod dtype;
mod extra;
mod place;

pub use dtype::DType;
pub use extra::{CrossLayer, Factors, LayerSplit, MAX_BLOCKS, MAX_SPLIT, Scales, State, StateBlock};
pub(crate) use place::{Lay, Strand};

use crate::msg::{MemKind, RegionShape};
use std::ops::Range;
use thiserror::Error;

/// Most groups of a side.
pub const MAX_GROUPS: usize = 64;
/// Most layers of a group.
pub const MAX_LAYERS: u32 = 4096;
/// Most ranks (tensor-parallel times pipeline-parallel) of an engine.
pub const MAX_RANKS: u32 = 65_536;
/// Most bytes of one page of one region, before it is split over ranks.
pub const MAX_PAGE_BYTES: u64 = 1 << 31;

/// Order of a page's axes, outermost first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Order {
    /// token, head, dim.
    Nhd,
    /// head, token, dim.
    Hnd,
}

/// What a region holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Kind {
    /// K and V in regions of their own (parts 0 and 1).
    Kv,
    /// One region; a page holds K's half page, then V's.
    Fused,
    /// One latent vector a token (MLA), replicated over tensor-parallel ranks.
    Latent,
    /// One region; K and V lie side by side for each token of each head.
    Packed,
    /// State of a fixed size, one page a room ([`PageLayout::state`]).
    State,
}

impl Kind {
    /// The name in the public API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Fused => "fused",
            Self::Latent => "latent",
            Self::Packed => "packed",
            Self::State => "state",
        }
    }

    /// How many tensors a layer has, wherever they lie: K and V, or the latent; none are told apart of a state.
    #[must_use]
    pub const fn tensors(self) -> u32 {
        match self {
            Self::Kv | Self::Fused | Self::Packed => 2,
            Self::Latent | Self::State => 1,
        }
    }

    /// How many of them a region's page holds.
    pub(crate) const fn halves(self) -> u32 {
        match self {
            Self::Fused | Self::Packed => 2,
            Self::Kv | Self::Latent | Self::State => 1,
        }
    }
}

/// Layout of one group's pages. `kv_heads` and `layers` count the whole model's, not a rank's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageLayout {
    /// Layers of the group, over all pipeline ranks.
    pub layers: u32,
    /// KV heads, over all tensor-parallel ranks. A latent layout has one, whatever stands here.
    pub kv_heads: u32,
    /// Elements a head (or a latent vector).
    pub head_dim: u32,
    /// Tokens a page.
    pub page_tokens: u32,
    /// Element type.
    pub dtype: DType,
    /// Axis order.
    pub order: Order,
    /// K/V apart, fused, packed, latent or a state.
    pub kind: Kind,
    /// Bytes from one page to the next in each region (scales have their own); `None`: pages follow each other
    /// without a gap.
    pub page_stride: Option<u64>,
    /// All of the rank's layers in one page, and so in one region.
    pub cross: Option<CrossLayer>,
    /// Only so many of the last tokens are held, as by sliding-window attention.
    pub window: Option<u64>,
    /// Layers of each pipeline rank, where they are not split as evenly as possible.
    pub split: Option<LayerSplit>,
    /// Scales in regions of their own.
    pub scales: Option<Scales>,
    /// Factors of whole tensors.
    pub factors: Option<Factors>,
    /// The blocks of a [`Kind::State`].
    pub state: Option<State>,
}

impl PageLayout {
    /// One layer, head, element and token, and nothing out of the ordinary: the base of `PageLayout { .., ..PageLayout::PLAIN }`.
    pub const PLAIN: Self = Self {
        layers: 1,
        kv_heads: 1,
        head_dim: 1,
        page_tokens: 1,
        dtype: DType::Uint8,
        order: Order::Nhd,
        kind: Kind::Kv,
        page_stride: None,
        cross: None,
        window: None,
        split: None,
        scales: None,
        factors: None,
        state: None,
    };

    /// Checks that no size is zero or past its cap.
    ///
    /// # Errors
    /// Names the size and its limit.
    pub fn validate(&self) -> Result<(), LayoutError> {
        for (name, n) in [
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("page_tokens", self.page_tokens),
        ] {
            if n == 0 {
                return Err(LayoutError(format!("{name} is 0; it must be at least 1")));
            }
        }
        if self.layers > MAX_LAYERS {
            let n = self.layers;
            return Err(LayoutError(format!("layers is {n}; at most {MAX_LAYERS} fit in a group")));
        }
        for (name, dim, dtype) in [("head_dim", self.head_dim, self.dtype)]
            .into_iter()
            .chain(self.scales.map(|s| ("scale_dim", s.dim, s.dtype)))
        {
            if dim == 0 || !dim.is_multiple_of(dtype.packed()) {
                return Err(LayoutError(format!(
                    "{name} is {dim} {}; it must be a multiple of {}, and not 0",
                    dtype.name(),
                    dtype.packed()
                )));
            }
        }
        for row in
            [Some(self.row_bytes()), self.scales.map(|s| s.dtype.bytes_of(s.dim))].into_iter().flatten()
        {
            let bytes = row
                .checked_mul(u64::from(self.page_tokens))
                .and_then(|b| b.checked_mul(u64::from(self.heads())))
                .and_then(|b| b.checked_mul(self.kind.halves().into()));
            if bytes.is_none_or(|b| b > MAX_PAGE_BYTES) {
                return Err(LayoutError(format!(
                    "a page of {} tokens x {} heads x {row} bytes ({}) is larger than {MAX_PAGE_BYTES} bytes",
                    self.page_tokens,
                    self.heads(),
                    self.kind.name(),
                )));
            }
        }
        self.validate_rest()
    }

    /// What is not of the plain form.
    fn validate_rest(&self) -> Result<(), LayoutError> {
        if (self.kind == Kind::State) != self.state.is_some() {
            return Err(LayoutError(format!(
                "kind is {:?}, and state {}: blocks are given for kind \"state\", and only for it",
                self.kind.name(),
                if self.state.is_some() { "is given" } else { "is not" }
            )));
        }
        if let Some(state) = &self.state {
            state.validate()?;
            if self.page_tokens != 1
                || self.window.is_some()
                || self.scales.is_some()
                || self.factors.is_some()
            {
                return Err(LayoutError(
                    "a state has one page a room: page_tokens is 1, and it has neither window nor scales"
                        .to_owned(),
                ));
            }
        }
        if self.window == Some(0) {
            return Err(LayoutError("window is 0 tokens; it must be at least 1, or left out".to_owned()));
        }
        if let Some(factors) = self.factors.filter(|f| !f.valid()) {
            let (k, v) = (factors.k(), factors.v());
            return Err(LayoutError(format!("k_scale is {k} and v_scale {v}; both are finite and above 0")));
        }
        if let Some(split) = self.split.filter(|s| s.total() != self.layers) {
            return Err(LayoutError(format!(
                "pp_layers add up to {}, but the group has {} layers",
                split.total(),
                self.layers
            )));
        }
        let strides = [
            ("page_stride_bytes", self.page_stride),
            ("scale_stride_bytes", self.scales.and_then(|s| s.page_stride)),
            ("layer_stride_bytes", self.cross.and_then(|c| c.layer_stride)),
        ];
        if let Some((name, stride)) = strides.into_iter().find_map(|(n, s)| Some((n, s?)))
            && !(1..=MAX_PAGE_BYTES).contains(&stride)
        {
            return Err(LayoutError(format!("{name} is {stride}; it is 1 to {MAX_PAGE_BYTES}")));
        }
        Ok(())
    }

    /// The tokens of `tokens` that the group holds: all, the last ones of a window, or the last one, which stands for a
    /// state.
    #[must_use]
    pub fn held(&self, tokens: Range<u64>) -> Range<u64> {
        match self.last_tokens() {
            Some(n) => tokens.start.max(tokens.end.saturating_sub(n))..tokens.end,
            None => tokens,
        }
    }

    /// Of how many of the last tokens it holds something, if not of all.
    #[must_use]
    pub const fn last_tokens(&self) -> Option<u64> {
        if self.state.is_some() { Some(1) } else { self.window }
    }

    /// Regions a layer, or of all the rank's layers if they share pages: 2 if K and V lie apart, else 1; as many again for
    /// scales; a state's own.
    #[must_use]
    pub fn parts(&self) -> u32 {
        let data = self.data_parts();
        if self.scales.is_some() { data.saturating_mul(2) } else { data }
    }

    /// Regions without those of scales.
    pub(crate) fn data_parts(&self) -> u32 {
        match (self.kind, &self.state) {
            (_, Some(state)) => state.parts(),
            (Kind::Kv, _) => 2,
            (Kind::Fused | Kind::Latent | Kind::Packed | Kind::State, _) => 1,
        }
    }

    /// What part `part` holds, for people: `k`, `v`, `kv` or `latent`, and `k_scale` and so on; `state`, `state1`...
    #[must_use]
    pub fn parts_label(&self, part: u32) -> &'static str {
        let data = self.data_parts();
        match (self.kind, part) {
            (Kind::Kv, 0) => "k",
            (Kind::Kv, 1) => "v",
            (Kind::Kv, 2) => "k_scale",
            (Kind::Kv, _) => "v_scale",
            (Kind::Fused | Kind::Packed, n) if n < data => "kv",
            (Kind::Fused | Kind::Packed, _) => "kv_scale",
            (Kind::Latent, n) if n < data => "latent",
            (Kind::Latent, _) => "latent_scale",
            (Kind::State, n) => {
                let names = ["state", "state1", "state2", "state3", "state4", "state5", "state6", "state7"];
                usize::try_from(n).ok().and_then(|n| names.get(n)).copied().unwrap_or("state")
            }
        }
    }

    /// Bytes of one token of one head.
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        self.dtype.bytes_of(self.head_dim)
    }

    /// Heads of the whole model, one for a latent layout.
    #[must_use]
    pub const fn heads(&self) -> u32 {
        match self.kind {
            Kind::Latent | Kind::State => 1,
            Kind::Kv | Kind::Fused | Kind::Packed => self.kv_heads,
        }
    }
}

/// Which part of the model a rank holds.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Shard {
    /// Tensor-parallel rank.
    pub tp_rank: u32,
    /// Tensor-parallel size.
    pub tp_size: u32,
    /// Pipeline-parallel rank.
    pub pp_rank: u32,
    /// Pipeline-parallel size.
    pub pp_size: u32,
}

impl Shard {
    /// Checks ranks against sizes.
    ///
    /// # Errors
    /// Names the rank and the size that clash.
    pub fn validate(&self) -> Result<(), LayoutError> {
        for (name, rank, size) in [("tp", self.tp_rank, self.tp_size), ("pp", self.pp_rank, self.pp_size)] {
            if size == 0 || rank >= size {
                return Err(LayoutError(format!(
                    "{name}_rank is {rank} and {name}_size {size}; ranks go from 0 to size - 1"
                )));
            }
        }
        if self.tp_size.checked_mul(self.pp_size).is_none_or(|n| n > MAX_RANKS) {
            let (tp, pp) = (self.tp_size, self.pp_size);
            return Err(LayoutError(format!("tp_size {tp} x pp_size {pp} is more than {MAX_RANKS} ranks")));
        }
        Ok(())
    }

    /// The rank's place among its engine's: `pp_rank * tp_size + tp_rank`.
    #[must_use]
    pub const fn index(&self) -> u32 {
        self.pp_rank.saturating_mul(self.tp_size).saturating_add(self.tp_rank)
    }

    /// The group's layers that this rank holds. Pipeline ranks hold blocks of consecutive layers, as many as the layout's
    /// split says; without one, where `layers` is no multiple of `pp_size`, the first `layers % pp_size` ranks hold one more
    /// than the others.
    #[must_use]
    pub fn layers(&self, layout: &PageLayout) -> Range<u32> {
        if let Some(split) = &layout.split {
            return split.range(self.pp_rank);
        }
        let Some(each) = layout.layers.checked_div(self.pp_size) else { return 0..0 };
        let more = layout.layers % self.pp_size;
        let first = |rank: u32| rank.saturating_mul(each).saturating_add(rank.min(more)).min(layout.layers);
        first(self.pp_rank)..first(self.pp_rank.saturating_add(1))
    }

    /// The group's heads that this rank holds: a block of consecutive heads where `tp_size` divides them, one
    /// head (held by `tp_size / kv_heads` neighbouring ranks) where they divide `tp_size`, and head 0 of a latent layout.
    ///
    /// # Errors
    /// When neither number divides the other.
    pub fn heads(&self, layout: &PageLayout) -> Result<Range<u32>, LayoutError> {
        if matches!(layout.kind, Kind::Latent | Kind::State) {
            return Ok(0..1);
        }
        self.units(layout.kv_heads, "KV heads")
    }

    /// Its share of `heads` units that are split as KV heads are.
    pub(crate) fn units(&self, heads: u32, name: &str) -> Result<Range<u32>, LayoutError> {
        let tp = self.tp_size;
        if self.tp_rank < tp && heads > 0 {
            if heads.is_multiple_of(tp) {
                let each = heads / tp;
                let first = self.tp_rank * each;
                return Ok(first..first + each);
            }
            if tp.is_multiple_of(heads) {
                let head = self.tp_rank / (tp / heads);
                return Ok(head..head + 1);
            }
        }
        Err(LayoutError(format!(
            "{heads} {name} cannot be split over {tp} tensor-parallel ranks (rank {}); one number must divide the other",
            self.tp_rank
        )))
    }
}

/// Bytes of one page of one region on this rank: of all layers that it holds, and of K and V where they share it. Scales
/// are not counted, nor what lies between pages.
///
/// # Errors
/// When the layout or the shard is invalid, or the heads cannot be split.
pub fn page_bytes(layout: &PageLayout, shard: &Shard) -> Result<u64, LayoutError> {
    Ok(part_page(layout, shard, 0)?.bytes)
}

/// One page of one region.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct PartPage {
    /// Bytes from the page's first to its last that belong to a layer.
    pub bytes: u64,
    /// Bytes from one page to the next.
    pub stride: u64,
}

impl PartPage {
    /// Bytes of so many pages: the last one needs no gap after it.
    #[must_use]
    pub const fn region_bytes(&self, pages: u32) -> u64 {
        // Both are capped at 2^31.
        match pages.checked_sub(1) {
            Some(others) => others as u64 * self.stride + self.bytes,
            None => 0,
        }
    }
}

/// A page of part `part` on this rank.
///
/// # Errors
/// When the layout or the shard is invalid, the heads or a state's units cannot be split, or a stride is too small for what
/// the rank holds.
pub fn part_page(layout: &PageLayout, shard: &Shard, part: u32) -> Result<PartPage, LayoutError> {
    layout.validate()?;
    shard.validate()?;
    place::page(layout, shard, part)
}

/// One agent's geometry: the layout of each group, and its shard.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Side {
    /// Layout of each group.
    pub groups: Vec<PageLayout>,
    /// Its shard.
    pub shard: Shard,
}

impl Side {
    /// Checks every group and the shard, and that the heads of every group can be split.
    ///
    /// # Errors
    /// Names the group and the numbers.
    pub fn validate(&self) -> Result<(), LayoutError> {
        if self.groups.is_empty() || self.groups.len() > MAX_GROUPS {
            let n = self.groups.len();
            return Err(LayoutError(format!("{n} groups; there must be 1 to {MAX_GROUPS}")));
        }
        self.shard.validate()?;
        for (g, layout) in self.groups.iter().enumerate() {
            layout
                .validate()
                .and_then(|()| {
                    (0..layout.parts())
                        .try_for_each(|part| place::page(layout, &self.shard, part).map(|_| ()))
                })
                .and_then(|()| match layout.split.filter(|s| s.ranks() != self.shard.pp_size) {
                    Some(split) => Err(LayoutError(format!(
                        "pp_layers names {} pipeline ranks, but pp_size is {}",
                        split.ranks(),
                        self.shard.pp_size
                    ))),
                    None => Ok(()),
                })
                .map_err(|e| LayoutError(format!("group {g}: {e}")))?;
        }
        Ok(())
    }

    /// The layers of a group that have regions of their own: all that are here, or the first where they share one.
    fn region_layers(&self, layout: &PageLayout) -> Range<u32> {
        let layers = self.shard.layers(layout);
        if layout.cross.is_some() && !layers.is_empty() { layers.start..layers.start + 1 } else { layers }
    }

    /// Every region of this rank, all as host memory: for each group, each of its layers here (the first, where they share
    /// pages), each part. `pages` has the pages of each group.
    ///
    /// # Errors
    /// When the side is invalid or `pages` has another number of groups.
    pub fn regions(&self, pages: &[u32]) -> Result<Vec<RegionShape>, LayoutError> {
        self.validate()?;
        if pages.len() != self.groups.len() {
            let (n, groups) = (pages.len(), self.groups.len());
            return Err(LayoutError(format!("{n} page counts for {groups} groups; give one a group")));
        }
        let mut out = Vec::new();
        for ((group, layout), &count) in (0..).zip(&self.groups).zip(pages) {
            for layer in self.region_layers(layout) {
                for part in 0..layout.parts() {
                    let len = place::page(layout, &self.shard, part)?.region_bytes(count);
                    out.push(RegionShape { group, layer, part, len, kind: MemKind::Host });
                }
            }
        }
        Ok(out)
    }

    /// Number of regions of this rank.
    #[must_use]
    pub fn region_count(&self) -> u32 {
        self.regions_before(self.groups.len())
    }

    /// The place in [`Side::regions`] of this part of this layer (model numbering), if this rank holds it.
    #[must_use]
    pub fn region_index(&self, group: u32, layer: u32, part: u32) -> Option<u32> {
        let g = usize::try_from(group).ok()?;
        let layout = self.groups.get(g)?;
        let layers = self.shard.layers(layout);
        if !layers.contains(&layer) || part >= layout.parts() {
            return None;
        }
        let before = if layout.cross.is_some() { 0 } else { layer - layers.start };
        self.regions_before(g).checked_add(before.checked_mul(layout.parts())?)?.checked_add(part)
    }

    /// Regions of the groups before group `g`.
    pub(crate) fn regions_before(&self, g: usize) -> u32 {
        let count = |l: &PageLayout| {
            let layers = self.region_layers(l);
            (layers.end - layers.start).saturating_mul(l.parts())
        };
        self.groups.iter().take(g).fold(0, |n, l| n.saturating_add(count(l)))
    }
}

/// A layout or a pair of layouts that cannot work; the text names the numbers that clash.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0}")]
pub struct LayoutError(pub String);

#[cfg(test)]
mod tests;
