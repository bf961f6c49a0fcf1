"""What things take: one model of a step, a link and a posting for every server and every mode.

A step of an engine is priced by a roofline, whoever runs it: a fixed overhead, the weights read once or the
multiplications of the tokens in it, whichever takes longer, the KV cache of the answers in it read once, and
the attention of the prompt's chunk. A prefill server, a decode server and a unified one differ in what they
put in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvxfer.plan import FIELD_POSTING

__all__ = ["DEFAULTS", "Costs", "Default"]


@dataclass(frozen=True)
class Default:
    """A number that holds until it is measured or given.

    Args:
        value: the number.
        unit: its unit.
        source: where it is from.
    """

    value: float
    unit: str
    source: str


_FITTED = (
    "fitted to two public times per token of Qwen3-32B at TP8, 8 req/s and 128-token answers, posting off "
    "the loop: 5.52 ms at 2,000 tokens and 7.0 ms at 16,000"
)
_POSTING = (
    "kvxfer.plan.FIELD_POSTING, a line through public figures of pull: 14.7 ms at 2,000 tokens, and what "
    "the loop lost at 16,000 (7.0 to 10.4 ms a token at 8 req/s)"
)

DEFAULTS: dict[str, Default] = {
    "gpu_tflops": Default(
        989, "10^12 bf16 operations a second, a GPU", "H200 SXM, NVIDIA's data sheet, dense"
    ),
    "hbm_gb_s": Default(4800, "10^9 bytes a second, a GPU", "H200 SXM, NVIDIA's data sheet"),
    "hbm_gb": Default(141, "10^9 bytes, a GPU", "H200 SXM, NVIDIA's data sheet"),
    "hbm_use": Default(0.9, "fraction of memory for weights and KV", "vLLM's usual gpu_memory_utilization"),
    "nic_gb_s": Default(
        50, "10^9 bytes a second each way, a GPU", "400 Gbit/s a GPU: AWS p5en, or one ConnectX-7"
    ),
    "pcie_gb_s": Default(
        55,
        "10^9 bytes a second each way, a GPU",
        "PCIe 5.0 x16: 63 by the standard, less its protocol (assumed)",
    ),
    "flops_efficiency": Default(
        0.5, "fraction of the peak", "assumed: large dense prefill reaches 0.4 to 0.6"
    ),
    "hbm_efficiency": Default(0.5, "fraction of the peak", _FITTED),
    "step_overhead_ms": Default(1.98, "ms a step", _FITTED),
    "params_b": Default(32.8, "10^9 weights", "Qwen3-32B, its model card"),
    "active_params_b": Default(
        32.8, "10^9 weights that a token is multiplied with", "Qwen3-32B is dense: all"
    ),
    "weight_bytes": Default(2, "bytes a weight", "bf16"),
    "layers": Default(64, "layers", "Qwen3-32B, its config.json"),
    "query_heads": Default(64, "heads", "Qwen3-32B, its config.json"),
    "head_dim": Default(128, "elements a head", "Qwen3-32B, its config.json"),
    "kv_bytes_per_token": Default(262_144, "bytes", "Qwen3-32B: 2 x 64 layers x 8 KV heads x 128 x 2 bytes"),
    "post_fixed_ms": Default(FIELD_POSTING.base_ms, "ms a hand-off", _POSTING),
    "post_ms_per_token": Default(FIELD_POSTING.ms_per_token, "ms a token", _POSTING),
    "call_ms": Default(
        0.005,
        "ms on the caller's loop for a hand-off that a thread posts",
        "kvxfer bench post: its bar for push and expect",
    ),
    "control_ms": Default(
        0.5, "ms a message between router and servers", "assumed: one hop in a data centre"
    ),
    "detect_ms": Default(1000, "ms until a broken hand-off is known", "kvxfer's heartbeat, 1 s"),
}


@dataclass(frozen=True)
class Costs:
    """Every number the simulation stands on; `DEFAULTS` has each one's unit and source.

    The same `Costs` price every mode: nothing here names one.
    """

    gpu_tflops: float = DEFAULTS["gpu_tflops"].value
    hbm_gb_s: float = DEFAULTS["hbm_gb_s"].value
    hbm_gb: float = DEFAULTS["hbm_gb"].value
    hbm_use: float = DEFAULTS["hbm_use"].value
    nic_gb_s: float = DEFAULTS["nic_gb_s"].value
    pcie_gb_s: float = DEFAULTS["pcie_gb_s"].value
    flops_efficiency: float = DEFAULTS["flops_efficiency"].value
    hbm_efficiency: float = DEFAULTS["hbm_efficiency"].value
    step_overhead_ms: float = DEFAULTS["step_overhead_ms"].value
    params_b: float = DEFAULTS["params_b"].value
    active_params_b: float = DEFAULTS["active_params_b"].value
    weight_bytes: float = DEFAULTS["weight_bytes"].value
    layers: float = DEFAULTS["layers"].value
    query_heads: float = DEFAULTS["query_heads"].value
    head_dim: float = DEFAULTS["head_dim"].value
    kv_bytes_per_token: float = DEFAULTS["kv_bytes_per_token"].value
    post_fixed_ms: float = DEFAULTS["post_fixed_ms"].value
    post_ms_per_token: float = DEFAULTS["post_ms_per_token"].value
    call_ms: float = DEFAULTS["call_ms"].value
    control_ms: float = DEFAULTS["control_ms"].value
    detect_ms: float = DEFAULTS["detect_ms"].value

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name.endswith(("_ms", "_per_token")) else 1e-12
            if not least <= value < 1e18:
                raise ValueError(
                    f"{item.name} is {value}: it must be {'0 or more' if not least else 'above 0'}"
                )

    def post_ms(self, tokens: float) -> float:
        """Time to build and post the descriptors of a hand-off of so many tokens, in ms: a + b x tokens."""
        return self.post_fixed_ms + self.post_ms_per_token * tokens

    def kv_bytes(self, tokens: float) -> float:
        """KV cache of so many tokens over all ranks, in bytes."""
        return self.kv_bytes_per_token * tokens

    def engine(self, tp: int) -> Engine:
        """The same numbers for an engine of `tp` GPUs, ready for the loop."""
        return Engine(self, tp)

    def described(self, sources: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
        """Each number with its unit and its source.

        Args:
            sources: of those that are not defaults, where they are from; of others it is said that they were
                given.
        """
        out = {}
        for item in fields(self):
            default, value = DEFAULTS[item.name], getattr(self, item.name)
            source = (sources or {}).get(item.name) or (default.source if value == default.value else "given")
            out[item.name] = {"value": value, "unit": default.unit, "source": source}
        return out


class Engine:
    """Costs of one engine of `tp` GPUs, in ms, tokens and bytes."""

    __slots__ = (
        "attention_ms",
        "call_ms",
        "kv_ms",
        "linear_ms",
        "link_bytes_ms",
        "overhead_ms",
        "pcie_bytes_ms",
        "tokens",
        "tp",
        "weights_ms",
    )

    def __init__(self, costs: Costs, tp: int) -> None:
        if tp < 1:
            raise ValueError(f"tp is {tp}: an engine has 1 GPU or more")
        flops_ms = tp * costs.gpu_tflops * 1e9 * costs.flops_efficiency
        hbm_ms = tp * costs.hbm_gb_s * 1e6 * costs.hbm_efficiency
        weights = costs.params_b * 1e9 * costs.weight_bytes
        self.tp = tp
        self.call_ms = costs.call_ms
        self.overhead_ms = costs.step_overhead_ms
        self.weights_ms = weights / hbm_ms
        self.linear_ms = 2 * costs.active_params_b * 1e9 / flops_ms
        self.kv_ms = costs.kv_bytes_per_token / hbm_ms
        # Two products (scores, values) of two operations over half of the square, for every layer and head.
        self.attention_ms = 2 * costs.layers * costs.query_heads * costs.head_dim / flops_ms
        self.link_bytes_ms = tp * costs.nic_gb_s * 1e6
        self.pcie_bytes_ms = tp * costs.pcie_gb_s * 1e6
        room = tp * costs.hbm_gb * 1e9 * costs.hbm_use - weights
        self.tokens = int(room // costs.kv_bytes_per_token)
        if self.tokens < 1:
            raise ValueError(
                f"weights of {weights / 1e9:.1f} GB leave no room for KV on {tp} GPUs of {costs.hbm_gb:g} "
                f"GB: take "
                "a larger --tp"
            )

    def step_ms(self, answers: int, kv_tokens: float, chunk: int = 0, squares: float = 0.0) -> float:
        """Time of a step.

        Args:
            answers: requests that get a token each.
            kv_tokens: tokens in their KV caches.
            chunk: tokens of prompts computed in the same step.
            squares: sum over their chunks of (tokens before + chunk)^2 - (tokens before)^2.
        """
        return (
            self.overhead_ms
            + max(self.weights_ms, self.linear_ms * (answers + chunk))
            + self.kv_ms * kv_tokens
            + self.attention_ms * squares
        )

    def prompt_ms(self, tokens: int, chunk: int) -> float:
        """Time to compute a prompt alone, in chunks."""
        whole, rest = divmod(tokens, chunk)
        total, before = 0.0, 0
        for size in [chunk] * whole + ([rest] if rest else []):
            total += self.step_ms(0, 0, size, float((before + size) ** 2 - before**2))
            before += size
        return total
