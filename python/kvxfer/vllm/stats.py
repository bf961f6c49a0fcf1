"""What hand-offs cost and how they went, for vLLM's log line and its Prometheus endpoint.

One step's numbers are a plain dict of lists and counts, so that vLLM can send them from process to process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvxfer._kvxfer import Event

__all__ = ["COUNTERS", "GAUGES", "HOOK_METRIC", "SERIES", "StepStats", "is_empty", "merge", "reduce"]

# Name in the data, name of the metric, and what it says.
COUNTERS = {
    "rooms_out": ("kvxfer_rooms_sent", "Prompts whose KV cache was handed to another engine, by rank."),
    "rooms_in": ("kvxfer_rooms_received", "Prompts whose KV cache came from another engine, by rank."),
    "failed_out": ("kvxfer_rooms_sent_failed", "Hand-offs to another engine that failed or were cancelled."),
    "failed_in": (
        "kvxfer_rooms_received_failed",
        "Hand-offs from another engine that failed or were cancelled.",
    ),
    "bytes_out": (
        "kvxfer_sent_bytes",
        "Bytes of KV cache written to other engines; none where they read them, as over shared memory.",
    ),
    "bytes_in": ("kvxfer_received_bytes", "Bytes of KV cache that came from other engines."),
    "missing_rooms": ("kvxfer_missing_rooms", "Requests that came without a room, not through the proxy."),
    "refused": ("kvxfer_refused_requests", "Requests that could not be served in this server's role."),
}
# What is so now; in the data is how it has changed.
GAUGES = {
    "quarantined": (
        "kvxfer_quarantined_pages",
        "Pages of all ranks that a peer which does not answer may still touch.",
    ),
}
SERIES = {
    "wait_s": ("kvxfer_wait_seconds", "From the grant until prefill had its first layer ready."),
    "transfer_s": ("kvxfer_transfer_seconds", "From a hand-off's first layer to its last byte."),
}
HOOK_METRIC = (
    "kvxfer_hook_seconds",
    "Time that the connector takes from the engine's loop in a step, by hook.",
)


@dataclass
class StepStats:
    """What one rank has seen since it was last asked."""

    rooms_out: int = 0
    rooms_in: int = 0
    failed_out: int = 0
    failed_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    missing_rooms: int = 0
    refused: int = 0
    quarantined: int = 0
    wait_s: list[float] = field(default_factory=list)
    transfer_s: list[float] = field(default_factory=list)
    hooks: dict[str, list[float]] = field(default_factory=dict)

    def out(self, event: Event) -> None:
        """A hand-off to another engine has ended well."""
        self.rooms_out += 1
        self.bytes_out += event.stats.bytes

    def into(self, event: Event) -> None:
        """A hand-off from another engine has ended well."""
        self.rooms_in += 1
        self.bytes_in += event.stats.bytes
        self.wait_s.append((event.stats.bootstrap_us + event.stats.waiting_us) / 1e6)
        self.transfer_s.append(event.stats.transfer_us / 1e6)

    def hook(self, name: str, seconds: float) -> None:
        """One step's time inside a hook."""
        self.hooks.setdefault(name, []).append(seconds)

    def take(self) -> dict[str, Any]:
        """The numbers as plain data, and none of them again."""
        data: dict[str, Any] = {
            name: getattr(self, name) for name in (*COUNTERS, *GAUGES) if getattr(self, name)
        }
        for name in SERIES:
            if values := getattr(self, name):
                data[name] = values
        if self.hooks:
            data["hooks"] = self.hooks
        self.__init__()  # type: ignore[misc]
        return data


def is_empty(data: dict[str, Any]) -> bool:
    """Whether a step's numbers say nothing worth a log line: times in hooks alone do not."""
    return not any(name in data for name in (*COUNTERS, *GAUGES, *SERIES))


def merge(into: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
    """Adds one rank's or one step's numbers to another's."""
    for name, value in data.items():
        if name == "hooks":
            hooks = into.setdefault("hooks", {})
            for hook, times in value.items():
                hooks.setdefault(hook, []).extend(times)
        elif isinstance(value, list):
            into.setdefault(name, []).extend(value)
        else:
            into[name] = into.get(name, 0) + value
    return into


def reduce(data: dict[str, Any]) -> dict[str, int | float]:
    """A log line's worth of numbers."""
    line: dict[str, int | float] = {}
    for name in (
        "rooms_out",
        "rooms_in",
        "failed_out",
        "failed_in",
        "missing_rooms",
        "refused",
        "quarantined",
    ):
        if value := data.get(name, 0):
            line[name] = value
    for name in ("bytes_out", "bytes_in"):
        if value := data.get(name, 0):
            line[name.replace("bytes", "MB")] = round(value / 1e6, 1)
    for name in SERIES:
        if values := data.get(name):
            line[f"{name[:-2]}_p50_ms"] = round(quantile(values, 0.5) * 1e3, 1)
            line[f"{name[:-2]}_p99_ms"] = round(quantile(values, 0.99) * 1e3, 1)
    for hook, times in sorted(data.get("hooks", {}).items()):
        line[f"{hook}_p50_us"] = round(quantile(times, 0.5) * 1e6, 1)
        line[f"{hook}_p99_us"] = round(quantile(times, 0.99) * 1e6, 1)
    return line


def quantile(values: list[float], q: float) -> float:
    """The value below which `q` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
