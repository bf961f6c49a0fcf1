//! The field's known faults in layouts, resharding, prefixes and chunks, each as one small case.
#![allow(missing_docs, clippy::expect_used, clippy::cast_possible_truncation)]

mod plan_support;

use kvxfer_proto::layout::{
    CrossLayer, DType, Factors, Kind, LayerSplit, Order, PageLayout, Scales, Side, State, StateBlock,
};
use kvxfer_proto::plan::{Cursor, Piece, Request, Template, compatible, plan_all, sources};
use plan_support::{Handoff, Table, layout, shard, side};
use std::collections::BTreeSet;
use std::sync::Arc;

const ORDERS: [Order; 2] = [Order::Hnd, Order::Nhd];

/// Two pages on either side, all tokens, all layers.
fn two_pages(from: PageLayout, src_tp: u32, to: PageLayout, dst_rank: u32, dst_tp: u32) -> Handoff {
    Handoff {
        src_groups: vec![from],
        src_tp,
        src_pp: 1,
        dst: side(to, dst_rank, dst_tp),
        src_table: Table::one(0, &[5, 2], 8),
        dst_table: Table::one(0, &[3, 7], 8),
        tokens: 0..2 * u64::from(from.page_tokens.min(to.page_tokens)),
        layers: 0..2,
    }
}

/// Which source ranks write, by their pieces.
fn writers(h: &Handoff) -> Vec<u32> {
    (0..h.src_tp * h.src_pp).filter(|&i| !h.plan(i).expect("fits").is_empty()).collect()
}

/// Pairs of pages that pieces of region 0 join.
fn page_pairs(pieces: &[Piece], src_page: u64, dst_page: u64) -> BTreeSet<(u64, u64)> {
    let first = pieces.iter().filter(|p| p.dst_region == 0);
    first.map(|p| (p.src_off / src_page, p.dst_off / dst_page)).collect()
}

#[test]
fn case_1_replicated_heads_down() {
    for order in ORDERS {
        let l = layout(2, 4, order, Kind::Kv);
        let h = two_pages(l, 4, l, 0, 1);
        assert_eq!(h.check(u64::MAX, usize::MAX), 2);
        let writers = writers(&h);
        assert_eq!(writers.len(), 2);
        assert!(writers[0] < 2 && writers[1] >= 2, "one of P0, P1 and one of P2, P3: {writers:?}");
        let end = 8 * 2 * 4 * 4;
        for p in writers.iter().flat_map(|&w| h.plan(w).expect("fits")) {
            assert!(p.dst_off + p.len <= end);
        }
    }
}

#[test]
fn case_2_replicated_heads_up() {
    for order in ORDERS {
        let l = layout(2, 4, order, Kind::Kv);
        let mut slices = BTreeSet::new();
        for (rank, head) in [(0, 0), (1, 0), (2, 1), (3, 1)] {
            assert_eq!(shard(rank, 4).heads(&l), Ok(head..head + 1));
            let h = two_pages(l, 1, l, rank, 4);
            assert_eq!(h.check(u64::MAX, usize::MAX), 1);
            slices.insert(h.plan(0).expect("fits").iter().map(|p| p.src_off).collect::<Vec<_>>());
        }
        assert_eq!(slices.len(), 2);
    }
}

#[test]
fn case_3_order_of_a_page() {
    for (from, to) in ORDERS.into_iter().flat_map(|a| ORDERS.map(|b| (a, b))) {
        let l = |order| PageLayout { head_dim: 8, ..layout(4, 4, order, Kind::Kv) };
        assert_eq!(two_pages(l(from), 2, l(to), 0, 1).check(u64::MAX, usize::MAX), 2);
    }
}

