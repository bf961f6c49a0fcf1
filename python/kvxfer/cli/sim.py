"""`kvxfer sim`: clusters side by side, in virtual time."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kvxfer.cli._errors import CommandError
from kvxfer.cli._sim_costs import costs_of
from kvxfer.cli._text import Counter, aligned, print_json, prose, quantity, table
from kvxfer.simulate import (
    MODES,
    Costs,
    Crash,
    Result,
    Setup,
    Shape,
    Traffic,
    bursts,
    poisson,
    read_trace,
    simulate,
    users,
)
from kvxfer.simulate.plot import PlotError, Point, draw, load
from kvxfer.simulate.report import LEGEND, costs_rows, notes, sections

__all__ = ["run"]

_WRONG_ARGUMENTS = 2
_OWN = ("admission", "loop", "thread")


class _Load(NamedTuple):
    """Traffic at a place of the x axis, in a group."""

    x: float
    group: str
    traffic: Traffic


def _setup(options: argparse.Namespace, text: str) -> Setup:
    name, *own = text.strip().split("+")
    unknown = [one for one in own if one not in _OWN]
    if name not in MODES or unknown:
        raise ValueError(
            f"--compare {text}: modes are {', '.join(MODES)}, each with + and any of {', '.join(_OWN)}; "
            f"for example "
            "push+admission"
        )
    mode = MODES[name]
    posting: Literal["loop", "thread"] | None = options.posting
    if "loop" in own or "thread" in own:
        posting = "loop" if "loop" in own else "thread"
    return Setup(
        mode,
        prefill=options.prefill,
        decode=options.decode,
        tp=options.tp,
        slots=options.slots,
        chunk=options.chunk if mode.split else options.unified_chunk or options.chunk,
        page_tokens=options.page_tokens,
        admission=options.admission or "admission" in own,
        route=options.route,
        posting=posting,
        failure_rate=options.failures,
        mtbf_s=options.mtbf_s or 0.0,
        repair_s=options.repair_s,
        crashes=_crashes(options),
        crash_seed=options.seed,
        on_failure=options.on_failure,
        offload=options.offload,
        prefix_cache=not options.no_prefix_cache,
        slo_ttft_ms=options.slo_ttft_ms,
        slo_tpot_ms=options.slo_tpot_ms,
    )


def _crashes(options: argparse.Namespace) -> tuple[Crash, ...]:
    found = []
    for kind, number, at_s, repair_s in options.crash:
        there = options.prefill if kind == "prefill" else options.decode
        if not 0 <= number < there:
            raise ValueError(
                f"--crash: there is no {kind}-{number}; there are {kind}-0 to {kind}-{there - 1}"
            )
        place = number if kind == "prefill" else options.prefill + number
        found.append(Crash(at_s, place, options.repair_s if repair_s is None else repair_s))
    return tuple(found)


def _loads(options: argparse.Namespace) -> Iterator[_Load]:
    if options.trace is not None:
        for speed in options.speed:
            traffic = read_trace(options.trace, requests=options.requests, speed=speed, seed=options.seed)
            yield _Load(speed, Path(options.trace).name, traffic)
        return
    for prompt in options.prompt:
        requests = options.requests or 200
        shape: Shape = {
            "prompt": prompt,
            "answer": options.answer,
            "spread": options.spread,
            "answer_spread": options.answer_spread,
            "shared_prefix": options.shared_prefix,
            "prefixes": options.prefixes,
        }
        drawn: Any = {"requests": requests, "seed": options.seed, **shape}
        group = f"prompts of {prompt:,} tokens"
        if options.users is not None:
            yield from (_Load(count, group, users(users=count, **drawn)) for count in options.users)
        elif options.burst_factor is not None:
            burst = {
                "factor": options.burst_factor,
                "burst_s": options.burst_s,
                "every_s": options.burst_every_s,
            }
            yield from (_Load(qps, group, bursts(qps=qps, **drawn, **burst)) for qps in options.qps)
        else:
            yield from (_Load(qps, group, poisson(qps=qps, **drawn)) for qps in options.qps)


def _axis(options: argparse.Namespace) -> tuple[str, str]:
    """What the x axis says, and the head of its column."""
    if options.trace is not None:
        return "times as fast as the trace", "x speed"
    if options.users is not None:
        return "requests under way", "users"
    return "requests a second", "req/s"


def _check(options: argparse.Namespace) -> None:
    if options.trace is not None and (options.users is not None or options.burst_factor is not None):
        raise ValueError("--trace has its own arrivals: leave out --users and --burst-factor")
    if options.users is not None and options.burst_factor is not None:
        raise ValueError("--users and --burst-factor are two kinds of arrivals: give one")
    if options.trace is not None and options.shared_prefix:
        raise ValueError("--trace has its own prompts: leave out --shared-prefix")
    if options.plot is not None:
        load()


def _simulate(options: argparse.Namespace, costs: Costs) -> list[tuple[str, _Load, Result]]:
    setups = [(text.strip(), _setup(options, text)) for text in options.compare]
    loads = list(_loads(options))
    counter = Counter(quiet=options.json)
    found = []
    for number, (one, (name, setup)) in enumerate(itertools.product(loads, setups), 1):
        found.append((name, one, simulate(setup, one.traffic, costs)))
        counter.show(number, len(loads) * len(setups))
    counter.end()
    return found


def _about(options: argparse.Namespace) -> str:
    kinds = {_setup(options, text).mode.split for text in options.compare}
    servers = []
    if True in kinds:
        servers.append(f"{quantity(options.prefill, 'prefill server')} and {options.decode} for decode")
    if False in kinds:
        servers.append(quantity(options.prefill + options.decode, "plain server"))
    return (
        f"{', or '.join(servers)}, of {quantity(options.tp, 'GPU')} each with {options.slots} slots; "
        f"SLOs: first token within {options.slo_ttft_ms:g} ms, {options.slo_tpot_ms:g} ms a token"
    )


def _length(found: list[tuple[str, _Load, Result]]) -> str:
    traffic = found[0][1].traffic
    mean = float(np.mean(traffic.answers))
    return f"{quantity(len(traffic), 'request')} each, answers of {mean:,.0f} tokens on average"


def _show(options: argparse.Namespace, found: list[tuple[str, _Load, Result]]) -> None:
    head = _axis(options)[1]
    print(prose(f"Simulated: {_about(options)}. Seed {options.seed}."))
    for group in dict.fromkeys(one.group for _, one, _ in found):
        own = [(name, one, result) for name, one, result in found if one.group == group]
        print(
            f"\n== {group}: {len(own[0][1].traffic):,} requests, answers of "
            f"{float(np.mean(own[0][1].traffic.answers)):,.0f} tokens on average"
        )
        names = [(f"{one.x:g}", name) for name, one, _ in own]
        for title, rows in sections(names, [result for _, _, result in own], (head, "mode")):
            print(f"\n{title}:\n{aligned(rows, 2)}")
    print("\n" + prose(LEGEND))
    said = [
        note
        for name, one, result in found
        for note in notes(f"{name} at {one.x:g} {head}, {one.group}", result)
    ]
    if said:
        print()
        for note in said:
            print(prose(note + "."))


def _json(
    options: argparse.Namespace, costs: Costs, sources: dict[str, str], found: list[tuple[str, _Load, Result]]
) -> None:
    results = []
    for name, one, result in found:
        results.append({"name": name, "group": one.group, "x": one.x, **result.as_json()})
        results[-1]["samples"] = [asdict(sample) for sample in result.samples]
    print_json(
        {
            "x_axis": _axis(options)[0],
            "seed": options.seed,
            "costs": costs.described(sources),
            "results": results,
        }
    )


def run(options: argparse.Namespace) -> int:
    """The command."""
    try:
        costs, sources = costs_of(options)
        if options.costs:
            if options.json:
                print_json({"costs": costs.described(sources)})
            else:
                print(table(costs_rows(costs, sources)))
            return 0
        _check(options)
        found = _simulate(options, costs)
        if options.plot is not None:
            points = [Point(one.x, name, one.group, result) for name, one, result in found]
            draw(points, options.plot, x=_axis(options)[0], title=f"{_about(options)}. {_length(found)}")
    except ValueError as error:
        raise CommandError(str(error), _WRONG_ARGUMENTS) from error
    except PlotError as error:
        raise CommandError(str(error)) from error
    except OSError as error:
        raise CommandError(f"{error.filename}: {error.strerror}") from error
    if options.json:
        _json(options, costs, sources, found)
    else:
        _show(options, found)
    return 0
