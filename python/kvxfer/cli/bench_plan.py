"""`kvxfer bench plan`: what planning a push takes on the transfer thread."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer.cli._text import print_json, progress, table

__all__ = ["run"]

_PAGE_TOKENS = 16
_ORDERS = ("HND", "NHD")
_PAGES = ("shuffled", "contiguous")
_SRC, _DST = kx.Shard(tp_rank=1, tp_size=8), kx.Shard(tp_rank=0, tp_size=4)


def _case(order: str, pages: str, tokens: int, repeats: int) -> dict[str, Any]:
    layout = kx.PageLayout(layers=64, kv_heads=8, head_dim=128, page_tokens=_PAGE_TOKENS, order=order)
    count = -(-tokens // _PAGE_TOKENS)
    src = dst = np.arange(count, dtype=np.int32)
    if pages == "shuffled":
        src, dst = (
            np.random.default_rng(seed).permutation(4 * count)[:count].astype(np.int32) for seed in (1, 2)
        )
    found = _kvxfer._bench_plan(
        (layout, _SRC), (layout, _DST), src_pages=src, dst_pages=dst, tokens=tokens, repeats=repeats
    )
    plan_ns = statistics.median(found["plan_ns"])
    return {
        "order": order,
        "pages": pages,
        "tokens": tokens,
        "rows": found["bytes"] // layout.row_bytes,
        "runs": found["runs"],
        "writes": found["writes"],
        "bytes": found["bytes"],
        "plan_us_p50": plan_ns / 1e3,
        "ns_per_run": plan_ns / found["runs"],
        "cursor_us_p50": statistics.median(found["cursor_ns"]) / 1e3,
        "template_us_p50": statistics.median(found["template_ns"]) / 1e3,
    }


def _show(found: dict[str, Any]) -> None:
    rows = [
        (
            "order",
            "pages",
            "tokens",
            "rows",
            "runs",
            "writes",
            "plan us",
            "ns a run",
            "of it pages us",
            "once us",
        )
    ]
    for case in found["cases"]:
        numbers = (
            f"{case['tokens']:,}",
            f"{case['rows']:,}",
            f"{case['runs']:,}",
            f"{case['writes']:,}",
            f"{case['plan_us_p50']:,.1f}",
            f"{case['ns_per_run']:.2f}",
            f"{case['cursor_us_p50']:,.1f}",
            f"{case['template_us_p50']:.1f}",
        )
        rows.append((case["order"], case["pages"], *numbers))
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = [
        [
            cell.ljust(width) if i < 2 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
    print(f"one TP8 rank of Qwen3-32B to one TP4 rank, medians of {found['repeats']}:\n")
    print(table(aligned))
    print(
        "\nRows are tokens of heads: the writes before anything is joined. Those that are neighbours on\n"
        "both sides are a run within a page, and one write across pages. `once` is the template of the pair\n"
        "of shards, which a connection compiles once and which is no part of the plan's time."
    )


def run(options: argparse.Namespace) -> int:
    """The command."""
    cases = []
    for tokens in options.tokens:
        progress(f"plans of {tokens} tokens")
        cases += [_case(order, pages, tokens, options.repeats) for order in _ORDERS for pages in _PAGES]
    found = {"cases": cases, "repeats": options.repeats, "page_tokens": _PAGE_TOKENS}
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0
