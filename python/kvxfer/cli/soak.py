"""`kvxfer soak`: a great many small hand-offs, and what both processes hold after a tenth of them and after
all.
"""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import Any

from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, progress, size, table
from kvxfer.cli._workers import Workers

__all__ = ["growth", "run"]

_SIDES = ("prefill", "decode")
_STEP_S = 60.0
# Far below what any machine manages; it only bounds a run that has stopped.
_ROOMS_PER_S = 100.0
# Ended rooms that an agent remembers although everybody knows of their end.
_REMEMBERED = 1024


def growth(start: dict[str, Any], end: dict[str, Any]) -> dict[str, float]:
    """By how much each thing that a process holds has grown, as a fraction of what it held before.

    Tables count together: how their entries are shared out among them at a given moment is chance.
    """

    def grown(before: float, after: float) -> float:
        return (after - before) / max(before, 1.0)

    found = {what: grown(start[what], end[what]) for what in ("rss_bytes", "fds", "threads")}
    found["tables"] = grown(sum(start["tables"].values()), sum(end["tables"].values()))
    return found


class _Progress:
    """One line that is written over, on a terminal only: nobody reads a log for it."""

    def __init__(self, rooms: int) -> None:
        self.rooms = rooms
        self.shown = sys.stderr.isatty()
        self.reached = dict.fromkeys(_SIDES, 0)

    def __call__(self, name: str, text: str) -> None:
        self.reached[name] = int(text)
        if self.shown:
            least = min(self.reached.values())
            print(f"\rkvxfer: {least} of {self.rooms} rooms", end="", file=sys.stderr, flush=True)

    def done(self) -> None:
        if self.shown:
            print(file=sys.stderr)


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    first = options.rooms // 10
    config = {
        "fabric": options.fabric,
        "secret": secrets.token_hex(32),
        "seed": secrets.randbits(63),
        "cancel_every": options.cancel_every,
        "totals": [first, options.rooms],
    }
    shown = _Progress(options.rooms)
    looks: list[dict[str, Any]] = []
    seconds = 0.0
    with Workers(shown) as workers:
        progress(f"{options.rooms} small hand-offs over {options.fabric}")
        if options.cancel_every and first // options.cancel_every < _REMEMBERED:
            progress(
                f"{first} rooms do not fill the tables of ended rooms ({_REMEMBERED} entries) before the "
                "first look, so they will be seen to grow: take more rooms, or cancel more of them"
            )
        for side in _SIDES:
            workers.start(side, "kvxfer.cli._soak_end", {**config, "side": side})
        listening = workers.receive(_SIDES, "listening", _STEP_S)
        workers.send(_SIDES, source=listening["prefill"]["address"])
        for _ in config["totals"]:
            over = workers.receive(_SIDES, "over", _STEP_S + options.rooms / _ROOMS_PER_S)
            seconds += max(side["seconds"] for side in over.values())
            # Both must have stopped before either is looked at.
            workers.send(_SIDES, look=True)
            looks.append(workers.receive(_SIDES, "looked", _STEP_S))
            workers.send(_SIDES, go_on=True)
        counted = workers.receive(_SIDES, "counted", _STEP_S)
        workers.send(_SIDES, close=True)
        workers.finish(_SIDES, _STEP_S)
    shown.done()
    wrong = counted["decode"]["wrong"]
    if wrong:
        raise CommandError(
            f"{wrong} rooms of {options.rooms} ended well with bytes of another room: please report it"
        )
    found: dict[str, Any] = {
        "rooms": options.rooms,
        "fabric": options.fabric,
        "seconds": seconds,
        "rooms_per_s": options.rooms / seconds,
        "rooms_at_start": first,
    }
    for side in _SIDES:
        start, end = looks[0][side], looks[1][side]
        grown = growth(start, end)
        found[side] = {
            "succeeded": counted[side]["succeeded"],
            "cancelled": counted[side]["failed"],
            **{f"{what}_start": start[what] for what in ("rss_bytes", "fds", "threads", "tables")},
            **{f"{what}_end": end[what] for what in ("rss_bytes", "fds", "threads", "tables")},
            "growth_fraction": grown,
        }
    found["growth_fraction"] = max(max(found[side]["growth_fraction"].values()) for side in _SIDES)
    found["limit_fraction"] = options.limit
    return found


def _show(found: dict[str, Any]) -> None:
    print(
        f"{found['rooms']} hand-offs of one page over {found['fabric']} in {found['seconds']:.1f} s "
        f"({found['rooms_per_s']:.0f} a second); after {found['rooms_at_start']} of them and at the end:\n"
    )
    rows = []
    for side in _SIDES:
        one = found[side]
        for what, shown in (("rss_bytes", size), ("fds", str), ("threads", str)):
            before, after = shown(one[f"{what}_start"]), shown(one[f"{what}_end"])
            rows.append((side, what, before, after, f"{one['growth_fraction'][what]:+.2%}"))
        before, after = (str(sum(one[f"tables_{when}"].values())) for when in ("start", "end"))
        rows.append(
            (side, "entries of all tables", before, after, f"{one['growth_fraction']['tables']:+.2%}")
        )
        rows.append((side, "ended well, cancelled", str(one["succeeded"]), str(one["cancelled"]), ""))
    print(table(rows))
    print(
        f"\nThe most that anything has grown is {found['growth_fraction']:+.2%}; "
        f"the limit is {found['limit_fraction']:.2%}."
    )


def run(options: argparse.Namespace) -> int:
    """The command."""
    found = _measure(options)
    if options.json:
        print_json(found)
    else:
        _show(found)
    return 1 if found["growth_fraction"] > options.limit else 0
