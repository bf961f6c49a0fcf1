"""Two agents of one process hand off over shared memory."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import kvxfer as kx

LAYOUT = kx.PageLayout(layers=3, kv_heads=2, head_dim=16, page_tokens=4, dtype="float16")
ONE = kx.Shard()
PAGES = 64
NOWHERE = "127.0.0.1:9"


class Pair:
    """A prefill and a decode agent with their pools."""

    def __init__(self, **given: Any) -> None:
        self.source, self.target = (kx.alloc(LAYOUT, ONE, pages=PAGES) for _ in range(2))
        for n, view in enumerate(self.source.tensors.values()):
            view[...] = np.random.default_rng(n).random(view.shape)
        self.prefill = kx.Agent("prefill", LAYOUT, ONE, memory=self.source, **given)
        self.decode = kx.Agent("decode", LAYOUT, ONE, memory=self.target, **given)

    def expect(self, pages: Any, **given: Any) -> int:
        room = kx.new_room()
        self.decode.expect(room, pages, source=self.prefill.address, **given)
        return room

    def same(self, src: list[int], dst: list[int]) -> bool:
        views = self.source.tensors
        return all(np.array_equal(views[key][src], self.target.tensors[key][dst]) for key in views)


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    with pair.prefill, pair.decode:
        yield pair


def events(agent: kx.Agent, until: Callable[[list[kx.Event]], bool], seconds: float = 20) -> list[kx.Event]:
    """What `poll` gives until there is enough, by its descriptor."""
    out: list[kx.Event] = []
    end = time.monotonic() + seconds
    while not until(out):
        left = end - time.monotonic()
        assert left > 0, f"not after {seconds} s: {out}"
        select.select([agent], [], [], left)
        out += agent.poll()
    return out


def test_a_hand_off(pair: Pair) -> None:
    room = pair.expect(np.array([9, 3, 30], np.int32), tokens=11)
    assert pair.decode.state(room) in ("Bootstrapping", "Waiting")
    push = pair.prefill.push(room, [4, 8, 1], tokens=11, meta=b"42")
    got = pair.decode.wait(room, 20)
    assert (got.room, got.state, got.released, got.meta, got.error, got.push) == (
        room,
        "Success",
        True,
        b"42",
        None,
        None,
    )
    assert (push.room, push.id > 0) == (room, True)
    assert pair.same([4, 8], [9, 3])
    assert np.array_equal(pair.source.k(2)[1, :, :3], pair.target.k(2)[30, :, :3])
    assert not pair.target.k(2)[30, :, 3].any(), "the twelfth token was not asked for"
    stats = got.stats
    assert stats.bytes == 11 * 3 * 2 * 2 * LAYOUT.row_bytes
    assert stats.writes > 0
    assert 0 < stats.first_write_at_us <= stats.at_us <= time.monotonic_ns() // 1000
    assert "Success" in repr(got)

    # `wait` took nothing from `poll`, and `poll` gives each event once.
    (polled,) = events(pair.decode, bool)
    assert (polled.room, polled.state, polled.meta, polled.stats) == (room, "Success", b"42", stats)
    assert pair.decode.poll() == []
    assert pair.decode.state(room) is None
    with pytest.raises(kx.UnknownRoom):
        pair.decode.wait(room, 1)

    assert pair.prefill.wait(room, 20).released
    assert pair.prefill.state(room) == "Success"
    (sent,) = events(pair.prefill, bool)
    assert (sent.room, sent.state, sent.released, sent.meta) == (room, "Success", True, None)
    # Statistics are a few milliseconds old.
    until = time.monotonic() + 20
    while (succeeded := pair.decode.stats()["succeeded"]) == 0 and time.monotonic() < until:
        pass
    assert succeeded == 1


def test_push_before_grant_in_chunks_and_layers(pair: Pair) -> None:
    room = kx.new_room()
    pair.prefill.open(room)
    for layers in (range(2), (2, 3)):
        pair.prefill.push(room, np.array([5, 6]), tokens=8, layers=layers, last=False)
    pair.prefill.push(room, (7,), start=8, tokens=4, meta=bytearray(b"m"))
    pair.decode.expect(room, [[1, 2, 3]], tokens=12, source=pair.prefill.address)
    assert pair.decode.wait(room, 20).meta == b"m"
    assert pair.same([5, 6, 7], [1, 2, 3])


def test_a_prefix_is_cached(pair: Pair) -> None:
    room = pair.expect([40, 41], tokens=8, start=12)
    pair.prefill.push(room, [10, 11, 12, 13, 14], tokens=20)
    pair.decode.wait(room, 20)
    assert pair.same([13, 14], [40, 41])
    full = pair.expect([], tokens=0, start=20)
    pair.prefill.push(full, [10, 11, 12, 13, 14], tokens=20)
    assert pair.decode.wait(full, 20).stats.bytes == 0
    assert pair.prefill.wait(full, 20).released


def test_failed_rooms_say_why_everywhere(pair: Pair) -> None:
    room = pair.expect([1, PAGES], tokens=8)
    with pytest.raises(kx.PageError, match=str(PAGES)) as caught:
        pair.decode.wait(room, 20)
    assert caught.value.room == room
    first, *rest = events(pair.decode, lambda got: any(e.released for e in got))
    assert (first.state, type(first.error)) == ("Failed", kx.PageError)
    assert str(first.error) == str(caught.value)
    assert first.error is first.error
    assert [e.state for e in rest] == ([] if first.released else ["Released"])
    with pytest.raises(kx.PageError):
        pair.decode.expect(room, [1], tokens=1, source=pair.prefill.address)
    pushed = pair.prefill.push(kx.new_room(), [3, 1 << 50], tokens=8)
    with pytest.raises(kx.PageError):
        pair.prefill.wait(pushed.room, 20)


@pytest.mark.parametrize(
    ("pages", "said"),
    [
        ([2, -1], "-1"),
        ((1 << 32, -1), str(1 << 32)),
        (range(-2, 0), "-2"),
        ([1 << 70, 1], f"{(1 << 63) - 1} or more"),
        ([1, -(1 << 70)], f"{-(1 << 63)} or less"),
        (np.array([1, -7], np.int8), "-7"),
        (np.array([1, -7, 2, -8], np.int32)[::2], None),
        (np.array([1, -7, -9], np.int32), "-7"),
        (np.array([1, 2, -9, 3], np.int64)[::2], "-9"),
        (np.array([1, 1 << 40], np.int64), str(1 << 40)),
        (np.array([1, (1 << 32) - 1], np.uint32), str((1 << 32) - 1)),
        (np.array([1, 1 << 40], np.uint64), str(1 << 40)),
        (np.array([1, (1 << 64) - 1], np.uint64), f"{(1 << 63) - 1} or more"),
    ],
    ids=repr,
)
def test_ids_that_no_page_has_are_named_by_their_value(pair: Pair, pages: Any, said: str | None) -> None:
    """In every form that page lists come in."""
    text = f"page {said} of group 0 is out of range: the group has pages 0 to {PAGES - 1}"
    expected = pair.expect(pages, tokens=8)
    pushed = pair.prefill.push(kx.new_room(), pages, tokens=8).room
    for agent, room in ((pair.decode, expected), (pair.prefill, pushed)):
        if said is None:
            # The odd ones lie beside it.
            assert agent.state(room) != "Failed"
            agent.cancel(room)
            continue
        with pytest.raises(kx.PageError, match=f"room {room}: {text}"):
            agent.wait(room, 20)


def test_an_odd_id_is_named_with_its_group() -> None:
    window = kx.PageLayout(layers=1, kv_heads=2, head_dim=16, page_tokens=8, dtype="float16", kind="fused")
    groups = [LAYOUT, window]
    with kx.Agent("two", groups, ONE, memory=kx.alloc(groups, ONE, pages=[PAGES, 8])) as agent:
        room = kx.new_room()
        agent.expect(room, [[0, 1], np.array([-3])], tokens=8, source=NOWHERE)
        with pytest.raises(kx.PageError, match="page -3 of group 1 is out of range"):
            agent.wait(room, 20)
        pushed = agent.push(kx.new_room(), [[PAGES, 1], [-3]], tokens=8).room
        with pytest.raises(kx.PageError, match=f"page {PAGES} of group 0 is out of range"):
            agent.wait(pushed, 20)


def test_cancel(pair: Pair) -> None:
    room = pair.expect([1, 2], tokens=8)
    pair.decode.cancel(room)
    with pytest.raises(kx.Cancelled):
        pair.decode.wait(room, 20)
    got = events(pair.decode, lambda got: any(e.released for e in got))
    assert got[0].state == "Failed"
    assert [e.released for e in got].count(True) == 1
    # The other side learns of it too.
    pair.prefill.push(room, [1, 2], tokens=8)
    with pytest.raises(kx.KvxferError):
        pair.prefill.wait(room, 20)


def test_retract(pair: Pair) -> None:
    room = kx.new_room()
    push = pair.prefill.push(room, [1, 2], tokens=8)
    pair.prefill.retract(push)
    (event,) = events(pair.prefill, bool)
    assert (event.state, event.released, event.push, event.error) == ("Retracted", True, push, None)
    pair.prefill.push(room, [3, 4], tokens=8)
    pair.decode.expect(room, [5, 6], tokens=8, source=pair.prefill.address)
    pair.decode.wait(room, 20)
    assert pair.same([3, 4], [5, 6])


def test_timeouts_of_a_room() -> None:
    with Pair().decode as decode:
        room = kx.new_room()
        decode.expect(room, [1], tokens=1, source=NOWHERE, bootstrap_timeout=0.05)
        with pytest.raises(kx.TransferTimeout):
            decode.wait(room, 20)


def test_queue_full_loses_nothing() -> None:
    pair = Pair(queue_capacity=2)
    with pair.prefill as prefill, pair.decode:
        accepted: list[int] = []

        def fill() -> None:
            for _ in range(200_000):
                room = kx.new_room()
                prefill.push(room, [1], tokens=1, bootstrap_timeout=0.01)
                accepted.append(room)

        with pytest.raises(kx.QueueFull, match="2 orders"):
            fill()
        ended = events(prefill, lambda got: sum(e.state == "Failed" for e in got) == len(accepted))
        assert {e.room for e in ended} == set(accepted)


def test_wait_lets_other_threads_run_and_poll(pair: Pair) -> None:
    """A room that `poll` takes, and thereby forgets, under a wait still ends that wait."""
    room = pair.expect([1], tokens=4)
    got: list[kx.Event] = []
    waiters = [threading.Thread(target=lambda: got.append(pair.decode.wait(room, 20))) for _ in range(3)]
    for thread in waiters:
        thread.start()
    pair.prefill.push(room, [2], tokens=4)
    polled = events(pair.decode, bool)
    for thread in waiters:
        thread.join(20)
    assert [e.room for e in polled + got] == [room] * 4


def test_signals_end_a_wait(pair: Pair) -> None:
    room = pair.expect([1], tokens=4)
    timer = threading.Timer(0.1, lambda: os.kill(os.getpid(), signal.SIGINT))
    # A shell starts what it puts in the background with the signal ignored, and Python leaves that so.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            pair.decode.wait(room, 20)
        timer.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 5
    assert pair.decode.state(room) is not None


def test_wait_async(pair: Pair) -> None:
    async def main() -> None:
        rooms = [pair.expect([n], tokens=4) for n in range(1, 9)]
        waits = [asyncio.create_task(pair.decode.wait_async(room)) for room in rooms for _ in range(2)]
        waits.append(
            asyncio.create_task(pair.prefill.wait_async(pair.prefill.push(rooms[0], [9], tokens=4).room))
        )
        for room in rooms[1:]:
            await asyncio.sleep(0)
            pair.prefill.push(room, [9], tokens=4)
        got = await asyncio.wait_for(asyncio.gather(*waits), 20)
        assert [e.room for e in got] == [room for room in rooms for _ in range(2)] + [rooms[0]]
        # Nothing is left in the loop, and nothing was taken from `poll`.
        assert not pair.decode._loops
        polled = events(pair.decode, lambda got: len(got) == len(rooms))
        assert sorted(e.room for e in polled) == sorted(rooms)
        with pytest.raises(kx.UnknownRoom):
            await pair.decode.wait_async(rooms[0])

    asyncio.run(main())


def test_wait_async_of_what_fails_and_what_is_cancelled(pair: Pair) -> None:
    async def main() -> None:
        room = pair.expect([1], tokens=4)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pair.decode.wait_async(room), 0.02)
        assert pair.decode.state(room) is not None
        assert not pair.decode._loops
        waits = [asyncio.create_task(pair.decode.wait_async(room)) for _ in range(2)]
        await asyncio.sleep(0)
        waits[0].cancel()
        pair.decode.cancel(room)
        with pytest.raises(kx.Cancelled):
            await asyncio.wait_for(waits[1], 20)
        assert waits[0].cancelled()

    asyncio.run(main())


def test_wait_async_on_several_loops_beside_poll(pair: Pair) -> None:
    rooms = [pair.expect([n], tokens=4) for n in range(1, 5)]
    started, got = threading.Barrier(len(rooms) + 1), []

    async def one(room: int) -> None:
        task = asyncio.create_task(pair.decode.wait_async(room))
        await asyncio.sleep(0)
        started.wait(20)
        got.append((await asyncio.wait_for(task, 20)).room)

    loops = [threading.Thread(target=lambda room=room: asyncio.run(one(room))) for room in rooms]
    for thread in loops:
        thread.start()
    started.wait(20)
    for room in rooms:
        pair.prefill.push(room, [9], tokens=4)
    polled = events(pair.decode, lambda got: len(got) == len(rooms))
    for thread in loops:
        thread.join(20)
    assert sorted(got) == sorted(rooms) == sorted(e.room for e in polled)


def test_closing_ends_every_wait(pair: Pair) -> None:
    async def main() -> None:
        room = pair.expect([1], tokens=4)
        task = asyncio.create_task(pair.decode.wait_async(room))
        await asyncio.sleep(0)
        await asyncio.to_thread(pair.decode.close)
        with pytest.raises((kx.AgentClosed, kx.Cancelled)):
            await asyncio.wait_for(task, 20)
        with pytest.raises((kx.AgentClosed, kx.Cancelled)):
            pair.decode.wait(room)

    asyncio.run(main())


def test_memory_from_anywhere() -> None:
    """Plain numpy memory on one side, a pool's views on the other."""
    arrays = {
        n: tuple(np.random.default_rng(n).random((8, 2, 4, 16)).astype("f2") for _ in "kv") for n in range(3)
    }
    for pairs in arrays.values():
        for array in pairs:
            array.setflags(write=False)
    target = kx.alloc(LAYOUT, ONE, pages=8)
    with (
        kx.Agent("prefill", LAYOUT, ONE, memory=arrays, role="prefill") as prefill,
        kx.Agent(
            "decode", LAYOUT, ONE, memory=[(target.k(n), target.v(n)) for n in range(3)], role="decode"
        ) as decode,
    ):
        room = kx.new_room()
        decode.expect(room, np.arange(8), tokens=32, source=prefill.address)
        prefill.push(room, np.arange(8)[::-1], tokens=32)
        decode.wait(room, 20)
        for n in range(3):
            assert np.array_equal(target.k(n), arrays[n][0][::-1])
            assert np.array_equal(target.v(n), arrays[n][1][::-1])


