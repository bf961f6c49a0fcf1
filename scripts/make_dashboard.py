"""Writes monitoring/kvxfer-dashboard.json, the Grafana dashboard, from the panels listed here.

make_dashboard.py [--check]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

OUT = Path(__file__).resolve().parent.parent / "monitoring" / "kvxfer-dashboard.json"

# Chosen at the top of the dashboard.
SELECT = '{job=~"$job", instance=~"$instance", agent=~"$agent"}'
# The proxy's own series have `server`, and no agent.
SELECT_PROXY = '{job=~"$job", instance=~"$instance"}'
# Processes with agents, and the proxy.
ANY = '__name__=~"kvxfer_agent_info|kvxfer_slots"'
WIDTH, HEIGHT = 8, 7


class Panel(NamedTuple):
    """A graph: what it asks, what the lines are called, and in which unit they are."""

    title: str
    about: str
    unit: str
    lines: tuple[tuple[str, str], ...]


def pick(name: str, more: str = "") -> str:
    """The series of a metric that the dashboard's selectors leave, `more` being further ones."""
    select = SELECT_PROXY if name.startswith("kvxfer_proxy_") else SELECT
    return name + (select if not more else f"{select[:-1]}, {more}}}")


def rate(name: str, by: str = "agent", more: str = "") -> str:
    """A second's worth of a counter."""
    return f"sum by ({by}) (rate({pick(name, more)}[$__rate_interval]))"


def quantile(q: float, name: str, by: str) -> str:
    """A quantile of a histogram."""
    return f"histogram_quantile({q}, sum by (le, {by}) (rate({pick(f'{name}_bucket')}[$__rate_interval])))"


def now(name: str, by: str = "agent", more: str = "") -> str:
    """A gauge."""
    return f"sum by ({by}) ({pick(name, more)})"


def pages(state: str) -> str:
    """Pages in a state."""
    return now("kvxfer_pages", more=f'state="{state}"')


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "What users feel",
        (
            Panel(
                "Slots held",
                "Keep it under 80 %. Above that a queue forms whatever hands off the KV.",
                "percentunit",
                (
                    (f"{now('kvxfer_slots_held')} / {now('kvxfer_slots')}", "{{agent}}"),
                    ("vector(0.8)", "limit"),
                ),
            ),
            Panel(
                "Requests that wait",
                "For memory (no slot or page: out of slots whatever the hand-off) apart from those that "
                "wait for a "
                "transfer.",
                "short",
                ((now("kvxfer_requests_waiting", "agent, cause"), "{{agent}} {{cause}}"),),
            ),
            Panel(
                "Stages, p50 and p99",
                "Bootstrapping is the first contact, waiting is prefill's queue and work, transferring the "
                "bytes.",
                "s",
                (
                    (quantile(0.5, "kvxfer_room_stage_seconds", "stage"), "p50 {{stage}}"),
                    (quantile(0.99, "kvxfer_room_stage_seconds", "stage"), "p99 {{stage}}"),
                ),
            ),
        ),
    ),
    (
        "Proxy",
        (
            Panel(
                "First token, p50 of its parts and p99 in all",
                "The wait for admission, prefill with its queue, and what then comes: the hand-off and the "
                "wait for a slot.",
                "s",
                (
                    (quantile(0.5, "kvxfer_proxy_first_token_part_seconds", "part"), "p50 {{part}}"),
                    (quantile(0.99, "kvxfer_proxy_first_token_seconds", "job"), "p99 in all"),
                ),
            ),
            Panel(
                "KV pages reserved",
                "For prompts and answers, of all that decode has. Refusals for decode_pages begin near 95 %.",
                "percentunit",
                (
                    (
                        f"{now('kvxfer_proxy_pages_reserved', 'server')} / "
                        f"{now('kvxfer_proxy_pages', 'server')}",
                        "{{server}}",
                    ),
                ),
            ),
            Panel(
                "Turned away and given up",
                "A second: refusals by what was lacking (429 or 503), and aborts by who gave up.",
                "ops",
                (
                    (
                        f"{rate('kvxfer_proxy_refused_total', 'reason')} or vector(0)",
                        "refused: {{reason}}",
                    ),
                    (rate("kvxfer_proxy_aborts_total", "by"), "given up by {{by}}"),
                ),
            ),
        ),
    ),
    (
        "Rooms",
        (
            Panel(
                "Rooms by state",
                "Now; draining ones have failed and still hold pages.",
                "short",
                ((now("kvxfer_rooms", "side, state"), "{{side}} {{state}}"),),
            ),
            Panel(
                "Rooms that ended well",
                "A second.",
                "ops",
                ((rate("kvxfer_rooms_succeeded_total"), "{{agent}}"),),
            ),
            Panel(
                "Rooms that failed",
                "A second, by the stage they were in and the reason.",
                "ops",
                ((f"{rate('kvxfer_rooms_failed_total', 'stage, reason')} > 0", "{{stage}}: {{reason}}"),),
            ),
        ),
    ),
    (
        "Link",
        (
            Panel(
                "Bytes moved",
                "A second, all transfers of an agent together.",
                "Bps",
                ((rate("kvxfer_moved_bytes_total"), "{{agent}}"),),
            ),
            Panel(
                "Link busy",
                "Part of the time with anything in flight; what overlaps counts once.",
                "percentunit",
                (
                    (rate("kvxfer_link_busy_seconds_total"), "{{agent}}"),
                    (now("kvxfer_link_busy_ratio"), "{{agent}}, now"),
                ),
            ),
            Panel(
                "Bytes a second while busy",
                "What the link gives when it is used: falls when a link is slow, not when there is little "
                "to do.",
                "Bps",
                (
                    (
                        f"{rate('kvxfer_moved_bytes_total')} / {rate('kvxfer_link_busy_seconds_total')}",
                        "{{agent}}",
                    ),
                ),
            ),
        ),
    ),
    (
        "Memory",
        (
            Panel(
                "Pages",
                "Granted to rooms, of all that are registered.",
                "percentunit",
                ((f"{pages('granted')} / {pages('registered')}", "{{agent}}"),),
            ),
            Panel(
                "Quarantine",
                "Pages and staging slots that a peer which does not answer may still write. Not empty: "
                "look at once.",
                "short",
                (
                    (pages("quarantined"), "{{agent}} pages"),
                    (now("kvxfer_staging_slots", more='state="quarantined"'), "{{agent}} slots"),
                ),
            ),
            Panel(
                "Drains, p50 and p99",
                "From a room's failure until its pages were free.",
                "s",
                (
                    (quantile(0.5, "kvxfer_drain_seconds", "agent"), "p50 {{agent}}"),
                    (quantile(0.99, "kvxfer_drain_seconds", "agent"), "p99 {{agent}}"),
                ),
            ),
        ),
    ),
    (
        "The engine's loop",
        (
            Panel(
                "What a call costs the loop, p99",
                "Of one call in 16.",
                "s",
                ((quantile(0.99, "kvxfer_call_seconds", "call"), "{{call}}"),),
            ),
            Panel(
                "Orders that wait, events that nobody polled",
                "",
                "short",
                (
                    (now("kvxfer_queue_depth"), "{{agent}} orders"),
                    (now("kvxfer_events_unpolled"), "{{agent}} events"),
                ),
            ),
            Panel(
                "Calls",
                "A second.",
                "ops",
                ((rate("kvxfer_calls_total", "call"), "{{call}}"),),
            ),
        ),
    ),
    (
        "Peers",
        (
            Panel(
                "Peers and connections",
                "",
                "short",
                (
                    (now("kvxfer_peers"), "{{agent}} peers"),
                    (now("kvxfer_connections"), "{{agent}} connections"),
                ),
            ),
            Panel(
                "Refused and given up",
                "A second: stale messages, fences, broken protocol, limits.",
                "ops",
                (
                    (rate("kvxfer_stale_refused_total"), "{{agent}} stale"),
                    (rate("kvxfer_fences_total"), "{{agent}} fences"),
                    (rate("kvxfer_protocol_errors_total"), "{{agent}} protocol errors"),
                    (rate("kvxfer_limited_total"), "{{agent}} limited"),
                ),
            ),
            Panel(
                "Connections dropped",
                "A second, by cause.",
                "ops",
                ((rate("kvxfer_connections_dropped_total", "cause"), "{{cause}}"),),
            ),
        ),
    ),
)


