"""The simulator's parts: against arithmetic, against a slow model of one loop, and against each other."""

from __future__ import annotations

import ast
import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvxfer.simulate
from kvxfer.plan import slots_held, transfer_ms
from kvxfer.simulate import (
    DEFAULTS,
    LATE,
    MODES,
    PULL,
    PUSH,
    UNIFIED,
    Costs,
    Mode,
    Setup,
    Traffic,
    poisson,
    simulate,
    users,
)
from kvxfer.simulate.cluster import Cluster
from kvxfer.simulate.events import Clock
from kvxfer.simulate.link import Links, Nic
from kvxfer.simulate.metrics import Gaps, Gauge
from kvxfer.simulate.traffic import bursts

SOURCES = Path(kvxfer.simulate.__file__).parent
SPLIT = (PULL, PUSH, LATE)


def traffic(
    arrivals_ms: list[float], prompts: list[int], answers: list[int], luck: list[float] | None = None
) -> Traffic:
    return Traffic(
        np.array(arrivals_ms, float),
        np.array(prompts),
        np.array(answers),
        np.array(luck if luck is not None else [0.5] * len(prompts)),
        "by hand",
    )


def run(setup: Setup, asked: Traffic, costs: Costs | None = None) -> Cluster:
    cluster = Cluster(setup, asked, costs or Costs())
    cluster.run()
    return cluster


# Modes.


def test_a_mode_has_no_number() -> None:
    for field in dataclasses.fields(Mode):
        assert all(isinstance(getattr(mode, field.name), (str, bool)) for mode in MODES.values())
    numbers = [
        n for n in ast.walk(ast.parse((SOURCES / "modes.py").read_text())) if isinstance(n, ast.Constant)
    ]
    assert not [
        n.value for n in numbers if isinstance(n.value, (int, float)) and not isinstance(n.value, bool)
    ]


def test_no_cost_and_no_other_module_asks_for_a_modes_name() -> None:
    """Only what is serial, and where posting runs, may be asked of a mode."""
    may = {"split", "bind", "reads", "posting"}
    names = {"PULL", "PUSH", "LATE", "UNIFIED", "MODES"}
    for file in SOURCES.glob("*.py"):
        if file.name in ("modes.py", "__init__.py", "result.py"):
            continue
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Attribute)
                and node.value.attr == "mode"
            ):
                assert node.attr in may, f"{file.name}:{node.lineno} asks for mode.{node.attr}"
            assert not (isinstance(node, ast.Name) and node.id in names), f"{file.name}: {ast.dump(node)}"
    assert not any(mode in name for mode in MODES for name in DEFAULTS)


def test_without_posting_messages_and_bytes_to_move_the_modes_are_the_same_but_for_a_step() -> None:
    free = Costs(post_fixed_ms=0, post_ms_per_token=0, call_ms=0, control_ms=0, nic_gb_s=1e9)
    asked = poisson(qps=2, requests=200, prompt=4000, answer=64, spread=0.5, answer_spread=0.5, seed=2)
    pull, push, late = (simulate(Setup(mode, prefill=2, decode=1), asked, free).ttft_ms for mode in SPLIT)
    assert late == pytest.approx(push, abs=1e-3)
    # The loop looks for pulls between two steps, and begins with one at the next look.
    assert (pull > push - 1e-3).all()
    assert (pull < push + free.engine(8).step_ms(8, 8 * 20_000)).all()


# Sums.


