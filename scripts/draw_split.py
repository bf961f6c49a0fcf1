"""Draws the pictures of docs/when-to-split.md from what `kvxfer.simulate` answers.

    draw_split.py [--check] [--out FOLDER]

`figures.json` beside the pictures has every number that is drawn. `--check` simulates anew, draws nothing,
and fails if a number differs. Needs matplotlib unless it only checks.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvxfer.simulate import LATE, PULL, PUSH, UNIFIED, Costs, Setup, bursts, poisson, simulate, users
from kvxfer.simulate.plot import load, plain_log, save, style

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "split"
MODES = {"plain": UNIFIED, "pull": PULL, "push": PUSH, "late push": LATE}

Lines = dict[str, list[list[float]]]


def figure(value: float | None) -> float:
    """Five digits are more than anyone sees."""
    return float(f"{value or 0.0:.5g}")


def modes() -> dict[str, Lines]:
    """The field's sweep: rates, two lengths of prompts, 8 slots; means over five seeds."""
    out: dict[str, Lines] = {}
    for prompt in (1024, 16_384):
        for name, mode in MODES.items():
            for qps in (1, 2, 4, 6, 8):
                found = [
                    simulate(
                        Setup(mode, prefill=4, slots=8),
                        poisson(qps=qps, requests=100, prompt=prompt, answer=128, seed=seed),
                    ).summary
                    for seed in range(1, 6)
                ]
                for key in ("ttft_ms_mean", "tpot_ms_mean"):
                    lines = out.setdefault(f"{key} {prompt}", {})
                    mean = sum(one[key] for one in found) / len(found)
                    lines.setdefault(name, []).append([qps, figure(mean)])
    return out


def slots() -> dict[str, Lines]:
    """First token and slots held by the number of slots, at 8 req/s of 16,000 tokens."""
    out: dict[str, Lines] = {"ttft_ms_mean": {}, "slots_used_fraction": {}}
    for name in ("pull", "push"):
        for count in (7, 8, 9, 10, 12, 14, 16, 20, 24):
            found = [
                simulate(
                    Setup(MODES[name], prefill=4, slots=count),
                    poisson(qps=8, requests=100, prompt=16_000, answer=128, seed=seed),
                ).summary
                for seed in range(1, 6)
            ]
            for key, lines in out.items():
                mean = sum(one[key] for one in found) / len(found)
                lines.setdefault(name, []).append([count, figure(mean)])
    return out


def ratios() -> dict[str, Lines]:
    """Eight GPUs as four plain servers, or divided three ways, by users at a time."""
    kinds = {"4 plain": (UNIFIED, 2), "1 : 3": (PUSH, 1), "2 : 2": (PUSH, 2), "3 : 1": (PUSH, 3)}
    out: dict[str, Lines] = {"requests_per_s": {}, "ttft_ms_mean": {}, "itl_ms_p99": {}}
    for count in (4, 8, 16, 32, 64, 128, 256, 512):
        traffic = users(users=count, requests=max(200, 5 * count), prompt=1024, answer=1024, seed=1)
        for name, (mode, prefill) in kinds.items():
            found = simulate(Setup(mode, prefill=prefill, decode=4 - prefill, tp=2), traffic).summary
            for key, lines in out.items():
                lines.setdefault(name, []).append([count, figure(found[key])])
    return out


