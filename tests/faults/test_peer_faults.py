"""Peers that are killed, stopped or restarted, and rooms that are cancelled while bytes flow.

Which pages may be reused then, and when, is in docs/safety.md.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from two import Rank, descriptors, events, eventually, fill, released, threads

import kvxfer as kx

# 2,000 tokens are 125 pages of 512 KiB over all layers: 64 MB.
BIG: dict[str, Any] = {
    "layers": 64,
    "kv_heads": 1,
    "head_dim": 128,
    "page_tokens": 16,
    "dtype": "bfloat16",
    "order": "HND",
}
SMALL = BIG | {"layers": 4}
TOKENS, COUNT = 2000, 125
QUICK: dict[str, Any] = {"heartbeat": 0.1, "suspect_after": 0.5, "fence_after": 0.5}


@dataclass(frozen=True)
class Way:
    """A fabric, and what may be expected of it."""

    fabric: str
    tls: str | None
    # Whether a peer that does not answer, but may live, can be fenced: the table of docs/safety.md.
    fences: bool
    # Seconds until a peer's death is seen.
    death_s: float

    @property
    def options(self) -> dict[str, Any]:
        return {"fabric": self.fabric, "ucx_tls": self.tls} | QUICK

    def alloc(self, layout: dict[str, Any], pages: int) -> kx.Pool:
        return kx.alloc(
            kx.PageLayout(**layout), kx.Shard(), pages=pages, fabric=self.fabric, ucx_tls=self.tls
        )


SHM = pytest.param(Way("shm", None, fences=True, death_s=1), id="shm")
TCP = pytest.param(Way("ucx", "tcp,self", fences=False, death_s=5), id="ucx-tcp", marks=pytest.mark.ucx)
POSIX = pytest.param(
    Way("ucx", "posix,self,tcp", fences=False, death_s=5), id="ucx-posix", marks=pytest.mark.ucx
)


@pytest.fixture(params=[SHM, TCP, POSIX])
def way(request: pytest.FixtureRequest) -> Way:
    found: Way = request.param
    try:
        found.alloc(SMALL, 1)
    except kx.FabricError as error:
        pytest.skip(str(error))
    return found


def prefill(way: Way, layout: dict[str, Any], pages: int, **given: Any) -> Rank:
    return Rank(layout, pages=pages, alloc=way.fabric, **(way.options | given))


@dataclass
class Decode:
    """A decode agent of this process that knows what each byte of its pool has to be."""

    way: Way
    layout: dict[str, Any]
    pages: int
    seen: list[kx.Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = self.way.alloc(self.layout, self.pages)
        fill(self.pool, 99)
        self.views = {key: np.asarray(t).view(np.uint16) for key, t in self.pool.tensors.items()}
        self.before = {key: view.copy() for key, view in self.views.items()}
        self.agent = kx.Agent(
            "decode", kx.PageLayout(**self.layout), kx.Shard(), memory=self.pool, **self.way.options
        )

    def expect(self, source: Rank, pages: np.ndarray[Any, Any], room: int | None = None) -> int:
        room = kx.new_room() if room is None else room
        tokens = len(pages) * kx.PageLayout(**self.layout).page_tokens
        self.agent.expect(room, pages, tokens=tokens, source=source.address)
        return room

    def until(self, done: Callable[[list[kx.Event]], bool], seconds: float = 20) -> list[kx.Event]:
        """Polls until it is done, by all events so far."""
        if not done(self.seen):
            self.seen += events(self.agent, lambda new: done(self.seen + new), seconds)
        return self.seen

    def of(self, room: int) -> list[kx.Event]:
        self.seen += self.agent.poll()
        return [ev for ev in self.seen if ev.room == room]

    def failed(self, room: int, seconds: float) -> kx.Event:
        """The room's failure, which is its first event."""
        self.until(lambda seen: any(ev.room == room for ev in seen), seconds)
        event = self.of(room)[0]
        assert event.state == "Failed", event
        return event

    def some_arrived(self, pages: np.ndarray[Any, Any]) -> bool:
        """Whether something was written to these pages of the first region."""
        key = min(self.views)
        return not np.array_equal(self.views[key][pages], self.before[key][pages])

    def check(
        self,
        source: Mapping[tuple[int, int, str], Any],
        src: np.ndarray[Any, Any],
        dst: np.ndarray[Any, Any],
    ) -> None:
        """These pages are the source's, and are what is expected of them from now on."""
        for key, view in self.views.items():
            assert np.array_equal(view[dst], source[key].view(np.uint16)[src]), key
            self.before[key][dst] = view[dst]

    def check_rest(self, *granted: np.ndarray[Any, Any]) -> None:
        """No byte changed but in these pages."""
        rest = np.setdiff1d(np.arange(self.pages), np.concatenate([np.empty(0, int), *granted]))
        for key, view in self.views.items():
            assert np.array_equal(view[rest], self.before[key][rest]), f"{key} changed outside the grants"

    def ended_once(self, room: int) -> None:
        """The room had one terminal event and one release, in this order or together."""
        found = [(ev.state, ev.released) for ev in self.of(room)]
        assert found in (
            [("Success", True)],
            [("Failed", True)],
            [("Failed", False), ("Released", True)],
        ), found


