//! `cuda/pack.cuh`, built by the host's C++ compiler and run thread by thread, against the Rust twin and against a byte
//! at a time.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::cast_possible_truncation
)]

use kvxfer_proto::plan::Piece;
use kvxfer_proto::plan::pack::{Span, Stripe, Stripes, TILE_UNITS, Table, UNIT_BYTES};
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::ops::Range;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// Bytes of each side's memory: two regions of equal size.
const AREA: u64 = 64 << 10;
const HALF: u64 = AREA / 2;

/// The header as a process that answers.
struct Host {
    _child: Child,
    orders: ChildStdin,
    answers: ChildStdout,
    batch: u64,
    src: u64,
    dst: u64,
}

impl Host {
    /// Builds and starts it; the error says what is missing.
    fn start() -> Result<Self, String> {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
        // A name of this process's own: tests run beside each other.
        let program = folder.join(format!("pack-host-{}", std::process::id()));
        let compiler = std::env::var_os("CXX").unwrap_or_else(|| "c++".into());
        let output = Command::new(&compiler)
            .args(["-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"])
            // A misaligned access ends the process.
            .args(["-fno-strict-aliasing", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"])
            .arg("-I")
            .arg(here.join("../../cuda"))
            .arg(here.join("tests/pack_kernel/host.cpp"))
            .arg("-o")
            .arg(&program)
            .output()
            .map_err(|why| {
                let compiler = compiler.display();
                format!("these tests need a C++ compiler, and {compiler} does not start ({why}): apt-get install g++, or set CXX")
            })?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned());
        }
        let mut child = Command::new(&program)
            .arg(AREA.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (orders, answers) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut host = Self { _child: child, orders, answers, batch: 0, src: 0, dst: 0 };
        let hello = host.words(5);
        // It runs: its file is needed no more.
        std::fs::remove_file(&program).unwrap();
        assert_eq!(hello[0], size_of::<Stripe>() as u64);
        assert_eq!(hello[1], TILE_UNITS);
        (host.batch, host.src, host.dst) = (hello[2], hello[3], hello[4]);
        Ok(host)
    }

    /// Runs these threads of a grid of so many.
    fn order(&mut self, kind: u64, threads: u64, run: Range<u64>, table: &Table, areas: &[&[u8]]) {
        let mut out = Vec::new();
        for word in [kind, threads, run.start, run.end - run.start, table.stripes().len() as u64] {
            out.extend(word.to_le_bytes());
        }
        let first = table.encode(&mut out);
        assert_eq!(first, size_of_val(table.stripes()));
        for area in areas {
            out.extend_from_slice(area);
        }
        self.orders.write_all(&out).expect("the header's process has ended");
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let mut out = vec![0; count];
        self.answers
            .read_exact(&mut out)
            .expect("the header's process has ended: a trap is a misaligned access");
        out
    }

    fn words(&mut self, count: usize) -> Vec<u64> {
        self.bytes(count * 8).chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect()
    }

    /// What the second area holds after the grid has run.
    fn copy(&mut self, threads: u64, table: &Table, src: &[u8], dst: &[u8]) -> Vec<u8> {
        self.order(0, threads, 0..threads, table, &[src, dst]);
        self.bytes(AREA as usize)
    }

    /// Every access of the grid: (thread, from, to, shift).
    fn trace(&mut self, threads: u64, table: &Table) -> Vec<[u64; 4]> {
        self.trace_some(threads, 0..threads, table)
    }

    fn trace_some(&mut self, threads: u64, run: Range<u64>, table: &Table) -> Vec<[u64; 4]> {
        self.order(1, threads, run, table, &[]);
        let count = self.words(1)[0];
        self.words(count as usize * 4).chunks_exact(4).map(|w| w.try_into().unwrap()).collect()
    }
}

fn host() -> MutexGuard<'static, Host> {
    static HOST: LazyLock<Result<Mutex<Host>, String>> = LazyLock::new(|| Host::start().map(Mutex::new));
    match &*HOST {
        Ok(host) => host.lock().unwrap_or_else(PoisonError::into_inner),
        Err(why) => panic!("{why}"),
    }
}

