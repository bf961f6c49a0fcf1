//! The order in which a plan gives its pieces, and where packed slices are cut, are part of what two agents agree on: what
//! one packs, the other unpacks by its own plan. Whoever changes a line of [`GOLDEN`] raises [`kvxfer_proto::plan::ORDER`]
//! with it; then agents of different orders pack nothing for each other.

#![allow(clippy::unwrap_used)]

use kvxfer_proto::plan::{Cursor, ORDER, PACKED_PIECES, Request, Template};
use kvxfer_proto::{DType, Kind, Order, PageLayout, Shard, Side};
use std::fmt::Write as _;
use std::sync::Arc;

const GOLDEN: &str = include_str!("plan_order.txt");

const TOKENS: u64 = 200;

fn side(order: Order, kind: Kind, page_tokens: u32, dtype: DType, tp: (u32, u32), pp: (u32, u32)) -> Side {
    let latent = kind == Kind::Latent;
    let layout = PageLayout {
        layers: 4,
        kv_heads: if latent { 1 } else { 4 },
        head_dim: 16,
        page_tokens,
        dtype,
        order,
        kind,
        ..PageLayout::PLAIN
    };
    Side { groups: vec![layout], shard: Shard { tp_rank: tp.0, tp_size: tp.1, pp_rank: pp.0, pp_size: pp.1 } }
}

/// Pages in an order of their own: what lies side by side is never joined by luck.
fn pages(side: &Side, step: u32) -> (Vec<Arc<[u32]>>, Vec<u32>) {
    let size = side.groups[0].page_tokens;
    let need = u32::try_from(TOKENS).unwrap().div_ceil(size);
    let count = need * 3 + 1;
    let list = (0..need).map(|n| n * step % count).collect();
    (vec![list], vec![count])
}

/// FNV-1a of every piece, and of where each slice ends.
fn digest(src: &Side, dst: &Side, slice_bytes: u64) -> (u64, usize, usize) {
    let template = Arc::new(Template::new(src, dst).unwrap());
    let ((src_pages, src_counts), (dst_pages, dst_counts)) = (pages(src, 2), pages(dst, 3));
    let request = Request {
        src_pages,
        src_tokens: 0..TOKENS,
        dst_pages,
        dst_tokens: 0..TOKENS,
        tokens: 3..TOKENS - 5,
        layers: 0..4,
    };
    let mut cursor = Cursor::new(template, request, &src_counts, &dst_counts).unwrap();
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    let mut eat = |n: u64| {
        for byte in n.to_le_bytes() {
            hash = (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3);
        }
    };
    let (mut all, mut slices) = (0, 0);
    loop {
        let mut out = Vec::new();
        let more = cursor.fill(&mut out, slice_bytes, PACKED_PIECES);
        for p in &out {
            for n in [u64::from(p.src_region), p.src_off, u64::from(p.dst_region), p.dst_off, p.len] {
                eat(n);
            }
        }
        eat(u64::MAX);
        all += out.len();
        slices += 1;
        if !more {
            return (hash, all, slices);
        }
    }
}

#[test]
fn plans_give_their_pieces_in_the_order_that_has_this_number() {
    use DType::{Bfloat16, Uint8};
    use Kind::{Fused, Kv, Latent};
    use Order::{Hnd, Nhd};
    let (one, all) = ((0, 1), (0, 1));
    let pairs = [
        ("nhd 2 to 1", side(Nhd, Kv, 16, Bfloat16, (1, 2), all), side(Nhd, Kv, 16, Bfloat16, one, all)),
        ("nhd 1 to 2", side(Nhd, Kv, 16, Bfloat16, one, all), side(Nhd, Kv, 16, Bfloat16, (1, 2), all)),
        ("hnd 4 to 2", side(Hnd, Kv, 16, Bfloat16, (3, 4), all), side(Hnd, Kv, 16, Bfloat16, (1, 2), all)),
        ("nhd to hnd", side(Nhd, Kv, 16, Bfloat16, one, all), side(Hnd, Kv, 16, Bfloat16, one, all)),
        ("fused to kv", side(Hnd, Fused, 8, Bfloat16, one, all), side(Nhd, Kv, 8, Bfloat16, one, all)),
        (
            "fused pages 48 to 32",
            side(Nhd, Fused, 48, Uint8, one, all),
            side(Nhd, Fused, 32, Uint8, one, all),
        ),
        (
            "latent pp 2 to 1",
            side(Nhd, Latent, 16, Uint8, one, (1, 2)),
            side(Nhd, Latent, 8, Uint8, one, all),
        ),
        ("bytes apart", side(Hnd, Kv, 4, Uint8, one, all), side(Nhd, Kv, 16, Uint8, (1, 4), all)),
    ];
    let mut found = format!("order {ORDER}\n");
    for (name, src, dst) in &pairs {
        for slice_bytes in [1000, 4096, 1 << 18] {
            let (hash, pieces, slices) = digest(src, dst, slice_bytes);
            writeln!(found, "{name}, slices of {slice_bytes}: {hash:016x} {pieces} pieces {slices} slices")
                .unwrap();
        }
    }
    assert_eq!(found, GOLDEN, "raise plan::ORDER, and put this in:\n{found}");
}