def test_one_request_alone_takes_the_sum_of_its_steps() -> None:
    costs, prompt, answer = Costs(), 16_000, 128
    engine = costs.engine(8)
    steps = sum(engine.step_ms(1, prompt + i) for i in range(answer))
    prefill = engine.prompt_ms(prompt, 8192)
    move = transfer_ms(costs.kv_bytes(prompt), costs.nic_gb_s, 8)
    pull = run(Setup(PULL), traffic([0], [prompt], [answer])).requests[0]
    # To the router, to prefill; to the router, to decode; then all in turn.
    begin = 4 * costs.control_ms + prefill + costs.post_ms(prompt) + move
    assert pull.landed_ms == pytest.approx(begin)
    assert pull.last_ms == pytest.approx(begin + steps)
    assert pull.first_ms == pytest.approx(begin + engine.step_ms(1, prompt))
    late = run(Setup(LATE), traffic([0], [prompt], [answer])).requests[0]
    # One message more for the grant and one for Done; the loop pays for a call.
    assert late.landed_ms == pytest.approx(begin + 2 * costs.control_ms)
    push = run(Setup(PUSH), traffic([0], [prompt], [answer])).requests[0]
    tail = prompt - 8192
    rest = costs.post_ms(tail) + transfer_ms(costs.kv_bytes(tail), costs.nic_gb_s, 8)
    # The first chunk went while the second was computed; the loop pays for the call of the first.
    assert push.landed_ms == pytest.approx(3 * costs.control_ms + prefill + rest + costs.call_ms)
    unified = run(Setup(UNIFIED), traffic([0], [prompt], [answer])).requests[0]
    assert unified.first_ms == pytest.approx(2 * costs.control_ms + prefill)
    rest = sum(engine.step_ms(1, prompt + 1 + i) for i in range(answer - 1))
    assert unified.last_ms == pytest.approx(unified.first_ms + rest)


def test_defaults_meet_the_two_times_they_were_fitted_to() -> None:
    engine = Costs().engine(8)
    for prompt, ms in ((2000, 5.52), (16_000, 7.0)):
        held = slots_held(8, 128, ms)
        assert engine.step_ms(round(held), held * (prompt + 64)) == pytest.approx(ms, rel=0.02)


def test_every_default_says_its_unit_and_source() -> None:
    assert set(DEFAULTS) == {field.name for field in dataclasses.fields(Costs)}
    assert all(one.unit and len(one.source) > 3 for one in DEFAULTS.values())
    assert Costs().described()["nic_gb_s"]["source"] == DEFAULTS["nic_gb_s"].source
    assert Costs(nic_gb_s=12.5).described()["nic_gb_s"]["source"] == "given"


def test_prefills_queue_is_that_of_pollaczek_and_khinchine() -> None:
    """One prefill server with equal prompts is M/D/1: the mean wait is rho s / 2 (1 - rho)."""
    service = Costs().engine(8).prompt_ms(8192, 8192)
    waits = []
    for seed in range(4):
        asked = poisson(qps=0.7 / service * 1e3, requests=6000, prompt=8192, answer=2, seed=seed)
        requests = run(Setup(PUSH, prefill=1, decode=1), asked).requests
        waits += [r.started_ms - r.queued_ms for r in requests]
    assert float(np.mean(waits)) == pytest.approx(0.7 * service / (2 * 0.3), rel=0.08)


def test_slots_are_held_by_littles_law() -> None:
    result = simulate(Setup(PUSH, prefill=2), poisson(qps=8, requests=3000, prompt=2000, answer=128, seed=5))
    found = result.summary
    law = slots_held(3000 / found["run_s"], 128, found["tpot_ms_mean"])
    assert found["slots_used_mean"] == pytest.approx(law, rel=0.03)


# One loop, step by step.


