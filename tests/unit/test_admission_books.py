"""`kvxfer.admission` under any order of calls: never more than there is, and nothing is lost."""

from __future__ import annotations

from admitting import MB, admitted, ask
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvxfer.admission import (
    Admission,
    Admitted,
    Config,
    Decision,
    Decode,
    Expired,
    Prefill,
    Queued,
    Reason,
    Refused,
)


class Books(RuleBasedStateMachine):
    """Whatever happens in whatever order: no server gives more than it has, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(
            Config(
                queue_requests=4,
                queue_wait_s=30.0,
                link_backlog_s=2.0,
                prefill_backlog_s=2.0,
                kv_bytes_per_token=MB,
                growth_tokens=20,
                overtakes=2,
            )
        )
        self.capacity = {"d0": [40, 16, 5], "d1": [25, 32, 3]}
        for name in ("p0", "p1"):
            self.admission.add_prefill(Prefill(name, tokens_per_s=500, gbytes_per_s=1))
        for name, (pages, page_tokens, slots) in self.capacity.items():
            self.admission.add_decode(
                Decode(name, pages=pages, page_tokens=page_tokens, slots=slots, prefill_tokens_per_s=1000)
            )
        self.now = 0.0
        self.next = 0
        # Prompt and answer tokens that each must have pages for.
        self.waiting: dict[int, tuple[int, int]] = {}
        self.running: dict[int, list[int]] = {}
        self.where: dict[int, Admitted] = {}
        self.order: list[int] = []
        self.passed: dict[int, int] = {}

    def took(self, found: Decision | None) -> None:
        assert isinstance(found, Admitted | Expired)
        sizes = self.waiting.pop(found.id)  # type: ignore[arg-type]
        if isinstance(found, Admitted):
            before = self.order[: self.order.index(found.id)]  # type: ignore[arg-type]
            for other in before:
                self.passed[other] = self.passed.get(other, 0) + 1
                assert self.passed[other] <= self.admission.config.overtakes
            self.let_in(found, sizes)
        self.order.remove(found.id)  # type: ignore[arg-type]

    def let_in(self, found: Admitted, sizes: tuple[int, int]) -> None:
        self.running[found.id] = list(sizes)  # type: ignore[index]
        self.where[found.id] = found  # type: ignore[index]
        page_tokens = self.capacity[found.decode][1]
        assert found.pages == -(-sum(sizes) // page_tokens)
        assert found.first_token_s >= found.start_s

    @rule(
        prompt=st.integers(1, 500),
        answer=st.integers(0, 200),
        first=st.booleans(),
        local=st.booleans(),
        avoid=st.frozensets(st.sampled_from(["p0", "p1", "d0", "d1"])),
    )
    def ask(self, prompt: int, answer: int, first: bool, local: bool, avoid: frozenset[str]) -> None:
        self.next += 1
        request = ask(self.next, prompt=prompt, answer=answer, local=local and first, avoid=avoid)
        found = self.admission.handle_request(self.now, request, first=first)
        if isinstance(found, Admitted):
            if not first:
                for other in self.order:
                    self.passed[other] = self.passed.get(other, 0) + 1
                    assert self.passed[other] <= self.admission.config.overtakes
            self.let_in(found, (prompt, answer))
        elif isinstance(found, Queued):
            self.waiting[self.next] = (prompt, answer)
            self.order.insert(0 if first else len(self.order), self.next)
            assert len(self.waiting) <= 4
        else:
            assert isinstance(found, Refused)
            assert (found.retry_after_s is None) == (found.reason is Reason.TOO_LARGE)

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def poll(self) -> None:
        while (found := self.admission.poll(self.now)) is not None:
            self.took(found)
        timeout = self.admission.poll_timeout()
        assert (timeout is None) == (not self.waiting)
        assert timeout is None or timeout > self.now

    @precondition(lambda self: self.running)
    @rule(data=st.data(), prompt=st.none() | st.integers(1, 700))
    def prefilled(self, data: st.DataObject, prompt: int | None) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        self.now += 0.1
        assert self.admission.handle_prefilled(self.now, id, prompt_tokens=prompt)
        if prompt is not None:
            self.running[id][0] = prompt

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def moved(self, data: st.DataObject) -> None:
        assert self.admission.handle_moved(data.draw(st.sampled_from(sorted(self.running))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def first_token(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        assert self.admission.handle_first_token(self.now, id)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.integers(0, 900))
    def grows(self, data: st.DataObject, tokens: int) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        short = self.admission.handle_answer(id, tokens)
        assert short >= 0
        if tokens > self.running[id][1]:
            # It may have been given a few tokens more than that.
            self.running[id][1] = self.admission._held[id].answer_tokens
            assert 0 <= self.running[id][1] - tokens <= 20

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def chooses_late(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.running)))
        found = admitted(self.admission.handle_choice(self.now, id))
        assert found.prefill == self.where[id].prefill
        self.where[id] = found

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data(), how=st.sampled_from(["finished", "failed", "both"]))
    def ends(self, data: st.DataObject, how: str) -> None:
        id = data.draw(st.sampled_from(sorted([*self.running, *self.waiting])))
        if id in self.waiting:
            assert not self.admission.handle_finished(self.now, id), "it has not begun"
            assert self.admission.handle_failed(id)
            del self.waiting[id]
            self.order.remove(id)
        else:
            if how != "failed":
                assert self.admission.handle_finished(self.now, id, answer_tokens=7)
            if how == "failed":
                assert self.admission.handle_failed(id)
            del self.running[id]
        # However often, and whatever comes late.
        assert not self.admission.handle_failed(id)
        assert not self.admission.handle_finished(self.now, id)
        assert not self.admission.handle_prefilled(self.now, id, prompt_tokens=9)
        assert not self.admission.handle_moved(id)
        assert not self.admission.handle_first_token(self.now, id)
        assert self.admission.handle_answer(id, 10_000) == 0

    @rule(name=st.sampled_from(["p0", "p1", "d0", "d1"]), up=st.booleans())
    def up_or_down(self, name: str, up: bool) -> None:
        if up:
            self.admission.handle_up(name)
        else:
            hit = self.admission.handle_down(name)
            if name in self.capacity:
                assert sorted(hit) == sorted(  # type: ignore[type-var]
                    id for id, found in self.where.items() if id in self.running and found.decode == name
                )

    @rule(name=st.sampled_from(["d0", "d1"]), pages=st.integers(5, 60), page_tokens=st.sampled_from([16, 32]))
    def other_numbers(self, name: str, pages: int, page_tokens: int) -> None:
        self.admission.handle_capacity(name, pages=pages, page_tokens=page_tokens)
        self.capacity[name][:2] = [pages, page_tokens]

    @invariant()
    def never_more_than_there_is_and_nothing_is_lost(self) -> None:
        stats = self.admission.stats()
        assert stats.queued == len(self.waiting)
        for one in stats.decode:
            pages, page_tokens, slots = self.capacity[one.name]
            there = [id for id in self.running if self.where[id].decode == one.name]
            assert one.slots_held == len(there) <= max(1, int(slots * 0.8))
            assert 0 <= one.pages_reserved <= pages
            owed = sum(-(-sum(self.running[id]) // page_tokens) for id in there)
            assert one.pages_reserved + one.pages_short == owed, "reserved or owed, to the page"
            if one.pages_short:
                assert one.pages_reserved == pages, "nothing is free while somebody is owed"
            assert one.bytes_in_flight >= 0
            if not there:
                assert (one.bytes_in_flight, one.pages_reserved, one.slots_held) == (0, 0, 0)
        for one in stats.prefill:
            there = [id for id in self.running if self.where[id].prefill == one.name]
            assert one.tokens_in_flight >= 0
            assert one.requests <= len(there)
            if not there:
                assert (one.tokens_in_flight, one.bytes_in_flight, one.requests) == (0, 0, 0)
        if not self.running:
            assert not self.admission._decodes.local_tokens.any()

    def teardown(self) -> None:
        # Whoever waits gets in, or hears that it has waited too long, once there is room for all.
        for name in ("p0", "p1", "d0", "d1"):
            self.admission.handle_up(name)
        for name in self.capacity:
            self.admission.handle_capacity(name, pages=1000, slots=100)
        for id in list(self.running):
            assert self.admission.handle_failed(id)
        self.running.clear()
        while self.waiting:
            self.took(self.admission.poll(self.now))
            for id in list(self.running):
                assert self.admission.handle_failed(id)
            self.running.clear()
        for id in [*self.running, *self.waiting]:
            assert self.admission.handle_failed(id)
        stats = self.admission.stats()
        assert stats.queued == 0
        for one in (*stats.decode, *stats.prefill):
            assert (one.pages_reserved, one.pages_short, one.slots_held, one.bytes_in_flight) == (0, 0, 0, 0)
            assert (one.requests, one.tokens_in_flight) == (0, 0)
        # And everybody gets in again.
        admitted(self.admission.handle_request(self.now, ask("last", prompt=10, answer=10)))


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
