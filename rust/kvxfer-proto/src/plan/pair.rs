//! Whether two sides fit, and who writes what.

use crate::layout::{Kind, LayoutError, PageLayout, Shard, Side};
use std::fmt;
use std::ops::Range;

/// Two sides that cannot hand off to each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Mismatch {
    /// The field that differs.
    pub field: &'static str,
    /// The source's value.
    pub ours: String,
    /// The destination's value.
    pub theirs: String,
    /// All of it for a person.
    pub text: String,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Mismatch {}

impl Mismatch {
    fn new(
        field: &'static str,
        group: Option<usize>,
        ours: impl Into<String>,
        theirs: impl Into<String>,
    ) -> Self {
        let (ours, theirs) = (ours.into(), theirs.into());
        let at = group.map(|g| format!(" of group {g}")).unwrap_or_default();
        let text = format!("{field}{at} differs: source has {ours}, destination has {theirs}");
        Self { field, ours, theirs, text }
    }
}

/// Whether `src` and `dst` can hand off to each other. Axis order, page size, K/V apart or fused, and parallel
/// sizes may differ, as long as the heads can be split on both sides.
///
/// # Errors
/// Names the field that differs and both values.
pub fn compatible(src: &Side, dst: &Side) -> Result<(), Mismatch> {
    if src.groups.len() != dst.groups.len() {
        return Err(Mismatch::new(
            "groups",
            None,
            src.groups.len().to_string(),
            dst.groups.len().to_string(),
        ));
    }
    for (g, (a, b)) in src.groups.iter().zip(&dst.groups).enumerate() {
        let differ = |field, x: &dyn fmt::Display, y: &dyn fmt::Display| {
            Err(Mismatch::new(field, Some(g), x.to_string(), y.to_string()))
        };
        if (a.kind == Kind::Latent) != (b.kind == Kind::Latent) {
            return differ("kind", &a.kind.name(), &b.kind.name());
        }
        if a.layers != b.layers {
            return differ("layers", &a.layers, &b.layers);
        }
        if a.heads() != b.heads() {
            return differ("kv_heads", &a.heads(), &b.heads());
        }
        if a.head_dim != b.head_dim {
            return differ("head_dim", &a.head_dim, &b.head_dim);
        }
        if a.dtype != b.dtype {
            return differ("dtype", &a.dtype.name(), &b.dtype.name());
        }
        for shard in [&src.shard, &dst.shard] {
            let (tp, heads) = (shard.tp_size, a.heads());
            if tp > 0 && a.kind != Kind::Latent && heads % tp != 0 && (heads == 0 || tp % heads != 0) {
                let (ours, theirs) = (src.shard.tp_size, dst.shard.tp_size);
                return Err(Mismatch {
                    field: "tp_size",
                    ours: ours.to_string(),
                    theirs: theirs.to_string(),
                    text: format!(
                        "{heads} kv_heads of group {g} cannot go from tp_size {ours} (source) to tp_size {theirs} \
                         (destination): {heads} heads cannot be split over {tp} ranks; one number must divide the other"
                    ),
                });
            }
        }
    }
    for (side, name) in [(src, "source"), (dst, "destination")] {
        side.validate().map_err(|e| {
            let value = |s: &Side| format!("{:?}", s.shard);
            Mismatch { field: "layout", ours: value(src), theirs: value(dst), text: format!("{name}: {e}") }
        })?;
    }
    Ok(())
}

/// Whether `src` is the rank, among those that hold the same heads of this group, that writes to `dst`.
///
/// The replica is chosen by destination rank, so that several destinations keep all replicas busy.
pub(super) fn writes(layout: &PageLayout, src: &Shard, dst: &Shard) -> bool {
    let replicas = src.tp_size / layout.heads().min(src.tp_size).max(1);
    replicas <= 1 || src.tp_rank % replicas == dst.tp_rank.wrapping_add(dst.pp_rank) % replicas
}

