//! Measures puts against plain copies of the same pieces, for docs/ucx-notes.md:
//! `KVXFER_BENCH_TLS=posix,tcp,self cargo test --release -p kvxfer-fabric --test ucx_bench -- --ignored --nocapture measure`
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::cast_possible_truncation
)]

mod ucx_common;

use kvxfer_fabric::{EndRole, Fabric, Piece};
use std::time::{Duration, Instant};
use ucx_common::{EP, Node, peer_job, spawn, ucx_present};

const PIECE: usize = 4096;
const PIECES: usize = 16_000;
const BYTES: usize = PIECE * PIECES;

#[test]
fn peer_process() {
    let Some((_, tls, bytes, mut wire)) = peer_job() else {
        return;
    };
    let mut node = Node::new(&tls, bytes);
    node.connect(&mut wire, EP, EndRole::Passive);
    while wire.try_recv().is_none() {
        node.progress();
        std::thread::yield_now();
    }
}

fn shuffled(n: usize, mut seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, usize::try_from(seed >> 33).expect("31 bits") % (i + 1));
    }
    order
}

/// The least of several, in milliseconds: other work on the machine only ever adds.
fn least(times: &[Duration]) -> f64 {
    times.iter().min().expect("measured").as_secs_f64() * 1e3
}

fn copy(from: &[usize], to: &[usize], source: *const u8, target: &mut [u8]) -> Duration {
    let start = Instant::now();
    for (f, t) in from.iter().zip(to) {
        // SAFETY: both are BYTES long and distinct, and every index is below PIECES.
        unsafe {
            std::ptr::copy_nonoverlapping(source.add(f * PIECE), target.as_mut_ptr().add(t * PIECE), PIECE);
        }
    }
    std::hint::black_box(&mut *target);
    start.elapsed()
}

#[test]
#[ignore = "a measurement, not a check"]
fn measure() {
    assert!(ucx_present());
    let tls = std::env::var("KVXFER_BENCH_TLS").unwrap_or_default();
    let mut peer = spawn("", &tls, BYTES, &[]);
    let mut node = Node::new(&tls, BYTES);
    node.fill(1, |i| (i % 251) as u8);
    node.fill(0, |i| (i % 241) as u8);
    node.connect(&mut peer.wire, EP, EndRole::Active);
    let (from, to) = (shuffled(PIECES, 1), shuffled(PIECES, 2));
    let mut target = vec![1u8; BYTES];
    for (name, src, dst) in [("pool to pool", 0, 0), ("plain to pool", 1, 0), ("plain to plain", 1, 1)] {
        let pieces: Vec<Piece> = from
            .iter()
            .zip(&to)
            .map(|(f, t)| Piece {
                src_region: src,
                src_off: (f * PIECE) as u64,
                dst_region: dst,
                dst_off: (t * PIECE) as u64,
                len: PIECE as u64,
            })
            .collect();
        let (mut copies, mut posts, mut totals) = (Vec::new(), Vec::new(), Vec::new());
        for round in 0..9 {
            copies.push(copy(&from, &to, node.pool_addr() as *const u8, &mut target));
            let start = Instant::now();
            for chunk in pieces.chunks(256) {
                node.fabric.post(EP, chunk).expect("post");
            }
            posts.push(start.elapsed());
            node.flush(EP, round, Duration::from_secs(60)).expect("flush");
            totals.push(start.elapsed());
        }
        let (copy_ms, post, total) = (least(&copies), least(&posts), least(&totals));
        println!(
            "{tls:32} {name:15} copy {copy_ms:7.2} ms  post {post:7.2}  total {total:7.2} ms  ratio {:5.2}  {:?}",
            total / copy_ms,
            node.fabric.transports(EP)
        );
    }
    peer.wire.send(b"quit");
}
