//! `kvxfer.Shard`.

use crate::args::Int;
use crate::errors;
use crate::layout::PageLayout;
use kvxfer_proto::layout;
use pyo3::prelude::*;
use pyo3::types::{PyRange, PyTuple};

/// Which heads and layers of the model a rank holds. Frozen; equal shards hash alike; pickles.
///
/// Tensor-parallel ranks split the KV heads into blocks, or share a head where there are more ranks than
/// heads; pipeline-parallel ranks hold blocks of consecutive layers.
///
/// Raises `BadArgument` for a rank that is not below its size.
///
/// >>> import kvxfer as kx
/// >>> kx.Shard(tp_rank=1, tp_size=2).heads(kx.PageLayout(layers=2, kv_heads=8, head_dim=128))
/// range(4, 8)
#[pyclass(frozen, eq, hash, module = "kvxfer")]
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Shard(pub(crate) layout::Shard);

#[pymethods]
impl Shard {
    #[new]
    #[pyo3(signature = (tp_rank=Int(0), tp_size=Int(1), pp_rank=Int(0), pp_size=Int(1)),
           text_signature = "(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)")]
    fn new(
        py: Python<'_>,
        tp_rank: Int<u32>,
        tp_size: Int<u32>,
        pp_rank: Int<u32>,
        pp_size: Int<u32>,
    ) -> PyResult<Self> {
        let shard =
            layout::Shard { tp_rank: tp_rank.0, tp_size: tp_size.0, pp_rank: pp_rank.0, pp_size: pp_size.0 };
        shard.validate().map_err(|e| errors::bad(py, e.to_string()))?;
        Ok(Self(shard))
    }

    /// Tensor-parallel rank.
    #[getter]
    fn tp_rank(&self) -> u32 {
        self.0.tp_rank
    }

    /// Tensor-parallel size.
    #[getter]
    fn tp_size(&self) -> u32 {
        self.0.tp_size
    }

    /// Pipeline-parallel rank.
    #[getter]
    fn pp_rank(&self) -> u32 {
        self.0.pp_rank
    }

    /// Pipeline-parallel size.
    #[getter]
    fn pp_size(&self) -> u32 {
        self.0.pp_size
    }

    /// The layers of this layout that the rank holds, in the model's numbering.
    fn layers<'py>(&self, py: Python<'py>, layout: &Bound<'py, PageLayout>) -> PyResult<Bound<'py, PyRange>> {
        let layers = self.0.layers(&layout.get().0);
        PyRange::new(py, to_isize(layers.start), to_isize(layers.end))
    }

    /// The KV heads of this layout that the rank holds; `range(0, 1)` for a latent layout.
    ///
    /// Raises `BadArgument` if neither of heads and ranks divides the other.
    fn heads<'py>(&self, py: Python<'py>, layout: &Bound<'py, PageLayout>) -> PyResult<Bound<'py, PyRange>> {
        let heads = self.0.heads(&layout.get().0).map_err(|e| errors::bad(py, e.to_string()))?;
        PyRange::new(py, to_isize(heads.start), to_isize(heads.end))
    }

    fn __repr__(&self) -> String {
        let s = &self.0;
        format!(
            "Shard(tp_rank={}, tp_size={}, pp_rank={}, pp_size={})",
            s.tp_rank, s.tp_size, s.pp_rank, s.pp_size
        )
    }

    fn __getnewargs__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let s = &self.0;
        PyTuple::new(py, [s.tp_rank, s.tp_size, s.pp_rank, s.pp_size])
    }
}

fn to_isize(n: u32) -> isize {
    isize::try_from(n).unwrap_or(isize::MAX)
}
