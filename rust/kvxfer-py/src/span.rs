//! `kvxfer._kvxfer.Span`: a piece of an allocation, for numpy.

use crate::memory::Allocation;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// A piece of an `Allocation` that `numpy.asarray` takes without a copy; the array keeps the memory alive.
#[pyclass(frozen, module = "kvxfer._kvxfer")]
#[derive(Debug)]
pub(crate) struct Span {
    allocation: Py<Allocation>,
    address: u64,
    shape: Vec<u64>,
    typestr: String,
}

impl Span {
    pub(crate) fn new(allocation: Py<Allocation>, address: u64, shape: Vec<u64>, typestr: String) -> Self {
        Self { allocation, address, shape, typestr }
    }
}

#[pymethods]
impl Span {
    /// The memory that it is a piece of.
    #[getter]
    fn allocation(&self, py: Python<'_>) -> Py<Allocation> {
        self.allocation.clone_ref(py)
    }

    /// numpy's array interface, version 3.
    #[getter(__array_interface__)]
    fn array_interface<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let out = PyDict::new(py);
        out.set_item("version", 3)?;
        out.set_item("shape", PyTuple::new(py, &self.shape)?)?;
        out.set_item("typestr", &self.typestr)?;
        out.set_item("data", (self.address, false))?;
        Ok(out)
    }
}
