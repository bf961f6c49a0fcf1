"""`kvxfer bench peers`: the same page lists by kvxfer and by other libraries, in turns."""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import kvxfer
from kvxfer.cli._bench_numbers import machine, need_memory, percentile, spread
from kvxfer.cli._bench_rank import LAYERS, ROW_BYTES, page_lists
from kvxfer.cli._errors import CommandError
from kvxfer.cli._peer_base import PAGE_TOKENS
from kvxfer.cli._text import aligned, print_json, progress, prose
from kvxfer.cli._workers import Workers

__all__ = ["run"]

_SIDES = ("prefill", "decode")
_STEP_S = 60.0
# As in `bench transfer`: the next hand-off never finds its pages in a cache.
_SETS = 4
# In the first case every page is met once before anything counts; in the others the caches only.
_WARM_UP = (_SETS, 1, 1, 1)
_PAGES = ("shuffled", "contiguous")
_TARGETS = ("idle", "busy")


class _Entry(NamedTuple):
    """Who takes part, and how."""

    name: str
    library: str
    fabric: str = "shm"
    memory: str = "engine"
    prepared: bool = False
    env: Mapping[str, str] = {}


_OURS = (
    _Entry("kvxfer-shm", "kvxfer", memory="kvxfer"),
    _Entry("kvxfer-shm-engine", "kvxfer"),
    _Entry("kvxfer-ucx", "kvxfer", fabric="ucx", memory="kvxfer"),
)
# kvxfer's settings of UCX, but for the transports: into memory that UCX did not allocate, which is all that
# NIXL has, TCP's puts take several times as long as messages through shared memory do.
_TUNED = {
    "UCX_TLS": "posix,self",
    "UCX_RNDV_THRESH": "inf",
    "UCX_POSIX_ERROR_HANDLING": "y",
}
_PEERS = (
    _Entry("nixl", "nixl"),
    _Entry("nixl-tuned", "nixl", prepared=True, env=_TUNED),
    _Entry("mooncake", "mooncake"),
    _Entry("ucxx", "ucxx"),
)


class _Pair:
    """The two processes of one entry, which only run when it is their turn."""

    def __init__(self, entry: _Entry, workers: Workers, options: argparse.Namespace, pages: int) -> None:
        self.entry, self.workers = entry, workers
        ours = entry.library == "kvxfer"
        env = {**os.environ, **entry.env}
        # The other interpreter has no kvxfer of its own; this one's sources and extension do for any.
        env["PYTHONPATH"] = str(Path(kvxfer.__file__).parents[1])
        config = {
            "library": entry.library,
            "fabric": entry.fabric,
            "memory": entry.memory,
            "prepared": entry.prepared,
            "pages": pages,
            "secret": secrets.token_hex(32),
        }
        for side in _SIDES:
            python = sys.executable if ours else options.python
            workers.start(side, "kvxfer.cli._peer_end", {**config, "side": side}, env=env, python=python)
        ready = workers.receive(_SIDES, "ready", _STEP_S)
        self.version = ready["prefill"]["version"]
        for side, other in zip(_SIDES, reversed(_SIDES), strict=True):
            workers.send([side], other=ready[other]["info"])
        workers.receive(_SIDES, "connected", _STEP_S)
        self.pause()

    def pause(self) -> None:
        """Some have threads that look for work all the time, which would take the cores from the others."""
        if self.entry.library != "kvxfer":
            self.workers.signal(_SIDES, signal.SIGSTOP)

    def turn(self, to: list[int], source: list[int], *, busy: bool, checked: bool) -> dict[str, float]:
        """One hand-off."""
        workers = self.workers
        if self.entry.library != "kvxfer":
            workers.signal(_SIDES, signal.SIGCONT)
        message = {
            "kind": "turn",
            "room": secrets.randbits(63),
            "to": to,
            "source": source,
            "busy": busy,
            "checked": checked,
        }
        workers.send(["decode"], **message)
        workers.receive(["decode"], "armed", _STEP_S)
        workers.send(["prefill"], **message)
        there = workers.receive(["prefill"], "moved", _STEP_S)["prefill"]
        workers.send(["decode"], kind="over")
        here = workers.receive(["decode"], "moved", _STEP_S)["decode"]
        self.pause()
        if not here["right"]:
            raise CommandError(
                "the bytes that arrived are not those that were sent: the figures mean nothing"
            )
        ended = here["ended_us"] or there["ended_us"]
        return {
            "post_us": there["post_us"],
            "total_ms": (ended - there["begun_us"]) / 1e3,
            "cpu_s": there["cpu_s"] + here["cpu_s"],
        }

    def close(self) -> None:
        """Ends both."""
        if self.entry.library != "kvxfer":
            self.workers.signal(_SIDES, signal.SIGCONT)
        self.workers.send(_SIDES, kind="close")


