//! Where what moves together lies in a page.

use super::{CrossLayer, Kind, LayoutError, MAX_PAGE_BYTES, Order, PageLayout, PartPage, Shard};
use std::ops::Range;

/// What of a layout moves in one way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Strand {
    /// K and V, or the latent.
    Data,
    /// Their scales.
    Scales,
    /// A block of a state.
    Block(usize),
    /// A whole part of a state.
    Part(u32),
}

/// How a strand lies on one rank. All in bytes; [`super::MAX_PAGE_BYTES`] bounds them.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Lay {
    /// The first part it lies in.
    pub(crate) part: u32,
    /// Whether its tensors lie in parts of their own, else in one.
    pub(crate) apart: bool,
    /// Tensors a layer.
    pub(crate) tensors: u32,
    /// Heads, or units of a state, that the rank holds, and how many there are.
    pub(crate) held: Range<u32>,
    pub(crate) units: u32,
    /// Bytes that are one piece in every layout: a token of a head, or a unit in one row.
    pub(crate) row: u64,
    /// From the layer's start in the page to the first row.
    pub(crate) first: u64,
    /// From one to the next: tensor (within a page), head, token, layer (within a page; else zero), page.
    pub(crate) tensor: u64,
    pub(crate) head: u64,
    pub(crate) token: u64,
    pub(crate) layer: u64,
    pub(crate) page: u64,
}

impl PageLayout {
    /// Where a strand lies on a rank.
    pub(crate) fn lay(&self, shard: &Shard, strand: Strand) -> Result<Lay, LayoutError> {
        let missing = || LayoutError(format!("the layout has no {strand:?}"));
        if let Strand::Block(index) = strand {
            let state = self.state.as_ref().ok_or_else(missing)?;
            let block = state.blocks().get(index).ok_or_else(missing)?;
            let count = |units| shard.units(units, "units of a state").map(|r| r.len() as u64);
            let (first, stride, _) = state.place(index, count)?;
            let PartPage { stride: page, .. } = page(self, shard, block.part)?;
            return Ok(Lay {
                part: block.part,
                apart: false,
                tensors: block.rows,
                held: shard.units(block.units, "units of a state")?,
                units: block.units,
                row: block.unit_bytes.into(),
                first,
                tensor: stride,
                head: block.unit_bytes.into(),
                token: 0,
                layer: layer_stride(self, shard, block.part)?,
                page,
            });
        }
        if let Strand::Part(part) = strand {
            let row = layer_bytes(self, shard, part)?;
            return Ok(Lay {
                part,
                apart: false,
                tensors: 1,
                held: 0..1,
                units: 1,
                row,
                first: 0,
                tensor: 0,
                head: row,
                token: 0,
                layer: layer_stride(self, shard, part)?,
                page: page(self, shard, part)?.stride,
            });
        }
        let (part, row) = match (strand, self.scales) {
            (Strand::Scales, Some(s)) => (self.data_parts(), s.dtype.bytes_of(s.dim)),
            (Strand::Scales, None) => return Err(missing()),
            _ => (0, self.row_bytes()),
        };
        let held = shard.heads(self)?;
        let (tokens, heads) = (u64::from(self.page_tokens), held.len() as u64);
        // A token of a head, with K and V where they lie side by side.
        let cell = if self.kind == Kind::Packed { 2 * row } else { row };
        let (head, token) = match self.order {
            Order::Hnd => (tokens * cell, cell),
            Order::Nhd => (cell, heads * cell),
        };
        let tensor = match self.kind {
            Kind::Packed => row,
            Kind::Fused => tokens * heads * row,
            Kind::Kv | Kind::Latent | Kind::State => 0,
        };
        Ok(Lay {
            part,
            apart: self.kind == Kind::Kv,
            tensors: self.kind.tensors(),
            held,
            units: self.heads(),
            row,
            first: 0,
            tensor,
            head,
            token,
            layer: layer_stride(self, shard, part)?,
            page: page(self, shard, part)?.stride,
        })
    }
}

/// Bytes of one layer's page of a part, without gaps.
fn layer_bytes(layout: &PageLayout, shard: &Shard, part: u32) -> Result<u64, LayoutError> {
    if let Some(state) = &layout.state {
        let index = state.blocks().iter().position(|b| b.part == part);
        let index = index.ok_or_else(|| LayoutError(format!("the state has no part {part}")))?;
        let count = |units| shard.units(units, "units of a state").map(|r| r.len() as u64);
        return Ok(state.place(index, count)?.2);
    }
    let row = match layout.scales.filter(|_| part >= layout.data_parts()) {
        Some(s) => s.dtype.bytes_of(s.dim),
        None => layout.row_bytes(),
    };
    // A part of the page that `validate` has capped.
    Ok(row
        * u64::from(layout.page_tokens)
        * shard.heads(layout)?.len() as u64
        * u64::from(layout.kind.halves()))
}

/// From one layer to the next within a page; zero where each has regions of its own.
fn layer_stride(layout: &PageLayout, shard: &Shard, part: u32) -> Result<u64, LayoutError> {
    let Some(CrossLayer { layer_stride }) = layout.cross else { return Ok(0) };
    let bytes = layer_bytes(layout, shard, part)?;
    // Scales have a layer stride of their own: none is given, so they lie without gaps.
    match layer_stride.filter(|_| part < layout.data_parts()) {
        Some(stride) if stride < bytes => Err(LayoutError(format!(
            "layer_stride_bytes is {stride}, but a layer's page of part {} takes {bytes} bytes on this rank",
            layout.parts_label(part)
        ))),
        Some(stride) => Ok(stride),
        None => Ok(bytes),
    }
}

/// One page of a part on this rank, of a layout and shard that are valid by themselves.
pub(super) fn page(layout: &PageLayout, shard: &Shard, part: u32) -> Result<PartPage, LayoutError> {
    let one = layer_bytes(layout, shard, part)?;
    let layers = shard.layers(layout).len() as u64;
    let bytes = match layout.cross {
        // A stride is a caller's or a peer's: what overflows is past the limit, too.
        Some(_) if layers > 0 => {
            (layers - 1).saturating_mul(layer_stride(layout, shard, part)?).saturating_add(one)
        }
        _ => one,
    };
    let label = layout.parts_label(part);
    if bytes > MAX_PAGE_BYTES {
        return Err(LayoutError(format!(
            "a page of part {label} takes {bytes} bytes for the {layers} layers of this rank; at most {MAX_PAGE_BYTES}"
        )));
    }
    let scales = part >= layout.data_parts();
    let (name, given) = match layout.scales {
        Some(s) if scales => ("scale_stride_bytes", s.page_stride),
        _ => ("page_stride_bytes", layout.page_stride),
    };
    match given {
        Some(stride) if stride < bytes => Err(LayoutError(format!(
            "{name} is {stride}, but a page of part {label} takes {bytes} bytes on this rank"
        ))),
        Some(stride) => Ok(PartPage { bytes, stride }),
        // The next page begins where the last layer's stride ends.
        None if layout.cross.is_some() && layers > 0 => {
            Ok(PartPage { bytes, stride: layers * layer_stride(layout, shard, part)? })
        }
        None => Ok(PartPage { bytes, stride: bytes }),
    }
}