def slow_loop(asked: Traffic, setup: Setup, costs: Costs) -> list[tuple[float, float]]:
    """First and last token of each request on one plain server: a loop that takes one step at a time."""
    engine = costs.engine(setup.tp)
    at = 0.0
    queue = [(float(t) + 2 * costs.control_ms, i) for i, t in enumerate(asked.arrivals_ms)]
    done = {i: 0 for _, i in queue}
    began: list[int] = []
    running: dict[int, int] = {}
    out: dict[int, list[float]] = {i: [] for i in done}
    while queue or began or running:
        if not began and not running:
            at = max(at, queue[0][0])
        budget = setup.chunk - len(running)
        kv = sum(int(asked.prompts[i]) + n for i, n in running.items())
        chunks = []
        for i in [*began]:
            size = min(budget, int(asked.prompts[i]) - done[i])
            if size > 0:
                chunks.append((i, size))
                budget -= size
        while queue and queue[0][0] <= at and budget > 0 and len(running) + len(began) < setup.slots:
            i = queue.pop(0)[1]
            began.append(i)
            size = min(budget, int(asked.prompts[i]))
            chunks.append((i, size))
            budget -= size
        squares = sum(float((done[i] + size) ** 2 - done[i] ** 2) for i, size in chunks)
        at += engine.step_ms(len(running), kv, sum(size for _, size in chunks), squares)
        for i in [*running]:
            running[i] += 1
            out[i].append(at)
            if running[i] == asked.answers[i]:
                del running[i]
        for i, size in chunks:
            done[i] += size
            if done[i] == asked.prompts[i]:
                began.remove(i)
                out[i].append(at)
                if asked.answers[i] > 1:
                    running[i] = 1
    return [(times[0], times[-1]) for _, times in sorted(out.items())]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_plain_server_does_what_a_loop_does_step_by_step(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 14))
    waits = data.draw(st.lists(st.floats(0.1, 400), min_size=count, max_size=count))
    prompts = data.draw(st.lists(st.integers(1, 6000), min_size=count, max_size=count))
    answers = data.draw(st.lists(st.integers(1, 60), min_size=count, max_size=count))
    setup = Setup(
        dataclasses.replace(UNIFIED),
        prefill=1,
        decode=1,
        slots=data.draw(st.integers(1, 6)),
        chunk=data.draw(st.sampled_from([64, 700, 8192])),
    )
    asked = traffic(list(np.cumsum(waits)), prompts, answers)
    cluster = Cluster(setup, asked, Costs())
    # All on the first of the two servers, so that there is one loop.
    cluster._best = lambda pool, load: pool[0]  # type: ignore[method-assign]
    cluster.run()
    found = [(r.first_ms, r.last_ms) for r in cluster.requests]
    assert np.array(found) == pytest.approx(np.array(slow_loop(asked, setup, Costs())), rel=1e-9, abs=1e-6)


@pytest.mark.parametrize("mode", [UNIFIED, PULL, PUSH, LATE])
def test_the_same_arguments_give_the_same_result_and_another_seed_another(mode: Mode) -> None:
    def summary(seed: int) -> dict[str, Any]:
        asked = poisson(qps=6, requests=150, prompt=6000, answer=100, spread=1.0, seed=seed)
        setup = Setup(
            mode, prefill=2, decode=2, slots=4, failure_rate=0.2, on_failure="recompute", admission=True
        )
        return simulate(setup, asked).summary

    assert summary(1) == summary(1)
    assert summary(1) != summary(2)


def test_modes_and_rates_get_the_same_draws() -> None:
    slow, fast = (
        poisson(qps=qps, requests=50, prompt=1000, answer=100, spread=1.0, seed=3) for qps in (1, 4)
    )
    assert slow.arrivals_ms == pytest.approx(4 * fast.arrivals_ms)
    assert (slow.prompts == fast.prompts).all()
    assert (slow.luck == fast.luck).all()


# Parts.


def test_flows_share_a_nic_fairly_and_get_what_others_leave() -> None:
    clock = Clock()
    links = Links(clock)
    ended: dict[str, float] = {}
    a, b, into = Nic(10.0), Nic(10.0), Nic(10.0)

    def then(name: str) -> None:
        ended[name] = clock.now_ms

    links.start(a, into, 100, then, "first")
    clock.at(4, lambda _: links.start(b, into, 30, then, "second"))
    clock.run()
    # 40 alone, then 5 each a ms until the second is over at 10 ms, then the last 30 alone.
    assert ended == pytest.approx({"second": 10, "first": 13})
    assert into.moved == pytest.approx(130)
    assert into.used_ms == pytest.approx(13)