def goodput() -> dict[str, Lines]:
    """Requests that meet both SLOs, on eight GPUs, by the rate at which they come."""
    kinds = {
        "plain, chunks of 2,048": (UNIFIED, 2, 2048),
        "plain, chunks of 512": (UNIFIED, 2, 512),
        "1 : 3": (PUSH, 1, 8192),
        "2 : 2": (PUSH, 2, 8192),
        "3 : 1": (PUSH, 3, 8192),
    }
    shapes = {
        "chat, 50 ms a token": (1000, 300, 50.0, (4, 8, 12, 16, 20, 24)),
        "chat, 25 ms a token": (1000, 300, 25.0, (4, 8, 12, 16, 20, 24)),
        "documents, 25 ms a token": (8000, 300, 25.0, (0.5, 1, 1.5, 2, 2.5, 3)),
    }
    out: dict[str, Lines] = {}
    for title, (prompt, answer, slo, rates) in shapes.items():
        for qps in rates:
            traffic = poisson(
                qps=qps, requests=600, prompt=prompt, answer=answer, spread=0.8, answer_spread=0.5, seed=1
            )
            for name, (mode, prefill, chunk) in kinds.items():
                setup = Setup(
                    mode,
                    prefill=prefill,
                    decode=4 - prefill,
                    tp=2,
                    chunk=chunk,
                    slo_ttft_ms=3000,
                    slo_tpot_ms=slo,
                )
                found = simulate(setup, traffic).summary["good_fraction"]
                out.setdefault(title, {}).setdefault(name, []).append([qps, figure(100 * found)])
    return out


QUIET_S, BURST_S = 1300, 200


def classic() -> dict[str, Lines]:
    """A burst that decode's links cannot carry, with and without admission."""
    costs = Costs(nic_gb_s=50 / 8 / 2, hbm_gb=90)
    traffic = bursts(
        qps=0.8,
        requests=round(0.8 * (QUIET_S + 5 * BURST_S)),
        prompt=16_000,
        answer=350,
        factor=5,
        burst_s=BURST_S,
        every_s=QUIET_S + BURST_S,
        seed=3,
    )
    decode, per_server = 2, 64
    kinds = {"plain": (UNIFIED, False), "push": (PUSH, False), "push, admission": (PUSH, True)}
    out: dict[str, Lines] = {"prefill": {}, "handoff": {}, "link": {}, "slots": {}, "ttft": {}}
    for name, (mode, admission) in kinds.items():
        setup = Setup(
            mode,
            prefill=6,
            decode=decode,
            tp=2,
            slots=per_server,
            chunk=1024 if mode.split else 256,
            admission=admission,
            slo_ttft_ms=4000,
        )
        result = simulate(setup, traffic, costs)
        found = result.summary
        out["ttft"][name] = [[50, figure(found["ttft_ms_p50"])], [99, figure(found["ttft_ms_p99"])]]
        out.setdefault("rejected", {})[name] = [[0, found["rejected"]]]
        seen = [s for s in result.samples if s.at_ms / 1e3 >= QUIET_S - 100]
        whole = costs.engine(2).link_bytes_ms * decode
        count = per_server * (decode if mode.split else 8)
        for before, now in itertools.pairwise(seen):
            at = figure((now.at_ms / 1e3) - QUIET_S)
            if at > 400:
                break
            out["prefill"].setdefault(name, []).append([at, now.prefill_queue])
            out["slots"].setdefault(name, []).append([at, figure(100 * now.slots_used / count)])
            if mode.split:
                out["handoff"].setdefault(name, []).append([at, now.handoff_queue])
                use = (now.link_bytes - before.link_bytes) / (whole * (now.at_ms - before.at_ms))
                out["link"].setdefault(name, []).append([at, figure(100 * use)])
    return out


class Panel(NamedTuple):
    """What one panel shows: a key of the figures, its title, what y is, and whether y is logarithmic."""

    key: str
    title: str
    y: str
    log: bool = False


def _first_token(key: str, about: str = "") -> Panel:
    return Panel(key, f"First token{about}", "ms", log=True)


def _good(about: str, ms: int) -> Panel:
    words = {"chat": "1,000 + 300 tokens", "documents": "8,000 + 300 tokens"}[about]
    return Panel(f"{about}, {ms} ms a token", f"{words}, {ms} ms a token", "% good")


