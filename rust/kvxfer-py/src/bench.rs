//! `kvxfer._kvxfer._bench_plan`: what planning takes, as the transfer thread does it.

use crate::args::{Count, Int};
use crate::errors;
use crate::layout::side;
use crate::pages::page_lists;
use crate::shard::Shard;
use kvxfer_proto::LayoutError;
use kvxfer_proto::plan::{Cursor, Request, Template};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

/// As the scheduler asks for them by default: a slice of 256 KiB and 1,024 pieces at most.
const SLICE_BYTES: u64 = 256 << 10;
const SLICE_PIECES: usize = 1024;

/// What was found.
#[derive(Debug)]
struct Found {
    template_ns: Vec<u64>,
    cursor_ns: Vec<u64>,
    plan_ns: Vec<u64>,
    runs: u64,
    writes: u64,
    bytes: u64,
}

fn ns(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

/// Plans tokens 0 to `tokens` of a pair of shards `repeats` times, in slices as the transfer thread takes them.
///
/// `src` and `dst` are as in `plan_transfer`. Returns a dict: `runs` (each within one page on both sides), `writes` (what is
/// left when neighbours are joined), `bytes`; and lists of nanoseconds, one a repeat: `template_ns` (compiled once a pair of
/// shards), `cursor_ns` (the pass over the pages) and `plan_ns` (that and all writes).
#[pyfunction]
#[pyo3(signature = (src, dst, *, src_pages, dst_pages, tokens, repeats))]
#[expect(clippy::needless_pass_by_value, reason = "they are extracted from Python's arguments")]
pub(crate) fn _bench_plan<'py>(
    py: Python<'py>,
    src: (Bound<'py, PyAny>, Bound<'py, Shard>),
    dst: (Bound<'py, PyAny>, Bound<'py, Shard>),
    src_pages: &Bound<'py, PyAny>,
    dst_pages: &Bound<'py, PyAny>,
    tokens: Count,
    repeats: Int<u32>,
) -> PyResult<Bound<'py, PyDict>> {
    let (src, dst) = (side(&src.0, &src.1)?, side(&dst.0, &dst.1)?);
    let groups = src.groups.len();
    let request = Request {
        src_pages: page_lists(src_pages, groups)?.lists,
        src_tokens: 0..tokens.0,
        dst_pages: page_lists(dst_pages, groups)?.lists,
        dst_tokens: 0..tokens.0,
        tokens: 0..tokens.0,
        layers: 0..u32::MAX,
    };
    let counts = vec![u32::MAX; groups];
    let found = py.detach(|| {
        let mut found =
            Found { template_ns: vec![], cursor_ns: vec![], plan_ns: vec![], runs: 0, writes: 0, bytes: 0 };
        let mut slice = Vec::with_capacity(SLICE_PIECES);
        for _ in 0..repeats.0 {
            let start = Instant::now();
            let template = Arc::new(Template::new(&src, &dst)?);
            found.template_ns.push(ns(start));
            let request = request.clone();
            let start = Instant::now();
            let mut cursor = Cursor::new(template, request, &counts, &counts)?;
            found.cursor_ns.push(ns(start));
            let mut writes = 0_usize;
            loop {
                slice.clear();
                let more = cursor.fill(&mut slice, SLICE_BYTES, SLICE_PIECES);
                writes += black_box(&slice).len();
                if !more {
                    break;
                }
            }
            found.plan_ns.push(ns(start));
            (found.runs, found.bytes) = (cursor.runs(), cursor.total_bytes());
            found.writes = u64::try_from(writes).unwrap_or(u64::MAX);
        }
        Ok(found)
    });
    let found = found.map_err(|e: LayoutError| errors::bad(py, e.to_string()))?;
    let out = PyDict::new(py);
    out.set_item("template_ns", found.template_ns)?;
    out.set_item("cursor_ns", found.cursor_ns)?;
    out.set_item("plan_ns", found.plan_ns)?;
    out.set_item("runs", found.runs)?;
    out.set_item("writes", found.writes)?;
    out.set_item("bytes", found.bytes)?;
    Ok(out)
}