def test_a_flow_takes_more_bytes_while_it_moves_and_can_be_stopped() -> None:
    clock = Clock()
    links = Links(clock)
    ended: list[float] = []
    a, into = Nic(10.0), Nic(5.0)
    flow = links.start(a, into, 50, lambda _: ended.append(clock.now_ms), None)
    clock.at(6, lambda _: links.add(flow, 20))
    clock.run()
    assert ended == pytest.approx([14])
    other = links.start(a, into, 50, lambda _: ended.append(clock.now_ms), None)
    clock.at(16, lambda _: links.stop(other))
    clock.run()
    assert len(ended) == 1
    assert into.moved == pytest.approx(80)


def test_gaps_are_weighed_by_tokens_and_levels_by_time() -> None:
    gaps = Gaps()
    gaps.add(5.0, 98)
    gaps.add(50.0, 2)
    assert gaps.percentiles((50, 98, 99)) == [5.0, 5.0, 50.0]
    assert gaps.longest() == 50.0
    assert Gaps().percentiles((50,)) == [None]
    gauge = Gauge()
    gauge.add(0, 4)
    gauge.add(10, -3)
    assert gauge.mean(40) == pytest.approx((4 * 10 + 1 * 30) / 40)
    assert gauge.peak == 4


def test_bursts_keep_their_rates_and_their_times() -> None:
    asked = bursts(qps=10, requests=20_000, prompt=10, answer=10, factor=5, burst_s=10, every_s=100, seed=1)
    within = asked.arrivals_ms / 1e3 % 100
    whole = math.floor(asked.arrivals_ms[-1] / 1e5)
    inside = np.count_nonzero((within >= 90) & (asked.arrivals_ms < whole * 1e5))
    outside = np.count_nonzero((within < 90) & (asked.arrivals_ms < whole * 1e5))
    assert inside / (10 * whole) == pytest.approx(50, rel=0.05)
    assert outside / (90 * whole) == pytest.approx(10, rel=0.05)


def test_users_never_have_more_under_way_than_there_are() -> None:
    cluster = run(Setup(PUSH, prefill=1), users(users=5, requests=60, prompt=500, answer=50, seed=1))
    edges = sorted(
        [(r.arrival_ms, 1) for r in cluster.requests] + [(r.last_ms, -1) for r in cluster.requests]
    )
    under_way = np.cumsum([change for _, change in edges])
    assert under_way.max() == 5
    assert len(cluster.requests) == 60
    # Those that are refused at once are followed at once.
    refused = run(Setup(PUSH, tp=2), users(users=2, requests=3000, prompt=10**7, answer=10, seed=1))
    assert refused.refused == len(refused.requests) == 3000


# What one can switch.


def test_a_broken_hand_off_fails_or_is_computed_again_after_it_is_noticed() -> None:
    asked = traffic([0, 5000], [4000, 4000], [20, 20], luck=[0.01, 0.9])
    lost = run(Setup(PUSH, failure_rate=0.1), asked)
    assert [r.failed for r in lost.requests] == [True, False]
    assert lost.failed == 1
    again = run(Setup(PUSH, failure_rate=0.1, on_failure="recompute"), asked)
    assert [r.failed for r in again.requests] == [False, False]
    assert again.recomputed == 1
    late = again.requests[0].first_ms - again.requests[1].first_ms + 5000
    assert late > Costs().detect_ms
    # A tenth of a tenth of the bytes had moved.
    assert again.moved_bytes == pytest.approx(Costs().kv_bytes(4000) * 1.1, rel=1e-6)


