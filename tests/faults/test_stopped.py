"""SIGSTOP and SIGCONT of either side: for less and for more than any timeout, and while one closes."""

from __future__ import annotations

import time
from typing import Any

import pytest
from scene import SUCCESS, Scene, endings, hand_off, nothing_happens, scene, works_again
from two import eventually
from ways import BIG, POSIX, QUICK, SHM, SMALL, TCP, Remote, Way, each_way, params, tokens

import kvxfer as kx

# A silent session is made anew soon, and no peer is given up.
PATIENT: dict[str, Any] = QUICK | {"suspect_after": 1.0, "fence_after": 60}
# Nothing is even suspected.
CALM: dict[str, Any] = {"heartbeat": 1, "suspect_after": 60, "fence_after": 60}


def sleeper(way: Way, it: Scene, **given: Any) -> Remote:
    return Remote(way, it.other.shape, it.here.pages, name="sleeper", seed=1, **given)


@each_way(
    "side, seconds",
    [(side, seconds) for side in ("prefill", "decode") for seconds in (0.15, 1.6)],
    posix=[("prefill", 1.6)],
)
def test_a_pause_costs_nothing_but_time(way: Way, big_other: Remote, side: str, seconds: float) -> None:
    """In the middle of a write, and no room fails of it; a session that was given up (after a second) is made
    anew.
    """
    with scene(way, big_other, field=100, **PATIENT) as it, sleeper(way, it, **PATIENT) as peer:
        room, sessions = it.room(), it.here.stats()["sessions"]
        if side == "prefill":
            it.here.expect(room, it.field, tokens=tokens(it.field), source=peer.address)
            eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
            peer.push(room, it.source, tokens=tokens(it.field), last=False, layers=(0, 31))
            assert it.here.arrived(it.field, 10)
        else:
            peer.expect(room, it.field, tokens=tokens(it.field), source=it.here.address)
            it.here.push(room, it.source, tokens=tokens(it.field), last=False, layers=(0, 31))
            eventually(lambda: it.here.state(room) == "Transferring", "bytes flow", pause=0)
        peer.stop()
        if seconds > 1:
            eventually(lambda: it.here.stats()["connections"] < 4, "the session is given up")
        nothing_happens(seconds, lambda: it.here.state(room) in ("Waiting", "Transferring"))
        peer.go_on()
        source, target = (peer, it.here) if side == "prefill" else (it.here, peer)
        source.push(room, it.source, tokens=tokens(it.field), layers=(31, 32))
        assert endings(it.here.end(room)) == SUCCESS, it.here.last
        assert endings(peer.end(room)) == SUCCESS, peer.last
        it.give_up(room)
        target.received(source.seed, it.source, it.field)
        peer.rest()
        assert it.here.stats()["fences"] == 0
        assert (it.here.stats()["sessions"] > sessions + 1) == (seconds > 1)


def test_prefill_is_stopped_in_mid_write_beyond_the_fence(way: Way, big_other: Remote) -> None:
    """It goes on writing when it wakes up: until it has answered that is only to pages in quarantine."""
    with scene(way, big_other, field=100) as it, sleeper(way, it) as peer:
        room, dst = it.room(), it.field
        it.here.expect(room, dst, tokens=tokens(dst), source=peer.address)
        eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
        peer.push(room, it.source, tokens=tokens(dst), last=False)
        assert it.here.arrived(dst, 10)
        peer.stop()
        failure = it.here.first(room)
        assert (failure["state"], failure["error"]) == ("Failed", "PeerLost")
        if way.fences:
            assert failure["released"] or it.here.end(room)
        else:
            assert not failure["released"]
            eventually(lambda: it.here.stats()["quarantined_pages"] == len(dst), "quarantine")
            nothing_happens(0.3, lambda: it.here.stats()["quarantined_pages"] == len(dst))
            it.here.rest(dst)
            peer.go_on()
            assert [ev["state"] for ev in it.here.end(room)] == ["Released"]
        it.here.settle(dst)
        peer.go_on()
        it.give_up(room)
        assert peer.end(room)[0]["state"] == "Failed"
        works_again(it, peer)
        peer.rest()


