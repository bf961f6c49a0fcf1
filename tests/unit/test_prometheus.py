"""Metrics of agents: their names, what they count, and that counters never go down."""

from __future__ import annotations

import os
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pair import PAGES, Pair, pair
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from two import events, eventually, released

import kvxfer as kx
from kvxfer import prometheus
from kvxfer._families import FAMILIES, Snapshot
from kvxfer.prometheus import Load, metric_names

# Prometheus' rules: https://prometheus.io/docs/practices/naming/
BASE_UNITS = ("seconds", "bytes", "ratio", "info")
COUNTED = re.compile(r"kvxfer_[a-z_]+")
Samples = dict[str, dict[frozenset[tuple[str, str]], float]]


def samples(registry: CollectorRegistry) -> Samples:
    """What a scrape would find, as Prometheus reads it."""
    found: Samples = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            series = found.setdefault(sample.name, {})
            key = frozenset(sample.labels.items())
            assert key not in series, f"{sample.name} {sample.labels} twice"
            series[key] = sample.value
    return found


def value(found: Samples, name: str, **labels: str) -> float:
    hits = [v for key, v in found[name].items() if labels.items() <= dict(key).items()]
    assert len(hits) == 1, (name, labels, found[name])
    return hits[0]


@pytest.fixture
def agents() -> Iterator[tuple[Pair, CollectorRegistry]]:
    registry = CollectorRegistry()
    with pair() as both:
        for agent in (both.prefill, both.decode):
            prometheus.register(agent, registry=registry)
        yield both, registry


def settled(registry: CollectorRegistry, check: Any) -> Samples:
    """The first scrape of which `check` is true: the thread publishes every few milliseconds."""
    last: Samples = {}

    def good() -> bool:
        nonlocal last
        last = samples(registry)
        return bool(check(last))

    eventually(good, "the metrics are published")
    return last


def test_names_follow_prometheus_rules() -> None:
    for family in FAMILIES:
        assert COUNTED.fullmatch(family.name), family.name
        assert not family.name.endswith(("_total", "_count", "_sum", "_bucket", "_info")), family.name
        assert family.help.endswith("."), family.name
        assert family.help[0].isupper()
        for unit in ("_us", "_ms", "_ns", "_gb", "_kb", "_percent", "_milliseconds"):
            assert not family.name.endswith(unit), family.name
        if family.kind == "histogram":
            assert family.name.endswith("_seconds")
        for label in family.labels:
            assert re.fullmatch(r"[a-z_]+", label)
            assert label not in ("agent", "job", "instance", "le")
    assert len(set(metric_names())) == len(metric_names())