/// Rows that lie at equal distances on both sides.
#[derive(Clone, Debug)]
struct Group {
    row: u64,
    rows: u64,
    /// Bytes to leave out before it and between its rows, at the source and the destination.
    gap: [u64; 2],
    between: [u64; 2],
    region: u32,
    src_region: u32,
}

fn distance() -> impl Strategy<Value = u64> {
    prop_oneof![3 => Just(0), 3 => (0..6u64).prop_map(|n| n * 16), 1 => (0..6u64).prop_map(|n| n * 4), 2 => 0..40u64]
}

fn group() -> impl Strategy<Value = Group> {
    // Head sizes as they are, 4-bit ones among them, scales, and lengths that nothing divides.
    let row = prop_oneof![
        4 => prop::sample::select(vec![32u64, 48, 64, 96, 128, 160, 256, 512]),
        2 => prop::sample::select(vec![1u64, 2, 3, 4, 8, 16, 20, 36, 40]),
        2 => 0..700u64,
        1 => 700..9000u64,
    ];
    let rows = prop_oneof![2 => Just(1u64), 3 => 1..18u64, 1 => 18..200u64];
    (row, rows, [distance(), distance()], [distance(), distance()], 0..2u32, 0..2u32).prop_map(
        |(row, rows, gap, between, region, src_region)| Group { row, rows, gap, between, region, src_region },
    )
}

/// The groups' rows as pieces, for as long as the regions have room. No destination byte is named twice.
fn pieces(groups: &[Group]) -> Vec<Vec<Piece>> {
    let mut used = [[0u64; 2]; 2];
    let mut out = Vec::new();
    for g in groups {
        let regions = [g.src_region, g.region];
        let at: [u64; 2] = std::array::from_fn(|side| used[side][regions[side] as usize] + g.gap[side]);
        let stride: [u64; 2] = std::array::from_fn(|side| g.row + g.between[side]);
        let end: [u64; 2] = std::array::from_fn(|side| at[side] + stride[side] * g.rows);
        if end.iter().any(|e| *e > HALF) {
            continue;
        }
        for side in 0..2 {
            used[side][regions[side] as usize] = end[side];
        }
        out.push(
            (0..g.rows)
                .map(|r| Piece {
                    src_region: g.src_region,
                    src_off: at[0] + r * stride[0],
                    dst_region: g.region,
                    dst_off: at[1] + r * stride[1],
                    len: g.row,
                })
                .collect(),
        );
    }
    out
}

/// Which way the bytes go.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Pack,
    Unpack,
    Direct,
}

/// Pieces, in the order of shuffled pages.
fn slice() -> impl Strategy<Value = (Vec<Piece>, Way)> {
    let groups = prop::collection::vec(group(), 0..24).prop_map(|g| pieces(&g)).prop_shuffle();
    let way = prop::sample::select(vec![Way::Pack, Way::Unpack, Way::Direct]);
    (groups.prop_map(|g| g.into_iter().flatten().collect()), way)
}

fn threads() -> impl Strategy<Value = u64> {
    // Whole blocks, as launches have; also threads that make no warp, which must have nothing to do.
    prop_oneof![3 => (1..12u64).prop_map(|blocks| blocks * 256), 2 => (1..9u64).prop_map(|warps| warps * 32), 1 => 32..400u64]
}

fn regions(base: u64) -> [Span; 2] {
    [Span { addr: base, len: HALF }, Span { addr: base + HALF, len: HALF }]
}

/// The copies with memory that begins at these addresses.
fn stripes(pieces: &[Piece], way: Way, src: u64, dst: u64) -> Stripes {
    let (mut out, slot) = (Stripes::new(), |addr| Span { addr, len: AREA });
    match way {
        Way::Pack => out.pack(pieces, &regions(src), slot(dst)),
        Way::Unpack => out.unpack(pieces, slot(src), &regions(dst)),
        Way::Direct => out.direct(pieces, &regions(src), &regions(dst)),
    }
    .unwrap();
    out
}

