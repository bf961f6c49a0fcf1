//! How a page lies in a region, and which heads and layers a rank holds.
//!
//! Layers are numbered from 0 in each group, over all pipeline ranks. All sizes are capped by
//! [`PageLayout::validate`], [`Shard::validate`] and [`Side::validate`], so that a region of `u32::MAX` pages is
//! smaller than 2^63 bytes and no offset of a validated layout can overflow.

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

/// Element type. The numbers are on the wire.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum DType {
    /// 4-byte float.
    Float32 = 1,
    /// IEEE half.
    Float16 = 2,
    /// bfloat16.
    Bfloat16 = 3,
    /// fp8 e4m3.
    Float8E4m3 = 4,
    /// fp8 e5m2.
    Float8E5m2 = 5,
    /// 8-bit integer.
    Int8 = 6,
    /// Bytes.
    Uint8 = 7,
}

impl DType {
    /// Bytes of one element.
    #[must_use]
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Float32 => 4,
            Self::Float16 | Self::Bfloat16 => 2,
            Self::Float8E4m3 | Self::Float8E5m2 | Self::Int8 | Self::Uint8 => 1,
        }
    }

    /// The type with this name; takes numpy's and torch's names (with or without `torch.`) and the usual short ones.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("torch.").unwrap_or(name);
        Some(match name {
            "float32" | "float" | "fp32" | "f32" => Self::Float32,
            "float16" | "half" | "fp16" | "f16" => Self::Float16,
            "bfloat16" | "bf16" => Self::Bfloat16,
            "float8_e4m3" | "float8_e4m3fn" | "fp8_e4m3" | "fp8" => Self::Float8E4m3,
            "float8_e5m2" | "fp8_e5m2" => Self::Float8E5m2,
            "int8" | "i8" => Self::Int8,
            "uint8" | "u8" => Self::Uint8,
            _ => return None,
        })
    }

    /// The canonical name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Float32 => "float32",
            Self::Float16 => "float16",
            Self::Bfloat16 => "bfloat16",
            Self::Float8E4m3 => "float8_e4m3",
            Self::Float8E5m2 => "float8_e5m2",
            Self::Int8 => "int8",
            Self::Uint8 => "uint8",
        }
    }

    /// The type with this number on the wire.
    #[must_use]
    pub const fn from_wire(n: u8) -> Option<Self> {
        Some(match n {
            1 => Self::Float32,
            2 => Self::Float16,
            3 => Self::Bfloat16,
            4 => Self::Float8E4m3,
            5 => Self::Float8E5m2,
            6 => Self::Int8,
            7 => Self::Uint8,
            _ => return None,
        })
    }
}

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
}

