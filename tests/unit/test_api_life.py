"""Agents at fork, at the interpreter's end, and dropped unclosed: each in a process of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

START = """
import gc, os, sys, threading, time
from pathlib import Path
import kvxfer as kx
LAYOUT = kx.PageLayout(layers=1, kv_heads=1, head_dim=16, page_tokens=4, dtype="float16")
def agent(name="life"):
    return kx.Agent(name, LAYOUT, kx.Shard(), memory=kx.alloc(LAYOUT, kx.Shard(), pages=8))
def threads():
    return sum(path.read_text().startswith("kvx-") for path in Path("/proc/self/task").glob("*/comm"))
"""


def run(code: str, seconds: float = 20) -> str:
    began = time.monotonic()
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "dev",
            "-W",
            "ignore::DeprecationWarning",
            "-c",
            START + textwrap.dedent(code),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < seconds
    return done.stdout


def test_an_agent_that_is_dropped_closes_itself() -> None:
    out = run(
        """
        a = agent()
        a.push(kx.new_room(), [1], tokens=4)
        print(threads())
        del a
        gc.collect()
        print(threads())
        """
    )
    assert out.split() == ["1", "0"]


def test_exit_with_live_agents_and_work_in_flight() -> None:
    out = run(
        """
        a, b = agent("a"), agent("b")
        room = kx.new_room()
        b.expect(room, [1], tokens=4, source=a.address)
        a.push(kx.new_room(), [1], tokens=4)
        def wait():
            try:
                b.wait(room)
            except kx.KvxferError:
                pass
        threading.Thread(target=wait, daemon=True).start()
        cycle = [a]
        cycle.append(cycle)
        print("end")
        """
    )
    assert out == "end\n"


def test_an_agent_in_a_forked_child() -> None:
    out = run(
        """
        a = agent()
        push = a.push(kx.new_room(), [1], tokens=4)
        child = os.fork()
        if child == 0:
            refused = 0
            calls = [
                lambda: a.push(kx.new_room(), [1], tokens=4),
                lambda: a.expect(kx.new_room(), [1], tokens=4, source=a.address),
                lambda: a.open(kx.new_room()),
                lambda: a.retract(push),
                lambda: a.cancel(push.room),
                lambda: a.wait(push.room),
                lambda: a.state(push.room),
                a.poll,
                a.stats,
                a.fileno,
                lambda: a.evict("b"),
            ]
            for call in calls:
                try:
                    call()
                except kx.Forked:
                    refused += 1
            # Closing what is the parent's does nothing, and an agent of the child's own works.
            assert a.close() == []
            del a
            gc.collect()
            with agent("child") as b:
                b.push(kx.new_room(), [1], tokens=4)
            os.write(1, f"{refused} of {len(calls)}\\n".encode())
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(a.state(push.room), a.close())
        """
    )
    assert out == "11 of 11\nBootstrapping []\n"


def test_importing_needs_little() -> None:
    out = run("print([name for name in ('torch', 'libucx', 'ml_dtypes', 'asyncio') if name in sys.modules])")
    assert out == "[]\n"
