"""vLLM's real scheduler with the connector: every order of events, each point of abort, failures with both
policies.
"""

from __future__ import annotations

import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import vllm
from lab import Engine, answer_of, facts
from servers import free_port

import kvxfer as kx

pytestmark = pytest.mark.timeout(300)

Make = Callable[..., Engine]
# Other work may load the machine; nothing here takes longer than milliseconds.
WAIT_S = 60.0


def until(done: Callable[[], bool], *engines: Engine) -> None:
    """Steps engines until something is so."""
    end = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < end, "what was waited for did not come"
        for engine in engines:
            engine.step()
        time.sleep(0.0005)


def quiet(*engines: Engine) -> None:
    """Steps engines until vLLM would stop stepping them; then no page is held, and each end was told once."""
    until(lambda: all(engine.idle for engine in engines), *engines)
    for engine in engines:
        assert engine.used == 0
        assert len(set(engine.sent)) == len(engine.sent)
        assert len(set(engine.received)) == len(engine.received)


def _at(role: str) -> dict[str, Any]:
    """An address of its own, where a role needs one."""
    return {} if role == "kv_consumer" else {"directory": f"127.0.0.1:{free_port()}"}


class Pair:
    """A prefill and a decode engine."""

    def __init__(
        self, make: Make, *, p: dict[str, Any] | None = None, d: dict[str, Any] | None = None
    ) -> None:
        self.source = f"127.0.0.1:{free_port()}"
        self.p = make("kv_producer", directory=self.source, **(p or {}))
        self.d = make("kv_consumer", **(d or {}))

    def legs(self, tokens: list[int], count: int = 3) -> tuple[str, str]:
        """Both legs at once, as the proxy sends them."""
        room = kx.new_room()
        return self.prefill_leg(tokens, room), self.decode_leg(tokens, room, count)

    def prefill_leg(self, tokens: list[int], room: int) -> str:
        return self.p.add(
            tokens, {"do_remote_decode": True, "do_remote_prefill": False, "room": room}, max_tokens=1
        )

    def decode_leg(self, tokens: list[int], room: int, count: int = 3) -> str:
        params = {"do_remote_prefill": True, "do_remote_decode": False, "room": room, "source": self.source}
        return self.d.add(tokens, params, max_tokens=count)

    def check(self, tokens: list[int], count: int = 3) -> None:
        """One hand-off and its answer."""
        a, b = self.legs(tokens, count)
        until(lambda: len(self.d.answers[b]) == count, self.p, self.d)
        assert self.d.answers[b] == answer_of(tokens, count)
        assert self.p.answers[a] == answer_of(tokens, 1)
        quiet(self.p, self.d)
        assert a in self.p.sent
        assert b in self.d.received


def prompt(n: int, seed: int = 0) -> list[int]:
    return [random.Random(seed).randrange(1, 40_000) for _ in range(n)]


def test_this_is_a_version_that_is_supported() -> None:
    assert vllm.__version__.startswith(("0.32.", "0.33."))


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("cross_layer", [False, True])
def test_a_prompt_goes_over_whatever_the_order_of_its_pages(
    engine: Make, order: str, cross_layer: bool
) -> None:
    shape = {"order": order, "cross_layer": cross_layer}
    pair = Pair(engine, p=shape, d={"order": "NHD" if order == "HND" else "HND"})
    for n in (1, 15, 16, 17, 100):
        pair.check(prompt(n))


@pytest.mark.parametrize(
    ("p", "d", "heads"),
    [(1, 2, 4), (2, 1, 4), (4, 2, 4), (2, 4, 4), (3, 1, 3), (1, 3, 3), (4, 1, 2), (1, 4, 2)],
    ids=str,
)
def test_case_06_tensor_parallel_sizes_may_differ_and_heads_be_replicated(
    engine: Make, p: int, d: int, heads: int
) -> None:
    pair = Pair(engine, p={"tp": p, "heads": heads}, d={"tp": d, "heads": heads, "order": "NHD"})
    for n in (1, 47, 130):
        pair.check(prompt(n))


@pytest.mark.parametrize(("p", "d"), [(32, 64), (64, 32), (16, 48)])
def test_case_05_block_sizes_may_differ(engine: Make, p: int, d: int) -> None:
    pair = Pair(engine, p={"block": p, "batch": 100}, d={"block": d})
    for n in (1, 31, 64, 65, 200):
        pair.check(prompt(n))


def test_case_10_chunked_prefill(engine: Make) -> None:
    pair = Pair(engine, p={"batch": 48})
    for n in (48, 49, 100, 333):
        pair.check(prompt(n))


