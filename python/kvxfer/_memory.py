"""Pools, and the regions of whatever memory an agent is given."""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from kvxfer import _device
from kvxfer._device import DeviceMemory
from kvxfer._kvxfer import Allocation, PageLayout, Shard, Span
from kvxfer.errors import BadArgument, NotSupported

Layouts: TypeAlias = PageLayout | Sequence[PageLayout]
Array: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"

# Regions start on the system's pages, which is what registration works in.
_ALIGN = 4096

# numpy's own type for each dtype, and the name that ml_dtypes has for those that numpy lacks.
_NUMPY_TYPES = {
    "float32": ("<f4", None),
    "float16": ("<f2", None),
    "bfloat16": ("<u2", "bfloat16"),
    "float8_e4m3": ("|u1", "float8_e4m3fn"),
    "float8_e5m2": ("|u1", "float8_e5m2"),
    "int8": ("|i1", None),
    "uint8": ("|u1", None),
    "float8_e8m0": ("|u1", "float8_e8m0fnu"),
    # Two a byte: no array type has them packed.
    "int4": ("|u1", None),
    "uint4": ("|u1", None),
    "float4_e2m1": ("|u1", None),
}
_FOUR_BITS = ("int4", "uint4", "float4_e2m1")

# DLPack's numbers for memory that the CPU reads: plain, and pinned by CUDA or ROCm.
_DLPACK_HOST = {1: "cpu", 3: "cuda pinned", 11: "rocm pinned"}


def groups_of(layout: Layouts) -> list[PageLayout]:
    """The layouts of each group."""
    groups = [layout] if isinstance(layout, PageLayout) else layout
    if not isinstance(groups, Sequence):
        raise TypeError(f"layout is a PageLayout or a list of them, not {type(groups).__name__}")
    for item in groups:
        if not isinstance(item, PageLayout):
            raise TypeError(f"layout is a PageLayout or a list of them, with {type(item).__name__} in it")
    if not groups:
        raise BadArgument("layout is an empty list: give one PageLayout a group")
    return list(groups)


def ucx_wheel_dir() -> Path | None:
    """The folder with the libraries of the `libucx` wheel, if it is installed; does not import it."""
    try:
        spec = importlib.util.find_spec("libucx")
    except (ImportError, ValueError):
        return None
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "lib"
        if path.is_dir():
            return path
    return None


