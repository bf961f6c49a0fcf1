"""A peer that is started anew under the same name."""

from __future__ import annotations

import contextlib
import socket

from scene import SUCCESS, Scene, dies, endings, hand_off, scene
from two import eventually
from ways import Remote, Way, each_way, tokens


def start(way: Way, it: Scene, seed: int, listen: str = "127.0.0.1:0") -> Remote:
    return Remote(way, it.other.shape, it.here.pages, name="phoenix", seed=seed, listen=listen)


@each_way(
    "place, use",
    [(place, use) for place in ("the same port", "another port") for use in ("idle", "granted")],
    posix=[("the same port", "granted")],
)
def test_case_17_prefill_restarts(way: Way, other: Remote, place: str, use: str) -> None:
    """The same name, host and, if so, port: rooms of the old one fail and release, what the new one pushes
    for them goes nowhere, and the next room works with no restart of the survivor.
    """
    with scene(way, other) as it, contextlib.ExitStack() as stack:
        first = stack.enter_context(start(way, it, 1))
        even = [0, 2, 4, 6]
        hand_off(first, it.here, even, it.field[:4])
        stale = it.room()
        if use == "granted":
            it.here.expect(stale, it.field, tokens=tokens(it.field), source=first.address)
            eventually(lambda: it.here.state(stale) == "Waiting", "the grant is out")
            first.kill()
        else:
            dies(it, first)
        again = first.address if place == "the same port" else "127.0.0.1:0"
        second = stack.enter_context(start(way, it, 2, again))
        assert (second.address == first.address) == (place == "the same port")
        if use == "granted":
            # The engine above restarted too, and knows the request.
            second.push(stale, it.source, tokens=tokens(it.field))
            events = it.is_over(stale, it.field)
            assert events[0]["error"] == "PeerLost"
            it.here.rest()
            second.cancel(stale)
            assert second.end(stale)[0]["state"] == "Failed"
        else:
            it.give_up(stale)
        for dst in (it.field[:4], it.field[4:8]):
            hand_off(second, it.here, even, dst)
        it.here.rest()
        second.rest()


@each_way("use", ["idle", "pushed"], posix=["pushed"])
def test_case_17_decode_restarts(way: Way, other: Remote, use: str) -> None:
    """The source's pages come back, and nothing of the old room is written into the new process's memory."""
    with scene(way, other) as it, contextlib.ExitStack() as stack:
        first = stack.enter_context(start(way, it, 1))
        hand_off(it.here, first, [0, 2, 4, 6], [1, 3, 5, 7])
        stale = it.room()
        if use == "pushed":
            first.expect(stale, it.field, tokens=tokens(it.field), source=it.here.address)
            eventually(lambda: first.state(stale) == "Waiting", "the grant is out")
            it.here.push(stale, it.source, tokens=tokens(it.field), last=False, layers=(0, 1))
            eventually(lambda: it.here.state(stale) == "Transferring", "known")
        first.kill()
        second = stack.enter_context(start(way, it, 2, first.address))
        if use == "pushed":
            # It asks for the same request again before anybody has told it that it failed.
            second.expect(stale, it.field, tokens=tokens(it.field), source=it.here.address)
            events = it.here.end(stale, way.death_s)
            assert (events[0]["state"], events[0]["error"]) == ("Failed", "PeerLost")
            assert second.end(stale)[0]["state"] == "Failed"
        it.give_up(stale)
        second.rest()
        hand_off(it.here, second, [0, 2, 4, 6], [1, 3, 5, 7])
        second.rest()


def test_case_17_a_stranger_at_the_old_port_is_not_the_peer(way: Way, other: Remote) -> None:
    """Something else listens there now and says nothing: the room ends by its own timeout."""
    with scene(way, other) as it:
        with start(way, it, 1) as first:
            hand_off(first, it.here, [0, 2, 4, 6], it.field[:4])
            dies(it, first)
        host, _, port = first.address.partition(":")
        with socket.create_server((host, int(port))):
            room = it.room()
            it.here.expect(
                room, it.field, tokens=tokens(it.field), source=first.address, bootstrap_timeout=0.5
            )
            (event,) = it.is_over(room, it.field, 10)
            assert (event["state"], event["error"]) == ("Failed", "TransferTimeout")
        assert endings([event]) != SUCCESS