def _variable(name: str, query: str, label: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${datasource}"},
        "definition": query,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expr, "legendFormat": legend, "datasource": source}
            for i, (expr, legend) in enumerate(panel.lines)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The dashboard, in Grafana's own form."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        grid = {"x": 0, "y": y, "w": 24, "h": 1}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "collapsed": False,
                "gridPos": grid,
                "panels": [],
            }
        )
        y += 1
        for i, panel in enumerate(row):
            panels.append(_panel(len(panels) + 1, panel, i * WIDTH, y))
        y += HEIGHT
    return {
        "title": "kvxfer",
        "uid": "kvxfer",
        "description": "KV hand-offs between prefill and decode. Each panel is explained in docs/operate.md.",
        "tags": ["kvxfer", "llm"],
        "schemaVersion": 38,
        "version": 1,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "templating": {
            "list": [
                {
                    "name": "datasource",
                    "label": "Data source",
                    "type": "datasource",
                    "query": "prometheus",
                    "current": {},
                },
                _variable("job", f"label_values({{{ANY}}}, job)", "Job"),
                _variable("instance", f'label_values({{{ANY}, job=~"$job"}}, instance)', "Instance"),
                _variable(
                    "agent",
                    f'label_values({{{ANY}, job=~"$job", instance=~"$instance"}}, agent)',
                    "Agent",
                ),
            ]
        },
        "annotations": {"list": []},
        "links": [],
        "panels": panels,
    }


def main() -> int:
    """Writes the file, or says whether it is what this script writes."""
    parser = argparse.ArgumentParser(description="Writes monitoring/kvxfer-dashboard.json.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file would change")
    args = parser.parse_args()
    text = json.dumps(dashboard(), indent=2) + "\n"
    if args.check:
        same = OUT.is_file() and OUT.read_text(encoding="utf-8") == text
        print(f"{OUT.name}: {'as it should be' if same else 'run scripts/make_dashboard.py'}")
        return 0 if same else 1
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