# Of each picture: who simulates it, its panels, and what x is.
PICTURES: dict[str, tuple[Any, list[Panel], str]] = {
    "modes": (
        modes,
        [_first_token(f"ttft_ms_mean {n}", f", prompts of {n:,}") for n in (1024, 16384)]
        + [Panel(f"tpot_ms_mean {n}", f"Time per token, prompts of {n:,}", "ms") for n in (1024, 16384)],
        "requests a second",
    ),
    "slots": (
        slots,
        [_first_token("ttft_ms_mean"), Panel("slots_used_fraction", "Slots held", "part of the slots")],
        "slots of the decode server",
    ),
    "ratios": (
        ratios,
        [
            Panel("requests_per_s", "Throughput", "requests a second"),
            _first_token("ttft_ms_mean"),
            Panel("itl_ms_p99", "Gap between tokens, p99", "ms", log=True),
        ],
        "users at a time",
    ),
    "goodput": (goodput, [_good("chat", 50), _good("chat", 25), _good("documents", 25)], "requests a second"),
    "classic": (
        classic,
        [
            Panel("link", "Decode's links", "% of line rate"),
            Panel("slots", "Slots held", "%"),
            Panel("prefill", "Waiting for prefill", "requests"),
            Panel("handoff", "Prefilled and not begun", "requests"),
        ],
        "seconds; a burst from 0 to 200",
    ),
}


def draw(name: str, figures: dict[str, Lines], folder: Path) -> None:
    """Draws one picture."""
    _, panels, x = PICTURES[name]
    pyplot = load()
    pyplot.rcParams["svg.fonttype"] = "none"
    columns = 2 if len(panels) in (2, 4) else 3
    rows = -(-len(panels) // columns)
    size = (3.7 * columns, 2.5 * rows + 0.6)
    page, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    # A line looks the same in every panel, and a mode in every picture.
    names = list(dict.fromkeys([*MODES, *(line for key, *_ in panels for line in figures[key])]))
    if not set(MODES) & set(figures[panels[0][0]]):
        names = names[len(MODES) :]
    for axis, (key, title, y, log) in zip(axes.flat, panels, strict=True):
        for line, points in figures[key].items():
            # Over time a mark at every sample would be a band.
            look = style(names.index(line)) | ({"marker": ""} if len(points) > 30 else {})
            axis.plot(*zip(*points, strict=True), label=line, **look)
        if log:
            plain_log(axis)
        else:
            axis.set_ylim(bottom=0)
        if name == "ratios":
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter("{x:g}")
        if name == "slots":
            axis.set_xticks([8, 12, 16, 20, 24])
        axis.grid(True, color="#dddddd", linewidth=0.6)
        axis.set_title(title, fontsize=9)
        axis.set_ylabel(y)
        axis.set_xlabel(x)
    longest = max((axis.get_legend_handles_labels() for axis in axes.flat), key=lambda found: len(found[1]))
    page.legend(*longest, loc="outside lower center", ncols=5)
    folder.mkdir(parents=True, exist_ok=True)
    save(page, folder / f"{name}.svg")
    pyplot.close(page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws, or checks."""
    parser = argparse.ArgumentParser(description="Draws the pictures of docs/when-to-split.md.")
    parser.add_argument("--check", action="store_true", help="draw nothing; fail if a figure has changed")
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the pictures")
    options = parser.parse_args(arguments)
    file = options.out / "figures.json"
    figures = {name: picture[0]() for name, picture in PICTURES.items()}
    if options.check:
        committed = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        changed = [name for name in PICTURES if committed.get(name) != figures[name]]
        for name in changed:
            print(
                f"{options.out / name}.svg is not what is simulated now: run scripts/draw_split.py",
                file=sys.stderr,
            )
        return 1 if changed else 0
    for name, lines in figures.items():
        draw(name, lines, options.out)
    file.write_text(dumped(figures), encoding="utf-8")
    return 0


def dumped(figures: dict[str, dict[str, Lines]]) -> str:
    """JSON with a line of text for each line that is drawn, so that a change shows where it is."""
    parts = []
    for name, panels in figures.items():
        inner = []
        for key, lines in panels.items():
            drawn = ",\n".join(
                f"   {json.dumps(line)}: {json.dumps(points)}" for line, points in lines.items()
            )
            inner.append(f"  {json.dumps(key)}: {{\n{drawn}\n  }}")
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }")
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
