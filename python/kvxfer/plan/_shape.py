"""What a model keeps of a request, as groups of layers that keep the same."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from kvxfer.errors import BadArgument
from kvxfer.plan._formulas import whole

__all__ = ["DTYPE_BYTES", "KvGroup", "ModelShape", "dtype_bytes"]

DTYPE_BYTES: dict[str, float] = {
    **dict.fromkeys(("bfloat16", "bf16", "float16", "fp16", "half"), 2),
    **dict.fromkeys(("float32", "fp32", "float"), 4),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"), 1),
    **dict.fromkeys(("fp4", "nvfp4", "int4"), 0.5),
}
"""Bytes of an element, by the names that engines and configs use."""


def dtype_bytes(name: str) -> float:
    """Bytes of an element of this type."""
    known = DTYPE_BYTES.get(name.removeprefix("torch.").lower())
    if known is None:
        raise BadArgument(f"KV type {name!r} is not known; there are: {', '.join(DTYPE_BYTES)}")
    return known


@dataclass(frozen=True)
class KvGroup:
    """Layers that keep the same."""

    kind: Literal["full", "window", "latent", "state"]
    """`full`: keys and values of every token. `window`: of the last `window_tokens`. `latent`: one vector a
    token, the same on every rank (MLA). `state`: a fixed number of bytes a request (Mamba, linear
    attention)."""
    layers: int
    kv_heads: int = 1
    head_dim: int = 0
    """Elements of a key; of the latent vector, its positional part included."""
    v_head_dim: int | None = None
    """Elements of a value, if not as many."""
    window_tokens: int | None = None
    state_bytes: int = 0
    """Bytes of one layer's state, whole model."""
    dtype_bytes: float | None = None
    """Bytes of an element, if not the model's."""
    scale_dim: int = 0
    """Scales beside each key and each value (or latent vector) of a token and head; as in
    `kvxfer.PageLayout`."""
    scale_bytes: int = 4

    def token_bytes(self, default_dtype_bytes: float) -> float:
        """Bytes that one more token adds in one layer, whole model."""
        if self.kind == "state":
            return 0.0
        each = self.dtype_bytes if self.dtype_bytes is not None else default_dtype_bytes
        scales = self.scale_dim * self.scale_bytes
        if self.kind == "latent":
            return self.head_dim * each + scales
        value = self.head_dim if self.v_head_dim is None else self.v_head_dim
        return self.kv_heads * ((self.head_dim + value) * each + 2 * scales)

    def kept(self, tokens: int) -> int:
        """Tokens of a request of so many that this group keeps."""
        return tokens if self.window_tokens is None else min(tokens, self.window_tokens)

    def rank_part(self, tp: int) -> float:
        """The part of the group that one of `tp` ranks holds. Latent KV is on each; heads can be split down
        to one."""
        if self.kind == "latent":
            return 1.0
        if self.kind == "state":
            return 1 / tp
        if tp <= self.kv_heads:
            return math.ceil(self.kv_heads / tp) / self.kv_heads
        return 1 / self.kv_heads


@dataclass(frozen=True)
class ModelShape:
    """What a model keeps of a request's tokens."""

    name: str
    groups: tuple[KvGroup, ...]
    dtype_bytes: float = 2
    """Bytes of an element of KV."""
    source: str = "given by hand"
    """Where the numbers come from."""
    notes: tuple[str, ...] = field(default=())
    """What was taken for granted."""

    def __post_init__(self) -> None:
        if not self.groups:
            raise BadArgument(f"{self.name}: no layer keeps anything: there is nothing to hand off")

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one more token adds on all ranks together, while no window is full."""
        return math.ceil(sum(g.layers * g.token_bytes(self.dtype_bytes) for g in self.groups))

    @property
    def state_bytes(self) -> int:
        """Bytes of a request whatever its length (recurrent state)."""
        return sum(g.layers * g.state_bytes for g in self.groups)

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of a request of so many tokens, on all ranks together, a latent counted once. Windows count
        for no more than their length."""
        whole("tokens", tokens, "16000", least=0)
        kept = sum(g.layers * g.kept(tokens) * g.token_bytes(self.dtype_bytes) for g in self.groups)
        return math.ceil(kept) + (self.state_bytes if tokens else 0)

    def rank_bytes(self, tokens: int, tp: int = 1) -> int:
        """Bytes of a request on one of `tp` tensor-parallel ranks (the fullest, where heads do not
        divide)."""
        whole("tokens", tokens, "16000", least=0)
        whole("tp", tp, "8")
        total = 0.0
        for g in self.groups:
            tokens_bytes = g.kept(tokens) * g.token_bytes(self.dtype_bytes)
            total += g.layers * (tokens_bytes + (g.state_bytes if tokens else 0)) * g.rank_part(tp)
        return math.ceil(total)
