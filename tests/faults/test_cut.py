"""The control connection is cut while data flows, and the reverse."""

from __future__ import annotations

import contextlib
import os
from typing import Any

import pytest
from cuts import Relay, data_connections, shut, unix_connections
from scene import ENDINGS, SUCCESS, Scene, endings, nothing_happens, scene, works_again
from two import eventually
from ways import QUICK, TCP, Remote, Side, Way, each_way, params, tokens

import kvxfer as kx

SLOW_FENCE: dict[str, Any] = QUICK | {"fence_after": 60}


def peer_of(way: Way, it: Scene, **given: Any) -> Remote:
    return Remote(way, it.other.shape, it.here.pages, name="peer", seed=1, **given)


def begin(it: Scene, source: Side, target: Side, at: str) -> int:
    """A room whose bytes flow, the last layer of which is still to be pushed."""
    room = it.room()
    target.expect(room, it.field, tokens=tokens(it.field), source=at)
    eventually(lambda: target.state(room) == "Waiting", "the grant is out")
    source.push(room, it.source, tokens=tokens(it.field), last=False, layers=(0, 31))
    if target is it.here:
        assert target.arrived(it.field, 10), "the first bytes"
    else:
        eventually(lambda: source.state(room) == "Transferring", "bytes flow", pause=0)
    return room


def sides(it: Scene, peer: Remote, side: str) -> tuple[Side, Side]:
    return (peer, it.here) if side == "prefill" else (it.here, peer)


@each_way("side", ["prefill", "decode"], posix=["prefill"])
def test_the_control_connection_is_cut_while_data_flows(way: Way, big_other: Remote, side: str) -> None:
    """By a reset, an end of file, and a reset: it is made anew, and no room is the worse for it."""
    with scene(way, big_other, field=100, **SLOW_FENCE) as it, peer_of(way, it, **SLOW_FENCE) as peer:
        source, target = sides(it, peer, side)
        with Relay(source.address) as relay:
            room = begin(it, source, target, relay.address)
            for reset in (True, False, True):
                before = relay.accepted
                assert relay.cut(reset=reset) >= 1
                eventually(lambda n=before: relay.accepted > n, "a new session")
            source.push(room, it.source, tokens=tokens(it.field), layers=(31, 32))
            assert endings(it.here.end(room)) == SUCCESS, it.here.last
            assert endings(peer.end(room)) == SUCCESS, peer.last
            it.give_up(room)
            target.received(source.seed, it.source, it.field)
            peer.rest()
            assert it.here.stats()["fences"] == 0
            works_again(it, peer)
            peer.kill()


@each_way("side", ["prefill", "decode"], posix=["prefill"])
def test_control_is_a_black_hole_while_data_flows(way: Way, big_other: Remote, side: str) -> None:
    """Beyond the fence, with both processes alive and the data path whole: pages are quarantined until the
    peer has answered.
    """
    with scene(way, big_other, field=100) as it, peer_of(way, it) as peer:
        source, target = sides(it, peer, side)
        with Relay(source.address) as relay:
            room = begin(it, source, target, relay.address)
            relay.hold()
            failure = it.here.first(room)
            assert (failure["state"], failure["error"]) == ("Failed", "PeerLost")
            if side == "prefill" and not way.fences:
                assert not failure["released"]
                eventually(lambda: it.here.stats()["quarantined_pages"] == len(it.field), "quarantine")
                nothing_happens(0.3, lambda: it.here.stats()["quarantined_pages"] == len(it.field))
            it.here.rest(it.field)
            relay.let_go()
            if not failure["released"]:
                assert endings(it.here.end(room, way.death_s)) == [("Released", True)]
            it.here.settle(it.field)
            it.give_up(room)
            theirs = peer.end(room)
            assert (theirs[0]["state"], theirs[0]["error"]) == ("Failed", "PeerLost")
            peer.rest(it.field)
            peer.settle(it.field)
            works_again(it, peer)
            peer.kill()


@each_way("side", ["prefill", "decode"], posix=["prefill"])
def test_the_data_path_dies_while_control_lives(way: Way, big_other: Remote, side: str) -> None:
    """UCX's TCP connections, or the shared memory's Unix socket. What is lost is said on both sides; the
    peer is of use again.
    """
    with scene(way, big_other, field=100) as it:
        unix = unix_connections(os.getpid())
        with peer_of(way, it) as peer:
            source, target = sides(it, peer, side)
            room = begin(it, source, target, source.address)
            control = {int(one.address.rpartition(":")[2]) for one in (it.here, it.other, peer)}
            cut = data_connections(os.getpid(), peer.pid, control)
            for _, fd in cut:
                # The agent closes the rest as soon as it sees the first one end.
                with contextlib.suppress(OSError):
                    shut(os.getpid(), fd)
            if way.fabric == "shm":
                mine = unix_connections(os.getpid()) - unix
                for fd in mine:
                    with contextlib.suppress(OSError):
                        shut(os.getpid(), fd)
                assert mine, "there is a socket to cut"
            elif way is TCP:
                assert cut, "there is a connection to cut"
            # Unless the room has failed already.
            with contextlib.suppress(kx.PeerLost):
                source.push(room, it.source, tokens=tokens(it.field), layers=(31, 32))
            events = it.here.end(room, way.death_s)
            theirs = peer.end(room)
            assert endings(events) in ENDINGS
            assert endings(theirs)[0][0] == endings(events)[0][0]
            it.give_up(room)
            if endings(events) == SUCCESS:
                # No byte needed what was cut.
                assert way is not TCP
                target.received(source.seed, it.source, it.field)
            else:
                assert events[0]["error"] in ("PeerLost", "FabricError"), it.here.last
                it.here.settle(it.field)
                peer.rest(it.field)
                peer.settle(it.field)
            works_again(it, peer)


@pytest.mark.parametrize("way", params(TCP), indirect=True)
def test_the_data_path_dies_at_the_other_end(way: Way, big_other: Remote) -> None:
    """The same with the peer's descriptors, and no room under way: the next one finds a way."""
    with scene(way, big_other, field=100) as it, peer_of(way, it) as peer:
        works_again(it, peer)
        control = {int(one.address.rpartition(":")[2]) for one in (it.here, it.other, peer)}
        cut = data_connections(peer.pid, os.getpid(), control)
        assert cut
        for _, fd in cut:
            with contextlib.suppress(OSError):
                shut(peer.pid, fd)
        works_again(it, peer)
        peer.rest()
