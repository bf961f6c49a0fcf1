//! `kvxfer.Unreleased`.

use kvxfer_proto::node;
use pyo3::prelude::*;

/// A room whose pages may still be written or read by a peer, as `Agent.close` reports it. The agent's memory
/// is kept for as long as the process lives.
#[pyclass(frozen, eq, get_all, module = "kvxfer")]
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Unreleased {
    /// The room.
    room: u64,
    /// Its pages, one list a group.
    pages: Vec<Vec<u32>>,
    /// The peers that have not answered, as `Agent.evict` takes them: names, or incarnations in hex of those
    /// that never said one.
    peers: Vec<String>,
}

impl From<node::Unreleased> for Unreleased {
    fn from(u: node::Unreleased) -> Self {
        Self { room: u.room.get(), pages: u.pages.iter().map(|list| list.to_vec()).collect(), peers: u.names }
    }
}

#[pymethods]
impl Unreleased {
    fn __repr__(&self) -> String {
        let pages: usize = self.pages.iter().map(Vec::len).sum();
        format!("Unreleased(room={}, {pages} pages, peers={:?})", self.room, self.peers)
    }
}