def test_decode_is_stopped_in_mid_write_beyond_the_fence(way: Way, big_other: Remote) -> None:
    """The source's pages are free once its own writes have ended; what the sleeper has of them, it gives up
    by itself.
    """
    with scene(way, big_other, field=100) as it, sleeper(way, it) as peer:
        room, src = it.room(), it.source
        peer.expect(room, it.field, tokens=tokens(src), source=it.here.address)
        it.here.push(room, src, tokens=tokens(src), last=False)
        eventually(lambda: it.here.state(room) == "Transferring", "bytes flow", pause=0)
        peer.stop()
        events = it.here.end(room)
        it.give_up(room)
        assert (events[0]["state"], events[0]["error"]) == ("Failed", "PeerLost")
        peer.go_on()
        theirs = peer.end(room)
        assert (theirs[0]["state"], theirs[0]["error"]) == ("Failed", "PeerLost")
        peer.rest(it.field)
        peer.settle(it.field)
        # The other way round first: decode opens sessions, so this is how it hears that it was given up.
        hand_off(peer, it.here, [0, 2, 4], it.field[:3])
        peer.rest()


@pytest.mark.parametrize(
    ("way", "ground"),
    [(SHM, "fence")]
    + [
        pytest.param(way, ground, marks=pytest.mark.ucx)
        for way in (TCP, POSIX)
        for ground in ("answer", "death", "evict")
    ],
    indirect=["way"],
    ids=lambda given: given.name if isinstance(given, Way) else given,
)
def test_case_12_a_sender_that_never_answers(way: Way, other: Remote, ground: str) -> None:
    """Pages come back by answer, fence, death or the operator's word, not by a timeout; until then they are
    counted, and past the limit the agent takes no room of anybody, and says why.
    """
    with scene(way, other, quarantine_limit=10) as it, sleeper(way, it) as peer:
        room, dst = it.room(), it.field
        it.here.expect(room, dst, tokens=tokens(dst), source=peer.address, timeout=0.4)
        eventually(lambda: it.here.state(room) == "Waiting", "the grant is out", pause=0)
        peer.stop()
        failure = it.here.first(room)
        assert (failure["state"], failure["error"]) == ("Failed", "TransferTimeout")
        if ground == "fence":
            it.here.settle(dst)
            assert failure["released"]
            it.give_up(room)
            peer.go_on()
            return
        assert not failure["released"]
        eventually(lambda: it.here.stats()["quarantined_pages"] == len(dst), "counted")
        refused = it.room()
        it.here.expect(refused, it.beside + 5, tokens=tokens(it.beside), source=other.address)
        (no,) = it.here.end(refused)
        it.give_up(refused)
        assert (no["error"], no["released"]) == ("Unhealthy", True)
        assert str(len(dst)) in it.here.last["text"]
        eventually(lambda: it.here.stats()["fences"] > 0, "the peer is given up")
        nothing_happens(0.3, lambda: it.here.stats()["quarantined_pages"] == len(dst))
        if ground == "answer":
            peer.go_on()
        elif ground == "death":
            peer.child.kill()
        else:
            it.here.evict("sleeper")
        (last,) = it.here.end(room, way.death_s)
        it.here.settle(dst)
        it.give_up(room)
        assert (last["state"], last["released"]) == ("Released", True)
        if ground != "answer":
            peer.kill()


@pytest.mark.parametrize("way", params(TCP, POSIX), indirect=True)
def test_a_rooms_timeout_releases_nothing(way: Way, other: Remote) -> None:
    """Case 12 with a peer of which nobody suspects anything: its answer is what releases, whenever it
    comes.
    """
    with scene(way, other, **CALM) as it, sleeper(way, it, **CALM) as peer:
        room, dst = it.room(), it.field
        it.here.expect(room, dst, tokens=tokens(dst), source=peer.address, timeout=0.4)
        eventually(lambda: it.here.state(room) == "Waiting", "the grant is out", pause=0)
        peer.stop()
        failure = it.here.first(room)
        assert (failure["state"], failure["error"], failure["released"]) == (
            "Failed",
            "TransferTimeout",
            False,
        )
        eventually(lambda: it.here.stats()["quarantined_pages"] == len(dst), "counted")
        nothing_happens(0.5, lambda: it.here.stats()["quarantined_pages"] == len(dst))
        assert it.here.more() == []
        peer.go_on()
        assert endings(it.here.end(room)) == [("Released", True)]
        it.give_up(room)
        works_again(it, peer)


