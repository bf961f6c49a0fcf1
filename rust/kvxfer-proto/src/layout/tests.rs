//! Sizes, splits and regions.

use super::*;

fn layout(kind: Kind) -> PageLayout {
    PageLayout {
        layers: 10,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind,
        ..PageLayout::PLAIN
    }
}

fn shard(tp_rank: u32, tp_size: u32, pp_rank: u32, pp_size: u32) -> Shard {
    Shard { tp_rank, tp_size, pp_rank, pp_size }
}

#[test]
fn dtypes_go_by_name_and_number() {
    for n in 0..=255 {
        if let Some(t) = DType::from_wire(n) {
            assert_eq!(t as u8, n);
            assert_eq!(DType::from_name(t.name()), Some(t));
            assert_eq!(DType::from_name(&format!("torch.{}", t.name())), Some(t));
        }
    }
    assert_eq!((0..=255).filter_map(DType::from_wire).count(), 11);
    for (name, t) in [
        ("torch.bfloat16", DType::Bfloat16),
        ("bf16", DType::Bfloat16),
        ("fp16", DType::Float16),
        ("half", DType::Float16),
        ("torch.float8_e4m3fn", DType::Float8E4m3),
    ] {
        assert_eq!(DType::from_name(name), Some(t));
    }
    assert_eq!(DType::from_name("float64"), None);
    let bytes = [DType::Float32, DType::Float16, DType::Float8E5m2, DType::Uint4].map(|t| t.bytes_of(6));
    assert_eq!(bytes, [24, 12, 6, 3]);
}

#[test]
fn sizes_are_capped() {
    assert_eq!(layout(Kind::Kv).validate(), Ok(()));
    for zero in [
        PageLayout { layers: 0, ..layout(Kind::Kv) },
        PageLayout { kv_heads: 0, ..layout(Kind::Kv) },
        PageLayout { head_dim: 0, ..layout(Kind::Kv) },
        PageLayout { page_tokens: 0, ..layout(Kind::Kv) },
    ] {
        assert!(zero.validate().is_err_and(|e| e.0.contains("is 0")));
    }
    // 2^31 bytes a page, then twice that because it is fused, then past 2^64.
    let big = PageLayout { page_tokens: 1 << 20, ..layout(Kind::Kv) };
    assert_eq!(big.validate(), Ok(()));
    assert!(PageLayout { kind: Kind::Fused, ..big }.validate().is_err());
    let most = PageLayout { kv_heads: u32::MAX, head_dim: u32::MAX, page_tokens: u32::MAX, ..big };
    assert!(most.validate().is_err_and(|e| e.0.contains("larger than")));
    assert!(PageLayout { layers: MAX_LAYERS + 1, ..big }.validate().is_err());
}

#[test]
fn ranks_are_checked() {
    assert_eq!(shard(3, 4, 1, 2).validate(), Ok(()));
    assert_eq!(shard(3, 4, 1, 2).index(), 7);
    for bad in [shard(4, 4, 0, 1), shard(0, 0, 0, 1), shard(0, 1, 2, 2), shard(0, 1, 0, 0)] {
        assert!(bad.validate().is_err());
    }
    assert!(shard(0, 1 << 16, 0, 1 << 16).validate().is_err());
}

#[test]
fn the_first_stages_hold_one_layer_more() {
    let l = layout(Kind::Kv);
    let split = |size| (0..size).map(|r| shard(0, 1, r, size).layers(&l)).collect::<Vec<_>>();
    assert_eq!(split(4), [0..3, 3..6, 6..8, 8..10]);
    assert_eq!(split(2), [0..5, 5..10]);
    assert!(split(16).iter().skip(10).all(Range::is_empty));
    assert_eq!(split(16)[9], 9..10);
}

#[test]
fn heads_are_split_or_replicated() {
    let l = |kv_heads| PageLayout { kv_heads, ..layout(Kind::Kv) };
    let heads = |kv_heads, tp| (0..tp).map(|r| shard(r, tp, 0, 1).heads(&l(kv_heads))).collect::<Vec<_>>();
    assert_eq!(heads(8, 2), [Ok(0..4), Ok(4..8)]);
    assert_eq!(heads(2, 4), [Ok(0..1), Ok(0..1), Ok(1..2), Ok(1..2)]);
    let e = shard(0, 4, 0, 1).heads(&l(6)).expect_err("4 does not divide 6");
    assert!(e.0.contains("6 KV heads") && e.0.contains("4 tensor-parallel"), "{e}");
    assert_eq!(shard(5, 7, 0, 1).heads(&layout(Kind::Latent)), Ok(0..1));
}

#[test]
fn regions_are_listed_by_group_layer_part() {
    let side = Side {
        groups: vec![layout(Kind::Kv), layout(Kind::Fused), layout(Kind::Latent)],
        shard: shard(1, 4, 1, 5),
    };
    let regions = side.regions(&[3, 2, 1]).expect("valid");
    let page = 16 * 128 * 2;
    let ids: Vec<_> = regions.iter().map(|r| (r.group, r.layer, r.part, r.len)).collect();
    let half = 2 * page;
    assert_eq!(
        ids,
        [
            (0, 2, 0, 3 * half),
            (0, 2, 1, 3 * half),
            (0, 3, 0, 3 * half),
            (0, 3, 1, 3 * half),
            (1, 2, 0, 2 * 2 * half),
            (1, 3, 0, 2 * 2 * half),
            (2, 2, 0, page),
            (2, 3, 0, page),
        ]
    );
    assert_eq!(side.region_index(1, 3, 0), Some(5));
    for (group, layer, part) in [(0, 1, 0), (0, 4, 0), (0, 2, 2), (1, 2, 1), (3, 2, 0)] {
        assert_eq!(side.region_index(group, layer, part), None);
    }
    assert!(side.regions(&[3, 2]).is_err());
    let labels: Vec<_> = regions.iter().map(|r| side.groups[r.group as usize].parts_label(r.part)).collect();
    assert_eq!(labels, ["k", "v", "k", "v", "kv", "kv", "latent", "latent"]);
}

#[test]
fn strides_past_64_bits_are_refused_and_overflow_nothing() {
    for layers in [2, 4, 4096] {
        for stride in [u64::MAX, u64::MAX - 1, u64::MAX / 2, 1 << 62] {
            let layout = PageLayout {
                layers,
                cross: Some(CrossLayer { layer_stride: Some(stride) }),
                ..layout(Kind::Kv)
            };
            let shard = Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 };
            let page = part_page(&layout, &shard, 0);
            assert!(page.is_err(), "{layers} layers, {stride}: {page:?}");
        }
    }
}
