"""Who may be what, and in which pieces and what order pages may come."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from two import Rank, digest, events, eventually, fill, released

import kvxfer as kx

LAYOUT: dict[str, Any] = {"layers": 3, "kv_heads": 4, "head_dim": 16, "page_tokens": 4, "dtype": "float16"}
FORM = kx.PageLayout(**LAYOUT)
PAGES = 64
OK = [("Success", True)]


@contextlib.contextmanager
def local(
    name: str, seed: int, shard: kx.Shard | None = None, **agent: Any
) -> Iterator[tuple[kx.Agent, kx.Pool]]:
    """An agent of this process and its pool."""
    shard = shard or kx.Shard()
    pool = kx.alloc(FORM, shard, pages=PAGES, fabric="shm")
    fill(pool, seed)
    with kx.Agent(name, FORM, shard, memory=pool, fabric="shm", **agent) as made:
        yield made, pool


def child(name: str = "prefill", **given: Any) -> Rank:
    return Rank(LAYOUT, pages=PAGES, alloc="shm", name=name, fabric="shm", **given)


def states(found: list[Any]) -> list[tuple[str, bool]]:
    """Of events of either kind."""
    return [
        (ev["state"], ev["released"]) if isinstance(ev, dict) else (ev.state, ev.released) for ev in found
    ]


def ids(rng: np.random.Generator, count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return rng.permutation(PAGES)[:count].astype(np.int32)


def whole(pool: kx.Pool | Rank) -> dict[tuple[int, int, str], Any]:
    """A copy of all that a pool holds, as integers: chance bytes of a float may be no number."""
    tensors = pool.reference() if isinstance(pool, Rank) else pool.tensors
    return {key: np.array(tensor).view(np.uint16) for key, tensor in tensors.items()}


def test_two_agents_serve_each_other_at_once() -> None:
    rng = np.random.default_rng(1)
    with child("b", seed=2) as b, local("a", 1) as (a, pool):
        mine = whole(pool)
        theirs = whole(b)
        rooms = []
        for n in range(20):
            # Each reads from the lower half of its pages and gets the upper half.
            src, dst = rng.permutation(32)[:8], 32 + rng.permutation(32)[:8]
            to_a, to_b = kx.new_room(), kx.new_room()
            steps: list[Callable[[], object]] = [
                functools.partial(a.expect, to_a, dst, tokens=32, source=b.address),
                functools.partial(b.push, to_a, src, tokens=32),
                functools.partial(b.expect, to_b, dst, tokens=32, source=a.address),
                functools.partial(a.push, to_b, src, tokens=32),
            ]
            for i in rng.permutation(4):
                steps[i]()
            got = events(a, lambda got: len(got) == 2)
            assert {(ev.room, ev.state, ev.released) for ev in got} == {
                (to_a, "Success", True),
                (to_b, "Success", True),
            }
            for room in (to_a, to_b):
                assert states(b.end(room)) == OK
            for key, tensor in whole(pool).items():
                assert np.array_equal(tensor[dst], theirs[key][src]), (n, key)
            assert b.digest(dst) == digest(pool.tensors, src.tolist())
            rooms += [to_a, to_b]
        for key, tensor in whole(pool).items():
            assert np.array_equal(tensor[:32], mine[key][:32])
        assert a.poll() == []
        assert b.more() == []
        counted = len(rooms), len(rooms)
        eventually(lambda: (a.stats()["succeeded"], b.stats()["succeeded"]) == counted, "counted")


def test_two_prefill_ranks_and_one_decode_rank() -> None:
    """TP2 to TP1: each rank gives its half of the heads; the directory of the first names the second."""
    rng = np.random.default_rng(2)
    split = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(child("p0", shard=split[0], seed=10, engine="prefill"))
        second = stack.enter_context(
            child("p1", shard=split[1], seed=11, engine="prefill", directory=first.address)
        )
        decode, pool = stack.enter_context(local("decode", 1))
        before = whole(pool)
        sources = [whole(first), whole(second)]
        for order in ((first, second), (second, first)):
            room, dst = kx.new_room(), ids(rng, 10)
            src = {first: ids(rng, 10), second: ids(rng, 10)}
            order[0].push(room, src[order[0]], tokens=40, meta="from the one" if order[0] is first else None)
            decode.expect(room, dst, tokens=40, source=first.address)
            with pytest.raises(kx.WaitTimeout):
                decode.wait(room, 0.05)  # half of it is not all of it
            order[1].push(room, src[order[1]], tokens=40, meta="from the one" if order[1] is first else None)
            (event,) = events(decode, released(room))
            assert (event.state, event.meta) == ("Success", b"from the one")
            assert event.stats.bytes == 40 * 3 * 2 * 4 * 16 * 2
            for rank in order:
                assert states(rank.end(room)) == OK
            for key, tensor in whole(pool).items():
                halves = [sources[n][key][src[rank]] for n, rank in enumerate((first, second))]
                assert np.array_equal(tensor[dst], np.concatenate(halves, axis=1)), key
                before[key][dst] = tensor[dst]
                assert np.array_equal(tensor, before[key]), f"{key} changed outside the grant"
        # What fails at one rank fails once, and is released when both have drained.
        room = kx.new_room()
        decode.expect(room, [1, 2], tokens=8, source=first.address)
        first.push(room, [3, 4], tokens=8)
        second.push(room, [3], start=4, tokens=4)
        got = events(decode, released(room))
        assert states(got) in ([("Failed", True)], [("Failed", False), ("Released", True)])
        assert isinstance(got[0].error, kx.TokensMismatch)
        for rank in (first, second):
            assert states(rank.end(room))[0][0] == "Failed"


def test_one_prefill_rank_and_two_decode_ranks() -> None:
    """TP1 to TP2: each rank gets its half of the heads, and the source's pages are free after both."""
    rng = np.random.default_rng(3)
    with contextlib.ExitStack() as stack:
        prefill, pool = stack.enter_context(local("prefill", 5))
        ranks = [
            stack.enter_context(
                child(f"d{n}", shard={"tp_rank": n, "tp_size": 2}, seed=20 + n, engine="decode")
            )
            for n in range(2)
        ]
        source = pool.tensors
        for push_first in (False, True):
            room, src = kx.new_room(), ids(rng, 10)
            dst = [ids(rng, 10), ids(rng, 10)]
            if push_first:
                prefill.push(room, src, tokens=40, meta=b"hello")
            ranks[0].expect(room, dst[0], tokens=40, source=prefill.address)
            if push_first:
                assert states(ranks[0].end(room)) == OK
                assert prefill.poll() == [], "the other rank still has to read"
            else:
                prefill.push(room, src, tokens=40, meta=b"hello")
            ranks[1].expect(room, dst[1], tokens=40, source=prefill.address)
            (sent,) = events(prefill, released(room))
            assert (sent.state, sent.released) == ("Success", True)
            for n, rank in enumerate(ranks):
                if not (push_first and n == 0):
                    assert states(rank.end(room)) == OK
                assert rank.last["meta"] == "hello"
                half = {key: np.array(tensor)[:, 2 * n : 2 * n + 2] for key, tensor in source.items()}
                assert rank.digest(dst[n]) == digest(half, src.tolist())