#[test]
fn case_4_mla() {
    let l = layout(1, 4, Order::Nhd, Kind::Latent);
    for rank in 0..2 {
        assert_eq!(two_pages(l, 1, l, rank, 2).check(u64::MAX, usize::MAX), 1);
    }
    // Four pages of 32 tokens: two ranks write half of them each to either destination. The other two get null grants, so
    // that they release too.
    let l = layout(1, 32, Order::Nhd, Kind::Latent);
    let mut bytes = [0; 4];
    for rank in 0..2 {
        let mut h = two_pages(l, 4, l, rank, 2);
        h.src_table = Table::one(0, &[5, 2, 0, 7], 8);
        h.dst_table = Table::one(0, &[3, 7, 1, 4], 8);
        h.tokens = 0..128;
        assert_eq!(h.check(u64::MAX, usize::MAX), 2);
        let owed = sources(&[l], 4, 1, &h.dst).expect("fits");
        assert_eq!(owed.iter().filter(|o| o.is_none()).count(), 2);
        for (sum, index) in bytes.iter_mut().zip(0..) {
            *sum += h.plan(index).expect("fits").iter().map(|p| p.len).sum::<u64>();
        }
    }
    assert_eq!(bytes, [64 * 4 * 2; 4], "half the tokens of two layers each");
}

#[test]
fn case_5_page_sizes() {
    for order in ORDERS {
        let (big, small) = (layout(4, 32, order, Kind::Kv), layout(4, 16, order, Kind::Kv));
        assert_eq!(compatible(&side(big, 0, 2), &side(small, 0, 2)), Ok(()));
        let mut h = two_pages(big, 2, small, 1, 2);
        h.src_table = Table::one(0, &[3], 8);
        h.dst_table = Table::one(0, &[6, 1], 8);
        h.check(u64::MAX, usize::MAX);
        let (big_page, small_page) = (32 * 2 * 4, 16 * 2 * 4);
        let pairs = page_pairs(&h.plan(1).expect("fits"), big_page, small_page);
        assert_eq!(pairs, [(3, 6), (3, 1)].into());

        let mut h = two_pages(small, 2, big, 1, 2);
        h.src_table = Table::one(0, &[6, 1], 8);
        h.dst_table = Table::one(0, &[3], 8);
        h.check(u64::MAX, usize::MAX);
        let pairs = page_pairs(&h.plan(1).expect("fits"), small_page, big_page);
        assert_eq!(pairs, [(6, 3), (1, 3)].into());
    }
    let (from, to) = (layout(4, 48, Order::Hnd, Kind::Kv), layout(4, 32, Order::Nhd, Kind::Fused));
    let mut h = two_pages(from, 4, to, 0, 2);
    h.dst_table = Table::one(0, &[4, 0, 2], 8);
    h.tokens = 5..91;
    assert_eq!(h.check(1000, 7), 2);
}

#[test]
fn case_6_heads_that_do_not_divide() {
    let six = layout(6, 4, Order::Hnd, Kind::Kv);
    let e = compatible(&side(six, 0, 4), &side(six, 0, 2)).expect_err("refused");
    assert_eq!((e.field, e.ours.as_str(), e.theirs.as_str()), ("tp_size", "4", "2"));
    for number in ["6 kv_heads", "tp_size 4", "tp_size 2"] {
        assert!(e.text.contains(number), "{e}");
    }
    assert!(Template::new(&side(six, 0, 4), &side(six, 0, 2)).is_err());
    assert!(sources(&[six], 4, 1, &side(six, 0, 2)).is_err());
    assert!(side(six, 0, 4).validate().is_err());

    let h = two_pages(layout(8, 4, Order::Hnd, Kind::Kv), 4, layout(8, 4, Order::Nhd, Kind::Kv), 1, 2);
    assert_eq!(h.dst.shard.heads(&h.dst.groups[0]), Ok(4..8));
    h.check(u64::MAX, usize::MAX);
    assert_eq!(writers(&h), [2, 3]);
}

