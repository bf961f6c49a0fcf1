"""The forward pass of a llama-type model in plain numpy, with its keys and values in pages.

Shapes below: `t` tokens of this call, `n` tokens so far (the cached ones and this call's), `h` KV heads of
this rank, `d` head_dim, `p` pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from .comm import Comm, SoloComm
from .weights import LayerSlice, ModelConfig, Weights

__all__ = ["Model", "Order", "PagedCache", "generate", "greedy", "prefill"]

F32 = npt.NDArray[np.float32]
Pages = npt.NDArray[np.int64]
Order = Literal["HND", "NHD"]

_DTYPES = (np.dtype(np.float16), np.dtype(np.float32))
# Every float16 as float32: looking one up takes a third of the time of numpy's conversion, which decode would
# otherwise spend a tenth of its time on.
_HALVES = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)


@dataclass(frozen=True)
class PagedCache:
    """Keys and values in pages, in memory that the caller owns.

    Token `i` of a sequence with page list `pages` is at slot `i % page_tokens` of page
    `pages[i // page_tokens]`, in every layer.

    Raises:
        ValueError: if the arrays differ in shape or dtype, or are not writeable float16 or float32.
    """

    k: Sequence[npt.NDArray[Any]]
    """One array a layer: `[p, h, page_tokens, d]` for HND, `[p, page_tokens, h, d]` for NHD."""
    v: Sequence[npt.NDArray[Any]]
    """As `k`."""
    order: Order = "HND"

    def __post_init__(self) -> None:
        if self.order not in get_args(Order):
            raise ValueError(f"order {self.order!r}, known are {', '.join(get_args(Order))}")
        if not self.k or len(self.k) != len(self.v):
            raise ValueError(f"{len(self.k)} layers of keys and {len(self.v)} of values")
        first = self.k[0]
        if first.ndim != 4 or first.dtype not in _DTYPES:
            raise ValueError(
                f"pages of shape {first.shape} and dtype {first.dtype}, 4-D float16 or float32 are needed"
            )
        for layer, array in [*enumerate(self.k), *enumerate(self.v)]:
            if array.shape != first.shape or array.dtype != first.dtype:
                raise ValueError(
                    f"layer {layer} has shape {array.shape} and dtype {array.dtype}, "
                    f"layer 0 {first.shape} and {first.dtype}"
                )
            if not array.flags.writeable:
                raise ValueError(f"layer {layer} is read-only")

    @classmethod
    def allocate(
        cls,
        config: ModelConfig,
        *,
        pages: int,
        page_tokens: int = 16,
        dtype: npt.DTypeLike = np.float16,
        order: Order = "HND",
        tp_size: int = 1,
    ) -> PagedCache:
        """A cache in ordinary memory for one rank of `tp_size`."""
        heads = config.kv_heads // tp_size
        inner = (heads, page_tokens) if order == "HND" else (page_tokens, heads)
        shape = (pages, *inner, config.head_dim)
        k = [np.zeros(shape, dtype) for _ in range(config.layers)]
        return cls(k, [np.zeros(shape, dtype) for _ in range(config.layers)], order)

    @property
    def pages(self) -> int:
        """How many pages there are."""
        return int(self.k[0].shape[0])

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return int(self.k[0].shape[1 if self.order == "HND" else 2])

    @property
    def page_tokens(self) -> int:
        """Tokens a page."""
        return int(self.k[0].shape[2 if self.order == "HND" else 1])

    def write(self, layer: int, keys: F32, values: F32, pages: Pages, start: int) -> None:
        """Puts keys and values (`[t, h, d]`) of tokens `start...` into the pages, rounded to their dtype."""
        position = np.arange(start, start + len(keys))
        page, slot = pages[position // self.page_tokens], position % self.page_tokens
        for array, new in ((self.k[layer], keys), (self.v[layer], values)):
            if self.order == "HND":
                array[page, :, slot] = new
            else:
                array[page, slot] = new

    def read(self, layer: int, pages: Pages, tokens: int) -> tuple[F32, F32]:
        """Keys and values of the first `tokens` tokens, each `[h, tokens, d]`, as float32."""
        page = pages[: -(-tokens // self.page_tokens)]
        k, v = (self._gather(array[page])[:, :tokens] for array in (self.k[layer], self.v[layer]))
        return k, v

    def _gather(self, taken: npt.NDArray[Any]) -> F32:
        axes = (1, 0, 2, 3) if self.order == "HND" else (2, 0, 1, 3)
        wide: F32 = _HALVES.take(taken.view(np.uint16)) if taken.dtype == np.float16 else taken
        return np.ascontiguousarray(wide.transpose(axes)).reshape(self.heads, -1, taken.shape[3])


class Model:
    """One tensor-parallel rank of the model.

    Rank `r` of `s` holds KV heads `r * kv_heads / s ...`, their query heads, and the same share of the MLP
    and the vocabulary. All ranks must make the same calls; each returns the same logits, bit for bit.

    Args:
        weights: the model's weights; this rank's share is dequantised here.
        cache: pages for this rank's KV heads, in any memory; others may write to them between calls.
        tp_rank: this rank.
        tp_size: number of ranks: a divisor of the number of KV heads (1 or 3 for SmolLM2-135M).
        comm: the ranks' group; may be left out for a single rank.

    Raises:
        ValueError: if the numbers don't fit each other.
    """

    def __init__(
        self,
        weights: Weights,
        cache: PagedCache,
        tp_rank: int = 0,
        tp_size: int = 1,
        comm: Comm | None = None,
    ) -> None:
        config = weights.config
        comm = SoloComm() if comm is None else comm
        if not 0 <= tp_rank < tp_size or weights.slices % tp_size:
            raise ValueError(f"tp_rank {tp_rank} of tp_size {tp_size} cannot hold {weights.slices} KV heads")
        if (comm.rank, comm.size) != (tp_rank, tp_size):
            raise ValueError(
                f"comm is rank {comm.rank} of {comm.size}, the model rank {tp_rank} of {tp_size}"
            )
        share = weights.slices // tp_size
        layers, heads, dim = len(cache.k), cache.heads, cache.k[0].shape[3]
        if (layers, heads, dim) != (config.layers, share, config.head_dim):
            raise ValueError(
                f"the cache has {layers} layers of {heads} KV heads of {dim}, rank {tp_rank} of {tp_size} "
                f"needs {config.layers} of {share} of {config.head_dim}"
            )
        self.weights = weights
        self.config = config
        self.cache = cache
        self.tp_rank = tp_rank
        self.tp_size = tp_size
        self._comm = comm
        self._slices = [weights.model_slice(tp_rank * share + i) for i in range(share)]
        self._queries = config.heads // weights.slices
        half = config.head_dim // 2
        self._frequencies = config.rope_base ** (-np.arange(half, dtype=np.float64) / half)

    def forward(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        start: int,
        pages: Sequence[int] | npt.NDArray[np.integer[Any]],
        on_layer: Callable[[int], None] | None = None,
    ) -> F32:
        """Computes `tokens`, which follow `start` tokens whose keys and values are already in `pages`.

        Args:
            tokens: `[t]`, at least one.
            start: how many tokens of the sequence come before.
            pages: the sequence's page ids, in order, enough for `start + t` tokens.
            on_layer: called with the layer's number as soon as the layer's keys and values of these tokens
                are in the pages and before the layer goes on: the moment to push them.

        Returns:
            The logits of the last token, `[vocab]`.

        Raises:
            ValueError: if a token or page id is out of range, or the tokens don't fit.
            CommError: if another rank is gone.
        """
        ids, page_ids = self._check(tokens, start, pages)
        x = self.weights.embed(ids)
        rope = self._rope_tables(start, len(ids))
        for layer in range(self.config.layers):
            parts = [piece.layers[layer] for piece in self._slices]
            normed = self._norm(x, self.weights.attention_norms[layer])
            x = x + self._attention(layer, parts, normed, start, page_ids, rope, on_layer)
            normed = self._norm(x, self.weights.ffn_norms[layer])
            x = x + self._reduce(_mlp(part, normed) for part in parts)
        last = self._norm(x[-1:], self.weights.final_norm)
        logits = np.concatenate([_project(last, piece.vocab)[0] for piece in self._slices])
        return self._comm.all_gather(logits).reshape(-1)

    def _check(self, tokens: Any, start: int, pages: Any) -> tuple[npt.NDArray[np.int64], Pages]:
        ids, page_ids = np.asarray(tokens, dtype=np.int64), np.asarray(pages, dtype=np.int64)
        if ids.ndim != 1 or page_ids.ndim != 1 or not len(ids) or start < 0:
            raise ValueError(
                f"tokens of shape {ids.shape} from {start} on in pages of shape {page_ids.shape}"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab:
            raise ValueError(f"a token is not in 0..{self.config.vocab}: {ids.min()} to {ids.max()}")
        room = min(len(page_ids) * self.cache.page_tokens, self.config.context)
        if start + len(ids) > room:
            raise ValueError(
                f"{start} + {len(ids)} tokens do not fit {len(page_ids)} pages of {self.cache.page_tokens} "
                f"tokens and a context of {self.config.context}"
            )
        if page_ids.min() < 0 or page_ids.max() >= self.cache.pages:
            raise ValueError(f"a page is not in 0..{self.cache.pages}: {page_ids.min()} to {page_ids.max()}")
        return ids, page_ids

    def _attention(
        self,
        layer: int,
        parts: list[LayerSlice],
        x: F32,
        start: int,
        pages: Pages,
        rope: tuple[F32, F32],
        on_layer: Callable[[int], None] | None,
    ) -> F32:
        """Attention of one layer over `x` (`[t, hidden]`), summed over all ranks: `[t, hidden]`."""
        heads, dim = self._queries, self.config.head_dim
        # [h, t, q + 2, d]
        qkv = np.stack([_project(x, part.qkv) for part in parts]).reshape(len(parts), len(x), heads + 2, dim)
        turned = _rotate(qkv[:, :, : heads + 1], rope)
        keys, values = turned[:, :, heads].swapaxes(0, 1), qkv[:, :, heads + 1].swapaxes(0, 1)
        self.cache.write(layer, keys, values, pages, start)
        if on_layer is not None:
            on_layer(layer)
        k, v = self.cache.read(layer, pages, start + len(x))
        queries = turned[:, :, :heads]
        return self._reduce(
            _project(_attend(queries[i], k[i], v[i], start), part.output) for i, part in enumerate(parts)
        )

    def _reduce(self, partials: Iterator[F32]) -> F32:
        """The sum over this rank's slices and then over the ranks; always in slice order."""
        total = next(partials)
        for partial in partials:
            total = total + partial
        return self._comm.all_reduce(total)

    def _norm(self, x: F32, weight: F32) -> F32:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: F32 = x / np.sqrt(mean + np.float32(self.config.norm_eps)) * weight
        return normed

    def _rope_tables(self, start: int, count: int) -> tuple[F32, F32]:
        """Cosine and sine, each `[count, 1, d / 2]`."""
        angles = np.arange(start, start + count)[:, np.newaxis, np.newaxis] * self._frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _project(x: F32, weight: F32) -> F32:
    """`x` (`[t, in]`) through `weight` (`[out, in]`): `[t, out]`."""
    projected: F32 = (weight @ x[0])[np.newaxis] if len(x) == 1 else x @ weight.T
    return projected


