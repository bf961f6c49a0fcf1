"""What the proxy counts, for Prometheus. Names by its rules: base units, `_total` for counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvxfer._families import FAMILIES
from kvxfer.admission import Reason, Stats

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500, 1000)
_TOKEN_SECONDS = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.25, 0.5, 1)
_WINDOW_S = 60.0
# What those wait for who wait here, as `kvxfer_requests_waiting` has it.
_CAUSES = {
    "memory": (Reason.DECODE_PAGES, Reason.DECODE_SLOTS),
    "transfer": (Reason.LINK,),
    "prefill": (Reason.PREFILL,),
}


def _engines(stats: Stats) -> Iterable[Metric]:
    """What agents cannot know of their engines, under the names that `kvxfer.prometheus` has for it.

    So alerts and dashboard have it of every decode server, without a line of code in the engine.
    """
    about = {family.name: family for family in FAMILIES}

    def gauge(name: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, about[name].help, labels=("agent", *labels))

    slots, held = gauge("kvxfer_slots"), gauge("kvxfer_slots_held")
    for one in stats.decode:
        slots.add_metric((one.name,), one.slots_in_all)
        held.add_metric((one.name,), one.slots_held)
    waiting = gauge("kvxfer_requests_waiting", "cause")
    for cause, reasons in _CAUSES.items():
        waiting.add_metric(("proxy", cause), sum(stats.waiting.get(reason.value, 0) for reason in reasons))
    yield from (slots, held, waiting)


class _Now(Collector):
    """What stands in the books of admission when somebody looks."""

    def __init__(self, stats: Callable[[], Stats], needed: Callable[[], float]) -> None:
        self._stats = stats
        self._needed = needed

    def collect(self) -> Iterable[Metric]:
        stats = self._stats()

        def gauge(name: str, text: str, labels: tuple[str, ...] = ("server",)) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"kvxfer_proxy_{name}", text, labels=labels)

        up = gauge("up", "1 if the server takes requests", ("server", "role"))
        requests = gauge("requests_in_flight", "Requests at the server now", ("server", "role"))
        nbytes = gauge("bytes_in_flight", "KV bytes admitted whose hand-off is not over", ("server", "role"))
        tokens = gauge("prompt_tokens_in_flight", "Prompt tokens that are not computed yet")
        rate = gauge("prompt_tokens_per_second", "How fast the server computes prompts, as measured")
        reserved = gauge("pages_reserved", "KV pages reserved for prompts and answers")
        pages = gauge("pages", "KV pages that the server has")
        short = gauge("pages_short", "KV pages that answers have grown into and that are not there")
        held = gauge("slots_held", "Slots in use or reserved")
        slots = gauge("slots", "Slots that are given away at most")
        for role, servers in (("prefill", stats.prefill), ("decode", stats.decode)):
            for one in servers:
                up.add_metric((one.name, role), float(one.up))
                requests.add_metric((one.name, role), one.requests)
                nbytes.add_metric((one.name, role), one.bytes_in_flight)
        for one in stats.prefill:
            tokens.add_metric((one.name,), one.tokens_in_flight)
            rate.add_metric((one.name,), one.tokens_per_s)
        for one in stats.decode:
            reserved.add_metric((one.name,), one.pages_reserved)
            short.add_metric((one.name,), one.pages_short)
            held.add_metric((one.name,), one.slots_held)
            slots.add_metric((one.name,), one.slots)
            if one.pages is not None:
                pages.add_metric((one.name,), one.pages)
        yield from (up, requests, nbytes, tokens, rate, reserved, pages, short, held, slots)
        yield from _engines(stats)
        for name, text, value in (
            ("queued_requests", "Requests that wait for admission", stats.queued),
            ("hold_seconds", "How long a request holds its slot, of late", stats.hold_s),
            (
                "slots_needed",
                "Slots by Little's law: admissions a second over the last minute, times hold_seconds",
                self._needed(),
            ),
        ):
            one_value = GaugeMetricFamily(f"kvxfer_proxy_{name}", text)
            one_value.add_metric((), value)
            yield one_value


class Metrics:
    """The counters and histograms, and `render` for `/metrics`."""

    def __init__(self, stats: Callable[[], Stats], now_s: Callable[[], float]) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._stats = stats
        self._now_s = now_s
        self._admitted_s: deque[float] = deque()
        self._began_s = now_s()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvxfer_proxy_{name}", text, labels, registry=self.registry)

        def seconds(name: str, text: str, *labels: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(
                f"kvxfer_proxy_{name}_seconds", text, labels, buckets=buckets, registry=self.registry
            )

        self.requests = counter("requests", "Requests that ended, by how", "path", "outcome")
        self.aborts = counter("aborts", "Requests that were given up, by who gave them up", "by")
        self.refused = counter("refused", "Requests that were not admitted, by what was lacking", "reason")
        self.recomputed = counter("recomputed", "Prompts that decode computed itself, by why", "reason")
        self.retries = counter("retries", "Second tries of requests that had not reached the client")
        self.failures = counter("server_failures", "Legs that failed at a server", "server", "role")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answered requests")
        self.answer_tokens = counter("answer_tokens", "Tokens of answers")
        self.first_token = seconds("first_token", "From a streamed request to its first token")
        self.part = seconds("first_token_part", "The parts of the time to the first token", "part")
        self.request = seconds("request", "From a request to the end of its answer")
        self.per_token = seconds(
            "time_per_token",
            "Mean time per token of a streamed answer after its first",
            buckets=_TOKEN_SECONDS,
        )
        for by in ("client", "timeout", "server", "shutdown"):
            self.aborts.labels(by)
        self.registry.register(_Now(stats, self.slots_needed))

    def admitted(self) -> None:
        """One was admitted now."""
        self._admitted_s.append(self._now_s())
        self._forget()

    def _forget(self) -> None:
        border = self._now_s() - _WINDOW_S
        while self._admitted_s and self._admitted_s[0] < border:
            self._admitted_s.popleft()

    def slots_needed(self) -> float:
        """Little's law over the last minute."""
        self._forget()
        window = min(_WINDOW_S, max(1.0, self._now_s() - self._began_s))
        return len(self._admitted_s) / window * self._stats().hold_s

    def render(self) -> bytes:
        """The text of `/metrics`."""
        return generate_latest(self.registry)