def test_case_08_a_prefix_that_decode_has_is_not_moved_again(engine: Make) -> None:
    pair = Pair(engine, p={"prefix_cache": True}, d={"prefix_cache": True})
    first = prompt(100)
    pair.check(first)
    before = facts(pair.d).moved_bytes
    moved = []
    for tokens in (first + prompt(20, 1), first + prompt(20, 1), first[:96]):
        pair.check(tokens)
        now = facts(pair.d).moved_bytes
        moved.append(now - before)
        before = now
    token = 4 * 8 * 2 * 4 * 3
    # 6 whole pages of 16 are shared; then 7; of 96 tokens the last page is needed for the last token.
    assert moved == [24 * token, 8 * token, 16 * token]


@pytest.mark.parametrize("engine", ["in step"], indirect=True)
def test_an_engine_that_stops_stepping_after_prefill_delivers_the_last_chunk(engine: Make) -> None:
    pair = Pair(engine, p={"batch": 48})
    tokens = prompt(100)
    a, b = pair.legs(tokens)
    while not pair.p.answers[a]:
        output = pair.p.scheduler.schedule()
        result = pair.p.execute(output)
        # The last step computes, and the loop hangs right after it: nothing is polled again.
        if sum(output.num_scheduled_tokens.values()) + 96 >= 100 and len(pair.p.tables[a]) == 7:
            break
        pair.p.finish(output, result)
    until(lambda: len(pair.d.answers[b]) == 3, pair.d)
    assert pair.d.answers[b] == answer_of(tokens, 3)
    pair.p.finish(output, result)
    quiet(pair.p, pair.d)


def test_late_choice_the_answer_of_prefill_names_room_and_source(engine: Make) -> None:
    pair = Pair(engine)
    tokens = prompt(70)
    a = pair.p.add(tokens, {"do_remote_decode": True}, max_tokens=1)
    until(lambda: a in pair.p.params, pair.p)
    for _ in range(20):
        pair.p.step()
    assert pair.p.used > 0, "pages wait for the grant"
    b = pair.d.add(tokens, pair.p.params[a])
    until(lambda: len(pair.d.answers[b]) == 3, pair.p, pair.d)
    assert pair.d.answers[b] == answer_of(tokens, 3)
    quiet(pair.p, pair.d)


def test_nobody_asks_for_a_prompt_and_its_pages_come_back_after_the_timeout(engine: Make) -> None:
    pair = Pair(engine, p={"timeout_s": 0.5})
    a = pair.prefill_leg(prompt(70), kx.new_room())
    until(lambda: bool(pair.p.answers[a]), pair.p)
    quiet(pair.p)


def test_case_17_nobody_comes_for_a_prompt_and_the_proxy_says_so(engine: Make) -> None:
    pair = Pair(engine)
    room = kx.new_room()
    a = pair.prefill_leg(prompt(70), room)
    until(lambda: bool(pair.p.answers[a]), pair.p)
    for _ in range(20):
        pair.p.step()
    assert pair.p.used > 0, "pages wait for the grant"
    began = time.monotonic()
    pair.p.add([1], {"give_up": room}, max_tokens=1)
    quiet(pair.p)
    assert time.monotonic() - began < 50, "prefill waited for its timeout"
    pair.check(prompt(40))


@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("turns", range(9))
@pytest.mark.parametrize("first", ["prefill", "decode", "both"])
def test_aborted_at_any_point_on_either_side_all_pages_come_back(
    engine: Make, who: str, turns: int, first: str
) -> None:
    pair = Pair(engine, p={"batch": 32}, d={"timeout_s": 20.0})
    tokens = prompt(100)
    a, b = pair.legs(tokens, 4)
    steps = {"prefill": (pair.p, pair.d), "decode": (pair.d, pair.p)}
    for i in range(turns):
        if first == "both":
            pair.p.step()
            pair.d.step()
        else:
            # One side runs ahead for as long as it can.
            steps[first][0 if i < 5 else 1].step()
    victim, name = (pair.p, a) if who == "prefill" else (pair.d, b)
    victim.abort(name)
    if who == "decode":
        pair.p.abort(a)  # as the proxy does
    quiet(pair.p, pair.d)
    if pair.d.answers[b] and b not in pair.d.errors:
        assert pair.d.answers[b] == answer_of(tokens, 4)[: len(pair.d.answers[b])]
    # The engines go on.
    pair.check(prompt(40, 7))


