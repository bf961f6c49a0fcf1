"""Two agents in two processes that hand off rooms of one size again and again, for `doctor` and `bench post`.

The geometry is that of one of eight ranks of Qwen3-32B: 64 layers, 1 KV head of 128, bfloat16, pages of 16
tokens, so a page of one region has 4 KiB.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

import kvxfer as kx

__all__ = [
    "AT_ONCE",
    "LAYOUT",
    "PAGE_TOKENS",
    "ROOM_S",
    "WARM_UP",
    "End",
    "Fabric",
    "Side",
    "Waits",
    "shuffled",
]

Fabric: TypeAlias = Literal["shm", "ucx"]
Side: TypeAlias = Literal["prefill", "decode"]

PAGE_TOKENS = 16
LAYOUT = kx.PageLayout(layers=64, kv_heads=1, head_dim=128, page_tokens=PAGE_TOKENS, dtype="bfloat16")
ROOM_S = 30.0
# For `bench post`: so many hand-offs at a time, as one step of an engine's loop may make; and so many that do
# not count, because they meet cold memory and a peer that is not connected yet.
AT_ONCE = 4
WARM_UP = 2 * AT_ONCE
# Pages of a pool for each page of a hand-off: an engine's pool is larger than one request.
_SPREAD = 2

Pages = npt.NDArray[np.int32]


def shuffled(pool: int, count: int, seed: int) -> Pages:
    """`count` page ids of a pool of `pool`, in no order."""
    return np.random.default_rng(seed).permutation(pool)[:count].astype(np.int32)


class Waits:
    """What both ends of a benchmark do with an agent."""

    agent: kx.Agent
    #: Seconds between two looks at a room that waits for its grant.
    ask_s: ClassVar[float] = 20e-6

    def await_grants(self, rooms: Sequence[int]) -> None:
        """Bootstraps rooms and waits until decode's grants for them are here.

        Raises:
            KvxferError: if a room fails, or the time is up.
        """
        for room in rooms:
            self.agent.open(room)
        deadline = time.monotonic() + ROOM_S
        for room in rooms:
            while self.agent.state(room) == "Bootstrapping":
                if time.monotonic() > deadline:
                    raise kx.TransferTimeout(f"no grant for room {room} in {ROOM_S:.0f} s")
                time.sleep(self.ask_s)

    def drain(self, rooms: Sequence[int], timeout: float = ROOM_S) -> list[kx.Event]:
        """Waits for the rooms' ends, and takes everything out of the completion queue.

        Raises:
            KvxferError: if a room fails, or the time is up.
        """
        events = [self.agent.wait(room, timeout) for room in rooms]
        left = set(rooms)
        while left:
            left -= {event.room for event in self.agent.poll() if event.released}
        return events


class End(Waits):
    """One side: memory, page ids and an agent.

    Args:
        side: `"prefill"` or `"decode"`.
        fabric: `"shm"` or `"ucx"`.
        tokens: tokens of a hand-off.
        pooled: whether the memory comes from `kvxfer.alloc`, or is numpy's as an engine's would be.
        secret: what both sides know.
        at_once: how many hand-offs decode has pages for at one time.
    """

    def __init__(
        self, side: Side, fabric: Fabric, tokens: int, *, pooled: bool, secret: str, at_once: int = 1
    ) -> None:
        self.tokens = tokens
        self.count = -(-tokens // PAGE_TOKENS)
        # Prefill can push the same pages for several rooms; decode's must all be different.
        sets = at_once if side == "decode" else 1
        total = _SPREAD * self.count * sets
        self.memory: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
        owner: Any
        if pooled:
            pool = owner = kx.alloc(LAYOUT, kx.Shard(), pages=total, fabric=fabric)
            self.memory = [(pool.k(i), pool.v(i)) for i in range(LAYOUT.layers)]
        else:
            shape = (total, 1, PAGE_TOKENS, LAYOUT.head_dim)
            self.memory = [
                (np.zeros(shape, np.uint16), np.zeros(shape, np.uint16)) for _ in range(LAYOUT.layers)
            ]
            owner = self.memory
        ids = shuffled(total, self.count * sets, seed=1 if side == "prefill" else 2)
        self.sets = [ids[i * self.count : (i + 1) * self.count].copy() for i in range(sets)]
        self.agent = kx.Agent(
            side, LAYOUT, kx.Shard(), memory=owner, role=side, fabric=fabric, secret=secret, engine=side
        )

    def fill(self) -> None:
        """Gives each page its own contents."""
        for layer, part, array in self._arrays():
            array[self.sets[0]] = _contents(layer, part, self.count)

    def touch(self) -> None:
        """Has the system map the pages that bytes will land in, as those of a running engine are."""
        for _, _, array in self._arrays():
            for pages in self.sets:
                array[pages] = 0

    def is_filled(self) -> bool:
        """Whether each token of the last hand-off into each set is what `fill` wrote on the other side."""
        for layer, part, array in self._arrays():
            wanted = _contents(layer, part, self.count).reshape(-1, LAYOUT.head_dim)[: self.tokens]
            for pages in self.sets:
                if not np.array_equal(array[pages].reshape(-1, LAYOUT.head_dim)[: self.tokens], wanted):
                    return False
        return True

    def _arrays(self) -> Iterator[tuple[int, int, npt.NDArray[np.uint16]]]:
        for layer, pair in enumerate(self.memory):
            for part, array in enumerate(pair):
                yield layer, part, array.view(np.uint16)


def _contents(layer: int, part: int, count: int) -> npt.NDArray[np.uint16]:
    """What the pages of one region hold: rows differ by page, token, layer and part."""
    rows = np.arange(count * PAGE_TOKENS, dtype=np.uint32) * 7919 + layer * 131 + part * 17
    columns = np.arange(LAYOUT.head_dim, dtype=np.uint32) * 257
    mixed = (rows[:, np.newaxis] + columns).astype(np.uint16)
    return mixed.reshape(count, 1, PAGE_TOKENS, LAYOUT.head_dim)
