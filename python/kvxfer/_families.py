"""What is measured of an agent: names, kinds and meanings, and where each number comes from.

`kvxfer.prometheus` exposes it and `kvxfer top` reads it back. Names follow Prometheus' rules: base units,
`_total` for counters, no unit in a label. No label has more values than are listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, NamedTuple

__all__ = ["FAMILIES", "Family", "Histogram", "Load", "Snapshot"]


@dataclass(frozen=True)
class Load:
    """What the engine (or admission) knows and the agent does not; None for what it does not know either."""

    slots: int | None = None
    """Requests that it runs at a time, at most."""
    slots_held: int | None = None
    """Requests that it runs now."""
    waiting_for_memory: int | None = None
    """Requests that wait for KV pages or a slot, and not for a transfer."""


class Histogram(NamedTuple):
    """Upper bounds with how many were up to each, and the sum."""

    buckets: tuple[tuple[str, float], ...]
    """Cumulative, the last one `+Inf`."""
    total: float


@dataclass(frozen=True)
class Snapshot:
    """One look at an agent."""

    info: Mapping[str, str]
    stats: Mapping[str, int]
    metrics: Mapping[str, Any]
    pages: tuple[int, ...] = ()
    load: Load = Load()


Value = float | Histogram
Samples = Iterable[tuple[tuple[str, ...], Value]]


class Family(NamedTuple):
    """One metric."""

    name: str
    """Without `_total`."""
    kind: Literal["counter", "gauge", "histogram", "info"]
    help: str
    labels: tuple[str, ...]
    samples: Callable[[Snapshot], Samples]

    @property
    def exposed(self) -> tuple[str, ...]:
        """The names under which Prometheus has it."""
        if self.kind == "counter":
            return (f"{self.name}_total",)
        if self.kind == "histogram":
            return (f"{self.name}_bucket", f"{self.name}_count", f"{self.name}_sum")
        return (f"{self.name}_info",) if self.kind == "info" else (self.name,)


def _histogram(of: Mapping[str, Any]) -> Histogram:
    bounds = [f"{bound:g}" for bound in of["bounds_s"]] + ["+Inf"]
    return Histogram(tuple(zip(bounds, accumulate(of["counts"]), strict=True)), of["sum_s"])


def _stat(key: str, per: float = 1) -> Callable[[Snapshot], Samples]:
    return lambda s: [((), s.stats[key] / per if per != 1 else s.stats[key])]


def _by(**keys: str) -> Callable[[Snapshot], Samples]:
    """Values of one label, each from a key of `stats`."""
    return lambda s: [((value,), s.stats[key]) for value, key in keys.items()]


def _failed(s: Snapshot) -> Iterator[tuple[tuple[str, ...], Value]]:
    for stage, reasons in s.metrics["failed"].items():
        for reason, count in reasons.items():
            yield (stage, reason), count


def _rooms(s: Snapshot) -> Iterator[tuple[tuple[str, ...], Value]]:
    for side, states in s.metrics["rooms"].items():
        for state, count in states.items():
            yield (side, state), count


def _deliveries(s: Snapshot) -> Samples:
    stats = s.stats
    return [
        (("packed",), stats["packed_deliveries"]),
        (("direct",), stats["direct_deliveries"]),
        (("packed_then_direct",), stats["packed_fallbacks"]),
    ]


def _waiting(s: Snapshot) -> Iterator[tuple[tuple[str, ...], Value]]:
    rooms = s.metrics["rooms"]["decode"]
    yield ("transfer",), rooms["bootstrapping"] + rooms["waiting"] + rooms["transferring"]
    if s.load.waiting_for_memory is not None:
        yield ("memory",), s.load.waiting_for_memory


def _load(key: str) -> Callable[[Snapshot], Samples]:
    return lambda s: [] if getattr(s.load, key) is None else [((), getattr(s.load, key))]


FAMILIES: tuple[Family, ...] = (
    Family(
        "kvxfer_agent",
        "info",
        "What this agent is.",
        ("version", "fabrics"),
        lambda s: [((s.info["version"], s.info["fabrics"]), 1)],
    ),
    # Rooms.
    Family("kvxfer_rooms_succeeded", "counter", "Rooms that ended well.", (), _stat("succeeded")),
    Family(
        "kvxfer_rooms_failed",
        "counter",
        "Rooms that failed, by the stage they were in and the reason.",
        ("stage", "reason"),
        _failed,
    ),
    Family(
        "kvxfer_rooms",
        "gauge",
        "Rooms now, by side (decode expects, prefill pushes) and state; draining ones have failed and hold "
        "pages.",
        ("side", "state"),
        _rooms,
    ),
    Family(
        "kvxfer_room_stage_seconds",
        "histogram",
        "How long rooms that ended well were in each stage.",
        ("stage",),
        lambda s: [((stage,), _histogram(of)) for stage, of in s.metrics["stages"].items()],
    ),
    Family(
        "kvxfer_drain_seconds",
        "histogram",
        "From a room's failure until its pages were free.",
        (),
        lambda s: [((), _histogram(s.metrics["drains"]))],
    ),
    Family(
        "kvxfer_requests_waiting",
        "gauge",
        "Requests that wait: for a transfer (rooms expected here and not over), for memory (slots or pages, "
        "as the engine or the proxy says), or in the proxy for prefill.",
        ("cause",),
        _waiting,
    ),
    Family("kvxfer_slots", "gauge", "Requests that the engine runs at a time, at most.", (), _load("slots")),
    Family(
        "kvxfer_slots_held",
        "gauge",
        "Requests that the engine runs now, or that have a slot there.",
        (),
        _load("slots_held"),
    ),
    # Bytes and the link.
    Family("kvxfer_moved_bytes", "counter", "Bytes that this agent moved.", (), _stat("moved_bytes")),
    Family("kvxfer_writes", "counter", "Writes or copies that it made.", (), _stat("writes")),
    Family("kvxfer_slices", "counter", "Slices of data work.", (), _stat("slices")),
    Family("kvxfer_data_syscalls", "counter", "System calls for data.", (), _stat("data_syscalls")),
    Family(
        "kvxfer_link_busy_seconds",
        "counter",
        "Time with anything of this agent in flight; what overlaps counts once.",
        (),
        _stat("link_busy_us", 1e6),
    ),
    Family(
        "kvxfer_link_bytes_per_second",
        "gauge",
        "Bytes a second that this agent moved, all its transfers together, over the last second or so.",
        (),
        _stat("link_bytes_per_s"),
    ),
    Family(
        "kvxfer_link_busy_ratio",
        "gauge",
        "Part of the last second or so with anything of this agent in flight.",
        (),
        _stat("link_busy_ppm", 1e6),
    ),
    Family(
        "kvxfer_deliveries",
        "counter",
        "Deliveries that could go packed or direct, by what was chosen; and of the packed ones, those that "
        "got no slot.",
        ("way",),
        _deliveries,
    ),
    Family(
        "kvxfer_staged_bytes",
        "counter",
        "Bytes packed into peers' staging slots, and unpacked from its own.",
        ("step",),
        _by(packed="packed_bytes", unpacked="unpacked_bytes"),
    ),
    Family("kvxfer_summed_bytes", "counter", "Bytes summed for checksums.", (), _stat("summed_bytes")),
    # Pages.
    Family(
        "kvxfer_pages",
        "gauge",
        "Pages: registered in all groups; granted to rooms here; of those, in quarantine.",
        ("state",),
        lambda s: [
            (("registered",), sum(s.pages)),
            (("granted",), s.stats["granted_pages"]),
            (("quarantined",), s.stats["quarantined_pages"]),
        ],
    ),
    Family(
        "kvxfer_staging_slots",
        "gauge",
        "Slots of this agent's staging ring that are not free; of those, in quarantine.",
        ("state",),
        _by(taken="staging_slots", quarantined="quarantined_slots"),
    ),
    # Peers and the control channel.
    Family("kvxfer_peers", "gauge", "Peers known.", (), _stat("peers")),
    Family("kvxfer_connections", "gauge", "Control connections open.", (), _stat("connections")),
    Family("kvxfer_sessions", "counter", "Sessions that came up.", (), _stat("sessions")),
    Family("kvxfer_fences", "counter", "Fences begun: peers that were given up.", (), _stat("fences")),
    Family(
        "kvxfer_stale_refused",
        "counter",
        "Messages refused because a cancel or a newer session had voided what they named.",
        (),
        _stat("stale_refused"),
    ),
    Family(
        "kvxfer_protocol_errors", "counter", "Messages that broke the protocol.", (), _stat("protocol_errors")
    ),
    Family("kvxfer_limited", "counter", "Grants and sessions refused at a limit.", (), _stat("limited")),
    Family(
        "kvxfer_connections_dropped",
        "counter",
        "Connections refused or dropped: for what came on them (bad), of those past a limit or too slow; "
        "and for want of "
        "the right secret or certificate (auth).",
        ("cause",),
        _by(
            bad="bad_connections",
            limited="limited_connections",
            slow="slow_connections",
            auth="auth_failures",
        ),
    ),
    Family(
        "kvxfer_frames",
        "counter",
        "Control frames.",
        ("direction",),
        _by(sent="frames_sent", received="frames_received"),
    ),
    # The caller and the thread.
    Family(
        "kvxfer_calls",
        "counter",
        "Calls of expect, push and poll.",
        ("call",),
        lambda s: [((call,), of["calls"]) for call, of in s.metrics["calls"].items()],
    ),
    Family(
        "kvxfer_call_seconds",
        "histogram",
        "What a call cost whoever made it; one call in 16 is timed.",
        ("call",),
        lambda s: [((call,), _histogram(of)) for call, of in s.metrics["calls"].items()],
    ),
    Family(
        "kvxfer_queue_depth", "gauge", "Orders that wait for the transfer thread.", (), _stat("queue_depth")
    ),
    Family("kvxfer_events_unpolled", "gauge", "Events that nobody has polled.", (), _stat("queued_events")),
    Family("kvxfer_thread_sleeps", "counter", "Times that the transfer thread slept.", (), _stat("sleeps")),
    Family("kvxfer_deliveries_active", "gauge", "Deliveries under way.", (), _stat("deliveries")),
    Family(
        "kvxfer_unacknowledged_messages",
        "gauge",
        "Control messages that wait to be sent or acknowledged.",
        (),
        _stat("unacknowledged"),
    ),
    Family(
        "kvxfer_table_entries",
        "gauge",
        "Entries of tables that must not grow: rooms that calls can name, remembered ended rooms, timers, "
        "and the "
        "transfer thread's own.",
        ("table",),
        _by(known_rooms="known_rooms", tombstones="tombstones", timers="timers", thread="driver_entries"),
    ),
)
"""Every metric there is."""