def test_a_decode_request_that_is_aborted_in_the_queue_lets_prefill_go_without_the_proxy(
    engine: Make,
) -> None:
    pair = Pair(engine)
    a, b = pair.legs(prompt(60))
    until(lambda: bool(pair.p.answers[a]), pair.p)
    pair.d.abort(b)
    began = time.monotonic()
    quiet(pair.p, pair.d)
    assert time.monotonic() - began < 50, "prefill waited for its timeout"


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_case_10_a_preempted_prompt_is_computed_and_pushed_again(engine: Make, turns: int) -> None:
    pair = Pair(engine, p={"batch": 32})
    tokens = prompt(120)
    a, b = pair.legs(tokens)
    pair.d.step()
    for _ in range(turns):
        pair.p.step()
    pair.p.preempt()
    # Another request takes the pages at once.
    c, e = pair.legs(prompt(64, 5))
    until(lambda: len(pair.d.answers[b]) == 3 and len(pair.d.answers[e]) == 3, pair.p, pair.d)
    assert pair.d.answers[b] == answer_of(tokens, 3)
    assert pair.d.answers[e] == answer_of(prompt(64, 5), 3)
    assert pair.p.answers[a] == answer_of(tokens, 1)
    assert pair.p.answers[c] == answer_of(prompt(64, 5), 1)
    quiet(pair.p, pair.d)


@pytest.mark.parametrize("turns", [1, 2, 3, 4, 5])
def test_case_10_two_prompts_that_are_preempted_at_once_are_both_handed_off(engine: Make, turns: int) -> None:
    pair = Pair(engine, p={"batch": 64})
    prompts = [prompt(90, 1), prompt(110, 2)]
    legs = [pair.legs(tokens) for tokens in prompts]
    pair.d.step()
    for _ in range(turns):
        pair.p.step()
    pair.p.preempt()
    pair.d.step()
    pair.p.preempt()
    until(lambda: all(len(pair.d.answers[b]) == 3 for _, b in legs), pair.p, pair.d)
    for tokens, (a, b) in zip(prompts, legs, strict=True):
        assert pair.d.answers[b] == answer_of(tokens, 3)
        assert pair.p.answers[a] == answer_of(tokens, 1)
    quiet(pair.p, pair.d)


def test_a_preempted_answer_is_computed_at_decode_and_not_asked_for_again(engine: Make) -> None:
    pair = Pair(engine)
    tokens = prompt(50)
    _, b = pair.legs(tokens, 6)
    until(lambda: len(pair.d.answers[b]) == 3, pair.p, pair.d)
    pair.d.preempt()
    until(lambda: len(pair.d.answers[b]) == 6, pair.p, pair.d)
    assert pair.d.answers[b] == answer_of(tokens, 6)
    assert pair.d.received == [b]
    quiet(pair.p, pair.d)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("why", ["nobody there", "prefill gone", "prefill aborts"])
def test_a_hand_off_that_fails_follows_the_policy(engine: Make, policy: str, why: str) -> None:
    pair = Pair(engine, p={"batch": 32}, d={"policy": policy, "timeout_s": 2.0})
    tokens = prompt(100)
    if why == "nobody there":
        pair.source = f"127.0.0.1:{free_port()}"
        b = pair.decode_leg(tokens, kx.new_room())
    else:
        a, b = pair.legs(tokens)
        pair.d.step()
        pair.p.step()
        pair.p.step()
        if why == "prefill gone":
            pair.p.kill()
        else:
            pair.p.abort(a)
            until(lambda: pair.p.idle, pair.p)
    until(lambda: pair.d.idle, pair.d)
    if policy == "fail":
        assert b in pair.d.errors
        assert pair.d.answers[b] == []
    else:
        assert pair.d.answers[b] == answer_of(tokens, 3)
    quiet(pair.d)
    c = pair.d.add(prompt(20, 3), None)
    until(lambda: pair.d.idle, pair.d)
    assert pair.d.answers[c] == answer_of(prompt(20, 3), 3)


def test_case_17_prefill_comes_back_at_its_address_and_the_next_prompt_goes_over(engine: Make) -> None:
    pair = Pair(engine)
    pair.check(prompt(40))
    pair.p.kill()
    pair.p = engine("kv_producer", directory=pair.source)
    pair.check(prompt(41))


