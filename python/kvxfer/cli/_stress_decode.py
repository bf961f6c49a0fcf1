"""The decode rank of `kvxfer stress`: grants pages, and looks at every byte of them ever after."""

from __future__ import annotations

import collections
import select
import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

import kvxfer as kx
from kvxfer.cli._stress_cancel import Canceller
from kvxfer.cli._stress_plan import LAYOUT, Plan, Room, make_plan
from kvxfer.cli._stress_prefill import settled
from kvxfer.cli._stress_words import Found, Ids, Memory, Words
from kvxfer.cli._worker import Link, run

_TICK_S = 0.001
# Longer than a run may stand still: a room ends because of what happened to it, not because of its age.
_ROOM_S = 120.0
# One released page of so many is granted again at once; the others are held back and watched.
_HOLD = 3
# Held pages that are looked at when there is nothing else to do.
_LOOK = 8
# Rooms that start between two looks at the events: pages that were released meanwhile wait to be filled.
_START = 2


@dataclass
class _Live:
    """A room with granted pages."""

    room: Room
    pages: Ids
    filling: Words
    event: kx.Event | None = None


class _Decode:
    def __init__(self, link: Link, config: dict[str, Any], plan: Plan) -> None:
        self.link, self.config, self.plan = link, config, plan
        self.found = Found()
        pool = kx.alloc(
            LAYOUT,
            kx.Shard(),
            pages=plan.decode_pages,
            fabric=config["fabric"],
            ucx_tls=config["ucx_tls"],
        )
        self.memory = Memory(pool, self.found)
        self.granted_pages = len(self.memory.free)
        self.agent = kx.Agent(
            "decode",
            LAYOUT,
            kx.Shard(),
            memory=pool,
            role="decode",
            fabric=config["fabric"],
            ucx_tls=config["ucx_tls"],
            secret=config["secret"],
            _flaw=config["flaw"],
        )
        self.cancels = Canceller(self.agent, "decode", self._is_in_flight)
        self.live: dict[int, _Live] = {}
        # Released pages, oldest first, until they are granted again.
        self.held: collections.deque[int] = collections.deque()
        # Released rooms, what their pages held then, and when that was.
        self.unchecked: collections.deque[tuple[_Live, list[Words], int]] = collections.deque()
        self.started = 0
        self.kills = 0
        self.double_ends = 0
        self.stopped = False
        link.send("ready")
        self.sources: dict[str, str] = link.receive()["sources"]

    def _is_in_flight(self, room: Room) -> bool:
        # Of what a source writes by itself the agent hears only when it is done, but the memory can be seen.
        one = self.live.get(room.index)
        return one is not None and self.memory.has_begun(one.pages, one.filling)

    def work(self) -> None:
        """Until every room has ended and been released, or the command says that nothing moves any more."""
        while not self.stopped:
            if self.link.waiting():
                message = self.link.receive()
                self.kills = message.get("kills", self.kills)
                self.stopped = "stop" in message
            events = self.agent.poll()
            # What failed first: something may still be on its way to it.
            for event in sorted(events, key=lambda event: event.state == "Success"):
                self._happened(event)
            if events:
                continue
            if self._check_one() or self._start():
                continue
            if self.started == len(self.plan.rooms) and not self.live:
                return
            self._look()
            select.select([self.agent], [], [], _TICK_S)

    def _limit(self) -> int:
        """Rooms that may have started: a kill that is due comes before the run goes on for long."""
        kills, rooms = self.plan.kills[self.kills :], len(self.plan.rooms)
        if not kills:
            return rooms
        # The others are for the victim to have in flight.
        concurrent: int = self.config["plan"]["concurrent"]
        return min(kills[0].after + concurrent, (kills[0].after + rooms) // 2)

    def _start(self) -> bool:
        """Starts rooms for which there is room, and whether there was any."""
        batch: list[_Live] = []
        while (
            self.started < self._limit()
            and len(self.live) < self.config["plan"]["concurrent"]
            and len(batch) < _START
        ):
            room = self.plan.rooms[self.started]
            pages = self._take(room.pages)
            if pages is None:
                break
            one = _Live(room, pages, self.memory.filling[pages])
            self.live[room.index] = one
            batch.append(one)
            self.started += 1
        if not batch:
            return False
        self._tell(one.room for one in batch if one.room.pushed_first)
        for one in batch:
            self._expect(one)
        self._tell(one.room for one in batch if not one.room.pushed_first)
        return True

    def _tell(self, rooms: Any) -> None:
        indices = [room.index for room in rooms]
        if indices:
            self.link.send("started", rooms=indices)

    def _expect(self, one: _Live) -> None:
        room = one.room
        while True:
            try:
                self.agent.expect(
                    room.room,
                    one.pages,
                    tokens=room.tokens,
                    source=self.sources[room.engine],
                    timeout=_ROOM_S,
                    bootstrap_timeout=_ROOM_S,
                )
            except kx.QueueFull:
                time.sleep(_TICK_S)
                continue
            break
        self.cancels.add(room)

    def _take(self, count: int) -> Ids | None:
        """Pages for a room: what was released last, and scanned once more."""
        while len(self.memory.free) < count:
            if not self.held:
                return None
            page = np.array([self.held.popleft()])
            self.memory.scan(page, "held back")
            self.memory.put(page)
        pages = self.memory.take(count)
        if pages is not None:
            self.memory.scan(pages, "about to be granted again")
        return pages

    def _look(self) -> None:
        pages = np.array([self.held[i] for i in range(min(_LOOK, len(self.held)))], dtype=np.int64)
        self.memory.scan(pages, "held back")
        self.held.rotate(-len(pages))

    def _happened(self, event: kx.Event) -> None:
        """Deals with an event.

        Of a released room's pages a copy is taken, to be looked at later: they are filled anew at once.
        """
        index = self.config["by_number"].get(event.room)
        one = self.live.get(index)
        terminal = event.state in ("Success", "Failed")
        if one is None or (terminal and one.event is not None):
            self.double_ends += 1
            self.found.tell(f"decode: {event} after its end")
            return
        if terminal:
            one.event = event
            self.cancels.forget(one.room)
        if event.released:
            del self.live[index]
            got = self.memory.read(one.pages)
            self.memory.refill(one.pages)
            self.unchecked.append((one, got, event.stats.at_us))
            place = np.arange(len(one.pages)) % _HOLD
            self.held.extend(int(page) for page in one.pages[place != 0])
            self.memory.put(one.pages[place == 0])

    def _check_one(self) -> bool:
        """Looks at what a room's pages held at its release; whether there was one."""
        if not self.unchecked:
            return False
        one, got, released_us = self.unchecked.popleft()
        event = one.event
        assert event is not None
        cut_off: dict[str, bool] = {}
        if event.state == "Success":
            self.memory.check_success(one.room, got, one.filling)
        else:
            copied = self.config["fabric"] == "shm"
            cut_off = self.memory.check_failure(one.room, got, one.filling, copied=copied)
        ordered_s = self.cancels.when(one.room)
        failed_us = event.stats.at_us
        since_us = failed_us if ordered_s is None else min(failed_us, ordered_s * 1e6)
        ended = {
            "index": one.room.index,
            "state": event.state,
            "error": type(event.error).__name__ if event.error is not None else None,
            "text": str(event.error) if event.error is not None else None,
            "cut_off": cut_off,
            "bytes": event.stats.bytes,
            "failed_us": failed_us,
            "drain_ms": max(0.0, released_us - since_us) / 1e3,
        }
        self.link.send("ended", rooms=[ended])
        return True

    def report(self) -> dict[str, Any]:
        """After the last drain: every free page once more, and what is left."""
        self.cancels.stop()
        rooms = len(self.plan.rooms)
        unended = len(self.live) + rooms - self.started
        gauges = settled(self.agent)
        unreleased = self.agent.close()
        free = [*self.memory.free, *self.held]
        self.memory.scan(np.array(sorted(set(free)), dtype=np.int64), "after every drain")
        self.memory.scan_canaries()
        return {
            **self.found.as_dict(),
            "unended": unended,
            "leaked_pages": self.granted_pages - len(set(free)),
            "gauges": gauges,
            "unreleased": sum(len(pages) for room in unreleased for pages in room.pages),
            "double_ends": self.double_ends,
            "cancels": self.cancels.orders,
            "pages": self.granted_pages,
        }


def _work(link: Link, config: dict[str, Any]) -> None:
    sys.setswitchinterval(0.0005)
    plan = make_plan(**config["plan"])
    config["by_number"] = {room.room: room.index for room in plan.rooms}
    decode = _Decode(link, config, plan)
    decode.work()
    link.send("drained")
    # The sources close first, so that whatever they still do is seen.
    while "report" not in link.receive():
        pass
    link.send("report", **decode.report())
    link.receive()


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
