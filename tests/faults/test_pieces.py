"""Rooms of several pieces, stale grants, and storms of first contacts."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
from scene import SUCCESS, endings, hand_off, scene
from two import eventually
from ways import BIG, SMALL, Remote, Way, each_way, tokens

import kvxfer as kx

WIDE = SMALL | {"kv_heads": 4}
FOUR = [{"tp_rank": rank, "tp_size": 4} for rank in range(4)]


@each_way("how", ["it fails", "it dies"], posix=["it dies"])
def test_case_13_one_of_four_pieces_fails(way: Way, how: str) -> None:
    """One failure, a release only after the other three have ended, never a success of three, and no long
    wait.
    """
    pages, dst = 64, list(range(1, 41, 2))
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(Remote(way, WIDE, pages, shard=FOUR[0], name="p0", engine="p", seed=1))
        rest = [
            stack.enter_context(
                Remote(
                    way,
                    WIDE,
                    pages,
                    shard=shard,
                    name=f"p{n + 1}",
                    engine="p",
                    directory=first.address,
                    seed=n + 2,
                )
            )
            for n, shard in enumerate(FOUR[1:])
        ]
        sources = [first, *rest]
        decode = stack.enter_context(Remote(way, WIDE, pages, name="decode", seed=9))
        room = kx.new_room()
        decode.expect(room, dst, tokens=tokens(dst), source=first.address)
        eventually(lambda: decode.state(room) == "Waiting", "the grants are out")
        # Three of four are wholly there, and one of these has said that it was its last word.
        for n in (0, 1, 3):
            sources[n].push(room, range(20), tokens=tokens(dst), last=n == 0)
        for n in (0, 1, 3):
            eventually(lambda n=n: sources[n].stats()["deliveries"] == 0, "delivered")
        began = time.monotonic()
        assert decode.state(room) in ("Waiting", "Transferring")
        assert decode.more() == []
        if how == "it fails":
            # Its engine has other tokens than the rest.
            sources[2].push(room, range(10), tokens=160)
        else:
            sources[2].kill()
        events = decode.end(room)
        assert time.monotonic() - began < 15
        assert endings(events) in ([("Failed", True)], [("Failed", False), ("Released", True)])
        assert events[0]["error"] == ("TokensMismatch" if how == "it fails" else "PeerLost"), decode.last
        for n, source in enumerate(sources):
            if how == "it fails" or n != 2:
                assert [ev["state"] for ev in source.end(room)] in (["Failed"], ["Failed", "Released"]), n
                source.rest()
        assert decode.more() == []
        decode.rest(dst)
        eventually(lambda: decode.stats()["quarantined_pages"] == 0, "counted")


def test_case_16_a_stale_grant_gives_nobody_anothers_answer(way: Way, other: Remote) -> None:
    """Decode cancels and gives the pages to another prompt at once; what is pushed for the first goes
    nowhere, early or late.
    """
    with scene(way, other) as it, Remote(way, SMALL, it.here.pages, name="late", seed=3) as late:
        even = np.arange(10) * 2
        hand_off(late, it.here, even, it.field[:10])
        for _ in range(5):
            stale, fresh = it.room(), it.room()
            it.here.expect(stale, it.field[:10], tokens=160, source=late.address)
            it.here.cancel(stale)
            events = it.is_over(stale, it.field[:10])
            assert events[0]["error"] == "Cancelled"
            late.push(stale, even, tokens=160)
            (theirs,) = late.end(stale)
            assert (theirs["state"], theirs["error"], theirs["released"]) == ("Failed", "Cancelled", True)
            it.here.expect(fresh, it.field[:10], tokens=160, source=other.address)
            late.push(fresh, even, tokens=160, bootstrap_timeout=0.05)
            other.push(fresh, range(10, 20), tokens=160)
            assert endings(it.here.end(fresh)) == SUCCESS
            assert endings(other.end(fresh)) == SUCCESS
            it.give_up(fresh)
            it.here.received(other.seed, range(10, 20), it.field[:10])
            # It was never asked for this one.
            assert late.end(fresh)[0]["error"] == "TransferTimeout"
            it.here.rest()
        late.rest()


def test_case_14_success_is_told_with_the_last_byte(way: Way, big_other: Remote) -> None:
    """Looked at in the moment of the event, page by page from the last one, while another room's bytes are
    on their way.
    """
    with scene(way, big_other, field=100) as it, Remote(way, BIG, it.here.pages, name="big", seed=3) as big:
        first, second = it.field[:50], it.field[50:]
        for n in range(4):
            one, two = it.room(), it.room()
            for room, dst in ((one, first), (two, second)):
                it.here.expect(room, dst, tokens=tokens(dst), source=big.address)
            src = np.roll(np.arange(0, 200, 2), n)
            big.push(one, src[:50], tokens=tokens(first))
            big.push(two, src[50:], tokens=tokens(second))
            for room, dst, pages in ((one, first, src[:50]), (two, second, src[50:])):
                assert endings(it.here.end(room)) == SUCCESS
                it.here.received(big.seed, pages, dst)
                it.give_up(room)
            for room in (one, two):
                assert endings(big.end(room)) == SUCCESS
        big.rest()


@each_way("early", ["grant", "push"], posix=["grant"])
def test_case_14_what_comes_before_the_other_side_knows_the_room_is_kept(
    way: Way, other: Remote, early: str
) -> None:
    with scene(way, other) as it:
        room, src = it.room(), np.arange(20, 40)
        if early == "grant":
            it.here.expect(room, it.field, tokens=tokens(it.field), source=other.address)
            eventually(lambda: other.stats()["outbound"] == 2, "it arrives")
            other.push(room, src, tokens=tokens(it.field))
        else:
            other.push(room, src, tokens=tokens(it.field))
            assert other.state(room) == "Bootstrapping"
            it.here.expect(room, it.field, tokens=tokens(it.field), source=other.address)
        assert endings(it.here.end(room)) == SUCCESS
        assert endings(other.end(room)) == SUCCESS
        it.give_up(room)
        it.here.received(other.seed, src, it.field)


def test_case_24_a_storm_of_first_contacts(way: Way) -> None:
    """240 rooms at once between agents that have never met: all succeed, over one connection for each pair,
    and the next 240 make none.
    """
    rooms_of, agents = 40, 6
    small: dict[str, Any] = SMALL | {"layers": 1}
    pages = rooms_of * agents
    with contextlib.ExitStack() as stack:
        # Slow machines are no lost peers.
        calm: dict[str, Any] = {"heartbeat": 1, "suspect_after": 30, "fence_after": 30}
        prefill = stack.enter_context(Remote(way, small, pages, name="prefill", seed=1, **calm))
        layout = kx.PageLayout(**small)
        decodes = []
        for n in range(agents):
            pool = kx.alloc(layout, kx.Shard(), pages=rooms_of, fabric=way.fabric, ucx_tls=way.tls)
            agent = kx.Agent(f"decode-{n}", layout, kx.Shard(), memory=pool, **(way.options | calm))
            decodes.append(stack.enter_context(agent))
        for round_ in range(2):
            rooms = {kx.new_room(): (n, page) for page in range(rooms_of) for n in range(agents)}
            for room, (n, page) in rooms.items():
                decodes[n].expect(room, [page], tokens=16, source=prefill.address)
            for room, (n, page) in rooms.items():
                prefill.push(room, [n * rooms_of + page], tokens=16)
            for room, (n, _) in rooms.items():
                assert decodes[n].wait(room, timeout=60).state == "Success"
            for room in rooms:
                assert endings(prefill.end(room)) == SUCCESS
            # One session for each pair, whatever the number of rooms; look-ups are over.
            for agent in decodes:
                eventually(lambda a=agent: a.stats()["connections"] == 1, "one connection")
                assert agent.stats()["sessions"] == 1, f"round {round_}"
                assert agent.stats()["failed"] == 0
            stats = prefill.stats()
            assert (stats["sessions"], stats["bad_connections"]) == (agents, 0)
            assert stats["frames_sent"] < 20 * pages * (round_ + 1), "bounded work"


def test_case_24_a_storm_of_agents(way: Way) -> None:
    """240 agents that have never met it call on one at once, each with its own handshake. (Over shm: with
    UCX's workers this would be a test of the machine.)
    """
    if way.fabric != "shm":
        count = 24
    else:
        count = 240
    small: dict[str, Any] = SMALL | {"layers": 1}
    layout = kx.PageLayout(**small)
    calm: dict[str, Any] = {"heartbeat": 5, "suspect_after": 60, "fence_after": 60}
    with (
        Remote(way, small, count, name="prefill", seed=1, **calm) as prefill,
        contextlib.ExitStack() as stack,
    ):
        pool = kx.alloc(layout, kx.Shard(), pages=count, fabric=way.fabric, ucx_tls=way.tls)
        rows = {key: np.asarray(tensor) for key, tensor in pool.tensors.items()}
        agents = [
            stack.enter_context(
                kx.Agent(
                    f"d{n}",
                    layout,
                    kx.Shard(),
                    memory={key: tensor[n : n + 1] for key, tensor in pool.tensors.items()},
                    spin_us=0,
                    **(way.options | calm),
                )
            )
            for n in range(count)
        ]
        rooms = [kx.new_room() for _ in agents]
        for n, room in enumerate(rooms):
            prefill.push(room, [n], tokens=16)
        for agent, room in zip(agents, rooms, strict=True):
            agent.expect(room, [0], tokens=16, source=prefill.address)
        for n, (agent, room) in enumerate(zip(agents, rooms, strict=True)):
            assert agent.wait(room, timeout=60).state == "Success", n
        assert all(endings(prefill.end(room)) == SUCCESS for room in rooms)
        reference = prefill.reference()
        for key, row in rows.items():
            want = np.asarray(reference[key])
            assert np.array_equal(row.view(np.uint16), want.view(np.uint16)), key
        stats = prefill.stats()
        assert (stats["sessions"], stats["failed"]) == (count, 0)
        # At most 128 of one address may shake hands at once; the rest are turned away, and come again.
        assert stats["bad_connections"] == stats["limited_connections"]
