"""An engine: one loop of steps, a pool of KV pages, slots for answers, a thread for posting.

The same class is a prefill server, a decode server and a unified one. A step that computes a chunk of a
prompt is one event; steps that only write answers are one event together, until something changes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from kvxfer.simulate.costs import Engine
from kvxfer.simulate.events import Clock
from kvxfer.simulate.link import Nic
from kvxfer.simulate.metrics import Gaps, Gauge
from kvxfer.simulate.pool import Pool
from kvxfer.simulate.request import Request, Work

__all__ = ["Hooks", "Server"]

_IDLE, _BOUNDARY, _STEP, _RUN, _POST = range(5)


class Hooks(Protocol):
    """What a server tells the cluster."""

    def on_started(self, work: Work) -> None:
        """A prompt is begun."""

    def on_chunk(self, work: Work, tokens: int) -> None:
        """Tokens of a prompt that is to be handed off are computed."""

    def on_joined(self, request: Request) -> None:
        """It has a slot, and is answered from the next step on."""

    def on_pull(self, request: Request) -> None:
        """It has a slot and pages, and may read."""

    def on_done(self, request: Request) -> None:
        """Its last token is written."""


class Server:
    """One engine.

    Args:
        clock: virtual time.
        engine: what things take.
        name: for people.
        slots: answers that it writes at a time.
        chunk: tokens of a step, those of answers included; prompts are computed in pieces of that.
        page_tokens: tokens of a page.
        whole: reserve pages for the answer as well when a request comes; else they are taken as it grows,
            and a
            request may lose its cache to others (preemption).
        hooks: who is told.
        gaps: where times between tokens go.
        slot_gauge: slots in use.
        page_gauge: tokens in pages.
    """

    def __init__(
        self,
        clock: Clock,
        engine: Engine,
        *,
        name: str,
        slots: int,
        chunk: int,
        page_tokens: int,
        whole: bool,
        hooks: Hooks,
        gaps: Gaps,
        slot_gauge: Gauge,
        page_gauge: Gauge,
    ) -> None:
        self.clock = clock
        self.engine = engine
        self.name = name
        self.pool = Pool(engine.tokens, page_gauge)
        self.sends = Nic(engine.link_bytes_ms)
        self.receives = Nic(engine.link_bytes_ms)
        self.works: deque[Work] = deque()
        self.pulls: deque[Request] = deque()
        self.busy_ms = 0.0
        self.posting_ms = 0.0
        self.preemptions = 0
        self.up = True
        self.lives = 0  # counts crashes: what was under way before one is void
        self.slots_free = self._slots_all = slots
        self._returning = 0  # that lost their cache, have pages again, and wait for a slot
        self._computing: list[Work] = []
        self._ready: deque[Request] = deque()
        self._posts: deque[tuple[float, Callable[[Any], None], Any]] = deque()
        self._chunk = chunk
        self._page = page_tokens
        self._whole = whole
        self._hooks = hooks
        self._gaps = gaps
        self._slots = slot_gauge
        self._state = _IDLE
        self._running: dict[Request, None] = {}
        self._fresh: list[Request] = []
        self._ends: list[tuple[int, int, Request, int]] = []
        self._step = 0
        self._kv = 0
        self._token_ms = 0.0  # when the last tokens came
        self._thread_ms = 0.0  # until when the thread is busy
        self._step_ends_ms = 0.0
        self._owed_ms = 0.0  # calls that the loop has made
        # The run of steps under way.
        self._version = 0
        self._began_ms = 0.0
        self._planned = 0
        self._first_step_ms = 0.0
        self._growth_ms = 0.0
        self._grown = 0

    # What others ask of it.

    def need(self, prompt: int, answer: int) -> int:
        """Tokens of pages that a request takes when it comes."""
        tokens = prompt + answer if self._whole else prompt
        return -(-tokens // self._page) * self._page

    def compute(self, work: Work, *, first: bool = False) -> None:
        """Has a prompt computed after those that wait, or before."""
        if first:
            self.works.appendleft(work)
        else:
            self.works.append(work)
        self.poke()

    def pull(self, request: Request) -> None:
        """A request whose cache is to be read once it has a slot and pages."""
        self.pulls.append(request)
        self.poke()

    def ready(self, request: Request) -> None:
        """A request whose cache is here."""
        self._ready.append(request)
        self.poke()

    def post(self, takes_ms: float, then: Callable[[Any], None], what: Any, *, on_loop: bool) -> None:
        """Spends time on posting, on the loop between two steps or on the thread, then calls."""
        if on_loop:
            self._posts.append((takes_ms, then, what))
            self.poke()
        else:
            self._owed_ms += self.engine.call_ms
            begin = max(self.clock.now_ms, self._thread_ms)
            self._thread_ms = begin + takes_ms
            self.clock.at(self._thread_ms, then, what)

    def give_back(self, tokens: int) -> None:
        """Pages that are free again."""
        self.pool.give(self.clock.now_ms, tokens)
        self.poke()

    def give_slot(self) -> None:
        """A slot that is free again."""
        self.slots_free += 1
        self._slots.add(self.clock.now_ms, -1)

    def grant(self, request: Request, then: Callable[[Any], None]) -> None:
        """Takes pages for a request, and calls `then(request)` when it has them."""
        grows = self._state == _RUN and not self._whole
        if grows:
            self._grow(min(self._planned, int(self._steps_by_now())))
        self.pool.ask(self.clock.now_ms, request.pages, then, request)
        if grows and self.pool.free < (self._planned - self._grown) * len(self._running):
            self._cut()

    def forget(self, request: Request) -> None:
        """Gives up what a request that was to be handed off waits for here, and what it holds."""
        self.pool.forget(self.clock.now_ms, request)
        if request in self.pulls:
            self.pulls.remove(request)
        if request.holds_slot:
            request.holds_slot = False
            self.give_slot()
        if request.holds_pages:
            request.holds_pages = False
            self.give_back(request.pages)
        self.poke()

    def drop(self, request: Request) -> None:
        """Does not compute its prompt, or no further than to the end of the step."""
        for work in [*self._computing, *self.works]:
            if work.request is request:
                (self._computing if work in self._computing else self.works).remove(work)
                work.dropped = True
                if work.holds_pages:
                    self.pool.give(self.clock.now_ms, self._pages_of(work))
        self.poke()

    def crash(self) -> list[Work]:
        """Loses all that it has. The result are the prompts that it would have computed."""
        now = self.clock.now_ms
        lost = [*self._computing, *self.works]
        if self._state == _STEP:
            self.busy_ms -= self._step_ends_ms - now
        elif self._state == _RUN:
            steps = int(self._steps_by_now())
            self.busy_ms += max(0.0, now - self._began_ms)
            if steps > 1:
                told = (steps - 1) * len(self._running)
                self._gaps.add((self._length_ms(steps) - self._first_step_ms) / (steps - 1), told)
        self.up = False
        self.lives += 1
        self._version += 1
        self._state = _IDLE
        for queue in (self.works, self.pulls, self._computing, self._ready):
            queue.clear()
        for later in (self._posts, self._fresh, self._ends):
            later.clear()
        self._running.clear()
        self._kv = self._returning = self._planned = self._grown = 0
        self._owed_ms, self._thread_ms = 0.0, now
        self._slots.add(now, self.slots_free - self._slots_all)
        self.slots_free = self._slots_all
        self.pool.clear(now)
        return lost

    def repair(self) -> None:
        """It is there again, empty."""
        self.up = True

    def poke(self) -> None:
        """Something to do may have come."""
        if self._state == _IDLE:
            self._boundary()
        elif self._state == _RUN and self._wanted():
            self._cut()

    def _wanted(self) -> bool:
        if self._posts or self._computing:
            return True
        if self._ready and (self._open_slots > 0 or self._ready[0].holds_slot):
            return True
        if self.pulls and self._open_slots > 0:
            return True
        return bool(self.works) and self._fits(self.works[0])

    def _fits(self, work: Work) -> bool:
        if work.local and not work.request.holds_slot and self.slots_free < 1:
            return False
        # Answers that grow need a token each in the step itself.
        spare = 0 if self._whole else len(self._running)
        return work.holds_pages or (not self.pool.waiting and self._pages_of(work) <= self.pool.free - spare)

    def _pages_of(self, work: Work) -> int:
        return self.need(work.tokens, work.request.left if work.local else 0)

    # The loop.

    def _boundary(self) -> None:
        """Between two steps: who has a slot joins, then posting, then the next step."""
        self._state = _BOUNDARY
        self._take_ready()
        self._take_pulls()
        if self._posts:
            takes_ms, then, what = self._posts.popleft()
            self._state = _POST
            self.posting_ms += takes_ms
            self.clock.after(takes_ms, self._posted, (self.lives, then, what))
            return
        if not self._whole:
            self._make_room()
        chunks = self._compose()
        if chunks:
            self._begin_chunks(chunks)
        elif self._running:
            self._begin_run()
        else:
            self._state = _IDLE

    def _posted(self, call: tuple[int, Callable[[Any], None], Any]) -> None:
        life, then, what = call
        if life == self.lives:
            self._state = _BOUNDARY
            then(what)
            self._boundary()

    @property
    def _open_slots(self) -> int:
        """Slots for new requests: those that lost theirs come first, once they have pages."""
        return self.slots_free - self._returning

    def _take_slot(self, request: Request) -> None:
        if not request.holds_slot:
            request.holds_slot = True
            self.slots_free -= 1
            self._slots.add(self.clock.now_ms, 1)

    def _take_ready(self) -> None:
        while self._ready and (self._open_slots > 0 or self._ready[0].holds_slot):
            request = self._ready.popleft()
            self._take_slot(request)
            self._join(request)
            self._fresh.append(request)

    def _take_pulls(self) -> None:
        while self.pulls and self._open_slots > 0 and not self.pool.waiting:
            request = self.pulls[0]
            if not self.pool.take(self.clock.now_ms, request.pages):
                break
            self.pulls.popleft()
            self._take_slot(request)
            self._hooks.on_pull(request)

    def _join(self, request: Request) -> None:
        request.joined_step = self._step
        request.end_step = self._step + request.left
        heapq.heappush(self._ends, (request.end_step, request.number, request, request.life))
        self._running[request] = None
        self._kv += request.context
        if request.joined_ms < 0:
            request.joined_ms = self.clock.now_ms
        self._hooks.on_joined(request)

    def _compose(self) -> list[tuple[Work, int]]:
        """What the next step computes of prompts, within the tokens of a step."""
        budget = self._chunk - len(self._running)
        if budget <= 0 or not (self._computing or self.works):
            return []
        chunks = []
        for work in self._computing:
            size = min(budget, work.tokens - work.done)
            chunks.append((work, size))
            budget -= size
            if not budget:
                return chunks
        while self.works and budget and self._fits(self.works[0]):
            work = self.works.popleft()
            if not work.holds_pages:
                pages = self._pages_of(work)
                self.pool.take(self.clock.now_ms, pages)
                work.holds_pages = True
                if work.local:
                    work.request.pages = pages
            if work.local:
                self._returning -= work.returns
                self._take_slot(work.request)
            self._computing.append(work)
            self._hooks.on_started(work)
            size = min(budget, work.tokens - work.done)
            chunks.append((work, size))
            budget -= size
        return chunks

    def _begin_chunks(self, chunks: list[tuple[Work, int]]) -> None:
        squares = sum(float((work.done + size) ** 2 - work.done**2) for work, size in chunks)
        total = sum(size for _, size in chunks)
        takes_ms = self._owed_ms + self.engine.step_ms(len(self._running), self._kv, total, squares)
        self._owed_ms = 0.0
        self._grown = 0
        self._start_tokens(takes_ms)
        self._state = _STEP
        self.busy_ms += takes_ms
        self._step_ends_ms = self.clock.now_ms + takes_ms
        self.clock.after(takes_ms, self._chunks_done, (self.lives, chunks))

    def _chunks_done(self, step: tuple[int, list[tuple[Work, int]]]) -> None:
        life, chunks = step
        if life != self.lives:
            return
        self._state = _BOUNDARY
        self._advance(1, self.clock.now_ms)
        for work, size in chunks:
            if work.dropped:
                continue
            work.done += size
            self._hooks.on_chunk(work, size)
            if work.done == work.tokens:
                self._computing.remove(work)
                if work.local:
                    self._computed(work.request)
        self._boundary()

    def _computed(self, request: Request) -> None:
        """A prompt computed here gives its next token at once."""
        now = self.clock.now_ms
        if request.first_ms < 0:
            request.first_ms = now
        elif request.paused_ms >= 0:
            self._gaps.add(now - request.paused_ms, 1)
        request.left -= 1
        request.context += 1
        if request.left:
            self._join(request)
        else:
            self._finish(request)

    def _begin_run(self) -> None:
        count = len(self._running)
        steps = self._next_end() - self._step
        if not self._whole:
            steps = min(steps, self.pool.free // count)
        first_ms = self.engine.step_ms(count, self._kv)
        self._start_tokens(self._owed_ms + first_ms)
        self._state = _RUN
        self._first_step_ms = first_ms
        self._growth_ms = self.engine.kv_ms * count
        self._began_ms = self.clock.now_ms + self._owed_ms
        self._owed_ms = 0.0
        self._grown = 0
        self._plan(steps)

    def _plan(self, steps: int) -> None:
        self._planned = steps
        self._version += 1
        self.clock.at(self._began_ms + self._length_ms(steps), self._run_done, self._version)

    def _length_ms(self, steps: int) -> float:
        # Every step adds a token to each cache.
        return steps * self._first_step_ms + self._growth_ms * steps * (steps - 1) / 2

    def _steps_by_now(self) -> float:
        """Steps of the run since it began, the one under way as a part."""
        half = self._growth_ms / 2
        elapsed = max(0.0, self.clock.now_ms - self._began_ms)
        b = self._first_step_ms - half
        # The other root of the same square, which is exact where the growth is next to nothing.
        return 2 * elapsed / (b + math.sqrt(b * b + 4 * half * elapsed))

    def _cut(self) -> None:
        """Ends a run of steps with the step under way."""
        steps = max(1, math.ceil(self._steps_by_now() - 1e-9))
        if steps < self._planned:
            self._plan(steps)

    def _grow(self, steps: int) -> None:
        """Takes the pages of the first so many steps of a run, if they are not taken yet."""
        tokens = (steps - self._grown) * len(self._running)
        self._grown = steps
        self.pool.used += tokens
        self.pool.gauge.add(self.clock.now_ms, tokens)

    def _run_done(self, version: int) -> None:
        if version != self._version:
            return
        self._state = _BOUNDARY
        steps = self._planned
        length = self._length_ms(steps)
        self.busy_ms += length
        count = len(self._running)
        if steps > 1:
            self._gaps.add((length - self._first_step_ms) / (steps - 1), (steps - 1) * count)
        self._advance(steps, self.clock.now_ms)
        self._boundary()

    def _start_tokens(self, first_step_ms: float) -> None:
        """A step begins: who joined gets a first token at its end, the others one after a gap."""
        at = self.clock.now_ms + first_step_ms
        for request in self._fresh:
            request.first_ms = at
        old = len(self._running) - len(self._fresh)
        self._fresh.clear()
        if old:
            self._gaps.add(at - self._token_ms, old)

    def _advance(self, steps: int, now: float) -> None:
        """So many steps are over."""
        count = len(self._running)
        self._token_ms = now
        if not count:
            return
        self._step += steps
        self._kv += steps * count
        if not self._whole:
            self._grow(steps)
        while self._ends and self._ends[0][0] <= self._step:
            _, _, request, life = heapq.heappop(self._ends)
            if life == request.life:
                del self._running[request]
                self._kv -= request.context + self._step - request.joined_step
                self._finish(request)

    def _next_end(self) -> int:
        while self._ends[0][3] != self._ends[0][2].life:
            heapq.heappop(self._ends)
        return self._ends[0][0]

    def _held(self, request: Request) -> int:
        grown = self._step - request.joined_step if request in self._running else 0
        return request.pages + (0 if self._whole else grown)

    def _finish(self, request: Request) -> None:
        now = self.clock.now_ms
        request.last_ms = now
        held = request.pages
        if not self._whole and request.end_step:
            held += request.end_step - request.joined_step
        request.left = 0
        request.holds_slot = False
        self.give_slot()
        self.pool.give(now, held)
        self._hooks.on_done(request)

    def _make_room(self) -> None:
        """Takes the cache of the last who came, until each of the others has room for a token."""
        while self._running and self.pool.free < len(self._running):
            request = next(reversed(self._running))
            grown = self._step - request.joined_step
            held = self._held(request)
            del self._running[request]
            if request in self._fresh:
                self._fresh.remove(request)
            self._kv -= request.context + grown
            request.context += grown
            request.left -= grown
            request.life += 1
            request.end_step = 0
            request.holds_slot = False
            request.paused_ms = self._token_ms
            self.preemptions += 1
            self.give_slot()
            work = Work(request, request.context, local=True, returns=True)
            self.works.appendleft(work)
            request.pages = self._pages_of(work)
            # It comes before those that only want to start, or it might wait for ever.
            self.pool.ask_first(self.clock.now_ms, request.pages, self._room_again, work)
            self.pool.give(self.clock.now_ms, held)

    def _room_again(self, work: Work) -> None:
        work.holds_pages = True
        self._returning += 1
        self.poke()
