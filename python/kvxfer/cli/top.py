"""`kvxfer top`: agents live in a terminal, from the metrics that they serve."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, quantity
from kvxfer.cli._top_data import Fleet

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["run"]

_NOTHING = "-"
# Lines about failures under the tables.
_MOST_FAILURES = 12


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}"


def _time(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    if seconds == float("inf"):
        return ">300 s"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:g} ms" if seconds < 1 else f"{seconds:g} s"


def _endpoint(text: str) -> str:
    """`host:9464` is `http://host:9464/metrics`."""
    url = text if "://" in text else f"http://{text}"
    return url if url.count("/") > 2 else f"{url}/metrics"


def _style(d: dict[str, Any]) -> str:
    """What an agent's lines look like: red if something is wrong now, yellow if its slots are too full."""
    if d["failed_now"] or (d["pages_quarantined"] or 0) + (d["slots_quarantined"] or 0):
        return "bold red"
    if d["slots"] and d["slots_held"] is not None and d["slots_held"] / d["slots"] > 0.8:
        return "yellow"
    return ""


def _room_rows(d: dict[str, Any]) -> list[list[str]]:
    """A line for each side that has rooms now; one at the least, and none for what only a proxy tells of."""
    if d["succeeded"] is None:
        return []
    sides = [side for side, states in d["rooms"].items() if any(states.values())]
    well = _number(d["succeeded"]) if d["succeeded_per_s"] is None else f"{d['succeeded_per_s']:.1f}/s"
    own = [d["agent"], well, _number(d["failed"]), _number(d["events_unpolled"])]
    if not sides:
        return [[own[0], _NOTHING, *["0"] * 4, *own[1:]]]
    rows: list[list[str]] = []
    for side in sides:
        name, *rest = own if not rows else [""] * len(own)
        rows.append([name, side, *(_number(count) for count in d["rooms"][side].values()), *rest])
    return rows


def _load_rows(d: dict[str, Any]) -> list[list[str]]:
    slots = _NOTHING
    if d["slots"] and d["slots_held"] is not None:
        slots = f"{d['slots_held']:.0f}/{d['slots']:.0f}"
    busy = d["link_busy_fraction"]
    row = [
        d["agent"],
        _NOTHING if d["gbytes_per_s"] is None else f"{d['gbytes_per_s']:.2f}",
        _NOTHING if busy is None else f"{busy * 100:.0f} %",
        _pair(d["pages_granted"], "/", d["pages_registered"]),
        _pair(d["pages_quarantined"], "+", d["slots_quarantined"]),
        slots,
        _number(d["waiting_for_memory"]),
        _number(d["waiting_for_transfer"]),
    ]
    return [row]


def _pair(first: float | None, sign: str, second: float | None) -> str:
    return _NOTHING if first is None and second is None else f"{_number(first)}{sign}{_number(second)}"


def _stage_rows(d: dict[str, Any]) -> list[list[str]]:
    if d["succeeded"] is None:
        return []
    cells = [d["agent"]]
    for stage, p50_s in d["stage_p50_s"].items():
        cells += [_time(p50_s), _time(d["stage_p99_s"][stage])]
    return [cells]


# Each fits a terminal of 80 columns.
_TABLES: tuple[tuple[str, Callable[[dict[str, Any]], list[list[str]]], tuple[str, ...]], ...] = (
    (
        "rooms",
        _room_rows,
        ("\nside", "\nboot", "\nwait", "\nxfer", "\ndrain", "ended\nwell", "\nfailed", "not\npolled"),
    ),
    (
        "link and memory",
        _load_rows,
        (
            "\nGB/s",
            "link\nbusy",
            "pages\ngranted",
            "quaran-\ntine",
            "slots\nheld",
            "wait for\nmemory",
            "wait for\ntransfer",
        ),
    ),
    (
        "stages, up to",
        _stage_rows,
        tuple(f"{stage}\n{q}" for stage in ("boot", "wait", "xfer") for q in ("p50", "p99")),
    ),
)


def _screen(fleet: Fleet) -> Group:
    """The whole screen."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    found = [view.as_dict() for view in fleet.agents()]
    tables = []
    for title, rows, headings in _TABLES:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        table.add_column("agent", overflow="fold", max_width=20)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        for d in found:
            for row in rows(d):
                table.add_row(*row, style=_style(d))
        tables.append(table)
    total = sum(d["gbytes_per_s"] or 0.0 for d in found)
    agents = sum(d["succeeded"] is not None for d in found)
    foot = [f"{quantity(agents, 'agent')}, {total:.2f} GB/s in all"]
    failures = [
        f"{d['agent']} failed {count:,.0f} x {what}"
        for d in found
        for what, count in sorted(d["failures"].items())
    ]
    foot += failures[:_MOST_FAILURES]
    if len(failures) > _MOST_FAILURES:
        foot.append(f"and {len(failures) - _MOST_FAILURES} more kinds of failure (--json has them)")
    foot += [f"{url} does not answer: {why}" for url, why in fleet.silent().items()]
    return Group(*tables, Text("\n".join(foot)))


def _as_dict(fleet: Fleet) -> dict[str, Any]:
    agents = [view.as_dict() for view in fleet.agents()]
    return {
        "agents": agents,
        "gbytes_per_s": sum(a["gbytes_per_s"] or 0.0 for a in agents),
        "silent": fleet.silent(),
    }


def run(options: argparse.Namespace) -> int:
    """The command."""
    fleet = Fleet([_endpoint(text) for text in options.endpoints], options.timeout)
    fleet.look()
    once = options.once or options.json
    if once and not fleet.agents():
        why = "; ".join(f"{url}: {text}" for url, text in fleet.silent().items())
        raise CommandError(
            f"no agent answers ({why}); serve metrics with kvxfer.prometheus.serve(agent, port=9464)"
        )
    if once:
        # Rates need two looks.
        time.sleep(options.interval)
        fleet.look()
    if options.json:
        print_json(_as_dict(fleet))
        return 0
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        raise CommandError(
            "kvxfer top needs rich; install it with: pip install 'kvxfer[prometheus,top]' (--json needs no "
            "rich)"
        ) from None
    console = Console()
    if once:
        console.print(_screen(fleet))
        return 0
    with Live(_screen(fleet), console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            time.sleep(options.interval)
            fleet.look()
            live.update(_screen(fleet), refresh=True)
