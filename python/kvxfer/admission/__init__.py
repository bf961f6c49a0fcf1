"""Who may start, and where: pages, slots and links are reserved before prefill begins.

Pure: it reads no clock and does no I/O, so `kvxfer proxy` runs it in real time and a simulation in virtual
time. `Admission` has an example.
"""

from __future__ import annotations

from kvxfer.admission._core import Admission
from kvxfer.admission._estimates import AnswerLengths
from kvxfer.admission._types import (
    Admitted,
    Config,
    Decision,
    Decode,
    Expired,
    Prefill,
    Queued,
    Reason,
    Refused,
    Request,
    ServerStats,
    Stats,
)

__all__ = [
    "Admission",
    "Admitted",
    "AnswerLengths",
    "Config",
    "Decision",
    "Decode",
    "Expired",
    "Prefill",
    "Queued",
    "Reason",
    "Refused",
    "Request",
    "ServerStats",
    "Stats",
]
