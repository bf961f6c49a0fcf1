"""The worker's half: the agent of one rank, its pushes and grants, and what vLLM is told of them."""

from __future__ import annotations

import logging
import os
import select
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvxfer._agent import Agent
from kvxfer._kvxfer import Event, Push
from kvxfer.errors import BadArgument, Cancelled, KvxferError, QueueFull, RoomInUse, UnknownRoom
from kvxfer.vllm.meta import Chunk, Grant, Orders
from kvxfer.vllm.settings import Settings
from kvxfer.vllm.stats import StepStats

__all__ = ["Pages", "Rank", "Results"]

_log = logging.getLogger("vllm.kvxfer")

# How long a step may wait for a preempted request's pages before it gives the request's room up.
_RETRACT_S = 30.0
# How long a full queue is waited for; the transfer thread empties thousands of orders a millisecond.
_QUEUE_S = 5.0
# A push has at most one in so many of the layers. Each push wakes the transfer thread, which on busy cores
# takes its time from the engine: a push for each layer costs much more than its few microseconds.
_TOGETHER = 8
# How often the agent's own numbers are looked at.
_LOOK_S = 1.0


class Pages(Protocol):
    """Pages that lie otherwise in the agent's memory than in the engine's."""

    def out(self, layer: int, blocks: npt.NDArray[np.int32]) -> None:
        """A layer's blocks go out: into the agent's memory with them."""

    def into(self, blocks: npt.NDArray[np.int32]) -> None:
        """Blocks have come in: into the engine's memory with them, all layers."""


