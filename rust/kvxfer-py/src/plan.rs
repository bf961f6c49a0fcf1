//! `kvxfer.Plan` and `kvxfer.plan_transfer`.

use crate::args::{Count, Layers};
use crate::errors;
use crate::layout::side;
use crate::pages::{PageLists, page_lists};
use crate::shard::Shard;
use kvxfer_proto::Side;
use kvxfer_proto::plan::{Cursor, Piece, Request, Template, compatible};
use numpy::IntoPyArray;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use std::sync::Arc;

/// Words of 8 bytes in one row of `Plan.ops`.
const ROW: usize = 4;

/// The writes that carry a range of tokens from one rank's pages to another's; `plan_transfer` makes it.
///
/// `len(plan)` is the number of writes. Runs that are contiguous on both sides are one write.
#[pyclass(frozen, module = "kvxfer", name = "Plan")]
#[derive(Debug)]
pub(crate) struct Plan {
    ops: Py<PyAny>,
    len: usize,
    bytes: u64,
    src: Side,
    dst: Side,
}

#[pymethods]
impl Plan {
    /// The writes: a read-only numpy structured array of shape `(len(plan),)` with the fields `src_region`
    /// (u4), `src_offset` (u8), `dst_region` (u4), `dst_offset` (u8) and `length` (u8). Offsets and lengths
    /// are bytes, a region is an index into `src_regions` or `dst_regions`.
    #[getter]
    fn ops(&self, py: Python<'_>) -> Py<PyAny> {
        self.ops.clone_ref(py)
    }

    /// Bytes that move.
    #[getter]
    fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The source rank's regions, as tuples `(group, layer, part)`; the layer is the rank's first where its layers
    /// share pages, and part is one of the layout's `parts`.
    #[getter]
    fn src_regions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        regions(py, &self.src)
    }

    /// The destination rank's regions, like `src_regions`.
    #[getter]
    fn dst_regions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        regions(py, &self.dst)
    }

    fn __len__(&self) -> usize {
        self.len
    }

    fn __repr__(&self) -> String {
        format!("Plan({} writes, {} bytes)", self.len, self.bytes)
    }
}

/// Names of a side's regions in the order in which they are numbered.
fn regions<'py>(py: Python<'py>, side: &Side) -> PyResult<Bound<'py, PyTuple>> {
    let regions = side.regions(&vec![0; side.groups.len()]).map_err(|e| errors::bad(py, e.to_string()))?;
    let label = |group: u32, part| {
        let layout = usize::try_from(group).ok().and_then(|g| side.groups.get(g));
        layout.map_or("", |layout| layout.parts_label(part))
    };
    let out: Vec<_> = regions.iter().map(|r| (r.group, r.layer, label(r.group, r.part))).collect();
    PyTuple::new(py, out)
}

/// The writes that carry tokens `start` to `start + tokens` (without it) from source pages to destination
/// pages.
///
/// `src` and `dst` are pairs `(layout, shard)`, where the layout may be a list of groups. `src_pages` and
/// `dst_pages` hold page ids (list, numpy or torch CPU array of integers; one list a group): the first source
/// page holds token `src_start`, by default 0, and the first destination page token `dst_start`, by default
/// `start`, for decode grants pages only for what it has not cached. `layers` is a range or a pair `(first,
/// end)` in the model's numbering, by default all. Where a group holds only the last tokens, `end` is the end
/// of the room (by default of `tokens`), and its lists begin with what is held at the end of `tokens` in the
/// source's pages, and at `end` in the destination's. `src_page_count` and `dst_page_count` are the pages that
/// each side has in each group (an int, or a list of them), by default the largest id + 1.
///
/// Raises `LayoutMismatch` if the sides do not fit, naming the field; `PageError` for an id that is no
/// page's, for a repeated destination page and for an id that is not below its count; `BadArgument` if the
/// lists do not hold the tokens.
///
/// >>> import kvxfer as kx
/// >>> layout = kx.PageLayout(layers=1, kv_heads=1, head_dim=128, page_tokens=16)
/// >>> plan = kx.plan_transfer(src=(layout, kx.Shard()), dst=(layout, kx.Shard()),
/// ...                         src_pages=[10, 11, 12, 13, 14], dst_pages=[7, 9], start=48, tokens=32)
/// >>> len(plan), plan.bytes, plan.ops["src_offset"].tolist(), plan.ops["dst_offset"].tolist()
/// (4, 16384, [53248, 57344, 53248, 57344], [28672, 36864, 28672, 36864])
#[pyfunction]
#[pyo3(signature = (src, dst, *, src_pages, dst_pages, tokens, start=Count(0), src_start=Count(0),
                    dst_start=None, end=None, layers=None, src_page_count=None, dst_page_count=None),
       text_signature = "(src, dst, *, src_pages, dst_pages, tokens, start=0, src_start=0, dst_start=None, \
                         end=None, layers=None, src_page_count=None, dst_page_count=None)")]
