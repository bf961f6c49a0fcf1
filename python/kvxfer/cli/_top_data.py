"""What `kvxfer top` knows: scrapes of agents, and what became of each number between two of them."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvxfer.cli._errors import CommandError

__all__ = ["AgentView", "Fleet", "Scrape", "scrape"]

Series = dict[tuple[tuple[str, str], ...], float]


@dataclass(frozen=True)
class Scrape:
    """The samples of one endpoint: by name, then by labels."""

    at_s: float
    samples: Mapping[str, Series]
    error: str | None = None


def scrape(url: str, timeout_s: float) -> Scrape:
    """Asks one endpoint."""
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise CommandError(
            "kvxfer top needs prometheus-client; install it with: pip install 'kvxfer[prometheus,top]'"
        ) from None
    request = urllib.request.Request(url, headers={"Accept": "text/plain"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            at_s = time.monotonic()
            text = answer.read().decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", None) or error
        return Scrape(time.monotonic(), {}, str(why))
    found: dict[str, Series] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("kvxfer_"):
                    found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    except ValueError as error:
        return Scrape(at_s, {}, f"no metrics: {error}")
    if not found:
        return Scrape(at_s, {}, "neither an agent nor a proxy there: no metric begins with kvxfer_")
    return Scrape(at_s, found)


@dataclass
class AgentView:
    """One agent between two scrapes; rates are None until there are two."""

    url: str
    agent: str
    now: Mapping[str, Series]
    before: Mapping[str, Series] | None
    seconds: float

    def _of(self, name: str, where: Mapping[str, Series], **labels: str) -> float | None:
        wanted = {"agent": self.agent, **labels}
        values = [value for key, value in where.get(name, {}).items() if wanted.items() <= dict(key).items()]
        return sum(values) if values else None

    def value(self, name: str, **labels: str) -> float | None:
        """A gauge or a counter now, summed over the labels that are not given."""
        return self._of(name, self.now, **labels)

    def grown(self, name: str, **labels: str) -> float | None:
        """By how much a counter has grown; a restarted agent's begins at zero."""
        now = self.value(name, **labels)
        if now is None or self.before is None:
            return None
        before = self._of(name, self.before, **labels)
        if before is None or before > now:
            before = 0.0
        return now - before

    def rate(self, name: str, **labels: str) -> float | None:
        """How fast a counter grows, a second. Of bytes: of all transfers together, also where they
        overlap."""
        grown = self.grown(name, **labels)
        return None if grown is None or self.seconds <= 0 else grown / self.seconds

    def quantile_s(self, q: float, name: str, **labels: str) -> float | None:
        """The upper bound of the bucket that has this quantile, of what came between the two scrapes (or
        ever, if there is one). None if nothing came."""
        bounds = sorted(
            {
                float(le)
                for key in self.now.get(f"{name}_bucket", {})
                if (le := dict(key).get("le")) is not None
            }
        )
        counts = []
        for bound in bounds:
            le = next(
                dict(key)["le"]
                for key in self.now[f"{name}_bucket"]
                if float(dict(key).get("le", "nan")) == bound
            )
            here = self.value(f"{name}_bucket", le=le, **labels)
            grown = self.grown(f"{name}_bucket", le=le, **labels)
            counts.append((here if grown is None else grown) or 0.0)
        if not counts or counts[-1] <= 0:
            return None
        for bound, count in zip(bounds, counts, strict=True):
            if count >= q * counts[-1]:
                return bound
        return None

    def as_dict(self) -> dict[str, Any]:
        """What the table shows, as numbers."""
        states = ("bootstrapping", "waiting", "transferring", "draining")
        failures: dict[str, float] = {}
        for key, value in self.now.get("kvxfer_rooms_failed_total", {}).items():
            labels = dict(key)
            if labels.get("agent") == self.agent and value:
                failures[f"{labels['stage']}: {labels['reason']}"] = value
        slots, held = self.value("kvxfer_slots"), self.value("kvxfer_slots_held")
        bytes_per_s = self.rate("kvxfer_moved_bytes_total")
        if bytes_per_s is None:
            bytes_per_s = self.value("kvxfer_link_bytes_per_second")
        return {
            "url": self.url,
            "agent": self.agent,
            "rooms": {
                side: {state: self.value("kvxfer_rooms", side=side, state=state) for state in states}
                for side in ("decode", "prefill")
            },
            "succeeded": self.value("kvxfer_rooms_succeeded_total"),
            "succeeded_per_s": self.rate("kvxfer_rooms_succeeded_total"),
            "failed": self.value("kvxfer_rooms_failed_total"),
            "failed_now": self.grown("kvxfer_rooms_failed_total"),
            "failures": failures,
            "gbytes_per_s": None if bytes_per_s is None else bytes_per_s / 1e9,
            "link_busy_fraction": self.rate("kvxfer_link_busy_seconds_total")
            if self.before is not None
            else self.value("kvxfer_link_busy_ratio"),
            "stage_p50_s": {
                stage: self.quantile_s(0.5, "kvxfer_room_stage_seconds", stage=stage) for stage in states[:3]
            },
            "stage_p99_s": {
                stage: self.quantile_s(0.99, "kvxfer_room_stage_seconds", stage=stage) for stage in states[:3]
            },
            "pages_granted": self.value("kvxfer_pages", state="granted"),
            "pages_registered": self.value("kvxfer_pages", state="registered"),
            "pages_quarantined": self.value("kvxfer_pages", state="quarantined"),
            "slots_quarantined": self.value("kvxfer_staging_slots", state="quarantined"),
            "slots": slots,
            "slots_held": held,
            "waiting_for_memory": self.value("kvxfer_requests_waiting", cause="memory"),
            "waiting_for_transfer": self.value("kvxfer_requests_waiting", cause="transfer"),
            "queue_depth": self.value("kvxfer_queue_depth"),
            "events_unpolled": self.value("kvxfer_events_unpolled"),
            "peers": self.value("kvxfer_peers"),
            "fences": self.value("kvxfer_fences_total"),
        }


@dataclass
class Fleet:
    """Endpoints, each with its last two scrapes."""

    urls: list[str]
    timeout_s: float = 2.0
    now: dict[str, Scrape] = field(default_factory=dict)
    before: dict[str, Scrape] = field(default_factory=dict)

    def look(self) -> None:
        """Asks all of them, at once: one that does not answer holds nobody up for longer than its timeout."""
        with ThreadPoolExecutor(max_workers=min(32, len(self.urls))) as pool:
            found = dict(
                zip(self.urls, pool.map(lambda url: scrape(url, self.timeout_s), self.urls), strict=True)
            )
        for url, last in self.now.items():
            if last.error is None:
                self.before[url] = last
        self.now = found

    def agents(self) -> list[AgentView]:
        """Every agent that answered, and what a proxy says of its decode servers, by endpoint and name."""
        views = []
        for url in self.urls:
            now, before = self.now[url], self.before.get(url)
            # The proxy has no agent, and says how its decode servers are loaded.
            names = {
                dict(key).get("agent", "")
                for metric in ("kvxfer_agent_info", "kvxfer_slots", "kvxfer_requests_waiting")
                for key in now.samples.get(metric, {})
            }
            views += [
                AgentView(
                    url,
                    name,
                    now.samples,
                    None if before is None else before.samples,
                    0.0 if before is None else now.at_s - before.at_s,
                )
                for name in sorted(names)
            ]
        return views

    def silent(self) -> dict[str, str]:
        """Endpoints that did not answer, and why."""
        return {url: now.error for url, now in self.now.items() if now.error is not None}