@contextlib.contextmanager
def decoding(way: Way, layout: dict[str, Any], pages: int) -> Iterator[Decode]:
    decode = Decode(way, layout, pages)
    with decode.agent:
        yield decode
        # Every room has ended, so nothing can be left.
        stats = decode.agent.stats()
        assert (stats["inbound"], stats["granted_pages"], stats["quarantined_pages"]) == (0, 0, 0)
        assert decode.agent.close() == []


def hand_off(decode: Decode, source: Rank, src: Any, dst: Any) -> None:
    room = decode.expect(source, dst)
    source.push(room, src, tokens=len(dst) * 16)
    decode.until(released(room))
    decode.ended_once(room)
    assert decode.of(room)[0].state == "Success"
    decode.check(source.reference(), src, dst)
    assert source.end(room) == [{"room": room, "state": "Success", "released": True, "error": None}]


@pytest.mark.parametrize("flowing", [False, True], ids=["waiting", "flowing"])
def test_prefill_is_killed(way: Way, flowing: bool) -> None:
    """While its push is awaited, and in the middle of it."""
    layout, pages = BIG if flowing else SMALL, 2 * COUNT
    one, two, _ = np.split(np.random.default_rng(5).permutation(pages), [COUNT, COUNT + 20])
    with (
        prefill(way, layout, pages, seed=1, name="other") as other,
        decoding(way, layout, pages) as decode,
    ):
        hand_off(decode, other, np.arange(20), two)
        with prefill(way, layout, pages, seed=2, name="doomed") as doomed:
            files, count = descriptors(), threads()
            beside = decode.expect(other, two)
            room = decode.expect(doomed, one)
            if flowing:
                # Not the last push, so that the room cannot end well, however fast the bytes are.
                doomed.push(room, np.arange(COUNT), tokens=TOKENS, last=False)
                eventually(lambda: decode.some_arrived(one), "the first bytes", pause=0)
            else:
                eventually(lambda: decode.agent.state(room) == "Waiting", "the grant is out")
            began = time.monotonic()
            doomed.child.kill()
            failure = decode.failed(room, way.death_s)
            decode.until(released(room), way.death_s)
            took = time.monotonic() - began
            assert took < way.death_s
            # Over UCX not before what the kernel still held of the dead process has been taken in.
            assert way.fabric == "shm" or took >= 1
            doomed.child.wait(20)
        assert decode.some_arrived(one) == flowing
        decode.ended_once(room)
        decode.check_rest(one)
        # The room beside it knows nothing of that.
        assert decode.agent.state(beside) == "Waiting"
        other.push(beside, np.arange(30, 50), tokens=320)
        decode.until(released(beside))
        decode.ended_once(beside)
        decode.check(other.reference(), np.arange(30, 50), two)
        assert other.end(beside)[-1]["state"] == "Success"
        # Its pages are another room's now, and nothing comes late.
        hand_off(decode, other, np.arange(100, 100 + COUNT), one)
        decode.check_rest()
        eventually(lambda: not left_of(files), "everything of that peer is closed")
        assert threads() == count
        assert isinstance(failure.error, kx.PeerLost), failure.error
        assert "doomed" in str(failure.error)


def granted(peer: Rank) -> None:
    eventually(lambda: peer.stats()["outbound"] == 1, "the grant arrives")


