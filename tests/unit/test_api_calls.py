"""What an agent refuses at once, with nothing done."""

from __future__ import annotations

import copy
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvxfer as kx

LAYOUT = kx.PageLayout(layers=2, kv_heads=4, head_dim=8, page_tokens=4, dtype="float16")
ONE = kx.Shard()
NOWHERE = "127.0.0.1:9"


@pytest.fixture(scope="module")
def agent() -> Iterator[kx.Agent]:
    with kx.Agent("calls", LAYOUT, ONE, memory=kx.alloc(LAYOUT, ONE, pages=16)) as agent:
        yield agent


def test_what_an_agent_says_of_itself(agent: kx.Agent) -> None:
    assert agent.name == "calls"
    host, port = agent.address.rsplit(":", 1)
    assert (host, int(port) > 0) == ("127.0.0.1", True)
    assert "shm" in agent.fabrics
    assert agent.pages == (16,)
    assert agent.fileno() > 2
    assert not agent.closed
    assert agent.address in repr(agent)
    stats = agent.stats()
    assert {"succeeded", "quarantined_pages", "queue_depth"} <= set(stats)
    assert all(type(value) is int for value in stats.values())
    for copied in (pickle.dumps, copy.copy):
        with pytest.raises(TypeError, match="cannot be pickled"):
            copied(agent)


@pytest.mark.parametrize("room", [-1, 1 << 63, 1 << 64, -(1 << 70)])
def test_rooms_have_63_bits(agent: kx.Agent, room: int) -> None:
    for call in (
        lambda: agent.push(room, [1], tokens=1),
        lambda: agent.expect(room, [1], tokens=1, source=NOWHERE),
        lambda: agent.open(room),
        lambda: agent.cancel(room),
        lambda: agent.state(room),
        lambda: agent.wait(room),
    ):
        with pytest.raises(kx.BadArgument, match=rf"room {room} is out of range: a room has 63 bits"):
            call()


PAGES: list[tuple[Any, type[Exception], str]] = [
    (np.array([1.0]), TypeError, "float64"),
    (np.array([True]), TypeError, "bool"),
    (np.array(["1"]), TypeError, "<U1"),
    ([1.0], TypeError, "float"),
    (["1"], TypeError, "str"),
    ("1", TypeError, "str"),
    (1, TypeError, "int"),
    (None, TypeError, "NoneType"),
    (np.ones((1, 1), np.int32), kx.BadArgument, r"one-dimensional, but this array has shape \[1, 1\]"),
    (np.int32(1), kx.BadArgument, r"shape \[\]"),
    ([], kx.BadArgument, "1 pages of 4 tokens in group 0, but 0 were given"),
    ([[1], [2]], TypeError, "list"),
]


@pytest.mark.parametrize(("pages", "error", "text"), PAGES)
def test_pages_that_are_none(agent: kx.Agent, pages: Any, error: type[Exception], text: str) -> None:
    room = kx.new_room()
    with pytest.raises(error, match=text):
        agent.push(room, pages, tokens=1)
    with pytest.raises(error, match=text):
        agent.expect(room, pages, tokens=1, source=NOWHERE)
    assert agent.state(room) is None


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"tokens": 9},
        kx.BadArgument,
        "9 tokens from token 0 need 3 pages of 4 tokens in group 0, but 2 were given",
    ),
    ({"tokens": 6, "start": 3}, kx.BadArgument, "need 3 pages"),
    ({"tokens": -1}, kx.BadArgument, "not -1"),
    ({"tokens": 1 << 64}, kx.BadArgument, "64 bits"),
    ({"tokens": 1 << 63, "start": 1 << 63}, kx.BadArgument, "too large"),
    ({"tokens": 1.5}, TypeError, "float"),
    ({"start": -4}, kx.BadArgument, "not -4"),
    ({"timeout": -1}, kx.BadArgument, "seconds, 0 or more, not -1"),
    ({"timeout": float("nan")}, kx.BadArgument, "seconds"),
    ({"bootstrap_timeout": "soon"}, TypeError, "real number, not str"),
]
BAD_PUSH: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"layers": (1, 1)}, kx.BadArgument, "layers 1 to 1"),
    ({"layers": 1}, TypeError, "layers"),
    ({"meta": b"x" * 65_537}, kx.BadArgument, "65537 bytes"),
    ({"meta": b"x", "last": False}, kx.BadArgument, "last"),
    ({"meta": "text"}, TypeError, "'str' object"),
    ({"event": object()}, TypeError, "event is a stream or an event of torch or cupy"),
    ({"event": 0}, kx.BadArgument, "is no CUevent"),
]
BAD_EXPECT: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"source": ""}, kx.BadArgument, "empty"),
    ({"source": "host:port"}, kx.BadArgument, "'?\"?port"),
    ({"source": 8998}, TypeError, "'int' object"),
    ({"source_dp_rank": -1}, kx.BadArgument, "-1 is out of range: 0 to 4294967295"),
    ({"verify": "some"}, kx.BadArgument, 'verify "some" is not known: "full", "sample" and None are'),
    ({"verify": True}, TypeError, "'bool' object"),
]


