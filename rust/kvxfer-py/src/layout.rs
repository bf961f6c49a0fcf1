//! `kvxfer.PageLayout`.

use crate::args::Int;
use crate::errors;
use crate::shard::Shard;
use kvxfer_proto::{DType, Kind, Order, Side, layout};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};

/// How one page of a layer group lies in memory. Frozen; equal layouts hash alike; pickles.
///
/// `layers` and `kv_heads` count the whole model's group, not a rank's: which of them a rank holds follows
/// from its `Shard`. `page_tokens` is the number of tokens a page. `dtype` takes names (`"bfloat16"`,
/// `"float16"`, `"float32"`, `"float8_e4m3"`, `"float8_e5m2"`, `"int8"`, `"uint8"`), numpy's and torch's
/// types. `order` is the order of a page's axes: `"HND"` (head, token, dim) or `"NHD"` (token, head, dim).
/// `kind` is `"kv"` (K and V in regions of their own), `"fused"` (a page holds K's half, then V's) or
/// `"latent"` (MLA: one vector of `head_dim` a token, no heads, held by every tensor-parallel rank;
/// `kv_heads` may be left out).
///
/// Raises `BadArgument` for a size of zero or past its limit and for an unknown name.
///
/// >>> import kvxfer as kx
/// >>> layout = kx.PageLayout(layers=64, kv_heads=8, head_dim=128, page_tokens=16)
/// >>> layout.row_bytes, layout.page_bytes(kx.Shard(tp_rank=0, tp_size=8))
/// (256, 4096)
#[pyclass(frozen, eq, hash, module = "kvxfer")]
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct PageLayout(pub(crate) layout::PageLayout);

/// The name of a dtype given as text, as a type, or as something that prints as its name.
fn dtype_name(obj: &Bound<'_, PyAny>) -> PyResult<String> {
    if let Ok(text) = obj.cast::<PyString>() {
        return Ok(text.to_string());
    }
    if let Ok(class) = obj.cast::<PyType>() {
        return Ok(class.name()?.to_string());
    }
    Ok(obj.str()?.to_string())
}

const fn order_name(order: Order) -> &'static str {
    match order {
        Order::Hnd => "HND",
        Order::Nhd => "NHD",
    }
}