def _rotate(x: F32, rope: tuple[F32, F32]) -> F32:
    """Rope on `[..., t, heads, d]`: element `i` turns with element `i + d / 2`."""
    cos, sin = rope
    half = x.shape[-1] // 2
    low, high = x[..., :half], x[..., half:]
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)


def _attend(queries: F32, k: F32, v: F32, start: int) -> F32:
    """Causal attention of query heads `[t, q, d]` over one KV head, `k` and `v` `[n, d]`: `[t, q * d]`."""
    count, heads, dim = queries.shape
    scores = (queries.reshape(-1, dim) @ k.T).reshape(count, heads, -1) * np.float32(dim**-0.5)
    if count > 1:
        future = np.arange(k.shape[0]) > np.arange(start, start + count)[:, np.newaxis]
        scores = np.where(future[:, np.newaxis], np.float32(-np.inf), scores)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed: F32 = scores.reshape(count * heads, -1) @ v
    return mixed.reshape(count, heads * dim)


def _mlp(part: LayerSlice, x: F32) -> F32:
    """One slice's share of the gated MLP, a partial sum: `[t, hidden]`."""
    both = _project(x, part.gate_up)
    rows = both.shape[1] // 2
    gate, up = both[:, :rows], both[:, rows:]
    # silu(g) = g * sigmoid(g), written with tanh because exp(-g) overflows.
    half = gate * np.float32(0.5)
    return _project(half * (np.tanh(half) + np.float32(1.0)) * up, part.down)


