"""Says what got slower between two results of `kvxfer bench ... --json`, or of pytest-benchmark's JSON.

    python benches/compare.py BEFORE.json AFTER.json [--tolerance 0.1] [--all]

Every figure that both have is compared with the one of the same row. It is slower beyond noise if it is
worse by more than the tolerance, and its quartiles, where the results have them (`X_p25` and `X_p75` beside
`X_p50`), do not overlap. The exit status is 1 if anything is. Ratios to a limit or to a peer of the same run
travel between machines; single times do not, and a change of machine is pointed out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# What names a row, whatever the benchmark.
IDENTITY = (
    *("fabric", "memory", "order", "page_tokens", "tokens", "pages", "rooms", "layers", "small_tokens"),
    *("large_tokens", "large_rooms", "what", "mode", "peer", "target", "who", "per_second", "name"),
)
# Figures of which more is better; of all others less is.
MORE_IS_BETTER = re.compile(r"(gbytes_per_s|speedup\w*|rooms_per_s)$")
# What is measured, and not what was asked for.
FIGURE = re.compile(
    r"(_p50|_p20|_p99|_per_page|_per_run|_per_gbyte|gbytes_per_s|slowdown|ratio_to_copy|ratio_to_readv|lost_fraction"
    r"|speedup\w*|_ms_mean|median)$"
)
# Of the limits themselves and of the host, which are no work of kvxfer's.
NOT_OURS = re.compile(r"^(copy_|ping_|host_|readv_)")


class Change(NamedTuple):
    """One figure, before and after."""

    where: str
    figure: str
    before: float
    after: float
    worse: float
    """By what part it got worse; negative if it got better."""
    beyond: bool
    """Whether that is more than noise."""

    def __str__(self) -> str:
        mark = "SLOWER" if self.beyond and self.worse > 0 else "better" if self.beyond else "same"
        place = f"{self.where}: " if self.where else ""
        return f"{mark:<7} {place}{self.figure} {self.before:.6g} -> {self.after:.6g} ({self.worse:+.1%})"


def rows(found: Any, section: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object with figures in it, by a name made of what identifies it."""
    if isinstance(found, list):
        for item in found:
            yield from rows(item, section)
    elif isinstance(found, dict):
        if "stats" in found and "fullname" in found:  # pytest-benchmark's
            stats = found["stats"]
            yield (
                found["fullname"],
                {"seconds_p50": stats["median"], "seconds_p25": stats["q1"], "seconds_p75": stats["q3"]},
            )
            return
        names = [f"{key} {found[key]}" for key in IDENTITY if isinstance(found.get(key), (str, int))]
        yield ", ".join([section, *names] if section else names), found
        for key, value in found.items():
            if isinstance(value, (list, dict)) and key != "machine":
                yield from rows(value, section if key == "rows" else key)


def quartiles(row: dict[str, Any], figure: str) -> tuple[float, float] | None:
    """Where the middle half of the samples of a median lies."""
    base = figure.removesuffix("_p50")
    low, high = row.get(f"{base}_p25"), row.get(f"{base}_p75")
    return (low, high) if figure.endswith("_p50") and low is not None and high is not None else None


def compare(before: Any, after: Any, tolerance: float) -> Iterator[Change]:
    """All figures that both results have."""
    old = dict(rows(before))
    for where, row in rows(after):
        for figure, value in row.items():
            was = old.get(where, {}).get(figure)
            numbers = isinstance(value, (int, float)) and isinstance(was, (int, float))
            if not numbers or not FIGURE.search(figure) or NOT_OURS.search(figure):
                continue
            if figure == "lost_fraction":
                worse = value - was  # It is a part already, and may be nothing.
            elif was <= 0 or value <= 0:
                continue
            else:
                worse = was / value - 1 if MORE_IS_BETTER.search(figure) else value / was - 1
            spans = quartiles(old[where], figure), quartiles(row, figure)
            apart = True
            if spans[0] is not None and spans[1] is not None:
                apart = spans[0][1] < spans[1][0] or spans[1][1] < spans[0][0]
            yield Change(where, figure, was, value, worse, apart and abs(worse) > tolerance)


def main(arguments: list[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--tolerance", type=float, default=0.1, help="part that is noise (default: 0.1)")
    parser.add_argument("--all", action="store_true", help="print what stayed the same, too")
    options = parser.parse_args(arguments)
    before, after = (json.loads(file.read_text(encoding="utf-8")) for file in (options.before, options.after))
    machines = [found.get("machine") or found.get("machine_info") for found in (before, after)]
    keys = ("cpu", "cores", "node")
    names = [{key: machine.get(key) for key in keys} if machine else None for machine in machines]
    if names[0] != names[1]:
        print(f"not the same machine: {names[0]} and {names[1]}: only ratios compare")
    changes = list(compare(before, after, options.tolerance))
    if not changes:
        print("the two results have no figure in common")
        return 2
    changes.sort(key=lambda change: -change.worse)
    shown = [change for change in changes if change.beyond or options.all]
    for change in shown:
        print(change)
    slower = sum(change.beyond and change.worse > 0 for change in changes)
    better = sum(change.beyond and change.worse < 0 for change in changes)
    print(f"{len(changes)} figures: {slower} slower beyond noise, {better} better, the others the same")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