/// Where each byte goes, and from where, one by one: offsets into the areas.
fn bytes(pieces: &[Piece], way: Way) -> Vec<(u64, u64)> {
    let (mut out, mut packed) = (Vec::new(), 0);
    for p in pieces {
        for n in 0..p.len {
            let src = u64::from(p.src_region) * HALF + p.src_off + n;
            let dst = u64::from(p.dst_region) * HALF + p.dst_off + n;
            out.push(match way {
                Way::Pack => (src, packed),
                Way::Unpack => (packed, dst),
                Way::Direct => (src, dst),
            });
            packed += 1;
        }
    }
    out
}

/// Bytes that tell where they are.
fn area(seed: u64) -> Vec<u8> {
    let step = 0x9E37_79B9_7F4A_7C15;
    (0..AREA).map(|n| ((n + seed).wrapping_mul(step) >> 56) as u8).collect()
}

fn check_accesses(host: &Host, table: &Table, threads: u64, accesses: &[[u64; 4]]) {
    let mut of_thread = BTreeMap::<u64, u64>::new();
    for [thread, from, to, shift] in accesses {
        assert!(*shift <= 4 && (from | to) % (1 << shift) == 0, "{from:#x} -> {to:#x} by {}", 1 << shift);
        *of_thread.entry(*thread).or_default() += 1;
    }
    let most = table.tiles().div_ceil(threads / 32) * host.batch;
    assert!(of_thread.values().all(|n| *n <= most), "more than {most} accesses of one thread: {of_thread:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn the_header_and_the_twin_copy_what_a_byte_at_a_time_does((pieces, way) in slice(), threads in threads()) {
        let mut host = host();
        let (src, dst) = (area(1), area(1 << 32));
        let mut want = dst.clone();
        for (from, to) in bytes(&pieces, way) {
            want[to as usize] = src[from as usize];
        }
        let mut twin = dst.clone();
        stripes(&pieces, way, 0, 0).apply(&src, &mut twin).unwrap();
        prop_assert!(twin == want, "the twin");
        let table = Table::new(&stripes(&pieces, way, host.src, host.dst));
        prop_assert!(host.copy(threads, &table, &src, &dst) == want, "the header");
    }

    #[test]
    fn each_byte_is_written_once_wherever_the_memory_lies(
        (pieces, way) in slice(),
        threads in threads(),
        src in prop::sample::select(vec![0x7000_0000_1000, 1 << 63, (1 << 63) + 5, u64::MAX - AREA + 1]),
        dst in prop::sample::select(vec![0x7000_0000_2000, 1 << 63, 1 << 33, u64::MAX - AREA + 1]),
    ) {
        let mut host = host();
        let table = Table::new(&stripes(&pieces, way, src, dst));
        let accesses = host.trace(threads, &table);
        check_accesses(&host, &table, threads, &accesses);
        let mut got = Vec::new();
        for [_, from, to, shift] in accesses {
            got.extend((0..1 << shift).map(|n| (from.wrapping_sub(src) + n, to.wrapping_sub(dst) + n)));
        }
        got.sort_unstable();
        let mut want = bytes(&pieces, way);
        want.sort_unstable();
        prop_assert_eq!(got, want);
    }

    /// Regions of terabytes: nothing is worked out in 32 bits.
    #[test]
    fn distances_past_four_gigabytes(
        row in 1..600u64,
        rows in 2..40u64,
        apart in [32..45u32, 32..45u32],
        odd in [0..20u64, 0..20u64],
        threads in threads(),
    ) {
        let mut host = host();
        let stride: [u64; 2] = std::array::from_fn(|side| (1 << apart[side]) + odd[side]);
        let (src, dst) = (1u64 << 63, 1u64 << 50);
        let mut stripes = Stripes::new();
        for r in 0..rows {
            stripes.push(src + r * stride[0], dst + r * stride[1], row).unwrap();
        }
        let accesses = host.trace(threads, &Table::new(&stripes));
        let mut got = BTreeMap::new();
        for [_, from, to, shift] in accesses {
            for n in 0..1 << shift {
                prop_assert_eq!(got.insert(from + n, to + n), None, "a byte is copied twice");
            }
        }
        let place = |r, n, side: usize| [src, dst][side] + r * stride[side] + n;
        let want = (0..rows).flat_map(|r| (0..row).map(move |n| (place(r, n, 0), place(r, n, 1))));
        prop_assert!(got.into_iter().eq(want));
    }
}