def greedy(logits: F32) -> int:
    """The likeliest token; of equals the first."""
    return int(np.argmax(logits))


def prefill(
    model: Model,
    tokens: Sequence[int],
    pages: Sequence[int],
    *,
    start: int = 0,
    chunk: int | None = None,
    on_layer: Callable[[int, int, int], None] | None = None,
) -> F32:
    """Computes a prompt, whole or in chunks.

    Args:
        model: this rank's model; every rank must use the same `chunk`.
        tokens: the whole prompt, at least one token past `start`.
        pages: its pages.
        start: how many of its tokens are already in the pages.
        chunk: tokens a chunk; `None` takes all at once.
        on_layer: called with `(layer, first token, number of tokens)` when a layer's keys and values of a
            chunk are in the pages.

    Returns:
        The logits of the last token, `[vocab]`.

    Raises:
        ValueError: as `Model.forward`, or if `chunk` is below 1 or nothing is left to compute.
    """
    if not 0 <= start < len(tokens) or (chunk is not None and chunk < 1):
        raise ValueError(f"nothing to compute: {len(tokens)} tokens from {start} on in chunks of {chunk}")
    step = len(tokens) - start if chunk is None else chunk

    def compute(first: int) -> F32:
        piece = tokens[first : first + step]

        def notify(layer: int) -> None:
            if on_layer is not None:
                on_layer(layer, first, len(piece))

        return model.forward(piece, first, pages, notify)

    *before, last = range(start, len(tokens), step)
    for first in before:
        compute(first)
    return compute(last)


def generate(
    model: Model, first: int, start: int, pages: Sequence[int], *, max_tokens: int, eos: int | None = None
) -> Iterator[int]:
    """Writes an answer greedily, token by token, from pages that hold the prompt.

    Args:
        model: this rank's model; every rank must iterate to the same point.
        first: the answer's first token, as chosen from the prefill's logits.
        start: tokens of the prompt, all in the pages.
        pages: the sequence's pages, enough for `start + max_tokens - 1` tokens.
        max_tokens: length of the answer, `first` included, at which to stop.
        eos: the token that ends the answer; it is not yielded.

    Yields:
        The answer's tokens, beginning with `first`.
    """
    token = first
    for position in range(start, start + max_tokens):
        if token == eos:
            return
        yield token
        if position + 1 < start + max_tokens:
            token = greedy(model.forward([token], position, pages))