@pytest.fixture
def decode() -> Iterator[tuple[kx.Agent, kx.Pool]]:
    with local("decode", 1) as made:
        yield made


@pytest.mark.parametrize("late", [False, True], ids=["grant first", "grant late"])
def test_chunks_of_tokens_and_ranges_of_layers(decode: tuple[kx.Agent, kx.Pool], late: bool) -> None:
    """In any order, with chunks that end within a page; the last push carries the metadata."""
    agent, pool = decode
    rng = np.random.default_rng(4)
    pieces = [
        (start, tokens, layers)
        for start, tokens in ((0, 10), (10, 7), (17, 20))
        for layers in ((0, 2), (2, 3))
    ]
    with child() as prefill:
        reference = whole(prefill)
        for _ in range(4):
            room, src, dst, before = kx.new_room(), ids(rng, 10), ids(rng, 10), whole(pool)
            grant = functools.partial(agent.expect, room, dst, tokens=37, source=prefill.address)
            if not late:
                grant()
            order = [pieces[i] for i in rng.permutation(len(pieces))]
            for n, (start, tokens, layers) in enumerate(order):
                last = n == len(order) - 1
                pages = src[start // 4 : -(-(start + tokens) // 4)]
                # The first page of a list holds `start`, wherever in the page that is.
                prefill.push(
                    room,
                    pages,
                    start=start,
                    tokens=tokens,
                    layers=layers,
                    last=last,
                    meta="m" if last else None,
                )
            if late:
                assert agent.state(room) is None
                grant()
            (event,) = events(agent, released(room))
            assert (event.state, event.meta) == ("Success", b"m"), event
            assert states(prefill.end(room)) == OK
            now = whole(pool)
            for key in now:
                assert np.array_equal(now[key][dst[:9]], reference[key][src[:9]]), key
                assert np.array_equal(now[key][dst[9], :, :1], reference[key][src[9], :, :1]), key
                before[key][dst[:9]] = now[key][dst[:9]]
                before[key][dst[9], :, :1] = now[key][dst[9], :, :1]
                assert np.array_equal(now[key], before[key]), f"{key} changed outside the tokens"


def test_the_decode_server_is_chosen_after_prefill() -> None:
    """Late binding: pushes wait for whoever grants, here two agents that the source has never met."""
    with child() as prefill, local("one", 1) as (one, first), local("two", 2) as (two, second):
        rooms = [kx.new_room() for _ in range(10)]
        for n, room in enumerate(rooms):
            prefill.push(room, [n, n + 10], tokens=8, meta=str(n))
        assert prefill.more() == []
        for n, room in enumerate(rooms):
            agent, pool = ((one, first), (two, second))[n % 2]
            agent.expect(room, [20 + n, 40 + n], tokens=8, source=prefill.address)
            (event,) = events(agent, released(room))
            assert (event.state, event.meta) == ("Success", str(n).encode())
            assert digest(pool.tensors, [20 + n, 40 + n]) == prefill.digest([n, n + 10])
            assert states(prefill.end(room)) == OK


@pytest.mark.parametrize("granted", [False, True], ids=["before the grant", "after the grant"])
def test_preemption(decode: tuple[kx.Agent, kx.Pool], granted: bool) -> None:
    """Case 10: pages are taken back, used for something else, and pushed again from other pages."""
    agent, pool = decode
    with child() as prefill:
        room, dst = kx.new_room(), [30, 31, 32]
        if granted:
            agent.expect(room, dst, tokens=12, source=prefill.address)
            eventually(lambda: agent.state(room) == "Waiting", "the grant is out")
        gone = prefill.push(room, [3, 4, 5], tokens=12, last=False)
        prefill.order(retract=gone)
        assert prefill.event(room) == {"room": room, "state": "Retracted", "released": True, "error": None}
        assert prefill.last["push"] == gone
        prefill.push(room, [9, 10, 11], tokens=12, meta="")
        if not granted:
            agent.expect(room, dst, tokens=12, source=prefill.address)
        (event,) = events(agent, released(room))
        assert (event.state, event.meta) == ("Success", b"")
        assert digest(pool.tensors, dst) == prefill.digest([9, 10, 11])
        assert states(prefill.end(room)) == OK
        assert prefill.more() == []


@pytest.mark.parametrize("size", [0, 1, 65_536])
def test_metadata(decode: tuple[kx.Agent, kx.Pool], size: int) -> None:
    agent, _ = decode
    meta = ("0123456789abcdef" * 4096)[:size]
    with child() as prefill:
        room = kx.new_room()
        agent.expect(room, [1], tokens=4, source=prefill.address)
        prefill.push(room, [1], tokens=4, meta=meta)
        (event,) = events(agent, released(room))
        assert (event.state, event.meta) == ("Success", meta.encode())
        bare = kx.new_room()
        agent.expect(bare, [1], tokens=4, source=prefill.address)
        prefill.push(bare, [1], tokens=4)
        (event,) = events(agent, released(bare))
        assert (event.state, event.meta) == ("Success", None)


def test_engine_memory_is_read_across_processes(decode: tuple[kx.Agent, kx.Pool]) -> None:
    """Memory that kvxfer did not allocate, in another process."""
    agent, pool = decode
    with child(engine_memory=True) as prefill:
        room = kx.new_room()
        agent.expect(room, [5, 1, 63], tokens=12, source=prefill.address)
        prefill.push(room, [0, 9, 4], tokens=12)
        (event,) = events(agent, released(room))
        assert event.state == "Success", event.error
        assert digest(pool.tensors, [5, 1, 63]) == prefill.digest([0, 9, 4])


def test_a_prefix_that_decode_has(decode: tuple[kx.Agent, kx.Pool]) -> None:
    """Cases 8 and 9: only what is missing crosses; if nothing is, both sides still end once."""
    agent, pool = decode
    with child() as prefill:
        room = kx.new_room()
        agent.expect(room, [7, 9], tokens=8, start=12, source=prefill.address)
        prefill.push(room, [10, 11, 12, 13, 14], tokens=20)
        (event,) = events(agent, released(room))
        assert event.state == "Success"
        assert digest(pool.tensors, [7, 9]) == prefill.digest([13, 14])
        assert states(prefill.end(room)) == OK
        full = kx.new_room()
        agent.expect(full, [], tokens=0, start=20, source=prefill.address)
        prefill.push(full, [10, 11, 12, 13, 14], tokens=20, meta="all there")
        (event,) = events(agent, released(full))
        assert (event.state, event.stats.writes, event.meta) == ("Success", 0, b"all there")
        assert states(prefill.end(full)) == OK
