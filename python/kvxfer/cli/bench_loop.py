"""`kvxfer bench loop`: what hand-offs cost a decode loop that runs in the receiving process."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import secrets
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import kvxfer
from kvxfer.cli._bench_numbers import interval, machine, percentile
from kvxfer.cli._bench_plot import Line, plot
from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import aligned, print_json, progress, prose
from kvxfer.cli._workers import Workers

__all__ = ["run", "verdict"]

_STEP_S = 60.0
# Long enough for every process to hear of a block before it begins.
_LEAD_S = 0.05
_MODULE = "kvxfer.cli._bench_loop_end"
_NIXL = ("nixl-decode", "nixl-prefill")
# A decode loop of which posting takes this part makes no tokens to speak of.
_SATURATED = 0.9
_BAR_POINTS = 1.0


def verdict(low: float, high: float, bar: float) -> str:
    """What a 95 % interval says of a figure that must not be above the bar."""
    if high <= bar:
        return "pass"
    return "fail" if low > bar else "inconclusive"


class _Stage:
    """All processes, and blocks of the loop."""

    def __init__(self, stack: contextlib.ExitStack, options: argparse.Namespace) -> None:
        cores = sorted(os.sched_getaffinity(0))
        # The loop has a core; all others share the rest.
        apart = len(cores) > 1
        self.config = {
            "tokens": options.tokens,
            "fabric": options.fabric,
            "step_s": options.step_ms / 1e3,
            "secret": secrets.token_hex(32),
            "loop_cores": cores[:1] if apart else [],
            "other_cores": cores[1:] if apart else [],
        }
        # numpy's products would use every core.
        self.env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.env["PYTHONPATH"] = str(Path(kvxfer.__file__).parents[1])
        self.workers = stack.enter_context(Workers())
        for role in ("decode", "prefill", "copier"):
            self.workers.start(role, _MODULE, {**self.config, "role": role}, env=self.env)
        ready = self.workers.receive(("decode", "prefill", "copier"), "ready", _STEP_S)
        self.workers.send(["copier", "prefill"], go=True)
        self.workers.send(["decode"], source=ready["prefill"]["address"])
        self.workers.receive(["decode"], "calibrated", _STEP_S)
        self.nixl: Workers | None = None
        self.reason: str | None = None
        self.version: str | None = None
        if options.nixl:
            own = contextlib.ExitStack()
            try:
                self._start_nixl(own, options.python)
                stack.push(own)
            except CommandError as error:
                own.close()
                self.nixl, self.reason = None, str(error)
            except OSError as error:
                own.close()
                self.nixl, self.reason = None, f"{options.python}: {error.strerror}"
            if self.reason:
                progress(f"NIXL cannot take part: {self.reason}")

    def _start_nixl(self, stack: contextlib.ExitStack, python: str) -> None:
        self.nixl = stack.enter_context(Workers())
        for role in _NIXL:
            self.nixl.start(role, _MODULE, {**self.config, "role": role}, env=self.env, python=python)
        ready = self.nixl.receive(_NIXL, "ready", _STEP_S)
        self.version = ready[_NIXL[0]]["version"]
        for role, other in zip(_NIXL, reversed(_NIXL), strict=True):
            self.nixl.send([role], other=ready[other]["info"])
        self.nixl.receive(_NIXL, "connected", _STEP_S)
        self.nixl.receive(_NIXL[:1], "calibrated", _STEP_S)
        # It has threads that look for work all the time.
        self.nixl.signal(_NIXL, signal.SIGSTOP)

    def block(self, who: str, per_second: int, seconds: float, draw: random.Random) -> dict[str, Any]:
        """One block of the loop, with hand-offs at even distances from a place by chance."""
        count = round(per_second * seconds)
        apart = seconds * 1e6 / max(count, 1)
        first = draw.random() * apart
        of_nixl = who.endswith("nixl") or who == "none-nixl"
        if of_nixl and self.nixl is not None:
            self.nixl.signal(_NIXL, signal.SIGCONT)
        block: dict[str, Any] = {
            "kind": "block",
            "who": who,
            "seconds": seconds,
            "arrivals_us": [first + i * apart for i in range(count)],
            "rooms": [secrets.randbits(63) for _ in range(count)],
        }
        if of_nixl and self.nixl is not None:
            said = self._run(self.nixl, _NIXL[:1], block)
            self.nixl.signal(_NIXL, signal.SIGSTOP)
            if not said["right"]:
                raise CommandError("NIXL's bytes are not those that were sent: the figures mean nothing")
            return said
        helpers = {"kvxfer": ["prefill"], "copy": ["copier"]}.get(who, [])
        return self._run(self.workers, ["decode", *helpers], block)

    @staticmethod
    def _run(workers: Workers, names: Sequence[str], block: dict[str, Any]) -> dict[str, Any]:
        """Has a block run; what the loop, the first of them, says of it."""
        workers.send(names, **block)
        workers.receive(names, "armed", _STEP_S)
        workers.send(names, start_us=time.monotonic_ns() / 1e3 + _LEAD_S * 1e6)
        said = workers.receive(names, "done", _STEP_S + 10 * block["seconds"])[names[0]]
        if not said["steps_ms"]:
            raise CommandError(
                f"the loop made no step in {block['seconds']:g} s ({block['who']}): the machine is too busy,"
                " or the block too short"
            )
        return said

    def close(self) -> None:
        """Ends all."""
        if self.nixl is not None:
            self.nixl.signal(_NIXL, signal.SIGCONT)
            self.nixl.send(_NIXL, kind="close")
        self.workers.send(("decode", "prefill", "copier"), kind="close")


Blocks = dict[tuple[str, int], list[dict[str, Any]]]


def _mean(block: dict[str, Any]) -> float:
    return statistics.fmean(block["steps_ms"])


def _lost(blocks: Blocks, who: str, per_second: int) -> list[float]:
    """What each block has lost to the one of the same round and process that had no hand-offs."""
    base = blocks["none-nixl" if who == "nixl" else "none", 0]
    return [_mean(one) / _mean(none) - 1 for one, none in zip(blocks[who, per_second], base, strict=True)]


def _row(blocks: Blocks, who: str, per_second: int, seconds: float) -> dict[str, Any]:
    own = blocks[who, per_second]
    steps = [step for block in own for step in block["steps_ms"]]
    lost = _lost(blocks, who, per_second)
    low, high = interval(lost)
    mean_low, mean_high = interval([_mean(block) for block in own])
    posts = [post for block in own for post in block["posts_ms"]]
    posting = sum(posts) / (seconds * 1e3 * len(own))
    # A loop that is late cannot begin what has arrived.
    saturated = posting > _SATURATED or sum(block["left"] for block in own) > len(own)
    return {
        "who": who,
        "per_second": per_second,
        "step_ms_mean": statistics.fmean(_mean(block) for block in own),
        "step_ms_low": mean_low,
        "step_ms_high": mean_high,
        "step_ms_p50": statistics.median(steps),
        "step_ms_p99": percentile(steps, 99),
        "lost_fraction": statistics.fmean(lost),
        "lost_low": low,
        "lost_high": high,
        "post_ms_p50": statistics.median(posts) if posts else None,
        "posting_fraction": posting,
        "saturated": saturated,
        "blocks": len(own),
    }


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(secrets.randbits(64))
    blocks: Blocks = {}
    with contextlib.ExitStack() as stack:
        progress("starting the loop and those who send to it")
        stage = _Stage(stack, options)
        cases = [("none", 0)]
        cases += [(who, rate) for rate in options.per_second for who in ("copy", "kvxfer")]
        if stage.nixl is not None:
            cases += [("none-nixl", 0), *(("nixl", rate) for rate in options.per_second)]
        total = len(cases) * options.blocks * options.block_seconds
        progress(
            f"{options.blocks} rounds of {len(cases)} blocks of {options.block_seconds:g} s: {total:.0f} s"
        )
        # The first hand-offs of all meet memory that no side has seen.
        for who in ("copy", "kvxfer"):
            stage.block(who, 16, 1.0, draw)
        for number in range(options.blocks):
            order = cases.copy()
            draw.shuffle(order)
            for who, rate in order:
                blocks.setdefault((who, rate), []).append(stage.block(who, rate, options.block_seconds, draw))
            if (number + 1) % 5 == 0:
                progress(f"{number + 1} of {options.blocks} rounds")
        stage.close()
    rows = [
        _row(blocks, who, rate, options.block_seconds)
        for who, rate in sorted(cases, key=lambda case: (case[1], case[0]))
        if who != "none-nixl"
    ]
    versus = []
    for rate in options.per_second:
        pairs = zip(_lost(blocks, "kvxfer", rate), _lost(blocks, "copy", rate), strict=True)
        points = [100 * (ours - copy) for ours, copy in pairs]
        low, high = interval(points)
        versus.append(
            {
                "per_second": rate,
                "points": statistics.fmean(points),
                "low": low,
                "high": high,
                "verdict": verdict(low, high, _BAR_POINTS),
            }
        )
    return {
        "machine": machine(),
        "tokens": options.tokens,
        "fabric": options.fabric,
        "target_step_ms": options.step_ms,
        "block_seconds": options.block_seconds,
        "cores_apart": bool(stage.config["loop_cores"]),
        "nixl_version": stage.version,
        "nixl_error": stage.reason,
        "rows": rows,
        "versus_copy": versus,
        "bar_points": _BAR_POINTS,
    }


def _draw(found: dict[str, Any], file: Path) -> None:
    rows = found["rows"]
    none = next(row for row in rows if row["who"] == "none")
    rates = sorted({row["per_second"] for row in rows} - {0})
    lines = []
    for who in ("none", "copy", "kvxfer", "nixl"):
        own = [none] * len(rates) if who == "none" else [row for row in rows if row["who"] == who]
        points = [
            (float(rate), row["step_ms_mean"], row["step_ms_low"], row["step_ms_high"])
            for rate, row in zip(rates, own, strict=False)
            if not row["saturated"]
        ]
        if points:
            lines.append(Line(who, points))
    title = f"Time per token of a decode loop, hand-offs of {found['tokens']:,} tokens over {found['fabric']}"
    try:
        file.write_text(plot(title, "hand-offs a second", "ms a token (mean, 95 %)", lines), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"the plot cannot be written: {error}") from error


def _show(found: dict[str, Any]) -> None:
    on = found["machine"]
    print(
        prose(
            f"A decode loop with steps of {found['target_step_ms']} ms beside hand-offs of "
            f"{found['tokens']:,} tokens of a Qwen3-32B TP8 rank over {found['fabric']}, on {on['cores']} "
            f"cores of {on['cpu']}, the loop "
            + (
                "on one of its own:"
                if found["cores_apart"]
                else "sharing the one there is with everything else:"
            )
        )
    )
    rows: list[Sequence[str]] = [("who", "a second", "ms", "p50", "p99", "lost %", "95 %", "post ms", "")]
    for row in found["rows"]:
        post = "" if row["post_ms_p50"] is None else f"{row['post_ms_p50']:.3f}"
        lost = (
            f"{100 * row['lost_fraction']:+.2f}",
            f"{100 * row['lost_low']:+.2f} to {100 * row['lost_high']:+.2f}",
        )
        times = (f"{row[key]:.3f}" for key in ("step_ms_mean", "step_ms_p50", "step_ms_p99"))
        note = "saturated" if row["saturated"] else ""
        rows.append((row["who"], str(row["per_second"]), *times, *lost, post, note))
    print(f"\n{aligned(rows, 1)}\n")
    print(
        prose(
            "ms: mean time per token; lost: more than the block without hand-offs of the same round and "
            "process. copy: another process copies as many bytes in the same pieces at the same times, "
            "which is what the memory's bandwidth alone costs. nixl: the loop's thread posts reads (lists "
            "prepared once). saturated: posting leaves the loop no time."
        )
    )
    rows = [("a second", "kvxfer over copy, points", "95 %", f"at most {found['bar_points']:g}")]
    for row in found["versus_copy"]:
        span = f"{row['low']:+.2f} to {row['high']:+.2f}"
        rows.append((str(row["per_second"]), f"{row['points']:+.2f}", span, row["verdict"]))
    print(f"\n{aligned(rows, 0)}")
    if found["nixl_error"]:
        print("\n" + prose(f"nixl could not take part: {found['nixl_error']}"))


def run(options: argparse.Namespace) -> int:
    """The command."""
    if options.python is None:
        options.python = sys.executable
    found = _measure(options)
    if options.plot:
        _draw(found, Path(options.plot))
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 0
