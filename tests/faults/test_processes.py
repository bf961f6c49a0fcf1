"""Processes: an id that is given away again, fork, and agents that nobody closes."""

from __future__ import annotations

import gc
import os
import time

import numpy as np
import pytest
from scene import endings, hand_off, scene
from script import run
from two import eventually
from ways import SMALL, Local, Remote, Way, each_way, tokens

import kvxfer as kx

SCENE = """
import atexit, time
from scene import *
from ways import *
way = {{one.name: one for one in (SHM, TCP, POSIX)}}[{name!r}]
EVEN = [0, 2, 4, 6, 8]
"""


def in_scene(way: Way, code: str) -> str:
    """The code has `other`, and the lines that follow run in a scene `it`."""
    body = "\n".join(" " * 4 + line for line in code.strip("\n").splitlines())
    return (
        SCENE.format(name=way.name)
        + 'with Remote(way, SMALL, 64, name="other", seed=7) as other, scene(way, other) as it:\n'
        + body
        + '\nprint("good")\n'
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="choosing a process id takes root")
def test_a_recycled_process_id_is_another_process(way: Way) -> None:
    """In a namespace of its own, where the next id can be chosen. The death of the first is seen though its
    id is in use again, and the death of the second is its own.
    """
    code = """
for n in range(2):
    first = Remote(way, SMALL, 54, name="first", seed=1)
    hand_off(first, it.here, EVEN, it.field[:5])
    room = it.room()
    it.here.expect(room, it.field, tokens=tokens(it.field), source=first.address)
    eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
    for attempt in range(50):
        first.kill()
        with open("/proc/sys/kernel/ns_last_pid", "w") as file:
            file.write(str(first.pid - 1))
        second = Remote(way, SMALL, 54, name="second", seed=2, listen=first.address)
        if second.pid == first.pid:
            break
        second.kill()
    assert second.pid == first.pid, (first.pid, second.pid)
    events = it.is_over(room, it.field)
    assert events[0]["error"] == "PeerLost", events
    it.here.rest()
    hand_off(second, it.here, EVEN, it.field[:5])
    room = it.room()
    it.here.expect(room, it.field, tokens=tokens(it.field), source=second.address)
    eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
    time.sleep(0.3)
    assert it.here.state(room) == "Waiting", "the first one's death is not the second's"
    second.kill()
    events = it.is_over(room, it.field)
    assert events[0]["error"] == "PeerLost", events
"""
    assert run(way, in_scene(way, code), prefix=("unshare", "--pid", "--fork", "--mount-proc")) == "good"


def test_fork(way: Way) -> None:
    """In the middle of rooms. Use in the child is a typed error; what the child closes, drops and ends is
    its own.
    """
    code = """
room = it.room()
peer = Remote(way, SMALL, 54, name="peer", seed=1)
it.here.expect(room, it.field, tokens=tokens(it.field), source=peer.address)
eventually(lambda: it.here.state(room) == "Waiting", "the grant is out")
children = []
for how in range(3):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            it.here.push(kx.new_room(), EVEN, tokens=80)
        except kx.Forked:
            code = 7
        if how == 1:
            assert it.here.agent.close() == []
        if how == 2:
            vars(it.here).clear()
            gc.collect()
        atexit._run_exitfuncs()
        os._exit(code)
    children.append(child)
for child in children:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert it.here.state(room) == "Waiting"
peer.push(room, np.arange(20) + 20, tokens=tokens(it.field))
assert endings(it.here.end(room)) == SUCCESS
it.give_up(room)
it.here.received(peer.seed, np.arange(20) + 20, it.field)
peer.kill()
"""
    assert run(way, in_scene(way, code)) == "good"


@each_way("side", ["prefill", "decode"], posix=["prefill"])
def test_an_agent_that_is_dropped_unclosed(way: Way, other: Remote, side: str) -> None:
    """With a room under way: it ends in half a second, its peer hears of it, and what it still writes harms
    nobody.
    """
    with scene(way, other) as it, Remote(way, SMALL, it.here.pages, name="peer", seed=1) as peer:
        dropped = Local(way, SMALL, it.here.pages, name="dropped", seed=2)
        room = kx.new_room()
        source, target = (dropped, peer) if side == "prefill" else (peer, dropped)
        target.expect(room, it.field, tokens=tokens(it.field), source=source.address)
        eventually(lambda: target.state(room) == "Waiting", "the grant is out")
        source.push(room, it.source, tokens=tokens(it.field), last=False, layers=(0, 3))
        eventually(lambda: source.stats()["deliveries"] == 0 and target.arrived(it.field), "delivered")
        began = time.monotonic()
        vars(dropped).clear()
        gc.collect()
        assert time.monotonic() - began < 5
        events = peer.end(room)
        assert events[0]["state"] == "Failed"
        assert events[0]["error"] in ("PeerLost", "AgentClosed", "Cancelled"), peer.last
        peer.rest(it.field if side == "prefill" else ())
        even = np.arange(5) * 2
        peer.settle(it.field)
        hand_off(peer, it.here, even, it.field[:5])


@each_way("side", ["prefill", "decode"], posix=["prefill"])
def test_the_interpreter_ends_with_an_agent_in_use(way: Way, other: Remote, side: str) -> None:
    with scene(way, other) as it, Remote(way, SMALL, it.here.pages, name="peer", seed=1) as peer:
        room, pages = kx.new_room(), it.here.pages
        if side == "decode":
            peer.push(room, range(20), tokens=320, last=False, layers=(0, 1))
            use = f"""
            a.expect({room}, range(20), tokens=320, source={peer.address!r})
            while a.state({room}) in (None, "Bootstrapping"):
                pass
            print("good")
            """
        else:
            use = f"""
            print(a.address, flush=True)
            a.push({room}, range(20), tokens=320, last=False)
            print("good")
            """
        out = run(
            way,
            f"""
            layout = kx.PageLayout(**{SMALL!r})
            m = kx.alloc(layout, kx.Shard(), pages={pages}, fabric=FABRIC, ucx_tls=TLS)
            a = kx.Agent("ends", layout, kx.Shard(), memory=m, fabric=FABRIC, ucx_tls=TLS)
            {use.strip()}
            """,
            seconds=20,
        )
        assert out.splitlines()[-1] == "good"
        if side == "decode":
            events = peer.end(room)
            assert events[0]["error"] in ("PeerLost", "AgentClosed", "Cancelled"), peer.last
            assert endings(events)[-1][1]
        peer.rest()
