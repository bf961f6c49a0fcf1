"""`Admission`: who may start now, and where."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import replace

import numpy as np

from kvxfer.admission._books import Decodes, Held, Links, Prefills
from kvxfer.admission._choices import ALIKE, Choices
from kvxfer.admission._estimates import Mean
from kvxfer.admission._types import (
    Admitted,
    Config,
    Decision,
    Decode,
    Expired,
    Prefill,
    Queued,
    Reason,
    Refused,
    Request,
    Stats,
)
from kvxfer.errors import BadArgument

__all__ = ["Admission"]

# Before so many requests have ended, estimates of waiting times refuse nobody.
_KNOWN = 8
_DOWN_S = 5.0
# What comes back when pages, tokens or bytes do. Those who wait for a link may get in by another server's.
_ALL = frozenset(Reason)
_DECODE = frozenset({Reason.DECODE_PAGES, Reason.DECODE_SLOTS, Reason.LINK})
_PREFILL = frozenset({Reason.PREFILL})
_LINK = frozenset({Reason.LINK})


class _Waiting:
    __slots__ = ("overtaken", "reason", "request", "since_s")

    def __init__(self, request: Request, reason: Reason, since_s: float) -> None:
        self.request = request
        self.reason = reason
        self.since_s = since_s
        self.overtaken = 0


class Admission:
    """Admits requests to prefill and decode servers. No clock, thread or I/O: `now_s` is an argument, in
    seconds on any clock that does not go back.

    A request is admitted when a decode server has the pages for its prompt *and* its expected answer, and a
    slot, and when the links to it and the prefill server are not too busy. All of that is reserved before
    prefill starts, and given back once, whichever of `handle_finished` and `handle_failed` comes first and
    however often. Who does not get in waits in a bounded queue (first come, first served, but for a few
    smaller ones), or is refused with the time after which trying again plausibly helps.

    >>> admission = Admission(Config(queue_requests=0))
    >>> admission.add_prefill(Prefill("p"))
    >>> admission.add_decode(Decode("d", pages=100, page_tokens=16, slots=10))
    >>> one = admission.handle_request(0.0, Request("one", prompt_tokens=1000, answer_tokens=200))
    >>> one.prefill, one.decode, one.pages
    ('p', 'd', 75)
    >>> two = admission.handle_request(0.0, Request("two", prompt_tokens=1000, answer_tokens=200))
    >>> two.reason
    <Reason.DECODE_PAGES: 'decode_pages'>
    >>> admission.handle_finished(1.0, "one", answer_tokens=190), admission.handle_finished(1.0, "one")
    (True, False)
    >>> admission.handle_request(1.0, Request("two", prompt_tokens=1000, answer_tokens=200)).decode
    'd'

    After each call that gives something back, and when `poll_timeout` says so, call `poll` until it answers
    None: it admits those that waited.
    """

    def __init__(self, config: Config | None = None) -> None:
        self.config = config or Config()
        self._links = Links()
        self._prefills = Prefills(self._links)
        self._decodes = Decodes(self._links, self.config.slots_share, self.config.growth_share)
        self._names: dict[str, tuple[str, int]] = {}
        self._held: dict[Hashable, Held] = {}
        self._queue: OrderedDict[Hashable, _Waiting] = OrderedDict()
        self._queued_tokens = 0
        # What those lacked who were looked at in vain: until some of it is given back, nobody need look.
        self._lacking: set[Reason] = set()
        self._hold = Mean(0.0)
        self._token_s = Mean(self.config.time_per_token_ms / 1e3)
        self._choices = Choices(
            self.config, self._links, self._prefills, self._decodes, self._names, self._token_s
        )
        self._admitted = 0
        self._recomputed = 0
        self._expired = 0
        self._refused: Counter[str] = Counter()

    # Servers.

    def add_prefill(self, server: Prefill) -> None:
        """A prefill server, which is up."""
        self._name(server.name)
        self._names[server.name] = ("prefill", self._prefills.add(server))
        self._given_back()

    def add_decode(self, server: Decode) -> None:
        """A decode server, which is up."""
        self._name(server.name)
        self._names[server.name] = ("decode", self._decodes.add(server))
        self._given_back()

    def _name(self, name: str) -> None:
        if name in self._names:
            raise BadArgument(f"there is a {self._names[name][0]} server {name} already: names are unique")

    def _server(self, name: str) -> tuple[str, int]:
        found = self._names.get(name)
        if found is None:
            raise BadArgument(
                f"there is no server {name}; there are {', '.join(sorted(self._names)) or 'none'}"
            )
        return found

    def handle_up(self, name: str) -> None:
        """The server takes requests again."""
        self._set_up(name, True)

    def handle_down(self, name: str) -> list[Hashable]:
        """The server takes no more requests. The answer is who is there: what they hold stays reserved until
        the caller says that they failed.
        """
        role, index = self._set_up(name, False)
        if role == "prefill":
            return [one.id for one in self._held.values() if one.prefill == index and one.prefill_tokens]
        return [one.id for one in self._held.values() if one.decode == index]

    def _set_up(self, name: str, up: bool) -> tuple[str, int]:
        role, index = self._server(name)
        if role == "prefill":
            self._prefills.up[index] = up
        else:
            self._decodes.set_up(index, up)
        self._given_back()
        return role, index

    def handle_capacity(
        self, name: str, *, pages: int | None = None, page_tokens: int | None = None, slots: int | None = None
    ) -> None:
        """The decode server turns out to have other numbers than it was added with (None: as before). What is
        reserved is counted anew; where it is more than there is, the newest are owed the rest.
        """
        role, d = self._server(name)
        if role != "decode":
            raise BadArgument(f"{name} is a prefill server; pages and slots are those of decode servers")
        books = self._decodes
        before = books.specs[d]
        spec = replace(
            before,
            pages=before.pages if pages is None else pages,
            page_tokens=page_tokens or before.page_tokens,
            slots=slots or before.slots,
        )
        if spec == before:
            return
        there = [one for one in self._held.values() if one.decode == d and one.slot]
        books.debts[d].clear()
        books.reserved[d] = 0
        books.set_capacity(d, spec)
        books.set_up(d, bool(books.up[d]))
        for one in there:
            one.pages = one.short = 0
            books.grow(one, books.pages_at(d, one.prompt_tokens + one.answer_tokens))
        self._given_back()

    @property
    def most_tokens(self) -> int | None:
        """Tokens of prompt and answer for which the largest decode server has pages.

        None: as far as is known, nothing limits them.
        """
        rooms = [
            None if spec.pages is None else spec.pages * spec.page_tokens for spec in self._decodes.specs
        ]
        known = [room for room in rooms if room is not None]
        return max(known) if known and len(known) == len(rooms) else None

    # Requests.

    def handle_request(self, now_s: float, request: Request, *, first: bool = False) -> Decision:
        """A request wants in; `first` puts it before all that wait (a second try of one that was in)."""
        if request.id in self._held or request.id in self._queue:
            raise BadArgument(f"request {request.id} is in already: ids are unique")
        if (too_large := self._too_large(request)) is not None:
            return self._refuse(request, too_large, None)
        if first or self._may_pass():
            found = self._place(now_s, request, 0.0)
            if isinstance(found, Admitted):
                if not first:
                    for one in self._queue.values():
                        one.overtaken += 1
                return found
            reason = found
        else:
            reason = next(iter(self._queue.values())).reason
        ahead = 0 if first else len(self._queue)
        wait_s = self._wait_s(request, reason, ahead, 0 if first else self._queued_tokens)
        if reason in (Reason.NO_DECODE, Reason.NO_PREFILL):
            return self._refuse(request, reason, _DOWN_S)
        hopeless = self._hold.count >= _KNOWN and wait_s > self.config.queue_wait_s
        if len(self._queue) >= self.config.queue_requests or hopeless:
            return self._refuse(request, reason, max(1.0, wait_s))
        self._queue[request.id] = _Waiting(request, reason, now_s)
        if first:
            self._queue.move_to_end(request.id, last=False)
        self._queued_tokens += request.prompt_tokens
        return Queued(request.id, reason, ahead, now_s + wait_s)

    def poll(self, now_s: float) -> Admitted | Expired | None:
        """One that waited and gets in now, or has waited too long; None: nothing more to say at present."""
        if not self._queue:
            return None
        expired = self._expire(now_s)
        if expired is not None or self._lacking:
            return expired
        passed: list[_Waiting] = []
        lacking: set[Reason] = set()
        for one in self._queue.values():
            found = self._place(now_s, one.request, now_s - one.since_s)
            if isinstance(found, Admitted):
                for other in passed:
                    other.overtaken += 1
                self._leave_queue(one.request.id)
                return found
            one.reason = found
            lacking.add(found)
            passed.append(one)
            # A smaller one fits where pages are short. Of all else it would only take out of turn.
            if found is not Reason.DECODE_PAGES or one.overtaken >= self.config.overtakes:
                break
            if len(passed) > self.config.look_ahead:
                break
        self._lacking = lacking
        return None

    def _given_back(self, what: frozenset[Reason] = _ALL) -> None:
        """Something is there again of which somebody may have lacked: the queue is to be looked at."""
        if self._lacking & what:
            self._lacking.clear()

    def poll_timeout(self) -> float | None:
        """When `poll` has something to say even if nothing happens until then; None: it has not."""
        if not self._queue:
            return None
        return min(self._oldest_s()) + self.config.queue_wait_s

    def _oldest_s(self) -> list[float]:
        # Ones that were put first came later than those behind them: the oldest is the first, or the first
        # that did come in turn.
        found: list[float] = []
        for one in self._queue.values():
            if found and one.since_s >= found[-1]:
                break
            found.append(one.since_s)
        return found

    def _expire(self, now_s: float) -> Expired | None:
        oldest = min(self._oldest_s())
        if now_s - oldest < self.config.queue_wait_s:
            return None
        one = next(each for each in self._queue.values() if each.since_s == oldest)
        self._leave_queue(one.request.id)
        self._expired += 1
        self._given_back()
        wait_s = self._wait_s(one.request, one.reason, len(self._queue), self._queued_tokens)
        return Expired(one.request.id, one.reason, max(1.0, wait_s))

    def _leave_queue(self, id: Hashable) -> bool:
        one = self._queue.pop(id, None)
        if one is None:
            return False
        self._queued_tokens -= one.request.prompt_tokens
        return True

    def handle_prefilled(self, now_s: float, id: Hashable, *, prompt_tokens: int | None = None) -> bool:
        """Prefill has computed the prompt, which was in fact so long. False: the request is not in."""
        held = self._held.get(id)
        if held is None:
            return False
        if held.prefill_tokens:
            self._prefills.measure(held, now_s)
            self._prefills.give_back(held)
            self._given_back(_PREFILL)
        if prompt_tokens is not None:
            self._resize(held, prompt_tokens, held.answer_tokens)
        return True

    def handle_moved(self, id: Hashable) -> bool:
        """The hand-off is over: its bytes are off the links."""
        held = self._held.get(id)
        if held is None:
            return False
        self._off_links(held)
        return True

    def handle_first_token(self, now_s: float, id: Hashable) -> bool:
        """The first token came, so prefill and the hand-off are over."""
        held = self._held.get(id)
        if held is None:
            return False
        if held.first_s is None:
            held.first_s = now_s
            if held.prefill_tokens:
                self._prefills.measure(held, now_s)
                self._prefills.give_back(held)
                self._given_back(_PREFILL)
            if held.local_tokens:
                self._decodes.end_local(held)
                self._given_back(_LINK)
            self._off_links(held)
        return True

    def handle_answer(self, id: Hashable, answer_tokens: int) -> int:
        """The answer has come to so many tokens. Where that is more than was reserved for, more is reserved;
        the result is how many pages are lacking, and while it is not 0 the server takes no new requests.
        """
        held = self._held.get(id)
        if held is None:
            return 0
        if answer_tokens > held.answer_tokens:
            d = held.decode
            spare = self._decodes.pages[d] - self._decodes.reserved[d]
            further = answer_tokens + self.config.growth_tokens
            more = self._decodes.pages_at(d, held.prompt_tokens + further) - held.pages - held.short
            self._resize(held, held.prompt_tokens, further if more <= spare else answer_tokens)
        return held.short

    def handle_choice(self, now_s: float, id: Hashable) -> Admitted | None:
        """Prefill is over and the decode server may be chosen anew (late choice): where another one is better
        by now, what was reserved moves there. The old one stays a choice, so this never fails; None: not in.
        """
        held = self._held.get(id)
        if held is None:
            return None
        if held.prefill >= 0:
            best = self._best_without(held)
            if best != held.decode:
                self._move_to(held, best)
        return self._answer(now_s, held, held.admitted_s, 0.0)

    def _best_without(self, held: Held) -> int:
        """The best decode server if this request were nowhere; where it is, if none is better."""
        books, at, nbytes, pages = self._decodes, held.decode, held.nbytes, held.pages
        tokens = held.prompt_tokens + held.answer_tokens
        cached = max(0, held.prompt_tokens - held.moved_tokens)
        request = Request(held.id, held.prompt_tokens, held.answer_tokens, cached)
        fits = self._choices.avoiding(self._choices.fits(books.need(tokens)), "decode", held.avoid)
        # It has its place there, but that is worth nothing if the server is down.
        fits[at] = bool(books.up[at]) or not fits.any()
        self._off_links(held)
        # Not by giving back: what is free would go to others.
        books.reserved[at] -= pages
        books.slots_held[at] -= 1
        cost = self._choices.decode_costs(
            request, books.need(tokens), self._choices.move_s(held.prefill, held.moved_tokens)
        )
        books.reserved[at] += pages
        books.slots_held[at] += 1
        self._on_links(held, nbytes)
        cost = np.where(fits, cost, np.inf)
        best = int(cost.argmin())
        return at if fits[at] and cost[at] <= cost[best] * (1 + ALIKE) else best

    def _move_to(self, held: Held, d: int) -> None:
        nbytes = held.nbytes
        self._off_links(held)
        self._decodes.give_back(held)
        self._decodes.take(held, d, self._decodes.pages_at(d, held.prompt_tokens + held.answer_tokens))
        self._on_links(held, nbytes)
        self._given_back()

    def handle_finished(
        self,
        now_s: float,
        id: Hashable,
        *,
        prompt_tokens: int | None = None,
        answer_tokens: int | None = None,
    ) -> bool:
        """The answer is complete, and all that the request held is given back. False: it is not in."""
        held = self._held.get(id)
        if held is not None:
            if prompt_tokens is not None:
                held.prompt_tokens = prompt_tokens
            self._hold.add(now_s - held.admitted_s)
            if held.first_s is not None and answer_tokens is not None and answer_tokens > 1:
                self._token_s.add((now_s - held.first_s) / (answer_tokens - 1))
        return self._give_back(id)

    def handle_failed(self, id: Hashable) -> bool:
        """The request failed, was cancelled or is wanted no more, in whatever state: all that it held is
        given back, or its place in the queue. False: it is not in.
        """
        if self._leave_queue(id):
            self._given_back()
            return True
        return self._give_back(id)

    def _give_back(self, id: Hashable) -> bool:
        held = self._held.pop(id, None)
        if held is None:
            return False
        if held.prefill_tokens:
            self._prefills.give_back(held)
            self._given_back(_PREFILL)
        self._off_links(held)
        self._decodes.give_back(held)
        self._given_back(_DECODE)
        return True

    # Deciding.

    def _may_pass(self) -> bool:
        if not self._queue:
            return True
        if len(self._queue) > self.config.look_ahead:
            return False
        return all(
            one.reason is Reason.DECODE_PAGES and one.overtaken < self.config.overtakes
            for one in self._queue.values()
        )

    def _too_large(self, request: Request) -> Reason | None:
        books = self._decodes
        if not self.config.enforce or not len(books.specs):
            return None
        need = books.need(request.prompt_tokens + request.answer_tokens)
        return None if bool(np.any(need <= books.pages)) else Reason.TOO_LARGE

    def _refuse(self, request: Request, reason: Reason, retry_s: float | None) -> Refused:
        self._refused[reason.value] += 1
        return Refused(request.id, reason, retry_s)

    def _place(self, now_s: float, request: Request, waited_s: float) -> Admitted | Reason:
        books = self._decodes
        if not books.up.any():
            return Reason.NO_DECODE
        need = books.need(request.prompt_tokens + request.answer_tokens)
        fits = self._choices.fits(need)
        if not fits.any():
            slots = (books.slots_held < books.slots) & books.up
            return Reason.DECODE_PAGES if slots.any() else Reason.DECODE_SLOTS
        fits = self._choices.avoiding(fits, "decode", request.avoid)
        moved = request.prompt_tokens - request.cached_tokens
        p: int | Reason = -1 if request.local else self._choices.choose_prefill(request)
        if p is Reason.PREFILL:
            return p
        if isinstance(p, Reason) or p < 0:
            move_s = np.full(len(books.specs), np.inf)
        else:
            move_s = self._choices.move_s(p, moved)
            if self.config.enforce:
                move_s[~self._choices.links_free(p, moved)] = np.inf
        if request.local:
            best_s = local_s = self._choices.local_s(moved, within_s=np.inf, at_all=True)
        elif books.any_local and self.config.recompute_s > 0:
            local_s = self._choices.local_s(moved, within_s=self.config.recompute_s, at_all=False)
            best_s = np.minimum(move_s, local_s)
        else:
            local_s = None
            best_s = move_s
        usable = fits & np.isfinite(best_s)
        if not usable.any():
            return p if isinstance(p, Reason) else Reason.LINK
        cost = np.where(usable, self._choices.decode_costs(request, need, best_s), np.inf)
        d = self._choices.least(cost)
        held = Held(request.id, request.prompt_tokens, request.answer_tokens, moved)
        held.avoid = request.avoid
        if local_s is not None and local_s[d] < move_s[d]:
            held.local_tokens = moved
            self._recomputed += not request.local
        else:
            assert not isinstance(p, Reason)
            held.prefill = p
        held.admitted_s = now_s
        answer = self._answer(now_s, held, now_s, waited_s, d)
        self._decodes.take(held, d, self._decodes.pages_at(d, request.prompt_tokens + request.answer_tokens))
        if held.prefill >= 0:
            held.prefill_tokens = request.prompt_tokens
            self._prefills.tokens[held.prefill] += request.prompt_tokens
            self._prefills.requests[held.prefill] += 1
            self._on_links(held, moved * self.config.kv_bytes_per_token)
        self._held[request.id] = held
        self._admitted += 1
        self._choices.turn = self._admitted
        return answer

    def _answer(
        self, now_s: float, held: Held, start_s: float, waited_s: float, d: int | None = None
    ) -> Admitted:
        """What is said of a request. Before it is in the books, `d` is where it will be."""
        fresh = d is not None
        at = held.decode if d is None else d
        books, links = self._decodes, self._links
        pages = books.pages_at(at, held.prompt_tokens + held.answer_tokens) if fresh else held.pages
        if held.prefill < 0:
            rate = books.local_per_s[at] or 8000.0
            prefill_s = float(held.moved_tokens / rate)
            start_s += float(books.local_tokens[at] / rate) if fresh else 0.0
            return Admitted(
                held.id, None, books.specs[at].name, pages, 0, 0.0, start_s, start_s + prefill_s, waited_s
            )
        p = held.prefill
        nbytes = held.moved_tokens * self.config.kv_bytes_per_token
        rate = float(self._prefills.per_s[p])
        if fresh:
            start_s += float(self._prefills.tokens[p]) / rate
        prefill_s = held.prompt_tokens / rate
        before = nbytes if fresh else 0
        move_s = self.config.handoff_ms / 1e3 + max(
            float((links.nbytes[link] + before) / links.per_s[link])
            for link in (self._prefills.link[p], books.link[at])
        )
        hidden = max(0.0, min(prefill_s, move_s - move_s / self.config.layers))
        first_s = max(start_s + prefill_s, now_s) + move_s - hidden
        names = self._prefills.specs[p].name, books.specs[at].name
        return Admitted(held.id, *names, pages, nbytes, move_s, start_s, first_s, waited_s)

    def _wait_s(self, request: Request, reason: Reason, ahead: int, tokens_ahead: int) -> float:
        """How long it plausibly takes until this one gets in: what is short comes back at the rate at which
        it is in use, over how long it is held (Little's law).
        """
        if reason is Reason.PREFILL:
            books = self._prefills
            per_s = float(books.per_s[books.up].sum())
            least = float((books.tokens[books.up] / books.per_s[books.up]).min(initial=np.inf))
            over = max(0.0, least - self.config.prefill_backlog_s)
            return over + (tokens_ahead + request.prompt_tokens) / per_s if per_s else _DOWN_S
        if reason is Reason.LINK:
            nbytes = (tokens_ahead + request.prompt_tokens) * self.config.kv_bytes_per_token
            return float(nbytes / self._links.per_s.sum())
        if reason in (Reason.NO_DECODE, Reason.NO_PREFILL, Reason.TOO_LARGE):
            return _DOWN_S
        if self._hold.count:
            hold_s = self._hold.value
        else:
            rate = float(self._prefills.per_s.mean()) if len(self._prefills.specs) else 8000.0
            hold_s = request.prompt_tokens / rate + request.answer_tokens * self._token_s.value
        in_use = max(1, int(self._decodes.slots_held.sum()))
        return hold_s * (ahead + 1) / in_use

    # Books.

    def _on_links(self, held: Held, nbytes: int) -> None:
        held.nbytes = nbytes
        for link in self._links_of(held):
            self._links.nbytes[link] += nbytes

    def _off_links(self, held: Held) -> None:
        if held.nbytes:
            for link in self._links_of(held):
                self._links.nbytes[link] -= held.nbytes
            held.nbytes = 0
            self._given_back(_LINK)

    def _links_of(self, held: Held) -> set[int]:
        return {int(self._prefills.link[held.prefill]), int(self._decodes.link[held.decode])}

    def _resize(self, held: Held, prompt_tokens: int, answer_tokens: int) -> None:
        held.prompt_tokens, held.answer_tokens = prompt_tokens, answer_tokens
        books = self._decodes
        more = books.pages_at(held.decode, prompt_tokens + answer_tokens) - held.pages - held.short
        if more > 0:
            books.grow(held, more)
        elif more < 0:
            books.shrink(held, -more)
            self._given_back(_DECODE)

    def stats(self) -> Stats:
        """Where everything stands."""
        return Stats(
            prefill=self._prefills.stats(),
            decode=self._decodes.stats(),
            queued=len(self._queue),
            admitted=self._admitted,
            recomputed=self._recomputed,
            refused=dict(self._refused),
            expired=self._expired,
            hold_s=self._hold.value,
            time_per_token_ms=self._token_s.value * 1e3,
            waiting=dict(Counter(one.reason.value for one in self._queue.values())),
        )