@pytest.mark.parametrize("way", [TCP, POSIX], indirect=True)
def test_decode_outlives_writers_that_die_in_the_middle(way: Way) -> None:
    """Over TCP its own UCX takes part in every put, and finds the writer gone at any point.

    Decode is a process of its own here: what kills it must not kill the tests.
    """
    count = 40
    with (
        prefill(way, BIG, 5 * count, seed=9, name="decode") as decode,
        prefill(way, BIG, count, name="other") as other,
        contextlib.ExitStack() as stack,
    ):
        doomed = [stack.enter_context(prefill(way, BIG, count, name=f"doomed-{n}")) for n in range(5)]
        rooms = [kx.new_room() for _ in doomed]
        for n, (peer, room) in enumerate(zip(doomed, rooms, strict=True)):
            pages = range(n * count, (n + 1) * count)
            decode.expect(room, pages, tokens=count * 16, source=peer.address)
            granted(peer)
        for peer, room in zip(doomed, rooms, strict=True):
            peer.push(room, range(count), tokens=count * 16, last=False)
            peer.child.kill()
        for peer, room in zip(doomed, rooms, strict=True):
            failure, *rest = decode.end(room)
            assert (failure["state"], failure["error"]) == ("Failed", "PeerLost")
            assert [ev["state"] for ev in rest] == ([] if failure["released"] else ["Released"])
            peer.child.wait(20)
        last = kx.new_room()
        decode.expect(last, range(3 * count, 4 * count), tokens=count * 16, source=other.address)
        other.push(last, range(count), tokens=count * 16)
        assert decode.end(last) == [{"room": last, "state": "Success", "released": True, "error": None}]
        assert decode.digest(range(3 * count, 4 * count)) == other.digest(range(count))


def left_of(before: dict[str, str]) -> dict[str, str]:
    """Files that are open now and were not then."""
    return {fd: what for fd, what in descriptors().items() if before.get(fd) != what}


def test_decode_is_killed_while_prefill_pushes(way: Way) -> None:
    pages = 2 * COUNT
    pool = way.alloc(BIG, pages)
    fill(pool, 3)
    layout = kx.PageLayout(**BIG)
    with (
        kx.Agent("prefill", layout, kx.Shard(), memory=pool, **way.options) as agent,
        prefill(way, BIG, pages, name="doomed") as doomed,
    ):
        room = kx.new_room()
        doomed.expect(room, np.arange(COUNT), tokens=TOKENS, source=agent.address)
        eventually(lambda: agent.state(room) is not None or agent.stats()["outbound"] == 1, "the grant")
        agent.push(room, np.arange(COUNT), tokens=TOKENS, last=False)
        eventually(lambda: agent.state(room) == "Transferring", "bytes flow")
        doomed.child.kill()
        seen = events(agent, released(room), way.death_s)
        doomed.child.wait(20)
        failure = seen[0]
        assert (failure.room, failure.state) == (room, "Failed")
        assert [ev.state for ev in seen[1:]] == ([] if seen[0].released else ["Released"])
        with prefill(way, BIG, pages, name="next") as successor:
            room = kx.new_room()
            successor.expect(room, np.arange(COUNT), tokens=TOKENS, source=agent.address)
            agent.push(room, np.arange(COUNT)[::-1].copy(), tokens=TOKENS)
            assert successor.end(room)[-1]["state"] == "Success"
            (sent,) = events(agent, released(room))
            assert (sent.state, sent.released) == ("Success", True)
        stats = agent.stats()
        assert (stats["outbound"], stats["deliveries"], stats["quarantined_pages"]) == (0, 0, 0)
        assert agent.close() == []
        assert isinstance(failure.error, kx.PeerLost), failure.error
        assert "doomed" in str(failure.error)


@pytest.mark.parametrize("in_use", [False, True], ids=["idle", "granted"])
def test_prefill_restarts_on_the_same_port(way: Way, in_use: bool) -> None:
    dst = np.arange(20, 40)
    with decoding(way, SMALL, 64) as decode, contextlib.ExitStack() as stack:
        first = stack.enter_context(prefill(way, SMALL, 64, seed=1))
        hand_off(decode, first, np.arange(20), dst)
        stale = kx.new_room()
        if in_use:
            decode.expect(first, dst, stale)
            eventually(lambda: decode.agent.state(stale) == "Waiting", "the grant is out")
        first.child.kill()
        first.child.wait(20)
        second = stack.enter_context(prefill(way, SMALL, 64, seed=2, listen=first.address))
        assert second.address == first.address
        if in_use:
            # The engine above restarted too, and knows the request: what it pushes goes nowhere.
            second.push(stale, np.arange(20), tokens=320)
            failure = decode.failed(stale, way.death_s)
            decode.until(released(stale), way.death_s)
            decode.ended_once(stale)
            decode.check_rest()
            second.order(cancel=stale)
            assert second.end(stale)[0]["state"] == "Failed"
        hand_off(decode, second, np.arange(20, 40), dst)
        decode.check_rest()
        if in_use:
            assert isinstance(failure.error, kx.PeerLost), failure.error


