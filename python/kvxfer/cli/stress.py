"""`kvxfer stress`: many hand-offs at once, cancelled and killed in mid-write, and every byte looked at."""

from __future__ import annotations

import argparse
import secrets
import shlex
import time
from collections.abc import Callable
from typing import Any

from kvxfer import _kvxfer
from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, progress, size, table
from kvxfer.errors import BadArgument

__all__ = ["FAILED_TO_RUN", "MUST_BE_ZERO", "run", "verdict"]

FAILED_TO_RUN = 3
"""Exit status if the run could not be carried out: nothing was found out."""

MUST_BE_ZERO = (
    "unended",
    "corrupt_bytes",
    "leaked_pages",
    "late_writes",
    "double_ends",
    "unexpected_failures",
    "violation_count",
)
"""Figures any of which, if it is there and is not zero, says that a promise was broken."""

# Options that every run has, and those of the simulator only.
_SIZES = ("rooms", "concurrent", "cancel", "kill")
_SIM_ONLY = ("stop", "cut", "mover", "fence")

_MEANINGS = {
    "rooms": "hand-offs that were to be made",
    "succeeded": "ended well, every byte as it has to be",
    "failed": "ended otherwise, because a source died",
    "cancelled": "given up by one of the sides",
    "unended": "without an end, or with pages that never came back, on either side",
    "corrupt_bytes": "bytes that are neither what was sent nor what was there before; also of canary pages",
    "leaked_pages": "pages, and entries of tables, that are left when every room has ended",
    "late_writes": "pages written to after their released event",
    "double_ends": "events of rooms that had ended",
    "unexpected_failures": "rooms that failed though nobody cancelled them or killed a source of theirs",
    "violation_count": "breaches of the contract that the simulator saw",
    "cancelled_mid_write": "cancelled when a push had arrived in part",
    "kills": "prefill processes killed and restarted on their port",
    "kills_mid_write": "of those, while bytes were in flight, some of which were found in rooms that failed",
    "kills_cut_off": "of those, with a push that had arrived in part when the death was noticed",
    "drain_ms_p50": "from cancel or failure to released on decode, ms: median",
    "drain_ms_p99": "all but the slowest hundredth",
    "virtual_ms": "simulated time, ms",
    "seconds": "all of it",
}


def _simulate(options: argparse.Namespace) -> dict[str, Any]:
    """The run over the simulated fabric, which is compiled; the only place that knows of it."""
    simulate: Callable[..., dict[str, Any]] | None = getattr(_kvxfer, "simulate", None)
    if simulate is None:
        raise CommandError(
            "this build of kvxfer has no simulator: build it anew (`make test-rust`, or pip install .)",
            FAILED_TO_RUN,
        )
    try:
        return simulate(
            options.seed,
            flaw=options.flaw,
            log=options.log,
            **{name: getattr(options, name) for name in (*_SIZES, *_SIM_ONLY)},
        )
    except BadArgument as error:
        raise CommandError(str(error), 2) from error
    except OSError as error:
        raise CommandError(f"{options.log} cannot be written: {error.strerror}", FAILED_TO_RUN) from error


def _replay(options: argparse.Namespace) -> str:
    """The command that does the same again."""
    words = ["kvxfer", "stress", "--fabric", options.fabric]
    for name in (*_SIZES, *(_SIM_ONLY if options.fabric == "sim" else ())):
        words += [f"--{name}", str(getattr(options, name))]
    if options.ucx_tls is not None:
        words += ["--ucx-tls", options.ucx_tls]
    if options.flaw is not None:
        words += ["--break", options.flaw]
    words += ["--seed", str(options.seed)]
    return shlex.join(words)


def verdict(found: dict[str, Any]) -> list[str]:
    """The figures that are not zero and have to be."""
    return [name for name in MUST_BE_ZERO if found.get(name)]


def _show(found: dict[str, Any]) -> None:
    rows = []
    for key, meaning in _MEANINGS.items():
        if key in found:
            value = found[key]
            text = f"{value:.1f}" if isinstance(value, float) else "none" if value is None else str(value)
            rows.append((key, text.rjust(10), meaning))
    moved = f", {size(found['bytes'])} moved" if "bytes" in found else ""
    print(f"{found['rooms']} hand-offs over {found['fabric']}, seed {found['seed']}{moved}:\n")
    print(table(rows))
    print()


def run(options: argparse.Namespace) -> int:
    """The command.

    0: every figure that must be zero is. 1: one is not; with `--break` the flaw was caught then, and 0 says
    that it was not. 3: the run could not be carried out.
    """
    if options.seed is None:
        options.seed = secrets.randbits(32)
    began = time.monotonic()
    if not options.json:
        progress(_replay(options))
    if options.fabric == "sim":
        found = _simulate(options)
    else:
        from kvxfer.cli._stress_run import run_processes

        try:
            found = run_processes(options)
        except CommandError as error:
            raise CommandError(f"{error}; again: {_replay(options)}", FAILED_TO_RUN) from error
    broken = verdict(found)
    found |= {
        "fabric": options.fabric,
        "seed": options.seed,
        "flaw": options.flaw,
        "seconds": round(time.monotonic() - began, 3),
        "replay": _replay(options),
    }
    if options.flaw is not None:
        found["caught"] = bool(broken)
    if options.json:
        print_json(found)
    else:
        _show(found)
    _conclude(options, found, broken)
    return 1 if broken else 0


def _conclude(options: argparse.Namespace, found: dict[str, Any], broken: list[str]) -> None:
    """One line on standard error, and what was found, one by one."""
    figures = ", ".join(f"{name} {found[name]}" for name in broken)
    if options.flaw is not None:
        if broken:
            progress(f"the flaw {options.flaw} was caught: {figures}")
        else:
            progress(f"the flaw {options.flaw} was NOT caught over {options.fabric}")
        return
    for name, wanted in (("cancelled_mid_write", options.cancel), ("kills_mid_write", options.kill)):
        if wanted and not found.get(name):
            progress(f"{name} is 0: the run proves less than it could; make it longer, or use another seed")
    if broken:
        for line in (*found.get("told", ()), *found.get("violations", ())):
            progress(line)
        progress(f"FAILED: {figures} should be zero; again: {found['replay']}")
