"""How KV pages lie in vLLM's tensors, as a `PageLayout`.

vLLM gives each layer a tensor [blocks, heads, tokens, 2 * head_dim], whatever the order in memory. What is
inside a block depends on the attention kernel:

* **rows**: K and V side by side for each token of each head (GPU kernels), head or token first. The unit that
  moves is a token.
* **tiles**: vLLM's CPU kernel keeps, for each head of a block, K's half and then V's, and orders the elements
  of 32 tokens in its own way inside (K transposed). The unit that moves is a *tile*: 32 tokens of one head, K
  and then V. In a block of 32 tokens this is what lies in memory. In larger blocks the tiles' elements are
  interleaved: such an engine keeps a second copy of its pages in which they are apart, and is converted on
  the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvxfer._kvxfer import PageLayout, Shard
from kvxfer.errors import NotSupported

__all__ = ["TILE", "Cache", "Form", "Model", "form_of"]

# Tokens of a tile of the CPU kernels.
TILE = 32


@dataclass(frozen=True)
class Model:
    """What of the model decides how pages lie."""

    layers: int
    # Of the whole model, not of a rank.
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Cache:
    """One rank's tensors: those of its layers have one shape and one set of strides, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    # Bytes from one layer's tensor to the next one's, where they are all the same.
    layer_bytes: int | None
    item_bytes: int
    # The CPU kernel that reads the pages (`vec`, `amx`, ...), None for those that keep rows.
    isa: str | None


@dataclass(frozen=True)
class Form:
    """How the agent is told to see the memory."""

    layout: PageLayout
    # Tokens of one of the layout's "tokens".
    unit: int
    # What both sides must have in common beyond the layout.
    mode: str
    # Kernel whose blocks need converting, and so a second copy of the pages; None where the memory is as it
    # should be.
    converts: str | None = None


def form_of(cache: Cache, model: Model, shard: Shard, unit: Literal["tile", "block"] = "tile") -> Form:
    """Finds out how a rank's pages lie.

    Raises:
        NotSupported: where it is not known, with what was found.
    """
    if len(cache.shape) != 4:
        raise NotSupported(
            f"KV cache tensors of shape {list(cache.shape)}: KvxferConnector knows [blocks, heads, tokens,"
            " 2 * head_dim]; models with MLA or Mamba layers are not supported yet"
        )
    _, heads, tokens, content = cache.shape
    held = len(shard.heads(_probe(model)))
    if content != 2 * model.head_dim or heads != held:
        raise NotSupported(
            f"KV cache tensors of shape {list(cache.shape)}: expected {held} heads on this rank and"
            f" 2 * {model.head_dim} elements for each token"
        )
    if cache.isa is not None:
        return _tiles(cache, model, tokens, unit)
    return _rows(cache, model, tokens)


def _probe(model: Model) -> PageLayout:
    return PageLayout(layers=model.layers, kv_heads=model.kv_heads, head_dim=model.head_dim)


def _tiles(cache: Cache, model: Model, tokens: int, unit: Literal["tile", "block"]) -> Form:
    if tokens % TILE:
        raise NotSupported(
            f"blocks of {tokens} tokens: vLLM's CPU kernels keep tiles of {TILE}; set --block-size to a"
            " multiple"
        )
    if cache.strides != _contiguous(cache.shape):
        raise NotSupported(f"KV cache tensors with strides {list(cache.strides)}, which are not contiguous")
    span = tokens if unit == "block" else TILE
    layout = PageLayout(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=span * model.head_dim,
        page_tokens=tokens // span,
        dtype=cache.dtype,
        order="HND",
        kind="packed",
    )
    converts = cache.isa if tokens > span else None
    return Form(layout, span, f"{unit}:{cache.isa}", converts)