#[expect(clippy::too_many_arguments, clippy::needless_pass_by_value, reason = "they are keywords in Python")]
pub(crate) fn plan_transfer(
    py: Python<'_>,
    src: (Bound<'_, PyAny>, Bound<'_, Shard>),
    dst: (Bound<'_, PyAny>, Bound<'_, Shard>),
    src_pages: &Bound<'_, PyAny>,
    dst_pages: &Bound<'_, PyAny>,
    tokens: Count,
    start: Count,
    src_start: Count,
    dst_start: Option<Count>,
    end: Option<Count>,
    layers: Option<Layers>,
    src_page_count: Option<&Bound<'_, PyAny>>,
    dst_page_count: Option<&Bound<'_, PyAny>>,
) -> PyResult<Plan> {
    let (src, dst) = (side(&src.0, &src.1)?, side(&dst.0, &dst.1)?);
    compatible(&src, &dst).map_err(|e| errors::raise(py, "LayoutMismatch", e.to_string()))?;
    let src_pages = page_lists(src_pages, src.groups.len())?;
    let dst_pages = page_lists(dst_pages, dst.groups.len())?;
    let src_count = counts(py, "source", &src_pages, src_page_count)?;
    let dst_count = counts(py, "destination", &dst_pages, dst_page_count)?;
    let (src_pages, dst_pages) = (src_pages.lists, dst_pages.lists);
    for (g, list) in dst_pages.iter().enumerate() {
        if let Some(page) = repeated(list) {
            let text = format!("page {page} is twice among the destination pages of group {g}");
            return Err(errors::raise(py, "PageError", text));
        }
    }
    let Some(tokens_end) = start.0.checked_add(tokens.0) else {
        return Err(errors::bad(py, format!("start {} and tokens {} are too large", start.0, tokens.0)));
    };
    if let Some(end) = end.filter(|end| end.0 < tokens_end) {
        let text = format!("end is {}, before the end of the tokens, {tokens_end}", end.0);
        return Err(errors::bad(py, text));
    }
    let request = Request {
        src_pages,
        src_tokens: src_start.0..tokens_end,
        dst_pages,
        dst_tokens: dst_start.unwrap_or(start).0..end.map_or(tokens_end, |end| end.0),
        tokens: start.0..tokens_end,
        layers: layers.map_or(0..u32::MAX, |Layers(first, end)| first..end),
    };
    let (words, len, bytes) = py
        .detach(|| {
            let template = Template::new(&src, &dst)?;
            let mut cursor = Cursor::new(Arc::new(template), request, &src_count, &dst_count)?;
            let bytes = cursor.total_bytes();
            let mut ops = Vec::new();
            while cursor.fill(&mut ops, u64::MAX, usize::MAX) {}
            Ok((pack(&ops), ops.len(), bytes))
        })
        .map_err(|e: kvxfer_proto::LayoutError| errors::bad(py, e.to_string()))?;
    let ops = words.into_pyarray(py).call_method1("view", (dtype(py)?,))?;
    let flags = PyDict::new(py);
    flags.set_item("write", false)?;
    ops.call_method("setflags", (), Some(&flags))?;
    Ok(Plan { ops: ops.unbind(), len, bytes, src, dst })
}

/// Pages a group: as given, else one more than the largest id; and every id checked against them.
fn counts(
    py: Python<'_>,
    name: &str,
    PageLists { lists, odd_page }: &PageLists,
    given: Option<&Bound<'_, PyAny>>,
) -> PyResult<Vec<u32>> {
    if let Some((g, page)) = odd_page {
        let text = format!("{name} page {page} of group {g} is out of range: a page id has 32 bits");
        return Err(errors::raise(py, "PageError", text));
    }
    let counts = match given {
        None => lists.iter().map(|list| list.iter().max().map_or(0, |max| max.saturating_add(1))).collect(),
        Some(given) => match given.extract::<u32>() {
            Ok(one) => vec![one; lists.len()],
            Err(_) => given.extract::<Vec<u32>>()?,
        },
    };
    if counts.len() != lists.len() {
        let text =
            format!("{} {name} page counts for {} groups: give one a group", counts.len(), lists.len());
        return Err(errors::bad(py, text));
    }
    for (g, (list, &count)) in lists.iter().zip(&counts).enumerate() {
        if let Some(page) = list.iter().find(|p| **p >= count) {
            let text = format!("{name} page {page} of group {g} is out of range: there are {count} pages");
            return Err(errors::raise(py, "PageError", text));
        }
    }
    Ok(counts)
}

fn repeated(list: &[u32]) -> Option<u32> {
    let mut sorted = list.to_vec();
    sorted.sort_unstable();
    sorted.windows(2).find_map(|w| match w {
        [a, b] if a == b => Some(*a),
        _ => None,
    })
}

/// Rows of the record that [`dtype`] describes.
fn pack(ops: &[Piece]) -> Vec<u64> {
    let mut words = Vec::with_capacity(ops.len() * ROW);
    for op in ops {
        // In memory the source's region comes first, whatever the byte order.
        let [a, b, c, d] = op.src_region.to_ne_bytes();
        let [e, f, g, h] = op.dst_region.to_ne_bytes();
        words.extend([u64::from_ne_bytes([a, b, c, d, e, f, g, h]), op.src_off, op.dst_off, op.len]);
    }
    words
}

fn dtype(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let spec = PyDict::new(py);
    spec.set_item("names", ["src_region", "src_offset", "dst_region", "dst_offset", "length"])?;
    spec.set_item("formats", ["u4", "u8", "u4", "u8", "u8"])?;
    spec.set_item("offsets", [0, 8, 4, 16, 24])?;
    spec.set_item("itemsize", ROW * 8)?;
    py.import("numpy")?.call_method1("dtype", (spec,))
}
