"""What is counted while a simulation runs, and what is made of it afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Gaps", "Gauge", "percentile", "spread"]

Floats = npt.NDArray[np.float64]


class Gauge:
    """A level over time: its highest, and its mean weighted by how long it held."""

    __slots__ = ("_area", "_since_ms", "level", "peak")

    def __init__(self) -> None:
        self.level = 0.0
        self.peak = 0.0
        self._area = 0.0
        self._since_ms = 0.0

    def add(self, now_ms: float, change: float) -> None:
        """The level changes by so much, now."""
        self._area += self.level * (now_ms - self._since_ms)
        self._since_ms = now_ms
        self.level += change
        if self.level > self.peak:
            self.peak = self.level

    def mean(self, now_ms: float) -> float:
        """Mean level from 0 until now."""
        if now_ms <= 0:
            return 0.0
        return (self._area + self.level * (now_ms - self._since_ms)) / now_ms


class Gaps:
    """Times between tokens, each with how many tokens had it."""

    __slots__ = ("_counts", "_gaps_ms")

    def __init__(self) -> None:
        self._gaps_ms: list[float] = []
        self._counts: list[int] = []

    def add(self, gap_ms: float, count: int) -> None:
        """So many tokens came this long after the one before."""
        self._gaps_ms.append(gap_ms)
        self._counts.append(count)

    def percentiles(self, percents: Sequence[float]) -> list[float | None]:
        """The gaps that so many percent of tokens do not exceed; None if there are none but first tokens."""
        if not self._gaps_ms:
            return [None] * len(percents)
        gaps = np.asarray(self._gaps_ms)
        order = np.argsort(gaps, kind="stable")
        upto = np.cumsum(np.asarray(self._counts, np.float64)[order])
        places = np.searchsorted(upto, np.asarray(percents) / 100 * upto[-1])
        return [float(gaps[order[min(place, len(order) - 1)]]) for place in places]

    def longest(self) -> float | None:
        """The longest gap that any token had."""
        return max(self._gaps_ms, default=None)


def percentile(values: Floats, percent: float) -> float | None:
    """The value that so many percent are not above; None of none."""
    if not len(values):
        return None
    return float(np.percentile(values, percent, method="higher"))


def spread(key: str, values: Floats) -> dict[str, Any]:
    """Mean, median and 99th percentile as `key_mean`, `key_p50` and `key_p99`."""
    return {
        f"{key}_mean": float(values.mean()) if len(values) else None,
        f"{key}_p50": percentile(values, 50),
        f"{key}_p99": percentile(values, 99),
    }
