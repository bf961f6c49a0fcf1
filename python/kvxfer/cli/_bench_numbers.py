"""What the benchmarks make of their samples."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer._memory import ucx_wheel_dir
from kvxfer.cli._errors import CommandError

__all__ = ["interval", "machine", "need_memory", "percentile", "spread"]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent of the values are not above; no invention between two of them."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def spread(key: str, values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles, as `key_p50`, `key_p25` and `key_p75`."""
    return {f"{key}_p50": statistics.median(values)} | {
        f"{key}_p{percent}": percentile(values, percent) for percent in (25, 75)
    }


def interval(values: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """A 95 % interval of the mean of these blocks, by drawing blocks anew 4,000 times (bootstrap)."""
    drawn = np.random.default_rng(seed).choice(np.asarray(values), (4000, len(values))).mean(axis=1)
    low, high = np.percentile(drawn, (2.5, 97.5))
    return float(low), float(high)


def need_memory(nbytes: int, what: str) -> None:
    """Says at once what would else end in the kernel killing something.

    Raises:
        CommandError: if so much memory is not free.
    """
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) << 10
            if nbytes > free * 0.9:
                raise CommandError(
                    f"{what} need {nbytes >> 20} MiB of memory, and {free >> 20} MiB are free: take fewer"
                    " tokens or rooms"
                )


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass  # Not every kernel has it; the architecture is a name too.
    return platform.machine()


def _ucx() -> str | None:
    try:
        return ".".join(map(str, _kvxfer._doctor_ucx(ucx_wheel_dir())["version"]))
    except kx.KvxferError:
        return None  # Shared memory needs none; who asks for ucx hears of it.


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "kvxfer": kx.__version__,
        "ucx": _ucx(),
    }
