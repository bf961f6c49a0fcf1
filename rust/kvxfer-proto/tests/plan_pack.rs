//! Slices of real plans, packed and unpacked.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::cast_possible_truncation)]

mod plan_support;

use kvxfer_proto::layout::{DType, Kind, Order, PageLayout};
use kvxfer_proto::plan::pack::{Span, Stripes, Table};
use kvxfer_proto::plan::{Cursor, Piece, Request, Template};
use plan_support::draw::handoff;
use proptest::prelude::*;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// Regions that hold the pieces, one after the other, as offsets into one buffer; and its size.
fn regions(places: &(impl Iterator<Item = (u32, u64)> + Clone)) -> (Vec<Span>, usize) {
    let count = places.clone().map(|(region, _)| region + 1).max().unwrap_or(0);
    let mut addr = 0;
    let spans = (0..count).map(|region| {
        let len = places.clone().filter(|(r, _)| *r == region).map(|(_, end)| end).max().unwrap_or(0);
        let span = Span { addr, len };
        addr += len;
        span
    });
    let spans = spans.collect();
    (spans, addr as usize)
}

/// Cuts pieces into slices that a slot holds.
fn slices(pieces: &[Piece], slot_bytes: u64) -> Vec<Vec<Piece>> {
    let (mut out, mut room) = (vec![Vec::new()], slot_bytes);
    for piece in pieces {
        let mut rest = *piece;
        while rest.len > 0 {
            if room == 0 {
                out.push(Vec::new());
                room = slot_bytes;
            }
            let len = rest.len.min(room);
            out.last_mut().unwrap().push(Piece { len, ..rest });
            rest = Piece {
                src_off: rest.src_off + len,
                dst_off: rest.dst_off + len,
                len: rest.len - len,
                ..rest
            };
            room -= len;
        }
    }
    out
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn what_is_packed_and_unpacked_lies_where_the_plan_says(
        handoff in handoff(false),
        slot_bytes in prop_oneof![1..64_u64, 64..4096_u64],
    ) {
        for index in 0..handoff.src_tp * handoff.src_pp {
            let pieces = handoff.plan(index).unwrap();
            let (src, src_bytes) = regions(&pieces.iter().map(|p| (p.src_region, p.src_off + p.len)));
            let (dst, dst_bytes) = regions(&pieces.iter().map(|p| (p.dst_region, p.dst_off + p.len)));
            let from: Vec<u8> = (0..src_bytes).map(|n| (n % 251) as u8 + 1).collect();
            let mut want = vec![0; dst_bytes];
            for p in &pieces {
                let a = (src[p.src_region as usize].addr + p.src_off) as usize;
                let b = (dst[p.dst_region as usize].addr + p.dst_off) as usize;
                want[b..b + p.len as usize].copy_from_slice(&from[a..a + p.len as usize]);
            }
            let slot = Span { addr: 0, len: slot_bytes };
            let (mut got, mut stripes) = (vec![0; dst_bytes], Stripes::new());
            for slice in slices(&pieces, slot_bytes) {
                let mut packed = vec![0; slot_bytes as usize];
                stripes.pack(&slice, &src, slot).unwrap();
                stripes.apply(&from, &mut packed).unwrap();
                let bytes = stripes.bytes();
                stripes.unpack(&slice, slot, &dst).unwrap();
                prop_assert_eq!(stripes.bytes(), bytes);
                stripes.apply(&packed, &mut got).unwrap();
            }
            prop_assert!(got == want);
            let mut got = vec![0; dst_bytes];
            stripes.direct(&pieces, &src, &dst).unwrap();
            stripes.apply(&from, &mut got).unwrap();
            prop_assert!(got == want);
        }
    }
}

