"""Links: every server has a NIC, and the flows through one share it fairly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvxfer.simulate.events import Clock

__all__ = ["Flow", "Links", "Nic"]

# A thousandth of a byte is nothing: floats do not add up exactly.
_NOTHING = 1e-3


class Nic:
    """One direction of a server's NIC."""

    __slots__ = ("bytes_ms", "flows", "moved", "since_ms", "used_ms", "version")

    def __init__(self, bytes_ms: float) -> None:
        self.bytes_ms = bytes_ms
        self.flows: dict[Flow, None] = {}
        self.moved = 0.0
        self.used_ms = 0.0
        self.since_ms = 0.0
        self.version = 0


class Flow:
    """Bytes of one hand-off on their way; more may be added while they move."""

    __slots__ = ("left", "rate", "settled_ms", "sink", "source", "then", "what")

    def __init__(self, source: Nic, sink: Nic, nbytes: float, then: Callable[[Any], None], what: Any) -> None:
        self.source, self.sink = source, sink
        self.left = nbytes
        self.rate = 0.0
        self.settled_ms = 0.0
        self.then, self.what = then, what


class Links:
    """All flows. A flow gets the smaller of its two NICs' equal shares.

    That is max-min fairness where one end is the bottleneck of all its flows; a share that a flow cannot use
    for its other end is not given to others.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def start(self, source: Nic, sink: Nic, nbytes: float, then: Callable[[Any], None], what: Any) -> Flow:
        """Moves so many bytes, and calls `then(what)` when the last has landed."""
        flow = Flow(source, sink, nbytes, then, what)
        flow.settled_ms = self._clock.now_ms
        for nic in (source, sink):
            if not nic.flows:
                nic.since_ms = self._clock.now_ms
            nic.flows[flow] = None
        self._share(source, sink)
        return flow

    def add(self, flow: Flow, nbytes: float) -> None:
        """More bytes for a flow that moves."""
        self._settle(flow)
        flow.left += nbytes
        self._next(flow.sink)

    def stop(self, flow: Flow) -> None:
        """Ends a flow before its time."""
        if flow in flow.sink.flows:
            self._settle(flow)
            self._remove(flow)
            self._share(flow.source, flow.sink)

    def _settle(self, flow: Flow) -> None:
        now = self._clock.now_ms
        moved = min(flow.left, flow.rate * (now - flow.settled_ms))
        flow.left -= moved
        flow.source.moved += moved
        flow.sink.moved += moved
        flow.settled_ms = now

    def _remove(self, flow: Flow) -> None:
        now = self._clock.now_ms
        for nic in (flow.source, flow.sink):
            del nic.flows[flow]
            if not nic.flows:
                nic.used_ms += now - nic.since_ms

    def _share(self, source: Nic, sink: Nic) -> None:
        touched: dict[Nic, None] = {sink: None}
        for flow in [*source.flows, *sink.flows]:
            self._settle(flow)
            a, b = flow.source, flow.sink
            flow.rate = min(a.bytes_ms / len(a.flows), b.bytes_ms / len(b.flows))
            touched[b] = None
        for nic in touched:
            self._next(nic)

    def _next(self, sink: Nic) -> None:
        """Waits for the flow into this NIC that ends first."""
        sink.version += 1
        if sink.flows:
            end = min(flow.settled_ms + flow.left / flow.rate for flow in sink.flows)
            self._clock.at(end, self._arrived, (sink, sink.version))

    def _arrived(self, which: tuple[Nic, int]) -> None:
        sink, version = which
        if version != sink.version:
            return
        done = []
        for flow in sink.flows:
            self._settle(flow)
            # What is left may be less than a float can tell from now.
            if flow.left <= _NOTHING or self._clock.now_ms + flow.left / flow.rate <= self._clock.now_ms:
                done.append(flow)
        for flow in done:
            self._remove(flow)
        sources = {flow.source: None for flow in done}
        if not sources:
            self._next(sink)
        for source in sources:
            self._share(source, sink)
        for flow in done:
            flow.then(flow.what)
