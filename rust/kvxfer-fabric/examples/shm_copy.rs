//! How fast the shared-memory fabric copies: 16,000 shuffled 4 KiB pieces (2,000 tokens of a rank with 64 layers,
//! one KV head of 128, bf16, 16 tokens a page, are 62.5 MiB) from another process, beside a plain scattered
//! `memcpy` within one process.
//!
//! `cargo run --release --example shm_copy -p kvxfer-fabric [rounds]`
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss
)]

use kvxfer_fabric::shm::{PoolOptions, ShmFabric, ShmOptions, ShmPool};
use kvxfer_fabric::{Backing, Completion, EndRole, EpId, Fabric, MemKind, Piece, RegionSpan};
use rustix::event::{PollFd, PollFlags, poll};
use std::io::{Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

const PIECE: u64 = 4096;
const PIECES: u64 = 16_000;
/// The regions are larger than what is moved, as an engine's are.
const REGION: u64 = 4 * PIECES * PIECE;

struct Side {
    fabric: ShmFabric,
    /// Keeps the memory of the other regions; the fabric itself keeps the pool.
    _plain: Vec<u8>,
}

fn side() -> Side {
    let options = PoolOptions { prefault: true, ..PoolOptions::default() };
    let pool = ShmPool::alloc_with(REGION, &options).unwrap();
    let mut plain = vec![1u8; REGION as usize + 4096];
    // As the allocator gives it, a 4 KiB piece lies in two of the kernel's pages, which costs twice the pinning.
    let addr = plain.as_mut_ptr().expose_provenance() as u64;
    let span = |addr, backing| RegionSpan { addr, len: REGION, kind: MemKind::Host, backing };
    let spans = vec![
        span(pool.addr(), Some(pool as Arc<dyn Backing>)),
        span(addr, None),
        span(addr.next_multiple_of(4096), None),
    ];
    Side { fabric: ShmFabric::new(spans, ShmOptions::default()).unwrap(), _plain: plain }
}

fn shuffled(seed: u64) -> Vec<u64> {
    let mut v: Vec<u64> = (0..REGION / PIECE).collect();
    let mut x = seed;
    for i in (1..v.len()).rev() {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        v.swap(i, (x >> 33) as usize % (i + 1));
    }
    v.truncate(PIECES as usize);
    v
}

/// The other process: it only has memory.
fn source() {
    let mut side = side();
    let blob = side.fabric.describe().unwrap();
    let mut out = std::io::stdout().lock();
    out.write_all(&(blob.len() as u32).to_le_bytes()).unwrap();
    out.write_all(&blob).unwrap();
    out.flush().unwrap();
    drop(out);
    // Whoever started this process closes its input when it is done.
    let input = std::io::stdin();
    loop {
        side.fabric.progress(&mut Vec::new());
        let fabric = side.fabric.event_fd().unwrap();
        let mut fds = [PollFd::from_borrowed_fd(fabric, PollFlags::IN), PollFd::new(&input, PollFlags::IN)];
        poll(&mut fds, None).unwrap();
        if !fds[1].revents().is_empty() {
            return;
        }
    }
}

fn main() {
    if std::env::args().nth(1).as_deref() == Some("source") {
        source();
        return;
    }
    let rounds = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(30usize).max(1);
    let mut child = Command::new(std::env::current_exe().unwrap())
        .arg("source")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut len = [0u8; 4];
    let stdout = child.stdout.as_mut().unwrap();
    stdout.read_exact(&mut len).unwrap();
    let mut blob = vec![0; u32::from_le_bytes(len) as usize];
    stdout.read_exact(&mut blob).unwrap();

    let mut me = side();
    me.fabric.connect(EpId(0), EndRole::Active, &blob, &[REGION; 3]).unwrap();
    let mut events = Vec::new();
    while !events.iter().any(|c| matches!(c, Completion::Connected { .. })) {
        me.fabric.progress(&mut events);
        assert!(!events.iter().any(|c| matches!(c, Completion::ConnectFailed { .. })), "{events:?}");
        std::thread::yield_now();
    }

    let (from, to) = (shuffled(1), shuffled(2));
    let batch = |src_region| -> Vec<Piece> {
        from.iter()
            .zip(&to)
            .map(|(s, d)| Piece {
                src_region,
                src_off: s * PIECE,
                dst_region: 0,
                dst_off: d * PIECE,
                len: PIECE,
            })
            .collect()
    };
    let batches = [batch(0), batch(1), batch(2)];
    let near = vec![3u8; REGION as usize];
    let mut target = vec![4u8; REGION as usize];
    let mut times: [Vec<f64>; 4] = Default::default();
    // Taken in turns, so that a slow moment of the machine hits all alike. Round 0 warms up.
    for round in 0..=rounds {
        let start = Instant::now();
        for (s, d) in from.iter().zip(&to) {
            let (s, d, n) = ((s * PIECE) as usize, (d * PIECE) as usize, PIECE as usize);
            target[d..d + n].copy_from_slice(&near[s..s + n]);
        }
        let mut took = vec![start.elapsed()];
        std::hint::black_box(&target);
        for batch in &batches {
            let start = Instant::now();
            me.fabric.post(EpId(0), batch).unwrap();
            took.push(start.elapsed());
        }
        if round > 0 {
            for (list, t) in times.iter_mut().zip(took) {
                list.push(t.as_secs_f64());
            }
        }
    }
    let bytes = (PIECES * PIECE) as f64;
    let medians = times.map(|mut t| {
        t.sort_by(f64::total_cmp);
        t[t.len() / 2]
    });
    let names = [
        "plain scattered memcpy",
        "shm, pool memory (mapped)",
        "shm, engine memory",
        "shm, engine memory, page-aligned",
    ];
    for (name, t) in names.iter().zip(medians) {
        println!(
            "{name:<33} {:>7.2} ms  {:>6.2} GB/s  {:>5.2} x memcpy",
            t * 1e3,
            bytes / t / 1e9,
            t / medians[0]
        );
    }
    println!("{PIECES} pieces of {PIECE} bytes, {rounds} rounds, {} data calls", me.fabric.data_syscalls());
    drop(child.stdin.take());
    child.wait().unwrap();
}