def test_a_source_is_stopped_while_the_receiver_closes(way: Way) -> None:
    """`close` ends in time, says what is still out, and keeps that memory: what is written later harms
    nobody.
    """
    with (
        Remote(way, BIG, 64, name="source", seed=1) as source,
        Remote(way, BIG, 64, name="receiver", seed=2) as receiver,
    ):
        room, dst = kx.new_room(), [1, 3, 5, 7, 9]
        receiver.expect(room, dst, tokens=tokens(dst), source=source.address)
        eventually(lambda: receiver.state(room) == "Waiting", "the grant is out")
        source.push(room, range(5), tokens=tokens(dst), last=False)
        assert receiver.arrived(dst, 10)
        source.stop()
        began = time.monotonic()
        left, _ = receiver.close()
        assert time.monotonic() - began < 10
        failed = receiver.event(room)
        assert failed["state"] == "Failed"
        if way.fences:
            assert left == []
            assert failed["released"] or receiver.event(room)["released"]
        else:
            assert not failed["released"]
            assert left == [{"room": room, "pages": [dst], "peers": ["source"]}]
        source.go_on()
        assert source.end(room)[0]["error"] in ("PeerLost", "AgentClosed"), source.last
        receiver.rest(dst)
        assert receiver.more() == []
        source.rest()


def test_a_receiver_is_stopped_while_the_source_closes(way: Way) -> None:
    with (
        Remote(way, SMALL, 64, name="source", seed=1) as source,
        Remote(way, SMALL, 64, name="receiver", seed=2) as receiver,
    ):
        room, dst = kx.new_room(), [1, 3, 5, 7, 9]
        receiver.expect(room, dst, tokens=tokens(dst), source=source.address)
        eventually(lambda: receiver.state(room) == "Waiting", "the grant is out")
        source.push(room, range(5), tokens=tokens(dst), last=False)
        eventually(lambda: source.stats()["deliveries"] == 0 and receiver.arrived(dst), "delivered")
        receiver.stop()
        began = time.monotonic()
        left, _ = source.close()
        assert time.monotonic() - began < 10
        assert left == [] or left[0]["room"] == room
        receiver.go_on()
        failed = receiver.event(room)
        assert failed["error"] in ("PeerLost", "Cancelled", "AgentClosed"), receiver.last
        # Bytes that lie there need not be confirmed; then only its death says that the source writes no more.
        source.rest()
        source.kill()
        assert failed["released"] or receiver.event(room)["released"]
        receiver.rest(dst)


@pytest.mark.parametrize("way", params(TCP), indirect=True)
def test_a_source_that_closes_with_a_write_on_the_way_releases_nothing(way: Way) -> None:
    """What it wrote last lies in the network when it closes: nobody can say when it lands, but that its
    process is dead.
    """
    with (
        Remote(way, BIG, 64, name="source", seed=1) as source,
        Remote(way, BIG, 64, name="receiver", seed=2) as receiver,
    ):
        room, dst = kx.new_room(), [1, 3, 5, 7, 9]
        receiver.expect(room, dst, tokens=tokens(dst), source=source.address)
        eventually(lambda: receiver.state(room) == "Waiting", "the grant is out")
        source.push(room, range(5), tokens=tokens(dst), layers=(0, 1), last=False)
        eventually(lambda: source.stats()["writes"] > 0 and source.stats()["deliveries"] == 0, "confirmed")
        receiver.stop()
        before = source.stats()["writes"]
        source.push(room, range(5), tokens=tokens(dst), layers=(1, 32), last=False)
        eventually(lambda: source.stats()["writes"] > before, "it writes")
        left, _ = source.close()
        assert left == [], "its own pages are read by nobody any more"
        receiver.go_on()
        assert not receiver.event(room)["released"], receiver.last
        eventually(lambda: receiver.stats()["quarantined_pages"] == len(dst), "counted")
        nothing_happens(0.5, lambda: receiver.stats()["quarantined_pages"] == len(dst))
        assert receiver.more() == []
        source.kill()
        assert receiver.event(room)["released"], receiver.last
        receiver.rest(dst)
