"""Memory of which every byte is known, with canaries around, and what a process has open.

Used in the tests' own process and, through `rank_child.py`, in the child processes.
"""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

import kvxfer as kx

Ids = Iterable[int]
Words = np.ndarray[Any, np.dtype[np.uint64]]


def scramble(index: Words, seed: int, region: int) -> Words:
    """Words of eight bytes, none of which is there twice in any region of any seed."""
    words = index + np.uint64((seed << 48) + (region << 32))
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words


class Guarded:
    """A pool with one page of canaries before and one after every region; the agent is given what is between.

    Pages that are not granted are canaries too: `rest` compares every byte of the pool that no room may
    write.
    """

    def __init__(
        self,
        layout: kx.PageLayout,
        shard: kx.Shard,
        *,
        pages: int,
        seed: int,
        fabric: str,
        tls: str | None,
    ) -> None:
        self.pages, self.seed = pages, seed
        self.pool = kx.alloc(layout, shard, pages=pages + 2, fabric=fabric, ucx_tls=tls)
        self.keys = list(self.pool.tensors)
        self.rows = {
            key: np.asarray(tensor).reshape(pages + 2, -1).view(np.uint8)
            for key, tensor in self.pool.tensors.items()
        }
        every = np.arange(-1, pages + 1)
        for key, rows in self.rows.items():
            rows[:] = self.content(seed, key, every)
        self.expected = {key: rows.copy() for key, rows in self.rows.items()}

    @property
    def memory(self) -> dict[tuple[int, int, str], Any]:
        """What an agent takes: every region without its two pages of canaries."""
        return {key: tensor[1:-1] for key, tensor in self.pool.tensors.items()}

    def content(self, seed: int, key: tuple[int, int, str], pages: Ids) -> np.ndarray[Any, Any]:
        """What these pages of a region hold at the start, with another pool's seed too."""
        words = self.rows[key].shape[1] // 8
        index = (np.asarray(list(pages), np.int64)[:, None] + 1) * words + np.arange(words)
        return scramble(index.astype(np.uint64), seed, self.keys.index(key)).view(np.uint8)

    def arrived(self, pages: Ids) -> bool:
        """Whether something was written to these pages of the first region."""
        rows, key = np.asarray(list(pages)) + 1, self.keys[0]
        return not np.array_equal(self.rows[key][rows], self.expected[key][rows])

    def received(self, seed: int, src: Ids, dst: Ids) -> None:
        """These pages are those of the pool with that seed, and are what is expected of them from now on."""
        src, at = list(src), np.asarray(list(dst)) + 1
        for key, rows in self.rows.items():
            want = self.content(seed, key, src)
            assert np.array_equal(rows[at], want), f"{key}: pages {list(dst)} are not {src} of pool {seed}"
            self.expected[key][at] = want

    def rest(self, granted: Ids = ()) -> None:
        """No byte changed but in these pages: not in any other page, and not around the regions."""
        others = np.setdiff1d(np.arange(self.pages + 2), np.asarray(list(granted), int) + 1)
        for key, rows in self.rows.items():
            if not np.array_equal(rows[others], self.expected[key][others]):
                wrong = (rows[others] != self.expected[key][others]).any(axis=1)
                raise AssertionError(
                    f"{key}: canaries overwritten in pages {(others[wrong] - 1).tolist()}"
                    f" (-1 and {self.pages} are the guards)"
                )

    def settle(self, pages: Ids) -> None:
        """What these pages hold now, half written or not, is what they have to hold from now on."""
        at = np.asarray(list(pages), int) + 1
        for key, rows in self.rows.items():
            self.expected[key][at] = rows[at]


def footprint() -> dict[str, dict[str, int]]:
    """Descriptors by kind, and threads by name, of this process."""
    files: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            what = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the one that lists
        files[what.partition(":[")[0]] += 1
    names: Counter[str] = Counter()
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            names[(task / "comm").read_text().strip()] += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    return {"files": dict(files), "threads": dict(names)}
