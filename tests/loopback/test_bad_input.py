"""What peers get wrong fails its own room, with the values that clash in the message.

Other rooms go on, and nothing stays behind.

What a call refuses at once is in tests/unit/test_api_calls.py; frames that no kvxfer would send are in
rust/kvxfer-engine/tests/strangers.rs.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from two import Rank, descriptors, digest, events, eventually, fill, released, threads

import kvxfer as kx

LAYOUT: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_dim": 16, "page_tokens": 4, "dtype": "float16"}
PAGES = 32


class Here:
    """A decode agent of this process."""

    def __init__(self, layout: dict[str, Any] | None = None, **agent: Any) -> None:
        form = kx.PageLayout(**(layout or LAYOUT))
        self.pool = kx.alloc(form, kx.Shard(), pages=PAGES, fabric="shm")
        fill(self.pool, 99)
        self.agent = kx.Agent("decode", form, kx.Shard(), memory=self.pool, **({"fabric": "shm"} | agent))
        self.seen: list[kx.Event] = []

    def expect(self, source: Rank | str, pages: Any, tokens: int, **given: Any) -> int:
        room = kx.new_room()
        address = source if isinstance(source, str) else source.address
        self.agent.expect(room, pages, tokens=tokens, source=address, **given)
        return room

    def ended(self, room: int) -> list[kx.Event]:
        if not released(room)(self.seen):
            self.seen += events(self.agent, released(room))
        return [ev for ev in self.seen if ev.room == room]

    def failed(self, room: int, error: type[kx.KvxferError], *texts: object) -> str:
        """The room failed and was released once, with this error; all of these texts are in its message."""
        found = self.ended(room)
        assert [(ev.state, ev.released) for ev in found] in (
            [("Failed", True)],
            [("Failed", False), ("Released", True)],
        )
        assert type(found[0].error) is error, found[0].error
        said = str(found[0].error)
        assert [text for text in texts if str(text) not in said] == [], said
        return said


@pytest.fixture
def here() -> Iterator[Here]:
    decode = Here()
    with decode.agent:
        yield decode


@pytest.fixture
def peer() -> Iterator[Rank]:
    with Rank(LAYOUT, pages=PAGES, alloc="shm", fabric="shm") as rank:
        yield rank


def goes_on(here: Here, peer: Rank, dst: range = range(20, 24)) -> None:
    """The next room between the two works."""
    room = here.expect(peer, dst, 16)
    peer.push(room, range(4), tokens=16)
    (event,) = here.ended(room)
    assert event.state == "Success"
    assert peer.end(room) == [{"room": room, "state": "Success", "released": True, "error": None}]
    assert digest(here.pool.tensors, list(dst)) == peer.digest(range(4))


def nothing_is_left(*agents: Here | Rank) -> None:
    """None of them holds anything for any room. Gauges are written once a turn of the thread."""

    def held() -> list[int]:
        every = [one.stats() if isinstance(one, Rank) else one.agent.stats() for one in agents]
        names = ("outbound", "inbound", "deliveries", "granted_pages", "quarantined_pages")
        return [stats[name] for stats in every for name in names]

    eventually(lambda: not any(held()), "every room is forgotten")


@pytest.mark.parametrize(
    ("pages", "texts"),
    [
        ([1, PAGES], [f"page {PAGES}", "out of range", f"0 to {PAGES - 1}"]),
        ([1, 1 << 40], [f"page {1 << 40}", "out of range"]),
        ([-1, 2], ["page -1", "out of range"]),
        ([3, 3], ["page 3", "twice"]),
        ([4, 8], ["page 8", "granted"]),
    ],
    ids=["past the end", "past 32 bits", "negative", "repeated", "granted now"],
)
def test_pages_of_a_grant(here: Here, peer: Rank, pages: list[int], texts: list[str]) -> None:
    held = here.expect(peer, [8, 9], 8)
    eventually(lambda: here.agent.state(held) == "Waiting", "the grant is out")
    room = here.expect(peer, pages, 8)
    error = here.ended(room)[0].error
    # The prefill side need not wait for a grant that never comes.
    peer.push(room, [1, 2], tokens=8)
    first, *rest = peer.end(room)
    assert (first["state"], first["error"]) == ("Failed", "PageError")
    assert str(room) in peer.last["text"]
    assert [ev["state"] for ev in rest] == ([] if first["released"] else ["Released"])
    assert here.agent.state(held) == "Waiting"
    if pages[-1] == 8:
        assert str(held) in str(error), "who holds the page"
    peer.push(held, [5, 6], tokens=8)
    assert here.ended(held)[0].state == "Success"
    assert peer.end(held)[-1]["state"] == "Success"
    goes_on(here, peer)
    nothing_is_left(here, peer)
    here.failed(room, kx.PageError, room, *texts)


@pytest.mark.parametrize(
    ("pages", "text"),
    [([1, PAGES], f"page {PAGES}"), ([1, -5], "page -5"), ([(1 << 32) + 3, 1], f"page {(1 << 32) + 3}")],
    ids=["past the end", "negative", "past 32 bits"],
)
def test_pages_of_a_push(here: Here, peer: Rank, pages: list[int], text: str) -> None:
    room = here.expect(peer, [1, 2], 8)
    peer.push(room, pages, tokens=8)
    assert peer.end(room)[0]["error"] == "PageError"
    assert isinstance(here.ended(room)[0].error, kx.PageError)
    goes_on(here, peer)
    # The same page twice is odd, but harms nobody: a source is only read.
    twice = here.expect(peer, [1, 2], 8)
    peer.push(twice, [3, 3], tokens=8)
    assert here.ended(twice)[0].state == "Success"
    assert peer.end(twice)[-1]["state"] == "Success"
    nothing_is_left(peer)
    here.failed(room, kx.PageError, room, text)


@pytest.mark.parametrize("secret", [None, "wrong"])
def test_a_wrong_secret(secret: str | None) -> None:
    right = {"KVXFER_SECRET": "right"}
    with (
        Rank(LAYOUT, pages=PAGES, alloc="shm", fabric="shm", env=right) as peer,
        contextlib.ExitStack() as stack,
    ):
        good = Here(secret="right")
        stack.enter_context(good.agent)
        running = good.expect(peer, [8, 9], 8)
        eventually(lambda: good.agent.state(running) == "Waiting", "the grant is out")
        bad = Here(secret=secret)
        with bad.agent:
            room = bad.expect(peer, [1, 2], 8)
            said = bad.failed(room, kx.AuthError, "KVXFER_SECRET")
            assert "right" not in said
            nothing_is_left(bad)
        peer.push(running, [5, 6], tokens=8)
        assert good.ended(running)[0].state == "Success"
        assert peer.end(running)[-1]["state"] == "Success"
        goes_on(good, peer)
        nothing_is_left(peer)
        assert peer.stats()["connections"] == 1


@pytest.mark.parametrize(
    ("layout", "agent", "texts"),
    [
        ({"dtype": "bfloat16"}, {}, ["dtype", "float16", "bfloat16"]),
        ({"kv_heads": 2}, {}, ["kv_heads", "4", "2"]),
        ({"head_dim": 32}, {}, ["head_dim", "16", "32"]),
        ({"layers": 3}, {}, ["layers", "2", "3"]),
        ({}, {"model": "llama-b"}, ["model", "llama-a", "llama-b"]),
        ({}, {"role": "prefill"}, ["role", "prefill"]),
    ],
    ids=["dtype", "kv_heads", "head_dim", "layers", "model", "role"],
)
def test_case_18_peers_that_do_not_fit(
    layout: dict[str, Any], agent: dict[str, Any], texts: list[str]
) -> None:
    """Both sides are told the field and both values, and serve others as before."""
    given: dict[str, Any] = {}
    if "role" in agent:
        here, given = Here(model="llama-a"), {"role": "decode"}
    else:
        here = Here(LAYOUT | layout, **({"model": "llama-a"} | agent))
    good = Here(model="llama-a")
    with (
        Rank(LAYOUT, pages=PAGES, alloc="shm", fabric="shm", model="llama-a", **given) as peer,
        here.agent,
        good.agent,
    ):
        if not given:
            running = good.expect(peer, [8, 9], 8)
            eventually(lambda: good.agent.state(running) == "Waiting", "the grant is out")
            room = kx.new_room()
            peer.push(room, [1, 2], tokens=8)
            here.agent.expect(room, [1, 2], tokens=8, source=peer.address)
        else:
            room = here.expect(peer, [1, 2], 8)
        here.failed(room, kx.LayoutMismatch, *texts)
        if not given:
            assert peer.event(room) == {
                "room": room,
                "state": "Failed",
                "released": True,
                "error": "LayoutMismatch",
            }
            assert [text for text in texts if text not in peer.last["text"]] == []
            # A second room is told the same.
            again = here.expect(peer, [1, 2], 8)
            here.failed(again, kx.LayoutMismatch, *texts)
            peer.push(running, [5, 6], tokens=8)
            assert good.ended(running)[0].state == "Success"
            assert peer.end(running)[-1]["state"] == "Success"
            goes_on(good, peer)
        nothing_is_left(here, peer)


@pytest.mark.parametrize(
    ("granted", "pushed", "texts"),
    [
        ({"tokens": 16}, {"tokens": 12}, ["16", "12"]),
        ({"tokens": 12}, {"tokens": 16}, ["12", "16"]),
        ({"tokens": 12, "start": 4}, {"tokens": 12}, ["16", "12"]),
        # A gap in front, where the ends agree.
        ({"tokens": 16}, {"tokens": 8, "start": 8}, ["16", "last push"]),
        # A gap of layers.
        ({"tokens": 16}, {"tokens": 16, "layers": (0, 1)}, ["16", "32", "last push"]),
    ],
    ids=["fewer", "more", "another end", "gap of tokens", "gap of layers"],
)
def test_tokens_that_disagree(
    here: Here, peer: Rank, granted: dict[str, Any], pushed: dict[str, Any], texts: list[str]
) -> None:
    """The room fails on both sides, whoever is first."""
    for push_first in (False, True):
        room = kx.new_room()
        pages, sources = range(-(-granted["tokens"] // 4)), range(10, 10 - (-pushed["tokens"] // 4))
        if push_first:
            peer.push(room, sources, **pushed)
        here.agent.expect(room, pages, source=peer.address, **granted)
        if not push_first:
            peer.push(room, sources, **pushed)
        here.failed(room, kx.TokensMismatch, room, *texts)
        assert peer.end(room)[0]["error"] == "TokensMismatch"
        assert str(room) in peer.last["text"] or peer.last["text"] is None
    goes_on(here, peer)
    nothing_is_left(peer)


def test_tokens_that_come_twice(here: Here, peer: Rank) -> None:
    room = here.expect(peer, range(4), 16)
    peer.push(room, range(2), tokens=8, last=False)
    peer.push(room, range(3), start=4, tokens=12)
    here.failed(room, kx.TokensMismatch, room, "again")
    assert peer.end(room)[0]["error"] == "TokensMismatch"
    goes_on(here, peer)
    nothing_is_left(peer)


def test_a_taken_port_leaves_nothing(peer: Rank) -> None:
    form, pool = (
        kx.PageLayout(**LAYOUT),
        kx.alloc(kx.PageLayout(**LAYOUT), kx.Shard(), pages=PAGES, fabric="shm"),
    )
    port = peer.address.rsplit(":", 1)[1]

    def start() -> None:
        with pytest.raises(kx.ListenError, match=port):
            kx.Agent("second", form, kx.Shard(), memory=pool, listen=peer.address)

    start()  # what is loaded once, is loaded
    files, count = descriptors(), threads()
    for _ in range(5):
        start()
    assert descriptors() == files
    assert threads() == count
    # And the other way: an agent of this process against a port that another process asks for.
    with kx.Agent("first", form, kx.Shard(), memory=pool, fabric="shm") as first:
        with pytest.raises(AssertionError, match="the child process ended with 1"):
            Rank(LAYOUT, pages=1, listen=first.address)


def test_a_source_that_is_not_kvxfer(here: Here, peer: Rank) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            stream, _ = server.accept()
            with stream:
                stream.recv(512)
                stream.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=serve)
        thread.start()
        room = here.expect(f"127.0.0.1:{server.getsockname()[1]}", [1, 2], 8)
        here.failed(room, kx.ProtocolError, "not kvxfer")
        thread.join(10)
    goes_on(here, peer)


def test_failing_rooms_leave_no_descriptor(here: Here, peer: Rank) -> None:
    """Of each kind that this file has, many times over one pair of agents."""
    strange = Here(LAYOUT | {"dtype": "bfloat16"})
    secret = Here(secret="wrong")

    def fail() -> None:
        for agent, pages, error in (
            (here, [1, PAGES], kx.PageError),
            (here, [1, 1], kx.PageError),
            (strange, [1, 2], kx.LayoutMismatch),
            (secret, [1, 2], kx.AuthError),
        ):
            agent.failed(agent.expect(peer, pages, 8), error)
        gap = here.expect(peer, [1, 2], 8)
        peer.push(gap, [1], start=4, tokens=4)
        here.failed(gap, kx.TokensMismatch)
        peer.end(gap)

    with strange.agent, secret.agent:
        goes_on(here, peer)
        fail()
        eventually(lambda: connections(here, strange, secret) == [1, 0, 0], "refused connections are closed")
        files, count = len(descriptors()), threads()
        for _ in range(10):
            fail()
        eventually(lambda: connections(here, strange, secret) == [1, 0, 0], "refused connections are closed")
        eventually(lambda: len(descriptors()) <= files, "descriptors are closed")
        assert threads() == count
        nothing_is_left(here, strange, secret, peer)
        goes_on(here, peer)


def connections(*agents: Here) -> list[int]:
    return [one.agent.stats()["connections"] for one in agents]
