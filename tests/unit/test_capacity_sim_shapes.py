"""The simulator shows what the field saw. Each test is one published shape, with how near it must come."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import numpy as np
import pytest

from kvxfer.simulate import (
    LATE,
    PULL,
    PUSH,
    UNIFIED,
    Costs,
    Mode,
    Result,
    Setup,
    Traffic,
    bursts,
    poisson,
    simulate,
    users,
)

SEEDS = range(1, 6)


def over_seeds(mode: Mode, key: str, *, qps: float, prompt: int, requests: int = 100, **setup: Any) -> float:
    """A figure's mean over seeds, in the field's set-up: TP8, answers of 128 tokens."""
    found = []
    for seed in SEEDS:
        traffic = poisson(qps=qps, requests=requests, prompt=prompt, answer=128, seed=seed)
        found.append(simulate(Setup(mode, **{"prefill": 4, "slots": 8, **setup}), traffic).summary[key])
    return fmean(found)


def test_pull_and_push_agree_at_one_request_a_second_and_short_prompts() -> None:
    pull, push = (over_seeds(mode, "ttft_ms_mean", qps=1, prompt=1024) for mode in (PULL, PUSH))
    assert push <= pull <= 1.25 * push
    slow, fast = (over_seeds(mode, "tpot_ms_mean", qps=1, prompt=1024) for mode in (PULL, PUSH))
    assert slow == pytest.approx(fast, rel=0.03)


def test_at_eight_a_second_and_eight_slots_pulls_first_token_is_several_times_pushs() -> None:
    pull, push = (over_seeds(mode, "ttft_ms_mean", qps=8, prompt=16_000) for mode in (PULL, PUSH))
    assert 2.0 <= pull / push <= 5.0
    # The field: 1,744 against 540 ms. How long a queue without end gets depends on the length of the run.
    assert push == pytest.approx(540, rel=0.3)
    assert pull == pytest.approx(1744, rel=0.5)


def test_and_its_time_per_token_is_up_by_less_than_half() -> None:
    pull, push = (over_seeds(mode, "tpot_ms_mean", qps=8, prompt=16_000) for mode in (PULL, PUSH))
    assert 1.2 <= pull / push < 1.5
    assert push == pytest.approx(7.0, rel=0.05)
    assert pull == pytest.approx(10.4, rel=0.15)


def test_late_push_waits_for_a_grant_and_for_no_loop() -> None:
    push, late, pull = (over_seeds(mode, "ttft_ms_mean", qps=8, prompt=16_000) for mode in (PUSH, LATE, PULL))
    assert push < late < 1.15 * push < pull
    same, fast = (over_seeds(mode, "tpot_ms_mean", qps=8, prompt=16_000) for mode in (LATE, PUSH))
    assert same == pytest.approx(fast, rel=0.01)


def test_moving_the_posting_to_a_thread_takes_6_14_ms_to_5_52() -> None:
    loop, thread = (
        over_seeds(PULL, "tpot_ms_mean", qps=8, prompt=2000, requests=300, slots=256, posting=where)
        for where in ("loop", "thread")
    )
    assert thread == pytest.approx(5.52, rel=0.03)
    assert loop == pytest.approx(6.14, rel=0.05)


def test_with_sixteen_slots_the_gap_closes() -> None:
    eight, sixteen = (
        over_seeds(PULL, "ttft_ms_mean", qps=8, prompt=16_000, slots=slots)
        / over_seeds(PUSH, "ttft_ms_mean", qps=8, prompt=16_000, slots=slots)
        for slots in (8, 16)
    )
    assert eight > 2.0
    assert sixteen < 1.35


def test_answers_of_2000_tokens_hold_sixteen_times_the_slots_of_128() -> None:
    short, long = (
        simulate(
            Setup(PUSH, prefill=1, slots=512),
            poisson(qps=1, requests=3000, prompt=1024, answer=answer, seed=1),
        ).summary["slots_used_mean"]
        for answer in (128, 2000)
    )
    # 2,000 / 128 is 15.6; tokens come a little slower beside more others.
    assert long / short == pytest.approx(16, rel=0.12)


@pytest.mark.parametrize(("prompt", "answer"), [(1024, 1024), (512, 512), (2048, 256), (256, 1024)])
def test_splitting_does_not_raise_throughput(prompt: int, answer: int) -> None:
    # As many at a time as fill every slot of plain servers: below that a split's larger batches can look
    # like a gain.
    traffic = users(users=768, requests=3000, prompt=prompt, answer=answer, seed=1)
    setup: dict[str, Any] = {"tp": 2, "slots": 256}
    plain = simulate(Setup(UNIFIED, prefill=2, decode=2, **setup), traffic).summary["requests_per_s"]
    split = max(
        simulate(Setup(PUSH, prefill=n, decode=4 - n, **setup), traffic).summary["requests_per_s"]
        for n in (1, 2, 3)
    )
    assert split <= 1.01 * plain


def test_chunked_prefill_shortens_the_pause_and_does_not_remove_it() -> None:
    traffic = poisson(qps=2, requests=300, prompt=16_000, answer=256, seed=1)
    whole, large, small, split = (
        simulate(Setup(mode, prefill=1, decode=1, chunk=chunk), traffic).summary
        for mode, chunk in ((UNIFIED, 16_000), (UNIFIED, 2048), (UNIFIED, 512), (PUSH, 16_000))
    )
    assert whole["itl_ms_max"] > 300
    assert whole["itl_ms_max"] > 5 * large["itl_ms_max"] > 10 * small["itl_ms_max"]
    # A split one has no pause at all, and that is what it is for.
    assert small["itl_ms_max"] > 2 * split["itl_ms_max"]
    # What a smaller chunk costs: the first token comes later.
    assert small["ttft_ms_mean"] > large["ttft_ms_mean"]


def test_doubling_prefill_alone_only_grows_the_handoff_queue() -> None:
    traffic = poisson(qps=8, requests=400, prompt=16_000, answer=256, seed=1)
    three, six = (simulate(Setup(PUSH, prefill=n, slots=8), traffic).summary for n in (3, 6))
    assert six["requests_per_s"] == pytest.approx(three["requests_per_s"], rel=0.01)
    assert six["ttft_ms_mean"] == pytest.approx(three["ttft_ms_mean"], rel=0.02)
    assert six["prefill_queue_mean"] < 0.7 * three["prefill_queue_mean"]
    assert six["handoff_queue_mean"] > three["handoff_queue_mean"]
    assert six["handoff_queue_growth_per_s"] > 3


def test_on_eight_gpus_one_prefill_for_three_decode_wins_at_high_concurrency() -> None:
    traffic = users(users=256, requests=1500, prompt=1024, answer=1024, seed=1)
    one, two, three = (
        simulate(Setup(PUSH, prefill=n, decode=4 - n, tp=2), traffic).summary["requests_per_s"]
        for n in (1, 2, 3)
    )
    assert one > 1.05 * two > 1.05 * three


def test_and_at_low_concurrency_more_prefill_gives_the_better_first_token() -> None:
    traffic = users(users=8, requests=200, prompt=1024, answer=1024, seed=1)
    one, two, three = (
        simulate(Setup(PUSH, prefill=n, decode=4 - n, tp=2), traffic).summary["ttft_ms_mean"]
        for n in (1, 2, 3)
    )
    assert two < 0.95 * one
    assert three < 0.95 * one


class Classic:
    """Eight servers of two GPUs with 50 Gbit/s each, and a burst that the two decode servers' links cannot
    carry.

    Plain servers run small chunks, so that a gap between tokens stays near 30 ms as it does where prefill is
    apart.
    """

    QUIET_S, BURST_S, FACTOR, QPS = 1300, 200, 5, 0.8
    SERVERS: dict[str, Any] = {"prefill": 6, "decode": 2, "tp": 2, "slots": 64, "slo_ttft_ms": 4000}  # noqa: RUF012
    COSTS = Costs(nic_gb_s=50 / 8 / 2, hbm_gb=90)

    @classmethod
    def traffic(cls) -> Traffic:
        """Most requests come in the quiet time, so medians tell of that."""
        return bursts(
            qps=cls.QPS,
            requests=round(cls.QPS * (cls.QUIET_S + cls.FACTOR * cls.BURST_S)),
            prompt=16_000,
            answer=350,
            factor=cls.FACTOR,
            burst_s=cls.BURST_S,
            every_s=cls.QUIET_S + cls.BURST_S,
            seed=3,
        )

    @classmethod
    def run(cls, mode: Mode, *, admission: bool = False) -> Result:
        """One of the three."""
        chunk = 1024 if mode.split else 256
        return simulate(
            Setup(mode, chunk=chunk, admission=admission, **cls.SERVERS), cls.traffic(), cls.COSTS
        )

    @classmethod
    def in_burst(cls, result: Result) -> dict[str, float]:
        """Levels while the burst lasts."""
        samples = [
            s for s in result.samples if cls.QUIET_S + 20 <= s.at_ms / 1e3 <= cls.QUIET_S + cls.BURST_S
        ]
        first, last = samples[0], samples[-1]
        capacity = cls.COSTS.engine(2).link_bytes_ms * cls.SERVERS["decode"] * (last.at_ms - first.at_ms)
        at_s = np.array([s.at_ms / 1e3 for s in samples])
        return {
            "link": (last.link_bytes - first.link_bytes) / capacity,
            "slots": fmean(s.slots_used for s in samples) / (cls.SERVERS["slots"] * cls.SERVERS["decode"]),
            "prefill_growth": float(np.polyfit(at_s, [s.prefill_queue for s in samples], 1)[0]),
            "waiting": fmean(s.prefill_queue + s.handoff_queue for s in samples),
        }


@pytest.fixture(scope="module")
def classic() -> dict[str, Result]:
    return {
        "plain": Classic.run(UNIFIED),
        "off": Classic.run(PUSH),
        "on": Classic.run(PUSH, admission=True),
    }


def test_the_classic_failure_appears_when_admission_is_off(classic: dict[str, Result]) -> None:
    plain, off = classic["plain"].summary, classic["off"].summary
    assert off["ttft_ms_p50"] < plain["ttft_ms_p50"]
    assert off["ttft_ms_p99"] > 5 * plain["ttft_ms_p99"]
    burst = Classic.in_burst(classic["off"])
    assert burst["link"] > 0.9
    assert burst["slots"] < 0.3
    assert burst["prefill_growth"] > 0.2


def test_the_classic_failure_goes_when_admission_is_on(classic: dict[str, Result]) -> None:
    plain, off, on = (classic[name].summary for name in ("plain", "off", "on"))
    assert on["ttft_ms_p50"] < plain["ttft_ms_p50"]
    assert on["ttft_ms_p99"] < off["ttft_ms_p99"] / 5
    burst = Classic.in_burst(classic["on"])
    assert abs(burst["prefill_growth"]) < 0.02
    assert burst["waiting"] < 0.15 * Classic.in_burst(classic["off"])["waiting"]
    # It is paid for: more come than the link carries, and some are told so at once.
    assert 0 < on["rejected"] < 0.25 * on["requests"]
    assert on["goodput_per_s"] > 1.3 * off["goodput_per_s"]
    assert on["jammed_fraction"] == 0
    assert off["jammed_fraction"] > 0.05
