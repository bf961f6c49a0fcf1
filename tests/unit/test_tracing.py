"""OpenTelemetry spans of rooms: off unless asked for, one a room with its stages, true times, and the
request as parent."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pair import PAGES, Pair, pair
from two import events, released

import kvxfer as kx
from kvxfer import tracing

STAGES = ["kvxfer.bootstrapping", "kvxfer.waiting", "kvxfer.transferring"]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    made = TracerProvider(shutdown_on_exit=False)
    made.add_span_processor(SimpleSpanProcessor(exporter))
    return made


@pytest.fixture
def both() -> Iterator[Pair]:
    with pair() as made:
        yield made


def by_name(spans: tuple[ReadableSpan, ...], name: str) -> ReadableSpan:
    (found,) = [span for span in spans if span.name == name]
    return found


def test_nothing_is_traced_unless_asked_for(
    both: Pair, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    both.hand_off()
    assert exporter.get_finished_spans() == ()
    assert "poll" not in vars(both.decode)


def test_a_room_is_a_span_with_its_stages(
    both: Pair, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    tracing.trace(both.decode, provider)
    began_ns = time.time_ns()
    room = both.hand_off(pages=8)
    spans = exporter.get_finished_spans()
    # The other side is not traced.
    assert sorted(s.name for s in spans) == sorted(["kvxfer.room", *STAGES])
    root = by_name(spans, "kvxfer.room")
    assert root.parent is None
    assert root.attributes is not None
    assert root.attributes["kvxfer.room"] == str(room)
    assert root.attributes["kvxfer.agent"] == "decode-0"
    assert root.attributes["kvxfer.state"] == "Success"
    assert root.attributes["kvxfer.bytes"] == 8 * 4 * 2 * 2 * 2 * 16 * 2
    assert root.attributes["kvxfer.released"] is True
    assert root.status.is_unset
    at_ns = root.start_time
    for name in STAGES:
        child = by_name(spans, name)
        assert child.parent is not None
        assert child.parent.span_id == root.context.span_id
        # One after the other, without a gap.
        assert child.start_time == at_ns
        assert child.end_time is not None
        at_ns = child.end_time
    assert at_ns == root.end_time
    # True times of the wall's clock: the room began and ended within this test.
    assert root.start_time is not None
    assert began_ns - 1_000_000 <= root.start_time <= at_ns <= time.time_ns()


def test_the_requests_span_is_the_parent(
    both: Pair, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    spans = tracing.trace(both.decode, provider)
    tracer = provider.get_tracer("engine")
    with tracer.start_as_current_span("request") as request:
        room = both.expect([1, 2])
        spans.bind(room)
    both.prefill.push(room, [3, 4], tokens=8)
    events(both.decode, released(room))
    other = both.hand_off()
    rooms = {
        str((s.attributes or {})["kvxfer.room"]): s
        for s in exporter.get_finished_spans()
        if s.name == "kvxfer.room"
    }
    bound = rooms[str(room)]
    assert bound.parent is not None
    assert bound.parent.span_id == request.get_span_context().span_id
    assert bound.context.trace_id == request.get_span_context().trace_id
    assert rooms[str(other)].parent is None
    assert spans._bound == {}


def test_a_failed_room_says_why(both: Pair, provider: TracerProvider, exporter: InMemorySpanExporter) -> None:
    tracing.trace(both.decode, provider)
    room = both.expect([1])
    both.is_waiting(room)
    both.decode.cancel(room)
    events(both.decode, released(room))
    spans = exporter.get_finished_spans()
    root = by_name(spans, "kvxfer.room")
    assert root.status.status_code is otel.StatusCode.ERROR
    assert "was cancelled" in (root.status.description or "")
    assert root.attributes is not None
    assert root.attributes["error.type"] == "Cancelled"
    assert "kvxfer.transferring" not in {s.name for s in spans}


def test_a_failed_room_says_how_long_it_held_its_pages(
    both: Pair, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """Pages that a peer may still write come back later: with the release, which is an event of its own."""
    spans = tracing.RoomSpans(both.decode, provider)
    stats = {"bootstrap_us": 10, "waiting_us": 20, "transfer_us": 30, "bytes": 0, "writes": 0}
    at_us = time.monotonic_ns() // 1000

    def event(state: str, at_us: int, error: Exception | None = None) -> Any:
        when = SimpleNamespace(**stats, first_write_at_us=0, at_us=at_us)
        return SimpleNamespace(room=7, state=state, released=state == "Released", error=error, stats=when)

    spans.record([event("Failed", at_us, kx.PeerLost("room 7: peer a was fenced"))])
    spans.record([event("Released", at_us + 2_000_000)])
    root = by_name(exporter.get_finished_spans(), "kvxfer.room")
    drain = by_name(exporter.get_finished_spans(), "kvxfer.draining")
    assert drain.parent is not None
    assert drain.parent.span_id == root.context.span_id
    assert drain.start_time == root.end_time
    assert drain.start_time is not None
    assert drain.end_time is not None
    # The two looks at the wall's clock differ by little.
    assert drain.end_time - drain.start_time == pytest.approx(2e9, rel=0.1)
    assert spans._draining == {}


def test_a_room_that_fails_at_once_has_no_drain(
    both: Pair, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    tracing.trace(both.decode, provider)
    room = both.expect([PAGES])
    events(both.decode, released(room))
    root = by_name(exporter.get_finished_spans(), "kvxfer.room")
    assert (root.attributes or {})["error.type"] == "PageError"
    assert "kvxfer.draining" not in {s.name for s in exporter.get_finished_spans()}


def test_poll_gives_what_it_gave(both: Pair, provider: TracerProvider) -> None:
    tracing.trace(both.decode, provider)
    assert both.decode.poll() == []
    room = both.expect([1])
    both.prefill.push(room, [1], tokens=4)
    (event,) = events(both.decode, released(room))
    assert (event.room, event.state, event.released) == (room, "Success", True)


def test_a_traced_agent_is_dropped_like_any_other(provider: TracerProvider) -> None:
    layout, shard = kx.PageLayout(layers=1, kv_heads=1, head_dim=8), kx.Shard()
    agent = kx.Agent("alone", layout, shard, memory=kx.alloc(layout, shard, pages=1))
    tracing.trace(agent, provider)
    poll = agent.poll
    gone = weakref.ref(agent)
    gc.disable()
    try:
        del agent
        assert gone() is None, "the traced poll keeps its agent"
    finally:
        gc.enable()
    assert poll() == []


def test_what_never_ends_here_is_forgotten(
    both: Pair, provider: TracerProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "_MOST_ROOMS", 3)
    spans = tracing.RoomSpans(both.decode, provider)
    for room in range(5):
        spans.bind(room)
    assert list(spans._bound) == [2, 3, 4]
