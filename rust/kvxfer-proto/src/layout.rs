//! How a page lies in a region, and which heads and layers a rank holds.

use thiserror::Error;

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

/// Layout of one group's pages. `kv_heads` and `layers` count the whole model's, not a rank's.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PageLayout {
    /// Layers of the group, over all pipeline ranks.
    pub layers: u32,
    /// KV heads, over all tensor-parallel ranks.
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

/// One agent's geometry: the layout of each group, and its shard.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Side {
    /// Layout of each group.
    pub groups: Vec<PageLayout>,
    /// Its shard.
    pub shard: Shard,
}

/// A layout or a pair of layouts that cannot work; the text names the numbers that clash.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[error("{0}")]
pub struct LayoutError(pub String);
