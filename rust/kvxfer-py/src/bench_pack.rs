//! `kvxfer._kvxfer._pack_table`: what the pack kernel is given, for tests and benchmarks that launch it by themselves.

use crate::errors;
use kvxfer_proto::plan::pack::{Stripes, Table};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// The table of these copies: its bytes, the offset of its second list in them, how many stripes it has, and how many tiles.
///
/// `src`, `dst` and `lens` are uint64 arrays of one length: addresses, and byte counts. Raises `BadArgument` for arrays of
/// another kind, and for memory past the last address.
#[pyfunction]
#[expect(clippy::needless_pass_by_value, reason = "they are extracted from Python's arguments")]
pub(crate) fn _pack_table<'py>(
    py: Python<'py>,
    src: PyReadonlyArray1<'py, u64>,
    dst: PyReadonlyArray1<'py, u64>,
    lens: PyReadonlyArray1<'py, u64>,
) -> PyResult<(Bound<'py, PyBytes>, usize, usize, u64)> {
    let bad = || errors::bad(py, "src, dst and lens are contiguous uint64 arrays of one length");
    let (Ok(src), Ok(dst), Ok(lens)) = (src.as_slice(), dst.as_slice(), lens.as_slice()) else {
        return Err(bad());
    };
    if src.len() != dst.len() || dst.len() != lens.len() {
        return Err(bad());
    }
    let mut stripes = Stripes::new();
    for ((s, d), n) in src.iter().zip(dst).zip(lens) {
        stripes.push(*s, *d, *n).map_err(|e| errors::bad(py, e.to_string()))?;
    }
    let table = Table::new(&stripes);
    let mut bytes = Vec::new();
    let first = table.encode(&mut bytes);
    Ok((PyBytes::new(py, &bytes), first, table.stripes().len(), table.tiles()))
}