#[pymethods]
impl PageLayout {
    #[new]
    #[pyo3(signature = (*, layers, head_dim, kv_heads=None, page_tokens=Int(16), dtype=None, order="HND",
                        kind="kv"),
           text_signature = "(*, layers, head_dim, kv_heads=None, page_tokens=16, dtype='bfloat16', \
                             order='HND', kind='kv')")]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        layers: Int<u32>,
        head_dim: Int<u32>,
        kv_heads: Option<Int<u32>>,
        page_tokens: Int<u32>,
        dtype: Option<&Bound<'_, PyAny>>,
        order: &str,
        kind: &str,
    ) -> PyResult<Self> {
        let dtype = dtype.map_or_else(|| Ok("bfloat16".to_owned()), dtype_name)?;
        let dtype = DType::from_name(&dtype).ok_or_else(|| {
            errors::bad(
                py,
                format!(
                    "dtype {dtype:?} is not known: float32, float16, bfloat16, float8_e4m3, float8_e5m2, \
                     int8 and uint8 are"
                ),
            )
        })?;
        let order = match order {
            "HND" => Order::Hnd,
            "NHD" => Order::Nhd,
            other => return Err(errors::bad(py, format!("order {other:?} is not known: HND and NHD are"))),
        };
        let kind = match kind {
            "kv" => Kind::Kv,
            "fused" => Kind::Fused,
            "latent" => Kind::Latent,
            other => {
                return Err(errors::bad(
                    py,
                    format!("kind {other:?} is not known: kv, fused and latent are"),
                ));
            }
        };
        // A latent has one vector a token, whatever the caller calls it, so that equal layouts compare equal.
        let kv_heads = match (kind, kv_heads) {
            (Kind::Latent, _) => 1,
            (_, Some(n)) => n.0,
            (_, None) => {
                return Err(errors::bad(
                    py,
                    format!("kv_heads is missing: a {} layout has heads", kind.name()),
                ));
            }
        };
        let (layers, head_dim, page_tokens) = (layers.0, head_dim.0, page_tokens.0);
        let layout = layout::PageLayout { layers, kv_heads, head_dim, page_tokens, dtype, order, kind };
        layout.validate().map_err(|e| errors::bad(py, e.to_string()))?;
        Ok(Self(layout))
    }

    /// Layers of the group, over all pipeline ranks.
    #[getter]
    fn layers(&self) -> u32 {
        self.0.layers
    }

    /// KV heads of the model; 1 for a latent layout.
    #[getter]
    fn kv_heads(&self) -> u32 {
        self.0.kv_heads
    }

    /// Elements a head, or a latent vector.
    #[getter]
    fn head_dim(&self) -> u32 {
        self.0.head_dim
    }

    /// Tokens a page.
    #[getter]
    fn page_tokens(&self) -> u32 {
        self.0.page_tokens
    }

    /// Name of the element type.
    #[getter]
    fn dtype(&self) -> &'static str {
        self.0.dtype.name()
    }

    /// `"HND"` or `"NHD"`.
    #[getter]
    fn order(&self) -> &'static str {
        order_name(self.0.order)
    }

    /// `"kv"`, `"fused"` or `"latent"`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.name()
    }

    /// Bytes of one element.
    #[getter]
    fn item_bytes(&self) -> u64 {
        self.0.dtype.bytes()
    }

    /// Bytes of one token of one head.
    #[getter]
    fn row_bytes(&self) -> u64 {
        self.0.row_bytes()
    }

    /// Names of a layer's regions: `("k", "v")`, `("kv",)` or `("latent",)`.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, (0..self.0.parts()).map(|part| self.0.parts_label(part)).collect::<Vec<_>>())
    }

    /// Bytes of one page of one region on the rank with this shard; a fused page counts both halves.
    ///
    /// Raises `BadArgument` if the heads cannot be split over the shard's ranks.
    fn page_bytes(&self, py: Python<'_>, shard: &Bound<'_, Shard>) -> PyResult<u64> {
        layout::page_bytes(&self.0, &shard.get().0).map_err(|e| errors::bad(py, e.to_string()))
    }

    fn __repr__(&self) -> String {
        let l = &self.0;
        format!(
            "PageLayout(layers={}, kv_heads={}, head_dim={}, page_tokens={}, dtype='{}', order='{}', \
             kind='{}')",
            l.layers,
            l.kv_heads,
            l.head_dim,
            l.page_tokens,
            l.dtype.name(),
            order_name(l.order),
            l.kind.name()
        )
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        let kwargs = PyDict::new(py);
        kwargs.set_item("layers", self.0.layers)?;
        kwargs.set_item("kv_heads", self.0.kv_heads)?;
        kwargs.set_item("head_dim", self.0.head_dim)?;
        kwargs.set_item("page_tokens", self.0.page_tokens)?;
        kwargs.set_item("dtype", self.dtype())?;
        kwargs.set_item("order", self.order())?;
        kwargs.set_item("kind", self.kind())?;
        Ok((PyTuple::empty(py), kwargs))
    }
}

/// One side's geometry from a layout, or a list of them (one a group), and a shard. Not validated.
pub(crate) fn side(layout: &Bound<'_, PyAny>, shard: &Bound<'_, Shard>) -> PyResult<Side> {
    let one = |obj: &Bound<'_, PyAny>| match obj.cast::<PageLayout>() {
        Ok(layout) => Ok(layout.get().0),
        Err(_) => Err(PyTypeError::new_err(format!(
            "layout is a PageLayout or a list of them, not {}",
            obj.get_type().name()?
        ))),
    };
    let groups = if layout.is_instance_of::<PyList>() || layout.is_instance_of::<PyTuple>() {
        layout.try_iter()?.map(|item| one(&item?)).collect::<PyResult<_>>()?
    } else {
        vec![one(layout)?]
    };
    Ok(Side { groups, shard: shard.get().0 })
}
