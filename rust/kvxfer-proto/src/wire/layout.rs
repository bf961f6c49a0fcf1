//! How a layout lies in bytes.
//!
//! A plain one has seven fields. One that is not has more, and all of them say where bytes lie: a reader that skipped one
//! would write elsewhere. So its kind has [`MUST_KNOW`] set, which is no kind to a reader that only knows plain ones.

use super::error::WireError;
use super::value::{At, Fields, Item, Value, need, put_field, set};
use crate::layout::{
    CrossLayer, DType, Factors, Kind, LayerSplit, MAX_BLOCKS, MAX_SPLIT, PageLayout, Scales, State,
    StateBlock,
};

/// Set in the kind of a layout that is not plain.
const MUST_KNOW: u8 = 0x80;
const KIND: At = at("kind");

const fn at(field: &'static str) -> At {
    At { message: "PageLayout", field }
}

macro_rules! layout_fields {
    ($($tag:literal $field:ident),* ; $($more:literal $option:ident),*) => {
        impl Value for PageLayout {
            fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
                $(put_field(out, at(stringify!($field)), $tag, |out| {
                    self.$field.put(out, at(stringify!($field)))
                })?;)*
                let plain = true $(&& self.$option.is_none())*;
                put_field(out, KIND, 7, |out| {
                    let start = out.len();
                    self.kind.put(out, KIND)?;
                    if let Some(kind) = out.get_mut(start).filter(|_| !plain) {
                        *kind |= MUST_KNOW;
                    }
                    Ok(())
                })?;
                $(if let Some(value) = &self.$option {
                    put_field(out, at(stringify!($option)), $more, |out| {
                        value.put(out, at(stringify!($option)))
                    })?;
                })*
                Ok(())
            }

            fn get(bytes: &[u8], _: At) -> Result<Self, WireError> {
                $(let mut $field = None;)*
                $(let mut $option = None;)*
                let (mut kind, mut unknown) = (None::<u8>, None);
                let mut fields = Fields::new("PageLayout", bytes);
                while let Some((tag, value)) = fields.step()? {
                    match tag {
                        $($tag => set(&mut $field, value, at(stringify!($field)))?,)*
                        7 => set(&mut kind, value, KIND)?,
                        $($more => set(&mut $option, value, at(stringify!($option)))?,)*
                        _ => unknown = Some(tag),
                    }
                }
                let kind = need(kind, KIND)?;
                match unknown {
                    Some(tag) if kind & MUST_KNOW != 0 => return Err(at("tag").value(tag.into())),
                    _ => {}
                }
                Ok(Self {
                    $($field: need($field, at(stringify!($field)))?,)*
                    kind: Kind::get(&[kind & !MUST_KNOW], KIND)?,
                    $($option,)*
                })
            }
        }
    };
}

layout_fields! {
    1 layers, 2 kv_heads, 3 head_dim, 4 page_tokens, 5 dtype, 6 order ;
    8 page_stride, 9 cross, 10 window, 11 split, 12 scales, 13 factors, 14 state
}

/// Zero for none, which no stride is.
impl Value for CrossLayer {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        self.layer_stride.unwrap_or(0).put(out, at)
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        Ok(Self { layer_stride: Some(u64::get(bytes, at)?).filter(|n| *n > 0) })
    }
}

impl Value for LayerSplit {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        self.counts().collect::<Vec<u32>>().put(out, at)
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        let counts = Vec::<u32>::get(bytes, at)?;
        Self::new(&counts).ok_or_else(|| at.value(counts.len() as u64))
    }
}

/// No more pipeline ranks than a list of one number a group may have.
const _: () = assert!(MAX_SPLIT <= super::MAX_GROUPS);

impl Value for Factors {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        self.bits().put(out, at)
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        Ok(Self::from_bits(<(u32, u32)>::get(bytes, at)?))
    }
}

impl Value for Scales {
    fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
        let at = |field| At { message: "Scales", field };
        put_field(out, at("dim"), 1, |out| self.dim.put(out, at("dim")))?;
        put_field(out, at("dtype"), 2, |out| self.dtype.put(out, at("dtype")))?;
        if let Some(stride) = self.page_stride {
            put_field(out, at("page_stride"), 3, |out| stride.put(out, at("page_stride")))?;
        }
        Ok(())
    }
    fn get(bytes: &[u8], _: At) -> Result<Self, WireError> {
        let at = |field| At { message: "Scales", field };
        let (mut dim, mut dtype, mut page_stride) = (None::<u32>, None::<DType>, None::<u64>);
        let mut fields = Fields::new("Scales", bytes);
        while let Some((tag, value)) = fields.step()? {
            match tag {
                1 => set(&mut dim, value, at("dim"))?,
                2 => set(&mut dtype, value, at("dtype"))?,
                3 => set(&mut page_stride, value, at("page_stride"))?,
                other => return Err(at("tag").value(other.into())),
            }
        }
        Ok(Self { dim: need(dim, at("dim"))?, dtype: need(dtype, at("dtype"))?, page_stride })
    }
}

