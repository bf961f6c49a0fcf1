//! Drawn hand-offs: layouts, shards, page tables, token and layer ranges.

use super::{Handoff, Table};
use kvxfer_proto::layout::{DType, Kind, Order, PageLayout, Shard, Side};
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

/// The pages a region has.
const PAGES: u32 = 32;

fn order() -> impl Strategy<Value = Order> {
    select(vec![Order::Nhd, Order::Hnd])
}

/// Layouts of one group on both sides.
fn group(src_tp: u32, dst_tp: u32) -> impl Strategy<Value = (PageLayout, PageLayout)> {
    let splits = move |heads: u32| {
        [src_tp, dst_tp].iter().all(|&tp| heads.is_multiple_of(tp) || tp.is_multiple_of(heads))
    };
    let heads: Vec<u32> = (1..=8).filter(|&h| splits(h)).collect();
    let kinds = select(vec![
        (Kind::Kv, Kind::Kv),
        (Kind::Fused, Kind::Fused),
        (Kind::Kv, Kind::Fused),
        (Kind::Fused, Kind::Kv),
        (Kind::Latent, Kind::Latent),
    ]);
    let tokens = || prop_oneof![select(vec![1_u32, 2, 3, 4, 6]), Just(4)];
    let dtype = select(vec![DType::Int8, DType::Bfloat16]);
    (1..5_u32, select(heads), 1..3_u32, dtype, kinds, (order(), order()), (tokens(), tokens())).prop_map(
        |(layers, kv_heads, head_dim, dtype, (a, b), orders, tokens)| {
            let one = |kind, order, page_tokens| PageLayout {
                layers,
                kv_heads,
                head_dim,
                page_tokens,
                dtype,
                order,
                kind,
            };
            (one(a, orders.0, tokens.0), one(b, orders.1, tokens.1))
        },
    )
}

/// A page table that holds tokens `start..end`, and perhaps one page more.
fn table(groups: &[PageLayout], start: u64, end: u64, sorted: bool) -> BoxedStrategy<Table> {
    let lists: Vec<_> = groups
        .iter()
        .map(|l| {
            let each = u64::from(l.page_tokens);
            let need = (end.div_ceil(each) - start / each) as usize;
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
    lists.prop_map(move |pages| Table { start, pages, count: count.clone() }).boxed()
}

pub(crate) fn handoff(sorted: bool) -> impl Strategy<Value = Handoff> {
    let size = || select(vec![1_u32, 2, 3, 4, 6, 8]);
    let sizes = (size(), size(), 1..4_u32, 1..4_u32);
    let tokens = (0..8_u64, 0..20_u64, 0..5_u64, 0..5_u64);
    (sizes, tokens, (0..64_u32, 0..64_u32), (0..4_u32, 0..6_u32, prop::bool::weighted(0.75))).prop_flat_map(
        move |((src_tp, dst_tp, src_pp, dst_pp), (first, len, a, b), ranks, (layer, layers, all))| {
            prop::collection::vec(group(src_tp, dst_tp), 1..3).prop_flat_map(move |groups| {
                let (src_groups, dst_groups): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
                let end = first + len;
                let tables = (
                    table(&src_groups, first.saturating_sub(a), end, sorted),
                    table(&dst_groups, first.saturating_sub(b), end, sorted),
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
            })
        },
    )
}
