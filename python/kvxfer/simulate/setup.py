"""What is to be simulated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvxfer.simulate.modes import Mode

__all__ = ["Crash", "Setup"]


@dataclass(frozen=True)
class Crash:
    """A server that crashes at a given time.

    Args:
        at_s: when, in seconds from the start.
        server: which, by number: prefill servers first, then those for decode; plain servers have the same
            numbers, so that every mode loses as many GPUs.
        repair_s: how long it is away, in seconds.
    """

    at_s: float
    server: int
    repair_s: float

    def __post_init__(self) -> None:
        if self.at_s < 0 or self.server < 0 or not self.repair_s > 0:
            raise ValueError(
                f"a crash of server {self.server} at {self.at_s} s for {self.repair_s} s: servers are "
                "numbered from 0, times are 0 or more, and a repair takes above 0 s"
            )


@dataclass(frozen=True)
class Setup:
    """A cluster to simulate.

    Args:
        mode: how caches are handed off, or `UNIFIED`.
        prefill: servers that compute prompts.
        decode: servers that write answers. A unified cluster has as many servers as both together.
        tp: GPUs of each server.
        slots: answers that a server writes at a time (vLLM's `max_num_seqs`).
        chunk: tokens of a step at most (vLLM's `max_num_batched_tokens`); a chunk as long as the longest
            prompt is prefill without chunks.
        page_tokens: tokens of a page.
        admission: admit by `kvxfer.admission`: decode's pages for prompt and answer and a slot are reserved
            before prefill starts. Plain servers reserve pages for the answer as well, and take all.
        route: choose the server with the fewest requests under way, or with the fewest bytes of them.
        posting: where posting runs, if not where the mode says.
        failure_rate: part of the hand-offs that break on their way.
        mtbf_s: mean time between two crashes of a server, in seconds; 0: it never crashes.
        repair_s: how long a server that crashed is away, in seconds.
        crashes: crashes at given times, beside those.
        crash_seed: decides when servers crash, in every mode alike.
        on_failure: what becomes of broken hand-offs and of requests on a server that crashed: the request
            fails; or it is computed again: by decode where the hand-off or prefill failed, from the start
            where decode crashed. Answers that have begun fail in any case.
        offload: where prefill has no room, move caches that wait for their hand-off to the host's memory.
        prefix_cache: find blocks that a server has already, where the traffic names them: prefill then
            computes, and decode is sent, only what it lacks.
        slo_ttft_ms: first tokens later than this are not good, and what admission aims for.
        slo_tpot_ms: requests with more time per token than this are not good.
    """

    mode: Mode
    prefill: int = 1
    decode: int = 1
    tp: int = 8
    slots: int = 256
    chunk: int = 8192
    page_tokens: int = 16
    admission: bool = False
    route: Literal["requests", "bytes"] = "requests"
    posting: Literal["loop", "thread"] | None = None
    failure_rate: float = 0.0
    mtbf_s: float = 0.0
    repair_s: float = 60.0
    crashes: tuple[Crash, ...] = ()
    crash_seed: int = 0
    on_failure: Literal["fail", "recompute"] = "fail"
    offload: bool = False
    prefix_cache: bool = True
    slo_ttft_ms: float = 2000.0
    slo_tpot_ms: float = 50.0

    def __post_init__(self) -> None:
        for name in ("prefill", "decode", "tp", "slots", "chunk", "page_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if not 0 <= self.failure_rate <= 1:
            raise ValueError(f"failure_rate is {self.failure_rate}: it must be from 0 to 1")
        if self.mtbf_s < 0 or self.repair_s <= 0 or self.crash_seed < 0:
            raise ValueError(
                f"mtbf_s is {self.mtbf_s}, repair_s {self.repair_s} and crash_seed {self.crash_seed}: "
                "repairs take above 0 s, the others are 0 or more"
            )
        if self.slo_ttft_ms <= 0 or self.slo_tpot_ms <= 0:
            raise ValueError(f"SLOs are {self.slo_ttft_ms} and {self.slo_tpot_ms} ms: they must be above 0")

    @property
    def gpus(self) -> int:
        """GPUs of all servers."""
        return self.tp * (self.prefill + self.decode)
