//! Checksums: both sides get the same one from the same bytes, another one from any other byte, and neither looks at
//! bytes that are not part of the push.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, clippy::cast_possible_truncation)]

mod plan_support;

use kvxfer_proto::layout::{DType, Kind, Order, PageLayout, Side};
use kvxfer_proto::plan::{CELL_BYTES, Digest, End, Extent, Piece, Rows, Run, Sum, Template};
use plan_support::draw::handoff;
use plan_support::{Handoff, Table, side};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;

/// A rank's regions.
type Memory = Vec<Vec<u8>>;

/// Every byte of every region, from a seed.
fn noise(side: &Side, table: &Table, seed: u64) -> Memory {
    let mut x = seed;
    let regions = side.regions(&table.count).unwrap();
    let mut byte = || {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 56) as u8
    };
    regions.iter().map(|r| (0..r.len).map(|_| byte()).collect()).collect()
}

fn extent(handoff: &Handoff, end: End, sample: bool) -> Extent {
    let table = if end == End::Source { &handoff.src_table } else { &handoff.dst_table };
    Extent {
        end,
        pages: table.arcs(),
        list: table.start..table.end,
        room: handoff.dst_table.start..handoff.dst_table.end,
        tokens: handoff.tokens.clone(),
        layers: handoff.layers.clone(),
        sample,
    }
}

fn counts(handoff: &Handoff, end: End) -> &[u32] {
    if end == End::Source { &handoff.src_table.count } else { &handoff.dst_table.count }
}

fn template(handoff: &Handoff, index: u32) -> Arc<Template> {
    Arc::new(Template::new(&handoff.source(index), &handoff.dst).expect("sides fit"))
}

fn rows(handoff: &Handoff, index: u32, end: End, sample: bool) -> Vec<Run> {
    let extent = extent(handoff, end, sample);
    let mut rows = Rows::new(template(handoff, index), extent, counts(handoff, end)).expect("pages fit");
    let mut out = Vec::new();
    assert!(!rows.fill(&mut out, u64::MAX, u64::MAX));
    assert!(rows.is_done());
    out
}

fn digest(handoff: &Handoff, index: u32, end: End, sample: bool) -> Digest {
    let extent = extent(handoff, end, sample);
    Digest::new(template(handoff, index), extent, counts(handoff, end)).expect("pages fit")
}

fn read(memory: &Memory) -> impl FnMut(u32, u64, &mut [u8]) -> Result<(), Infallible> {
    |region, off, buf| {
        buf.copy_from_slice(&memory[region as usize][off as usize..][..buf.len()]);
        Ok(())
    }
}

fn sum(handoff: &Handoff, index: u32, end: End, sample: bool, memory: &Memory) -> u64 {
    let Ok(sum) = digest(handoff, index, end, sample).finish(read(memory));
    sum
}

fn apply(pieces: &[Piece], src: &Memory, dst: &mut Memory) {
    for p in pieces {
        let from = &src[p.src_region as usize][p.src_off as usize..(p.src_off + p.len) as usize];
        dst[p.dst_region as usize][p.dst_off as usize..(p.dst_off + p.len) as usize].copy_from_slice(from);
    }
}

