"""What came of a run, as numbers with their units in their names."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvxfer.simulate.cluster import Cluster, Sample
from kvxfer.simulate.costs import Costs
from kvxfer.simulate.metrics import percentile, spread
from kvxfer.simulate.request import Request
from kvxfer.simulate.setup import Setup
from kvxfer.simulate.traffic import Traffic

__all__ = ["Result", "simulate"]

Floats = npt.NDArray[np.float64]

_STAGES: tuple[tuple[str, Callable[[Request], float]], ...] = (
    # Of those that were tried again: until a crash of the first server was noticed.
    ("lost_ms", lambda r: max(0.0, r.again_ms - r.arrival_ms)),
    ("admission_wait_ms", lambda r: r.routed_ms - max(r.arrival_ms, r.again_ms)),
    ("prefill_wait_ms", lambda r: r.started_ms - r.routed_ms),
    ("prefill_ms", lambda r: r.prefilled_ms - r.started_ms),
    (
        "grant_wait_ms",
        lambda r: max(0.0, r.granted_ms - max(r.asked_ms, r.prefilled_ms)) if r.granted_ms >= 0 else 0.0,
    ),
    (
        "move_ms",
        lambda r: max(0.0, r.landed_ms - max(r.granted_ms, r.prefilled_ms)) if r.landed_ms >= 0 else 0.0,
    ),
    ("slot_wait_ms", lambda r: max(0.0, r.joined_ms - r.landed_ms) if r.landed_ms >= 0 else 0.0),
)


@dataclass(frozen=True)
class Result:
    """A run's figures.

    Args:
        setup: what was simulated.
        traffic: in words.
        summary: the figures. Times are of requests that were answered; means of levels are taken from the
            first arrival to
            the last.
        samples: levels over time.
        ttft_ms: time to the first token of each request that was answered, in the order of arrival.
        tpot_ms: time per token after the first of each request with two tokens or more.
    """

    setup: Setup
    traffic: str
    summary: dict[str, Any]
    samples: tuple[Sample, ...]
    ttft_ms: Floats
    tpot_ms: Floats

    def as_json(self) -> dict[str, Any]:
        """All but the figures of single requests."""
        setup = asdict(self.setup)
        setup["mode"] = self.setup.mode.name
        setup["posting"] = self.setup.posting or self.setup.mode.posting
        return {"mode": self.setup.mode.name, "traffic": self.traffic, "setup": setup, **self.summary}


def _growth_per_s(samples: list[Sample], level: Callable[[Sample], float], until_ms: float) -> float:
    """Slope of a level, in units a second, by least squares over the time in which requests arrive."""
    points = [(s.at_ms / 1e3, level(s)) for s in samples if s.at_ms <= until_ms]
    if len(points) < 3:
        return 0.0
    x, y = np.array(points).T
    x = x - x.mean()
    square = float((x * x).sum())
    return float((x * y).sum()) / square if square else 0.0


_LINE_RATE = 0.9
_HALF = 0.5


def _jammed_fraction(cluster: Cluster, slots: int) -> float:
    """Part of the time in which links are at line rate, decode has slots, and more wait than are answered."""
    prefills, decodes = cluster.servers
    if not prefills:
        return 0.0
    whole = decodes[0].receives.bytes_ms * len(decodes)
    jams = pairs = 0
    for before, now in itertools.pairwise(s for s in cluster.samples if s.at_ms <= cluster.mark.at_ms):
        use = (now.link_bytes - before.link_bytes) / (whole * (now.at_ms - before.at_ms))
        waiting = now.prefill_queue + now.handoff_queue
        pairs += 1
        jams += use >= _LINE_RATE and now.slots_used < _HALF * slots and waiting > now.slots_used
    return jams / pairs if pairs else 0.0


def simulate(setup: Setup, traffic: Traffic, costs: Costs | None = None) -> Result:
    """Simulates one cluster under one traffic.

    The same arguments give the same result, to the last bit.

    Args:
        setup: the cluster.
        traffic: who asks when for what.
        costs: what things take; `Costs()` if None.

    Raises:
        ValueError: if the weights do not fit into the GPUs' memory, or a figure makes no sense.
    """
    costs = costs or Costs()
    cluster = Cluster(setup, traffic, costs)
    cluster.run()
    done = [r for r in cluster.requests if not r.failed]
    ttft = np.array([r.first_ms - r.arrival_ms for r in done])
    total = np.array([r.last_ms - r.arrival_ms for r in done])
    # An answer of one token has no time between tokens, and cannot miss that SLO.
    tpot = np.array([(r.last_ms - r.first_ms) / (r.answer - 1) if r.answer > 1 else 0.0 for r in done])
    several = np.array([r.answer > 1 for r in done], bool)
    good = int(np.count_nonzero((ttft <= setup.slo_ttft_ms) & (tpot <= setup.slo_tpot_ms)))
    run_ms = max(cluster.ended_ms, 1e-9)
    prefills, decodes = cluster.servers
    servers = len(prefills) + len(decodes)
    mark, crashes = cluster.mark, cluster.crashes
    gap50, gap99 = cluster.gaps.percentiles((50, 99))
    answers = sum(r.answer for r in done)
    slots = setup.slots * len(decodes)
    seconds = run_ms / 1e3
    summary: dict[str, Any] = {
        "gpus": setup.gpus,
        "requests": len(traffic),
        "completed": len(done),
        "rejected": cluster.rejected,
        "refused": cluster.refused,
        "failed": cluster.failed,
        "recomputed": cluster.recomputed,
        "crashes": crashes.count if crashes else 0,
        "retried": crashes.retried if crashes else 0,
        "cut_off": crashes.cut_off if crashes else 0,
        "down_fraction": crashes.down_ms(run_ms) / run_ms / servers if crashes else 0.0,
        "preemptions": sum(s.preemptions for s in decodes),
        "run_s": seconds,
        "requests_per_s": len(done) / seconds,
        "tokens_per_s": answers / seconds,
        "goodput_per_s": good / seconds,
        "good_fraction": good / len(traffic),
        **spread("ttft_ms", ttft),
        "itl_ms_p50": gap50,
        "itl_ms_p99": gap99,
        "itl_ms_max": cluster.gaps.longest(),
        **spread("tpot_ms", tpot[several] if len(tpot) else tpot),
        **spread("completion_ms", total),
    }
    for name, stage in _STAGES:
        times = np.array([stage(r) for r in done])
        summary |= {f"{name}_p50": percentile(times, 50), f"{name}_p99": percentile(times, 99)}
    for name, gauge in (
        ("admission_queue", cluster.admission_queue),
        ("prefill_queue", cluster.prefill_queue),
        ("handoff_queue", cluster.handoff_queue),
    ):
        growth = _growth_per_s(cluster.samples, lambda s, key=name: float(getattr(s, key)), mark.at_ms)  # type: ignore[misc]
        summary |= {
            f"{name}_mean": mark.means[name],
            f"{name}_peak": gauge.peak,
            f"{name}_growth_per_s": growth,
        }
    whole_ms = mark.at_ms
    summary |= {
        "slots": slots,
        "slots_used_mean": mark.means["slots"],
        "slots_used_peak": cluster.slots.peak,
        "slots_used_fraction": mark.means["slots"] / slots,
        "prefill_busy_fraction": mark.prefill_busy_ms / whole_ms / len(prefills) if prefills else 0.0,
        "decode_busy_fraction": mark.decode_busy_ms / whole_ms / len(decodes),
        "loop_posting_fraction": mark.posting_ms / whole_ms / len(decodes),
        "link_use_mean": mark.link_bytes / whole_ms / len(decodes) / costs.engine(setup.tp).link_bytes_ms,
        "link_use_max": mark.link_use_max,
        "link_busy_fraction": mark.link_used_ms / whole_ms / len(decodes),
        "jammed_fraction": _jammed_fraction(cluster, slots),
        "kv_moved_bytes": cluster.moved_bytes,
        "offload_bytes": cluster.hosts.spilled_bytes,
        "prefix_tokens": cluster.prefix_tokens,
        "decode_prefix_tokens": cluster.decode_prefix_tokens,
        "prefill_kv_bytes_mean": costs.kv_bytes(mark.means["prefill_tokens"]),
        "prefill_kv_bytes_peak": costs.kv_bytes(cluster.prefill_tokens.peak),
        "decode_kv_bytes_mean": costs.kv_bytes(mark.means["decode_tokens"]),
        "decode_kv_bytes_peak": costs.kv_bytes(cluster.decode_tokens.peak),
        "events": cluster.clock.events,
    }
    return Result(
        setup, traffic.name, summary, tuple(cluster.samples), ttft, tpot[several] if len(tpot) else tpot
    )
