"""Results as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvxfer.simulate.costs import Costs
from kvxfer.simulate.result import Result

__all__ = ["LEGEND", "costs_rows", "notes", "sections"]


def _number(digits: int, scale: float = 1.0) -> Callable[[Any], str]:
    return lambda value: "-" if value is None else f"{value * scale:,.{digits}f}"


_MS, _MS1, _RATE, _PERCENT, _COUNT = _number(0), _number(2), _number(2), _number(0, 100), _number(0)
_GB = _number(1, 1e-9)

# Title, and for each column its head, its key and how it is written.
_SECTIONS: tuple[tuple[str, tuple[tuple[str, str, Callable[[Any], str]], ...]], ...] = (
    (
        "What users get",
        (
            ("ttft ms", "ttft_ms_mean", _MS),
            ("p50", "ttft_ms_p50", _MS),
            ("p99", "ttft_ms_p99", _MS),
            ("between tokens p50", "itl_ms_p50", _MS1),
            ("p99", "itl_ms_p99", _MS1),
            ("max", "itl_ms_max", _MS),
            ("ms a token", "tpot_ms_mean", _MS1),
            ("completion p50", "completion_ms_p50", _MS),
            ("p99", "completion_ms_p99", _MS),
            ("done/s", "requests_per_s", _RATE),
            ("goodput", "goodput_per_s", _RATE),
            ("good %", "good_fraction", _PERCENT),
        ),
    ),
    (
        "Where the first token's time goes (p50 and p99, ms)",
        (
            ("admission", "admission_wait_ms_p50", _MS),
            ("p99", "admission_wait_ms_p99", _MS),
            ("prefill queue", "prefill_wait_ms_p50", _MS),
            ("p99", "prefill_wait_ms_p99", _MS),
            ("prefill", "prefill_ms_p50", _MS),
            ("p99", "prefill_ms_p99", _MS),
            ("grant", "grant_wait_ms_p50", _MS),
            ("p99", "grant_wait_ms_p99", _MS),
            ("move", "move_ms_p50", _MS),
            ("p99", "move_ms_p99", _MS),
            ("slot", "slot_wait_ms_p50", _MS),
            ("p99", "slot_wait_ms_p99", _MS),
        ),
    ),
    (
        "How busy things are",
        (
            ("slots used", "slots_used_mean", _number(1)),
            ("of", "slots", _COUNT),
            ("prefill busy %", "prefill_busy_fraction", _PERCENT),
            ("decode busy %", "decode_busy_fraction", _PERCENT),
            ("posting on loop %", "loop_posting_fraction", _number(1, 100)),
            ("link %", "link_use_mean", _PERCENT),
            ("busiest", "link_use_max", _PERCENT),
        ),
    ),
    (
        "Who waits (mean, and how fast it grows)",
        (
            ("prefill queue", "prefill_queue_mean", _number(1)),
            ("grows/s", "prefill_queue_growth_per_s", _number(2)),
            ("hand-off queue", "handoff_queue_mean", _number(1)),
            ("grows/s", "handoff_queue_growth_per_s", _number(2)),
        ),
    ),
    (
        "Bytes (GB) and what went wrong",
        (
            ("KV moved", "kv_moved_bytes", _GB),
            ("offload", "offload_bytes", _GB),
            ("HBM at prefill, mean", "prefill_kv_bytes_mean", _GB),
            ("peak", "prefill_kv_bytes_peak", _GB),
            ("at decode, mean", "decode_kv_bytes_mean", _GB),
            ("peak", "decode_kv_bytes_peak", _GB),
            ("429", "rejected", _COUNT),
            ("too large", "refused", _COUNT),
            ("failed", "failed", _COUNT),
            ("recomputed", "recomputed", _COUNT),
            ("preempted", "preemptions", _COUNT),
            ("crashes", "crashes", _COUNT),
            ("cut off", "cut_off", _COUNT),
            ("tried again", "retried", _COUNT),
        ),
    ),
)
# Columns that say nothing where nothing of the kind happened.
_RARE = {
    *("offload_bytes", "rejected", "refused", "failed", "recomputed", "preemptions"),
    *("crashes", "cut_off", "retried", "admission_wait_ms_p50", "admission_wait_ms_p99"),
}

LEGEND = (
    "ttft: time to the first token. between tokens: gaps, over all tokens; ms a token: mean of a "
    "request's gaps, mean over requests. completion: from arrival to the last token. done/s: requests "
    "answered a second; goodput: those of them that met both SLOs; good: their part of all. grant: wait "
    "for decode's pages, for pull also for a slot; slot: wait for a slot with the cache there. Levels are "
    "means while requests arrive; grows: slope in that time. busiest: the NIC with the most bytes. 429: "
    "turned away by admission, or as no server was up. cut off: answers that had begun on a server that "
    "crashed. Columns in which all would be 0 are left out."
)

# A queue that grows by this part of what arrives has no end.
_GROWS = 0.05
_JAMMED = 0.02


def sections(
    names: Sequence[tuple[str, ...]], results: Sequence[Result], heads: Sequence[str]
) -> list[tuple[str, list[tuple[str, ...]]]]:
    """Titled tables of rows with one result each.

    Args:
        names: first cells of each row.
        results: one a row.
        heads: heads of the first cells.
    """
    out = []
    for title, every in _SECTIONS:
        columns = [
            one
            for one in every
            if one[1] not in _RARE or any(round(result.summary[one[1]] or 0) for result in results)
        ]
        rows = [(*heads, *(head for head, _, _ in columns))]
        for name, result in zip(names, results, strict=True):
            rows.append((*name, *(write(result.summary[key]) for _, key, write in columns)))
        out.append((title, rows))
    return out


def notes(name: str, result: Result) -> list[str]:
    """What a reader should not overlook in a result, in words."""
    found = result.summary
    said = []
    arrives = found["requests"] / max(found["run_s"], 1e-9)
    if found["jammed_fraction"] > _JAMMED:
        said.append(
            f"{name}: for {100 * found['jammed_fraction']:.0f} % of the time the links are at line rate "
            f"while decode has "
            "free slots and more requests wait than are answered: more is prefilled than the links can "
            "carry. "
            "Admit before prefill (--admission), or send less over these links"
        )
    elif found["slots_used_fraction"] > 0.8:
        said.append(
            f"{name}: {100 * found['slots_used_fraction']:.0f} % of the slots are held; above 80 % a wait "
            f"for a slot is "
            "what users see. More slots where KV memory allows, or more decode servers"
        )
    if found["handoff_queue_growth_per_s"] > _GROWS * arrives:
        said.append(
            f"{name}: the hand-off queue grows by {found['handoff_queue_growth_per_s']:.2f} a second while "
            f"requests arrive: decode cannot "
            "keep up, more prefill does not help, and the figures get worse with the length of the run"
        )
    elif found["prefill_queue_growth_per_s"] > _GROWS * arrives:
        said.append(
            f"{name}: the prefill queue grows by {found['prefill_queue_growth_per_s']:.2f} a second while "
            f"requests arrive: prefill cannot keep up, "
            "and the figures get worse with the length of the run"
        )
    if found["crashes"]:
        said.append(
            f"{name}: {found['crashes']} crashes, and servers were away for "
            f"{100 * found['down_fraction']:.1f} % of their time. Answers cut off: {found['cut_off']}; "
            f"requests tried again: {found['retried']}; failed in all: {found['failed']}"
        )
    if found["preemptions"]:
        said.append(
            f"{name}: {found['preemptions']} times a request lost its cache to others for lack of pages; "
            f"reserve room for "
            "answers (--admission), or hold fewer slots"
        )
    return said


def costs_rows(costs: Costs, sources: dict[str, str]) -> list[tuple[str, ...]]:
    """Each cost with its unit and source."""
    rows: list[tuple[str, ...]] = [("cost", "value", "unit", "source")]
    for name, one in costs.described(sources).items():
        rows.append((name, f"{one['value']:.6g}", one["unit"], one["source"]))
    return rows