@pytest.mark.parametrize(("given", "error", "text"), BAD + BAD_PUSH)
def test_bad_pushes(agent: kx.Agent, given: dict[str, Any], error: type[Exception], text: str) -> None:
    room = kx.new_room()
    with pytest.raises(error, match=text):
        agent.push(room, [1, 2], **({"tokens": 8} | given))
    assert agent.state(room) is None


@pytest.mark.parametrize(("given", "error", "text"), BAD + BAD_EXPECT)
def test_bad_expects(agent: kx.Agent, given: dict[str, Any], error: type[Exception], text: str) -> None:
    room = kx.new_room()
    with pytest.raises(error, match=text):
        agent.expect(room, [1, 2], **({"tokens": 8, "source": NOWHERE} | given))
    assert agent.state(room) is None


def test_rooms_in_use_and_rooms_that_are_not(agent: kx.Agent) -> None:
    room = kx.new_room()
    agent.expect(room, [1], tokens=1, source=NOWHERE)
    with pytest.raises(kx.RoomInUse, match=str(room)) as caught:
        agent.expect(room, [2], tokens=1, source=NOWHERE)
    assert caught.value.room == room
    agent.cancel(room)
    with pytest.raises(kx.Cancelled) as cancelled:
        agent.wait(room, 10)
    assert cancelled.value.room == room
    for call in (agent.cancel, agent.wait):
        with pytest.raises(kx.UnknownRoom, match="12345"):
            call(12345)
    push = agent.push(kx.new_room(), [1], tokens=1)
    with pytest.raises(kx.BadArgument, match="last"):
        agent.push(push.room, [2], start=1, tokens=1)
    with pytest.raises(TypeError):
        agent.retract(push.id)  # type: ignore[arg-type]


def test_a_wait_that_takes_too_long(agent: kx.Agent) -> None:
    push = agent.push(kx.new_room(), [1], tokens=1)
    for timeout in (0, 0.06):
        with pytest.raises(kx.WaitTimeout, match=rf"{push.room} has not ended within {timeout}") as caught:
            agent.wait(push.room, timeout)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.room == push.room
    assert agent.state(push.room) == "Bootstrapping"


def test_handles_compare(agent: kx.Agent) -> None:
    room = kx.new_room()
    a, b = agent.push(room, [1], tokens=1, last=False), agent.push(room, [2], start=1, tokens=1)
    assert (a.room, a.id < b.id, a == b, a == a) == (room, True, False, True)
    assert len({a, b}) == 2


