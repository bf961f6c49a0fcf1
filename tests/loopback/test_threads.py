"""The Python API from many threads at once: every room ends once and comes back once, nobody waits for ever,
and after `close` there are only typed errors.
"""

from __future__ import annotations

import asyncio
import collections
import random
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
from two import Rank, eventually

import kvxfer as kx

LAYOUT = {"layers": 2, "kv_heads": 1, "head_dim": 16, "page_tokens": 16, "dtype": "float16"}
THREADS = 8
# Pages, and so rooms, that one thread has under way at a time; each has its own.
OWN = 4
ROOMS = 40
# For the whole machine to be busy with something else; nothing here waits so long of itself.
LIMIT_S = 90.0


class Seen:
    """What came for each room of one agent, whichever thread polled it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ends: collections.Counter[int] = collections.Counter()
        self.releases: collections.Counter[int] = collections.Counter()
        self.retracted: collections.Counter[int] = collections.Counter()

    def take(self, events: list[kx.Event]) -> None:
        with self.lock:
            for event in events:
                if event.state == "Retracted":
                    self.retracted[event.push.id if event.push else -1] += 1
                    continue
                self.ends[event.room] += event.state != "Released"
                self.releases[event.room] += event.released

    def check(self, rooms: set[int]) -> None:
        """Every one of these rooms has exactly one end and one release, and no other room was heard of."""
        assert set(self.ends) == rooms
        assert set(self.ends.values()) <= {1}, self.ends.most_common(3)
        assert {room: n for room, n in self.releases.items() if n != 1} == {}
        assert set(self.retracted.values()) <= {1}


def at_once(works: list[Callable[[], None]]) -> None:
    """Runs each in a thread of its own; any exception fails the test, and so does one that does not end."""
    failures: list[BaseException] = []
    start = threading.Barrier(len(works))

    def run(work: Callable[[], None]) -> None:
        try:
            start.wait(LIMIT_S)
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + LIMIT_S
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    assert not failures, failures
    assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"


def agent(name: str, **more: Any) -> kx.Agent:
    layout = kx.PageLayout(**LAYOUT)
    pool = kx.alloc(layout, kx.Shard(), pages=THREADS * OWN, fabric="shm")
    return kx.Agent(name, layout, kx.Shard(), memory=pool, fabric="shm", **more)


def patiently(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Calls again while the queue is full, as the error says."""
    while True:
        try:
            return call(*arguments, **named)
        except kx.QueueFull:
            time.sleep(0)


