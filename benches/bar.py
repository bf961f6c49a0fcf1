"""Runs what the bar of docs/performance.md is made of, and prints its table from the results.

    python benches/bar.py run PART FOLDER [--ucx wheel|FILE] [--peers-python FILE] [--kvxfer FILE]
    python benches/bar.py table FOLDER...

A part (`post`, `transfer-shm`, `transfer-ucx`, `loop`, `peers`) takes one to four minutes and leaves its JSON
in the folder; run each while nothing else does. The table has what is there, of each folder as a run of its
own, and says on what it was measured. A bar that was missed is marked; one that an interval spans is neither
met nor missed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

FABRICS = ("shm", "ucx")
TRANSFER = "--tokens 2000 --page-tokens 16 --rooms 1 64 --rounds 9 --latency-rooms 200"
LOOP = "--per-second 8 --no-nixl --blocks 60"
PEERS = "--rounds 5 --peers nixl nixl-tuned"
PARTS: dict[str, dict[str, str]] = {
    "post": {f"post-{fabric}": f"post --fabric {fabric}" for fabric in FABRICS},
    **{
        f"transfer-{fabric}": {f"transfer-{fabric}": f"transfer {TRANSFER} --fabric {fabric}"}
        for fabric in FABRICS
    },
    "loop": {"loop": f"loop {LOOP}"},
    "peers": {"peers": f"peers {PEERS}"},
}
LABELS = {"kvxfer": "kvxfer's", "engine": "an engine's"}
SHARED = {"kvxfer": {"shm": 1.15, "ucx": 1.3}, "engine": {"shm": 2.2, "ucx": 2.2}}
PIECE_US = {"spinning": 60.0, "idle": 150.0}


class Line(NamedTuple):
    """A line of the table."""

    what: str
    bar: str
    measured: str
    verdict: str


def met(value: float, bar: float, *, least: bool = False) -> str:
    """Whether a figure is at most, or at least, its bar."""
    return "met" if (value >= bar if least else value <= bar) else "**missed**"


def post(found: dict[str, Any]) -> Iterator[Line]:
    """Calls of the caller's thread."""
    for key, bar, what in (
        ("push_us_p50", 3, "`push`, median, us"),
        ("push_us_p99", 30, "`push`, p99, us"),
        ("push_ns_per_page", 2, "`push`, ns a page"),
    ):
        values = {fabric: found[f"post-{fabric}"][key] for fabric in FABRICS if f"post-{fabric}" in found}
        if values:
            text = ", ".join(f"{fabric} {value:.2f}" for fabric, value in values.items())
            yield Line(what, str(bar), text, met(max(values.values()), bar))


def transfer(fabric: str, found: dict[str, Any]) -> Iterator[Line]:
    """Whole hand-offs over one fabric."""
    for memory in ("kvxfer", "engine"):
        for pages in ("shuffled", "contiguous"):
            wanted = (memory, pages, 2000, 1)
            rows = [
                row
                for row in found["rows"]
                if (row["memory"], row["pages"], row["tokens"], row["rooms"]) == wanted
            ]
            if not rows:
                continue
            row = rows[0]
            bar = SHARED[memory][fabric] if pages == "shuffled" else None
            text = f"{row['ratio_to_copy']:.2f} ({row['seconds_p50'] * 1e3:.1f} ms)"
            if row["ratio_to_readv"] is not None:
                text += f"; {row['ratio_to_readv']:.2f} of bare `process_vm_readv`"
            what = f"2,000 tokens over {fabric}, {LABELS[memory]} memory, {pages}, x copy"
            yield Line(
                what, "" if bar is None else str(bar), text, met(row["ratio_to_copy"], bar) if bar else ""
            )
    rooms = {
        row["rooms"]: row for row in found["rows"] if row["memory"] == "kvxfer" and row["tokens"] != 2000
    }
    if 1 in rooms and 64 in rooms:
        one, many = (rooms[n]["gbytes_per_s"] for n in (1, 64))
        text = f"{many / one:.2f} ({many:.1f}, one {one:.1f})"
        yield Line(
            f"64 rooms over {fabric}, GB/s beside one room's", "0.9", text, met(many / one, 0.9, least=True)
        )
    for row in found["fairness"]:
        text = f"{row['slowdown']:.2f} ({row['beside_ms_p50']:.2f} ms, {row['alone_ms_p50']:.2f} alone)"
        what = f"1,000 tokens beside four of 128,000 over {fabric}, x alone"
        yield Line(what, "5", text, met(row["slowdown"], 5))
    for row in found["latency"]:
        bar = PIECE_US[row["mode"]]
        name = "a piece"
        if row["what"] == "page":
            bar += 1.2 * row["copy_us_p50"]
            name = "a page (512 KiB; the piece's bar and 1.2 x its copy)"
        parts = f"thread has it: {row['to_event_us_p50']:.0f}; ping-pong {row['ping_us_p50']:.0f}"
        text = f"{row['to_poll_us_p50']:.0f} ({parts})"
        what = f"{name}, push to poll, {row['mode']}, over {fabric}, us"
        yield Line(what, f"{bar:.0f}", text, met(row["to_poll_us_p50"], bar))
    for row in found["in_flight"]:
        mib = max(row["prefill_bytes"], row["decode_bytes"]) / (1 << 20)
        yield Line(f"1,000 rooms in flight over {fabric}, MiB", "32", f"{mib:.1f}", met(mib, 32))
    for row in found["first_touch"]:
        what = f"first use of every page over {fabric}, {LABELS[row['memory']]} memory, x copy"
        yield Line(what, "", f"{row['ratio_to_copy']:.2f} ({row['bytes'] >> 20} MiB)", "")