#[test]
fn rows_and_counts_past_32_bits() {
    let mut host = host();
    let tile = TILE_UNITS * UNIT_BYTES;
    // Rows that are longer than 2^32 units, and more rows than 2^32; each of as many tiles as there are warps.
    for (row, rows) in [(1 << 38, 2), (1 << 40, 1), (64, 1 << 34), (32, 1 << 33)] {
        let mut stripes = Stripes::new();
        let (src, dst, stride) = (1u64 << 63, 1u64 << 12, 2 * row);
        for r in 0..rows.min(2) {
            stripes.push(src + r * stride, dst + r * row, row).unwrap();
        }
        let one = stripes.list()[0];
        let table = Table::of(&[Stripe { rows, ..one }]);
        let warps = row * rows / tile;
        assert_eq!(table.tiles(), warps);
        for warp in [0, 1, warps / 2, warps / 2 + 1, warps - 1] {
            let lanes = warp * 32..(warp + 1) * 32;
            let mut got = host.trace_some(warps * 32, lanes, &table);
            got.sort_unstable_by_key(|[_, _, to, _]| *to);
            let want = (0..TILE_UNITS).map(|n| warp * tile + n * UNIT_BYTES).map(|byte| {
                let (r, column) = (byte / row, byte % row);
                [src + r * stride + column, dst + byte]
            });
            assert!(
                got.iter().map(|[_, from, to, _]| [*from, *to]).eq(want),
                "{rows} rows of {row}, warp {warp}"
            );
        }
    }
}

#[test]
fn heads_of_the_usual_sizes_are_copied_16_bytes_at_a_time() {
    let mut host = host();
    // 4-bit and 8-bit elements of head_dim 64, bf16 of 80, 128, 576 (latent), at a stride of 8 heads.
    for row in [32u64, 64, 160, 256, 1152] {
        let pieces: Vec<Piece> = (0..AREA / 2 / (8 * row))
            .map(|t| Piece {
                src_region: 0,
                src_off: t * 8 * row + row,
                dst_region: 1,
                dst_off: t * row,
                len: row,
            })
            .collect();
        for way in [Way::Pack, Way::Unpack, Way::Direct] {
            let table = Table::new(&stripes(&pieces, way, host.src, host.dst));
            assert_eq!(table.stripes().len(), 1, "{row} {way:?}");
            let accesses = host.trace(256, &table);
            assert!(accesses.iter().all(|[_, _, _, shift]| 1 << shift == UNIT_BYTES));
            assert_eq!(accesses.len() as u64 * UNIT_BYTES, pieces.len() as u64 * row);
        }
    }
}

#[test]
fn one_order_to_the_other_and_back() {
    const TOKENS: u64 = 16;
    const HEADS: u64 = 8;
    const ROW: u64 = 128;
    let mut host = host();
    let mut there = Vec::new();
    // NHD is token, head; HND is head, token.
    for (head, token) in (0..HEADS).flat_map(|h| (0..TOKENS).map(move |t| (h, t))) {
        let (nhd, hnd) = ((token * HEADS + head) * ROW, (head * TOKENS + token) * ROW);
        there.push(Piece { src_region: 0, src_off: nhd, dst_region: 1, dst_off: hnd, len: ROW });
    }
    let back: Vec<Piece> = there
        .iter()
        .map(|p| Piece { src_region: 1, src_off: p.dst_off, dst_region: 0, dst_off: p.src_off, len: p.len })
        .collect();
    let table = Table::new(&stripes(&there, Way::Direct, host.src, host.dst));
    assert_eq!(table.stripes().len() as u64, HEADS, "one entry a head");
    let (nhd, zeros) = (area(7), vec![0; AREA as usize]);
    let hnd = host.copy(512, &table, &nhd, &zeros);
    let (head, token) = (3, 5);
    let (from, to) = ((token * HEADS + head) * ROW, HALF + (head * TOKENS + token) * ROW);
    assert_eq!(nhd[from as usize..][..ROW as usize], hnd[to as usize..][..ROW as usize]);
    let table = Table::new(&stripes(&back, Way::Direct, host.src, host.dst));
    let again = host.copy(512, &table, &hnd, &zeros);
    let page = (TOKENS * HEADS * ROW) as usize;
    assert!(again[..page] == nhd[..page]);
}