def test_case_17_decode_comes_back_and_a_prompt_that_was_for_the_old_one_gives_its_pages_back(
    engine: Make,
) -> None:
    pair = Pair(engine, p={"batch": 32})
    room = kx.new_room()
    pair.prefill_leg(prompt(100), room)
    b = pair.decode_leg(prompt(100), room)
    pair.d.step()
    pair.p.step()
    # Prefill has heard of it; else it would wait for whoever may come, as with late choice.
    agent = pair.p.workers[0]._agent
    assert agent is not None
    until(lambda: agent.state(room) in ("Waiting", "Transferring"))
    pair.d.kill()
    assert b not in pair.d.received
    quiet(pair.p)
    pair.d = engine("kv_consumer")
    pair.check(prompt(42))


def test_case_18_a_server_in_the_wrong_role_is_named_with_both_roles(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    source = f"127.0.0.1:{free_port()}"
    d = engine("kv_consumer", timeout_s=10.0)
    other = engine("kv_consumer", listen=source)
    logging.getLogger("vllm").propagate = True
    b = d.add(
        prompt(30),
        {"do_remote_prefill": True, "do_remote_decode": False, "room": kx.new_room(), "source": source},
    )
    until(lambda: d.idle, d, other)
    assert b in d.errors
    assert "decode" in caplog.text
    assert "prefill" in caplog.text
    quiet(d)
    a = d.add(prompt(30), {"do_remote_decode": True, "room": kx.new_room()}, max_tokens=1)
    until(lambda: d.idle, d)
    assert a in d.errors
    assert "kv_consumer" in caplog.text
    quiet(d)


PREFILL = {"do_remote_decode": True, "room": 7}
DECODE = {"do_remote_prefill": True, "room": 7, "source": "127.0.0.1:1"}


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize(
    ("role", "params", "says"),
    [
        ("kv_consumer", PREFILL, ("do_remote_decode", "kv_consumer")),
        ("kv_producer", DECODE, ("do_remote_prefill", "kv_producer")),
        ("kv_consumer", {**DECODE, "source": "here"}, ("source='here'", "host:port")),
        ("kv_consumer", {**DECODE, "room": "seven"}, ("room='seven'", "new_room")),
    ],
    ids=["prefill leg", "decode leg", "no address", "no room"],
)
def test_case_18_a_request_that_cannot_be_served_so_fails_whatever_the_policy_and_is_not_computed(
    engine: Make, policy: str, logprobs: int | None, role: str, params: dict[str, Any], says: tuple[str, ...]
) -> None:
    alone = engine(role, policy=policy, **_at(role))
    name = alone.add(prompt(40), params, logprobs=logprobs)
    good = alone.add(prompt(30), None)
    until(lambda: alone.idle, alone)
    assert alone.errors == {name}
    assert alone.answers[name] == []
    assert alone.answers[good] == answer_of(prompt(30), 3)
    if vllm.__version__.startswith("0.33"):
        for word in says:
            assert word in alone.words[name]
    quiet(alone)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_case_18_a_room_that_the_agent_refuses_is_an_error_whatever_the_policy(
    engine: Make, policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(engine, d={"policy": policy, "prefix_cache": True})
    room = kx.new_room()
    # Somebody else has it: here a test, in the field a proxy that gives a room to two servers' requests.
    agent = pair.d.workers[0]._agent
    assert agent is not None
    agent.expect(room, [60], tokens=16, source=pair.source)
    logging.getLogger("vllm").propagate = True
    name = pair.decode_leg(prompt(40), room)
    until(lambda: pair.d.idle, pair.d)
    assert name in pair.d.errors
    assert pair.d.answers[name] == []
    assert str(room) in caplog.text
    agent.cancel(room)
    quiet(pair.d)
    pair.check(prompt(40))


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_at_decode_and_prefill_let_go(
    engine: Make,
) -> None:
    pair = Pair(engine)
    room = kx.new_room()
    a = pair.prefill_leg(prompt(60), room)
    params = {"do_remote_prefill": True, "room": room, "source": pair.source}
    b = pair.d.add(prompt(60), params, logprobs=1)
    until(lambda: pair.p.idle and pair.d.idle, pair.p, pair.d)
    assert pair.d.answers[b] == answer_of(prompt(60), 3)
    assert pair.p.answers[a] == answer_of(prompt(60), 1)
    quiet(pair.p, pair.d)


def test_an_answer_tells_the_proxy_when_its_prompt_was_there(engine: Make) -> None:
    pair = Pair(engine)
    _, b = pair.legs(prompt(60))
    until(lambda: b in pair.d.params, pair.p, pair.d)
    assert 0 < pair.d.params[b]["loaded_ms"] < WAIT_S * 1e3
    quiet(pair.p, pair.d)


def test_case_18_another_model_of_the_same_sizes_is_refused_by_name(
    engine: Make, caplog: pytest.LogCaptureFixture
) -> None:
    pair = Pair(engine, p={"model": "one"}, d={"model": "other", "timeout_s": 10.0})
    logging.getLogger("vllm").propagate = True
    a, b = pair.legs(prompt(30))
    until(lambda: b in pair.d.errors, pair.p, pair.d)
    assert "one" in caplog.text
    assert "other" in caplog.text
    pair.p.abort(a)
    quiet(pair.p, pair.d)


def test_requests_without_a_room_are_computed_or_rejected(engine: Make) -> None:
    alone = engine("kv_consumer")
    a = alone.add(prompt(30), None)
    until(lambda: alone.idle, alone)
    assert alone.answers[a] == answer_of(prompt(30), 3)
    strict = engine("kv_consumer", on_missing_room="reject")
    b = strict.add(prompt(30), None)
    until(lambda: strict.idle, strict)
    assert b in strict.errors
    quiet(alone, strict)


def test_both_roles_in_one_engine_hand_off_both_ways_at_once(engine: Make) -> None:
    sources = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    one, two = (engine("kv_both", directory=source) for source in sources)
    wanted = []
    for i in range(6):
        p, d, source = (one, two, sources[0]) if i % 2 else (two, one, sources[1])
        tokens, room = prompt(20 + 11 * i, i), kx.new_room()
        p.add(tokens, {"do_remote_decode": True, "room": room}, max_tokens=1)
        name = d.add(tokens, {"do_remote_prefill": True, "room": room, "source": source})
        wanted.append((d, name, tokens))
    plain = one.add(prompt(30), None)
    until(lambda: one.idle and two.idle, one, two)
    for d, name, tokens in wanted:
        assert d.answers[name] == answer_of(tokens, 3)
    assert one.answers[plain] == answer_of(prompt(30), 3)
    quiet(one, two)


def test_more_prompts_than_pages_all_come_through(engine: Make) -> None:
    pair = Pair(engine, p={"blocks": 40, "batch": 64}, d={"blocks": 24})
    legs = [(tokens, pair.legs(tokens)) for tokens in (prompt(30 + 7 * i, i) for i in range(20))]
    until(lambda: pair.p.idle and pair.d.idle, pair.p, pair.d)
    for tokens, (a, b) in legs:
        assert pair.d.answers[b] == answer_of(tokens, 3)
        assert pair.p.answers[a] == answer_of(tokens, 1)
    quiet(pair.p, pair.d)


@pytest.mark.parametrize("seed", range(12))
def test_any_order_of_events_never_ends_in_a_wrong_token_a_second_report_or_a_page_that_is_held(
    engine: Make, seed: int
) -> None:
    dice = random.Random(seed)
    block = dice.choice([(16, 16), (16, 32), (32, 16)])
    pair = Pair(
        engine,
        p={
            "block": block[0],
            "batch": dice.choice([24, 64, 512]),
            "prefix_cache": dice.random() < 0.5,
            "blocks": 40,
        },
        d={
            "block": block[1],
            "prefix_cache": dice.random() < 0.5,
            "blocks": 40,
            "policy": dice.choice(["fail", "recompute"]),
            "timeout_s": 30.0,
        },
    )
    common = prompt(40, seed)
    live: list[tuple[list[int], str, str]] = []
    done: list[tuple[list[int], str, str, bool]] = []
    for turn in itertools.count():
        what = dice.random()
        if what < 0.1 and turn < 250:
            tokens = common[: dice.randrange(41)] + prompt(dice.randrange(1, 120), 1000 * seed + turn)
            live.append((tokens, *pair.legs(tokens, 4)))
        elif what < 0.13 and live:
            tokens, a, b = live.pop(dice.randrange(len(live)))
            pair.p.abort(a)
            pair.d.abort(b)
            done.append((tokens, a, b, True))
        elif what < 0.14:
            dice.choice([pair.p, pair.d]).preempt()
        elif what < 0.57:
            pair.p.step()
        else:
            pair.d.step()
        if turn > 300 and pair.p.idle and pair.d.idle:
            break
        assert turn < 200_000
    quiet(pair.p, pair.d)
    for tokens, a, b, aborted in [*((*item, False) for item in live), *done]:
        got = pair.d.answers[b]
        assert got == answer_of(tokens, 4)[: len(got)]
        assert pair.p.answers[a] in ([], answer_of(tokens, 1))
        if not aborted:
            assert len(got) == 4, (b in pair.d.errors, seed)
