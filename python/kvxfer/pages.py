"""Which pages of an engine's memory are free: `PagePool`.

An engine with an allocator of its own does not need it. Tests, examples and small engines do.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.errors import BadArgument, PageError, PoolFull

__all__ = ["PagePool"]

PageIds = npt.NDArray[np.int32]

_MOST = 2**31 - 1


class PagePool:
    """Hands out page ids `0` to `pages - 1`, each to one holder at a time. May be used from any thread.

    * `take(n)` gives `n` free pages or none: `PoolFull` says at once that too few are free now, `PageError`
      that the pool never has so many.
    * `give(pages)` takes them back, all or none: a page that is free already, is there twice, or is not of
      this pool is a `PageError`. Give back what was granted or pushed only after the event of its room that
      has `released` set.

    Both cost a little for each page that they move, however large the pool is. Pages that came back last go
    out first, while caches and translation tables still know them. `len(pool)` is how many are free.

    >>> import kvxfer as kx
    >>> pool = kx.PagePool(20)
    >>> first, second = pool.take(8), pool.take(8)
    >>> pool.take(8)
    Traceback (most recent call last):
        ...
    kvxfer.errors.PoolFull: 8 pages are wanted, but 4 of the pool's 20 are free: try again after a release
    >>> pool.give(first)
    >>> sorted(pool.take(8)) == sorted(first), len(pool)
    (True, 4)
    """

    def __init__(self, pages: int) -> None:
        count = operator.index(pages)
        if not 0 < count <= _MOST:
            raise BadArgument(f"pages is {count}; a pool has 1 to {_MOST} pages")
        self._lock = threading.Lock()
        # A stack of the free ids, its top at the end; what lies above the top is void.
        self._stack: PageIds = np.arange(count - 1, -1, -1, dtype=np.int32)
        self._free = count
        self._is_free: npt.NDArray[np.bool_] = np.ones(count, np.bool_)
        # Where a page stands in the list that is given back: a page that is there twice stands elsewhere too.
        self._place: PageIds = np.zeros(count, np.int32)

    @property
    def pages(self) -> int:
        """How many pages there are, free or not."""
        return len(self._stack)

    def __len__(self) -> int:
        """How many pages are free now."""
        return self._free

    def __bool__(self) -> bool:
        # A pool with no free page is still a pool.
        return True

    def __repr__(self) -> str:
        return f"<PagePool of {self.pages} pages, {self._free} free>"

    def take(self, pages: int) -> PageIds:
        """So many free pages, as an int32 array that belongs to the caller.

        Raises `PoolFull` if too few are free now (nothing was taken; try again when a room's pages came
        back), `PageError` if the pool never has so many, `BadArgument` for a negative number.
        """
        count = operator.index(pages)
        if count < 0:
            raise BadArgument(f"{count} pages are wanted; it must be 0 or more")
        if count > self.pages:
            raise PageError(
                f"{count} pages are wanted, but the pool has {self.pages} in all: this can never be had"
            )
        with self._lock:
            left = self._free - count
            if left < 0:
                raise PoolFull(
                    f"{count} pages are wanted, but {self._free} of the pool's {self.pages} are free: "
                    "try again after a release"
                )
            # The top first.
            found = self._stack[left : self._free][::-1].copy()
            self._is_free[found] = False
            self._free = left
        return found

    def give(self, pages: Any) -> None:
        """Takes pages back, in any order and by any number of calls; `pages` are integers as `take` gave.

        Raises `PageError` for a page that is free already, is in the list twice, or is not of this pool;
        nothing was taken back then.
        """
        ids = np.asarray(pages)
        if ids.size == 0:
            return
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise BadArgument(f"pages must be a flat list of integers, not {ids.dtype} of shape {ids.shape}")
        wrong = ids[(ids < 0) | (ids >= self.pages)]
        if wrong.size:
            raise PageError(f"page {wrong[0]} is not of this pool, which has pages 0 to {self.pages - 1}")
        ids = ids.astype(np.int32)
        with self._lock:
            free = ids[self._is_free[ids]]
            if free.size:
                raise PageError(f"page {free[0]} is free already: it was given back twice, or never taken")
            places = np.arange(len(ids), dtype=np.int32)
            self._place[ids] = places
            twice = ids[self._place[ids] != places]
            if twice.size:
                raise PageError(f"page {twice[0]} is in the list twice")
            self._is_free[ids] = True
            # So that the next `take` begins with the first of them.
            self._stack[self._free : self._free + len(ids)] = ids[::-1]
            self._free += len(ids)

    @contextmanager
    def taken(self, pages: int) -> Iterator[PageIds]:
        """`take`, and `give` when the block ends well.

        The block has to see its room's released event. An exception leaves the pages taken: whether a peer
        may still write them is for the caller to find out.
        """
        found = self.take(pages)
        yield found
        self.give(found)
