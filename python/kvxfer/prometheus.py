"""Metrics of agents for Prometheus. One line in a process that has an agent:

    kvxfer.prometheus.register(agent)                      # with the metrics that the process exposes already
    server = kvxfer.prometheus.serve(agent, port=9464)     # or on a port of its own

Needs the extra `prometheus` (`pip install 'kvxfer[prometheus]'`). Every metric is listed in docs/operate.md,
a dashboard and alert rules are in `monitoring/`. What the engine alone knows (its slots, and requests that
wait for memory) it says with `load=`.

Rates are for Prometheus to compute: counters count bytes and time over all transfers, so four transfers of 1
GB that overlap in one second are `rate(kvxfer_moved_bytes_total[...])` = 4 GB/s, and not four times 1 GB/s
averaged.
"""

from __future__ import annotations

import logging
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

import kvxfer
from kvxfer._families import FAMILIES, Histogram, Load, Snapshot
from kvxfer.errors import AgentClosed, BadArgument, Forked

try:
    import prometheus_client
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
        InfoMetricFamily,
        Metric,
    )
    from prometheus_client.registry import Collector, CollectorRegistry
except ImportError as error:  # pragma: no cover - the message is all there is to it
    raise ImportError(
        "kvxfer.prometheus needs prometheus-client; install it with: pip install 'kvxfer[prometheus]'"
    ) from error

__all__ = ["Load", "Server", "metric_names", "register", "serve", "unregister"]

_log = logging.getLogger(__name__)
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def metric_names() -> tuple[str, ...]:
    """Every name that Prometheus can have from here, `_total`, `_bucket` and so on included."""
    return tuple(name for family in FAMILIES for name in family.exposed)


class _Watched:
    """An agent that is looked at, for as long as somebody else keeps it."""

    def __init__(
        self, agent: kvxfer.Agent, load: Callable[[], Load] | None, labels: Mapping[str, str]
    ) -> None:
        self.agent = weakref.ref(agent)
        self.name = agent.name
        self.load = load
        self.labels = dict(labels)

    def look(self) -> Snapshot | None:
        """What it says now; None if it is gone, closed, or of a parent process."""
        agent = self.agent()
        if agent is None or agent.closed:
            return None
        try:
            info = {"version": kvxfer.__version__, "fabrics": ",".join(agent.fabrics)}
            return Snapshot(info, agent.stats(), agent.metrics(), agent.pages, self._load())
        except (AgentClosed, Forked):
            return None

    def _load(self) -> Load:
        if self.load is None:
            return Load()
        try:
            return self.load()
        except Exception:
            # The engine's mistake must not take the transfers' metrics away.
            _log.exception("the load of agent %s could not be had", self.name)
            return Load()


class _Collector(Collector):
    """All agents of one registry: a metric may be named only once in a scrape."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: list[_Watched] = []

    def add(self, new: _Watched) -> None:
        with self._lock:
            self._watched = [w for w in self._watched if (a := w.agent()) is not None and not a.closed]
            for old in self._watched:
                if sorted(old.labels) != sorted(new.labels):
                    raise BadArgument(
                        f"labels {sorted(new.labels)} of agent {new.name!r}: agent {old.name!r} of this "
                        "registry has "
                        f"{sorted(old.labels)}, and all must have the same ones"
                    )
                if (old.name, old.labels) == (new.name, new.labels):
                    raise BadArgument(
                        f"an agent {new.name!r} with labels {new.labels} is registered already: give the "
                        "two different "
                        "names, or labels= that differ"
                    )
            self._watched.append(new)

    def remove(self, agent: kvxfer.Agent) -> bool:
        with self._lock:
            before = len(self._watched)
            self._watched = [w for w in self._watched if w.agent() is not agent]
            return len(self._watched) < before

    def describe(self) -> Iterable[Metric]:
        """Nothing: so that registering looks at no agent."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One look at each agent."""
        with self._lock:
            watched = list(self._watched)
        looks = [(w, snapshot) for w in watched if (snapshot := w.look()) is not None]
        if not looks:
            return
        own = ("agent", *looks[0][0].labels)
        for family in FAMILIES:
            kinds: dict[str, Any] = {
                "counter": CounterMetricFamily,
                "gauge": GaugeMetricFamily,
                "histogram": HistogramMetricFamily,
                "info": InfoMetricFamily,
            }
            labels = own if family.kind == "info" else (*own, *family.labels)
            metric = kinds[family.kind](family.name, family.help, labels=labels)
            for w, snapshot in looks:
                common = (w.name, *(w.labels[label] for label in own[1:]))
                for values, value in family.samples(snapshot):
                    if family.kind == "info":
                        metric.add_metric(common, dict(zip(family.labels, values, strict=True)))
                    elif isinstance(value, Histogram):
                        metric.add_metric((*common, *values), value.buckets, value.total)
                    else:
                        metric.add_metric((*common, *values), value)
            yield metric


