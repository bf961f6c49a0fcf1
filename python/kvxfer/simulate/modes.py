"""The ways to hand off. They differ in which steps wait for which, and in where posting runs; in no number.

A mode has no number: every cost is in `kvxfer.simulate.costs`, which names no mode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["LATE", "MODES", "PULL", "PUSH", "UNIFIED", "Mode"]


@dataclass(frozen=True)
class Mode:
    """One way to get a prompt's KV cache to where the answer is written.

    Args:
        name: as on the command line.
        split: prefill and decode on servers of their own; if not, nothing is handed off.
        bind: when decode's server is chosen: at the request's arrival, or once its prompt is computed.
        reads: decode reads, once it has a slot and pages; else prefill writes each chunk as soon as it is
            computed and granted.
        posting: where descriptors are built and posted: on the engine's loop, between two steps, or on a
            thread.
    """

    name: str
    split: bool
    bind: Literal["arrival", "prefilled"]
    reads: bool
    posting: Literal["loop", "thread"]


UNIFIED = Mode("unified", split=False, bind="arrival", reads=False, posting="thread")
PULL = Mode("pull", split=True, bind="prefilled", reads=True, posting="loop")
PUSH = Mode("push", split=True, bind="arrival", reads=False, posting="thread")
LATE = Mode("late", split=True, bind="prefilled", reads=False, posting="thread")
MODES = {mode.name: mode for mode in (UNIFIED, PULL, PUSH, LATE)}