/// One rank of Qwen3-32B at TP8 hands 2,000 tokens to one at TP4, NHD: a run a token. Prints what packing costs here.
#[test]
#[ignore = "measures: cargo test --release -p kvxfer-proto --test plan_pack -- --ignored --nocapture measure"]
fn measure() {
    let layout = PageLayout {
        layers: 64,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Nhd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    let (src, dst) = (plan_support::side(layout, 2, 8), plan_support::side(layout, 1, 4));
    // Every other page, backwards: no two pages touch.
    let pages: Arc<[u32]> = (0..125).rev().map(|n| 2 * n).collect();
    let request = Request {
        src_pages: vec![pages.clone()],
        src_tokens: 0..2000,
        dst_pages: vec![pages],
        dst_tokens: 0..2000,
        tokens: 0..2000,
        layers: 0..64,
    };
    let template = Arc::new(Template::new(&src, &dst).unwrap());
    let cursor = Cursor::new(template, request, &[250], &[250]).unwrap();
    let page = 16 * 256;
    let spans =
        |page: u64| (0..128).map(|n| Span { addr: n * 250 * page, len: 250 * page }).collect::<Vec<_>>();
    let (src_spans, dst_spans) = (spans(page), spans(2 * page));
    let src = vec![7_u8; (128 * 250 * page) as usize];
    let mut dst = vec![1_u8; (128 * 250 * 2 * page) as usize];
    let slot = Span { addr: 0, len: 1 << 20 };
    let mut slot_memory = vec![1_u8; slot.len as usize];
    let (mut stripes, mut table, mut words, mut pieces) =
        (Stripes::new(), Table::default(), Vec::new(), Vec::new());
    let mut best = [f64::MAX; 6];
    let (mut count, mut entries, mut table_bytes) = (0, 0, 0);
    for _ in 0..20 {
        (count, entries, table_bytes) = (0, 0, 0);
        let mut cursor = cursor.clone();
        let mut spent = [0.0; 6];
        let [plan, build, pack, unpack, tabled, plain] = &mut spent;
        loop {
            let mut at = Instant::now();
            let mut lap = |total: &mut f64| {
                *total += at.elapsed().as_secs_f64();
                at = Instant::now();
            };
            pieces.clear();
            let more = cursor.fill(&mut pieces, slot.len, usize::MAX);
            lap(plan);
            count += pieces.len();
            stripes.pack(&pieces, &src_spans, slot).unwrap();
            lap(build);
            stripes.apply(black_box(&src), &mut slot_memory).unwrap();
            black_box(&mut slot_memory);
            lap(pack);
            stripes.unpack(&pieces, slot, &dst_spans).unwrap();
            lap(build);
            stripes.apply(&slot_memory, &mut dst).unwrap();
            black_box(&mut dst);
            lap(unpack);
            table.fill(stripes.list());
            words.clear();
            table.encode(&mut words);
            black_box(&mut words);
            lap(tabled);
            entries += table.stripes().len();
            table_bytes += words.len();
            let bytes = stripes.bytes() as usize;
            let whole = slot.len as usize;
            // Elsewhere than what was packed, so that neither has its source in a cache.
            let from = (count * 256 + src.len() / 2) % (src.len() - whole);
            slot_memory[..bytes].copy_from_slice(&src[from..from + bytes]);
            black_box(&mut slot_memory);
            lap(plain);
            if !more {
                break;
            }
        }
        best = std::array::from_fn(|n| spent[n].min(best[n]));
    }
    let [plan, build, pack, unpack, tabled, plain] = best;
    let (bytes, n) = (count as f64 * 256.0 / 1e9, count as f64 / 1e9);
    println!("{count} pieces, unpacked by {entries} stripes: {table_bytes} bytes of table; best of 20");
    let (plan, build, tabled) = (plan / n, build / n / 2.0, tabled / n);
    println!("ns a piece: plan {plan:.1}, stripes of one side {build:.1}, table {tabled:.1}");
    let [pack, unpack, plain] = [pack, unpack, plain].map(|s| bytes / s);
    println!("GB/s: pack {pack:.1}, unpack {unpack:.1}, memcpy of as much {plain:.1}");
}
