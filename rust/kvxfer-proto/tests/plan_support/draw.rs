//! Drawn hand-offs: layouts, shards, page tables, token and layer ranges.

use super::{Handoff, Table};
use kvxfer_proto::layout::{
    CrossLayer, DType, Kind, LayerSplit, Order, PageLayout, Scales, Shard, Side, State, StateBlock, part_page,
};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

/// The pages a region has.
const PAGES: u32 = 32;

fn order() -> impl Strategy<Value = Order> {
    select(vec![Order::Nhd, Order::Hnd])
}

/// What one side may choose for itself: padding of pages, layers that share them, and padding between those.
type Own = (Option<u64>, Option<Option<u64>>, Option<u64>);

fn own() -> impl Strategy<Value = Own> {
    let pad = || prop::option::weighted(0.3, 0..9_u64);
    (pad(), prop::option::weighted(0.25, prop::option::of(0..5_u64)), pad())
}

/// Every rank's shard.
fn ranks(tp_size: u32, pp_size: u32) -> impl Iterator<Item = Shard> {
    (0..pp_size).flat_map(move |pp_rank| {
        (0..tp_size).map(move |tp_rank| Shard { tp_rank, tp_size, pp_rank, pp_size })
    })
}

/// The layout with strides that every rank's pages fit in.
fn strided(mut l: PageLayout, (pad, cross, scale_pad): Own, (tp, pp): (u32, u32)) -> PageLayout {
    let largest = |l: &PageLayout, parts: &mut dyn Iterator<Item = u32>| {
        parts
            .flat_map(|part| ranks(tp, pp).map(move |shard| (shard, part)))
            .filter_map(|(shard, part)| part_page(l, &shard, part).ok())
            .map(|p| p.bytes)
            .max()
            .unwrap_or(1)
    };
    let data = if l.scales.is_some() { l.parts() / 2 } else { l.parts() };
    if let Some(gap) = cross {
        let one = largest(&l, &mut (0..data));
        l.cross = Some(CrossLayer { layer_stride: gap.map(|gap| one + gap) });
    }
    l.page_stride = pad.map(|pad| largest(&l, &mut (0..data)) + pad);
    let scales = largest(&l, &mut (data..l.parts()));
    if let (Some(s), Some(pad)) = (&mut l.scales, scale_pad) {
        s.page_stride = Some(scales + pad);
    }
    l
}

/// So many layers on each rank, in a way of their own.
fn split(layers: u32, pp: u32, cut: u32) -> Option<LayerSplit> {
    let first = cut % (layers + 1);
    let mut counts = vec![0; pp as usize];
    counts[0] = first;
    counts[pp as usize - 1] += layers - first;
    LayerSplit::new(&counts)
}

/// A size that both sides can split.
fn units(src_tp: u32, dst_tp: u32, most: u32) -> impl Strategy<Value = u32> {
    let splits = move |heads: u32| {
        [src_tp, dst_tp].iter().all(|&tp| heads.is_multiple_of(tp) || tp.is_multiple_of(heads))
    };
    let mut all: Vec<u32> = (1..=most).filter(|&h| splits(h)).collect();
    all.push(1);
    select(all)
}