START: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"role": "router"}, kx.BadArgument, "router"),
    ({"fabric": "pigeon"}, kx.BadArgument, "pigeon"),
    ({"queue_capacity": 0}, kx.BadArgument, "queue_capacity is 0"),
    ({"listen": "127.0.0.1"}, kx.KvxferError, ""),
    ({"listen": "[::1"}, kx.BadArgument, "bracket"),
    ({"listen": "192.0.2.1:0", "secret": "s"}, kx.ListenError, "192.0.2.1"),
    ({"listen": "0.0.0.0:0"}, kx.AuthError, "secret"),
    ({"secret": ""}, kx.BadArgument, "secret is empty"),
    ({"secret": 5}, TypeError, "secret"),
    ({"cpu": 100_000}, kx.BadArgument, "100000"),
    ({"dp_rank": 1 << 32}, kx.BadArgument, "4294967296 is out of range"),
    ({"heartbeat": -1.0}, kx.BadArgument, "-1"),
]


@pytest.mark.parametrize(("given", "error", "text"), START)
def test_agents_that_do_not_start(given: dict[str, Any], error: type[Exception], text: str) -> None:
    if given == {"listen": "127.0.0.1"}:
        # Without a port the directory's is meant, which may be free: take it first.
        with socket.socket() as taken:
            try:
                taken.bind(("127.0.0.1", 8998))
            except OSError:
                pass
            else:
                taken.listen()
            with pytest.raises(kx.ListenError, match="8998"):
                kx.Agent("start", LAYOUT, ONE, memory=kx.alloc(LAYOUT, ONE, pages=1), **given)
        return
    with pytest.raises(error, match=text):
        kx.Agent("start", LAYOUT, ONE, memory=kx.alloc(LAYOUT, ONE, pages=1), **given)


@pytest.mark.parametrize("layout", [5, None, [LAYOUT, 5], "layout"])
def test_layouts_of_another_type(layout: Any) -> None:
    pool = kx.alloc(LAYOUT, ONE, pages=1)
    for call in (
        lambda: kx.Agent("layout", layout, ONE, memory=pool),
        lambda: kx.alloc(layout, ONE, pages=1),
        lambda: kx.plan_transfer((layout, ONE), (LAYOUT, ONE), src_pages=[0], dst_pages=[0], tokens=1),
    ):
        with pytest.raises(TypeError, match="layout is a PageLayout or a list of them"):
            call()


def test_case_19_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(kx.ListenError, match=str(port)) as caught:
            kx.Agent("late", LAYOUT, ONE, memory=kx.alloc(LAYOUT, ONE, pages=1), listen=f"127.0.0.1:{port}")
        assert isinstance(caught.value, OSError)


def test_where_the_secret_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**given: Any) -> None:
        kx.Agent(
            "secret", LAYOUT, ONE, memory=kx.alloc(LAYOUT, ONE, pages=1), listen="0.0.0.0:0", **given
        ).close()

    monkeypatch.setenv("KVXFER_SECRET", "from the environment")
    start()
    monkeypatch.setenv("KVXFER_SECRET_FILE", str(tmp_path / "secret"))
    with pytest.raises(kx.AuthError, match="cannot be read: No such file"):
        start()
    start(secret=b"given, so the file does not matter")
    (tmp_path / "secret").write_text("\n")
    with pytest.raises(kx.BadArgument, match="is empty"):
        start()
    (tmp_path / "secret").write_text("from the file\n")
    start()


def test_a_closed_agent_says_so() -> None:
    agent = kx.Agent("closed", LAYOUT, ONE, memory=kx.alloc(LAYOUT, ONE, pages=1))
    push = agent.push(kx.new_room(), [0], tokens=1)
    assert agent.close() == []
    assert agent.closed
    assert "closed" in repr(agent)
    for call in (
        lambda: agent.push(kx.new_room(), [0], tokens=1),
        lambda: agent.expect(kx.new_room(), [0], tokens=1, source=NOWHERE),
        lambda: agent.open(kx.new_room()),
        lambda: agent.retract(push),
        lambda: agent.cancel(push.room),
        lambda: agent.evict("somebody"),
    ):
        with pytest.raises(kx.AgentClosed):
            call()
    with pytest.raises(kx.AgentClosed):
        agent.wait(push.room, 5)
    assert [event.state for event in agent.poll()] == ["Failed"]
    assert agent.poll() == []
