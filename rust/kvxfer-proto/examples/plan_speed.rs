//! Nanoseconds a piece: 2,000 tokens of one TP8 rank's share to a TP4 rank, 64 layers, shuffled pages; HND on both
//! sides, then HND to NHD, where each token is a piece.
#![allow(clippy::print_stdout, clippy::expect_used, missing_docs)]

use kvxfer_proto::layout::{DType, Kind, Order, PageLayout, Shard, Side};
use kvxfer_proto::plan::{Cursor, Request, Template};
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

fn main() {
    measure(Order::Hnd);
    measure(Order::Nhd);
}

fn measure(order: Order) {
    let layout = PageLayout {
        layers: 64,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    let side =
        |tp_size| Side { groups: vec![layout], shard: Shard { tp_rank: 1, tp_size, pp_rank: 0, pp_size: 1 } };
    let mut dst = side(4);
    dst.shard.tp_rank = 0;
    dst.groups[0].order = order;
    let template = Arc::new(Template::new(&side(8), &dst).expect("sides fit"));
    let shuffled = |by: u32| (0..125).map(|i| i * by % 512).collect::<Arc<[u32]>>();
    let request = Request {
        src_pages: vec![shuffled(37)],
        src_tokens: 0..2000,
        dst_pages: vec![shuffled(91)],
        dst_tokens: 0..2000,
        tokens: 0..2000,
        layers: 0..64,
    };
    let (mut out, mut best, mut best_slices, mut best_new) = (Vec::new(), f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..100 {
        out.clear();
        let start = Instant::now();
        let mut cursor =
            Cursor::new(Arc::clone(&template), request.clone(), &[512], &[512]).expect("pages fit");
        let made = start.elapsed().as_secs_f64();
        let mut sliced = cursor.clone();
        while cursor.fill(&mut out, u64::MAX, usize::MAX) {}
        best = best.min(start.elapsed().as_secs_f64() / out.len() as f64);
        best_new = best_new.min(made);
        black_box(&out);
        let (mut pieces, mut slice) = (0, Vec::with_capacity(1024));
        let start = Instant::now();
        while {
            slice.clear();
            let more = sliced.fill(&mut slice, 1 << 20, 1024);
            pieces += black_box(&slice).len();
            more
        } {}
        best_slices = best_slices.min(start.elapsed().as_secs_f64() / pieces as f64);
    }
    println!(
        "HND to {order:?}: {} pieces: {:.2} ns a piece in one fill with its cursor (cursor {:.2} us), {:.2} ns in slices of 1 MiB",
        out.len(),
        best * 1e9,
        best_new * 1e6,
        best_slices * 1e9
    );
}
