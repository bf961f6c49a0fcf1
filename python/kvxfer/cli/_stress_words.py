"""What every byte of the pools of `kvxfer stress` has to be.

Memory is looked at as words of eight bytes, and each word says what it is:

    kind (4 bits) | room (24) | layer (6) | part (1) | head (5) | token (20) | word of the token's head (4)

for a room's contents. Pages that no room has are filled with a word of their own, new at each release; so are
canaries, pages that are never granted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

import kvxfer as kx
from kvxfer.cli._stress_plan import LAYOUT, MAX_PAGES, PAGE_TOKENS, Rank, Room, ranks_of

__all__ = ["CANARY_EVERY", "MAX_ROOMS", "Found", "Memory", "Words"]

Words: TypeAlias = npt.NDArray[np.uint64]
Ids: TypeAlias = npt.NDArray[np.int64]

_FREE, _ROOM, _CANARY = 1, 2, 3
_KIND = 60
_ROOM_AT, _LAYER_AT, _PART_AT, _HEAD_AT, _TOKEN_AT = 36, 30, 29, 24, 4
_WORDS = 16

MAX_ROOMS = 1 << 24
"""Rooms that a word can tell apart."""

CANARY_EVERY = 32
"""One page of so many is a canary."""

# So many things that were found wrong are told one by one.
_TOLD = 20


@dataclass
class Found:
    """What was found wrong."""

    corrupt_bytes: int = 0
    late_writes: int = 0
    told: list[str] = field(default_factory=list)

    def tell(self, text: str) -> None:
        """Keeps the first few findings in words."""
        if len(self.told) < _TOLD:
            self.told.append(text)

    def as_dict(self) -> dict[str, Any]:
        """For a message."""
        return {"corrupt_bytes": self.corrupt_bytes, "late_writes": self.late_writes, "told": self.told}


def _who(word: int) -> str:
    """What a word says it is."""
    kind = word >> _KIND
    if kind == _ROOM:
        return f"a byte of room {(word >> _ROOM_AT) & (MAX_ROOMS - 1)}"
    return {_FREE: "the filling of a free page", _CANARY: "a canary"}.get(kind, f"{word:#018x}")


class Memory:
    """A pool, what each of its pages holds, and which of them are free.

    Args:
        pool: the memory.
        shard: the heads that it has.
        found: where findings are counted.
    """

    def __init__(self, pool: kx.Pool, found: Found) -> None:
        self.found = found
        (self.pages,) = pool.pages
        heads = pool.shard.heads(pool.layouts[0])
        self.regions: list[tuple[str, Words]] = []
        self._templates: list[Words] = []
        pages, tokens, words = (np.arange(n, dtype=np.uint64) for n in (MAX_PAGES, PAGE_TOKENS, _WORDS))
        heads_array = np.arange(heads.start, heads.stop, dtype=np.uint64)
        within = (
            (heads_array << np.uint64(_HEAD_AT))[:, None, None]
            | (tokens << np.uint64(_TOKEN_AT))[:, None]
            | words
        )
        by_page = ((pages * np.uint64(PAGE_TOKENS)) << np.uint64(_TOKEN_AT))[:, None, None, None] + within
        for (_, layer, part), tensor in pool.tensors.items():
            number = ("k", "v").index(part)
            self.regions.append((f"layer {layer} {part}", np.asarray(tensor).view(np.uint64)))
            tag = (_ROOM << _KIND) | (layer << _LAYER_AT) | (number << _PART_AT)
            self._templates.append(by_page | np.uint64(tag))
        self.layers = [layer for (_, layer, _) in pool.tensors]
        self.filling = np.zeros(self.pages, np.uint64)
        everything = np.arange(self.pages)
        self.canaries = everything[everything % CANARY_EVERY == CANARY_EVERY - 1]
        granted = np.setdiff1d(everything, self.canaries)
        self._releases = 0
        self.refill(granted)
        self.filling[self.canaries] = np.uint64(_CANARY << _KIND) | self.canaries.astype(np.uint64)
        self._write(self.canaries)
        # Taken from the end: what came back last goes out first.
        self.free: list[int] = [int(page) for page in granted[::-1]]

    def _write(self, pages: Ids) -> None:
        filling = self.filling[pages][:, None, None, None]
        for _, region in self.regions:
            region[pages] = filling

    def refill(self, pages: Ids) -> None:
        """Fills pages with a word that was never used before."""
        self._releases += 1
        base = np.uint64((_FREE << _KIND) | ((self._releases & 0xFFFFFFFF) << 24))
        self.filling[pages] = base | pages.astype(np.uint64)
        self._write(pages)

    def take(self, count: int) -> Ids | None:
        """The free pages that came back last."""
        if len(self.free) < count:
            return None
        taken = np.array(self.free[-count:], dtype=np.int64)
        del self.free[-count:]
        return taken

    def put(self, pages: Ids) -> None:
        """Gives pages back."""
        self.free.extend(int(page) for page in pages)

    def fill(self, room: Room, pages: Ids) -> None:
        """Writes a room's contents, with what lies behind its last token left as it is."""
        count, rest = len(pages), room.tokens % PAGE_TOKENS
        base = np.uint64(room.index << _ROOM_AT)
        whole = count - 1 if rest else count
        for (_, region), template in zip(self.regions, self._templates, strict=True):
            region[pages[:whole]] = template[:whole] + base
            if rest:
                region[pages[whole], :, :rest] = template[whole, :, :rest] + base

    def read(self, pages: Ids) -> list[Words]:
        """A copy of these pages, a region at a time."""
        return [region[pages] for _, region in self.regions]

    def has_begun(self, pages: Ids, filling: Words) -> bool:
        """Whether the first word of a room has arrived, from any source."""
        _, region = self.regions[0]
        return bool((region[pages[0], :, 0, 0] != filling[0]).any())

    def scan(self, pages: Ids, when: str) -> None:
        """Counts free pages that are not what they were filled with: somebody wrote to them.

        Args:
            pages: which.
            when: for the words.
        """
        if not len(pages):
            return
        wanted = self.filling[pages][:, None, None, None]
        bad = np.zeros(len(pages), bool)
        for name, region in self.regions:
            got = region[pages]
            if (got == wanted).all():
                continue
            wrong = got != wanted
            bad |= wrong.any(axis=(1, 2, 3))
            first = tuple(int(i[0]) for i in np.nonzero(wrong))
            self.found.tell(
                f"page {int(pages[first[0]])} ({name}, {when}) was written after its release: "
                f"{_who(int(got[first]))}"
            )
        if bad.any():
            self.found.late_writes += int(bad.sum())
            self.refill(pages[bad])

    def scan_canaries(self) -> None:
        """Counts bytes of canaries that changed."""
        wanted = self.filling[self.canaries][:, None, None, None]
        for name, region in self.regions:
            wrong = int((region[self.canaries] != wanted).sum())
            if wrong:
                self.found.corrupt_bytes += 8 * wrong
                self.found.tell(f"{wrong} words of canaries ({name}) changed: a write beside every grant")

    def _wanted(self, region: int, room: Room, filling: Words) -> Words:
        """What a region of the room's pages holds once all is there."""
        count, rest = room.pages, room.tokens % PAGE_TOKENS
        wanted: Words = self._templates[region][:count] + np.uint64(room.index << _ROOM_AT)
        if rest:
            wanted[-1, :, rest:] = filling[-1]
        return wanted

    def _of_others(self, got: Words, bad: npt.NDArray[np.bool_], room: Room) -> set[int]:
        """The pages (by their place) with words of other rooms."""
        other = (got >> np.uint64(_KIND) == _ROOM) & bad
        other &= (got >> np.uint64(_ROOM_AT)) & np.uint64(MAX_ROOMS - 1) != room.index
        return {int(page) for page in np.nonzero(other)[0]}

    def check_success(self, room: Room, got: Sequence[Words], filling: Words) -> None:
        """Compares every byte of a room that ended well.

        Args:
            room: which.
            got: its pages, as `read` gave them.
            filling: what they held before.
        """
        late: set[int] = set()
        for n, words in enumerate(got):
            wanted = self._wanted(n, room, filling)
            if np.array_equal(words, wanted):
                continue
            bad = words != wanted
            late |= self._of_others(words, bad, room)
            self.found.corrupt_bytes += int(
                (np.ascontiguousarray(words).view(np.uint8) != wanted.view(np.uint8)).sum()
            )
            first = tuple(int(i[0]) for i in np.nonzero(bad))
            self.found.tell(
                f"room {room.index} ended well, but {self.regions[n][0]} has at {first} "
                f"{_who(int(words[first]))}"
            )
        self.found.late_writes += len(late)

    def check_failure(
        self, room: Room, got: Sequence[Words], filling: Words, *, copied: bool
    ) -> dict[str, bool]:
        """Compares every byte of a room that failed: each is the room's, or what was there before.

        Args:
            room: which.
            got: its pages, as `read` gave them after their release.
            filling: what they held before.
            copied: whether this side copied out of the source's pages. A source may reuse those as soon as it
                gives a room up, so that anything may be in the tokens of a room that was not to end well.

        Returns:
            The sources of which something had arrived, and whether one of their pushes was cut off: it had
            arrived, but not all of it.
        """
        arrived: dict[tuple[Rank, tuple[int, int]], int] = {}
        late: set[int] = set()
        rest = room.tokens % PAGE_TOKENS
        for n, words in enumerate(got):
            wanted = self._wanted(n, room, filling)
            right, old = words == wanted, words == filling[:, None, None, None]
            self._count_arrived(arrived, room, self.layers[n], right & ~old)
            bad = ~(right | old)
            if copied:
                if not rest:
                    continue
                bad[:-1] = False
                bad[-1, :, :rest] = False
            if bad.any():
                late |= self._of_others(words, bad, room)
                self._count_torn(room, n, words, wanted, filling, bad)
        self.found.late_writes += len(late)
        cut_off: dict[str, bool] = {}
        for (rank, layers), count in arrived.items():
            share = len(rank.shard.heads(LAYOUT))
            whole = room.tokens * share * _WORDS * 2 * (layers[1] - layers[0])
            if count:
                cut_off[rank.name] = cut_off.get(rank.name, False) or count < whole
        return cut_off

    def _count_arrived(
        self,
        arrived: dict[tuple[Rank, tuple[int, int]], int],
        room: Room,
        layer: int,
        new: npt.NDArray[np.bool_],
    ) -> None:
        """Adds up a layer's words that have arrived, by the push that they belong to."""
        layers = next(layers for layers in room.pushes if layers[0] <= layer < layers[1])
        for rank in ranks_of(room.engine):
            heads = rank.shard.heads(LAYOUT)
            count = int(new[:, heads.start : heads.stop].sum())
            arrived[rank, layers] = arrived.get((rank, layers), 0) + count

    def _count_torn(
        self,
        room: Room,
        region: int,
        got: Words,
        wanted: Words,
        filling: Words,
        bad: npt.NDArray[np.bool_],
    ) -> None:
        """Counts bytes that are neither the room's nor old. A dead peer's last word may have come in part."""
        old = np.broadcast_to(filling[:, None, None, None], got.shape)
        bytes_got, bytes_wanted, bytes_old = (
            np.ascontiguousarray(words[bad]).view(np.uint8) for words in (got, wanted, old)
        )
        wrong = int(((bytes_got != bytes_wanted) & (bytes_got != bytes_old)).sum())
        if wrong:
            self.found.corrupt_bytes += wrong
            first = tuple(int(i[0]) for i in np.nonzero(bad))
            self.found.tell(
                f"room {room.index} failed, and {self.regions[region][0]} has at {first} "
                f"{_who(int(got[first]))}"
            )