def loop(found: dict[str, Any]) -> Iterator[Line]:
    """The decode loop."""
    verdicts = {"pass": "met", "fail": "**missed**"}
    for row in found["versus_copy"]:
        text = f"{row['points']:+.2f} ({row['low']:+.2f} to {row['high']:+.2f})"
        lost = ", ".join(
            f"{r['who']} {100 * r['lost_fraction']:+.2f} %" for r in found["rows"] if r["who"] != "none"
        )
        what = f"decode loop at {row['per_second']}/s: over the plain copy, points"
        yield Line(
            what, str(found["bar_points"]), f"{text}; {lost}", verdicts.get(row["verdict"], row["verdict"])
        )


def peers(found: dict[str, Any]) -> Iterator[Line]:
    """Other libraries; a busy target is in the JSON only."""
    for row in found["rows"]:
        if row["pages"] is None or row["target"] != "idle":
            continue
        bar = 5 if (row["peer"], row["pages"]) == ("nixl", "shuffled") else 1
        text = (
            f"{row['speedup']:.1f}, on an engine's memory {row['speedup_engine']:.2f} "
            f"({row['total_ms_p50']:.0f} ms; its posting {row['post_us_p50'] / 1e3:.1f} ms)"
        )
        what = f"{row['peer']} {row['version']}, {row['pages']} pages, x kvxfer's best fabric"
        yield Line(what, str(bar), text, met(row["speedup"], bar, least=True))


def lines(found: dict[str, Any]) -> Iterator[Line]:
    """The whole table."""
    yield from post(found)
    for fabric in FABRICS:
        if f"transfer-{fabric}" in found:
            yield from transfer(fabric, found[f"transfer-{fabric}"])
    for name, make in (("loop", loop), ("peers", peers)):
        if name in found:
            yield from make(found[name])


def joined(runs: list[list[Line]]) -> Iterator[Line]:
    """The lines of several runs, those of the same thing as one."""
    by_what: dict[str, list[Line]] = {}
    for line in (line for one in runs for line in one):
        by_what.setdefault(line.what, []).append(line)
    for what, same in by_what.items():
        bars = list(dict.fromkeys(line.bar for line in same))
        verdicts = list(dict.fromkeys(line.verdict for line in same))
        verdict = verdicts[0]
        if len(verdicts) > 1:
            count = sum(line.verdict == "met" for line in same)
            verdict = f"**met in {count} of {len(same)}**"
        yield Line(what, "; ".join(bars), "; ".join(line.measured for line in same), verdict)


def measured_on(found: dict[str, Any]) -> str:
    """The machines and libraries that these results name; more than one if they differ."""
    said = {
        f"{on['cores']} cores of {on['cpu']}, Linux {on['kernel']}, UCX {on['ucx']}"
        for on in (one.get("machine") for one in found.values())
        if on
    }
    return " and ".join(sorted(said)) or "not said"


def library(ucx: str) -> str:
    """The UCX to measure: the wheel's, which kvxfer installs, or a file."""
    if ucx != "wheel":
        return ucx
    spec = importlib.util.find_spec("libucx")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        return str(Path(folder) / "lib" / "libucp.so.0")
    raise SystemExit("bar.py: the libucx wheel is not installed: pip install 'kvxfer[ucx]', or --ucx FILE")


def run(args: argparse.Namespace) -> None:
    """Runs a part."""
    args.folder.mkdir(parents=True, exist_ok=True)
    ucx = library(args.ucx)
    print(f"bar.py: {args.part} with {ucx}", file=sys.stderr)
    for name, command in PARTS[args.part].items():
        words = command.split()
        if args.peers_python and words[0] == "peers":
            words += ["--python", args.peers_python]
        done = subprocess.run(
            [args.kvxfer, "bench", *words, "--json"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "KVXFER_UCX_LIBRARY": ucx},
        )
        (args.folder / f"{name}.json").write_text(done.stdout, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("run")
    one.add_argument("part", choices=list(PARTS))
    one.add_argument("folder", type=Path)
    one.add_argument("--ucx", default="wheel", help="libucp.so.0 to measure (default: the libucx wheel's)")
    one.add_argument("--peers-python", help="the interpreter that has NIXL")
    one.add_argument("--kvxfer", default=str(Path(sys.executable).with_name("kvxfer")))
    one.set_defaults(do=run)
    table = commands.add_parser("table")
    table.add_argument("folder", type=Path, nargs="+")
    table.set_defaults(do=lambda args: print_table(args.folder))
    args = parser.parse_args()
    args.do(args)


def print_table(folders: list[Path]) -> None:
    """The table, as Markdown."""
    runs = []
    for folder in folders:
        found = {
            file.stem: json.loads(file.read_text(encoding="utf-8")) for file in sorted(folder.glob("*.json"))
        }
        print(f"{folder.name}: {measured_on(found)}\n")
        runs.append(list(lines(found)))
    print("| what | bar | measured | |\n|---|---|---|---|")
    for line in joined(runs):
        print(f"| {' | '.join(line)} |")


if __name__ == "__main__":
    main()