#[test]
fn case_7_scales() {
    let scales = |dim, page_stride| Some(Scales { dim, dtype: DType::Float16, page_stride });
    let from = PageLayout { scales: scales(1, Some(48)), ..layout(4, 4, Order::Hnd, Kind::Kv) };
    let to =
        PageLayout { scales: scales(1, None), page_stride: Some(80), ..layout(4, 4, Order::Nhd, Kind::Kv) };
    let h = two_pages(from, 2, to, 0, 1);
    assert_eq!(h.check(u64::MAX, usize::MAX), 2);
    // K, V, and the scales of each: a region each, and all of them are written.
    let regions: BTreeSet<u32> = h.plan(0).expect("fits").iter().map(|p| p.dst_region).collect();
    assert_eq!(regions, (0..2 * 4).collect());

    let refused =
        |a: PageLayout, b: PageLayout| compatible(&side(a, 0, 1), &side(b, 0, 1)).expect_err("refused");
    let factor = |k| PageLayout { factors: Some(Factors::new(k, 1.0)), ..from };
    let e = refused(factor(0.5), factor(1.0));
    assert_eq!((e.field, e.ours.as_str(), e.theirs.as_str()), ("k_scale", "0.5", "1"));
    assert_eq!(compatible(&side(factor(1.0), 0, 1), &side(from, 0, 1)), Ok(()), "1.0 goes without saying");
    assert_eq!(refused(factor(0.5), from).field, "k_scale");
    assert_eq!(refused(from, PageLayout { scales: None, ..to }).field, "scales");
    assert_eq!(refused(from, PageLayout { scales: scales(2, None), ..to }).field, "scales");
}

#[test]
fn case_8_partial_prefix_hit() {
    let l = layout(2, 16, Order::Hnd, Kind::Kv);
    let mut h = two_pages(l, 1, l, 0, 1);
    h.src_table = Table::one(0, &[10, 11, 12, 13, 14], 16);
    h.dst_table = Table::one(48, &[7, 9], 16);
    h.tokens = 48..80;
    h.check(u64::MAX, usize::MAX);
    let page = 16 * 2 * 4;
    assert_eq!(page_pairs(&h.plan(0).expect("fits"), page, page), [(13, 7), (14, 9)].into());
}

#[test]
fn case_9_full_prefix_hit() {
    let l = layout(2, 16, Order::Hnd, Kind::Kv);
    let both = side(l, 0, 1);
    for tokens in [0..0, 80..80] {
        let template = Arc::new(Template::new(&both, &both).expect("fits"));
        let request = Request {
            src_pages: vec![[10, 11, 12, 13, 14].into()],
            src_tokens: 0..80,
            dst_pages: vec![[].into()],
            dst_tokens: tokens.clone(),
            tokens,
            layers: 0..2,
        };
        let mut cursor = Cursor::new(template, request, &[16], &[16]).expect("nothing to hold");
        let mut out = Vec::new();
        assert!(cursor.is_done() && !cursor.fill(&mut out, u64::MAX, usize::MAX));
        assert_eq!((cursor.total_bytes(), out.len()), (0, 0));
    }
}

#[test]
fn case_10_chunked_prefill() {
    let l = layout(2, 16, Order::Hnd, Kind::Kv);
    let page = 16 * 2 * 4;
    let granted = Table::one(0, &[20, 21, 22, 30, 31, 32, 33], 40);
    let mut h = two_pages(l, 1, l, 0, 1);
    h.dst_table = granted;
    h.src_table = Table::one(0, &[9, 10, 11, 12, 13, 14, 15], 16);
    let mut pairs = BTreeSet::new();
    let mut bytes = 0;
    for tokens in [0..48, 48..96, 96..100] {
        h.tokens = tokens;
        h.check(u64::MAX, usize::MAX);
        let pieces = h.plan(0).expect("fits");
        bytes += pieces.iter().map(|p| p.len).sum::<u64>();
        pairs.extend(pieces.iter().filter(|p| p.dst_region == 0).flat_map(|p| {
            (0..p.len).map(|i| ((p.src_off + i) / page, (p.dst_off + i) / page)).collect::<BTreeSet<_>>()
        }));
    }
    // Seven pages, and after a preemption from [3, 4, 5] only the new ones.
    let want = [(9, 20), (10, 21), (11, 22), (12, 30), (13, 31), (14, 32), (15, 33)];
    assert_eq!(pairs, want.into());
    assert_eq!(bytes, 100 * 2 * 4 * 2 * 2, "tokens x heads x dim x K/V x layers");
}

