//! `kvxfer.PageLayout`.

use crate::args::Int;
use crate::errors;
use crate::shard::Shard;
use kvxfer_proto::layout::{
    CrossLayer, Factors, LayerSplit, MAX_BLOCKS, MAX_SPLIT, Scales, State, StateBlock,
};
use kvxfer_proto::{DType, Kind, Order, Side, layout};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple, PyType};

/// How one page of a layer group lies in memory. Frozen; equal layouts hash alike; pickles.
///
/// `layers` and `kv_heads` count the whole model's group, not a rank's: which of them a rank holds follows
/// from its `Shard`. `page_tokens` is the number of tokens a page. `dtype` takes names (`"bfloat16"`,
/// `"float16"`, `"float32"`, `"float8_e4m3"`, `"float8_e5m2"`, `"int8"`, `"uint8"` and more), numpy's and torch's
/// types. `order` is the order of a page's axes: `"HND"` (head, token, dim) or `"NHD"` (token, head, dim).
/// `kind` is `"kv"` (K and V in regions of their own), `"fused"` (a page holds K's half, then V's), `"packed"`
/// (K and V side by side for each token of each head), `"latent"` (MLA: one vector of `head_dim` a token, no
/// heads, held by every tensor-parallel rank; `kv_heads` may be left out) or `"state"` (one page a room, of
/// fixed size). 4-bit types (`"int4"`, `"uint4"`, `"float4_e2m1"`) lie two a byte, so their `head_dim` is even.
///
/// What is not so plain:
///
/// * `page_stride_bytes`: from one page to the next, where that is more than a page takes on this engine's
///   ranks.
/// * `cross_layer=True`: one region (of each part) holds all layers of the rank: a page has the first layer's
///   part, then the next one's, `layer_stride_bytes` apart (by default without a gap).
/// * `pp_layers`: layers of each pipeline rank, where they are not split as evenly as possible.
/// * `window_tokens`: only so many of the last tokens are held (sliding-window attention). Page lists of such
///   a group begin with the page of the first token held: at the end of the room for `expect`, at the end of
///   the push for `push`.
/// * `scale_dim`: that many scales of type `scale_dtype` for each token of each head, in regions of their own
///   (`"k_scale"`, `"v_scale"`, ...) of the same kind and order, with pages `scale_stride_bytes` apart.
/// * `k_scale`, `v_scale`: factors of whole tensors. A peer that has others (without a word: 1.0) is refused.
/// * `state`: the `StateBlock`s of a `"state"` layout, each split over tensor-parallel ranks by itself. Only
///   `layers` is given beside it. It is sent with the room's last token.
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

/// A `kvxfer.StateBlock`: units, bytes of one, rows, part.
type Block = (Int<u32>, Int<u32>, Int<u32>, Int<u32>);