def _rows(cache: Cache, model: Model, tokens: int) -> Form:
    page, head, token, element = cache.strides
    _, heads, _, content = cache.shape
    if element != 1:
        raise NotSupported(
            f"KV cache tensors with strides {list(cache.strides)}: elements must be side by side"
        )
    if token == content and head == content * tokens:
        order = "HND"
    elif head == content and token == content * heads:
        order = "NHD"
    else:
        raise NotSupported(
            f"KV cache tensors of shape {list(cache.shape)} with strides {list(cache.strides)}:"
            " neither heads nor tokens are outermost in a block"
        )
    inside = heads * tokens * content
    if page < inside:
        raise NotSupported(f"KV cache tensors with strides {list(cache.strides)}: blocks overlap")
    # Where the blocks are outermost a block's layers are side by side, and one region holds them all.
    cross = page > inside and cache.layer_bytes is not None and cache.layer_bytes < page * cache.item_bytes
    layout = PageLayout(
        layers=model.layers,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        page_tokens=tokens,
        dtype=cache.dtype,
        order=order,
        kind="packed",
        cross_layer=cross,
        page_stride_bytes=page * cache.item_bytes if page != inside else None,
        layer_stride_bytes=cache.layer_bytes if cross else None,
    )
    return Form(layout, 1, "rows")


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 2, -1, -1):
        strides[i] = strides[i + 1] * shape[i + 1]
    return tuple(strides)


def _vec(half: Any, tiles: int, head_dim: int, *, back: bool) -> Any:
    """K of the `vec` kernels: [dim][token] over the whole block, and [tile][dim][token of the tile] apart."""
    if back:
        return half.unflatten(-1, (tiles, head_dim, TILE)).transpose(-3, -2).flatten(-3)
    return half.unflatten(-1, (head_dim, tiles, TILE)).transpose(-3, -2).flatten(-3)


def _amx(half: Any, tiles: int, head_dim: int, *, back: bool) -> Any:
    """V of the `amx` kernel: 16 dims at a time, [dims][tokens][16 dims]."""
    outer = head_dim // 16
    if back:
        return half.unflatten(-1, (tiles, outer, TILE * 16)).transpose(-3, -2).flatten(-3)
    return half.unflatten(-1, (outer, tiles, TILE * 16)).transpose(-3, -2).flatten(-3)


# What of K and V each kernel interleaves over a block; the other half has its tiles apart already.
_CONVERT: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "vec": (_vec, None),
    "vec16": (_vec, None),
    "amx": (None, _amx),
}


def can_convert(isa: str) -> bool:
    """Whether blocks of more than one tile are understood."""
    return isa in _CONVERT


def tiles_of(blocks: Any, isa: str) -> Any:
    """Blocks as the kernel keeps them [n, heads, tokens, 2 * head_dim] with their tiles apart, as a new
    tensor [n, heads, tiles, 2, 32 * head_dim].
    """
    n, heads, tokens, content = blocks.shape
    tiles, head_dim = tokens // TILE, content // 2
    halves = blocks.reshape(n, heads, 2, tokens * head_dim)
    parts = [
        (convert(halves[:, :, i], tiles, head_dim, back=False) if convert else halves[:, :, i]).reshape(
            n, heads, tiles, TILE * head_dim
        )
        for i, convert in enumerate(_CONVERT[isa])
    ]
    return _stack(parts)


def blocks_of(tiles: Any, isa: str, tokens: int) -> Any:
    """The reverse of `tiles_of`."""
    n, heads, count, _, size = tiles.shape
    head_dim = size // TILE
    parts = [
        convert(tiles[:, :, :, i].reshape(n, heads, -1), count, head_dim, back=True)
        if convert
        else tiles[:, :, :, i].reshape(n, heads, -1)
        for i, convert in enumerate(_CONVERT[isa])
    ]
    import torch

    return torch.stack(parts, dim=2).reshape(n, heads, tokens, 2 * head_dim)


def _stack(parts: list[Any]) -> Any:
    import torch

    return torch.stack(parts, dim=3)
