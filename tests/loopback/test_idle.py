"""Agents that have nothing to do leave the processor alone."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from two import Rank, events, released

import kvxfer as kx

LAYOUT: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 16, "page_tokens": 4, "dtype": "float16"}
WAYS: dict[str, tuple[Any, Any]] = {
    "shm": ("shm", None),
    "tcp": ("ucx", "tcp,self"),
    "posix": ("ucx", "posix,self,tcp"),
}
SECONDS = 10


def cpu_seconds(pid: int) -> dict[str, float]:
    """Processor time of a process's threads: the transfer threads by name, all others together by process."""
    found = dict.fromkeys([str(pid)], 0.0)
    for task in Path(f"/proc/{pid}/task").iterdir():
        name = (task / "comm").read_text().strip()
        name = name if name.startswith("kvx-") else str(pid)
        found[name] = found.get(name, 0.0) + int((task / "schedstat").read_text().split()[0]) / 1e9
    return found


def ucx_is_here() -> bool:
    try:
        kx.alloc(kx.PageLayout(**LAYOUT), kx.Shard(), pages=1, fabric="ucx")
    except kx.FabricError:
        return False
    return True


@pytest.mark.timeout(60)
def test_connected_pairs_use_less_than_a_hundredth_of_a_core() -> None:
    """Pairs over every fabric at once, for the same ten seconds, after each has moved something."""
    layout, shard, pids = kx.PageLayout(**LAYOUT), kx.Shard(), [os.getpid()]
    ways = WAYS if ucx_is_here() else {"shm": WAYS["shm"]}
    with contextlib.ExitStack() as stack:
        for name, (fabric, tls) in ways.items():
            peer = stack.enter_context(
                Rank(LAYOUT, pages=8, name=f"{name}-p", alloc=fabric, fabric=fabric, ucx_tls=tls)
            )
            pool = kx.alloc(layout, shard, pages=8, fabric=fabric, ucx_tls=tls)
            decode = stack.enter_context(
                kx.Agent(f"{name}-d", layout, shard, memory=pool, fabric=fabric, ucx_tls=tls)
            )
            room = kx.new_room()
            decode.expect(room, np.arange(4), tokens=16, source=peer.address)
            peer.push(room, range(4), tokens=16)
            (event,) = events(decode, released(room))
            assert event.state == "Success"
            assert peer.event(room)["state"] == "Success"
            pids.append(peer.pid)
        before = [cpu_seconds(pid) for pid in pids]
        began = time.monotonic()
        time.sleep(SECONDS)  # idle is what is tested
        after, took = [cpu_seconds(pid) for pid in pids], time.monotonic() - began
        used = {
            name: (cpu - old[name]) / took
            for old, new in zip(before, after, strict=True)
            for name, cpu in new.items()
        }
        assert set(used) == {*map(str, pids), *(f"kvx-{name}-{side}" for name in ways for side in "pd")}
        assert max(used.values()) < 0.01, used


def test_an_idle_agent_closes_at_once() -> None:
    """Also one that never spins: it waits neither for its next heartbeat nor for its peers' patience."""
    layout, shard = kx.PageLayout(**LAYOUT), kx.Shard()
    pool = kx.alloc(layout, shard, pages=8, fabric="shm")
    slow: dict[str, Any] = {"fabric": "shm", "heartbeat": 30, "suspect_after": 90, "spin_us": 0}
    with Rank(LAYOUT, pages=8, name="peer", alloc="shm", **slow) as peer:
        agent = kx.Agent("it", layout, shard, memory=pool, **slow)
        room = kx.new_room()
        agent.expect(room, np.arange(4), tokens=16, source=peer.address)
        peer.push(room, range(4), tokens=16)
        assert agent.wait(room, timeout=20).state == "Success"
        time.sleep(0.1)  # it sleeps by then
        began = time.monotonic()
        assert agent.close(timeout=20) == []
        assert time.monotonic() - began < 5
