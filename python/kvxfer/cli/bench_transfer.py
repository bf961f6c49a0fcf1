"""`kvxfer bench transfer`: whole hand-offs beside a plain copy of the same bytes in the same pieces."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import secrets
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from kvxfer.cli._bench_numbers import machine, need_memory, percentile, spread
from kvxfer.cli._bench_rank import LAYERS, ROW_BYTES
from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import aligned, print_json, progress, prose, size
from kvxfer.cli._workers import Workers

__all__ = ["run"]

_SIDES = ("prefill", "decode")
_STEP_S = 60.0
# A hand-off, or so many at once, that would take longer than this is left out.
_TURN_S = 10.0
_TOUCHED_TOKENS = 8000
# The slowest path on a busy machine; what takes longer hangs.
_SLOWEST_BYTES_PER_S = 20e6
# A pool has room for so many of the largest hand-offs: the next one never finds its pages in a cache.
_SETS = 2
# Above so many bytes a hand-off takes long enough to be steady by itself.
_LARGE_BYTES = 512 << 20
# The first of each size meets a peer that has slept, and caches full of other things.
_WARM_UP = 1
_ROOMS_PAGES = "shuffled"
_FAIR_LARGE_ROOMS = 4
# A pipeline rank with 8 of the 64 layers: four rooms of 128,000 tokens would fill 17 GB on one with all.
_FAIR_LAYERS = 8
_LATENCY_PAGES = 256
# A control frame of a hand-off has some 60 to 150 bytes.
_PING_BYTES = 96
_SPIN_US = 5000
_IN_FLIGHT_TOKENS = 2000
# Both transfer threads and the poller spin only if each has a core; with fewer the poller sleeps on the
# descriptor.
_SPINNERS = 3


def _rooms(count: int) -> list[int]:
    return [secrets.randbits(63) for _ in range(count)]


@contextlib.contextmanager
def _pair(config: dict[str, Any]) -> Iterator[Workers]:
    """Two processes that have each other's address."""
    defaults = {"order": "HND", "copies": True, "options": {}, "memory": "kvxfer", "cpus": {}}
    config = {**defaults, "secret": secrets.token_hex(32), **config}
    page = 2 * max(config["layers"], 1) * config["page_tokens"] * ROW_BYTES
    pages = config["pages"]
    need_memory((pages["prefill"] + (1 + config["copies"]) * pages["decode"]) * page, "these hand-offs")
    with Workers() as workers:
        for side in _SIDES:
            workers.start(side, "kvxfer.cli._bench_transfer_end", {**config, "side": side})
        listening = workers.receive(_SIDES, "listening", _STEP_S)
        there = listening["prefill"]
        workers.send(_SIDES, source=there["address"], pid=there["pid"], bases=there["bases"])
        yield workers
        workers.send(_SIDES, kind="close")
        workers.finish(_SIDES, _STEP_S)


def _ask(workers: Workers, case: dict[str, Any], nbytes: float = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """What prefill and decode have measured of a case."""
    limit_s = _STEP_S + nbytes / _SLOWEST_BYTES_PER_S
    # Who measures gives up first, and says what it waited for.
    workers.send(_SIDES, **case, limit_s=limit_s - _STEP_S / 2)
    found = workers.receive(_SIDES, "measured", limit_s)
    return found["prefill"], found["decode"]


def _touch(workers: Workers, tokens: int) -> dict[str, Any]:
    """Hands off every page once: a side's first look at a page of the other's is a fault, and an engine that
    has run for a while has had them all.
    """
    case = {
        "kind": "size",
        "tokens": tokens,
        "pages": "contiguous",
        "rooms": [_rooms(1)],
        "checked": 0,
        "reads": False,
    }
    nbytes = 2 * LAYERS * tokens * ROW_BYTES
    prefill, decode = _ask(workers, case, nbytes)
    seconds = (decode["times_us"][0][0] - prefill["times_us"][0][0]) / 1e6
    copy_seconds = decode["copies_us"][0] / 1e6
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "copy_seconds": copy_seconds,
        "ratio_to_copy": seconds / copy_seconds,
    }