def _why(error: Exception) -> str:
    text = str(error)
    return text if len(text) < 300 else text[:300] + " ..."


@contextlib.contextmanager
def _pairs(options: argparse.Namespace, pages: int) -> Iterator[tuple[dict[str, _Pair], dict[str, str]]]:
    """Everybody who can take part, and why the others cannot."""
    pairs: dict[str, _Pair] = {}
    reasons: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for entry in (*_OURS, *_PEERS):
            if entry.library != "kvxfer" and entry.name not in options.peers:
                continue
            progress(f"starting {entry.name}")
            one = contextlib.ExitStack()
            try:
                pairs[entry.name] = _Pair(entry, one.enter_context(Workers()), options, pages)
            except CommandError as error:
                if entry.library == "kvxfer":
                    raise
                one.close()
                reasons[entry.name] = _why(error)
                progress(f"{entry.name} cannot take part: {reasons[entry.name]}")
                continue
            except OSError as error:
                one.close()
                reasons[entry.name] = f"{options.python}: {error.strerror}"
                continue
            stack.push(one)
        yield pairs, reasons
        for pair in pairs.values():
            pair.close()


Samples = dict[tuple[str, str, str], list[dict[str, float]]]


def _sample(
    options: argparse.Namespace, pairs: dict[str, _Pair], reasons: dict[str, str], pages: int
) -> Samples:
    samples: Samples = {}
    count = pages // _SETS
    for order in _PAGES:
        to, source = (page_lists(pages, count, shuffled=order == "shuffled", seed=seed) for seed in (2, 1))
        for target in _TARGETS:
            warm_up = _WARM_UP[len({key[1:] for key in samples})]
            progress(f"{options.rounds} hand-offs each, {order} pages, target {target}")
            for number in range(warm_up + options.rounds):
                for name, pair in list(pairs.items()):
                    lists = (ids[number % _SETS].tolist() for ids in (to, source))
                    last = number == warm_up + options.rounds - 1
                    try:
                        found = pair.turn(*lists, busy=target == "busy", checked=last)
                    except CommandError as error:
                        if pair.entry.library == "kvxfer":
                            raise
                        reasons[name] = f"{order} pages, target {target}: {_why(error)}"
                        progress(f"{name} failed: {reasons[name]}")
                        del pairs[name]
                        continue
                    if number >= warm_up:
                        samples.setdefault((name, order, target), []).append(found)
    return samples


