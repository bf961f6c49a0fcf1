"""The simulator loses nothing and counts nothing twice, whatever breaks; and crashes do what they say."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvxfer.simulate import (
    LATE,
    PULL,
    PUSH,
    UNIFIED,
    Costs,
    Crash,
    Mode,
    Setup,
    Traffic,
    poisson,
    simulate,
    users,
)
from kvxfer.simulate.cluster import Cluster
from kvxfer.simulate.modes import MODES

COSTS = Costs()
ENGINE = COSTS.engine(8)
PROMPT = 8000
PREFILL_MS = ENGINE.prompt_ms(PROMPT, 8192)


def traffic(arrivals_ms: list[float], answer: int = 200, prompt: int = PROMPT) -> Traffic:
    count = len(arrivals_ms)
    return Traffic(
        np.array(arrivals_ms, float),
        np.full(count, prompt),
        np.full(count, answer),
        np.full(count, 0.5),
        "by hand",
    )


def run(setup: Setup, asked: Traffic, costs: Costs = COSTS) -> Cluster:
    cluster = Cluster(setup, asked, costs)
    cluster.run()
    nothing_is_left(cluster)
    return cluster


def nothing_is_left(cluster: Cluster) -> None:
    """Every request has one end, and every page, slot, link and place in a queue is free."""
    asked, setup = cluster.traffic, cluster.setup
    prefills, decodes = cluster.servers
    assert sorted(r.number for r in cluster.requests) == list(range(len(asked)))
    for server in [*prefills, *decodes]:
        assert server.pool.used == 0
        assert server.pool.waiting == 0
        assert not server.works
        assert not server.pulls
        assert not server.sends.flows
        assert not server.receives.flows
        assert server.slots_free == setup.slots
    for gauge in (cluster.slots, cluster.prefill_queue, cluster.handoff_queue, cluster.admission_queue):
        assert gauge.level == 0
    for gauge in (cluster.prefill_tokens, cluster.decode_tokens):
        assert gauge.level == 0
    assert not cluster._load_p.any()
    assert not cluster._load_d.any()
    assert not cluster.live
    failed = [r for r in cluster.requests if r.failed]
    assert len(failed) == cluster.failed + cluster.refused + cluster.rejected
    for r in cluster.requests:
        if not r.failed:
            # Sums of the same times in another order.
            assert r.arrival_ms < r.first_ms <= r.last_ms * (1 + 1e-12)
            assert r.left == 0
    moved = sum(server.receives.moved for server in decodes)
    assert moved == pytest.approx(cluster.moved_bytes, rel=1e-6, abs=1)
    answered = sum(r.answer - 1 for r in cluster.requests if not r.failed)
    tokens = sum(cluster.gaps._counts)
    if cluster.crashes is None or not cluster.crashes.cut_off:
        assert tokens == answered
    else:
        assert answered <= tokens <= sum(r.answer for r in cluster.requests)
    if cluster.gate is not None:
        books = cluster.gate._admission.stats()
        assert books.queued == 0
        for one in (*books.prefill, *books.decode):
            assert (one.requests, one.tokens_in_flight, one.bytes_in_flight) == (0, 0, 0)
            assert (one.pages_reserved, one.pages_short, one.slots_held) == (0, 0, 0)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_asked_and_breaks_all_ends_once_and_all_is_given_back(data: st.DataObject) -> None:
    shape: dict[str, Any] = {
        "requests": data.draw(st.integers(1, 60)),
        "prompt": data.draw(st.sampled_from([200, 3000, 20_000])),
        "answer": data.draw(st.sampled_from([1, 40, 900])),
        "spread": data.draw(st.sampled_from([0.0, 1.0])),
        "answer_spread": data.draw(st.sampled_from([0.0, 1.0])),
        "shared_prefix": data.draw(st.sampled_from([0, 1024])),
        "prefixes": data.draw(st.integers(1, 3)),
        "seed": data.draw(st.integers(0, 99)),
    }
    if data.draw(st.booleans()):
        asked = poisson(qps=data.draw(st.sampled_from([1.0, 8.0, 60.0])), **shape)
    else:
        asked = users(users=data.draw(st.integers(1, 20)), **shape)
    prefill, decode = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    crash = st.builds(
        Crash, st.floats(0, 20), st.integers(0, prefill + decode - 1), st.sampled_from([0.01, 3.0])
    )
    setup = Setup(
        data.draw(st.sampled_from(list(MODES.values()))),
        prefill=prefill,
        decode=decode,
        tp=data.draw(st.sampled_from([2, 4])),
        slots=data.draw(st.sampled_from([1, 4, 64])),
        chunk=data.draw(st.sampled_from([100, 2048])),
        admission=data.draw(st.booleans()),
        route=data.draw(st.sampled_from(["requests", "bytes"])),
        posting=data.draw(st.sampled_from([None, "loop", "thread"])),
        failure_rate=data.draw(st.sampled_from([0.0, 0.5])),
        mtbf_s=data.draw(st.sampled_from([0.0, 2.0, 30.0])),
        repair_s=data.draw(st.sampled_from([0.1, 5.0])),
        crashes=tuple(data.draw(st.lists(crash, max_size=4))),
        crash_seed=data.draw(st.integers(0, 9)),
        on_failure=data.draw(st.sampled_from(["fail", "recompute"])),
        offload=data.draw(st.booleans()),
    )
    # Little memory, so that pages run out; slow links, so that crashes meet bytes on their way; and crashes
    # that are noticed before a message arrives, or long after the server is back.
    costs = Costs(
        hbm_gb=data.draw(st.sampled_from([44.0, 141.0])),
        nic_gb_s=data.draw(st.sampled_from([0.3, 50.0])),
        control_ms=data.draw(st.sampled_from([0.5, 80.0])),
        detect_ms=data.draw(st.sampled_from([1.0, 1000.0, 20_000.0])),
    )
    run(setup, asked, costs)


# Crashes of one server, by where its requests are.


@pytest.mark.parametrize("mode", [PULL, PUSH, LATE])
@pytest.mark.parametrize("admission", [False, True])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_prefill_server_that_crashes_takes_its_prompts_along(
    mode: Mode, admission: bool, policy: Any
) -> None:
    # The second prompt is half computed at the crash, the third waits behind it.
    crash = Crash((5000 + PREFILL_MS / 2) / 1e3, 0, 30.0)
    setup = Setup(mode, slots=8, admission=admission, crashes=(crash,), on_failure=policy, slo_ttft_ms=1e5)
    found = run(setup, traffic([0, 5000, 5001, 50_000]))
    assert found.crashes is not None
    assert found.crashes.count == 1
    assert [r.failed for r in found.requests] == [False, policy == "fail", policy == "fail", False]
    assert found.failed == (2 if policy == "fail" else 0)
    assert found.crashes.retried == (0 if policy == "fail" else 2)
    if policy == "recompute":
        first, second, third, last = found.requests
        # Decode computes both, once the crash is noticed; both together are computed after one more prompt.
        noticed_ms = crash.at_s * 1e3 + COSTS.detect_ms
        assert second.local
        assert third.local
        assert noticed_ms + PREFILL_MS <= second.first_ms <= noticed_ms + 1.2 * PREFILL_MS
        assert third.first_ms <= noticed_ms + 2.4 * PREFILL_MS
        # The server is back, and used.
        assert not last.local
        assert last.first_ms - last.arrival_ms == pytest.approx(first.first_ms, rel=1e-6)


@pytest.mark.parametrize("mode", [UNIFIED, PULL, PUSH, LATE])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_decode_server_that_crashes_cuts_off_answers_and_what_had_not_begun_is_tried_again(
    mode: Mode, policy: Any
) -> None:
    # The first request is being answered, the second's prompt is being computed.
    number = 1 if mode.split else 0
    setup = Setup(mode, prefill=1, decode=2, crashes=(Crash(0.8, number, 30.0),), on_failure=policy)
    asked = traffic([0, 750], answer=400)
    cluster = Cluster(setup, asked, COSTS)
    # Both to the same server, as long as it is up.
    best = cluster._best
    cluster._best = lambda pool, load: pool[0] if pool[0].up else best(pool, load)  # type: ignore[method-assign]
    cluster.run()
    nothing_is_left(cluster)
    crashes = cluster.crashes
    assert crashes is not None
    first, second = cluster.requests
    assert first.failed
    assert crashes.cut_off == 1
    assert first.first_ms < 800
    if mode.bind == "prefilled":
        # Nobody had told decode of the second one yet: it goes to the other server, and loses nothing.
        assert not second.failed
        assert crashes.retried == 0
        assert second.first_ms < 800 + COSTS.detect_ms
    elif policy == "fail":
        assert second.failed
        assert crashes.retried == 0
    else:
        assert crashes.retried == 1
        assert not second.failed
        assert second.first_ms > 800 + COSTS.detect_ms + PREFILL_MS
        assert second.tries == 1


def test_bytes_on_their_way_at_a_crash_stop_and_those_that_moved_are_counted() -> None:
    costs = Costs(nic_gb_s=0.25)
    whole_ms = costs.kv_bytes(PROMPT) / costs.engine(8).link_bytes_ms
    began = run(Setup(LATE), traffic([0]), costs).requests[0].moved_ms
    crash = Crash((began + whole_ms / 4) / 1e3, 0, 1.0)
    found = run(Setup(LATE, crashes=(crash,)), traffic([0]), costs)
    assert found.requests[0].failed
    assert found.moved_bytes == pytest.approx(costs.kv_bytes(PROMPT) / 4, rel=1e-6)


def test_a_request_is_tried_again_once_and_no_more() -> None:
    # The second one meets the second try, before its first token.
    crashes = tuple(Crash(at_s, 1, 0.5) for at_s in (0.1, 1.2))
    found = run(Setup(PUSH, crashes=crashes, on_failure="recompute"), traffic([0], answer=4))
    assert found.crashes is not None
    assert found.crashes.retried == 1
    assert (found.failed, found.crashes.cut_off) == (1, 0)


def test_with_no_server_up_clients_are_turned_away_at_once_and_users_come_back_later() -> None:
    for mode in MODES.values():
        all_down = tuple(Crash(0.0, number, 10.0) for number in range(2))
        found = run(Setup(mode, crashes=all_down), traffic([1000, 9000, 11_000]))
        assert found.rejected == 2
        assert not found.requests[2].failed
    closed = run(
        Setup(PUSH, crashes=(Crash(0.0, 0, 12.0),)), users(users=1, requests=20, prompt=100, answer=5, seed=1)
    )
    assert closed.rejected == 3, "at 0, 5 and 10 s"
    asked = users(users=1, requests=20, prompt=100, answer=5, seed=1)
    crashes = (Crash(0.0, 1, 12.0),)
    gated = run(Setup(MODES["push"], admission=True, crashes=crashes), asked)
    assert gated.rejected == 3, "admission says when to come again, as a server does that is away"
    assert len(gated.requests) == 20


def test_who_computes_while_some_servers_are_away() -> None:
    crashes = (Crash(0.0, 0, 1000.0), Crash(0.0, 3, 1000.0))
    found = run(Setup(PUSH, prefill=2, decode=2, crashes=crashes), traffic([10.0 * i for i in range(1, 40)]))
    prefills, decodes = found.servers
    assert {r.prefill for r in found.requests} == {prefills[1]}
    assert {r.decode for r in found.requests} == {decodes[0]}
    assert not found.failed


@pytest.mark.parametrize("admission", [False, True])
def test_what_was_not_computed_is_not_found(admission: bool) -> None:
    # The second prompt waits behind the first when its decode server is lost; its next try computes it all.
    asked = dataclasses.replace(
        traffic([0, 1], prompt=16_384), blocks=(tuple(range(32)), tuple(range(100, 132)))
    )
    setup = Setup(
        PUSH, decode=2, on_failure="recompute", crashes=(Crash(0.05, 2, 1000.0),), admission=admission
    )
    found = run(setup, asked, dataclasses.replace(COSTS, detect_ms=10.0))
    assert [request.tries for request in found.requests] == [0, 1]
    assert not any(request.failed for request in found.requests)
    assert found.prefix_tokens == 0


def test_a_crash_forgets_prefixes() -> None:
    asked = dataclasses.replace(
        traffic([0, 3000, 60_000], prompt=4096), blocks=tuple(tuple(range(8)) for _ in range(3))
    )
    kept = run(Setup(PUSH), asked)
    assert (kept.prefix_tokens, kept.decode_prefix_tokens) == (2 * 4095, 2 * 4095)
    # Both servers crash between the second and the third.
    lost = run(Setup(PUSH, crashes=(Crash(20, 0, 1), Crash(20, 1, 1))), asked)
    assert (lost.prefix_tokens, lost.decode_prefix_tokens) == (4095, 4095)
    assert lost.moved_bytes == pytest.approx(kept.moved_bytes + COSTS.kv_bytes(4095))


def test_servers_are_away_as_long_as_the_means_say_and_in_every_mode_alike() -> None:
    asked = poisson(qps=2, requests=2000, prompt=500, answer=20, seed=1)
    found = {}
    for mode in MODES.values():
        setup = Setup(mode, prefill=4, decode=4, mtbf_s=90, repair_s=10, crash_seed=4, on_failure="recompute")
        found[mode.name] = simulate(setup, asked).summary
    counts = {one["crashes"] for one in found.values()}
    assert len(counts) == 1
    # 8 servers for 1,000 s, one crash in 100 s each.
    assert counts.pop() == pytest.approx(80, rel=0.3)
    assert found["push"]["down_fraction"] == pytest.approx(0.1, rel=0.3)
    assert all(one["completed"] > 1900 for one in found.values())
    other = Setup(PUSH, prefill=4, decode=4, mtbf_s=90, repair_s=10, crash_seed=5, on_failure="recompute")
    assert simulate(other, asked).summary["events"] != found["push"]["events"]


def test_recomputing_saves_requests_that_failing_loses() -> None:
    asked = poisson(qps=20, requests=1500, prompt=4000, answer=60, seed=2)
    base: dict[str, Any] = {"prefill": 3, "decode": 3, "mtbf_s": 20, "repair_s": 5}
    lost, again = (
        simulate(Setup(PUSH, on_failure=policy, **base), asked).summary for policy in ("fail", "recompute")
    )
    assert lost["failed"] > again["failed"] > 0
    # Those that fail all the same had begun, or were met twice.
    assert again["cut_off"] > 0.5 * again["failed"]
    assert again["retried"] > 0.5 * (lost["failed"] - again["failed"])
    assert lost["retried"] == 0


def test_senseless_crashes_are_refused_with_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"repairs take above 0 s"):
        Setup(PUSH, repair_s=0)
    with pytest.raises(ValueError, match="a crash of server -1"):
        Crash(1.0, -1, 1.0)
    with pytest.raises(ValueError, match="there are 2, numbered from 0"):
        simulate(Setup(PUSH, crashes=(Crash(1.0, 2, 1.0),)), traffic([0]))


# Prefixes at decode.


@pytest.mark.parametrize("mode", [PULL, PUSH, LATE])
def test_only_the_pages_that_decode_lacks_move(mode: Mode) -> None:
    shape: dict[str, Any] = {"qps": 2, "requests": 60, "prompt": 8192, "answer": 20, "seed": 1}
    apart = run(Setup(mode), poisson(**shape))
    alike = run(Setup(mode), poisson(**shape, shared_prefix=4096, prefixes=3))
    assert apart.moved_bytes == pytest.approx(60 * COSTS.kv_bytes(8192))
    # The first of each has it all to move; and those that come while it moves.
    saved = alike.decode_prefix_tokens / 4096
    assert 50 <= saved <= 57
    assert alike.moved_bytes == pytest.approx(apart.moved_bytes - saved * COSTS.kv_bytes(4096))
    assert 50 * 4096 <= alike.prefix_tokens <= 57 * 4096
    # Fewer descriptors are posted, and less is computed.
    waits = [np.median([r.first_ms - r.arrival_ms for r in one.requests]) for one in (alike, apart)]
    assert waits[0] < 0.75 * waits[1]
    off = run(Setup(mode, prefix_cache=False), poisson(**shape, shared_prefix=4096, prefixes=3))
    assert off.moved_bytes == pytest.approx(apart.moved_bytes)


def test_a_prefix_that_all_servers_have_leaves_one_token_to_compute_and_to_move() -> None:
    asked = dataclasses.replace(traffic([0, 3000], prompt=1024), blocks=((0, 1), (0, 1)))
    found = run(Setup(PUSH), asked)
    assert found.moved_bytes == pytest.approx(COSTS.kv_bytes(1024 + 1))
    assert not found.failed


def test_prefixes_that_do_not_fit_push_out_those_used_longest_ago() -> None:
    costs = Costs(hbm_gb=45.5)
    room = costs.engine(2).tokens // 512
    front = tuple(range(4))
    many = tuple(range(100, 100 + room - 2))
    asked = dataclasses.replace(
        traffic([0, 20_000, 40_000], answer=2, prompt=512 * (room - 2)), blocks=(front, many, front)
    )
    found = run(Setup(PUSH, tp=2), asked, costs)
    assert found.prefix_tokens == 0
    assert found.decode_prefix_tokens == 0