def test_prefill_is_stopped_beyond_the_fence_and_goes_on(way: Way) -> None:
    dst, more = np.arange(20, 40), np.arange(40, 50)
    with decoding(way, SMALL, 64) as decode, prefill(way, SMALL, 64) as peer:
        hand_off(decode, peer, np.arange(20), dst)
        room = decode.expect(peer, dst)
        eventually(lambda: decode.agent.state(room) == "Waiting", "the grant is out")
        peer.stop()
        failure = decode.failed(room, 5)
        assert isinstance(failure.error, kx.PeerLost), failure.error
        if way.fences:
            decode.until(released(room), 5)
        else:
            # No fence: quarantine, for as long as the peer does not answer.
            assert not failure.released
            eventually(lambda: decode.agent.stats()["quarantined_pages"] == len(dst), "quarantine")
            time.sleep(0.3)  # nothing is to happen, which has no event
            assert [ev.released for ev in decode.of(room)] == [False]
            other = decode.expect(peer, dst)
            refusal = decode.failed(other, 5)
            assert isinstance(refusal.error, kx.PageError), refusal.error
            assert refusal.released
        peer.go_on()
        decode.until(released(room), 5)
        decode.ended_once(room)
        decode.check_rest()
        # It works again, soon: rooms that come too early say so and are tried again.
        reference, deadline = peer.reference(), time.monotonic() + 5
        while True:
            again = decode.expect(peer, more)
            peer.push(again, np.arange(10), tokens=160)
            decode.until(released(again), 5)
            decode.ended_once(again)
            ended = peer.end(again)
            if decode.of(again)[0].state == "Success":
                assert ended[-1]["state"] == "Success"
                break
            assert isinstance(decode.of(again)[0].error, kx.PeerLost)
            assert time.monotonic() < deadline, decode.of(again)[0].error
        decode.check(reference, np.arange(10), more)
        decode.check_rest()


@pytest.mark.parametrize("word", [True, False], ids=["evicted", "killed"])
@pytest.mark.parametrize("way", [TCP, POSIX], indirect=True)
def test_the_operators_word_ends_a_quarantine(way: Way, word: bool) -> None:
    """And so does the death of the peer."""
    dst = np.arange(20, 40)
    with decoding(way, SMALL, 64) as decode, prefill(way, SMALL, 64, name="gone") as peer:
        hand_off(decode, peer, np.arange(20), dst)
        room = decode.expect(peer, dst)
        eventually(lambda: decode.agent.state(room) == "Waiting", "the grant is out")
        peer.stop()
        assert not decode.failed(room, 5).released
        eventually(lambda: decode.agent.stats()["quarantined_pages"] == len(dst), "quarantine")
        if word:
            decode.agent.evict("gone")
        else:
            peer.child.kill()
        decode.until(released(room), way.death_s)
        decode.ended_once(room)
        with prefill(way, SMALL, 64, seed=2) as other:
            hand_off(decode, other, np.arange(20), dst)
        peer.kill()
        decode.check_rest()


def test_decode_cancels_while_bytes_flow(way: Way) -> None:
    pages = 2 * COUNT
    rng = np.random.default_rng(8)
    with decoding(way, BIG, pages) as decode, prefill(way, BIG, pages) as peer:
        reference = peer.reference()
        cancelled = 0
        for delay in (0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.04):
            dst, src = rng.permutation(pages)[:COUNT], rng.permutation(pages)
            room = decode.expect(peer, dst)
            peer.push(room, src[:COUNT], tokens=TOKENS)
            time.sleep(delay)  # that is what is tested
            with contextlib.suppress(kx.UnknownRoom):
                decode.agent.cancel(room)
            decode.until(released(room), 10)
            # At once: the pages are another room's, with other bytes.
            second = decode.expect(peer, dst)
            peer.push(second, src[COUNT:], tokens=TOKENS)
            decode.until(released(second), 10)
            decode.check(reference, src[COUNT:], dst)
            decode.check_rest()
            for number in (room, second):
                decode.ended_once(number)
                ended = [(ev["state"], ev["released"]) for ev in peer.end(number)]
                assert ended in (
                    [("Success", True)],
                    [("Failed", True)],
                    [("Failed", False), ("Released", True)],
                )
                assert ended[0][0] == decode.of(number)[0].state
            assert decode.of(second)[0].state == "Success"
            cancelled += decode.of(room)[0].state == "Failed"
        assert cancelled > 0
        assert peer.more() == []
        stats = peer.stats()
        assert (stats["outbound"], stats["deliveries"]) == (0, 0)
