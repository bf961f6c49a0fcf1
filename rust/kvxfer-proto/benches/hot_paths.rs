//! What the transfer thread does for each hand-off: planning its writes, and encoding and decoding its frames.
//!
//! `cargo bench -p kvxfer-proto --bench hot_paths`
#![allow(clippy::unwrap_used, missing_docs)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use kvxfer_proto::layout::{DType, Kind, Order, PageLayout, Shard, Side};
use kvxfer_proto::msg::{Frame, Grant, Msg, Owed, Verify};
use kvxfer_proto::plan::{Cursor, Request, Template};
use kvxfer_proto::wire::{self, Decoder};
use kvxfer_proto::{Incarnation, Room, Seq, SessionNo};
use std::hint::black_box;
use std::sync::Arc;

/// Pages of 2,000 tokens.
const PAGES: u32 = 125;
const POOL: u32 = 512;
/// What the scheduler asks for by default.
const SLICE_BYTES: u64 = 256 << 10;
const SLICE_PIECES: usize = 1024;

fn side(tp_rank: u32, tp_size: u32, order: Order) -> Side {
    let layout = PageLayout {
        layers: 64,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    Side { groups: vec![layout], shard: Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 } }
}

/// Odd steps around a pool of a power of two: each page once, no two that follow each other neighbours.
fn shuffled(step: u32) -> Arc<[u32]> {
    (0..PAGES).map(|i| i * step % POOL).collect()
}

fn plan(c: &mut Criterion) {
    let request = |src_pages, dst_pages| Request {
        src_pages: vec![src_pages],
        src_tokens: 0..2000,
        dst_pages: vec![dst_pages],
        dst_tokens: 0..2000,
        tokens: 0..2000,
        layers: 0..64,
    };
    let straight = || (0..PAGES).collect::<Arc<[u32]>>();
    let (from, to) = (side(1, 8, Order::Hnd), side(1, 8, Order::Hnd));
    let (up, nhd) = (side(0, 4, Order::Hnd), side(0, 4, Order::Nhd));
    let cases = [
        ("shuffled", &to, request(shuffled(37), shuffled(91))),
        ("contiguous", &to, request(straight(), straight())),
        ("shuffled, TP8 to TP4", &up, request(shuffled(37), shuffled(91))),
        ("shuffled, TP8 to TP4, HND to NHD", &nhd, request(shuffled(37), shuffled(91))),
    ];
    let mut group = c.benchmark_group("plan 2000 tokens");
    for (name, to, request) in cases {
        let template = Arc::new(Template::new(&from, to).unwrap());
        let cursor = || Cursor::new(Arc::clone(&template), request.clone(), &[POOL], &[POOL]).unwrap();
        let mut slice = Vec::with_capacity(SLICE_PIECES);
        group.throughput(Throughput::Elements(cursor().runs()));
        group.bench_function(name, |b| {
            b.iter(|| {
                let mut cursor = cursor();
                loop {
                    slice.clear();
                    let more = cursor.fill(&mut slice, SLICE_BYTES, SLICE_PIECES);
                    black_box(&slice);
                    if !more {
                        break;
                    }
                }
            });
        });
    }
    group.finish();
    c.bench_function("template TP8 to TP4", |b| {
        b.iter(|| Template::new(black_box(&from), black_box(&up)).unwrap());
    });
}

fn codec(c: &mut Criterion) {
    let grant = Grant {
        room: Room::new(7).unwrap(),
        seq: Seq(3),
        tokens: (0, 2000),
        owed: Some(Owed { layers: (0, 64), tokens: (0, 2000) }),
        pages: vec![shuffled(91)],
        ranks: 1,
        verify: Verify::Off,
        deadline_us: 300_000_000,
        credits: 0,
    };
    let frame =
        Frame { incarnation: Incarnation(5), session: SessionNo(1), number: 9, msg: Msg::Grant(grant) };
    let mut bytes = Vec::new();
    wire::encode(&frame, &mut bytes).unwrap();
    let mut group = c.benchmark_group("grant of 125 pages");
    group.throughput(Throughput::Bytes(bytes.len() as u64));
    let mut out = Vec::with_capacity(bytes.len());
    group.bench_function("encode", |b| {
        b.iter(|| {
            out.clear();
            wire::encode(black_box(&frame), &mut out).unwrap();
            black_box(&out);
        });
    });
    let mut decoder = Decoder::new();
    group.bench_function("decode", |b| {
        b.iter(|| {
            decoder.feed(black_box(&bytes));
            decoder.next_frame().unwrap().unwrap()
        });
    });
    group.finish();
}

criterion_group!(benches, plan, codec);
criterion_main!(benches);
