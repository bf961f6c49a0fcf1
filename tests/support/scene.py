"""A survivor, a peer that stays well, and what must hold after something has happened to a third.

`scene` is the frame of every fault test: it takes stock, lets the test do its worst, and checks afterwards
that the survivor is as good as new. What it checks is listed at `Scene.afterwards`.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from guarded import footprint
from two import eventually
from ways import Local, Remote, Said, Side, Way, tokens

import kvxfer as kx

Pages = np.ndarray[Any, Any]
# Pages of the rooms beside the fault, on the survivor and on the peer that stays well.
BESIDE = 5
GAUGES = ("inbound", "outbound", "granted_pages", "quarantined_pages", "deliveries")
SUCCESS = [("Success", True)]
ENDINGS = (SUCCESS, [("Failed", True)], [("Failed", False), ("Released", True)])

_warm: set[str] = set()


def warm(way: Way, other: Remote) -> None:
    """What a process keeps for good after its first hand-off (UCX's context, for instance) is no leak."""
    if way.name not in _warm:
        with Local(way, other.shape, 64) as here:
            first = np.arange(BESIDE)
            hand_off(other, here, first, first + BESIDE)
            hand_off(here, other, first, other.pages - 1 - 2 * first)
        _warm.add(way.name)


def endings(events: list[Said]) -> list[tuple[str, bool]]:
    return [(ev["state"], ev["released"]) for ev in events]


def hand_off(source: Side, target: Side, src: Any, dst: Any, *, check: bool = True) -> None:
    """A whole room between two agents that are well, with its bytes and events."""
    room = kx.new_room()
    target.expect(room, dst, tokens=tokens(dst), source=source.address)
    source.push(room, src, tokens=tokens(dst))
    assert endings(target.end(room)) == SUCCESS, target.last
    assert endings(source.end(room)) == SUCCESS, source.last
    if check:
        target.received(source.seed, src, dst)


class Scene:
    def __init__(self, way: Way, here: Side, other: Remote, field: int) -> None:
        self.way, self.here, self.other = way, here, other
        # Every second page, in an order that is no order: each has a canary on either side.
        rng = np.random.default_rng(field)
        self.field: Pages = rng.permutation(np.arange(field)) * 2 + 1
        self.source: Pages = rng.permutation(2 * field)[:field]
        self.first_beside = 2 * field + 2
        # The network to a peer is gone, or slow: UCX keeps the sockets to it for as long as TCP hopes.
        self.cut_off = False
        self.rooms: list[int] = []
        beside = np.arange(BESIDE)
        self.inward, self.outward = kx.new_room(), kx.new_room()
        self.beside: Pages = self.first_beside + beside
        self.beside_other: Pages = other.pages - 1 - 2 * beside
        hand_off(other, here, beside, self.beside)
        hand_off(here, other, beside, self.beside_other)
        # They wait through all that follows.
        here.expect(self.inward, self.beside, tokens=tokens(beside), source=other.address)
        other.expect(self.outward, self.beside_other, tokens=tokens(beside), source=here.address)
        eventually(lambda: here.state(self.inward) == "Waiting", "the room beside is in contact")
        eventually(lambda: other.state(self.outward) == "Waiting", "the other room beside is in contact")
        # It does not sleep while it looks at a peer's pages, which takes a descriptor.
        slept = here.stats()["sleeps"]
        eventually(lambda: here.stats()["sleeps"] > slept, "the peers' pages were looked at")
        self.before = here.footprint()

    def room(self) -> int:
        """A room of which the scene checks that it ends exactly once."""
        self.rooms.append(kx.new_room())
        return self.rooms[-1]

    def give_up(self, room: int) -> None:
        """The room is over by what the test saw itself; its events were taken."""
        self.rooms.remove(room)

    def is_over(self, room: int, pages: Pages, seconds: float | None = None) -> list[Said]:
        """Waits for the room's release. Not a byte of its pages may change from now on."""
        events = self.here.end(room, seconds or self.way.death_s)
        self.here.settle(pages)
        assert endings(events) in ENDINGS, events
        self.rooms.remove(room)
        return events

    def afterwards(self) -> None:
        """The other rooms finish with the right bytes; every room has ended once; nothing is granted,
        quarantined or under way; the field's pages carry the next room; no canary has changed, here or at
        the other; descriptors
        and threads are as many as before.
        """
        here, other, beside = self.here, self.other, np.arange(BESIDE) + BESIDE
        # Of its own pages those that are no room's.
        even = 2 * beside
        other.push(self.inward, beside, tokens=tokens(beside))
        here.push(self.outward, even, tokens=tokens(beside))
        for room, source, target in ((self.inward, other, here), (self.outward, here, other)):
            assert endings(target.end(room)) == SUCCESS, target.last
            assert endings(source.end(room)) == SUCCESS, source.last
        here.received(other.seed, beside, self.beside)
        other.received(here.seed, even, self.beside_other)
        for room in list(self.rooms):
            assert endings(here.end(room)) in ENDINGS
        here.rest()
        eventually(lambda: self._idle(here), f"the survivor is idle: {here.stats()}")
        # Given away at once, with other bytes: whatever comes late would be seen.
        src = np.arange(len(self.field)) + 2 * BESIDE
        hand_off(other, here, src % (other.pages - 3 * BESIDE), self.field)
        eventually(self._as_before, f"{self.before}, but now {here.footprint()}", 15)
        here.rest()
        other.rest()
        assert here.more() == [], "an event that nobody can explain"
        assert other.more() == []
        eventually(lambda: self._idle(other), f"the other is idle: {other.stats()}")

    def _idle(self, side: Side) -> bool:
        stats = side.stats()
        return all(stats[name] == 0 for name in GAUGES)

    def _as_before(self) -> bool:
        return self.cut_off or self.here.footprint() == self.before


@contextlib.contextmanager
def scene(way: Way, other: Remote, *, field: int = 20, **given: Any) -> Iterator[Scene]:
    """A survivor in this process. `field` pages are for the test; `other` serves all tests of a file."""
    warm(way, other)
    gc.collect()
    outer = footprint()
    with Local(way, other.shape, 2 * field + 2 * BESIDE + 4, **given) as here:
        with spoilt(other):
            it = Scene(way, here, other, field)
            yield it
            it.afterwards()
        left, after = here.close()
        assert left == []
    # Whoever still has a name for it: the agent and its memory are gone.
    vars(here).clear()
    gc.collect()
    eventually(lambda: footprint() == outer, f"after close: {outer}, {footprint()} ({after})")


@contextlib.contextmanager
def far_scene(way: Way, here: Remote, other: Remote, *, field: int = 20) -> Iterator[Scene]:
    """The same with a survivor in a child process, whose first agent it is."""
    with spoilt(other):
        it = Scene(way, here, other, field)
        yield it
        it.afterwards()
    left, _ = here.close()
    assert left == []


@contextlib.contextmanager
def spoilt(other: Remote) -> Iterator[None]:
    """A peer in the middle of a failed test's rooms is no peer for the next one."""
    try:
        yield
    except BaseException:
        other.kill()
        raise


def dies(it: Scene, doomed: Remote) -> None:
    """Kills a peer, and waits until the survivor has seen that and let go of it. Before, a room of the same
    address may be the dead one's, and fail with it.
    """
    # Besides, the survivor knows the other, in both directions.
    eventually(lambda: it.here.stats()["peers"] == 3, "the survivor knows it")
    doomed.kill()
    eventually(lambda: it.here.stats()["peers"] == 2, "its death is seen", it.way.death_s)


def works_again(it: Scene, peer: Remote) -> None:
    """Rooms that come too early fail with a word of why, and are tried again."""
    deadline = time.monotonic() + 20
    while True:
        room, src, dst = it.room(), [0, 2, 4, 6, 8], it.field[:5]
        it.here.expect(room, dst, tokens=tokens(dst), source=peer.address)
        peer.push(room, src, tokens=tokens(dst))
        events = it.is_over(room, dst)
        theirs = peer.end(room)
        assert endings(theirs)[0][0] == endings(events)[0][0]
        if endings(events) == SUCCESS:
            it.here.received(peer.seed, src, dst)
            return
        assert events[0]["error"] == "PeerLost", it.here.last
        assert time.monotonic() < deadline, it.here.last


def nothing_happens(seconds: float, what: Any) -> None:
    """For what must not happen, which has no event: looks again and again."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert what()
        time.sleep(0.01)