fn known_dtype(py: Python<'_>, given: Option<&Bound<'_, PyAny>>, default: &str) -> PyResult<DType> {
    let name = given.map_or_else(|| Ok(default.to_owned()), dtype_name)?;
    DType::from_name(&name).ok_or_else(|| {
        let text = format!(
            "dtype {name:?} is not known: float32, float16, bfloat16, float8_e4m3, float8_e5m2, float8_e8m0, \
             int8, uint8, int4, uint4 and float4_e2m1 are"
        );
        errors::bad(py, text)
    })
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
    #[pyo3(signature = (*, layers, head_dim=None, kv_heads=None, page_tokens=None, dtype=None, order="HND",
                        kind="kv", page_stride_bytes=None, cross_layer=false, layer_stride_bytes=None,
                        pp_layers=None, window_tokens=None, scale_dim=None, scale_dtype=None,
                        scale_stride_bytes=None, k_scale=None, v_scale=None, state=None),
           text_signature = "(*, layers, head_dim=None, kv_heads=None, page_tokens=16, dtype='bfloat16', \
                             order='HND', kind='kv', page_stride_bytes=None, cross_layer=False, \
                             layer_stride_bytes=None, pp_layers=None, window_tokens=None, scale_dim=None, \
                             scale_dtype='float32', scale_stride_bytes=None, k_scale=None, v_scale=None, \
                             state=None)")]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        layers: Int<u32>,
        head_dim: Option<Int<u32>>,
        kv_heads: Option<Int<u32>>,
        page_tokens: Option<Int<u32>>,
        dtype: Option<&Bound<'_, PyAny>>,
        order: &str,
        kind: &str,
        page_stride_bytes: Option<Int<u64>>,
        cross_layer: bool,
        layer_stride_bytes: Option<Int<u64>>,
        pp_layers: Option<Vec<Int<u32>>>,
        window_tokens: Option<Int<u64>>,
        scale_dim: Option<Int<u32>>,
        scale_dtype: Option<&Bound<'_, PyAny>>,
        scale_stride_bytes: Option<Int<u64>>,
        k_scale: Option<f32>,
        v_scale: Option<f32>,
        state: Option<Vec<Block>>,
    ) -> PyResult<Self> {
        let order = match order {
            "HND" => Order::Hnd,
            "NHD" => Order::Nhd,
            other => return Err(errors::bad(py, format!("order {other:?} is not known: HND and NHD are"))),
        };
        let kind = match kind {
            "kv" => Kind::Kv,
            "fused" => Kind::Fused,
            "packed" => Kind::Packed,
            "latent" => Kind::Latent,
            "state" => Kind::State,
            other => {
                let text = format!("kind {other:?} is not known: kv, fused, packed, latent and state are");
                return Err(errors::bad(py, text));
            }
        };
        let missing =
            |what: &str| errors::bad(py, format!("{what} is missing: a {} layout has heads", kind.name()));
        let (head_dim, tokens, dtype) = if kind == Kind::State {
            if head_dim.is_some() || page_tokens.is_some_and(|n| n.0 != 1) || dtype.is_some() {
                let text = "a state has blocks of bytes: head_dim, page_tokens and dtype are not its own";
                return Err(errors::bad(py, text));
            }
            (1, 1, DType::Uint8)
        } else {
            let dim = head_dim.ok_or_else(|| missing("head_dim"))?.0;
            (dim, page_tokens.map_or(16, |n| n.0), known_dtype(py, dtype, "bfloat16")?)
        };
        // A latent has one vector a token, whatever the caller calls it, so that equal layouts compare equal.
        let kv_heads = match (kind, kv_heads) {
            (Kind::Latent | Kind::State, _) => 1,
            (_, Some(n)) => n.0,
            (_, None) => return Err(missing("kv_heads")),
        };
        let cross = cross_layer.then(|| CrossLayer { layer_stride: layer_stride_bytes.map(|n| n.0) });
        if layer_stride_bytes.is_some() && !cross_layer {
            return Err(errors::bad(py, "layer_stride_bytes is of no use without cross_layer=True"));
        }
        let split = pp_layers.map(|counts| {
            let counts: Vec<u32> = counts.iter().map(|n| n.0).collect();
            LayerSplit::new(&counts).ok_or_else(|| {
                let n = counts.len();
                let text =
                    format!("pp_layers has {n} counts; it has 1 to {MAX_SPLIT}, each of 65535 at most");
                errors::bad(py, text)
            })
        });
        let scales = match scale_dim {
            Some(dim) => Some(Scales {
                dim: dim.0,
                dtype: known_dtype(py, scale_dtype, "float32")?,
                page_stride: scale_stride_bytes.map(|n| n.0),
            }),
            None if scale_dtype.is_some() || scale_stride_bytes.is_some() => {
                return Err(errors::bad(
                    py,
                    "scale_dtype and scale_stride_bytes are of no use without scale_dim",
                ));
            }
            None => None,
        };
        let factors = match (k_scale, v_scale) {
            (None, None) => None,
            (k, v) => Some(Factors::new(k.unwrap_or(1.0), v.unwrap_or(1.0))),
        };
        let state = state.map(|blocks| {
            let blocks: Vec<StateBlock> = blocks
                .iter()
                .map(|(units, bytes, rows, part)| StateBlock {
                    units: units.0,
                    unit_bytes: bytes.0,
                    rows: rows.0,
                    part: part.0,
                })
                .collect();
            let n = blocks.len();
            State::new(&blocks)
                .ok_or_else(|| errors::bad(py, format!("state has {n} blocks; it has 1 to {MAX_BLOCKS}")))
        });
        let layout = layout::PageLayout {
            layers: layers.0,
            kv_heads,
            head_dim,
            page_tokens: tokens,
            dtype,
            order,
            kind,
            page_stride: page_stride_bytes.map(|n| n.0),
            cross,
            window: window_tokens.map(|n| n.0),
            split: split.transpose()?,
            scales,
            factors,
            state: state.transpose()?,
        };
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

    /// `"kv"`, `"fused"`, `"packed"`, `"latent"` or `"state"`.
    #[getter]
    fn kind(&self) -> &'static str {
        self.0.kind.name()
    }

    /// Bytes of one element; of two for a 4-bit type.
    #[getter]
    fn item_bytes(&self) -> u64 {
        self.0.dtype.bytes_of(self.0.dtype.packed())
    }

    /// Bytes from one page to the next, if it was given.
    #[getter]
    fn page_stride_bytes(&self) -> Option<u64> {
        self.0.page_stride
    }

    /// Whether all layers of a rank share pages.
    #[getter]
    fn cross_layer(&self) -> bool {
        self.0.cross.is_some()
    }

    /// Bytes from one layer of a page to the next, if it was given.
    #[getter]
    fn layer_stride_bytes(&self) -> Option<u64> {
        self.0.cross.and_then(|c| c.layer_stride)
    }

    /// Layers of each pipeline rank, if they were given.
    #[getter]
    fn pp_layers<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        self.0.split.map(|s| PyTuple::new(py, s.counts().collect::<Vec<_>>())).transpose()
    }

    /// How many of the last tokens are held, if not all.
    #[getter]
    fn window_tokens(&self) -> Option<u64> {
        self.0.window
    }

    /// Scales for each token of each head, if there are regions of them.
    #[getter]
    fn scale_dim(&self) -> Option<u32> {
        self.0.scales.map(|s| s.dim)
    }

    /// Name of the scales' type, if there are regions of them.
    #[getter]
    fn scale_dtype(&self) -> Option<&'static str> {
        self.0.scales.map(|s| s.dtype.name())
    }

    /// Bytes from one page of scales to the next, if it was given.
    #[getter]
    fn scale_stride_bytes(&self) -> Option<u64> {
        self.0.scales.and_then(|s| s.page_stride)
    }

    /// Factor of all of K, or of the latent.
    #[getter]
    fn k_scale(&self) -> f32 {
        self.0.factors.map_or(1.0, |f| f.k())
    }

    /// Factor of all of V.
    #[getter]
    fn v_scale(&self) -> f32 {
        self.0.factors.map_or(1.0, |f| f.v())
    }

    /// The blocks of a state; None for other kinds.
    #[getter]
    fn state<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(state) = &self.0.state else { return Ok(None) };
        let class = py.import("kvxfer._layout")?.getattr("StateBlock")?;
        let blocks = state.blocks().iter().map(|b| class.call1((b.units, b.unit_bytes, b.rows, b.part)));
        Ok(Some(PyTuple::new(py, blocks.collect::<PyResult<Vec<_>>>()?)?))
    }

    /// Bytes of one token of one head.
    #[getter]
    fn row_bytes(&self) -> u64 {
        self.0.row_bytes()
    }

    /// Names of a layer's regions, or with `cross_layer` of all the rank's layers: `("k", "v")`, `("kv",)`, `("latent",)`,
    /// the same with `_scale`, or `("state", "state1", ...)`.
    #[getter]
    fn parts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, (0..self.0.parts()).map(|part| self.0.parts_label(part)).collect::<Vec<_>>())
    }

    /// Bytes of one page of the first region on the rank with this shard: K and V count where they share it, and so do all of
    /// the rank's layers with `cross_layer`.
    ///
    /// Raises `BadArgument` if the heads cannot be split over the shard's ranks.
    fn page_bytes(&self, py: Python<'_>, shard: &Bound<'_, Shard>) -> PyResult<u64> {
        layout::page_bytes(&self.0, &shard.get().0).map_err(|e| errors::bad(py, e.to_string()))
    }

    /// For each of `parts` on the rank with this shard: the bytes that a page takes, and those from one page to the next.
    ///
    /// Raises `BadArgument` if the heads cannot be split over the shard's ranks, or a stride is too small.
    fn page_extents<'py>(&self, py: Python<'py>, shard: &Bound<'_, Shard>) -> PyResult<Bound<'py, PyTuple>> {
        let side = Side { groups: vec![self.0], shard: shard.get().0 };
        side.validate().map_err(|e| errors::bad(py, e.to_string()))?;
        let extents = (0..self.0.parts()).map(|part| {
            let page = layout::part_page(&self.0, &shard.get().0, part);
            page.map(|p| (p.bytes, p.stride)).map_err(|e| errors::bad(py, e.to_string()))
        });
        PyTuple::new(py, extents.collect::<PyResult<Vec<_>>>()?)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let args = self.kwargs(py)?;
        let args = args.iter().map(|(name, value)| Ok(format!("{name}={}", value.repr()?)));
        Ok(format!("PageLayout({})", args.collect::<PyResult<Vec<_>>>()?.join(", ")))
    }

    fn __getnewargs_ex__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyTuple>, Bound<'py, PyDict>)> {
        Ok((PyTuple::empty(py), self.kwargs(py)?))
    }
}