class Pool:
    """Memory for the pages of one rank, in the form that a fabric moves best; made by `kvxfer.alloc`.

    The views are numpy arrays over the memory, without a copy: writing to one writes what a push sends. Their
    shapes are

    * `k(layer)` and `v(layer)` of a `"kv"` layout: `[pages, heads, page_tokens, head_dim]` for `order="HND"`,
      `[pages, page_tokens, heads, head_dim]` for `"NHD"`, with the heads of this rank;
    * `kv(layer)` of a `"fused"` layout: `[pages, 2, ...]`, K first, and then as above; of a `"packed"` one
      `[..., 2, head_dim]`;
    * `latent(layer)` of a `"latent"` layout: `[pages, page_tokens, head_dim]`;
    * `state(layer, part)` of a `"state"` layout: `[pages, bytes]`;
    * `tensors[group, layer, "k_scale"]` and so on, with `scale_dim` in place of `head_dim`.

    4-bit elements lie two a byte: the last axis has `head_dim / 2` bytes. Views of layouts with gaps between
    pages, or with all layers in one page, are not contiguous.

    numpy has no bfloat16 and no fp8: the views are `ml_dtypes` arrays if that package is installed, else
    `uint16` and `uint8`. Integer and float32/16 views go to other libraries with `__dlpack__`
    (`torch.from_dlpack(pool.k(0))`), and so does `pool.k(0).view("uint16")`. A view keeps the memory alive,
    also when the pool is gone.

    Layers have the model's numbers within their group: a pipeline rank has a range of them.
    """

    __slots__ = ("_allocation", "_regions", "_tensors", "layouts", "pages", "shard", "ucx_tls")

    layouts: tuple[PageLayout, ...]
    """Layout of each group."""
    shard: Shard
    """The heads and layers that the pool holds."""
    pages: tuple[int, ...]
    """Pages of each group."""
    ucx_tls: str | None
    """UCX's transports that the memory was made for, if they were named."""

    def __init__(
        self,
        layout: Layouts,
        shard: Shard,
        pages: int | Sequence[int],
        fabric: str = "auto",
        ucx_tls: str | None = None,
    ) -> None:
        groups = groups_of(layout)
        counts = [pages] * len(groups) if isinstance(pages, int) else [int(n) for n in pages]
        if len(counts) != len(groups):
            raise BadArgument(f"{len(counts)} page counts for {len(groups)} groups: give one a group")
        for g, count in enumerate(counts):
            if not 0 < count < 2**32:
                raise BadArgument(f"group {g} has {count} pages; there must be 1 to {2**32 - 1}")
        self.layouts, self.shard, self.pages = tuple(groups), shard, tuple(counts)
        places: dict[tuple[int, int, str], tuple[int, int]] = {}
        end = 0
        for g, (item, count) in enumerate(zip(groups, counts, strict=True)):
            extents = item.page_extents(shard)
            for layer in region_layers(item, shard):
                for part, (_, stride) in zip(item.parts, extents, strict=True):
                    places[g, layer, part] = (end, stride * count)
                    end += -(-stride * count // _ALIGN) * _ALIGN
        if not places:
            raise BadArgument(f"{shard} holds no layer: pp_size is larger than the number of layers")
        if end >= 2**63:
            raise BadArgument(f"a pool of {end} bytes is too large")
        self.ucx_tls = ucx_tls
        self._allocation = Allocation(end, fabric, ucx_tls=ucx_tls, ucx_wheel_dir=ucx_wheel_dir())
        self._regions: dict[tuple[int, int, str], Array] = {
            key: np.asarray(self._allocation.span(offset, [nbytes], "|u1"))
            for key, (offset, nbytes) in places.items()
        }
        tensors: dict[tuple[int, int, str], Array] = {}
        for (g, first, part), region in self._regions.items():
            layers = shard.layers(groups[g]) if groups[g].cross_layer else range(first, first + 1)
            for layer in layers:
                tensors[g, layer, part] = self._view(g, part, region, layer - first, len(layers))
        self._tensors: Mapping[tuple[int, int, str], Array] = MappingProxyType(tensors)

    def _view(self, group: int, part: str, region: Array, index: int, layers: int) -> Array:
        """One of the layers that lie in the pages of a region."""
        layout, scale = self.layouts[group], part.endswith("_scale")
        page, stride = layout.page_extents(self.shard)[layout.parts.index(part)]
        between = (None if scale else layout.layer_stride_bytes) or page // layers
        heads, tokens = len(self.shard.heads(layout)), layout.page_tokens
        dtype = layout.scale_dtype if scale and layout.scale_dtype else layout.dtype
        dim = layout.scale_dim if scale and layout.scale_dim else layout.head_dim
        shape = [heads, tokens] if layout.order == "HND" else [tokens, heads]
        if layout.kind == "latent":
            shape = [tokens]
        elif layout.kind == "fused":
            shape.insert(0, 2)
        elif layout.kind == "packed":
            shape.append(2)
        shape.append(dim // 2 if dtype in _FOUR_BITS else dim)
        if layout.kind == "state":
            shape = [page - between * (layers - 1)]
        typestr, other = _NUMPY_TYPES[dtype]
        item = np.dtype(typestr)
        if between % item.itemsize or stride % item.itemsize:
            raise BadArgument(
                f"group {group}: pages {stride} bytes apart and layers {between} do not hold whole"
                f" {dtype} elements"
            )
        steps = [item.itemsize]
        for n in reversed(shape[1:]):
            steps.insert(0, n * steps[0])
        array: Array = np.ndarray(
            (self.pages[group], *shape), item, region, between * index, (stride, *steps)
        )
        if other is not None:
            try:
                import ml_dtypes
            except ImportError:
                return array
            array = array.view(getattr(ml_dtypes, other))
        return array

    def state(self, layer: int, part: int = 0, group: int = 0) -> Array:
        """Bytes of one part of a layer of a state."""
        return self._get(group, layer, f"state{part}" if part else "state")

    @property
    def nbytes(self) -> int:
        """Bytes of memory, with what lies between the regions."""
        return self._allocation.nbytes

    @property
    def fabric(self) -> str:
        """Who allocated it: `"shm"` or `"ucx"`."""
        return self._allocation.fabric

    @property
    def tensors(self) -> Mapping[tuple[int, int, str], Array]:
        """Every view by `(group, layer, part)`, the part being one of the layout's `parts`."""
        return self._tensors

    def k(self, layer: int, group: int = 0) -> Array:
        """Keys of a layer."""
        return self._get(group, layer, "k")

    def v(self, layer: int, group: int = 0) -> Array:
        """Values of a layer."""
        return self._get(group, layer, "v")

    def kv(self, layer: int, group: int = 0) -> Array:
        """Keys and values of a layer of a fused layout."""
        return self._get(group, layer, "kv")

    def latent(self, layer: int, group: int = 0) -> Array:
        """Latent vectors of a layer of a latent layout."""
        return self._get(group, layer, "latent")

    def _get(self, group: int, layer: int, part: str) -> Array:
        try:
            return self._tensors[group, layer, part]
        except KeyError:
            pass
        if not 0 <= group < len(self.layouts):
            raise BadArgument(f"there is no group {group}: the pool has {len(self.layouts)}")
        layout = self.layouts[group]
        if part not in layout.parts:
            raise BadArgument(
                f"group {group} has no {part!r}: a {layout.kind!r} layout has {', '.join(layout.parts)}"
            )
        layers = self.shard.layers(layout)
        raise BadArgument(
            f"layer {layer} of group {group} is not here: the shard has {layers.start} to {layers.stop - 1}"
        )

    def __repr__(self) -> str:
        return f"<Pool of {self.nbytes} bytes, pages {list(self.pages)}, {self.shard!r}, {self.fabric}>"


def alloc(
    layout: Layouts,
    shard: Shard,
    pages: int | Sequence[int] = 512,
    fabric: str = "auto",
    *,
    ucx_tls: str | None = None,
) -> Pool:
    """Zeroed memory for `pages` pages of each group (an int, or one a group) on the rank with this shard.

    `fabric="shm"` is a sealed memfd, which peers on the same host map read-only; `"ucx"` lets UCX allocate,
    which its shared-memory transports need to be fast; `"auto"` is `"shm"`, for UCX's network transports take
    any memory. `ucx_tls` names UCX's transports; an agent with this pool uses the same. The memory is freed
    when the pool, its views and its agent are gone.

    Raises `BadArgument`, and `FabricError` if there is no memory or no UCX.

    >>> import kvxfer as kx
    >>> layout = kx.PageLayout(layers=2, kv_heads=4, head_dim=64, page_tokens=16, dtype="float16")
    >>> pool = kx.alloc(layout, kx.Shard(), pages=8)
    >>> pool.k(1).shape, str(pool.k(1).dtype)
    ((8, 4, 16, 64), 'float16')
    """
    return Pool(layout, shard, pages, fabric, ucx_tls)


class Region(NamedTuple):
    """One contiguous piece of memory."""

    address: int
    nbytes: int
    allocation: Allocation | None
    # The GPU that it is on, if it is.
    device: int | None = None


class Prepared(NamedTuple):
    """What the compiled agent takes, and what must live as long as it."""

    regions: list[tuple[int, int, Allocation | None]]
    pages: list[int]
    owner: object
    # One a region, or None if all of them are on the host.
    devices: list[int | None] | None = None


def prepare(memory: object, layout: Layouts, shard: Shard, *, read_only: bool) -> Prepared:
    """Finds the regions of `memory` in the order in which they are numbered, and the pages of each group."""
    groups = groups_of(layout)
    if isinstance(memory, Pool):
        if memory.layouts != tuple(groups) or memory.shard != shard:
            raise BadArgument(
                f"the pool was made for {list(memory.layouts)} and {memory.shard},"
                f" the agent is for {groups} and {shard}"
            )
        memory = memory._regions
    regions: list[Region] = []
    names: list[str] = []
    owners: list[object] = [memory]
    pages: list[int] = []
    for g, item in enumerate(groups):
        extents = dict(zip(item.parts, item.page_extents(shard), strict=True))
        first: tuple[str, int] | None = None
        for layer, entry in _entries(memory, g, item, shard, many=not isinstance(layout, PageLayout)):
            for part, tensor in _parts(entry, item, f"group {g} layer {layer}"):
                name = f"{part} of group {g} layer {layer}"
                page_bytes, stride = extents[part]
                region = _region(tensor, name, owners, stride, read_only=read_only)
                # Nothing need follow the last page.
                count, rest = divmod(region.nbytes, stride)
                if rest == page_bytes:
                    count, rest = count + 1, 0
                if count == 0 or rest:
                    apart = f", {stride} bytes apart" if stride > page_bytes else ""
                    raise BadArgument(
                        f"{name} has {region.nbytes} bytes, which is no multiple of a page's"
                        f" {page_bytes}{apart}"
                    )
                if count >= 2**32:
                    raise BadArgument(f"{name} has {count} pages; at most {2**32 - 1} are possible")
                if first is None:
                    first = (name, count)
                elif count != first[1]:
                    raise BadArgument(
                        f"{name} has {count} pages of {page_bytes} bytes, but {first[0]} has {first[1]}"
                    )
                regions.append(region)
                names.append(name)
        if first is None:
            raise BadArgument(
                f"{shard} holds no layer of group {g}: pp_size is larger than its {item.layers} layers"
            )
        pages.append(first[1])
    _refuse_overlap(regions, names)
    devices = [r.device for r in regions]
    return Prepared(
        [(r.address, r.nbytes, r.allocation) for r in regions],
        pages,
        owners,
        devices if any(n is not None for n in devices) else None,
    )


def _entries(
    memory: object, group: int, layout: PageLayout, shard: Shard, *, many: bool
) -> Iterator[tuple[int, object]]:
    """The layers of a group that have regions of their own, with what was given for each."""
    layers = region_layers(layout, shard)
    given: object = memory
    if isinstance(memory, Mapping) and any(isinstance(key, tuple) for key in memory):
        given = _of_group(memory, group, layout)
    elif many:
        if isinstance(memory, Mapping):
            if group not in memory:
                raise BadArgument(f"memory has nothing for group {group}")
            given = memory[group]
        elif isinstance(memory, (list, tuple)):
            if group >= len(memory):
                raise BadArgument(f"memory has {len(memory)} groups, but the layout has more")
            given = memory[group]
    if layout.cross_layer and layers:
        if isinstance(given, list) and len(given) == 1:
            given = given[0]
        elif isinstance(given, Mapping) and set(given) == set(layers):
            given = given[layers.start]
        yield layers.start, given
    elif isinstance(given, Mapping):
        if set(given) != set(layers):
            raise BadArgument(
                f"memory of group {group} has layers {sorted(given)},"
                f" but the shard holds {layers.start} to {layers.stop - 1}"
            )
        yield from ((layer, given[layer]) for layer in layers)
    elif isinstance(given, (list, tuple)):
        if len(given) != len(layers):
            raise BadArgument(
                f"memory of group {group} has {len(given)} layers, but the shard holds {len(layers)}"
                f" ({layers.start} to {layers.stop - 1})"
            )
        yield from zip(layers, given, strict=True)
    else:
        raise TypeError(
            "memory is a Pool, a list of tensors by layer, or a dict keyed by layer or (group, layer);"
            f" with several groups a list of them; not {type(given).__name__}"
        )


def _of_group(memory: Mapping[Any, Any], group: int, layout: PageLayout) -> dict[int, object]:
    """One group's layers of a mapping by (group, layer) or (group, layer, part)."""
    out: dict[int, Any] = {}
    for key, value in memory.items():
        if not isinstance(key, tuple) or len(key) not in (2, 3):
            raise BadArgument(
                f"memory has the key {key!r}; keys are all (group, layer), or all (group, layer, part)"
            )
        if key[0] != group:
            continue
        if len(key) == 2:
            out[key[1]] = value
        elif key[2] not in layout.parts:
            raise BadArgument(
                f"memory has the key {key!r}; parts of a {layout.kind!r} layout are {layout.parts}"
            )
        else:
            out.setdefault(key[1], {})[key[2]] = value
    return out


def _parts(entry: object, layout: PageLayout, name: str) -> Iterator[tuple[str, object]]:
    """The regions of a layer with what was given for each."""
    parts = layout.parts
    if isinstance(entry, Mapping):
        if set(entry) != set(parts):
            raise BadArgument(f"{name} has {sorted(entry)}, but a {layout.kind!r} layout has {list(parts)}")
        yield from ((part, entry[part]) for part in parts)
    elif len(parts) == 1:
        yield parts[0], entry
    elif isinstance(entry, (list, tuple)) and len(entry) == len(parts) and not _is_raw(entry):
        yield from zip(parts, entry, strict=True)
    elif parts == ("k", "v"):
        raise BadArgument(f"{name} must be a pair (k, v), because the layout keeps K and V apart (kind='kv')")
    else:
        raise BadArgument(f"{name} must be a tuple of {len(parts)}: {', '.join(parts)}")


def _is_raw(obj: Any) -> bool:
    return isinstance(obj, tuple) and len(obj) == 2 and all(isinstance(n, (int, np.integer)) for n in obj)


def region_layers(layout: PageLayout, shard: Shard) -> range:
    """The layers that have regions of their own: all of the rank's, or the first where they share one."""
    layers = shard.layers(layout)
    return layers[:1] if layout.cross_layer else layers


def _span(shape: Sequence[int], strides: Sequence[int], itemsize: int, page_stride: int) -> int | None:
    """The bytes from a tensor's first to its last, if its pages (the first axis) are contiguous and so far
    apart; else None.
    """
    if not shape or shape[0] == 0 or strides[0] != page_stride:
        return None
    page = itemsize
    for n, step in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if n != 1 and step != page:
            return None
        page *= n
    return (shape[0] - 1) * page_stride + page


def _region(tensor: Any, name: str, owners: list[object], stride: int, *, read_only: bool) -> Region:
    if _is_raw(tensor):
        address, nbytes = int(tensor[0]), int(tensor[1])
        if not 0 < address < 2**64 or not 0 <= nbytes <= 2**64 - address:
            raise BadArgument(f"{name}: address {address} and {nbytes} bytes are no memory")
        return Region(address, nbytes, None)
    if isinstance(tensor, DeviceMemory):
        return _on_device(tensor.address, tensor.nbytes, name, tensor.device)
    if isinstance(tensor, np.ndarray):
        return _array(tensor, name, owners, stride, read_only=read_only)
    if all(hasattr(tensor, a) for a in ("data_ptr", "numel", "element_size", "is_contiguous")):
        device = getattr(tensor, "device", "cpu")
        kind = getattr(device, "type", str(device))
        if kind != "cuda":
            _need_host(kind, name)
        size = tensor.element_size()
        span: int | None = tensor.numel() * size
        if not tensor.is_contiguous():
            span = _span(tuple(tensor.shape), [n * size for n in tensor.stride()], size, stride)
        if span is None:
            raise BadArgument(f"{name} is not contiguous: a region is one piece of memory")
        owners.append(tensor)
        if kind == "cuda":
            return _on_device(tensor.data_ptr(), span, name, getattr(device, "index", None))
        return Region(tensor.data_ptr(), span, None)
    if hasattr(tensor, "__cuda_array_interface__"):
        address, shape, steps, size, frozen = _device.cuda_array(tensor.__cuda_array_interface__, name)
        if frozen and not read_only:
            raise BadArgument(
                f"{name} is read-only, but the agent may receive into it; role='prefill' only sends"
            )
        owners.append(tensor)
        return _on_device(address, _extent(shape, steps, size, name, stride), name, None)
    if hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        kind, number = (int(n) for n in tensor.__dlpack_device__())
        if kind in _device.DLPACK_CUDA:
            address, shape, steps, size, capsule = _device.dlpack(tensor, name)
            owners += [tensor, capsule]
            return _on_device(address, _extent(shape, steps, size, name, stride), name, number)
        _need_host(_DLPACK_HOST.get(kind, f"DLPack device type {kind}"), name)
        try:
            array: Array = np.from_dlpack(tensor)
        except (BufferError, RuntimeError, TypeError, ValueError) as error:
            raise BadArgument(
                f"{name}: numpy cannot take this {type(tensor).__name__} by DLPack: {error}"
            ) from error
        # numpy marks what comes by DLPack as read-only unless its producer says otherwise; older ones cannot
        # say.
        owners.append(tensor)
        return _array(array, name, owners, stride, read_only=True)
    try:
        view = memoryview(tensor)
    except TypeError:
        raise TypeError(
            f"{name} is a {type(tensor).__name__}; memory is numpy arrays, torch tensors, anything with"
            " __dlpack__, __cuda_array_interface__ or a buffer, DeviceMemory, or pairs (address, nbytes)"
        ) from None
    if not view.c_contiguous:
        raise BadArgument(f"{name} is not contiguous: a region is one piece of memory")
    return _array(np.frombuffer(view, dtype=np.uint8), name, owners, stride, read_only=read_only)


def _extent(shape: tuple[int, ...], steps: list[int] | None, size: int, name: str, stride: int) -> int:
    """The bytes of a tensor of a GPU, from its first to its last."""
    whole = [size]
    for n in reversed(shape[1:]):
        whole.insert(0, n * whole[0])
    if steps is None or all(n == 1 or a == b for n, a, b in zip(shape, steps, whole, strict=False)):
        return math.prod(shape) * size
    span = _span(shape, steps, size, stride)
    if span is None:
        raise BadArgument(
            f"{name} is not contiguous (shape {shape}, strides {tuple(steps)}):"
            " a region is one piece of memory"
        )
    return span


def _on_device(address: int, nbytes: int, name: str, device: int | None) -> Region:
    return Region(address, nbytes, None, _device.check(address, nbytes, name, device))


def _array(array: Array, name: str, owners: list[object], stride: int, *, read_only: bool) -> Region:
    nbytes: int | None = array.nbytes
    if not array.flags.c_contiguous:
        nbytes = _span(array.shape, array.strides, array.itemsize, stride)
    if nbytes is None:
        raise BadArgument(
            f"{name} is not contiguous (shape {array.shape}, strides {array.strides}):"
            " a region is one piece of memory"
        )
    if not array.flags.writeable and not read_only:
        raise BadArgument(
            f"{name} is read-only, but the agent may receive into it; role='prefill' only sends"
        )
    owners.append(array)
    return Region(array.ctypes.data, nbytes, _allocation(array))


def _allocation(array: Array) -> Allocation | None:
    """The pool's memory that a view lies in."""
    base: object = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base.allocation if isinstance(base, Span) else None


def _need_host(device: str, name: str) -> None:
    if device not in ("cpu", *_DLPACK_HOST.values()):
        raise NotSupported(f"{name} is on {device}: only memory of the CPU and of CUDA devices is supported")


def _refuse_overlap(regions: list[Region], names: list[str]) -> None:
    order = sorted(range(len(regions)), key=lambda i: regions[i].address)
    for a, b in itertools.pairwise(order):
        if regions[a].address + regions[a].nbytes > regions[b].address:
            raise BadArgument(f"{names[a]} and {names[b]} overlap in memory: give each region its own")
