"""`kvxfer top`: agents live in a terminal, from the metrics that they serve."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING, Any

from kvxfer.cli._errors import CommandError
from kvxfer.cli._text import print_json, size
from kvxfer.cli._top_data import AgentView, Fleet

if TYPE_CHECKING:
    from rich.console import Group

__all__ = ["run"]

_NOTHING = "-"


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


def _rooms(states: dict[str, float | None]) -> str:
    """How many are in which stage, as one cell."""
    return " ".join(
        _number(states[state]) for state in ("bootstrapping", "waiting", "transferring", "draining")
    )


def _row(view: AgentView) -> tuple[list[str], str]:
    """An agent's cells, and the style of its line."""
    d = view.as_dict()
    slots = _NOTHING
    full = False
    if d["slots"] and d["slots_held"] is not None:
        full = d["slots_held"] / d["slots"] > 0.8
        slots = f"{d['slots_held']:.0f}/{d['slots']:.0f}"
    held_up = (d["pages_quarantined"] or 0) + (d["slots_quarantined"] or 0)
    busy = d["link_busy_fraction"]
    cells = [
        view.agent,
        _rooms(d["rooms"]["decode"]),
        _rooms(d["rooms"]["prefill"]),
        _number(d["succeeded"]) if d["succeeded_per_s"] is None else f"{d['succeeded_per_s']:.1f}/s",
        _number(d["failed"]),
        _NOTHING if d["gbytes_per_s"] is None else f"{d['gbytes_per_s']:.2f}",
        _NOTHING if busy is None else f"{busy * 100:.0f} %",
        " / ".join(_time(d["stage_p50_s"][stage]) for stage in d["stage_p50_s"]),
        " / ".join(_time(d["stage_p99_s"][stage]) for stage in d["stage_p99_s"]),
        f"{_number(d['pages_granted'])}/{_number(d['pages_registered'])}",
        _number(held_up),
        slots,
        _number(d["waiting_for_memory"]),
    ]
    bad = bool(held_up) or bool(d["failed_now"])
    return cells, "bold red" if bad else "yellow" if full else ""


def _screen(fleet: Fleet) -> Group:
    """The whole screen."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(title="kvxfer top", title_justify="left", expand=False, pad_edge=False)
    rooms = "boot wait xfer drain"
    for heading, right in (
        ("agent", False),
        (f"decode rooms\n{rooms}", True),
        (f"prefill rooms\n{rooms}", True),
        ("ended\nwell", True),
        ("failed", True),
        ("GB/s", True),
        ("link\nbusy", True),
        ("p50 of boot / wait / xfer", True),
        ("p99 of boot / wait / xfer", True),
        ("pages", True),
        ("quaran-\ntine", True),
        ("slots", True),
        ("wait for\nmemory", True),
    ):
        table.add_column(heading, justify="right" if right else "left", no_wrap=True)
    agents = fleet.agents()
    total = 0.0
    lines = []
    for view in agents:
        cells, style = _row(view)
        table.add_row(*cells, style=style)
        d = view.as_dict()
        total += d["gbytes_per_s"] or 0.0
        lines += [
            f"{view.agent} failed {count:,.0f} x {what}" for what, count in sorted(d["failures"].items())
        ]
    foot = [f"{len(agents)} agents, {total:.2f} GB/s ({size(total * 1e9)} a second) in all"]
    foot += lines[:12]
    if len(lines) > 12:
        foot.append(f"and {len(lines) - 12} more kinds of failure (--json has them)")
    foot += [f"{url} does not answer: {why}" for url, why in fleet.silent().items()]
    return Group(table, Text("\n".join(foot)))


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