@dataclass
class Results:
    """What has ended since the last step."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    # Of the failed ones those that could not even begin through a fault of who asked, and why.
    refused: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.sent or self.received or self.failed)


@dataclass
class _Out:
    room: int
    pushes: list[Push] = field(default_factory=list)
    # Nobody reads its pages any more.
    ended: bool = False
    failed: bool = False
    # vLLM keeps the pages until it is told.
    finish: bool = False
    # The request is gone, and nobody is to be told.
    dropped: bool = False


@dataclass
class _In:
    room: int
    blocks: npt.NDArray[np.int32]
    failed: bool = False


@dataclass
class _Slice:
    """What a chunk pushes of each layer."""

    request: str
    out: _Out
    pages: npt.NDArray[np.int32]
    start: int
    tokens: int
    last: bool


class Rank:
    """One rank's hand-offs. All of its methods are called by the engine's loop, and none of them waits, but
    for pages that vLLM takes away from a request in the middle of its hand-off.
    """

    def __init__(
        self,
        agent: Agent,
        settings: Settings,
        *,
        unit: int,
        block_size: int,
        layers: range,
        pages: Pages | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._agent = agent
        self._settings = settings
        self._unit = unit
        self._per_page = block_size // unit
        self._layers = layers
        self._pages = pages
        self._clock = clock
        self._out: dict[str, _Out] = {}
        self._in: dict[str, _In] = {}
        self._abandoned: dict[str, int] = {}
        self._of_room: dict[int, str] = {}
        self._slices: list[_Slice] = []
        # Layers of this step that are computed and not pushed yet, and how many are pushed.
        self._computed = range(0)
        self._pushed = 0
        self._looked_s = clock()
        self._quarantined = 0
        self._evict_key: tuple[int, int] | None = None
        self._retracting: set[int] = set()
        self._results = Results()
        self.stats = StepStats()

    @property
    def busy(self) -> int:
        """Rooms that have not ended."""
        return len(self._out) + len(self._in)

    @property
    def pushing(self) -> bool:
        """Whether this step pushes anything."""
        return bool(self._slices)

    def begin_step(self, orders: Orders) -> None:
        """Carries out a step's orders; to be called before the step computes."""
        if orders.preempted:
            self.take_back(orders.preempted)
        timeout = self._settings.timeout_s
        for opened in orders.opens:
            if opened.room in self._of_room:
                # Its pages are nobody's but vLLM's: there is nothing to wait for.
                self._out[opened.request] = _Out(opened.room, ended=True, failed=True)
                _log.error(
                    "kvxfer: request %s cannot be handed off: room %d is handed off to this very server",
                    opened.request,
                    opened.room,
                )
                continue
            self._out[opened.request] = _Out(opened.room)
            self._of_room[opened.room] = opened.request
            try:
                self._agent.open(opened.room, timeout=timeout, bootstrap_timeout=timeout)
            except KvxferError as error:
                # The push says it again, and fails the request.
                _log.debug("kvxfer: room %d cannot be opened: %s", opened.room, error)
        for grant in orders.grants:
            self._grant(grant)
        for room in orders.given_up:
            out = self._out.get(self._of_room.get(room, ""))
            if out is not None and out.room == room and not out.ended:
                self._give_up(out)
        for request in orders.cancels:
            self._cancel(request)
        for request in orders.finished:
            self._finish(request)
        self._computed, self._pushed = range(0), 0
        self._slices = [item for item in map(self._slice, orders.chunks) if item is not None]

    def save_layer(self, layer: int) -> None:
        """A layer of this step's tokens is computed. Layers go out while the engine computes the next ones:
        at first alone, so that the link has work at once, then several together, and the last ones alone
        again, since nothing is computed while those move.
        """
        if self._computed and layer == self._computed.stop:
            self._computed = range(self._computed.start, layer + 1)
        else:
            self._push_computed()
            self._computed = range(layer, layer + 1)
        count = len(self._layers)
        together = min(-(-count // _TOGETHER), self._pushed, (count - self._pushed) // 2)
        if len(self._computed) >= together or layer == self._layers.stop - 1:
            self._push_computed()

    def end_step(self) -> Results:
        """What has ended; to be called once after the step."""
        self._push_computed()
        self._slices = []
        self._take_events()
        if (now := self._clock()) - self._looked_s >= _LOOK_S:
            self._looked_s = now
            self._look()
        results, self._results = self._results, Results()
        return results

    def _slice(self, chunk: Chunk) -> _Slice | None:
        """A chunk in the agent's units. A unit that a chunk leaves unfinished goes with the next one."""
        out = self._out.get(chunk.request)
        if out is None or out.ended or out.failed:
            return None
        first = chunk.start // self._unit
        end = -(-chunk.end // self._unit) if chunk.last else chunk.end // self._unit
        if end <= first:
            return None
        count = -(-end // self._per_page) - first // self._per_page
        pages = np.array(chunk.blocks[:count], np.int32)
        return _Slice(chunk.request, out, pages, first, end - first, chunk.last)

    def _push_computed(self) -> None:
        layers, self._computed = self._computed, range(0)
        if not layers:
            return
        self._pushed += len(layers)
        for item in self._slices:
            if item.out.ended or item.out.failed:
                continue
            if self._pages is not None:
                for layer in layers:
                    self._pages.out(layer, item.pages)
            self._push(item, layers)

    def _push(self, item: _Slice, layers: range) -> None:
        out, timeout = item.out, self._settings.timeout_s
        try:
            out.pushes.append(
                self._patient(
                    lambda: self._agent.push(
                        out.room,
                        item.pages,
                        start=item.start,
                        tokens=item.tokens,
                        layers=(layers.start, layers.stop),
                        last=item.last and layers.stop == self._layers.stop,
                        timeout=timeout,
                        bootstrap_timeout=timeout,
                    )
                )
            )
        except KvxferError as error:
            out.failed = True
            if self._agent.state(out.room) == "Failed":
                # Its event, which is on its way, says why.
                return
            _log.error("kvxfer: request %s cannot be handed off: %s", item.request, error)
            self._give_up(out)

    def _give_up(self, out: _Out) -> None:
        """Ends an outbound room from here. It has ended at once only if the agent never knew it."""
        try:
            self._patient(lambda: self._agent.cancel(out.room))
        except UnknownRoom:
            if not out.pushes and self._agent.state(out.room) is None:
                out.ended = True
        except KvxferError as error:
            _log.error("kvxfer: room %d cannot be cancelled: %s", out.room, error)

    def _grant(self, grant: Grant) -> None:
        timeout = self._settings.timeout_s
        if grant.start == grant.end:
            # Nobody waits for it here; prefill is to know.
            self._abandoned[grant.request] = grant.room
        first, end = grant.start // self._unit, -(-grant.end // self._unit)
        if grant.start == grant.end:
            first = end
        blocks = np.array(grant.blocks, np.int32)
        if (other := self._of_room.get(grant.room)) is not None and other != grant.request:
            self._refuse_grant(grant, f"room {grant.room} is handed off by this very server", refused=True)
            return
        try:
            self._patient(
                lambda: self._agent.expect(
                    grant.room,
                    blocks,
                    start=first,
                    tokens=end - first,
                    source=grant.source,
                    timeout=timeout,
                    bootstrap_timeout=timeout,
                    verify=self._settings.verify,
                )
            )
        except (BadArgument, RoomInUse) as error:
            self._refuse_grant(grant, str(error), refused=True)
            return
        except KvxferError as error:
            self._refuse_grant(grant, str(error))
            return
        if grant.start < grant.end:
            self._in[grant.request] = _In(grant.room, blocks)
            self._of_room[grant.room] = grant.request

    def _refuse_grant(self, grant: Grant, why: str, *, refused: bool = False) -> None:
        """A load that could not even begin; its pages were granted to nobody. One that is refused is wrong in
        itself, so that the request is to fail whatever the policy.
        """
        if self._abandoned.pop(grant.request, None) is not None:
            return
        _log.error("kvxfer: request %s cannot be had from %s: %s", grant.request, grant.source, why)
        if refused:
            self._results.refused[grant.request] = why
        self.stats.failed_in += 1
        self._results.received.add(grant.request)
        self._results.failed.add(grant.request)

    def _cancel(self, request: str) -> None:
        if (out := self._out.get(request)) is not None:
            out.dropped = True
            if not out.ended:
                self._give_up(out)
            self._settle_out(request, out)
            return
        room = self._abandoned.pop(request, None)
        if room is None and (item := self._in.get(request)) is not None:
            room = item.room
        if room is None:
            return
        try:
            self._patient(lambda: self._agent.cancel(room))
        except UnknownRoom:
            # It has ended in the meantime, and its event is on its way.
            return
        except KvxferError as error:
            _log.error("kvxfer: room %d cannot be cancelled: %s", room, error)

    def _finish(self, request: str) -> None:
        out = self._out.get(request)
        if out is None:
            self._results.sent.add(request)
            return
        out.finish = True
        self._settle_out(request, out)

    def _settle_out(self, request: str, out: _Out) -> None:
        """Reports and forgets an outbound room, once it has ended and vLLM has said that the request has."""
        if not out.ended or not (out.finish or out.dropped):
            return
        if self._out.get(request) is out:
            del self._out[request]
        if self._of_room.get(out.room) == request:
            del self._of_room[out.room]
        if out.finish:
            self._results.sent.add(request)

    def _look(self) -> None:
        """Pages that wait for silent peers: how many there are, and what the operator says of the peers."""
        pages = self._agent.stats()["quarantined_pages"]
        if pages != self._quarantined:
            if not self._quarantined:
                _log.warning(
                    "kvxfer: %d pages are in quarantine, since a peer that may still touch them does not"
                    " answer; docs/vllm.md (Quarantine) says what to do",
                    pages,
                )
            elif not pages:
                _log.info("kvxfer: no page is in quarantine any more")
            self.stats.quarantined += pages - self._quarantined
            self._quarantined = pages
        if self._settings.evict_file is not None:
            self._evict(self._settings.evict_file, pages)

    def _evict(self, path: str, pages: int) -> None:
        """Evicts the peers that the operator has written into the file, once each time it changes.

        What was written before there was a quarantine is about another one, and its peers may be well by now.
        """
        try:
            facts = os.stat(path)
            key = (facts.st_mtime_ns, facts.st_size)
            if key == self._evict_key:
                return
            if not pages:
                self._evict_key = key
                return
            with open(path, encoding="utf-8") as file:
                peers = file.read().split()
        except FileNotFoundError:
            return
        except (OSError, UnicodeDecodeError) as error:
            _log.error("kvxfer: evict_file cannot be read: %s", error)
            return
        for peer in peers:
            try:
                self._agent.evict(peer)
            except KvxferError as error:
                # The file is read again in a second; who is evicted already stays so.
                _log.warning("kvxfer: %s is not evicted yet: %s", peer, error)
                return
            _log.warning(
                "kvxfer: %s is to be evicted, as evict_file says, if it is a peer of this rank's", peer
            )
        self._evict_key = key

    def _take_events(self) -> None:
        for event in self._agent.poll():
            self._take_event(event)

    def _take_event(self, event: Event) -> None:
        if event.state == "Retracted":
            if event.push is not None:
                self._retracting.discard(event.push.id)
            return
        request = self._of_room.get(event.room)
        if request is None:
            return
        out = self._out.get(request)
        if out is not None and out.room == event.room:
            if event.state == "Failed":
                out.failed = True
                self.stats.failed_out += 1
                self._say_failed("to", request, event, quietly=out.dropped)
            elif event.state == "Success":
                self.stats.out(event)
            if event.released:
                out.ended = True
            self._settle_out(request, out)
            return
        item = self._in.get(request)
        if item is None or item.room != event.room:
            return
        if event.state == "Failed":
            item.failed = True
            self.stats.failed_in += 1
            self._say_failed("from", request, event, quietly=False)
        elif event.state == "Success":
            self.stats.into(event)
        if not event.released:
            return
        del self._in[request]
        del self._of_room[event.room]
        if item.failed:
            self._results.failed.add(request)
        elif self._pages is not None:
            self._pages.into(item.blocks)
        self._results.received.add(request)

    @staticmethod
    def _say_failed(way: str, request: str, event: Event, *, quietly: bool) -> None:
        kept = "" if event.released else "; its pages are kept until no peer can touch them"
        # Clients leave, and that is no fault of anybody's.
        level = logging.INFO if isinstance(event.error, Cancelled) and event.released else logging.WARNING
        _log.log(
            logging.DEBUG if quietly else level,
            "kvxfer: the hand-off %s the other engine failed for request %s (room %d): %s%s",
            way,
            request,
            event.room,
            event.error,
            kept,
        )

    def take_back(self, requests: Iterable[str]) -> None:
        """vLLM has taken pages away, and the coming step may write them: no peer may read them by then."""
        outs = []
        for request in requests:
            out = self._out.get(request)
            if out is None or out.ended or not out.pushes:
                continue
            outs.append(out)
            for push in out.pushes:
                self._retracting.add(push.id)
                try:
                    self._patient(lambda push=push: self._agent.retract(push))  # type: ignore[misc]
                except QueueFull:
                    # The push stands, and the step would write what a peer reads: rather no step.
                    raise
                except KvxferError as error:
                    # The room has ended.
                    self._retracting.discard(push.id)
                    _log.debug("kvxfer: room %d: a push cannot be taken back: %s", out.room, error)
        until = self._clock() + _RETRACT_S
        # By poll, since a process with many descriptors has numbers that select does not take.
        ready = select.poll()
        ready.register(self._agent.fileno(), select.POLLIN)
        while slow := [out for out in outs if self._is_read(out)]:
            left = until - self._clock()
            if left <= 0:
                for out in slow:
                    out.failed = True
                    self._give_up(out)
                _log.error(
                    "kvxfer: %d preempted requests are not handed off: the other engine still reads their"
                    " pages after %.0f s",
                    len(slow),
                    _RETRACT_S,
                )
                break
            ready.poll(min(left, 1.0) * 1e3)
            self._take_events()
        self._retracting.clear()
        for out in outs:
            out.pushes.clear()

    def _is_read(self, out: _Out) -> bool:
        """Whether a push that is being taken back may still be read, and what is read would count.

        A room that has failed delivers no answer, whatever is read from its pages now, and its pushes are
        not reported.
        """
        return not (out.ended or out.failed) and any(push.id in self._retracting for push in out.pushes)

    def _patient(self, call: Callable[[], Any]) -> Any:
        """Makes a call that only queues an order, again while the queue is full."""
        until = 0.0
        while True:
            try:
                return call()
            except QueueFull:
                now = self._clock()
                until = until or now + _QUEUE_S
                if now >= until:
                    raise
                time.sleep(0.0002)