def _figures(
    name: str, order: str, target: str, samples: list[dict[str, float]], nbytes: int
) -> dict[str, Any]:
    post = [sample["post_us"] for sample in samples]
    return {
        "pages": order,
        "target": target,
        **spread("post_us", post),
        "post_us_p99": percentile(post, 99),
        **spread("total_ms", [sample["total_ms"] for sample in samples]),
        "cpu_s_per_gbyte": statistics.median(sample["cpu_s"] for sample in samples) / nbytes * 1e9,
        "rounds": len(samples),
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    count = -(-options.tokens // PAGE_TOKENS)
    pages, nbytes = _SETS * count, 2 * LAYERS * count * PAGE_TOKENS * ROW_BYTES
    need_memory(2 * _SETS * nbytes * (len(_OURS) + len(options.peers)), "all these libraries at once")
    with _pairs(options, pages) as (pairs, reasons):
        versions = {name: pair.version for name, pair in pairs.items()}
        samples = _sample(options, pairs, reasons, pages)
    ours: dict[tuple[str, str, str], dict[str, Any]] = {}
    rows = []
    for (name, order, target), found in samples.items():
        figures = _figures(name, order, target, found, nbytes)
        if name.startswith("kvxfer"):
            entry = next(entry for entry in _OURS if entry.name == name)
            ours[name, order, target] = {"fabric": entry.fabric, "memory": entry.memory, **figures}
    for entry in _PEERS:
        if entry.name not in options.peers:
            continue
        row = {"peer": entry.name, "version": versions.get(entry.name), "error": reasons.get(entry.name)}
        cases = [key for key in samples if key[0] == entry.name] if entry.name not in reasons else []
        for name, order, target in cases:
            figures = _figures(name, order, target, samples[name, order, target], nbytes)
            total = {key: row["total_ms_p50"] for key, row in ours.items() if key[1:] == (order, target)}
            best = min(total.values())
            rows.append(
                {
                    **row,
                    **figures,
                    "speedup": figures["total_ms_p50"] / best,
                    "speedup_ucx": figures["total_ms_p50"] / total["kvxfer-ucx", order, target],
                    "speedup_engine": figures["total_ms_p50"] / total["kvxfer-shm-engine", order, target],
                }
            )
        if not cases:
            empty = ("post_us_p50", "total_ms_p50", "cpu_s_per_gbyte", "speedup", "speedup_ucx")
            rows.append({**row, "pages": None, "target": None, **dict.fromkeys(empty)})
    return {
        "machine": machine(),
        "tokens": options.tokens,
        "pieces": 2 * LAYERS * count,
        "bytes": nbytes,
        "nixl_tuned": dict(_TUNED),
        "kvxfer": list(ours.values()),
        "rows": rows,
    }


def _show(found: dict[str, Any]) -> None:
    on = found["machine"]
    print(
        prose(
            f"Hand-offs of {found['tokens']} tokens of a Qwen3-32B TP8 rank ({found['pieces']:,} pieces of "
            f"4 KiB) between two processes, in turns, on {on['cores']} cores of {on['cpu']}; kvxfer "
            f"{on['kvxfer']}:"
        )
    )
    head = (
        "who",
        "pages",
        "target",
        "post us",
        "total ms",
        "p25",
        "p75",
        "CPU s/GB",
        "x best",
        "x ucx",
        "x engine",
    )
    rows: list[Sequence[str]] = [head]
    for row in (*found["kvxfer"], *found["rows"]):
        if row.get("error"):
            continue
        name = row.get("peer") or f"kvxfer {row['fabric']}, {row['memory']} memory"
        factors = [row.get(key) for key in ("speedup", "speedup_ucx", "speedup_engine")]
        rows.append(
            (
                *(name, row["pages"], row["target"], f"{row['post_us_p50']:,.1f}"),
                *(f"{row[f'total_ms_{rank}']:,.1f}" for rank in ("p50", "p25", "p75")),
                f"{row['cpu_s_per_gbyte']:.2f}",
                *("" if factor is None else f"{factor:.1f}" for factor in factors),
            )
        )
    print(f"\n{aligned(rows, 3)}\n")
    about = {row["peer"]: row["version"] or f"could not take part: {row['error']}" for row in found["rows"]}
    for peer, text in about.items():
        print(prose(f"{peer}: {text}"))
    print()
    print(
        prose(
            "post: what the caller's thread of the source spends on one request, from two lists of page "
            "ids; median. total: from its beginning until the bytes are there: kvxfer's Success at the "
            "receiver, and for NIXL and Mooncake the end as the source sees it, with no word to the "
            "receiver; ucxx has the pages packed, sent as one message, and unpacked. CPU: of both "
            "processes, without the work of a busy target's own thread. x best, x ucx, x engine: total over "
            "that of kvxfer's best way, of kvxfer over ucx, and of kvxfer with memory that, as the peers', "
            "is not its own. nixl-tuned: lists prepared once, and "
            + " ".join(f"{key}={value}" for key, value in found["nixl_tuned"].items())
            + "."
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
