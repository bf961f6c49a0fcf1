"""Capacity: how large KV is, how long it takes, how many slots and servers, and which of them bites.

Every function says its units and where its formula comes from; none of them needs an agent or a GPU.
`capacity` puts them together for one decode server, and `kvxfer plan` prints that. For queues, bursts and
failures arithmetic is not enough.

>>> import kvxfer as kx
>>> kx.plan.kv_bytes(1, layers=80, kv_heads=8, head_dim=128) // 1024  # KiB a token
320
>>> kx.plan.model("qwen3-32b").bytes_per_token // 1024
256
>>> found = kx.plan.capacity(
...     kx.plan.model("qwen3-32b"),
...     qps=8, prompt=16_000, output=128, tpot_ms=10.4, slots=8, link_gbit_s=400, tp=8,
... )
>>> found.bites.name
'slots'

(`kvxfer.plan_transfer` is something else: the writes that carry a range of tokens between two page lists.)
"""

from __future__ import annotations

from kvxfer.plan._capacity import LINK_LIMIT, LOOP_LIMIT, Capacity, Limit, capacity
from kvxfer.plan._config import shape_from_config
from kvxfer.plan._formulas import (
    FIELD_POSTING,
    KVXFER_POSTING,
    SLOTS_LIMIT,
    Choice,
    Offload,
    PostingCost,
    Split,
    answer_s,
    best_split,
    crossover_tokens,
    fit_posting,
    gb_per_s,
    kv_bytes,
    loop_lost_fraction,
    offload,
    posting_ms_from_tpot,
    prefill_decode_ratio,
    recompute_ms,
    recompute_or_transfer,
    slots_held,
    slots_needed,
    slots_out_qps,
    tpot_without_posting,
    transfer_ms,
)
from kvxfer.plan._models import MODELS, model
from kvxfer.plan._shape import KvGroup, ModelShape, dtype_bytes

__all__ = [
    "FIELD_POSTING",
    "KVXFER_POSTING",
    "LINK_LIMIT",
    "LOOP_LIMIT",
    "MODELS",
    "SLOTS_LIMIT",
    "Capacity",
    "Choice",
    "KvGroup",
    "Limit",
    "ModelShape",
    "Offload",
    "PostingCost",
    "Split",
    "answer_s",
    "best_split",
    "capacity",
    "crossover_tokens",
    "dtype_bytes",
    "fit_posting",
    "gb_per_s",
    "kv_bytes",
    "loop_lost_fraction",
    "model",
    "offload",
    "posting_ms_from_tpot",
    "prefill_decode_ratio",
    "recompute_ms",
    "recompute_or_transfer",
    "shape_from_config",
    "slots_held",
    "slots_needed",
    "slots_out_qps",
    "tpot_without_posting",
    "transfer_ms",
]
