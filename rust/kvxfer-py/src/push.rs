//! `kvxfer.Push`.

use pyo3::prelude::*;

/// One push of one room, as `Agent.push` returns it: what `Agent.retract` takes and `Event.push` names.
#[pyclass(frozen, eq, hash, module = "kvxfer")]
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Push {
    /// Its number on the agent; later pushes have higher ones.
    #[pyo3(get)]
    pub(crate) id: u64,
    /// The room.
    #[pyo3(get)]
    pub(crate) room: u64,
}

#[pymethods]
impl Push {
    fn __repr__(&self) -> String {
        format!("Push(id={}, room={})", self.id, self.room)
    }
}
