"""Helpers for tests with several real processes."""

from __future__ import annotations

import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nursery import Child, Nursery
from rank_child import digest, fill, layouts

import kvxfer as kx

if TYPE_CHECKING:
    from typing_extensions import Self

HERE = pathlib.Path(__file__).parent


class Rank:
    """A rank in a child process; a context manager that never leaves it running."""

    # Where children come from that start in no namespace of their own; without it each is a new interpreter.
    nursery: ClassVar[Nursery | None] = None

    def __init__(
        self,
        layout: dict[str, Any] | list[dict[str, Any]],
        shard: dict[str, Any] | None = None,
        *,
        pages: int,
        seed: int = 1,
        alloc: str = "auto",
        name: str = "prefill",
        env: dict[str, str] | None = None,
        engine_memory: bool = False,
        guard: bool = False,
        prefix: Sequence[str] = (),
        **agent: Any,
    ) -> None:
        """`guard`: its memory is a `guarded.Guarded`. `prefix`: words before its command, for instance
        nsenter's.
        """
        self.layout, self.shard = layouts(layout), kx.Shard(**(shard or {}))
        self.name, self.guard = name, guard
        self.pages, self.seed, self.alloc = pages, seed, alloc
        self._said: list[dict[str, Any]] = []
        self.last: dict[str, Any] = {}
        self._reference: kx.Pool | None = None
        self.child: subprocess.Popen[str] | Child
        if Rank.nursery and not prefix:
            self.child = Rank.nursery.child(env or {})
        else:
            self.child = subprocess.Popen(
                [*prefix, sys.executable, str(HERE / "rank_child.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(env or {})},
            )
        try:
            self._send(
                {
                    "layout": layout,
                    "shard": shard or {},
                    "pages": pages,
                    "seed": seed,
                    "alloc": alloc,
                    "name": name,
                    "engine_memory": engine_memory,
                    "guard": guard,
                    "agent": agent,
                }
            )
            self.address: str = self._read()["address"]
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self.child.pid

    def _send(self, order: dict[str, Any]) -> None:
        assert self.child.stdin is not None
        try:
            self.child.stdin.write(json.dumps(order) + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(f"the child process ended with {self.child.wait(10)}") from None

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"the child process ended with {self.child.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, **order: Any) -> dict[str, Any]:
        """Gives an order and waits until it was carried out."""
        self._send(order)
        while "done" not in (answer := self._read()):
            self._said.append(answer)
        found: dict[str, Any] = answer["done"]
        if "refused" in found:
            raise getattr(kx, found["refused"])(found["text"])
        return found

    def push(self, room: int, pages: Any, **arguments: Any) -> int:
        """Pushes, and returns the push's number."""
        ids = [[int(n) for n in p] if isinstance(p, list) else int(p) for p in pages]
        push: int = self.order(push=dict(room=room, pages=ids, **arguments))["push"]
        return push

    def cancel(self, room: int) -> None:
        self.order(cancel=room)

    def state(self, room: int) -> str | None:
        found: str | None = self.order(state=room)["state"]
        return found

    def expect(self, room: int, pages: Any, **arguments: Any) -> None:
        self.order(expect=dict(room=room, pages=[int(p) for p in pages], **arguments))

    def stats(self) -> dict[str, int]:
        found: dict[str, int] = self.order(stats=True)["stats"]
        return found

    def event(self, room: int) -> dict[str, Any]:
        """The next event of this room; `last` has what else was said of it."""
        while True:
            for i, said in enumerate(self._said):
                if said["event"]["room"] == room:
                    self.last = self._said.pop(i)
                    event: dict[str, Any] = self.last["event"]
                    return event
            self._said.append(self._read())

    def end(self, room: int) -> list[dict[str, Any]]:
        """All events of this room until its pages are released."""
        found = [self.event(room)]
        while not found[-1]["released"]:
            found.append(self.event(room))
        return found

    def more(self) -> list[dict[str, Any]]:
        """Events that nobody has asked for, after another round trip with the child."""
        self.stats()
        said, self._said = self._said, []
        return [one["event"] for one in said]

    def reference(self) -> Mapping[tuple[int, int, str], Any]:
        """What the child's pool held at its start, by (group, layer, part)."""
        if self._reference is None:
            more = 2 if self.guard else 0
            self._reference = kx.alloc(self.layout, self.shard, pages=self.pages + more, fabric="shm")
            fill(self._reference, self.seed)
        tensors = self._reference.tensors
        return {key: tensor[1:-1] for key, tensor in tensors.items()} if self.guard else tensors

    def digest(self, pages: Any) -> str:
        """Checksum of these pages as they are now, as `rank_child.digest` has it."""
        found: str = self.order(digest=[int(p) for p in pages])["digest"]
        return found

    def stop(self) -> None:
        """SIGSTOP, and back when every thread has stopped."""
        self.child.send_signal(signal.SIGSTOP)
        eventually(lambda: _states(self.pid) == {"T"}, "the process stops")

    def go_on(self) -> None:
        self.child.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and back when the process is gone."""
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.kill()
        self.child.wait(20)
        self.child.stdout.close()
        try:
            self.child.stdin.close()
        except BrokenPipeError:
            pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        if self.child.poll() is None:
            self.go_on()
            self.child.stdin.close()
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                self.child.kill()
                raise
            finally:
                self.child.wait()
        self.child.stdout.close()


Prefill = Rank


def _states(pid: int) -> set[str]:
    """The states of a process's threads, as letters."""
    tasks = pathlib.Path(f"/proc/{pid}/task")
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks.iterdir()}


def eventually(condition: Callable[[], bool], what: str, seconds: float = 10, pause: float = 0.002) -> None:
    """Waits for what has no event of its own."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(pause)


def events(agent: kx.Agent, until: Callable[[list[kx.Event]], bool], seconds: float = 20) -> list[kx.Event]:
    """What `poll` gives until there is enough, by its descriptor."""
    found: list[kx.Event] = []
    deadline = time.monotonic() + seconds
    while not until(found):
        left = deadline - time.monotonic()
        assert left > 0, f"not within {seconds} s: {found}"
        select.select([agent], [], [], left)
        found += agent.poll()
    return found


def released(room: int) -> Callable[[list[kx.Event]], bool]:
    return lambda found: any(ev.room == room and ev.released for ev in found)


def descriptors() -> dict[str, str]:
    """The open files of this process."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            pass  # the one that lists
    return found


def threads() -> int:
    return len(os.listdir("/proc/self/task"))


__all__ = ["Prefill", "Rank", "descriptors", "digest", "events", "eventually", "fill", "released", "threads"]
