//! From the engine's errors to the exceptions of `kvxfer.errors`.

use kvxfer_engine::{CallError, StartError, WaitError};
use kvxfer_fabric::FabricError;
use kvxfer_proto::{Reason, ReasonKind};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyModule, PyType};

/// The classes live in Python, where they can have two bases and pickle by name.
static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();

fn class<'py>(py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyType>> {
    let module = MODULE.get_or_try_init(py, || py.import("kvxfer.errors").map(Bound::unbind))?;
    Ok(module.bind(py).getattr(name)?.cast_into::<PyType>()?)
}

/// An exception of the class with this name.
pub(crate) fn raise(py: Python<'_>, name: &str, text: impl Into<String>) -> PyErr {
    match class(py, name) {
        Ok(class) => PyErr::from_type(class, (text.into(),)),
        Err(e) => e,
    }
}

/// The same, with the room that it is about as its attribute.
fn raise_for(py: Python<'_>, name: &str, text: String, room: u64) -> PyErr {
    let error = raise(py, name, text);
    match error.value(py).setattr("room", room) {
        Ok(()) => error,
        Err(e) => e,
    }
}

/// A wrong argument.
pub(crate) fn bad(py: Python<'_>, text: impl Into<String>) -> PyErr {
    raise(py, "BadArgument", text)
}

/// Something that is not built yet.
pub(crate) fn unsupported(py: Python<'_>, text: impl Into<String>) -> PyErr {
    raise(py, "NotSupported", text)
}

const fn reason_class(kind: ReasonKind) -> &'static str {
    match kind {
        ReasonKind::Internal => "InternalError",
        ReasonKind::LayoutMismatch => "LayoutMismatch",
        ReasonKind::PeerLost => "PeerLost",
        ReasonKind::TransferTimeout => "TransferTimeout",
        ReasonKind::Cancelled => "Cancelled",
        ReasonKind::StaleGrant => "StaleGrant",
        ReasonKind::AuthError => "AuthError",
        ReasonKind::PageError => "PageError",
        ReasonKind::RoomInUse => "RoomInUse",
        ReasonKind::TokensMismatch => "TokensMismatch",
        ReasonKind::FabricError => "FabricError",
        ReasonKind::ChecksumMismatch => "ChecksumMismatch",
        ReasonKind::VersionMismatch => "VersionMismatch",
        ReasonKind::ProtocolError => "ProtocolError",
        ReasonKind::Closed => "AgentClosed",
        ReasonKind::Unhealthy => "Unhealthy",
    }
}

/// Why a room failed.
pub(crate) fn reason(py: Python<'_>, room: u64, reason: &Reason) -> PyErr {
    raise_for(py, reason_class(reason.kind), reason.text.clone(), room)
}

/// Why a call was refused.
pub(crate) fn call(py: Python<'_>, error: &CallError) -> PyErr {
    let text = error.to_string();
    match error {
        CallError::QueueFull { .. } => raise(py, "QueueFull", text),
        CallError::RoomInUse(room) => raise_for(py, "RoomInUse", text, *room),
        CallError::UnknownRoom(room) => raise_for(py, "UnknownRoom", text, *room),
        CallError::Failed { room, reason } => raise_for(py, reason_class(reason.kind), text, *room),
        CallError::Closed => raise(py, "AgentClosed", text),
        CallError::Forked => raise(py, "Forked", text),
        CallError::BadArgument(_) => bad(py, text),
    }
}

/// Why a wait gave nothing.
pub(crate) fn wait(py: Python<'_>, error: &WaitError) -> PyErr {
    match error {
        WaitError::Timeout { room, .. } => raise_for(py, "WaitTimeout", error.to_string(), *room),
        WaitError::Call(e) => call(py, e),
    }
}

/// Why an agent did not start.
pub(crate) fn start(py: Python<'_>, error: &StartError) -> PyErr {
    let name = match error {
        StartError::BadArgument(_) | StartError::Layout(_) => "BadArgument",
        StartError::Listen { .. } => "ListenError",
        StartError::Auth(_) => "AuthError",
        StartError::Fabric(_) => "FabricError",
        StartError::Os { .. } => "InternalError",
    };
    raise(py, name, error.to_string())
}

/// Why a fabric failed.
pub(crate) fn fabric(py: Python<'_>, error: &FabricError) -> PyErr {
    raise(py, "FabricError", error.to_string())
}