_collectors: weakref.WeakKeyDictionary[CollectorRegistry, _Collector] = weakref.WeakKeyDictionary()
_collectors_lock = threading.Lock()


def register(
    agent: kvxfer.Agent,
    *,
    registry: CollectorRegistry | None = None,
    load: Callable[[], Load] | None = None,
    labels: Mapping[str, str] | None = None,
) -> None:
    """Adds an agent to what a registry exposes, until the agent is closed or dropped.

    Args:
        agent: the agent; it is kept by whoever made it and not by this.
        registry: where; default: prometheus_client's own, which most processes expose.
        load: called at each scrape, says what the engine knows: its slots, how many are held, and how many
            requests wait for memory. It must not block.
        labels: more labels, for example `{"engine": "a"}`; `agent` has the agent's name in any case. All
            agents of a registry have the same labels.
    """
    given = dict(labels or {})
    taken = {"agent", *(label for family in FAMILIES for label in family.labels)}
    for label in given:
        if not _LABEL.fullmatch(label) or label.startswith("__") or label in taken:
            raise BadArgument(
                f"label {label!r}: it is no name for a label, or is used already ({', '.join(sorted(taken))})"
            )
    where = prometheus_client.REGISTRY if registry is None else registry
    with _collectors_lock:
        collector = _collectors.get(where)
        if collector is None:
            collector = _collectors[where] = _Collector()
            where.register(collector)
    collector.add(_Watched(agent, load, given))


def unregister(agent: kvxfer.Agent, *, registry: CollectorRegistry | None = None) -> bool:
    """Takes an agent out of a registry again; whether it was there."""
    collector = _collectors.get(prometheus_client.REGISTRY if registry is None else registry)
    return collector is not None and collector.remove(agent)


class Server:
    """Metrics of some agents on a port. A context manager; closed, its port is free."""

    def __init__(self, registry: CollectorRegistry, address: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            """Answers every path with the metrics, as exporters do."""

            timeout = 10

            def do_GET(self) -> None:
                choose = prometheus_client.exposition.choose_encoder
                encode, content_type = choose(self.headers.get("Accept", ""))
                body = encode(registry)
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """A line for each scrape is of no use to anybody."""

        try:
            self._http = ThreadingHTTPServer((address, port), Handler)
        except OSError as error:
            raise BadArgument(
                f"metrics cannot be served on {address}:{port}: {error.strerror}; another port= (0: any) "
                "may be free"
            ) from error
        self._http.daemon_threads = True
        self.registry = registry
        self.address = address
        self.port = int(self._http.server_address[1])
        self._thread = threading.Thread(target=self._http.serve_forever, name="kvx-metrics", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where Prometheus finds them."""
        return f"http://{self.address}:{self.port}/metrics"

    def close(self) -> None:
        """Answers no more scrapes."""
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def serve(
    *agents: kvxfer.Agent,
    port: int = 9464,
    address: str = "127.0.0.1",
    load: Callable[[], Load] | None = None,
    labels: Mapping[str, str] | None = None,
) -> Server:
    """Serves the metrics of these agents, and nothing else, on a port.

    Args:
        agents: the agents.
        port: TCP port; 0 lets the system choose (`Server.port`).
        address: address to listen on. Metrics are served to whoever asks, without a password: other
            addresses than loopback are for networks that you trust.
        load: as for `register`, for all of the agents.
        labels: as for `register`.
    """
    registry = CollectorRegistry()
    for agent in agents:
        register(agent, registry=registry, load=load, labels=labels)
    return Server(registry, address, port)