@pytest.mark.ucx
@pytest.mark.parametrize("pool", ["shm", "ucx"])
def test_over_ucx(pool: str) -> None:
    try:
        source, target = (kx.alloc(LAYOUT, ONE, pages=8, fabric="ucx") for _ in range(2))
    except kx.FabricError as error:
        pytest.skip(str(error))
    if pool == "shm":
        source, target = (kx.alloc(LAYOUT, ONE, pages=8, fabric="shm") for _ in range(2))
    assert source.fabric == pool
    for n, view in enumerate(source.tensors.values()):
        view[...] = np.random.default_rng(n).random(view.shape)
    with (
        kx.Agent("prefill", LAYOUT, ONE, memory=source, fabric="ucx") as prefill,
        kx.Agent("decode", LAYOUT, ONE, memory=target, fabric="ucx") as decode,
    ):
        assert prefill.fabrics == decode.fabrics == ("ucx",)
        room = kx.new_room()
        decode.expect(room, np.arange(8), tokens=32, source=prefill.address)
        prefill.push(room, np.arange(8)[::-1], tokens=32)
        decode.wait(room, 60)
        for key, view in source.tensors.items():
            assert np.array_equal(target.tensors[key], view[::-1])


def test_groups_with_page_lists_of_their_own() -> None:
    window = kx.PageLayout(layers=1, kv_heads=2, head_dim=16, page_tokens=8, dtype="float16", kind="fused")
    groups = [LAYOUT, window]
    source, target = (kx.alloc(groups, ONE, pages=[8, 4]) for _ in range(2))
    for n, view in enumerate(source.tensors.values()):
        view[...] = np.random.default_rng(n).random(view.shape)
    with (
        kx.Agent("prefill", groups, ONE, memory=source) as prefill,
        kx.Agent("decode", groups, ONE, memory=target) as decode,
    ):
        assert prefill.pages == (8, 4)
        room = kx.new_room()
        decode.expect(room, [np.array([7, 6], np.int32), [3]], tokens=8, source=prefill.address)
        for wrong in ([1, 2], np.array([[1, 2], [3, 4]])):
            with pytest.raises(TypeError):
                prefill.push(room, wrong, tokens=8)
        with pytest.raises(kx.BadArgument, match="need 1 pages of 8 tokens in group 1"):
            prefill.push(room, [[1, 2], []], tokens=8)
        prefill.push(room, [[1, 2], (0,)], tokens=8)
        decode.wait(room, 20)
    assert np.array_equal(target.k(2)[[7, 6]], source.k(2)[[1, 2]])
    assert np.array_equal(target.kv(0, group=1)[3], source.kv(0, group=1)[0])
