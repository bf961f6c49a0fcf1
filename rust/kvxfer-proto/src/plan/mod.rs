//! Which bytes go where for a pair of shards: box intersection over (layer, K/V, head, token).
//!
//! * [`compatible`] says at connect whether two sides fit.
//! * [`sources`] says which source ranks owe a destination rank what.
//! * [`Template`] is what a pair of shards needs once, [`Cursor`] what a push needs: it gives the [`Piece`]s.
//! * [`pack`] makes one run of bytes of many small pieces, and takes it apart again.
//! * [`Cost`] says whether that is worth it.
//! * [`Digest`] is the checksum of one side's bytes of a push, over the [`Run`]s that [`Rows`] gives.

mod cost;
mod cursor;
mod digest;
pub mod pack;
mod pair;
mod rows;
mod segment;
mod template;

pub use cost::{Cost, Load, PACKED_PIECES, sample};
pub use cursor::{Cursor, Request, plan_all};
pub use digest::{Digest, Sum};
pub use pair::{Mismatch, compatible, sources};
pub use rows::{CELL_BYTES, End, Extent, Place, Rows, Run};
pub use template::Template;

/// Names the order in which a [`Cursor`] gives its pieces, and how a push is cut into packed slices: what is packed on one
/// side is unpacked by the other's own plan. Raise it with every change of either; `tests/plan_order.rs` notices.
pub const ORDER: u32 = 1;

/// One write: `len` bytes from an offset of a source region to an offset of a destination region. Regions are
/// numbered as [`crate::layout::Side::regions`] does.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Piece {
    /// Source region.
    pub src_region: u32,
    /// Offset in the source region.
    pub src_off: u64,
    /// Destination region.
    pub dst_region: u32,
    /// Offset in the destination region.
    pub dst_off: u64,
    /// Bytes.
    pub len: u64,
}
