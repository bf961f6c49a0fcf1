//! What the CUDA driver says of an address.

use crate::errors;
use kvxfer_cuda::{CudaError, Driver, MemoryKind};
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// A driver's error as an exception.
pub(crate) fn failed(py: Python<'_>, error: CudaError) -> PyErr {
    errors::fabric(py, &kvxfer_fabric::cuda::error(error))
}

/// What memory `address` names: `kind` (`"unknown"` to CUDA, `"pinned"`, `"device"` or `"managed"`), `device`
/// (its number, or None), `range_start` and `range_bytes` of its allocation, `exportable` (whether another
/// process can be let at it), `rdma`.
///
/// Raises `FabricError` without a CUDA driver.
#[pyfunction]
pub(crate) fn _memory_at(py: Python<'_>, address: u64) -> PyResult<Bound<'_, PyDict>> {
    // Opening the driver takes long the first time.
    let found = py.detach(|| Driver::load()?.memory_at(address)).map_err(|e| failed(py, e))?;
    let kind = match found.kind {
        MemoryKind::Unknown => "unknown",
        MemoryKind::Pinned => "pinned",
        MemoryKind::Device => "device",
        MemoryKind::Managed => "managed",
    };
    let out = PyDict::new(py);
    out.set_item("kind", kind)?;
    out.set_item("device", found.device)?;
    out.set_item("range_start", found.range_start)?;
    out.set_item("range_bytes", found.range_bytes)?;
    out.set_item("exportable", found.is_exportable())?;
    out.set_item("rdma", found.rdma)?;
    Ok(out)
}
