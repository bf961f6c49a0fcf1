"""Virtual time: what happens when, in an order that a seed decides wholly."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["Clock"]


class Clock:
    """A heap of calls to make at given times; calls of the same time run in the order they were asked for."""

    __slots__ = ("_count", "_heap", "events", "now_ms")

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0

    def at(self, when_ms: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Has `call(argument)` made at this time, or now if it is past."""
        self._count += 1
        heapq.heappush(self._heap, (max(when_ms, self.now_ms), self._count, call, argument))

    def after(self, delay_ms: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Has `call(argument)` made so many milliseconds from now."""
        self._count += 1
        heapq.heappush(self._heap, (self.now_ms + delay_ms, self._count, call, argument))

    def run(self, until_ms: float = float("inf")) -> None:
        """Makes every call that is due until then, and those that they ask for."""
        heap = self._heap
        while heap and heap[0][0] <= until_ms:
            self.now_ms, _, call, argument = heapq.heappop(heap)
            self.events += 1
            call(argument)