impl PageLayout {
    /// The arguments that make it.
    fn kwargs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (l, kwargs) = (&self.0, PyDict::new(py));
        kwargs.set_item("layers", l.layers)?;
        if l.state.is_none() {
            kwargs.set_item("kv_heads", l.kv_heads)?;
            kwargs.set_item("head_dim", l.head_dim)?;
            kwargs.set_item("page_tokens", l.page_tokens)?;
            kwargs.set_item("dtype", self.dtype())?;
            kwargs.set_item("order", self.order())?;
        }
        kwargs.set_item("kind", self.kind())?;
        if l.cross.is_some() {
            kwargs.set_item("cross_layer", true)?;
        }
        if l.factors.is_some() {
            kwargs.set_item("k_scale", self.k_scale())?;
            kwargs.set_item("v_scale", self.v_scale())?;
        }
        for (name, number) in [
            ("page_stride_bytes", l.page_stride),
            ("layer_stride_bytes", self.layer_stride_bytes()),
            ("window_tokens", l.window),
            ("scale_dim", self.scale_dim().map(u64::from)),
            ("scale_stride_bytes", self.scale_stride_bytes()),
        ] {
            if let Some(number) = number {
                kwargs.set_item(name, number)?;
            }
        }
        if let Some(dtype) = self.scale_dtype() {
            kwargs.set_item("scale_dtype", dtype)?;
        }
        if let Some(counts) = self.pp_layers(py)? {
            kwargs.set_item("pp_layers", counts)?;
        }
        if let Some(state) = self.state(py)? {
            kwargs.set_item("state", state)?;
        }
        Ok(kwargs)
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