def test_offload_frees_prefills_memory_and_costs_two_copies() -> None:
    # Decode is the slow one; caches wait at prefill, ten to a server.
    asked = poisson(qps=1.2, requests=80, prompt=16_000, answer=400, seed=1)
    costs = Costs(hbm_gb=60)
    plain, spilled = (
        simulate(Setup(PUSH, prefill=2, tp=2, slots=4, offload=on), asked, costs).summary
        for on in (False, True)
    )
    assert plain["offload_bytes"] == 0
    assert spilled["offload_bytes"] > costs.kv_bytes(16_000)
    assert spilled["offload_bytes"] % (2 * costs.kv_bytes(16_000)) == pytest.approx(0, abs=1)
    assert spilled["prefill_queue_mean"] < 0.7 * plain["prefill_queue_mean"]


def test_routing_by_bytes_spreads_uneven_prompts_better() -> None:
    asked = poisson(qps=20, requests=800, prompt=4000, answer=64, spread=1.6, seed=2)
    waits = [
        simulate(Setup(PUSH, prefill=4, decode=2, route=route), asked).summary["ttft_ms_mean"]
        for route in ("requests", "bytes")
    ]
    assert waits[1] < 0.95 * waits[0]


def test_an_answer_may_lose_its_cache_to_others_unless_room_is_reserved_for_it() -> None:
    asked = poisson(qps=50, requests=80, prompt=4000, answer=3000, seed=1)
    costs = Costs(hbm_gb=45)
    free = simulate(Setup(PUSH, tp=2, prefill=2, slots=64, slo_ttft_ms=1e8), asked, costs).summary
    kept = simulate(
        Setup(PUSH, tp=2, prefill=2, slots=64, slo_ttft_ms=1e8, admission=True), asked, costs
    ).summary
    assert free["preemptions"] > 0
    assert kept["preemptions"] == 0
    assert free["completed"] == kept["completed"] == 80


def test_a_request_that_no_server_has_room_for_is_refused_at_once() -> None:
    room = Costs().engine(2).tokens
    cluster = run(Setup(PUSH, tp=2), traffic([0, 1], [room - 5, 100], [100, 10]))
    assert [r.failed for r in cluster.requests] == [True, False]
    assert cluster.refused == 1


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    asked = dataclasses.replace(
        traffic([0, 5000], [4096, 4096], [10, 10]),
        blocks=((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3, 4, 50, 60, 70, 80)),
    )
    cluster = run(Setup(PUSH, prefill=1), asked)
    assert cluster.prefix_tokens == 2048
    first, second = (r.prefilled_ms - r.started_ms for r in cluster.requests)
    assert second < 0.7 * first
    # Decode got the same half with the first one, so that it does not move again.
    assert cluster.decode_prefix_tokens == 2048
    assert cluster.moved_bytes == pytest.approx(1.5 * Costs().kv_bytes(4096))
    whole = run(Setup(PUSH, prefill=1, prefix_cache=False), asked)
    assert whole.prefix_tokens == whole.decode_prefix_tokens == 0
    assert whole.moved_bytes == pytest.approx(2 * Costs().kv_bytes(4096))


def test_senseless_setups_are_refused_with_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="slots is 0"):
        Setup(PUSH, slots=0)
    with pytest.raises(ValueError, match=r"failure_rate is 1\.5"):
        Setup(PUSH, failure_rate=1.5)
    with pytest.raises(ValueError, match=r"weights of 65\.6 GB leave no room"):
        simulate(Setup(PUSH, tp=1), poisson(qps=1, requests=1, prompt=1, answer=1), Costs(hbm_gb=40))
    with pytest.raises(ValueError, match="nic_gb_s is 0"):
        Costs(nic_gb_s=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("admission", [False, True])
def test_a_hundred_thousand_requests_on_a_thousand_servers_take_less_than_a_minute(admission: bool) -> None:
    asked = poisson(
        qps=1000, requests=100_000, prompt=4000, answer=256, spread=1.0, answer_spread=0.5, seed=1
    )
    began = time.process_time()
    setup = Setup(PUSH, prefill=600, decode=400, tp=2, slots=64, admission=admission)
    found = simulate(setup, asked).summary
    # Of processor time: other work on the machine is no fault of this one.
    assert time.process_time() - began < 60
    assert found["completed"] == 100_000
