"""One rank of the vLLM connector against an agent that the test plays."""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvxfer as kx
from kvxfer.vllm import stats
from kvxfer.vllm.meta import Chunk, Grant, Open, Orders
from kvxfer.vllm.settings import read_settings
from kvxfer.vllm.worker import Rank

LAYERS = 2
STATS = SimpleNamespace(bytes=100, bootstrap_us=1000, waiting_us=2000, transfer_us=500)


class FakeAgent:
    """Writes down what it is asked, and says what the test tells it to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.events: list[Any] = []
        self.fails: dict[str, Exception] = {}
        self.states: dict[int, str] = {}
        self.full = 0
        self.polls = 0
        self.quarantined = 0
        self.on_retract: Callable[[Any], None] = lambda push: None
        self._pipe = os.pipe()

    def close(self) -> None:
        for end in self._pipe:
            os.close(end)

    def say(self, room: int, state: str, *, released: bool = True, push: Any = None) -> None:
        self.events.append(
            SimpleNamespace(room=room, state=state, released=released, push=push, error=None, stats=STATS)
        )
        os.write(self._pipe[1], b"x")

    def _call(self, name: str, *args: Any) -> None:
        if self.full:
            self.full -= 1
            raise kx.QueueFull("full")
        if name in self.fails:
            raise self.fails[name]
        self.calls.append((name, *args))

    def open(self, room: int, **kwargs: Any) -> None:
        self._call("open", room)

    def expect(self, room: int, pages: Any, *, start: int, tokens: int, source: str, **kwargs: Any) -> None:
        self._call("expect", room, list(pages), start, tokens, source)

    def push(
        self, room: int, pages: Any, *, start: int, tokens: int, layers: Any, last: bool, **kw: Any
    ) -> Any:
        self._call("push", room, list(pages), start, tokens, layers, last)
        return SimpleNamespace(id=len(self.calls), room=room)

    def retract(self, push: Any) -> None:
        self._call("retract", push.id)
        self.on_retract(push)

    def cancel(self, room: int) -> None:
        self._call("cancel", room)

    def poll(self) -> list[Any]:
        self.polls += 1
        events, self.events = self.events, []
        return events

    def state(self, room: int) -> str | None:
        return self.states.get(room)

    def fileno(self) -> int:
        return self._pipe[0]

    def stats(self) -> dict[str, int]:
        return {"quarantined_pages": self.quarantined}

    def evict(self, peer: str) -> None:
        self._call("evict", peer)

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.calls if call[0] == name]


@pytest.fixture
def agent() -> Iterator[FakeAgent]:
    fake = FakeAgent()
    yield fake
    fake.close()


def rank(agent: FakeAgent, unit: int = 32, block: int = 32, **kwargs: Any) -> Rank:
    settings = read_settings(kwargs.pop("extra", {}), role="kv_both", engine="e")
    return Rank(agent, settings, unit=unit, block_size=block, layers=range(LAYERS), **kwargs)  # type: ignore[arg-type]


def step(r: Rank, **orders: Any) -> tuple[set[str], set[str], set[str]]:
    r.begin_step(Orders(**orders))
    for layer in range(LAYERS):
        r.save_layer(layer)
    results = r.end_step()
    return results.sent, results.received, results.failed


NOTHING: tuple[set[str], set[str], set[str]] = (set(), set(), set())
GRANT = Grant("d", 7, "h:1", 0, 40, (4, 5))
CHUNK = Chunk("p", 7, 0, 40, (1, 2), True)


def test_each_layer_is_pushed_when_it_is_computed_and_only_the_last_ends_the_room(agent: FakeAgent) -> None:
    r = rank(agent)
    assert step(r, opens=[Open("p", 7)], chunks=[CHUNK]) == NOTHING
    assert agent.named("push") == [
        (7, [1, 2], 0, 2, (0, 1), False),
        (7, [1, 2], 0, 2, (1, 2), True),
    ]


def test_a_tile_that_a_chunk_leaves_unfinished_goes_with_the_next_one(agent: FakeAgent) -> None:
    r = rank(agent, unit=32, block=64)
    step(r, opens=[Open("p", 7)], chunks=[Chunk("p", 7, 0, 48, (1,), False)])
    step(r, chunks=[Chunk("p", 7, 48, 60, (1,), False)])
    step(r, chunks=[Chunk("p", 7, 60, 100, (1, 2), True)])
    first_layer = [
        (start, tokens, pages) for _, pages, start, tokens, layers, _ in agent.named("push") if layers[0] == 0
    ]
    assert first_layer == [(0, 1, [1]), (1, 3, [1, 2])]


def test_case_05_units_of_blocks_of_any_size_cover_a_prompt_exactly_once(agent: FakeAgent) -> None:
    for block in (32, 64, 96):
        for prompt in (1, 31, 32, 33, 64, 95, 96, 97, 200):
            for chunk in (1, 7, 32, 50, 200):
                agent.calls.clear()
                r = rank(agent, unit=32, block=block)
                ids = np.arange(100, 100 + -(-prompt // block))
                r.begin_step(Orders(opens=[Open("p", 7)]))
                for start in range(0, prompt, chunk):
                    end = min(prompt, start + chunk)
                    pages = tuple(ids[start // block : -(-end // block)])
                    step(r, chunks=[Chunk("p", 7, start, end, pages, end == prompt)])
                seen = []
                for _, pages, start, tokens, layers, _ in agent.named("push"):
                    if layers[0] == 0:
                        seen += range(start, start + tokens)
                        per = block // 32
                        assert list(pages) == list(ids[start // per : -(-(start + tokens) // per)])
                assert seen == list(range(-(-prompt // 32)))


def test_a_sent_room_is_reported_once_when_both_the_request_and_its_reading_have_ended(
    agent: FakeAgent,
) -> None:
    for early in (False, True):
        r = rank(agent)
        step(r, opens=[Open("p", 7)], chunks=[CHUNK])
        if early:
            agent.say(7, "Success")
            assert step(r) == NOTHING
            assert step(r, finished=["p"]) == ({"p"}, set(), set())
        else:
            assert step(r, finished=["p"]) == NOTHING
            agent.say(7, "Success")
            assert step(r) == ({"p"}, set(), set())
        agent.say(7, "Released")
        assert step(r) == NOTHING
        assert r.busy == 0


def test_failed_is_not_released_sent_pages_stay(agent: FakeAgent) -> None:
    r = rank(agent)
    step(r, opens=[Open("p", 7)], chunks=[CHUNK])
    agent.say(7, "Failed", released=False)
    assert step(r, finished=["p"]) == NOTHING
    agent.say(7, "Released")
    assert step(r) == ({"p"}, set(), set())


def test_case_11_failed_is_not_released_granted_pages_stay(agent: FakeAgent) -> None:
    r = rank(agent)
    assert step(r, grants=[GRANT]) == NOTHING
    assert agent.named("expect") == [(7, [4, 5], 0, 2, "h:1")]
    agent.say(7, "Failed", released=False)
    assert step(r) == NOTHING
    agent.say(7, "Released")
    assert step(r) == (set(), {"d"}, {"d"})
    assert r.busy == 0


def test_a_load_that_ends_well_is_reported_once(agent: FakeAgent) -> None:
    r = rank(agent)
    step(r, grants=[GRANT])
    agent.say(7, "Success")
    assert step(r) == (set(), {"d"}, set())
    assert step(r, cancels=["d"]) == NOTHING
    assert agent.named("cancel") == []


def test_an_aborted_load_is_cancelled_and_reported_when_nothing_can_be_written_any_more(
    agent: FakeAgent,
) -> None:
    r = rank(agent)
    step(r, grants=[GRANT])
    assert step(r, cancels=["d"]) == NOTHING
    assert agent.named("cancel") == [(7,)]
    agent.say(7, "Failed", released=False)
    assert step(r) == NOTHING
    agent.say(7, "Released")
    assert step(r)[1] == {"d"}


def test_a_load_that_cannot_begin_fails_at_once(agent: FakeAgent) -> None:
    r = rank(agent)
    agent.fails["expect"] = kx.RoomInUse("room 7 is in use")
    assert step(r, grants=[GRANT]) == (set(), {"d"}, {"d"})
    assert r.busy == 0


@pytest.mark.parametrize(
    ("error", "refused"),
    [
        (kx.RoomInUse("room 7 is in use"), True),
        (kx.BadArgument("source: no port"), True),
        (kx.Unhealthy("too many pages in quarantine"), False),
    ],
)
def test_a_load_that_is_wrong_in_itself_is_told_from_one_that_had_no_luck(
    agent: FakeAgent, error: Exception, refused: bool
) -> None:
    r = rank(agent)
    agent.fails["expect"] = error
    r.begin_step(Orders(grants=[GRANT]))
    results = r.end_step()
    assert (results.received, results.failed) == ({"d"}, {"d"})
    assert results.refused == ({"d": str(error)} if refused else {})


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (range(1), [1]),
        (range(8), [1] * 8),
        (range(30), [1, 1, 2, 4, 4, 4, 4, 4, 3, 1, 1, 1]),
        (range(40, 80), [1, 1, 2, 4, 5, 5, 5, 5, 5, 3, 2, 1, 1]),
    ],
    ids=str,
)
def test_layers_go_together_but_for_the_first_and_the_last_ones(
    agent: FakeAgent, layers: range, sizes: list[int]
) -> None:
    settings = read_settings({}, role="kv_both", engine="e")
    r = Rank(agent, settings, unit=32, block_size=32, layers=layers)  # type: ignore[arg-type]
    for _ in range(2):
        agent.calls.clear()
        r.begin_step(Orders(opens=[Open("p", 7)] if not r.busy else [], chunks=[CHUNK]))
        for layer in layers:
            r.save_layer(layer)
        pushes = [(call[4], call[5]) for call in agent.named("push")]
        assert [end - first for (first, end), _ in pushes] == sizes
        assert [first for (first, _), _ in pushes] == [
            layers.start + sum(sizes[:i]) for i in range(len(sizes))
        ]
        assert [last for _, last in pushes] == [False] * (len(sizes) - 1) + [True]


def test_layers_that_come_in_another_order_go_alone(agent: FakeAgent) -> None:
    settings = read_settings({}, role="kv_both", engine="e")
    r = Rank(agent, settings, unit=32, block_size=32, layers=range(16))  # type: ignore[arg-type]
    r.begin_step(Orders(opens=[Open("p", 7)], chunks=[CHUNK]))
    for layer in (0, 1, 3, 2, *range(4, 16)):
        r.save_layer(layer)
    pushed = [call[4] for call in agent.named("push")]
    assert pushed[:4] == [(0, 1), (1, 2), (3, 4), (2, 3)]
    assert sorted(layer for first, end in pushed for layer in range(first, end)) == list(range(16))
    assert [call[5] for call in agent.named("push")][-1]


def test_pages_in_quarantine_are_counted_as_they_come_and_go_and_said_once(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    r = rank(agent, clock=lambda: now[0])
    seen = []
    with caplog.at_level(logging.INFO, "vllm.kvxfer"):
        for pages in (0, 3, 3, 5, 0):
            now[0] += 1.0
            agent.quarantined = pages
            step(r)
            seen.append(r.stats.take().get("quarantined", 0))
    assert seen == [0, 3, 0, 2, -5]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_case_12_the_operator_evicts_a_peer_by_a_file_and_only_while_pages_are_in_quarantine(
    agent: FakeAgent, tmp_path: Path
) -> None:
    now, path = [0.0], tmp_path / "evict"
    r = rank(agent, clock=lambda: now[0], extra={"evict_file": str(path)})

    def look() -> list[tuple[Any, ...]]:
        now[0] += 1.0
        step(r)
        return agent.named("evict")

    # What is there from an earlier time says nothing of the peers of today.
    path.write_text("prefill-old-0\n")
    assert look() == []
    agent.quarantined = 4
    assert look() == []
    path.write_text("prefill-a-0\n")
    assert look() == [("prefill-a-0",)]
    assert look() == [("prefill-a-0",)]
    # A queue that is full: again a second later.
    agent.fails["evict"] = kx.QueueFull("full")
    path.write_text("prefill-b-0 prefill-b-1\n")
    assert look() == [("prefill-a-0",)]
    agent.fails.clear()
    asked = [("prefill-a-0",), ("prefill-b-0",), ("prefill-b-1",)]
    assert look() == asked
    agent.quarantined = 0
    path.write_text("prefill-c-0\n")
    assert look() == asked
    agent.quarantined = 2
    assert look() == asked
    path.unlink()
    assert look() == asked


def test_an_abandoned_room_grants_nothing_and_tells_vllm_nothing(agent: FakeAgent) -> None:
    r = rank(agent)
    assert step(r, grants=[Grant("d", 7, "h:1", 40, 40, ())], cancels=["d"]) == NOTHING
    assert agent.named("expect") == [(7, [], 2, 0, "h:1")]
    assert agent.named("cancel") == [(7,)]
    agent.say(7, "Failed")
    assert step(r) == NOTHING
    assert r.busy == 0


def test_case_10_a_preempted_prompts_pages_are_taken_back_before_the_step_computes(agent: FakeAgent) -> None:
    r = rank(agent)
    step(r, opens=[Open("p", 7)], chunks=[Chunk("p", 7, 0, 32, (1,), False)])
    agent.on_retract = lambda push: agent.say(7, "Retracted", released=False, push=push)
    r.begin_step(Orders(preempted=["p", "somebody else"]))
    assert len(agent.named("retract")) == LAYERS
    assert agent.events == []
    r.end_step()
    step(r, chunks=[Chunk("p", 7, 0, 40, (8, 9), True)])
    assert agent.named("push")[-1] == (7, [8, 9], 0, 2, (1, 2), True)


def test_a_peer_that_does_not_give_pages_back_loses_the_room(agent: FakeAgent) -> None:
    now = iter(range(0, 10_000, 20))
    r = rank(agent, clock=lambda: float(next(now)))
    step(r, opens=[Open("p", 7)], chunks=[Chunk("p", 7, 0, 32, (1,), False)])
    r.begin_step(Orders(preempted=["p"]))
    assert agent.named("cancel") == [(7,)]
    r.end_step()
    pushes = len(agent.named("push"))
    step(r, chunks=[Chunk("p", 7, 0, 40, (8, 9), True)])
    assert len(agent.named("push")) == pushes


def test_a_room_that_fails_while_pages_are_taken_back_holds_up_no_other(agent: FakeAgent) -> None:
    """Its pushes are never reported as taken back, since nothing that is read of it counts."""
    now = iter(range(0, 10_000, 20))
    r = rank(agent, clock=lambda: float(next(now)))
    chunks = [Chunk("p", 7, 0, 32, (1,), False), Chunk("q", 8, 0, 32, (2,), False)]
    step(r, opens=[Open("p", 7), Open("q", 8)], chunks=chunks)

    def answer(push: Any) -> None:
        if push.room == 8:
            agent.say(8, "Retracted", released=False, push=push)
        elif not agent.events:
            agent.say(7, "Failed", released=False)

    agent.on_retract = answer
    r.begin_step(Orders(preempted=["p", "q"]))
    assert agent.named("cancel") == [], "no time passed in which a room had to be given up"
    r.end_step()
    step(r, chunks=[Chunk("q", 8, 0, 40, (8, 9), True)])
    assert agent.named("push")[-1] == (8, [8, 9], 0, 2, (1, 2), True)


def test_no_step_computes_over_pages_that_could_not_be_taken_back(agent: FakeAgent) -> None:
    now = iter(range(0, 10_000, 20))
    r = rank(agent, clock=lambda: float(next(now)))
    step(r, opens=[Open("p", 7)], chunks=[Chunk("p", 7, 0, 32, (1,), False)])
    agent.full = 10
    with pytest.raises(kx.QueueFull):
        r.begin_step(Orders(preempted=["p"]))


def test_an_aborted_prompt_is_cancelled_and_kept_until_nobody_reads_it(agent: FakeAgent) -> None:
    r = rank(agent)
    step(r, opens=[Open("p", 7)], chunks=[Chunk("p", 7, 0, 32, (1,), False)])
    assert step(r, cancels=["p"], finished=["p"]) == NOTHING
    agent.say(7, "Failed", released=False)
    assert step(r) == NOTHING
    agent.say(7, "Released")
    assert step(r) == ({"p"}, set(), set())
    assert r.busy == 0


def test_an_aborted_prompt_that_sent_nothing_is_not_reported(agent: FakeAgent) -> None:
    r = rank(agent)
    assert step(r, opens=[Open("p", 7)], cancels=["p"]) == NOTHING
    assert agent.named("cancel") == [(7,)]
    agent.say(7, "Failed")
    assert step(r) == NOTHING
    assert r.busy == 0


def test_a_room_that_nobody_comes_for_gives_its_pages_back_whether_its_request_has_ended_or_not(
    agent: FakeAgent,
) -> None:
    r = rank(agent)
    step(r, opens=[Open("p", 7)], chunks=[CHUNK])
    step(r, finished=["p"])
    assert step(r, given_up=[8, 7]) == NOTHING
    assert agent.named("cancel") == [(7,)]
    agent.say(7, "Failed")
    assert step(r) == ({"p"}, set(), set())
    assert step(r, given_up=[7]) == NOTHING
    assert agent.named("cancel") == [(7,)]


def test_a_full_queue_is_waited_for(agent: FakeAgent) -> None:
    r = rank(agent)
    r.begin_step(Orders(opens=[Open("p", 7)], chunks=[CHUNK]))
    agent.full = 3
    for layer in range(LAYERS):
        r.save_layer(layer)
    assert len(agent.named("push")) == LAYERS


def test_a_push_that_fails_gives_the_room_up_and_frees_the_pages(agent: FakeAgent) -> None:
    r = rank(agent)
    agent.fails = {"push": kx.BadArgument("no"), "cancel": kx.UnknownRoom("7")}
    assert step(r, opens=[Open("p", 7)], chunks=[CHUNK]) == NOTHING
    assert step(r, finished=["p"]) == ({"p"}, set(), set())


def test_a_push_into_a_room_that_has_failed_waits_for_its_release(
    agent: FakeAgent, caplog: pytest.LogCaptureFixture
) -> None:
    r = rank(agent)
    agent.fails = {"push": kx.Cancelled("by decode")}
    agent.states[7] = "Failed"
    assert step(r, opens=[Open("p", 7)], chunks=[CHUNK]) == NOTHING
    assert step(r, finished=["p"]) == NOTHING
    assert agent.named("cancel") == []
    assert caplog.text == ""
    agent.say(7, "Failed", released=False)
    assert step(r) == NOTHING
    agent.say(7, "Released")
    assert step(r) == ({"p"}, set(), set())


def test_a_step_polls_once(agent: FakeAgent) -> None:
    r = rank(agent)
    for _ in range(5):
        step(r, grants=[])
    assert agent.polls == 5


def test_a_room_from_this_very_server_is_refused_and_its_prompt_goes_on(agent: FakeAgent) -> None:
    r = rank(agent)
    step(r, opens=[Open("p", 7)], chunks=[CHUNK])
    assert step(r, grants=[GRANT]) == (set(), {"d"}, {"d"})
    agent.say(7, "Success")
    assert step(r, finished=["p"]) == ({"p"}, set(), set())


def test_a_room_to_this_very_server_is_refused_and_its_load_goes_on(agent: FakeAgent) -> None:
    r = rank(agent)
    step(r, grants=[GRANT])
    assert step(r, opens=[Open("p", 7)], chunks=[CHUNK]) == NOTHING
    assert agent.named("push") == []
    assert step(r, finished=["p"]) == ({"p"}, set(), set())
    agent.say(7, "Success")
    assert step(r) == (set(), {"d"}, set())
    assert r.busy == 0


def test_numbers_add_up_and_hooks_alone_are_no_log_line(agent: FakeAgent) -> None:
    r = rank(agent)
    step(r, grants=[GRANT])
    agent.say(7, "Success")
    step(r)
    r.stats.hook("poll", 2e-6)
    data = r.stats.take()
    assert (data["rooms_in"], data["bytes_in"], data["wait_s"], data["transfer_s"]) == (
        1,
        100,
        [0.003],
        [0.0005],
    )
    total = stats.merge(stats.merge({}, data), data)
    line = stats.reduce(total)
    assert (line["rooms_in"], line["wait_p50_ms"], line["poll_p99_us"]) == (2, 3.0, 2.0)
    assert not stats.is_empty(data)
    assert stats.is_empty({"hooks": {"poll": [1e-6]}})
    assert r.stats.take() == {}