impl Item for StateBlock {
    const MAX: usize = MAX_BLOCKS;
}

/// Four numbers.
impl Value for StateBlock {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        (self.part, self.units).put(out, at)?;
        (self.unit_bytes, self.rows).put(out, at)
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        let (first, second) = bytes.split_at_checked(8).ok_or_else(|| at.value(bytes.len() as u64))?;
        let (part, units) = <(u32, u32)>::get(first, at)?;
        let (unit_bytes, rows) = <(u32, u32)>::get(second, at)?;
        Ok(Self { part, units, unit_bytes, rows })
    }
}

impl Value for State {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        self.blocks().to_vec().put(out, at)
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        let blocks = Vec::<StateBlock>::get(bytes, at)?;
        Self::new(&blocks).ok_or_else(|| at.value(blocks.len() as u64))
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const AT: At = at("");

    fn bytes(layout: &PageLayout) -> Vec<u8> {
        let mut out = Vec::new();
        layout.put(&mut out, AT).unwrap();
        out
    }

    fn every_field() -> PageLayout {
        let block = StateBlock { part: 1, units: 8, unit_bytes: 6, rows: 3 };
        PageLayout {
            page_stride: Some(4096),
            cross: Some(CrossLayer { layer_stride: Some(512) }),
            window: Some(128),
            split: LayerSplit::new(&[3, 1]),
            scales: Some(Scales { dim: 2, dtype: DType::Float32, page_stride: Some(64) }),
            factors: Some(Factors::new(0.5, 1.0)),
            state: State::new(&[block, block]),
            ..PageLayout::PLAIN
        }
    }

    #[test]
    fn what_is_not_plain_comes_back_as_it_was() {
        let dense = Some(CrossLayer { layer_stride: None });
        for layout in [every_field(), PageLayout { cross: dense, ..PageLayout::PLAIN }, PageLayout::PLAIN] {
            assert_eq!(PageLayout::get(&bytes(&layout), AT), Ok(layout));
        }
    }

    /// If this fails, the format has changed, and other agents cannot read it.
    #[test]
    fn the_bytes_are_what_they_always_were() {
        let hex: String = bytes(&every_field()).iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(hex, GOLDEN);
    }

    const GOLDEN: &str = "\
        0100040000000100000002000400000001000000030004000000010000000400040000000100000005000100000007060001000000010700\
        0100000081080008000000001000000000000009000800000000020000000000000a000800000080000000000000000b0008000000030000\
        00010000000c001f000000010004000000020000000200010000000103000800000040000000000000000d00080000000000003f0000803f\
        0e002c0000000100100000000100000008000000060000000300000001001000000001000000080000000600000003000000";

    /// An older reader knows kinds 1 to 3 only.
    #[test]
    fn a_reader_of_plain_layouts_refuses_others_by_their_kind() {
        let kind = |layout: &PageLayout| {
            let bytes = bytes(layout);
            let mut fields = Fields::new("PageLayout", &bytes);
            std::iter::from_fn(|| fields.step().unwrap()).find(|(tag, _)| *tag == 7).unwrap().1.to_vec()
        };
        assert_eq!(kind(&PageLayout::PLAIN), [1]);
        assert_eq!(kind(&PageLayout { window: Some(1), ..PageLayout::PLAIN }), [0x81]);
        assert_eq!(kind(&PageLayout { kind: Kind::Packed, ..PageLayout::PLAIN }), [4]);
    }

    #[test]
    fn a_field_that_is_not_known_is_an_error_unless_the_layout_is_plain() {
        for (layout, skipped) in [(PageLayout::PLAIN, true), (every_field(), false)] {
            let mut bytes = bytes(&layout);
            put_field(&mut bytes, AT, 999, |out| 1_u32.put(out, AT)).unwrap();
            assert_eq!(PageLayout::get(&bytes, AT).is_ok(), skipped);
        }
    }
}