def _row(setup: dict[str, Any], case: dict[str, Any], workers: Workers, rounds: int) -> dict[str, Any]:
    tokens, rooms = case["tokens"], case["rooms"]
    nbytes = 2 * LAYERS * tokens * ROW_BYTES * rooms
    if nbytes > _LARGE_BYTES:
        rounds = max(3, rounds // 3)
    turns = [_rooms(rooms) for _ in range(_WARM_UP + rounds)]
    # What the kernel has to copy, kvxfer cannot copy faster than it does.
    by_kernel = setup["fabric"] == "shm" and setup["memory"] == "engine"
    # Of many rooms a few are compared byte for byte.
    asked = {"kind": "size", **case, "rooms": turns, "checked": 4, "reads": by_kernel}
    prefill, decode = _ask(workers, asked, nbytes * len(turns))
    if not decode["right"]:
        raise CommandError("the bytes that arrived are not those that were sent: the figures mean nothing")
    if decode["bytes"] != nbytes:
        raise CommandError(f"{decode['bytes']} bytes arrived of {nbytes}: the figures mean nothing")
    seconds = [
        (max(ended) - begun[0]) / 1e6
        for begun, ended in zip(prefill["times_us"], decode["times_us"], strict=True)
    ][_WARM_UP:]
    copies = [us / 1e6 for us in decode["copies_us"]][_WARM_UP:]
    reads = [us / 1e6 for us in decode["reads_us"]][_WARM_UP:]
    p50, copy_p50 = statistics.median(seconds), statistics.median(copies)
    mover = decode if setup["fabric"] == "shm" else prefill
    return {
        **{key: setup[key] for key in ("fabric", "memory", "order", "page_tokens")},
        **{key: case[key] for key in ("tokens", "pages", "rooms")},
        **spread("seconds", seconds),
        "gbytes_per_s": nbytes / p50 / 1e9,
        "ratio_to_copy": p50 / copy_p50,
        **spread("copy_seconds", copies),
        "copy_gbytes_per_s": nbytes / copy_p50 / 1e9,
        "readv_seconds_p50": statistics.median(reads) if reads else None,
        "ratio_to_readv": p50 / statistics.median(reads) if reads else None,
        "writes": round(max(prefill["writes"], decode["writes"])),
        # UCX makes those of its own and does not say how many.
        "syscalls": round(mover["syscalls"]) if setup["fabric"] == "shm" else None,
        "bytes": nbytes,
        "rounds": rounds,
    }


def _rows(options: argparse.Namespace) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each case, and one for the first use of all pages of each kind of memory."""
    out: list[dict[str, Any]] = []
    first: list[dict[str, Any]] = []
    for page_tokens in options.page_tokens:
        sweeps = page_tokens == options.page_tokens[0]
        cases = [
            {"tokens": tokens, "pages": pages, "rooms": 1}
            for tokens in options.tokens
            for pages in ("shuffled", "contiguous")
        ]
        if sweeps:
            cases += [
                {"tokens": options.rooms_tokens, "pages": _ROOMS_PAGES, "rooms": rooms}
                for rooms in options.rooms
                if {"tokens": options.rooms_tokens, "pages": _ROOMS_PAGES, "rooms": rooms} not in cases
            ]
        pages = max(
            -(-case["tokens"] // page_tokens) * (case["rooms"] if case["rooms"] > 1 else _SETS)
            for case in cases
        )
        for fabric in options.fabric:
            for memory in options.memory:
                setup = {
                    "fabric": fabric,
                    "memory": memory,
                    "order": options.order,
                    "page_tokens": page_tokens,
                    "layers": LAYERS,
                    "pages": dict.fromkeys(_SIDES, pages),
                }
                progress(f"{fabric}, {memory} memory, pages of {page_tokens} tokens: {len(cases)} sizes")
                with _pair(setup) as workers:
                    # An engine's memory is not mapped by the other side: it has no first use to get over.
                    whole = pages * page_tokens
                    touched = _touch(workers, whole if memory == "kvxfer" else min(whole, _TOUCHED_TOKENS))
                    kind = {"fabric": fabric, "memory": memory, "page_tokens": page_tokens}
                    first.append({**kind, **touched})
                    slowest = math.inf
                    for case in cases:
                        nbytes = 2 * LAYERS * case["tokens"] * ROW_BYTES * case["rooms"]
                        if nbytes > _TURN_S * slowest:
                            progress(
                                f"left out: {case['rooms']} rooms of {case['tokens']} tokens take too long"
                            )
                            continue
                        row = _row(setup, case, workers, options.rounds)
                        slowest = min(slowest, nbytes / row["seconds_p50"])
                        out.append(row)
    return out, first


def _fairness(options: argparse.Namespace, fabric: str) -> dict[str, Any]:
    small, large, page_tokens = options.small_tokens, options.large_tokens, 16
    need, few = (-(-tokens // page_tokens) for tokens in (large, small))
    progress(f"{fabric}: {small} tokens behind {_FAIR_LARGE_ROOMS} rooms of {large}")
    turns = [
        {"alone": secrets.randbits(63), "beside": secrets.randbits(63), "large": _rooms(_FAIR_LARGE_ROOMS)}
        for _ in range(_WARM_UP + options.rounds)
    ]
    setup = {
        "fabric": fabric,
        "layers": _FAIR_LAYERS,
        "page_tokens": page_tokens,
        "pages": {"prefill": need + few, "decode": _FAIR_LARGE_ROOMS * need + few},
        "copies": False,
    }
    with _pair(setup) as workers:
        case = {
            "kind": "fair",
            "small_tokens": small,
            "large_tokens": large,
            "large_rooms": _FAIR_LARGE_ROOMS,
        }
        nbytes = 2 * _FAIR_LAYERS * _FAIR_LARGE_ROOMS * large * ROW_BYTES * len(turns)
        prefill, decode = _ask(workers, {**case, "turns": turns}, nbytes)
    times = {key: zip(prefill[key], decode[key], strict=True) for key in ("alone_us", "beside_us")}
    alone, beside = ([(b - a) / 1e3 for a, b in pairs][_WARM_UP:] for pairs in times.values())
    # A small room that was pushed late, because the machine had other things to do, had nothing beside it.
    ends = zip(decode["large_us"][_WARM_UP:], decode["beside_us"][_WARM_UP:], strict=True)
    held = [large_us > small_us for large_us, small_us in ends]
    beside = [ms for ms, counts in zip(beside, held, strict=True) if counts]
    if 3 * len(beside) < options.rounds:
        raise CommandError(
            f"{fabric}: in {len(held) - len(beside)} turns of {len(held)} the large rooms ended before the "
            "small one, which so had nothing beside it: take more --large-tokens"
        )
    return {
        "fabric": fabric,
        "layers": _FAIR_LAYERS,
        "small_tokens": small,
        "large_tokens": large,
        "large_rooms": _FAIR_LARGE_ROOMS,
        **spread("alone_ms", alone),
        **spread("beside_ms", beside),
        "slowdown": statistics.median(beside) / statistics.median(alone),
        "rounds": len(beside),
    }


def _latency(options: argparse.Namespace, fabric: str) -> list[dict[str, Any]]:
    out = []
    progress(f"{fabric}: from push to Success of small hand-offs")
    cores = sorted(os.sched_getaffinity(0))
    poller_spins = len(cores) >= _SPINNERS
    for what, layers in (("piece", 0), ("page", LAYERS)):
        for mode in ("spinning", "idle"):
            setup = {
                "fabric": fabric,
                "layers": layers,
                "page_tokens": 16,
                "pages": dict.fromkeys(_SIDES, _LATENCY_PAGES),
                "options": {"spin_us": _SPIN_US} if mode == "spinning" else {},
                # Two that spin on one core would wait for each other.
                "cpus": dict(zip(_SIDES, cores, strict=False)) if mode == "spinning" else {},
            }
            rooms = _rooms(_WARM_UP + options.latency_rooms)
            with _pair(setup) as workers:
                _touch(workers, _LATENCY_PAGES * 16)
                case = {
                    "kind": "latency",
                    "tokens": 16,
                    "rooms": rooms,
                    "spins": mode == "spinning" and poller_spins,
                }
                prefill, decode = _ask(workers, case)
                ping = {"kind": "ping", "frame_bytes": _PING_BYTES, "rounds": options.latency_rooms}
                workers.send(_SIDES, **ping)
                port = workers.receive(_SIDES, "serving", _STEP_S)["prefill"]["port"]
                workers.send(["decode"], port=port)
                pings = workers.receive(_SIDES, "measured", _STEP_S)["decode"]["times_us"]
            polled, queued = (
                [b - a for a, b in zip(prefill["times_us"], decode[key], strict=True)][_WARM_UP:]
                for key in ("times_us", "events_us")
            )
            out.append(
                {
                    "fabric": fabric,
                    "what": what,
                    "mode": mode,
                    "poller_spins": mode == "spinning" and poller_spins,
                    "bytes": 16 * ROW_BYTES * max(2 * layers, 1),
                    "pieces": max(2 * layers, 1),
                    "to_poll_us_p50": statistics.median(polled),
                    "to_poll_us_p99": percentile(polled, 99),
                    "to_event_us_p50": statistics.median(queued),
                    "to_event_us_p99": percentile(queued, 99),
                    "copy_us_p50": statistics.median(decode["copies_us"][_WARM_UP:]),
                    "ping_us_p50": statistics.median(pings),
                    "rooms": options.latency_rooms,
                }
            )
    return out


def _in_flight(options: argparse.Namespace, fabric: str) -> dict[str, Any]:
    """What an agent holds beyond the pages, with rooms that are granted and not pushed."""
    progress(f"{fabric}: {options.in_flight} rooms in flight")
    count = -(-_IN_FLIGHT_TOKENS // 16)
    setup = {
        "fabric": fabric,
        # One region of a page's bytes is enough: what a room takes does not depend on the layers.
        "layers": 0,
        "page_tokens": 16,
        "pages": {"prefill": count, "decode": options.in_flight * count},
        "copies": False,
    }
    with _pair(setup) as workers:
        case = {"kind": "in-flight", "rooms": _rooms(options.in_flight), "tokens": _IN_FLIGHT_TOKENS}
        prefill, decode = _ask(workers, case)
    return {
        "fabric": fabric,
        "rooms": options.in_flight,
        "tokens": _IN_FLIGHT_TOKENS,
        "prefill_bytes": prefill["bytes"],
        "decode_bytes": decode["bytes"],
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine(), "layers": LAYERS, "row_bytes": ROW_BYTES}
    found["rows"], found["first_touch"] = _rows(options)
    found["fairness"] = [_fairness(options, fabric) for fabric in options.fabric]
    found["latency"] = [row for fabric in options.fabric for row in _latency(options, fabric)]
    found["in_flight"] = [_in_flight(options, fabric) for fabric in options.fabric]
    return found


def _show(found: dict[str, Any]) -> None:
    on = found["machine"]
    print(
        prose(
            f"Hand-offs of a Qwen3-32B TP8 rank ({found['layers']} layers, K and V, 1 KV head of 128, "
            f"bfloat16: 32 KiB a token) between two processes, on {on['cores']} cores of {on['cpu']}:"
        )
    )
    head = (
        "fabric",
        "memory",
        "pages",
        "page tokens",
        "tokens",
        "rooms",
        "ms",
        "GB/s",
        "x copy",
        "x readv",
        "writes",
    )
    rows: list[Sequence[str]] = [(*head, "syscalls")]
    for row in found["rows"]:
        rows.append(
            (
                *(row[key] for key in ("fabric", "memory", "pages")),
                str(row["page_tokens"]),
                f"{row['tokens']:,}",
                str(row["rooms"]),
                f"{row['seconds_p50'] * 1e3:,.2f}",
                f"{row['gbytes_per_s']:.2f}",
                f"{row['ratio_to_copy']:.2f}",
                "-" if row["ratio_to_readv"] is None else f"{row['ratio_to_readv']:.2f}",
                f"{row['writes']:,}",
                "-" if row["syscalls"] is None else f"{row['syscalls']:,}",
            )
        )
    print(f"\n{aligned(rows, 3)}\n")
    print(
        prose(
            "ms: from the first push, with all grants there, until the receiver's transfer thread has every "
            "room's Success; median. x copy: that, over the median of a plain memcpy of as many bytes in "
            "the same pieces, by one thread of the receiving process, in turns with the hand-offs. UCX does "
            "not say what system calls it makes. x readv: over that of process_vm_readv of the same pieces, "
            "1,024 a call, which is the limit where the kernel has to copy."
        )
    )
    rows = [("first use", "memory", "page tokens", "MiB", "ms", "x copy")]
    for row in found["first_touch"]:
        numbers = (str(row["page_tokens"]), str(row["bytes"] >> 20), f"{row['seconds'] * 1e3:,.1f}")
        rows.append((row["fabric"], row["memory"], *numbers, f"{row['ratio_to_copy']:.2f}"))
    print(f"\n{aligned(rows, 2)}\n")
    print(
        prose(
            "One hand-off of every page, before the others: what the first look of either side at the memory "
            "of the other costs. The rows above do not have that."
        )
    )
    rows = [("fabric", "small", "large", "alone ms", "beside ms", "slowdown")]
    for row in found["fairness"]:
        sizes = (f"{row['small_tokens']:,}", f"{row['large_rooms']} x {row['large_tokens']:,}")
        keys = ("alone_ms_p50", "beside_ms_p50", "slowdown")
        rows.append((row["fabric"], *sizes, *(f"{row[key]:.2f}" for key in keys)))
    print(f"\n{aligned(rows, 1)}\n")
    print(
        prose(
            "A small room alone, and pushed 10 ms after large ones that end after it, in tokens, on a rank "
            f"with {_FAIR_LAYERS} of the layers."
        )
    )
    rows = [
        ("fabric", "bytes", "pieces", "threads", "poll us", "p99", "event us", "p99", "copy us", "ping us")
    ]
    for row in found["latency"]:
        times = [row[f"to_{what}_us_{rank}"] for what in ("poll", "event") for rank in ("p50", "p99")]
        times += [row["copy_us_p50"], row["ping_us_p50"]]
        texts = (row["fabric"], f"{row['bytes']:,}", str(row["pieces"]), row["mode"])
        rows.append((*texts, *(f"{time:.1f}" for time in times)))
    print(f"\n{aligned(rows, 1)}\n")
    print(
        prose(
            "From push, with the grant there, until Success is in the hand of who polls at the other side, "
            "and until the transfer thread there has it. spinning: the transfer threads do not sleep, each "
            "on a core of its own, nor does the poller where a third core is free; idle: all have slept for "
            "2 ms. ping: a round trip of a small frame over TCP between the same two processes."
        )
    )
    print()
    for row in found["in_flight"]:
        held = (size(row[f"{side}_bytes"]) for side in _SIDES)
        print(
            prose(
                f"{row['fabric']}: with {row['rooms']:,} rooms of {row['tokens']:,} tokens granted and not "
                f"pushed, agents hold {' (prefill) and '.join(held)} (decode) beyond pages and libraries."
            )
        )


def run(options: argparse.Namespace) -> int:
    """The command."""
    found = _measure(options)
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0
