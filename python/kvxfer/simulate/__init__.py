"""A discrete-event simulation of a cluster that serves a language model, split or not.

What `kvxfer.plan` says in averages, this plays out: queues, bursts, slots that run out, links that are
shared, hand-offs that break. `kvxfer sim` prints and draws it.

>>> from kvxfer.simulate import PULL, PUSH, Setup, poisson, simulate
>>> traffic = poisson(qps=8, requests=100, prompt=16_000, answer=128, seed=1)
>>> pull, push = (simulate(Setup(mode, prefill=4, slots=8), traffic) for mode in (PULL, PUSH))
>>> pull.summary["ttft_ms_mean"] > 2 * push.summary["ttft_ms_mean"]
True
"""

from __future__ import annotations

from kvxfer.simulate.cluster import Sample
from kvxfer.simulate.costs import DEFAULTS, Costs, Default
from kvxfer.simulate.modes import LATE, MODES, PULL, PUSH, UNIFIED, Mode
from kvxfer.simulate.result import Result, simulate
from kvxfer.simulate.setup import Crash, Setup
from kvxfer.simulate.traffic import Shape, Traffic, TrafficError, bursts, poisson, read_trace, users

__all__ = [
    "DEFAULTS",
    "LATE",
    "MODES",
    "PULL",
    "PUSH",
    "UNIFIED",
    "Costs",
    "Crash",
    "Default",
    "Mode",
    "Result",
    "Sample",
    "Setup",
    "Shape",
    "Traffic",
    "TrafficError",
    "bursts",
    "poisson",
    "read_trace",
    "simulate",
    "users",
]
