"""What single calls from Python cost, by pytest-benchmark.

    python -m pytest benches --benchmark-json=calls.json

`kvxfer bench post` has the percentiles; these are for comparing two builds with `benches/compare.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvxfer as kx

LAYOUT = kx.PageLayout(layers=1, kv_heads=1, head_dim=128, page_tokens=16, dtype="bfloat16")
PAGES = 2000
BATCH = 50


@pytest.fixture(scope="module")
def agent() -> Iterator[kx.Agent]:
    pool = kx.alloc(LAYOUT, kx.Shard(), pages=PAGES, fabric="shm")
    with kx.Agent("bench", LAYOUT, kx.Shard(), memory=pool, fabric="shm") as made:
        yield made


def in_rooms(benchmark: Any, agent: kx.Agent, call: Any) -> None:
    """Times `call(room)`; each room is cancelled, and waited for, outside of the clock."""
    rooms: list[int] = []

    def prepare() -> tuple[tuple[int], dict[str, Any]]:
        for room in rooms:
            agent.cancel(room)
        left = len(rooms)
        while left:
            left -= sum(event.released for event in agent.poll())
        rooms[:] = [kx.new_room()]
        return (rooms[0],), {}

    benchmark.pedantic(call, setup=prepare, rounds=10 * BATCH)
    prepare()


@pytest.mark.parametrize("pages", [125, PAGES])
@pytest.mark.parametrize("kind", ["array", "list"])
def test_push(benchmark: Any, agent: kx.Agent, pages: int, kind: str) -> None:
    ids: Any = np.random.default_rng(1).permutation(PAGES)[:pages].astype(np.int32)
    if kind == "list":
        ids = ids.tolist()
    in_rooms(benchmark, agent, lambda room: agent.push(room, ids, tokens=16 * pages))


@pytest.mark.parametrize("pages", [125, PAGES])
def test_expect(benchmark: Any, agent: kx.Agent, pages: int) -> None:
    ids = np.random.default_rng(1).permutation(PAGES)[:pages].astype(np.int32)
    # Nobody listens there: the room waits for a contact until it is cancelled.
    in_rooms(benchmark, agent, lambda room: agent.expect(room, ids, tokens=16 * pages, source="127.0.0.1:9"))


def test_poll_with_nothing_to_say(benchmark: Any, agent: kx.Agent) -> None:
    left = True
    while left:
        left = bool(agent.poll())
    assert benchmark(agent.poll) == []


def test_state(benchmark: Any, agent: kx.Agent) -> None:
    room = kx.new_room()
    agent.open(room)
    assert benchmark(agent.state, room) == "Bootstrapping"
    agent.cancel(room)


def test_new_room(benchmark: Any) -> None:
    assert 0 <= benchmark(kx.new_room) < 2**63


def test_plan_transfer(benchmark: Any) -> None:
    layout = kx.PageLayout(layers=64, kv_heads=8, head_dim=128, page_tokens=16)
    src, dst = (np.random.default_rng(seed).permutation(512)[:125].astype(np.int32) for seed in (1, 2))

    def plan() -> kx.Plan:
        return kx.plan_transfer(
            (layout, kx.Shard(1, 8)), (layout, kx.Shard(0, 4)), src_pages=src, dst_pages=dst, tokens=2000
        )

    assert len(benchmark(plan)) == 128 * 125
