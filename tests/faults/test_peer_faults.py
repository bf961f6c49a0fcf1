"""Rooms that are cancelled while bytes flow, and a decode that outlives its writers.

Which pages may be reused when is in docs/safety.md.
"""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from scene import ENDINGS, SUCCESS, endings, scene
from two import eventually
from ways import BIG, POSIX, TCP, Remote, Way, params, tokens

import kvxfer as kx


@pytest.mark.parametrize("way", params(TCP, POSIX), indirect=True)
def test_decode_outlives_writers_that_die_in_the_middle(way: Way) -> None:
    """Over TCP its own UCX takes part in every put, and finds the writer gone at any point.

    Decode is a process of its own here: what kills it must not kill the tests.
    """
    count = 40
    with (
        Remote(way, BIG, 5 * count, seed=9, name="decode") as decode,
        Remote(way, BIG, count, name="other", seed=1) as other,
        contextlib.ExitStack() as stack,
    ):
        doomed = [stack.enter_context(Remote(way, BIG, count, name=f"doomed-{n}", seed=2)) for n in range(5)]
        rooms = [kx.new_room() for _ in doomed]
        for n, (peer, room) in enumerate(zip(doomed, rooms, strict=True)):
            pages = range(n * count, (n + 1) * count)
            decode.expect(room, pages, tokens=tokens(pages), source=peer.address)
            eventually(lambda peer=peer: peer.stats()["outbound"] == 1, "the grant arrives")
        for peer, room in zip(doomed, rooms, strict=True):
            peer.push(room, range(count), tokens=count * 16, last=False)
            peer.child.kill()
        for peer, room in zip(doomed, rooms, strict=True):
            events = decode.end(room)
            assert endings(events) in ENDINGS[1:]
            assert events[0]["error"] == "PeerLost"
            peer.kill()
        decode.settle(range(5 * count))
        last, dst = kx.new_room(), range(3 * count, 4 * count)
        decode.expect(last, dst, tokens=tokens(dst), source=other.address)
        other.push(last, range(count), tokens=tokens(dst))
        assert endings(decode.end(last)) == SUCCESS
        decode.received(other.seed, range(count), dst)
        decode.rest()
        other.rest()


def test_decode_cancels_while_bytes_flow(way: Way, big_other: Remote) -> None:
    """At any point of a write, and its pages are another room's in the moment of their release."""
    rng = np.random.default_rng(8)
    with scene(way, big_other, field=100) as it, Remote(way, BIG, it.here.pages, name="peer", seed=1) as peer:
        cancelled = 0
        for delay in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.04):
            dst, src = rng.permutation(it.field), rng.permutation(200)
            room, second = it.room(), it.room()
            it.here.expect(room, dst, tokens=tokens(dst), source=peer.address)
            peer.push(room, src[:100], tokens=tokens(dst))
            time.sleep(delay)  # that is what is tested
            with contextlib.suppress(kx.UnknownRoom):
                it.here.cancel(room)
            events = it.is_over(room, dst)
            it.here.expect(second, dst, tokens=tokens(dst), source=peer.address)
            peer.push(second, src[100:], tokens=tokens(dst))
            assert endings(it.is_over(second, dst)) == SUCCESS
            it.here.received(peer.seed, src[100:], dst)
            it.here.rest()
            theirs = peer.end(room)
            assert endings(theirs) in ENDINGS
            assert theirs[0]["state"] == events[0]["state"]
            assert endings(peer.end(second)) == SUCCESS
            cancelled += events[0]["state"] == "Failed"
        assert cancelled > 0
        assert peer.more() == []
        stats = peer.stats()
        assert (stats["outbound"], stats["deliveries"]) == (0, 0)
        peer.rest()
