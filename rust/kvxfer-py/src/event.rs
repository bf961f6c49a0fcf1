//! `kvxfer.Event`.

use crate::errors;
use crate::push::Push;
use crate::room_stats::RoomStats;
use kvxfer_engine::AgentEvent;
use kvxfer_proto::node::EventKind;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyBytes;

/// Something that happened to a room, as `poll`, `wait` and `wait_async` give it.
///
/// Each room yields exactly one `"Success"` or `"Failed"` and exactly one event with `released` true on each
/// side (they may be one). Pages may be reused only after the latter.
#[pyclass(frozen, module = "kvxfer")]
pub(crate) struct Event {
    event: AgentEvent,
    error: PyOnceLock<Py<PyAny>>,
}

impl Event {
    pub(crate) fn new(event: AgentEvent) -> Self {
        Self { event, error: PyOnceLock::new() }
    }

    /// The event, or if the room failed the error that says why.
    pub(crate) fn or_raise(self, py: Python<'_>) -> PyResult<Self> {
        match self.event.error() {
            Some(reason) => Err(errors::reason(py, self.event.room.get(), reason)),
            None => Ok(self),
        }
    }
}

#[pymethods]
impl Event {
    /// The room.
    #[getter]
    fn room(&self) -> u64 {
        self.event.room.get()
    }

    /// `"Success"` and `"Failed"` end a room; `"Released"` says that a failed room's pages are free,
    /// `"Retracted"` that a retracted push's are.
    #[getter]
    fn state(&self) -> &'static str {
        match self.event.kind {
            EventKind::Success => "Success",
            EventKind::Failed(_) => "Failed",
            EventKind::Released => "Released",
            EventKind::Retracted(_) => "Retracted",
        }
    }

    /// Whether the pages may be reused from now on: the room's, or for `"Retracted"` the push's.
    #[getter]
    fn released(&self) -> bool {
        self.event.released
    }

    /// The push that was retracted, for `"Retracted"`.
    #[getter]
    fn push(&self) -> Option<Push> {
        match self.event.kind {
            EventKind::Retracted(id) => Some(Push { id: id.0, room: self.event.room.get() }),
            _ => None,
        }
    }

    /// Why the room failed: an exception of its kind, not raised; None unless `"Failed"`.
    #[getter]
    fn error(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        let reason = self.event.error()?;
        let error = self
            .error
            .get_or_init(py, || errors::reason(py, self.event.room.get(), reason).into_value(py).into_any());
        Some(error.clone_ref(py))
    }

    /// The metadata of the source's last push, with decode's `"Success"`.
    #[getter]
    fn meta<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyBytes>> {
        self.event.meta.as_ref().map(|meta| PyBytes::new(py, meta))
    }

    /// What the room cost so far.
    #[getter]
    fn stats(&self) -> RoomStats {
        RoomStats {
            bootstrap_us: self.event.stats.bootstrap_us,
            waiting_us: self.event.stats.waiting_us,
            transfer_us: self.event.stats.transfer_us,
            bytes: self.event.stats.bytes,
            writes: self.event.stats.writes,
            first_write_at_us: self.event.first_write_at_us,
            at_us: self.event.at_us,
        }
    }

    fn __repr__(&self) -> String {
        let e = &self.event;
        let push = match e.kind {
            EventKind::Retracted(id) => format!(", push={}", id.0),
            _ => String::new(),
        };
        let error = e.error().map(|reason| format!(", error={:?}", reason.text)).unwrap_or_default();
        let released = if e.released { "True" } else { "False" };
        format!(
            "Event(room={}, state='{}', released={released}{push}{error}, bytes={})",
            e.room,
            self.state(),
            e.stats.bytes
        )
    }
}
