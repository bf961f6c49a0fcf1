//! What a caller pays: orders into the queue, and polls, beside a transfer thread that works on them.
//!
//! `cargo bench -p kvxfer-engine --bench calls`
#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../tests/support/mod.rs"]
mod support;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use kvxfer_engine::{FabricChoice, PushOrder};
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{PAGES, Party, party, side};

/// Orders before the thread is given time to take them: far below what the queue holds.
const BATCH: u64 = 64;

fn push_order(room: u64, pages: &Arc<[u32]>) -> PushOrder {
    PushOrder {
        room,
        pages: vec![Arc::clone(pages)],
        odd_page: None,
        start: 0,
        tokens: u64::from(PAGES) * 16,
        layers: None,
        last: true,
        meta: None,
        ready: None,
        bootstrap_timeout: None,
        timeout: None,
    }
}

/// Polls until so many rooms are released.
fn drain(party: &Party, mut rooms: u64) {
    while rooms > 0 {
        party.agent.poll(|event| rooms -= u64::from(event.released));
    }
}

/// The time of `count` calls, each in a room of its own that is cancelled after it.
fn timed(party: &Party, count: u64, mut call: impl FnMut(u64)) -> Duration {
    let mut took = Duration::ZERO;
    let mut left = count;
    while left > 0 {
        let batch = left.min(BATCH);
        let rooms: Vec<u64> = (0..batch).map(|_| kvxfer_engine::new_room().unwrap()).collect();
        let begin = Instant::now();
        for room in &rooms {
            call(*room);
        }
        took += begin.elapsed();
        for room in &rooms {
            party.agent.cancel(*room).unwrap();
        }
        drain(party, batch);
        left -= batch;
    }
    took
}

fn calls(c: &mut Criterion) {
    let source = party("prefill", side(0, 1), FabricChoice::Shm, true, |_| {});
    let target = party("decode", side(0, 1), FabricChoice::Shm, true, |_| {});
    let pages: Arc<[u32]> = (0..PAGES).collect();
    let address = source.agent.address().to_owned();

    c.bench_function("poll, empty", |b| b.iter(|| source.agent.poll(|event| drop(black_box(event)))));
    c.bench_function("push, 64 pages", |b| {
        b.iter_custom(|n| {
            timed(&source, n, |room| {
                source.agent.push(push_order(room, &pages)).unwrap();
            })
        });
    });
    c.bench_function("expect, 64 pages", |b| {
        b.iter_custom(|n| {
            timed(&target, n, |room| {
                target
                    .agent
                    .expect(support::expect(room, &pages, 0, u64::from(PAGES) * 16, &address))
                    .unwrap();
            })
        });
    });
    c.bench_function("state", |b| b.iter(|| source.agent.state(black_box(1))));
    c.bench_function("hand-off, from expect to Success", |b| {
        b.iter_batched(
            || kvxfer_engine::new_room().unwrap(),
            |room| {
                source.agent.push(push_order(room, &pages)).unwrap();
                target
                    .agent
                    .expect(support::expect(room, &pages, 0, u64::from(PAGES) * 16, &address))
                    .unwrap();
                target.agent.wait(room, Some(support::LIMIT)).unwrap();
                drain(&target, 1);
                drain(&source, 1);
            },
            BatchSize::PerIteration,
        );
    });
}

criterion_group!(benches, calls);
criterion_main!(benches);