#[test]
fn case_21_descriptors() {
    let l = PageLayout {
        layers: 80,
        kv_heads: 1,
        head_dim: 128,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    let both = side(l, 0, 1);
    let pieces = |src: &[u32], dst: &[u32]| {
        let request = Request {
            src_pages: vec![src.into()],
            src_tokens: 0..16 * src.len() as u64,
            dst_pages: vec![dst.into()],
            dst_tokens: 0..16 * src.len() as u64,
            tokens: 0..16 * src.len() as u64,
            layers: 0..80,
        };
        plan_all(&both, &both, request, &[256], &[256]).expect("fits")
    };
    let shuffled: Vec<u32> = (0..118).map(|i| i * 37 % 256).collect();
    let row: Vec<u32> = (100..218).collect();
    assert_eq!(pieces(&shuffled, &row).len(), 18_880);
    assert_eq!(pieces(&row, &shuffled).len(), 18_880);
    assert_eq!(pieces(&row, &row).len(), 160);
    let page = 16 * 128 * 2;
    let runs: Vec<_> = pieces(&[5, 6, 7], &[9, 10, 12])
        .into_iter()
        .filter(|p| p.src_region == 0)
        .map(|p| (p.src_off / page, p.dst_off / page, p.len / page))
        .collect();
    assert_eq!(runs, [(5, 9, 2), (7, 12, 1)]);
}

#[test]
fn case_22_big_offsets() {
    // 65,536 bytes a page. Bases are the fabric's; the planner only knows offsets.
    let l = PageLayout { head_dim: 512, ..layout(8, 16, Order::Hnd, Kind::Kv) };
    let both = side(l, 0, 1);
    for (src, dst) in [(40_000, 39_999), (1 << 25, u32::MAX - 1)] {
        let request = Request {
            src_pages: vec![[src].into()],
            src_tokens: 0..16,
            dst_pages: vec![[dst].into()],
            dst_tokens: 0..16,
            tokens: 0..16,
            layers: 0..1,
        };
        let got = plan_all(&both, &both, request, &[u32::MAX], &[u32::MAX]).expect("fits");
        let piece = |region| Piece {
            src_region: region,
            src_off: u64::from(src) * 65_536,
            dst_region: region,
            dst_off: u64::from(dst) * 65_536,
            len: 65_536,
        };
        assert_eq!(got, [piece(0), piece(1)]);
    }
}

#[test]
fn replicas_share_the_work() {
    // 2 heads: on 8 source ranks 4 replicas each; 8 destination ranks keep all of them busy, as do latents.
    for kind in [Kind::Kv, Kind::Latent] {
        let l = layout(2, 4, Order::Hnd, kind);
        let mut busy = BTreeSet::new();
        for rank in 0..8 {
            let h = two_pages(l, 8, l, rank, 8);
            assert_eq!(h.check(u64::MAX, usize::MAX), 1);
            busy.extend(writers(&h));
        }
        assert_eq!(busy.len(), 8);
    }
    // Destination pipeline stages choose other replicas too.
    let l = layout(2, 4, Order::Hnd, Kind::Latent);
    let mut busy = BTreeSet::new();
    for pp_rank in 0..2 {
        let mut h = two_pages(l, 2, l, 0, 1);
        h.dst.shard.pp_rank = pp_rank;
        h.dst.shard.pp_size = 2;
        h.check(u64::MAX, usize::MAX);
        busy.extend(writers(&h));
    }
    assert_eq!(busy.len(), 2);
}

/// Every number of replicas on either side: each destination is written whole, and no source writes more than one block
/// of tokens (of each destination) above another.
#[test]
fn replicas_write_equally_much() {
    for (src_tp, dst_tp) in [(8, 1), (1, 8), (8, 2), (2, 8), (6, 4), (4, 6), (8, 3), (3, 1)] {
        for (heads, kind) in [(1, Kind::Latent), (1, Kind::Kv)] {
            let l = PageLayout { layers: 1, head_dim: 1, ..layout(heads, 16, Order::Hnd, kind) };
            let pages: Vec<u32> = (0..128).collect();
            let mut bytes = vec![0; src_tp as usize];
            for rank in 0..dst_tp {
                let mut h = two_pages(l, src_tp, l, rank, dst_tp);
                (h.src_table, h.dst_table) = (Table::one(0, &pages, 128), Table::one(0, &pages, 128));
                h.tokens = 5..2000;
                h.layers = 0..1;
                h.check(u64::MAX, usize::MAX);
                for (sum, index) in bytes.iter_mut().zip(0..) {
                    *sum += h.plan(index).expect("fits").iter().map(|p| p.len).sum::<u64>();
                }
            }
            let (least, most) = (bytes.iter().min().expect("some"), bytes.iter().max().expect("some"));
            let block = 64 * u64::from(kind.tensors());
            assert!(most - least <= block * u64::from(dst_tp), "{src_tp} to {dst_tp}: {bytes:?}");
        }
    }
}

#[test]
fn replicas_share_the_layers_of_a_state() {
    let block = StateBlock { part: 0, units: 2, unit_bytes: 3, rows: 1 };
    let l = PageLayout { layers: 8, kind: Kind::State, state: State::new(&[block]), ..PageLayout::PLAIN };
    let mut h = two_pages(l, 8, l, 0, 1);
    h.layers = 0..8;
    (h.src_table.end, h.dst_table.end) = (2, 2);
    assert_eq!(h.check(u64::MAX, usize::MAX), 8);
    let owed = sources(&[l], 8, 1, &h.dst).expect("fits");
    assert_eq!(owed.iter().flatten().map(|r| r.len()).collect::<Vec<_>>(), [2; 8]);
}

#[test]
fn a_start_within_a_page_leaves_its_page_alone_before_it() {
    let l = layout(2, 16, Order::Nhd, Kind::Kv);
    let mut h = two_pages(l, 1, l, 0, 1);
    h.src_table = Table::one(20, &[4, 5], 8);
    h.dst_table = Table::one(23, &[1, 0], 8);
    h.tokens = 23..40;
    h.check(u64::MAX, usize::MAX);
    h.tokens = 22..40;
    let e = h.plan(0).expect_err("token 22 is not granted");
    assert!(e.0.contains("destination page list of group 0 starts at token 23, after token 22"), "{e}");
    h.tokens = 23..49;
    let e = h.plan(0).expect_err("no third page");
    assert!(e.0.contains("source page list of group 0 has 2 pages") && e.0.contains("need 3"), "{e}");
    h.tokens = 23..40;
    h.dst_table.count = vec![1];
    let e = h.plan(0).expect_err("page 1 of 1");
    assert!(e.0.contains("destination page 1 of group 0 is out of range: the group has 1 pages"), "{e}");
}

#[test]
fn neighbours_in_different_regions_are_not_joined() {
    // K ends on one side at the very offset where V begins, in another region.
    let (apart, together) = (layout(2, 2, Order::Hnd, Kind::Kv), layout(2, 4, Order::Nhd, Kind::Fused));
    for order in ORDERS {
        let apart = PageLayout { order, ..apart };
        let together = PageLayout { order, kv_heads: 2, ..together };
        for (from, to, src_pages, dst_pages) in
            [(apart, together, &[1, 0][..], &[0][..]), (together, apart, &[0][..], &[1, 0][..])]
        {
            let mut h = two_pages(from, 2, to, 1, 2);
            h.src_table = Table::one(0, src_pages, 2);
            h.dst_table = Table::one(0, dst_pages, 2);
            h.check(u64::MAX, usize::MAX);
            assert_eq!(h.plan(1).expect("fits").len(), 2 * 2 * 2, "layers x K/V x pages");
        }
    }
}

#[test]
fn requests_at_the_end_of_numbers_are_refused() {
    let l = layout(2, 16, Order::Nhd, Kind::Kv);
    let both = side(l, 0, 1);
    let request = |start: u64, tokens, groups: usize| Request {
        src_pages: vec![[1].into(); groups],
        src_tokens: start..u64::MAX,
        dst_pages: vec![[1].into(); groups],
        dst_tokens: start..u64::MAX,
        tokens,
        layers: 0..u32::MAX,
    };
    let plan = |r| plan_all(&both, &both, r, &[8], &[8]);
    assert!(plan(request(0, 0..u64::MAX, 1)).is_err());
    assert!(plan(request(u64::MAX - 1, 0..1, 1)).is_err());
    assert_eq!(plan(request(u64::MAX - 1, u64::MAX - 1..u64::MAX, 1)).map(|p| p.len()), Ok(4));
    #[expect(clippy::reversed_empty_ranges)]
    let backwards = 5..3;
    assert!(plan(request(0, backwards, 1)).is_err());
    assert!(plan(request(0, 0..1, 2)).is_err());
}

#[test]
fn a_group_with_other_heads_and_pages_goes_along() {
    let groups = vec![
        layout(8, 4, Order::Hnd, Kind::Kv),
        PageLayout { layers: 3, ..layout(1, 2, Order::Nhd, Kind::Latent) },
    ];
    let h = Handoff {
        src_groups: groups.clone(),
        src_tp: 2,
        src_pp: 3,
        dst: Side { groups, shard: shard(1, 4) },
        src_table: Table { start: 0, end: 7, pages: vec![vec![3, 1], vec![0, 5, 2, 7]], count: vec![8, 9] },
        dst_table: Table { start: 0, end: 7, pages: vec![vec![2, 6], vec![8, 1, 3, 0]], count: vec![7, 9] },
        tokens: 1..7,
        layers: 0..3,
    };
    h.check(9, 3);
    let owed = sources(&h.src_groups, 2, 3, &h.dst).expect("fits");
    // Heads 2..4 are on tensor-parallel rank 0, the latent comes from rank 1; layers 2 + 3 over three stages.
    assert_eq!(owed, [Some(0..1), Some(0..1), Some(1..2), Some(1..2), None, Some(2..3)]);
}

#[test]
fn what_cannot_be_done_is_refused_with_its_numbers() {
    let l = layout(4, 4, Order::Hnd, Kind::Kv);
    let block = |units| State::new(&[StateBlock { part: 0, units, unit_bytes: 4, rows: 1 }]);
    let state = |units| PageLayout { kind: Kind::State, state: block(units), page_tokens: 1, ..l };
    let window = |n| PageLayout { window: Some(n), ..l };
    let split = |counts: &[u32]| PageLayout { split: LayerSplit::new(counts), ..l };
    let cross = |layer_stride| PageLayout { cross: Some(CrossLayer { layer_stride }), ..l };
    // A page of a rank's K takes 4 tokens x 4 heads x 4 bytes.
    for (from, src_tp, to, dst_tp, words) in [
        (
            window(8),
            1,
            window(16),
            1,
            "window of group 0 differs: source has 8 tokens, destination has 16 tokens",
        ),
        (window(8), 1, l, 1, "destination has none"),
        (state(4), 1, state(8), 1, "state block of group 0 differs: source has 4 units of 4 bytes in 1 rows"),
        (state(6), 4, state(6), 1, "6 units of the state of group 0 cannot go from tp_size 4"),
        (state(4), 1, l, 1, "kind of group 0 differs: source has state, destination has kv"),
        (split(&[1, 1]), 1, l, 1, "source: group 0: pp_layers names 2 pipeline ranks, but pp_size is 1"),
        (split(&[1, 2]), 1, l, 1, "source: group 0: pp_layers add up to 3, but the group has 2 layers"),
        (
            PageLayout { page_stride: Some(63), ..l },
            1,
            l,
            1,
            "page_stride_bytes is 63, but a page of part k takes 64",
        ),
        (l, 1, PageLayout { page_stride: Some(63), ..l }, 2, ""),
        (
            l,
            1,
            cross(Some(40)),
            1,
            "destination: group 0: layer_stride_bytes is 40, but a layer's page of part k takes 64",
        ),
        (PageLayout { dtype: DType::Uint4, head_dim: 3, ..l }, 1, l, 1, "head_dim"),
    ] {
        let fits = compatible(&side(from, 0, src_tp), &side(to, 0, dst_tp));
        assert_eq!(fits.is_ok(), words.is_empty(), "{words}");
        if let Err(e) = fits {
            assert!(e.text.contains(words), "{e}");
        }
    }
}

/// The directory shows the first rank's layout, whose pages may be smaller than another's.
#[test]
fn what_ranks_owe_does_not_depend_on_their_strides() {
    let l = PageLayout {
        layers: 3,
        split: LayerSplit::new(&[1, 2]),
        cross: Some(CrossLayer { layer_stride: None }),
        page_stride: Some(64),
        ..layout(4, 4, Order::Hnd, Kind::Kv)
    };
    let dst = side(PageLayout { split: None, cross: None, ..l }, 0, 1);
    assert_eq!(sources(&[l], 1, 2, &dst), Ok(vec![Some(0..1), Some(1..3)]));
}

/// All layers of both sides in one page, alike: a page is one write, and contiguous ones together.
#[test]
fn pages_of_all_layers_are_one_write() {
    let l = PageLayout {
        cross: Some(CrossLayer { layer_stride: None }),
        layers: 8,
        ..layout(4, 4, Order::Hnd, Kind::Fused)
    };
    let mut h = two_pages(l, 1, l, 0, 1);
    h.layers = 0..8;
    assert_eq!(h.check(u64::MAX, usize::MAX), 1);
    assert_eq!(h.plan(0).expect("fits").len(), 2);
    h.dst_table = Table::one(0, &[3, 4], 8);
    h.src_table = Table::one(0, &[5, 6], 8);
    assert_eq!(h.plan(0).expect("fits").len(), 1);
    h.layers = 2..5;
    h.check(u64::MAX, usize::MAX);
    assert_eq!(h.plan(0).expect("fits").len(), 2);
}

/// A state whose bytes are all on one rank of each side is one write a region, with all its blocks.
#[test]
fn a_state_that_nobody_cuts_is_one_write() {
    let block = |units, rows| StateBlock { part: 0, units, unit_bytes: 4, rows };
    let blocks = [block(8, 3), block(2, 3), block(2, 3), block(8, 1)];
    let l = PageLayout { layers: 2, kind: Kind::State, state: State::new(&blocks), ..PageLayout::PLAIN };
    for (tp, writes) in [(1, 2), (2, 2)] {
        let mut h = two_pages(l, tp, l, 0, tp);
        (h.src_table.end, h.dst_table.end, h.tokens) = (9, 9, 0..9);
        h.check(u64::MAX, usize::MAX);
        assert_eq!(h.plan(0).expect("fits").len(), writes);
    }
    // Cut apart: three rows of x, of B and C together or apart, and the rest.
    let mut h = two_pages(l, 2, l, 0, 1);
    (h.src_table.end, h.dst_table.end, h.tokens) = (9, 9, 0..9);
    h.check(u64::MAX, usize::MAX);
    assert_eq!(h.plan(0).expect("fits").len(), 2 * (3 * 3 + 1));
}
