"""What `kvxfer stress` is going to do, decided by its seed alone: every process works it out for itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import kvxfer as kx

__all__ = [
    "ENGINES",
    "HEADS",
    "LAYERS",
    "LAYOUT",
    "MAX_PAGES",
    "PAGE_TOKENS",
    "SLICE_BYTES",
    "Cancel",
    "Kill",
    "Plan",
    "Rank",
    "Room",
    "When",
    "make_plan",
    "ranks_of",
]

When: TypeAlias = Literal["at-once", "in-flight", "later"]

LAYERS, HEADS, PAGE_TOKENS, _HEAD_DIM = 4, 4, 32, 64
# A page is 4 KiB a head in each of 8 regions: 128 KiB in all.
LAYOUT = kx.PageLayout(
    layers=LAYERS, kv_heads=HEADS, head_dim=_HEAD_DIM, page_tokens=PAGE_TOKENS, dtype="float16", order="HND"
)
# A room has 256 KiB to 4 MiB.
_MIN_PAGES, MAX_PAGES = 2, 32

# Bytes that a rank posts of one room at a time, None for kvxfer's choice. What is posted cannot be called
# back: over TCP, if nobody waits for it, much of it is late for long.
SLICE_BYTES: dict[str, int | None] = {"a": None, "b": 1 << 20}

# Prefill engines and their tensor-parallel sizes. Decode has one rank: a room of the first has two sources.
ENGINES: dict[str, int] = {"a": 2, "b": 1}

# Most cancels are to meet bytes in flight; some come before the first byte, some at any time.
_WHENS: tuple[When, ...] = ("in-flight",) * 7 + ("at-once",) * 2 + ("later",)
_IN_FLIGHT_S, _LATER_S, _DEATH_S = 0.002, 0.1, 0.002


@dataclass(frozen=True)
class Rank:
    """A prefill rank."""

    engine: str
    tp_rank: int

    @property
    def name(self) -> str:
        """What it is called everywhere."""
        return f"prefill-{self.engine}{self.tp_rank}"

    @property
    def shard(self) -> kx.Shard:
        """The heads that it holds."""
        return kx.Shard(tp_rank=self.tp_rank, tp_size=ENGINES[self.engine])


def ranks_of(engine: str) -> list[Rank]:
    """An engine's ranks; the first is its directory."""
    return [Rank(engine, tp_rank) for tp_rank in range(ENGINES[engine])]


@dataclass(frozen=True)
class Cancel:
    """That a room is given up, by whom and when.

    `by` is `"decode"` or a prefill rank's name. `"at-once"` is right after the room was ordered there,
    `"in-flight"` is `delay_s` after its bytes were seen to move, `"later"` is `delay_s` after the order.
    """

    by: str
    when: When
    delay_s: float


@dataclass(frozen=True)
class Room:
    """One hand-off."""

    index: int
    room: int
    engine: str
    tokens: int
    # Layers of each push: a room is pushed whole, or a half of the layers at a time.
    pushes: tuple[tuple[int, int], ...]
    # Whether prefill hears of it before decode grants its pages.
    pushed_first: bool
    cancel: Cancel | None

    @property
    def pages(self) -> int:
        """How many pages it takes on each rank."""
        return -(-self.tokens // PAGE_TOKENS)


@dataclass(frozen=True)
class Kill:
    """That a prefill rank is killed, `delay_s` after it was seen in Transferring, once so many rooms have
    started.
    """

    rank: Rank
    after: int
    delay_s: float


@dataclass(frozen=True)
class Plan:
    """All of it."""

    rooms: tuple[Room, ...]
    kills: tuple[Kill, ...]
    # Pages that decode and each rank of an engine have to grant or to push from.
    decode_pages: int
    prefill_pages: int


def make_plan(
    seed: int, rooms: int, concurrent: int, cancel: float, kill: int, spared: Sequence[str] = ()
) -> Plan:
    """The same for the same arguments, on every machine.

    Args:
        seed: decides everything below.
        rooms: hand-offs in all.
        concurrent: rooms at a time, for the size of the pools.
        cancel: the part of the rooms that somebody gives up.
        kill: how many prefill ranks are killed.
        spared: engines none of whose ranks is.
    """
    rng = random.Random(seed)
    cancelled = set(rng.sample(range(rooms), round(rooms * cancel)))
    out = []
    for index in range(rooms):
        engine = rng.choice(list(ENGINES))
        pages = min(MAX_PAGES, round(_MIN_PAGES * (MAX_PAGES / _MIN_PAGES) ** rng.random()))
        given_up = None
        if index in cancelled:
            by = rng.choice(["decode", "decode", rng.choice(ranks_of(engine)).name])
            when = rng.choice(_WHENS)
            # Mostly soon after the first byte, when most of a small room is still on its way.
            delay_s = rng.random() * _LATER_S if when == "later" else rng.random() ** 2 * _IN_FLIGHT_S
            given_up = Cancel(by, when, delay_s)
        half = LAYERS // 2
        out.append(
            Room(
                index=index,
                room=rng.getrandbits(63),
                engine=engine,
                tokens=pages * PAGE_TOKENS - rng.choice([0, 0, rng.randrange(PAGE_TOKENS)]),
                pushes=((0, half), (half, LAYERS)) if rng.random() < 0.25 else ((0, LAYERS),),
                pushed_first=rng.random() < 0.5,
                cancel=given_up,
            )
        )
    ranks = [rank for engine in ENGINES if engine not in spared for rank in ranks_of(engine)]
    # Everybody's turn comes.
    rng.shuffle(ranks)
    kills = []
    for n in range(kill):
        # Spread over the run, and not when it has hardly begun or is nearly over.
        part = (n + 0.6 + 0.4 * rng.random()) / (kill + 1)
        kills.append(Kill(ranks[n % len(ranks)], max(1, int(rooms * part)), rng.random() * _DEATH_S))
    # The pages of as many rooms as there are at a time, and a quarter more, which are held back and watched.
    sizes = sorted((room.pages for room in out), reverse=True)
    at_a_time = sum(room.pages for room in out) * min(concurrent, rooms) // rooms
    decode = max(at_a_time * 5 // 4, sizes[0]) + 2 * MAX_PAGES
    return Plan(tuple(out), tuple(kills), decode, decode * 3 // 5 + 2 * MAX_PAGES)
