"""`kvxfer bench post`: what push, expect and poll cost the thread that calls them."""

from __future__ import annotations

import argparse
import itertools
import secrets
import statistics
from collections.abc import Sequence
from typing import Any

from kvxfer.cli._bench_numbers import machine
from kvxfer.cli._errors import CommandError
from kvxfer.cli._loopback import AT_ONCE, PAGE_TOKENS, WARM_UP
from kvxfer.cli._text import aligned, print_json, progress, table
from kvxfer.cli._workers import Workers

__all__ = ["run", "slope"]

_SIDES = ("prefill", "decode")
_STEP_S = 60.0
_SHOWN = {
    "push": ("p50", "p99", "max"),
    "push_list": ("p50", "p99"),
    "expect": ("p50", "p99", "max"),
    "expect_list": ("p50", "p99"),
}
# What an id costs is the same in every call, and the rest is noise: the slope is taken over the quiet calls.
_QUIET = 20


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of a line through the points by Theil and Sen: an outlier does no harm."""
    return statistics.median(
        (y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2)
    )


def _percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _first_writes(prefill: Sequence[dict[str, int]], decode: Sequence[dict[str, int]]) -> list[int]:
    """From a push to its first byte, by the clock of the side that moved it: the one that has a time.

    Only the first push of a group counts: the others wait for its bytes.
    """
    out = []
    for pushed, expected in zip(prefill, decode, strict=True):
        if pushed["number"]:
            continue
        times = [side["first_write_us"] for side in (pushed, expected) if side["first_write_us"]]
        if times:
            out.append(max(0, min(times) - pushed["submitted_us"]))
    return out


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    groups = -(-options.rooms // AT_ONCE)
    config = {
        "fabric": options.fabric,
        "tokens": options.tokens,
        "by_tokens": options.by_tokens,
        "secret": secrets.token_hex(32),
        "rooms": [secrets.randbits(63) for _ in range(groups * AT_ONCE + WARM_UP)],
    }
    with Workers() as workers:
        progress(f"{options.rooms} hand-offs of {options.tokens} tokens over {options.fabric}")
        for side in _SIDES:
            workers.start(side, "kvxfer.cli._bench_post_end", {**config, "side": side})
        listening = workers.receive(_SIDES, "listening", _STEP_S)
        workers.send(_SIDES, source=listening["prefill"]["address"])
        # A room takes some 10 to 50 ms; ten times that is a machine that does not move.
        found = workers.receive(_SIDES, "handed-off", _STEP_S + options.rooms * 0.5)
        progress("push and expect by the number of tokens and pages, and polls")
        measured: dict[str, Any] = {}
        source = ""
        for side in _SIDES:
            workers.send([side], source=source)
            measured.update(workers.receive([side], "measured", _STEP_S))
            source = measured["prefill"]["address"]
        workers.send(_SIDES, close=True)
        workers.finish(_SIDES, _STEP_S)
    prefill, decode = found["prefill"], found["decode"]
    if not decode["right"]:
        raise CommandError("the bytes that arrived are not those that were sent: the figures mean nothing")

    def net_us(side: dict[str, Any], ns: float) -> float:
        clock_ns: int = side["clock_ns"]
        return max(0.0, ns - clock_ns) / 1e3

    def call_us(side: dict[str, Any], percent: float, *, firsts: bool = False) -> float:
        calls: list[float] = [room["call_ns"] for room in side["rooms"] if not firsts or room["number"] == 0]
        return net_us(side, _percentile(calls, percent))

    by_pages = measured["prefill"]["by_pages"]
    arrays, lists = (
        [(point["pages"], _percentile(point[kind], _QUIET)) for point in by_pages]
        for kind in ("array_ns", "list_ns")
    )
    first = _first_writes(prefill["rooms"], decode["rooms"])
    if not first:
        raise CommandError("no room of the run says when its first byte moved")
    per_page = slope(arrays)

    def ranks(key: str, side: dict[str, Any], calls: Sequence[int]) -> dict[str, float]:
        named = {
            "min": min(calls),
            "p50": _percentile(calls, 50),
            "p99": _percentile(calls, 99),
            "max": max(calls),
        }
        return {f"{key}_us_{rank}": net_us(side, ns) for rank, ns in named.items()}

    rows = []
    for push, grant in zip(measured["prefill"]["by_tokens"], measured["decode"]["by_tokens"], strict=True):
        rows.append(
            {
                "tokens": push["tokens"],
                "pages": -(-push["tokens"] // PAGE_TOKENS),
                **ranks("push", prefill, push["array_ns"]),
                **ranks("push_list", prefill, push["list_ns"]),
                **ranks("expect", decode, grant["array_ns"]),
                **ranks("expect_list", decode, grant["list_ns"]),
                "calls": len(push["array_ns"]),
            }
        )
    polls = [ns for side in measured.values() for row in side["by_tokens"] for ns in row["poll_ns"]]
    return {
        "push_us_p50": call_us(prefill, 50),
        "push_us_p99": call_us(prefill, 99),
        "push_us_max": call_us(prefill, 100),
        "push_first_us_p50": call_us(prefill, 50, firsts=True),
        "expect_us_p50": call_us(decode, 50),
        "expect_us_p99": call_us(decode, 99),
        "expect_us_max": call_us(decode, 100),
        "expect_first_us_p50": call_us(decode, 50, firsts=True),
        "host_wake_us_p50": net_us(decode, measured["decode"]["wake_ns"]),
        "poll_empty_ns_p50": net_us(decode, measured["decode"]["poll_ns"][0]) * 1e3,
        "poll_empty_ns_p99": net_us(decode, measured["decode"]["poll_ns"][1]) * 1e3,
        "poll_one_us_p50": net_us(decode, _percentile(polls, 50)) if polls else None,
        "push_ns_per_page": per_page,
        "push_list_ns_per_page": slope(lists) - per_page,
        "submit_to_first_write_us_p50": statistics.median(first),
        "submit_to_first_write_us_p99": _percentile(first, 99),
        "submit_to_first_write_us_max": max(first),
        "rows": rows,
        "push_us_p20_by_pages": {str(pages): net_us(prefill, ns) for pages, ns in arrays},
        "push_list_us_p20_by_pages": {str(pages): net_us(prefill, ns) for pages, ns in lists},
        "clock_ns": prefill["clock_ns"],
        "machine": machine(),
        "fabric": options.fabric,
        "tokens": options.tokens,
        "pages": -(-options.tokens // PAGE_TOKENS),
        "rooms": groups * AT_ONCE,
        "rooms_at_once": AT_ONCE,
    }


def _show(found: dict[str, Any]) -> None:
    def us(key: str) -> tuple[str, str]:
        return key, f"{found[key]:.2f}".rjust(10)

    def ns(key: str) -> tuple[str, str]:
        return key, f"{found[key]:.1f}".rjust(10)

    counts = ", ".join(found["push_us_p20_by_pages"])
    slowest = "the same: all but the slowest hundredth are below"
    first = f"the first of each {found['rooms_at_once']}: it wakes the transfer thread, and meets cold caches"
    rows = [
        (*us("push_us_p50"), "one push of all layers and pages: median"),
        (*us("push_us_p99"), slowest),
        (*us("push_us_max"), "the slowest"),
        (*us("push_first_us_p50"), first),
        (*us("expect_us_p50"), "one expect of all pages: median"),
        (*us("expect_us_p99"), slowest),
        (*us("expect_us_max"), "the slowest"),
        (*us("expect_first_us_p50"), first),
        (*us("host_wake_us_p50"), "what waking any sleeping thread takes on this host, without kvxfer"),
        (*ns("poll_empty_ns_p50"), "one poll() that has nothing to say: median"),
        *(
            [(*us("poll_one_us_p50"), "one poll() that has one event: median")]
            if found["poll_one_us_p50"]
            else []
        ),
        (*ns("push_ns_per_page"), f"more for each id of an int32 array: slope over {counts} pages"),
        (*ns("push_list_ns_per_page"), "more than that for each id of a Python list"),
        (*us("submit_to_first_write_us_p50"), "from the first push until its first byte moves: median"),
    ]
    print(
        f"{found['rooms']} hand-offs of {found['tokens']} tokens ({found['pages']} pages) of a Qwen3-32B TP8 "
        f"rank over {found['fabric']}, {found['rooms_at_once']} at a time, int32 page ids:\n"
    )
    print(table(rows))
    print(
        "\nSingle calls by tokens, ten in a row, us; `list`: for ids in a Python list instead of an array:\n"
    )
    head = ("push", "p99", "max", "list", "p99", "expect", "p99", "max", "list", "p99")
    lines: list[Sequence[str]] = [("tokens", "pages", *head)]
    for row in found["rows"]:
        keys = [f"{kind}_us_{rank}" for kind, ranks in _SHOWN.items() for rank in ranks]
        lines.append((f"{row['tokens']:,}", f"{row['pages']:,}", *(f"{row[key]:,.1f}" for key in keys)))
    print(aligned(lines, 0))
    print(
        f"\nEach is the time of a single call in the thread that makes it; the {found['clock_ns']} ns that "
        "reading the clock takes are taken off."
    )


def run(options: argparse.Namespace) -> int:
    """The command."""
    found = _measure(options)
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0
