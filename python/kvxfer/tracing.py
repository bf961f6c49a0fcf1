"""OpenTelemetry spans of rooms. Off unless asked for:

    spans = kvxfer.tracing.trace(agent)

Each room then leaves a span when `poll` gives its end, with a child for each stage, at the times that the
transfer thread took: nothing is added to `expect` and `push`, nothing runs on that thread, and `poll` pays
for the spans of the rooms that it returns. Needs the extra `otel`; which spans are kept and where they go is
the SDK's, which the application sets up.

A request's own span becomes the parent if the room is bound to it: `spans.bind(room)`, where the request is
handled.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

import kvxfer
from kvxfer._kvxfer import Event

try:
    import opentelemetry.context as otel_context
    import opentelemetry.trace as otel
    from opentelemetry.context import Context
except ImportError as error:  # pragma: no cover - the message is all there is to it
    raise ImportError(
        "kvxfer.tracing needs opentelemetry-api; install it with: pip install 'kvxfer[otel]'"
    ) from error

__all__ = ["RoomSpans", "trace"]

# Rooms that are bound and never end here (another rank's, or of an agent that is not polled) are forgotten
# then.
_MOST_ROOMS = 65_536
_STAGES = ("bootstrapping", "waiting", "transferring")


class RoomSpans:
    """Makes spans out of an agent's events.

    Args:
        agent: whose rooms.
        tracer_provider: where spans go; None for the global one.
    """

    def __init__(self, agent: kvxfer.Agent, tracer_provider: otel.TracerProvider | None = None) -> None:
        self._name = agent.name
        self._tracer = otel.get_tracer("kvxfer", kvxfer.__version__, tracer_provider)
        self._bound: OrderedDict[int, Context] = OrderedDict()
        # Of rooms that have failed and hold pages: the span, and when it ended.
        self._draining: OrderedDict[int, tuple[Context, int]] = OrderedDict()

    def bind(self, room: int, context: Context | None = None) -> None:
        """From now on the room's span is a child of that context's, by default of the current one's."""
        self._bound[room] = otel_context.get_current() if context is None else context
        while len(self._bound) > _MOST_ROOMS:
            self._bound.popitem(last=False)

    def record(self, events: Iterable[Event]) -> None:
        """Makes the spans of these events; `trace` has it called with what `poll` returns."""
        # Events have the monotonic clock, spans the wall's.
        wall_ns = time.time_ns() - time.monotonic_ns()
        for event in events:
            if event.state in ("Success", "Failed"):
                self._end(event, wall_ns)
            elif event.state == "Released":
                self._released(event, wall_ns)

    def _end(self, event: Event, wall_ns: int) -> None:
        stats = event.stats
        spent_us = (stats.bootstrap_us, stats.waiting_us, stats.transfer_us)
        end_ns = stats.at_us * 1000 + wall_ns
        start_ns = end_ns - sum(spent_us) * 1000
        attributes: dict[str, Any] = {
            "kvxfer.agent": self._name,
            "kvxfer.room": str(event.room),
            "kvxfer.state": event.state,
            "kvxfer.bytes": stats.bytes,
            "kvxfer.writes": stats.writes,
            "kvxfer.released": event.released,
        }
        error = event.error
        if error is not None:
            attributes["error.type"] = type(error).__name__
        span = self._tracer.start_span(
            "kvxfer.room", self._bound.pop(event.room, None), start_time=start_ns, attributes=attributes
        )
        inside = otel.set_span_in_context(span)
        at_ns = start_ns
        for stage, us in zip(_STAGES, spent_us, strict=True):
            # A room that failed had no later stage.
            if us or error is None:
                child = self._tracer.start_span(f"kvxfer.{stage}", inside, start_time=at_ns)
                child.end(at_ns + us * 1000)
            at_ns += us * 1000
        if stats.first_write_at_us:
            span.add_event("first write", timestamp=stats.first_write_at_us * 1000 + wall_ns)
        if error is not None:
            span.set_status(otel.Status(otel.StatusCode.ERROR, str(error)))
        span.end(end_ns)
        if not event.released:
            self._draining[event.room] = (inside, end_ns)
            while len(self._draining) > _MOST_ROOMS:
                self._draining.popitem(last=False)

    def _released(self, event: Event, wall_ns: int) -> None:
        """How long a failed room's pages were held after its end."""
        found = self._draining.pop(event.room, None)
        if found is not None:
            inside, began_ns = found
            span = self._tracer.start_span("kvxfer.draining", inside, start_time=began_ns)
            span.end(max(began_ns, event.stats.at_us * 1000 + wall_ns))


def trace(agent: kvxfer.Agent, tracer_provider: otel.TracerProvider | None = None) -> RoomSpans:
    """From now on `agent.poll()` leaves a span for each room that ends.

    Args:
        agent: the agent, which only this process polls.
        tracer_provider: where spans go; None for the global one (`opentelemetry.trace.set_tracer_provider`).
    """
    spans = RoomSpans(agent, tracer_provider)
    # The agent has the function, so the function must not keep the agent.
    kept = weakref.ref(agent)

    def poll() -> list[Event]:
        alive = kept()
        if alive is None:  # whoever calls this has the function and not the agent
            return []
        events = type(alive).poll(alive)
        if events:
            spans.record(events)
        return events

    # On this agent alone: others stay as they are.
    vars(agent)["poll"] = poll
    return spans
