//! `kvxfer.RoomStats`.

use pyo3::prelude::*;

/// Time and bytes of one room on this side, by stage.
#[pyclass(frozen, eq, get_all, module = "kvxfer")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct RoomStats {
    /// From the order until the peers were in contact, microseconds.
    pub(crate) bootstrap_us: u64,
    /// From contact until the first byte was ready to move, microseconds.
    pub(crate) waiting_us: u64,
    /// From then until the end, microseconds.
    pub(crate) transfer_us: u64,
    /// Bytes that this side saw delivered.
    pub(crate) bytes: u64,
    /// Writes (or copies) that they took.
    pub(crate) writes: u64,
    /// `time.monotonic_ns() // 1000` when this side moved its first byte; 0 if it moved none.
    pub(crate) first_write_at_us: u64,
    /// `time.monotonic_ns() // 1000` of the event.
    pub(crate) at_us: u64,
}

#[pymethods]
impl RoomStats {
    fn __repr__(&self) -> String {
        format!(
            "RoomStats(bootstrap_us={}, waiting_us={}, transfer_us={}, bytes={}, writes={}, \
             first_write_at_us={}, at_us={})",
            self.bootstrap_us,
            self.waiting_us,
            self.transfer_us,
            self.bytes,
            self.writes,
            self.first_write_at_us,
            self.at_us
        )
    }
}