def if_known(call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
    """The same, of a room that may be over by now."""
    try:
        patiently(call, *arguments, **named)
    except (kx.UnknownRoom, kx.Cancelled):
        pass


def hand_over(
    me: int, decode: kx.Agent, prefill: kx.Agent, seen: dict[kx.Agent, Seen], rooms: set[int]
) -> None:
    """One thread's rooms: it expects, pushes, cancels, retracts, waits, looks and polls, on both agents."""
    chance = random.Random(me)
    for turn in range(ROOMS):
        room = kx.new_room()
        rooms.add(room)
        pages = np.array([me * OWN + turn % OWN], np.int32)
        expect = partial(decode.expect, room, pages, tokens=16, source=prefill.address)
        push = partial(prefill.push, room, pages, tokens=16)
        canceller = chance.choice((decode, prefill))
        # At once, when the other side has been told too, or not at all.
        when = chance.choice(("never", "never", "never", "first", "second"))
        if chance.random() < 0.5:
            patiently(expect)
            if when == "first":
                if_known(canceller.cancel, room)
            if_known(push)
        else:
            handle = patiently(push)
            if when == "first":
                if_known(canceller.cancel, room)
            elif chance.random() < 0.3:
                # Taken back before the other side knew of it, and delivered anew.
                if_known(prefill.retract, handle)
                if_known(push)
            if_known(expect)
        assert prefill.state(room) in (None, "Bootstrapping", "Waiting", "Transferring", "Success", "Failed")
        if when == "second":
            if_known(canceller.cancel, room)
        for side in (decode, prefill):
            assert side.stats()["quarantined_pages"] >= 0
            try:
                event = side.wait(room, LIMIT_S)
                assert (event.room, event.state) == (room, "Success")
            except (kx.Cancelled, kx.UnknownRoom):
                # Cancelled by one of the two, or polled by another thread before this one began to wait.
                pass
        # Its pages may be used again once both have said so, whichever thread was told.
        while not all(seen[side].releases[room] for side in (decode, prefill)):
            for side in (decode, prefill):
                seen[side].take(side.poll())
            time.sleep(0)


@contextmanager
def pair(**more: Any) -> Iterator[tuple[kx.Agent, kx.Agent]]:
    with agent("prefill-0", **more) as prefill, agent("decode-0", **more) as decode:
        yield decode, prefill


def nothing_is_left(side: kx.Agent) -> bool:
    stats = side.stats()
    return not any(
        stats[name] for name in ("inbound", "outbound", "granted_pages", "deliveries", "queue_depth")
    )


@pytest.mark.parametrize("queue_capacity", [4096, 2])
def test_eight_threads_on_two_agents(queue_capacity: int) -> None:
    with pair(queue_capacity=queue_capacity) as (decode, prefill):
        seen = {decode: Seen(), prefill: Seen()}
        rooms: set[int] = set()
        at_once([partial(hand_over, me, decode, prefill, seen, rooms) for me in range(THREADS)])
        assert len(rooms) == THREADS * ROOMS
        for side in (decode, prefill):
            seen[side].check(rooms)
            eventually(partial(nothing_is_left, side), "all tables are empty")
            assert side.poll() == []
            assert not select.select([side], [], [], 0)[0], "readable for nothing"


def test_eight_threads_on_two_processes() -> None:
    """The other process pushes what it is told to; all eight threads share the agent here."""
    with Rank(LAYOUT, pages=THREADS * OWN, alloc="shm", fabric="shm", role="prefill") as prefill:
        with agent("decode-0") as decode:
            seen, rooms, pipe = Seen(), set(), threading.Lock()

            def work(me: int) -> None:
                chance = random.Random(me)
                for turn in range(ROOMS // 2):
                    room = kx.new_room()
                    rooms.add(room)
                    pages = np.array([me * OWN + turn % OWN], np.int32)
                    decode.expect(room, pages, tokens=16, source=prefill.address)
                    with pipe:
                        prefill.push(room, pages, tokens=16)
                    if chance.random() < 0.2:
                        if_known(decode.cancel, room)
                    try:
                        assert decode.wait(room, LIMIT_S).state == "Success"
                    except (kx.Cancelled, kx.UnknownRoom):
                        pass
                    while not seen.releases[room]:
                        select.select([decode], [], [], 0.01)
                        seen.take(decode.poll())

            at_once([partial(work, me) for me in range(THREADS)])
            seen.check(rooms)
            for room in rooms:
                found = prefill.end(room)
                assert [event["state"] for event in found if event["state"] != "Released"] in (
                    ["Success"],
                    ["Failed"],
                )
                assert sum(event["released"] for event in found) == 1
            assert prefill.more() == []


def test_threads_that_only_wait_are_woken() -> None:
    """Waits in threads and in an event loop, begun before the end and after it, take nothing from `poll`."""
    with pair() as (decode, prefill):
        room = kx.new_room()
        woken: list[str] = []
        pages = np.array([0], np.int32)
        decode.expect(room, pages, tokens=16, source=prefill.address)

        def wait() -> None:
            woken.append(decode.wait(room, LIMIT_S).state)

        def wait_async() -> None:
            async def both() -> None:
                woken.extend(
                    e.state for e in await asyncio.gather(*(decode.wait_async(room) for _ in range(2)))
                )

            asyncio.run(both())

        def push() -> None:
            prefill.push(room, pages, tokens=16)

        at_once([wait, wait, wait, wait_async, wait_async, wait_async, push])
        assert woken == ["Success"] * 9
        assert [event.state for event in decode.poll()] == ["Success"]


@pytest.mark.parametrize("run", range(3))
def test_close_while_seven_threads_call(run: int) -> None:
    """`close` ends every wait, whoever calls afterwards is told so by a typed error, and every room that was
    taken has ended once.
    """
    prefill, decode = agent("prefill-0"), agent("decode-0")
    seen = {decode: Seen(), prefill: Seen()}
    begun: dict[kx.Agent, set[int]] = {decode: set(), prefill: set()}
    closing = threading.Event()

    def call(me: int) -> None:
        pages = np.array([me * OWN], np.int32)
        for turn in range(10_000):
            room = kx.new_room()
            try:
                patiently(decode.expect, room, pages, tokens=16, source=prefill.address)
                begun[decode].add(room)
                patiently(prefill.push, room, pages, tokens=16)
                begun[prefill].add(room)
                if turn % 3 == me % 3:
                    decode.cancel(room)
                decode.wait(room, LIMIT_S)
                prefill.wait(room, LIMIT_S)
            except kx.AgentClosed:
                return
            except (kx.Cancelled, kx.UnknownRoom, kx.PeerLost):
                pass
            finally:
                for side in (decode, prefill):
                    seen[side].take(side.poll())
            if turn == 2 + run:
                closing.set()
        raise AssertionError("the agents were never closed")

    def close() -> None:
        assert closing.wait(LIMIT_S)
        for side in (decode, prefill):
            assert side.close(timeout=LIMIT_S) == []
            assert side.close() == []

    at_once([*(partial(call, me) for me in range(THREADS - 1)), close])
    for side in (decode, prefill):
        seen[side].take(side.poll())
        room, new = next(iter(begun[side])), kx.new_room()
        for after in (
            partial(side.push, new, [0], tokens=16),
            partial(side.expect, new, [0], tokens=16, source=prefill.address),
            partial(side.open, new),
            partial(side.cancel, room),
        ):
            with pytest.raises(kx.AgentClosed):
                after()
        assert side.poll() == []
        assert set(seen[side].ends) == begun[side]
        assert set(seen[side].ends.values()) == {1}
        # What was still under way when the thread stopped has its pages back by `close` itself.
        assert set(seen[side].releases.values()) <= {0, 1}


def test_pushes_at_once_for_one_room_end_it_once() -> None:
    """Chunks from several threads: whichever is the last, the room has one end, also if one came too late."""
    with pair() as (decode, prefill):
        seen = {decode: Seen(), prefill: Seen()}
        rooms = set()
        for _ in range(25):
            room = kx.new_room()
            rooms.add(room)
            decode.expect(room, np.array([0], np.int32), tokens=16, source=prefill.address)

            def push(room: int = room) -> None:
                try:
                    prefill.push(room, np.array([0], np.int32), tokens=16)
                except (kx.BadArgument, kx.RoomInUse, kx.TokensMismatch):
                    pass  # It comes too late, which is what it is told.

            at_once([push] * 3)
            for side in (decode, prefill):
                try:
                    side.wait(room, LIMIT_S)
                except kx.TokensMismatch:
                    pass  # Two of them were the last.
            for side in (decode, prefill):
                while not seen[side].releases[room]:
                    select.select([side], [], [], 1)
                    seen[side].take(side.poll())
        for side in (decode, prefill):
            eventually(partial(nothing_is_left, side), "no room is begun anew")
            seen[side].take(side.poll())
            seen[side].check(rooms)