pub(super) fn intersect(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// For every source rank (at `pp_rank * tp_size + tp_rank`) the layers that it owes `dst`, if it owes anything.
/// Every byte of `dst` has exactly one source. The layers are the hull over the groups; the heads follow from
/// the shards.
///
/// # Errors
/// When a side is invalid or the two do not fit.
pub fn sources(
    src_groups: &[PageLayout],
    src_tp: u32,
    src_pp: u32,
    dst: &Side,
) -> Result<Vec<Option<Range<u32>>>, LayoutError> {
    let mut src = Side {
        groups: src_groups.to_vec(),
        shard: Shard { tp_rank: 0, tp_size: src_tp, pp_rank: 0, pp_size: src_pp },
    };
    compatible(&src, dst).map_err(|m| LayoutError(m.text))?;
    let mut out = Vec::new();
    for pp_rank in 0..src_pp {
        for tp_rank in 0..src_tp {
            src.shard = Shard { tp_rank, pp_rank, ..src.shard };
            out.push(owed(&src, dst)?);
        }
    }
    Ok(out)
}

/// The hull of the layers that `src` owes `dst`.
fn owed(src: &Side, dst: &Side) -> Result<Option<Range<u32>>, LayoutError> {
    let mut hull: Option<Range<u32>> = None;
    for layout in &src.groups {
        let layers = intersect(&src.shard.layers(layout), &dst.shard.layers(layout));
        let heads = intersect(&src.shard.heads(layout)?, &dst.shard.heads(layout)?);
        if !layers.is_empty() && !heads.is_empty() && writes(layout, &src.shard, &dst.shard) {
            hull = Some(hull.map_or(layers.clone(), |h| h.start.min(layers.start)..h.end.max(layers.end)));
        }
    }
    Ok(hull)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::{DType, Order};

    const BASE: PageLayout = PageLayout {
        layers: 4,
        kv_heads: 8,
        head_dim: 64,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind: Kind::Kv,
    };

    fn side(layout: PageLayout, tp_size: u32) -> Side {
        Side { groups: vec![layout], shard: Shard { tp_rank: 0, tp_size, pp_rank: 0, pp_size: 1 } }
    }

    #[test]
    fn order_page_size_and_kv_apart_or_fused_may_differ() {
        let other = PageLayout { order: Order::Nhd, page_tokens: 48, kind: Kind::Fused, ..BASE };
        assert_eq!(compatible(&side(BASE, 8), &side(other, 4)), Ok(()));
        let latent = |kv_heads| PageLayout { kind: Kind::Latent, kv_heads, ..BASE };
        assert_eq!(compatible(&side(latent(1), 3), &side(latent(8), 5)), Ok(()));
    }

    #[test]
    fn the_field_that_differs_is_named() {
        let cases = [
            ("layers", PageLayout { layers: 5, ..BASE }, "4", "5"),
            ("kv_heads", PageLayout { kv_heads: 4, ..BASE }, "8", "4"),
            ("head_dim", PageLayout { head_dim: 128, ..BASE }, "64", "128"),
            ("dtype", PageLayout { dtype: DType::Float8E4m3, ..BASE }, "bfloat16", "float8_e4m3"),
            ("kind", PageLayout { kind: Kind::Latent, ..BASE }, "kv", "latent"),
        ];
        for (field, layout, ours, theirs) in cases {
            let e = compatible(&side(BASE, 1), &side(layout, 1)).expect_err(field);
            assert_eq!((e.field, e.ours.as_str(), e.theirs.as_str()), (field, ours, theirs));
            assert!(e.text.contains(field) && e.text.contains(ours) && e.text.contains(theirs), "{e}");
        }
        let mut two = side(BASE, 1);
        two.groups.push(BASE);
        let e = compatible(&side(BASE, 1), &two).expect_err("groups");
        assert_eq!((e.field, e.ours.as_str(), e.theirs.as_str()), ("groups", "1", "2"));
        two.groups[1].dtype = DType::Float32;
        let mut same = two.clone();
        same.groups[1].dtype = DType::Float16;
        assert!(compatible(&same, &two).expect_err("dtype").text.contains("group 1"));
    }

    #[test]
    fn an_invalid_side_fits_nothing() {
        let bad = side(BASE, 0);
        assert!(compatible(&bad, &side(BASE, 1)).is_err_and(|e| e.text.starts_with("source: tp_rank is 0")));
        assert!(compatible(&side(BASE, 1), &bad).is_err_and(|e| e.text.starts_with("destination: ")));
        assert!(sources(&[BASE], 1 << 16, 1 << 16, &side(BASE, 1)).is_err());
        assert!(sources(&[], 1, 1, &side(BASE, 1)).is_err());
    }
}