impl Kind {
    /// The name in the public API.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kv => "kv",
            Self::Fused => "fused",
            Self::Latent => "latent",
        }
    }

    /// How many tensors a layer has, wherever they lie: K and V, or the latent.
    #[must_use]
    pub const fn tensors(self) -> u32 {
        match self {
            Self::Kv | Self::Fused => 2,
            Self::Latent => 1,
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
    /// K/V apart, fused or latent.
    pub kind: Kind,
}

impl PageLayout {
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
        let halves = if self.kind == Kind::Fused { 2 } else { 1 };
        let bytes = self
            .row_bytes()
            .checked_mul(u64::from(self.page_tokens))
            .and_then(|b| b.checked_mul(u64::from(self.heads())))
            .and_then(|b| b.checked_mul(halves));
        if bytes.is_none_or(|b| b > MAX_PAGE_BYTES) {
            return Err(LayoutError(format!(
                "a page of {} tokens x {} heads x {} {} ({}) is larger than {MAX_PAGE_BYTES} bytes",
                self.page_tokens,
                self.heads(),
                self.head_dim,
                self.dtype.name(),
                self.kind.name(),
            )));
        }
        Ok(())
    }

    /// Regions a layer: 2 if K and V lie apart, else 1.
    #[must_use]
    pub const fn parts(&self) -> u32 {
        match self.kind {
            Kind::Kv => 2,
            Kind::Fused | Kind::Latent => 1,
        }
    }

    /// What part `part` holds, for people: `k`, `v`, `kv` or `latent`.
    #[must_use]
    pub const fn parts_label(&self, part: u32) -> &'static str {
        match (self.kind, part) {
            (Kind::Kv, 0) => "k",
            (Kind::Kv, _) => "v",
            (Kind::Fused, _) => "kv",
            (Kind::Latent, _) => "latent",
        }
    }

    /// Bytes of one token of one head.
    #[must_use]
    pub const fn row_bytes(&self) -> u64 {
        self.head_dim as u64 * self.dtype.bytes()
    }

    /// Heads of the whole model, one for a latent layout.
    #[must_use]
    pub const fn heads(&self) -> u32 {
        match self.kind {
            Kind::Latent => 1,
            Kind::Kv | Kind::Fused => self.kv_heads,
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

    /// The group's layers that this rank holds. Pipeline ranks hold blocks of consecutive layers; where
    /// `layers` is no multiple of `pp_size`, the first `layers % pp_size` ranks hold one more than the others.
    #[must_use]
    pub fn layers(&self, layout: &PageLayout) -> Range<u32> {
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
        if layout.kind == Kind::Latent {
            return Ok(0..1);
        }
        let (heads, tp) = (layout.kv_heads, self.tp_size);
        if self.tp_rank < tp && heads > 0 {
            if heads % tp == 0 {
                let each = heads / tp;
                let first = self.tp_rank * each;
                return Ok(first..first + each);
            }
            if tp % heads == 0 {
                let head = self.tp_rank / (tp / heads);
                return Ok(head..head + 1);
            }
        }
        Err(LayoutError(format!(
            "{heads} KV heads cannot be split over {tp} tensor-parallel ranks (rank {}); one number must divide the other",
            self.tp_rank
        )))
    }
}

/// Bytes of one page of one region on this rank; a fused page counts both halves.
///
/// # Errors
/// When the layout or the shard is invalid, or the heads cannot be split.
pub fn page_bytes(layout: &PageLayout, shard: &Shard) -> Result<u64, LayoutError> {
    layout.validate()?;
    shard.validate()?;
    let heads = shard.heads(layout)?.len() as u64;
    let halves = if layout.kind == Kind::Fused { 2 } else { 1 };
    // A part of the page that `validate` has capped.
    Ok(layout.row_bytes() * u64::from(layout.page_tokens) * heads * halves)
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
                .and_then(|()| self.shard.heads(layout).map(|_| ()))
                .map_err(|e| LayoutError(format!("group {g}: {e}")))?;
        }
        Ok(())
    }

    /// Every region of this rank, all as host memory: for each group, each of its layers here, each part.
    /// `pages` has the pages of each group.
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
            let len = page_bytes(layout, &self.shard)? * u64::from(count);
            for layer in self.shard.layers(layout) {
                for part in 0..layout.parts() {
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
        self.regions_before(g)
            .checked_add((layer - layers.start).checked_mul(layout.parts())?)?
            .checked_add(part)
    }

    /// Regions of the groups before group `g`.
    pub(crate) fn regions_before(&self, g: usize) -> u32 {
        let count = |l: &PageLayout| {
            let layers = self.shard.layers(l);
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
mod tests {
    use super::*;

    fn layout(kind: Kind) -> PageLayout {
        PageLayout {
            layers: 10,
            kv_heads: 8,
            head_dim: 128,
            page_tokens: 16,
            dtype: DType::Bfloat16,
            order: Order::Hnd,
            kind,
        }
    }

    fn shard(tp_rank: u32, tp_size: u32, pp_rank: u32, pp_size: u32) -> Shard {
        Shard { tp_rank, tp_size, pp_rank, pp_size }
    }

    #[test]
    fn dtypes_go_by_name_and_number() {
        for n in 0..=255 {
            if let Some(t) = DType::from_wire(n) {
                assert_eq!(t as u8, n);
                assert_eq!(DType::from_name(t.name()), Some(t));
                assert_eq!(DType::from_name(&format!("torch.{}", t.name())), Some(t));
            }
        }
        assert_eq!((0..=255).filter_map(DType::from_wire).count(), 7);
        for (name, t) in [
            ("torch.bfloat16", DType::Bfloat16),
            ("bf16", DType::Bfloat16),
            ("fp16", DType::Float16),
            ("half", DType::Float16),
            ("torch.float8_e4m3fn", DType::Float8E4m3),
        ] {
            assert_eq!(DType::from_name(name), Some(t));
        }
        assert_eq!(DType::from_name("float64"), None);
        assert_eq!(DType::Float32.bytes() + DType::Float16.bytes() + DType::Float8E5m2.bytes(), 7);
    }

    #[test]
    fn sizes_are_capped() {
        assert_eq!(layout(Kind::Kv).validate(), Ok(()));
        for zero in [
            PageLayout { layers: 0, ..layout(Kind::Kv) },
            PageLayout { kv_heads: 0, ..layout(Kind::Kv) },
            PageLayout { head_dim: 0, ..layout(Kind::Kv) },
            PageLayout { page_tokens: 0, ..layout(Kind::Kv) },
        ] {
            assert!(zero.validate().is_err_and(|e| e.0.contains("is 0")));
        }
        // 2^31 bytes a page, then twice that because it is fused, then past 2^64.
        let big = PageLayout { page_tokens: 1 << 20, ..layout(Kind::Kv) };
        assert_eq!(big.validate(), Ok(()));
        assert!(PageLayout { kind: Kind::Fused, ..big }.validate().is_err());
        let most = PageLayout { kv_heads: u32::MAX, head_dim: u32::MAX, page_tokens: u32::MAX, ..big };
        assert!(most.validate().is_err_and(|e| e.0.contains("larger than")));
        assert!(PageLayout { layers: MAX_LAYERS + 1, ..big }.validate().is_err());
    }

    #[test]
    fn ranks_are_checked() {
        assert_eq!(shard(3, 4, 1, 2).validate(), Ok(()));
        assert_eq!(shard(3, 4, 1, 2).index(), 7);
        for bad in [shard(4, 4, 0, 1), shard(0, 0, 0, 1), shard(0, 1, 2, 2), shard(0, 1, 0, 0)] {
            assert!(bad.validate().is_err());
        }
        assert!(shard(0, 1 << 16, 0, 1 << 16).validate().is_err());
    }

    #[test]
    fn the_first_stages_hold_one_layer_more() {
        let l = layout(Kind::Kv);
        let split = |size| (0..size).map(|r| shard(0, 1, r, size).layers(&l)).collect::<Vec<_>>();
        assert_eq!(split(4), [0..3, 3..6, 6..8, 8..10]);
        assert_eq!(split(2), [0..5, 5..10]);
        assert!(split(16).iter().skip(10).all(Range::is_empty));
        assert_eq!(split(16)[9], 9..10);
    }

    #[test]
    fn heads_are_split_or_replicated() {
        let l = |kv_heads| PageLayout { kv_heads, ..layout(Kind::Kv) };
        let heads =
            |kv_heads, tp| (0..tp).map(|r| shard(r, tp, 0, 1).heads(&l(kv_heads))).collect::<Vec<_>>();
        assert_eq!(heads(8, 2), [Ok(0..4), Ok(4..8)]);
        assert_eq!(heads(2, 4), [Ok(0..1), Ok(0..1), Ok(1..2), Ok(1..2)]);
        let e = shard(0, 4, 0, 1).heads(&l(6)).expect_err("4 does not divide 6");
        assert!(e.0.contains("6 KV heads") && e.0.contains("4 tensor-parallel"), "{e}");
        assert_eq!(shard(5, 7, 0, 1).heads(&layout(Kind::Latent)), Ok(0..1));
    }

    #[test]
    fn regions_are_listed_by_group_layer_part() {
        let side = Side {
            groups: vec![layout(Kind::Kv), layout(Kind::Fused), layout(Kind::Latent)],
            shard: shard(1, 4, 1, 5),
        };
        let regions = side.regions(&[3, 2, 1]).expect("valid");
        let page = 16 * 128 * 2;
        let ids: Vec<_> = regions.iter().map(|r| (r.group, r.layer, r.part, r.len)).collect();
        let half = 2 * page;
        assert_eq!(
            ids,
            [
                (0, 2, 0, 3 * half),
                (0, 2, 1, 3 * half),
                (0, 3, 0, 3 * half),
                (0, 3, 1, 3 * half),
                (1, 2, 0, 2 * 2 * half),
                (1, 3, 0, 2 * 2 * half),
                (2, 2, 0, page),
                (2, 3, 0, page),
            ]
        );
        assert_eq!(side.region_index(1, 3, 0), Some(5));
        for (group, layer, part) in [(0, 1, 0), (0, 4, 0), (0, 2, 2), (1, 2, 1), (3, 2, 0)] {
            assert_eq!(side.region_index(group, layer, part), None);
        }
        assert!(side.regions(&[3, 2]).is_err());
        let labels: Vec<_> =
            regions.iter().map(|r| side.groups[r.group as usize].parts_label(r.part)).collect();
        assert_eq!(labels, ["k", "v", "k", "v", "kv", "kv", "latent", "latent"]);
    }
}
