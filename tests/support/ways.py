"""The fabrics that the fault tests run over, and the agents that survive the faults."""

from __future__ import annotations

import select
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from guarded import Guarded, footprint
from two import Rank

import kvxfer as kx

# 100 pages are 26 MB over all layers: bytes flow for some milliseconds.
BIG: dict[str, Any] = {
    "layers": 32,
    "kv_heads": 1,
    "head_dim": 128,
    "page_tokens": 16,
    "dtype": "bfloat16",
    "order": "HND",
}
SMALL = BIG | {"layers": 4}
PAGE_TOKENS = 16
QUICK: dict[str, Any] = {"heartbeat": 0.1, "suspect_after": 0.5, "fence_after": 0.5}

Said = dict[str, Any]
Footprint = dict[str, dict[str, int]]


@dataclass(frozen=True)
class Way:
    """A fabric, and what may be expected of it."""

    name: str
    fabric: str
    tls: str | None
    # Whether a peer that does not answer, but may live, can be fenced: the table of docs/safety.md.
    fences: bool
    # Seconds within which a peer's death on this host is seen and its pages are back, on a loaded machine.
    death_s: float
    staging: str = "auto"

    @property
    def options(self) -> dict[str, Any]:
        return {"fabric": self.fabric, "ucx_tls": self.tls, "staging": self.staging} | QUICK


SHM = Way("shm", "shm", None, fences=True, death_s=10)
TCP = Way("ucx-tcp", "ucx", "tcp,self", fences=False, death_s=20)
TCP_PACKED = Way("ucx-tcp-packed", "ucx", "tcp,self", fences=False, death_s=20, staging="always")
POSIX_PACKED = Way("ucx-posix-packed", "ucx", "posix,self,tcp", fences=False, death_s=20, staging="always")
POSIX = Way("ucx-posix", "ucx", "posix,self,tcp", fences=False, death_s=20)


def params(*ways: Way) -> list[Any]:
    """For `pytest.mark.parametrize`, with the mark of what needs UCX."""
    marks = {way: [pytest.mark.ucx] if way.fabric == "ucx" else [] for way in ways}
    return [pytest.param(way, id=way.name, marks=marks[way]) for way in ways]


def each_way(names: str, values: Sequence[Any], *, posix: Sequence[Any]) -> pytest.MarkDecorator:
    """Every value over shared memory and over UCX's TCP, and these over UCX's shared memory, whose way to the
    peer's memory is another, but which shares all the rest with TCP.
    """
    given = []
    for way in (SHM, TCP, POSIX):
        marks = [pytest.mark.ucx] if way.fabric == "ucx" else []
        for value in posix if way is POSIX else values:
            words = value if isinstance(value, tuple) else (value,)
            shown = "-".join(str(word) for word in words)
            given.append(pytest.param(way, *words, marks=marks, id=f"{way.name}-{shown}"))
    every = ["way", *(name.strip() for name in names.split(","))]
    return pytest.mark.parametrize(every, given, indirect=["way"])


class Remote(Rank):
    """A rank with guarded memory in a child process."""

    def __init__(self, way: Way, layout: dict[str, Any], pages: int, **given: Any) -> None:
        self.way, self.shape = way, layout
        super().__init__(layout, pages=pages, alloc=way.fabric, guard=True, **(way.options | given))

    def footprint(self) -> Footprint:
        return self.order(footprint=True)

    def received(self, seed: int, src: Any, dst: Any) -> None:
        self.order(received={"seed": seed, "src": ints(src), "dst": ints(dst)})

    def rest(self, granted: Any = ()) -> None:
        self.order(rest=ints(granted))

    def settle(self, pages: Any) -> None:
        self.order(settle=ints(pages))

    def arrived(self, pages: Any, seconds: float = 0) -> bool:
        found: bool = self.order(arrived={"pages": ints(pages), "seconds": seconds})["arrived"]
        return found

    def end(self, room: int, seconds: float = 20) -> list[Said]:
        return super().end(room)

    def first(self, room: int, seconds: float = 20) -> Said:
        return self.event(room)

    def evict(self, peer: str) -> None:
        self.order(evict=peer)

    def close(self) -> tuple[list[Said], Footprint]:
        """Closes the agent: what it gives back, and what the process has open afterwards."""
        found = self.order(close=True)
        return found["left"], found["footprint"]


class Local:
    """A rank with guarded memory in this process, with the same methods."""

    def __init__(self, way: Way, layout: dict[str, Any], pages: int, **given: Any) -> None:
        self.way, self.layout, self.pages = way, kx.PageLayout(**layout), pages
        self.seed = int(given.pop("seed", 99))
        self.name = str(given.pop("name", "here"))
        self.guarded = Guarded(
            self.layout, kx.Shard(), pages=pages, seed=self.seed, fabric=way.fabric, tls=way.tls
        )
        self.agent = kx.Agent(
            self.name, self.layout, kx.Shard(), memory=self.guarded.memory, **(way.options | given)
        )
        self.address = self.agent.address
        self.cancel, self.evict, self.stats = self.agent.cancel, self.agent.evict, self.agent.stats
        self.received, self.rest = self.guarded.received, self.guarded.rest
        self.settle = self.guarded.settle
        self.footprint = footprint
        self._said: list[Said] = []
        self.last: Said = {}

    def expect(self, room: int, pages: Any, **given: Any) -> None:
        self.agent.expect(room, np.asarray(pages, np.int64), **given)

    def push(self, room: int, pages: Any, **given: Any) -> int:
        return self.agent.push(room, np.asarray(pages, np.int64), **given).id

    def state(self, room: int) -> str | None:
        return self.agent.state(room)

    def arrived(self, pages: Any, seconds: float = 0) -> bool:
        until = time.monotonic() + seconds
        while not (found := self.guarded.arrived(pages)) and time.monotonic() < until:
            pass
        return found

    def _poll(self) -> None:
        self._said += [
            {
                "event": {
                    "room": ev.room,
                    "state": ev.state,
                    "released": ev.released,
                    "error": type(ev.error).__name__ if ev.error else None,
                },
                "text": str(ev.error) if ev.error else None,
            }
            for ev in self.agent.poll()
        ]

    def first(self, room: int, seconds: float = 20) -> Said:
        """The next event of this room; `last` has what else was said of it."""
        deadline = time.monotonic() + seconds
        while True:
            self._poll()
            for i, said in enumerate(self._said):
                if said["event"]["room"] == room:
                    self.last = self._said.pop(i)
                    event: Said = self.last["event"]
                    return event
            left = deadline - time.monotonic()
            assert left > 0, f"nothing of room {room} within {seconds} s: {self._said} {self.stats()}"
            select.select([self.agent], [], [], left)

    def end(self, room: int, seconds: float = 20) -> list[Said]:
        """All events of this room until its pages are released."""
        found = [self.first(room, seconds)]
        while not found[-1]["released"]:
            found.append(self.first(room, seconds))
        return found

    def more(self) -> list[Said]:
        """Events that nobody has asked for."""
        self._poll()
        said, self._said = self._said, []
        return [one["event"] for one in said]

    def close(self) -> tuple[list[Said], Footprint]:
        left = [{"room": one.room, "pages": one.pages, "peers": one.peers} for one in self.agent.close()]
        return left, footprint()

    def __enter__(self) -> Local:
        return self

    def __exit__(self, *_: object) -> None:
        self.agent.close()


Side = Local | Remote


def ints(pages: Any) -> list[int]:
    return [int(page) for page in pages]


def tokens(pages: Sequence[int] | np.ndarray[Any, Any]) -> int:
    return len(pages) * PAGE_TOKENS