/// Every byte of these runs: region and offset.
fn bytes(runs: &[Run]) -> BTreeSet<(u32, u64)> {
    let each = |r: &Run| {
        let (region, off) = (r.region, r.off);
        (0..r.len()).map(move |n| (region, off + n))
    };
    runs.iter().flat_map(each).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// For every source rank: full and sampled, at once and in slices of any size.
    #[test]
    fn both_sides_agree_on_what_was_moved_and_on_nothing_else(
        handoff in handoff(false),
        seed in any::<u64>(),
        max_bytes in prop_oneof![1..100_u64, Just(u64::MAX)],
        max_cells in prop_oneof![1..6_u64, Just(u64::MAX)],
        flip in any::<(prop::sample::Index, u8)>(),
    ) {
        for index in 0..handoff.src_tp * handoff.src_pp {
            let src = noise(&handoff.source(index), &handoff.src_table, seed);
            let mut dst = noise(&handoff.dst, &handoff.dst_table, !seed);
            let pieces = handoff.plan(index).expect("fits");
            apply(&pieces, &src, &mut dst);
            let full = rows(&handoff, index, End::Destination, false);
            let cell = full.iter().map(|r| r.cell).max().unwrap_or(0);
            for sample in [false, true] {
                let ours = sum(&handoff, index, End::Source, sample, &src);
                prop_assert_eq!(ours, sum(&handoff, index, End::Destination, sample, &dst));
                for (end, memory) in [(End::Source, &src), (End::Destination, &dst)] {
                    let mut sliced = digest(&handoff, index, end, sample);
                    while !sliced.is_done() {
                        let Ok(n) = sliced.step(max_bytes, max_cells, read(memory));
                        prop_assert!(n <= max_bytes.max(cell));
                    }
                    prop_assert_eq!(sliced.value(), ours);
                }
            }

            // The rows are the pieces' bytes, each once.
            let covered = bytes(&full);
            prop_assert_eq!(covered.len() as u64, full.iter().map(Run::len).sum::<u64>());
            let moved: BTreeSet<(u32, u64)> = pieces
                .iter()
                .flat_map(|p| (0..p.len).map(move |n| (p.dst_region, p.dst_off + n)))
                .collect();
            prop_assert_eq!(&covered, &moved);

            // Nothing outside is looked at.
            let before = sum(&handoff, index, End::Destination, false, &dst);
            let mut other = dst.clone();
            for (region, bytes) in (0..).zip(&mut other) {
                for (off, byte) in (0..).zip(bytes.iter_mut()) {
                    if !covered.contains(&(region, off)) {
                        *byte ^= 0xA5;
                    }
                }
            }
            prop_assert_eq!(sum(&handoff, index, End::Destination, false, &other), before);

            // Any byte inside is.
            let (which, bit) = flip;
            if covered.is_empty() {
                continue;
            }
            let (region, off) = *which.get(&covered.iter().copied().collect::<Vec<_>>());
            dst[region as usize][off as usize] ^= 1 << (bit % 8);
            prop_assert_ne!(sum(&handoff, index, End::Destination, false, &dst), before);
            // A sample finds it exactly when it is in a sampled row.
            let sampled = bytes(&rows(&handoff, index, End::Destination, true));
            prop_assert!(sampled.is_subset(&covered));
            let found = sum(&handoff, index, End::Destination, true, &dst)
                != sum(&handoff, index, End::Source, true, &src);
            prop_assert_eq!(found, sampled.contains(&(region, off)));
        }
    }

    #[test]
    fn page_lists_that_do_not_hold_the_rows_are_refused(handoff in handoff(false), drop in 0..3_usize) {
        for index in 0..handoff.src_tp * handoff.src_pp {
            for end in [End::Source, End::Destination] {
                let moves = !rows(&handoff, index, end, false).is_empty();
                let mut bad = extent(&handoff, end, false);
                let mut pages = counts(&handoff, end).to_vec();
                match drop {
                    0 => bad.pages.iter_mut().for_each(|list| *list = Arc::from([])),
                    1 => pages.fill(0),
                    _ => bad.list = bad.tokens.end + 1..bad.tokens.end + 1,
                }
                prop_assert_eq!(Rows::new(template(&handoff, index), bad, &pages).is_err(), moves);
            }
        }
    }
}

/// 64 tokens of two layers with four heads of 8 elements, from scattered pages to pages of another size and order.
fn plain() -> Handoff {
    let layout = |page_tokens, order, kind| PageLayout {
        layers: 2,
        kv_heads: 4,
        head_dim: 8,
        page_tokens,
        dtype: DType::Bfloat16,
        order,
        kind,
        ..PageLayout::PLAIN
    };
    Handoff {
        src_groups: vec![layout(16, Order::Hnd, Kind::Kv)],
        src_tp: 1,
        src_pp: 1,
        dst: side(layout(8, Order::Nhd, Kind::Fused), 0, 1),
        src_table: Table::one(0, &[5, 0, 7, 2, 3], 8),
        dst_table: Table::one(0, &[9, 1, 4, 0, 7, 2, 3, 8, 6], 10),
        tokens: 3..67,
        layers: 0..2,
    }
}

