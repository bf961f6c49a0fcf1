//! `kvxfer._kvxfer.Allocation`: memory of ours.

use crate::errors;
use crate::span::Span;
use kvxfer_fabric::Backing;
use kvxfer_fabric::shm::ShmPool;
use kvxfer_fabric::ucx::{UcxOptions, UcxPool};
use pyo3::prelude::*;
use std::path::PathBuf;
use std::sync::Arc;

/// Zeroed memory that a fabric likes; freed when the last view of it is gone.
///
/// `fabric` is `"shm"` (a sealed memfd), `"ucx"` (UCX allocates) or `"auto"` (as `"shm"`). Raises
/// `FabricError` if the system or UCX has none.
#[pyclass(frozen, module = "kvxfer._kvxfer")]
#[derive(Debug)]
pub(crate) struct Allocation {
    backing: Arc<dyn Backing>,
    fabric: &'static str,
}

impl Allocation {
    pub(crate) fn backing(&self) -> &Arc<dyn Backing> {
        &self.backing
    }
}

#[pymethods]
impl Allocation {
    #[new]
    #[pyo3(signature = (nbytes, fabric="auto", *, ucx_tls=None, ucx_wheel_dir=None))]
    fn new(
        py: Python<'_>,
        nbytes: u64,
        fabric: &str,
        ucx_tls: Option<String>,
        ucx_wheel_dir: Option<PathBuf>,
    ) -> PyResult<Self> {
        let options = UcxOptions { tls: ucx_tls, wheel_dir: ucx_wheel_dir, ..UcxOptions::default() };
        let (backing, fabric) = match fabric {
            "auto" | "shm" => (py.detach(|| ShmPool::alloc(nbytes)), "shm"),
            "ucx" => (py.detach(|| UcxPool::alloc(nbytes, &options)), "ucx"),
            other => {
                return Err(errors::bad(py, format!("fabric {other:?} is not known: auto, shm and ucx are")));
            }
        };
        Ok(Self { backing: backing.map_err(|e| errors::fabric(py, &e))?, fabric })
    }

    /// First address.
    #[getter]
    fn address(&self) -> u64 {
        self.backing.addr()
    }

    /// Bytes.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.backing.len()
    }

    /// Who allocated it: `"shm"` or `"ucx"`.
    #[getter]
    fn fabric(&self) -> &'static str {
        self.fabric
    }

    /// A piece of it that numpy takes as an array without a copy. `typestr` is numpy's, such as `"<u2"`.
    ///
    /// Raises `BadArgument` if the piece leaves the memory.
    fn span(slf: &Bound<'_, Self>, offset: u64, shape: Vec<u64>, typestr: &str) -> PyResult<Span> {
        let (py, this) = (slf.py(), slf.get());
        let item: Option<u64> = typestr.get(2..).and_then(|digits| digits.parse().ok());
        let bytes = shape.iter().try_fold(item.unwrap_or(0), |n, d| n.checked_mul(*d));
        let end = bytes.and_then(|n| n.checked_add(offset));
        match (item, end) {
            (Some(_), Some(end)) if end <= this.backing.len() => {
                let address = this.backing.addr().wrapping_add(offset);
                Ok(Span::new(slf.clone().unbind(), address, shape, typestr.to_owned()))
            }
            _ => Err(errors::bad(
                py,
                format!(
                    "shape {shape:?} of {typestr:?} at offset {offset} leaves the {} bytes of memory",
                    this.backing.len()
                ),
            )),
        }
    }

    fn __repr__(&self) -> String {
        format!("Allocation(nbytes={}, fabric='{}')", self.backing.len(), self.fabric)
    }
}
