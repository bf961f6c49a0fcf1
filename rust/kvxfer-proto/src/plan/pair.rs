//! Whether two sides fit, and who writes what.

use super::Template;
use crate::layout::{Factors, Kind, LayoutError, PageLayout, Scales, Shard, Side, StateBlock};
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

/// Whether `src` and `dst` can hand off to each other. Axis order, page size, strides, K/V apart, fused or packed, and
/// parallel sizes may differ, as long as the heads can be split on both sides.
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
        same_model(g, a, b)?;
        let blocks =
            a.state.iter().flat_map(|s| s.blocks()).map(|b| (b.units, "units of the state", "units"));
        let heads =
            (!matches!(a.kind, Kind::Latent | Kind::State)).then_some((a.kv_heads, "kv_heads", "heads"));
        for (heads, name, short) in heads.into_iter().chain(blocks) {
            for tp in [src.shard.tp_size, dst.shard.tp_size] {
                if tp > 0 && heads % tp != 0 && (heads == 0 || tp % heads != 0) {
                    let (ours, theirs) = (src.shard.tp_size, dst.shard.tp_size);
                    return Err(Mismatch {
                        field: "tp_size",
                        ours: ours.to_string(),
                        theirs: theirs.to_string(),
                        text: format!(
                            "{heads} {name} of group {g} cannot go from tp_size {ours} (source) to tp_size {theirs} \
                             (destination): {heads} {short} cannot be split over {tp} ranks; one number must divide the other: \
                             choose a tp_size that divides {heads} or is a multiple of it"
                        ),
                    });
                }
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

/// What both sides must have alike in a group.
fn same_model(g: usize, a: &PageLayout, b: &PageLayout) -> Result<(), Mismatch> {
    let of =
        |field, x: String, y: String| if x == y { Ok(()) } else { Err(Mismatch::new(field, Some(g), x, y)) };
    let alone = |k: Kind| matches!(k, Kind::Latent | Kind::State);
    if alone(a.kind) || alone(b.kind) {
        of("kind", a.kind.name().into(), b.kind.name().into())?;
    }
    of("layers", a.layers.to_string(), b.layers.to_string())?;
    if let (Some(x), Some(y)) = (&a.state, &b.state) {
        of("state blocks", x.blocks().len().to_string(), y.blocks().len().to_string())?;
        for (x, y) in x.blocks().iter().zip(y.blocks()) {
            let text =
                |b: &StateBlock| format!("{} units of {} bytes in {} rows", b.units, b.unit_bytes, b.rows);
            of("state block", text(x), text(y))?;
        }
        return Ok(());
    }
    of("kv_heads", a.heads().to_string(), b.heads().to_string())?;
    of("head_dim", a.head_dim.to_string(), b.head_dim.to_string())?;
    of("dtype", a.dtype.name().into(), b.dtype.name().into())?;
    let tokens = |w: Option<u64>| w.map_or_else(|| "none".to_owned(), |n| format!("{n} tokens"));
    of("window", tokens(a.window), tokens(b.window))?;
    let scales = |s: Option<Scales>| {
        s.map_or_else(|| "none".to_owned(), |s| format!("{} {} a token and head", s.dim, s.dtype.name()))
    };
    of("scales", scales(a.scales), scales(b.scales))?;
    let factors = |l: &PageLayout| l.factors.unwrap_or(Factors::new(1.0, 1.0));
    let (x, y) = (factors(a), factors(b));
    of("k_scale", x.k().to_string(), y.k().to_string())?;
    of("v_scale", x.v().to_string(), y.v().to_string())
}

/// The part of a strand's bytes that one of several source ranks that hold them writes to one destination rank.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Share {
    /// Which part, and of how many.
    index: u64,
    parts: u64,
    /// Tokens that stay together.
    quantum: u64,
}

/// Tokens that stay together at least: a part of a long prompt is hardly larger than another, and runs stay long.
const QUANTUM: u64 = 64;

impl Share {
    /// Of `units` heads in `pages` tokens a page on each side. `None` if other ranks write all of it.
    ///
    /// Where `R` ranks hold the same heads on the source's side and `D` need them, each destination takes equal parts from
    /// `R / gcd(R, D)` of them, other ones than its neighbour: then all of them write equally much.
    pub(super) fn new(units: u32, src: &Shard, dst: &Shard, pages: (u32, u32)) -> Option<Self> {
        let ranks = |tp: u32| if tp > units { (tp / units.max(1)).max(1) } else { 1 };
        let (replicas, takers) = (ranks(src.tp_size), ranks(dst.tp_size));
        let classes = gcd(replicas.into(), takers.into());
        let taker = u64::from(dst.tp_rank % takers) + u64::from(dst.pp_rank);
        let replica = u64::from(src.tp_rank % replicas);
        if replica % classes != taker % classes {
            return None;
        }
        let parts = u64::from(replicas) / classes;
        let (a, b) = (u64::from(pages.0.max(1)), u64::from(pages.1.max(1)));
        // Pages stay whole, if those of both sides fit together at all.
        let both = a / gcd(a, b) * b;
        let unit = if both <= 16 * QUANTUM { both } else { a.max(b) };
        Some(Self {
            // Other destinations begin with other replicas, so that short prompts do not all come from the first.
            index: (replica / classes + parts - taker / classes % parts) % parts,
            parts,
            quantum: unit * QUANTUM.div_ceil(unit),
        })
    }

    /// All of it.
    pub(super) const fn whole(&self) -> Self {
        Self { index: 0, parts: 1, quantum: self.quantum }
    }

    /// The layers that go, if a strand is split by layers: as evenly as possible.
    pub(super) fn layers(&self, layers: &Range<u32>) -> Range<u32> {
        let (n, parts) = (layers.len() as u64, self.parts);
        let at = |i: u64| layers.start + u32::try_from(n * i / parts).unwrap_or(u32::MAX);
        at(self.index)..at(self.index + 1)
    }

    /// The tokens of `tokens` that go, in order.
    pub(super) fn tokens(&self, tokens: Range<u64>) -> impl Iterator<Item = Range<u64>> + use<> {
        let Self { index, parts, quantum } = *self;
        let mut next = tokens.start;
        std::iter::from_fn(move || {
            if parts == 1 {
                let all = next..tokens.end;
                next = tokens.end;
                return (!all.is_empty()).then_some(all);
            }
            while next < tokens.end {
                let block = next / quantum;
                let end = (block + 1).saturating_mul(quantum).min(tokens.end);
                let piece = next..end;
                next = end;
                if block % parts == index {
                    return Some(piece);
                }
            }
            None
        })
    }

    /// How many of `tokens` go.
    pub(super) fn count(&self, tokens: Range<u64>) -> u64 {
        let Self { index, parts, quantum } = *self;
        // Those before `end`: whole rounds of `parts` blocks, and what of the last round is ours.
        let before = |end: u64| {
            let blocks = end / quantum;
            let last = match (blocks % parts).cmp(&index) {
                std::cmp::Ordering::Less => 0,
                std::cmp::Ordering::Equal => end % quantum,
                std::cmp::Ordering::Greater => quantum,
            };
            blocks / parts * quantum + last
        };
        before(tokens.end.max(tokens.start)) - before(tokens.start)
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a.max(1)
}

pub(super) fn intersect(a: &Range<u32>, b: &Range<u32>) -> Range<u32> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

/// For every source rank (at `pp_rank * tp_size + tp_rank`) the layers that it owes `dst`, if it owes anything.
/// Every byte of `dst` has exactly one source. The layers are the hull over the groups; the heads follow from
/// the shards, and so do the tokens of each rank where several hold the same heads.
///
/// # Errors
/// When a side is invalid or the two do not fit.
pub fn sources(
    src_groups: &[PageLayout],
    src_tp: u32,
    src_pp: u32,
    dst: &Side,
) -> Result<Vec<Option<Range<u32>>>, LayoutError> {
    // What a rank owes does not depend on its strides, and each has its own: those of one may be too small for another.
    let plain = |l: &PageLayout| PageLayout {
        page_stride: None,
        cross: None,
        scales: l.scales.map(|s| Scales { page_stride: None, ..s }),
        ..*l
    };
    let mut src = Side {
        groups: src_groups.iter().map(plain).collect(),
        shard: Shard { tp_rank: 0, tp_size: src_tp, pp_rank: 0, pp_size: src_pp },
    };
    compatible(&src, dst).map_err(|m| LayoutError(m.text))?;
    let mut out = Vec::new();
    for pp_rank in 0..src_pp {
        for tp_rank in 0..src_tp {
            src.shard = Shard { tp_rank, pp_rank, ..src.shard };
            out.push(Template::new(&src, dst)?.layers());
        }
    }
    Ok(out)
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
        ..PageLayout::PLAIN
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