#[test]
fn a_sample_is_the_edges_and_a_64th_of_the_rest() {
    let handoff = plain();
    let count = |runs: &[Run]| runs.iter().map(|r| r.count).sum::<u64>();
    let all = count(&rows(&handoff, 0, End::Source, false));
    assert_eq!(all, 64 * 2 * 2 * 4);
    let sampled = rows(&handoff, 0, End::Source, true);
    let edges: u64 = sampled
        .iter()
        .flat_map(|r| (0..r.count).map(|n| r.place.token + if r.by_token { n } else { 0 }))
        .filter(|t| *t == 3 || *t == 66)
        .count() as u64;
    assert_eq!(edges, 2 * 2 * 2 * 4, "both edges, of every layer, tensor and head");
    let rest = (count(&sampled) - edges) as f64 / (all - 2 * 16) as f64;
    assert!((1.0 / 128.0..1.0 / 32.0).contains(&rest), "{rest} of the other rows");
    // Both sides choose the same rows.
    let places = |end| {
        let mut found: Vec<_> = rows(&handoff, 0, end, true)
            .iter()
            .flat_map(|r| {
                let (place, by_token) = (r.place, r.by_token);
                (0..r.count).map(move |n| {
                    let (t, h) = if by_token { (n, 0) } else { (0, n as u32) };
                    (place.layer, place.tensor, place.head + h, place.token + t)
                })
            })
            .collect();
        found.sort_unstable();
        found
    };
    assert_eq!(places(End::Source), places(End::Destination));
}

#[test]
fn rows_that_change_places_are_found() {
    let handoff = plain();
    let src = noise(&handoff.source(0), &handoff.src_table, 7);
    let mut dst = noise(&handoff.dst, &handoff.dst_table, 8);
    apply(&handoff.plan(0).unwrap(), &src, &mut dst);
    let right = sum(&handoff, 0, End::Destination, false, &dst);
    let cells: Vec<(u32, u64, u64)> = rows(&handoff, 0, End::Destination, false)
        .iter()
        .flat_map(|r| (0..r.count).map(move |n| (r.region, r.off + n * r.cell, r.cell)))
        .collect();
    for (a, b) in [(0, 1), (0, cells.len() - 1), (17, 300)] {
        let ((ra, oa, len), (rb, ob, _)) = (cells[a], cells[b]);
        let mut swapped = dst.clone();
        for n in 0..len {
            let (x, y) = (dst[ra as usize][(oa + n) as usize], dst[rb as usize][(ob + n) as usize]);
            swapped[ra as usize][(oa + n) as usize] = y;
            swapped[rb as usize][(ob + n) as usize] = x;
        }
        assert_ne!(sum(&handoff, 0, End::Destination, false, &swapped), right, "rows {a} and {b}");
    }
}

#[test]
fn long_rows_are_summed_in_cells() {
    let wide = |order| PageLayout {
        layers: 1,
        kv_heads: 2,
        head_dim: 3000,
        page_tokens: 2,
        dtype: DType::Float32,
        order,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    let handoff = Handoff {
        src_groups: vec![wide(Order::Nhd)],
        dst: side(wide(Order::Hnd), 0, 1),
        src_table: Table::one(0, &[1, 0], 2),
        dst_table: Table::one(0, &[0, 1], 2),
        tokens: 0..3,
        ..plain()
    };
    let src = noise(&handoff.source(0), &handoff.src_table, 1);
    let mut dst = noise(&handoff.dst, &handoff.dst_table, 2);
    apply(&handoff.plan(0).unwrap(), &src, &mut dst);
    for sample in [false, true] {
        let mut sliced = digest(&handoff, 0, End::Destination, sample);
        while !sliced.is_done() {
            let Ok(n) = sliced.step(1, u64::MAX, read(&dst));
            assert!(n <= CELL_BYTES, "{n} bytes in a step");
        }
        assert_eq!(sliced.value(), sum(&handoff, 0, End::Source, sample, &src));
    }
}

/// The sum is on the wire: another one here means that new agents and old ones disagree.
#[test]
fn the_sum_of_known_bytes_is_what_it_always_was() {
    let handoff = plain();
    let src = noise(&handoff.source(0), &handoff.src_table, 42);
    assert_eq!(sum(&handoff, 0, End::Source, false, &src), GOLDEN_FULL);
    assert_eq!(sum(&handoff, 0, End::Source, true, &src), GOLDEN_SAMPLE);
    assert_eq!(Sum::default().value(), 0, "nothing to sum");
}

const GOLDEN_FULL: u64 = 17_631_481_704_280_950_585;
const GOLDEN_SAMPLE: u64 = 896_942_133_373_950_338;