/// Layouts of one group on both sides.
fn group(src: (u32, u32), dst: (u32, u32)) -> BoxedStrategy<(PageLayout, PageLayout)> {
    let apart = [Kind::Kv, Kind::Fused, Kind::Packed];
    let mut pairs: Vec<_> = apart.into_iter().flat_map(|a| apart.map(|b| (a, b))).collect();
    pairs.push((Kind::Latent, Kind::Latent));
    let tokens = || prop_oneof![select(vec![1_u32, 2, 3, 4, 6]), Just(4)];
    let dtype = select(vec![DType::Int8, DType::Bfloat16, DType::Float32, DType::Uint4]);
    let scales = prop::option::weighted(
        0.25,
        (1..3_u32, select(vec![DType::Uint8, DType::Float16])).prop_map(|(dim, dtype)| Scales {
            dim,
            dtype,
            page_stride: None,
        }),
    );
    let model =
        (1..5_u32, units(src.0, dst.0, 8), 1..3_u32, dtype, scales, prop::option::weighted(0.2, 1..9_u64));
    let splits = (prop::option::weighted(0.2, 0..9_u32), prop::option::weighted(0.2, 0..9_u32));
    let sides = (select(pairs), (order(), order()), (tokens(), tokens()), (own(), own()), splits);
    let attention = (model, sides).prop_map(
        move |((layers, kv_heads, dim, dtype, scales, window), (kinds, orders, tokens, owns, splits))| {
            let one = |kind, order, page_tokens, own, cut: Option<u32>, ranks: (u32, u32)| {
                let head_dim = dim * dtype.packed();
                let split = cut.and_then(|cut| split(layers, ranks.1, cut));
                let plain = PageLayout {
                    layers,
                    kv_heads,
                    head_dim,
                    page_tokens,
                    dtype,
                    order,
                    kind,
                    scales,
                    window,
                    split,
                    ..PageLayout::PLAIN
                };
                strided(plain, own, ranks)
            };
            (
                one(kinds.0, orders.0, tokens.0, owns.0, splits.0, src),
                one(kinds.1, orders.1, tokens.1, owns.1, splits.1, dst),
            )
        },
    );
    let block = (0..2_u32, units(src.0, dst.0, 12), 1..4_u32, 1..4_u32)
        .prop_map(|(part, units, unit_bytes, rows)| StateBlock { part, units, unit_bytes, rows });
    let state = (1..5_u32, prop::collection::vec(block, 1..5), (own(), own())).prop_map(
        move |(layers, mut blocks, owns)| {
            // No part is left out.
            blocks[0].part = 0;
            let plain =
                PageLayout { layers, kind: Kind::State, state: State::new(&blocks), ..PageLayout::PLAIN };
            (strided(plain, owns.0, src), strided(plain, owns.1, dst))
        },
    );
    prop_oneof![4 => attention, 1 => state].boxed()
}

/// A page table that holds tokens `start..end`, and perhaps one page more.
fn table(groups: &[PageLayout], start: u64, end: u64, sorted: bool) -> BoxedStrategy<Table> {
    let lists: Vec<_> = groups
        .iter()
        .map(|l| {
            let each = u64::from(l.page_tokens);
            let held = l.held(start..end);
            let need = (held.end.div_ceil(each) - held.start / each) as usize;
            let ids: Vec<u32> = (0..PAGES).collect();
            let list = (0..2_usize).prop_flat_map(move |extra| {
                let count = (need + extra).min(ids.len());
                prop_oneof![
                    subsequence(ids.clone(), count),
                    (0..=PAGES - count as u32).prop_map(move |first| (first..first + count as u32).collect()),
                ]
            });
            if sorted { list.boxed() } else { list.prop_shuffle().boxed() }
        })
        .collect();
    let count = vec![PAGES; groups.len()];
    lists.prop_map(move |pages| Table { start, end, pages, count: count.clone() }).boxed()
}

pub(crate) fn handoff(sorted: bool) -> impl Strategy<Value = Handoff> {
    let size = || select(vec![1_u32, 2, 3, 4, 6, 8]);
    let sizes = (size(), size(), 1..4_u32, 1..4_u32);
    let tokens = (0..8_u64, 0..20_u64, 0..5_u64, (0..5_u64, prop_oneof![3 => Just(0), 1 => 0..6_u64]));
    (sizes, tokens, (0..64_u32, 0..64_u32), (0..4_u32, 0..6_u32, prop::bool::weighted(0.75))).prop_flat_map(
        move |((src_tp, dst_tp, src_pp, dst_pp), (first, len, a, (b, more)), ranks, (layer, layers, all))| {
            prop::collection::vec(group((src_tp, src_pp), (dst_tp, dst_pp)), 1..3).prop_flat_map(
                move |groups| {
                    let (src_groups, dst_groups): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
                    let end = first + len;
                    let tables = (
                        table(&src_groups, first.saturating_sub(a), end, sorted),
                        // A chunk may end before the room does.
                        table(&dst_groups, first.saturating_sub(b), end + more, sorted),
                    );
                    tables.prop_map(move |(src_table, dst_table)| Handoff {
                        src_groups: src_groups.clone(),
                        src_tp,
                        src_pp,
                        dst: Side {
                            groups: dst_groups.clone(),
                            shard: Shard {
                                tp_rank: ranks.0 % dst_tp,
                                tp_size: dst_tp,
                                pp_rank: ranks.1 % dst_pp,
                                pp_size: dst_pp,
                            },
                        },
                        src_table,
                        dst_table,
                        tokens: first..end,
                        layers: if all { 0..u32::MAX } else { layer..layer + layers },
                    })
                },
            )
        },
    )
}
