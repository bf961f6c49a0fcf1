"""Two agents in this process, for tests of what is said about them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from two import events, eventually, released

import kvxfer as kx

LAYOUT = {"layers": 2, "kv_heads": 2, "head_dim": 16, "page_tokens": 4, "dtype": "float16"}
PAGES = 32


class Pair:
    """A prefill and a decode agent."""

    def __init__(self, prefill: kx.Agent, decode: kx.Agent) -> None:
        self.prefill, self.decode = prefill, decode

    def hand_off(self, pages: int = 4) -> int:
        """A whole room; what both sides' `poll` says is taken away."""
        room = kx.new_room()
        ids = np.arange(pages)
        self.decode.expect(room, ids, tokens=4 * pages, source=self.prefill.address)
        self.prefill.push(room, ids, tokens=4 * pages)
        for agent in (self.decode, self.prefill):
            last = events(agent, released(room))[-1]
            assert last.state == "Success", last.error
        return room

    def is_waiting(self, room: int) -> None:
        eventually(lambda: self.decode.state(room) == "Waiting", "the peers are in contact")

    def expect(self, pages: list[int], **more: Any) -> int:
        """A room that nobody pushes."""
        room = kx.new_room()
        more.setdefault("source", self.prefill.address)
        self.decode.expect(room, pages, tokens=4 * len(pages), **more)
        return room


@contextlib.contextmanager
def pair(prefill: str = "prefill-0", decode: str = "decode-0", **more: Any) -> Iterator[Pair]:
    layout, shard = kx.PageLayout(**LAYOUT), kx.Shard()
    pools = [kx.alloc(layout, shard, pages=PAGES) for _ in range(2)]
    with (
        kx.Agent(prefill, layout, shard, memory=pools[0], **more) as p,
        kx.Agent(decode, layout, shard, memory=pools[1], **more) as d,
    ):
        yield Pair(p, d)
