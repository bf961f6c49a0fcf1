"""What every library in `kvxfer bench peers` has to do, on either side."""

from __future__ import annotations

import abc
import time
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvxfer.cli._bench_rank import LAYERS, Ids, Memory, Pages, layout_of
from kvxfer.cli._loopback import Fabric, Side

__all__ = ["PAGE_TOKENS", "End", "Turn", "now_us"]

PAGE_TOKENS = 16


def now_us() -> float:
    """The clock that all processes of the host share."""
    return time.monotonic_ns() / 1e3


class Turn(NamedTuple):
    """One hand-off."""

    room: int
    to: Ids
    """Pages of the target."""
    source: Ids
    """Pages of the source."""


class End(Pages, abc.ABC):
    """One side of one library, over its own memory.

    The source writes: `post` is all that its caller has to do for a request, from two page lists; `finish`
    waits for the end. The target may have to do something before (`arm`) and after (`settle`).
    """

    version = ""
    takes_part = False
    """Whether the target's thread has to do something before the bytes are where they belong."""

    def __init__(self, side: Side, memory: Memory, fabric: Fabric, pages: int) -> None:
        super().__init__(side, fabric, memory, layout_of(LAYERS, PAGE_TOKENS), pages)
        self.bases: npt.NDArray[np.uint64] = np.array(
            [region.ctypes.data for region in self.regions], np.uint64
        )

    def addresses(self, bases: npt.NDArray[np.uint64], ids: Ids) -> npt.NDArray[np.uint64]:
        """Where these pages lie, region by region."""
        offsets = ids.astype(np.uint64) * np.uint64(self.page_bytes)
        return (bases[:, np.newaxis] + offsets).reshape(-1)

    @abc.abstractmethod
    def info(self) -> dict[str, Any]:
        """What the other side has to know of this one."""

    @abc.abstractmethod
    def connect(self, other: dict[str, Any]) -> None:
        """Gets in contact with it."""

    def arm(self, turn: Turn) -> None:
        """The target's part before the source posts."""

    @abc.abstractmethod
    def post(self, turn: Turn) -> None:
        """The source's part on the caller's thread."""

    @abc.abstractmethod
    def finish(self, turn: Turn) -> None:
        """Waits at the source until the bytes are there."""

    def is_here(self) -> bool:
        """At a target that takes part: whether there is something to do."""
        return False

    def settle(self, turn: Turn) -> float | None:
        """The target's part in the end; when the bytes were there, if it is the one that knows."""
        return None

    def close(self) -> None:
        """Lets go."""
