//! `kvxfer._kvxfer.Waiter`: a descriptor for one event loop.

use kvxfer_engine::Waiter as EngineWaiter;
use pyo3::prelude::*;
use std::os::fd::AsRawFd as _;

/// A descriptor that is readable after each room's end, until `clear`. It takes nothing from `poll`. Made by
/// `Agent._new_waiter`.
#[pyclass(frozen, module = "kvxfer._kvxfer")]
#[derive(Debug)]
pub(crate) struct Waiter(pub(crate) EngineWaiter);

#[pymethods]
impl Waiter {
    /// The descriptor; closed with this object.
    fn fileno(&self) -> i32 {
        self.0.fd().as_raw_fd()
    }

    /// Makes it unreadable until the next room's end.
    fn clear(&self) {
        self.0.clear();
    }
}
