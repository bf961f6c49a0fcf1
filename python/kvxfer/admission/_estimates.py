"""What is learnt from requests that ended."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

from kvxfer.errors import BadArgument

__all__ = ["AnswerLengths", "Mean", "Rate"]


class Mean:
    """A mean in which each new value counts for `weight`; before the first it is `start`."""

    __slots__ = ("_weight", "count", "value")

    def __init__(self, start: float, weight: float = 0.05) -> None:
        self.value = start
        self.count = 0
        self._weight = weight

    def add(self, value: float) -> None:
        """Takes a value in. The first few count as in a plain mean: a wrong start is soon forgotten."""
        self.count += 1
        self.value += (value - self.value) * max(self._weight, 1.0 / self.count)


class Rate:
    """Amounts per second of busy time, recent ones more than old ones; before the first it is `start`.

    Amounts and seconds are summed apart, so that several which end together are measured well.
    """

    __slots__ = ("_amount", "_keep", "_seconds", "value")

    def __init__(self, start: float, keep: float = 0.9) -> None:
        self.value = start
        self._keep = keep
        self._amount = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Takes in that `amount` was done in `seconds` of busy time."""
        self._amount = self._amount * self._keep + amount
        self._seconds = self._seconds * self._keep + max(seconds, 0.0)
        if self._seconds > 0.0 and self._amount > 0.0:
            self.value = self._amount / self._seconds


class AnswerLengths:
    """How long an answer will plausibly be: the length that `share` of the last `window` answers kept to.

    Answers that ran into their `max_tokens` count as the others. Before the first answer it is `start`.

    >>> lengths = AnswerLengths(start=256, share=0.9, window=10)
    >>> lengths.expected(max_tokens=1000), lengths.expected(max_tokens=16)
    (256, 16)
    >>> for tokens in (100, 110, 120, 90, 800, 100, 100, 100, 100, 100):
    ...     lengths.add(tokens)
    >>> lengths.expected()
    120
    """

    def __init__(self, start: int = 256, share: float = 0.9, window: int = 512) -> None:
        if start < 1 or window < 1 or not 0 < share <= 1:
            raise BadArgument(
                f"start is {start}, window {window} and share {share}: the first two are 1 or more, and "
                "share is above 0 and up to 1"
            )
        self._start = start
        self._share = share
        self._recent: deque[int] = deque()
        self._window = window
        self._sorted: list[int] = []

    def add(self, tokens: int) -> None:
        """An answer ended with so many tokens."""
        if len(self._recent) == self._window:
            old = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, old)]
        self._recent.append(tokens)
        insort(self._sorted, tokens)

    def expected(self, max_tokens: int | None = None) -> int:
        """The length to reserve for, at most `max_tokens`."""
        if self._sorted:
            last = len(self._sorted) - 1
            length = self._sorted[min(last, int(self._share * len(self._sorted) - 1e-9))]
        else:
            length = self._start
        return length if max_tokens is None else min(length, max_tokens)