def test_every_metric_is_exposed_and_nothing_else(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, registry = agents
    both.hand_off()
    found = samples(registry)
    # Only the engine knows its slots.
    assert set(metric_names()) - set(found) == {"kvxfer_slots", "kvxfer_slots_held"}
    assert {name for name in found if not name.endswith("_created")} <= set(metric_names())
    text = generate_latest(registry).decode()
    for family in FAMILIES:
        if family.name not in ("kvxfer_slots", "kvxfer_slots_held"):
            kind = {"info": "gauge"}.get(family.kind, family.kind)
            exposed = family.exposed[0] if family.kind in ("counter", "info") else family.name
            assert f"# TYPE {exposed} {kind}\n" in text
            assert f"# HELP {exposed} " in text


def test_a_hand_off_is_counted_on_both_sides(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, registry = agents
    for _ in range(3):
        both.hand_off(pages=4)
    found = settled(
        registry,
        lambda f: all(
            value(f, "kvxfer_rooms_succeeded_total", agent=a) == 3 for a in ("prefill-0", "decode-0")
        ),
    )
    # 3 rooms of 16 tokens: 2 layers, K and V, 2 heads of 16, 2 bytes each.
    nbytes = 3 * 16 * 2 * 2 * 2 * 16 * 2
    # Over shm the receiver copies.
    assert value(found, "kvxfer_moved_bytes_total", agent="decode-0") == nbytes
    assert value(found, "kvxfer_link_busy_seconds_total", agent="decode-0") > 0
    assert value(found, "kvxfer_link_busy_seconds_total", agent="prefill-0") == 0
    for stage in ("bootstrapping", "waiting", "transferring"):
        for agent in ("decode-0", "prefill-0"):
            assert value(found, "kvxfer_room_stage_seconds_count", agent=agent, stage=stage) == 3
            assert value(found, "kvxfer_room_stage_seconds_bucket", agent=agent, stage=stage, le="+Inf") == 3
            assert 0 <= value(found, "kvxfer_room_stage_seconds_sum", agent=agent, stage=stage) < 60
    assert value(found, "kvxfer_pages", agent="decode-0", state="registered") == PAGES
    assert value(found, "kvxfer_calls_total", agent="decode-0", call="expect") == 3
    assert value(found, "kvxfer_calls_total", agent="prefill-0", call="push") == 3
    # The first call of each kind is timed.
    assert value(found, "kvxfer_call_seconds_count", agent="prefill-0", call="push") == 1
    assert 0 < value(found, "kvxfer_call_seconds_sum", agent="prefill-0", call="push") < 10
    assert value(found, "kvxfer_agent_info", agent="decode-0", version=kx.__version__) == 1


def test_rooms_are_counted_by_state(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, registry = agents
    unreachable = both.expect([1], source="127.0.0.1:9", bootstrap_timeout=60)
    waiting = [both.expect([2]), both.expect([3])]
    for room in waiting:
        both.is_waiting(room)
    opened = kx.new_room()
    both.prefill.open(opened)

    def where(f: Samples, side: str, agent: str) -> dict[str, float]:
        states = ("bootstrapping", "waiting", "transferring", "draining")
        return {s: value(f, "kvxfer_rooms", agent=agent, side=side, state=s) for s in states}

    found = settled(registry, lambda f: where(f, "prefill", "prefill-0")["bootstrapping"] == 1)
    found = settled(registry, lambda f: where(f, "decode", "decode-0")["waiting"] == 2)
    assert where(found, "decode", "decode-0") == {
        "bootstrapping": 1,
        "waiting": 2,
        "transferring": 0,
        "draining": 0,
    }
    assert value(found, "kvxfer_requests_waiting", agent="decode-0", cause="transfer") == 3
    for agent, rooms in ((both.decode, [unreachable, *waiting]), (both.prefill, [opened])):
        for room in rooms:
            agent.cancel(room)
            events(agent, released(room))
    settled(registry, lambda f: not any(f["kvxfer_rooms"].values()))


def test_failures_are_counted_by_stage_and_reason(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, registry = agents

    def failed(f: Samples, stage: str, reason: str) -> float:
        return value(f, "kvxfer_rooms_failed_total", agent="decode-0", stage=stage, reason=reason)

    before = samples(registry)
    # Every reason is there from the start: a rate needs the zero before the first failure.
    assert failed(before, "transferring", "peer_lost") == 0
    room = both.expect([1], source="127.0.0.1:9", bootstrap_timeout=0.05)
    events(both.decode, released(room))
    room = both.expect([PAGES])
    events(both.decode, released(room))
    room = both.expect([2])
    both.is_waiting(room)
    both.decode.cancel(room)
    events(both.decode, released(room))
    found = settled(registry, lambda f: failed(f, "waiting", "cancelled") == 1)
    assert failed(found, "bootstrapping", "transfer_timeout") == 1
    assert failed(found, "bootstrapping", "page_error") == 1
    all_of = {k: v for k, v in found["kvxfer_rooms_failed_total"].items() if dict(k)["agent"] == "decode-0"}
    assert sum(all_of.values()) == 3 == both.decode.stats()["failed"]
    # Each of them drained, two of them at once.
    found = settled(registry, lambda f: value(f, "kvxfer_drain_seconds_count", agent="decode-0") == 3)
    assert value(found, "kvxfer_drain_seconds_bucket", agent="decode-0", le="5e-05") >= 2


def test_counters_never_go_down(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, registry = agents
    counters = {n for f in FAMILIES for n in f.exposed if f.kind in ("counter", "histogram")}
    before = samples(registry)
    for round_ in range(12):
        both.hand_off(pages=1 + round_ % 8)
        if round_ % 3 == 0:
            room = both.expect([9, 10])
            both.decode.cancel(room)
            events(both.decode, released(room))
        after = samples(registry)
        for name in counters & set(before):
            for key, old in before[name].items():
                assert after[name][key] >= old, (name, key)
        before = after


def test_the_engine_says_what_waits_for_memory(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, _ = agents
    registry = CollectorRegistry()
    load = Load(slots=8, slots_held=7, waiting_for_memory=5)
    prometheus.register(both.decode, registry=registry, load=lambda: load, labels={"engine": "a"})
    room = both.expect([1])
    found = settled(registry, lambda f: value(f, "kvxfer_requests_waiting", cause="transfer") == 1)
    assert value(found, "kvxfer_requests_waiting", cause="memory", engine="a") == 5
    assert value(found, "kvxfer_slots") == 8
    assert value(found, "kvxfer_slots_held") == 7
    both.decode.cancel(room)
    load = Load(slots=8)
    found = samples(registry)
    assert "kvxfer_slots_held" not in found
    assert len(found["kvxfer_requests_waiting"]) == 1


def test_a_load_that_fails_takes_nothing_else_away(
    agents: tuple[Pair, CollectorRegistry], caplog: pytest.LogCaptureFixture
) -> None:
    both, _ = agents
    registry = CollectorRegistry()

    def broken() -> Load:
        raise RuntimeError("the engine is confused")

    prometheus.register(both.decode, registry=registry, load=broken)
    found = samples(registry)
    assert "kvxfer_slots" not in found
    assert "kvxfer_moved_bytes_total" in found
    assert "the engine is confused" in caplog.text


def test_closed_and_dropped_agents_leave(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, registry = agents
    names = {dict(k)["agent"] for k in samples(registry)["kvxfer_peers"]}
    assert names == {"prefill-0", "decode-0"}
    both.prefill.close()
    assert {dict(k)["agent"] for k in samples(registry)["kvxfer_peers"]} == {"decode-0"}
    assert prometheus.unregister(both.decode, registry=registry)
    assert not prometheus.unregister(both.decode, registry=registry)
    assert samples(registry) == {}
    # Its name is free again.
    prometheus.register(both.decode, registry=registry)
    assert {dict(k)["agent"] for k in samples(registry)["kvxfer_peers"]} == {"decode-0"}


def test_what_cannot_be_told_apart_is_refused(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, registry = agents
    with pytest.raises(kx.BadArgument, match=r"'decode-0' with labels \{\} is registered already"):
        prometheus.register(both.decode, registry=registry)
    with pytest.raises(kx.BadArgument, match="all must have the same ones"):
        prometheus.register(both.decode, registry=registry, labels={"engine": "b"})
    for label in ("agent", "stage", "le gion", "__name__"):
        with pytest.raises(kx.BadArgument, match="label"):
            prometheus.register(both.decode, registry=CollectorRegistry(), labels={label: "x"})


def test_a_server_of_its_own(agents: tuple[Pair, CollectorRegistry]) -> None:
    both, _ = agents
    with prometheus.serve(both.prefill, both.decode, port=0) as server:
        with urllib.request.urlopen(server.url, timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            body = answer.read().decode()
        assert 'kvxfer_rooms_succeeded_total{agent="prefill-0"}' in body
        assert "python_gc" not in body
        with pytest.raises(kx.BadArgument, match=f"127.0.0.1:{server.port}: .*another port="):
            prometheus.serve(port=server.port)
        port = server.port
    with pytest.raises(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        pass


def snapshot(moved_bytes: int, busy_us: int) -> Snapshot:
    stats = {"moved_bytes": moved_bytes, "link_busy_us": busy_us}
    return Snapshot({}, stats, {})


def test_four_transfers_of_1_gb_that_overlap_in_a_second_are_4_gb_per_s() -> None:
    """Two scrapes a second apart: bytes are of all transfers, busy time counts once."""
    by_name = {family.name: family for family in FAMILIES}

    def read(name: str, look: Snapshot) -> float:
        ((_, number),) = by_name[name].samples(look)
        assert isinstance(number, (int, float))
        return number

    # Each saw a quarter of the link: 4 x 1 GB within the one second in which all four were in flight.
    first, second = snapshot(0, 0), snapshot(4 * 10**9, 1_000_000)
    moved = read("kvxfer_moved_bytes", second) - read("kvxfer_moved_bytes", first)
    busy_s = read("kvxfer_link_busy_seconds", second) - read("kvxfer_link_busy_seconds", first)
    assert moved / 1.0 == 4e9
    assert moved / busy_s == 4e9
    assert busy_s == 1.0


def test_the_link_gauge_is_what_moved_in_the_last_second_or_so(
    agents: tuple[Pair, CollectorRegistry],
) -> None:
    both, registry = agents
    began = time.monotonic()
    while time.monotonic() - began < 1.2:
        both.hand_off(pages=16)
    found = settled(registry, lambda f: value(f, "kvxfer_link_bytes_per_second", agent="decode-0") > 0)
    assert 0 < value(found, "kvxfer_link_busy_ratio", agent="decode-0") <= 1
    moved = value(found, "kvxfer_moved_bytes_total", agent="decode-0")
    # Of all that moved, the last second or so had no more than all, and not nothing.
    assert 0 < value(found, "kvxfer_link_bytes_per_second", agent="decode-0") <= moved
    # Later nothing moves, whether or not the thread sleeps.
    eventually(
        lambda: value(samples(registry), "kvxfer_link_bytes_per_second", agent="decode-0") == 0,
        "the gauge comes down",
        seconds=20,
        pause=0.05,
    )


def test_a_forked_child_has_no_agents_to_show(agents: tuple[Pair, CollectorRegistry], tmp_path: Path) -> None:
    _, registry = agents
    out = tmp_path / "child"
    pid = os.fork()
    if pid == 0:
        try:
            out.write_text(repr(samples(registry)))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert out.read_text() == "{}"
