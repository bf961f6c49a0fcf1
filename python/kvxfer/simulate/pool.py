"""Room for KV pages at a server."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvxfer.simulate.metrics import Gauge

__all__ = ["Pool"]


class Pool:
    """Room for KV, in tokens. Those who wait for some get it in the order they asked."""

    __slots__ = ("_waiting", "gauge", "total", "used")

    def __init__(self, total: int, gauge: Gauge) -> None:
        self.total = total
        self.used = 0
        self.gauge = gauge
        self._waiting: deque[tuple[int, Callable[[Any], None], Any]] = deque()

    @property
    def free(self) -> int:
        """Tokens that nobody holds."""
        return self.total - self.used

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def take(self, now_ms: float, tokens: int) -> bool:
        """Takes room if there is, past those who wait."""
        if tokens > self.total - self.used:
            return False
        self.used += tokens
        self.gauge.add(now_ms, tokens)
        return True

    def ask(self, now_ms: float, tokens: int, then: Callable[[Any], None], what: Any) -> None:
        """Calls `then(what)` once room is taken: at once, or when others gave it back."""
        if not self._waiting and self.take(now_ms, tokens):
            then(what)
        else:
            self._waiting.append((tokens, then, what))

    def ask_first(self, now_ms: float, tokens: int, then: Callable[[Any], None], what: Any) -> None:
        """The same, before all others."""
        self._waiting.appendleft((tokens, then, what))
        self.give(now_ms, 0)

    def give(self, now_ms: float, tokens: int) -> None:
        """Gives room back."""
        self.used -= tokens
        self.gauge.add(now_ms, -tokens)
        while self._waiting and self.take(now_ms, self._waiting[0][0]):
            _, then, what = self._waiting.popleft()
            then(what)

    def forget(self, now_ms: float, what: Any) -> None:
        """Whatever this one waits for it does not want any more."""
        kept = [one for one in self._waiting if one[2] is not what]
        if len(kept) < len(self._waiting):
            self._waiting = deque(kept)
            self.give(now_ms, 0)

    def clear(self, now_ms: float) -> None:
        """All is free, and nobody waits."""
        self._waiting.clear()
        self.give(now_ms, self.used)
