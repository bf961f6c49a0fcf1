"""One of the two processes of `kvxfer soak`: hands small rooms over, and says what it holds."""

from __future__ import annotations

import collections
import gc
import os
import select
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvxfer as kx
from kvxfer.cli._worker import Link, run

# Small enough for a million: what is soaked is the book-keeping, not the memory bus.
_LAYOUT = kx.PageLayout(layers=2, kv_heads=1, head_dim=16, page_tokens=16, dtype="float16")
# Rooms under way at a time.
_WINDOW = 64
_ROOM_S = 120.0
_QUIET_S = 10.0
_REPORTS = 100
_ODD = 0x9E3779B97F4A7C15
# What an agent may hold of something: these must not grow with the number of rooms.
_TABLES = (
    "inbound",
    "outbound",
    "granted_pages",
    "quarantined_pages",
    "peers",
    "tombstones",
    "deliveries",
    "queue_depth",
    "connections",
    "timers",
    "unacknowledged",
    "known_rooms",
    "queued_events",
    "driver_entries",
)
# Of these, what has to be gone before a look is fair.
_TRANSIENT = ("inbound", "outbound", "granted_pages", "deliveries", "queue_depth", "unacknowledged")


class _Side:
    """One agent, and the rooms that it has under way."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.pushes = config["side"] == "prefill"
        self.seed: int = config["seed"]
        self.every: int = config["cancel_every"]
        self.pool = kx.alloc(_LAYOUT, kx.Shard(), pages=_WINDOW, fabric=config["fabric"])
        # One word of each page is enough to tell whether a room's bytes are its own.
        self.words = self.pool.k(0).reshape(_WINDOW, -1).view(np.uint64)[:, 0]
        self.agent = kx.Agent(
            config["side"],
            _LAYOUT,
            kx.Shard(),
            memory=self.pool,
            role=config["side"],
            fabric=config["fabric"],
            secret=config["secret"],
        )
        self.source = ""
        self.free = [np.array([page], np.int32) for page in range(_WINDOW)]
        # By room: its number, its page, and whether its terminal event has come.
        self.live: dict[int, tuple[int, Any, bool]] = {}
        self.next = 0
        self.late: collections.deque[int] = collections.deque()
        self.ready = select.poll()
        self.ready.register(self.agent.fileno(), select.POLLIN)
        self.succeeded = self.failed = self.wrong = 0

    def _begin(self) -> None:
        number, pages = self.next, self.free.pop()
        self.next += 1
        room = (self.seed + number * _ODD) % 2**63
        self.live[room] = (number, pages, False)
        if self.pushes:
            self.words[pages[0]] = number + 1
            self.agent.push(room, pages, tokens=16)
        else:
            self.words[pages[0]] = 0
            self.agent.expect(room, pages, tokens=16, source=self.source)
        if self.every and number % self.every == 0:
            # In turn: each side, at once or when the room may be anywhere between its begin and its end.
            kind = number // self.every % 4
            if kind % 2 == self.pushes:
                if kind < 2:
                    self.agent.cancel(room)
                else:
                    self.late.append(room)

    def _end(self, event: kx.Event) -> None:
        number, pages, ended = self.live[event.room]
        if event.state != "Released":
            if ended:
                raise kx.InternalError(f"room {event.room} has ended twice")
            if event.state == "Success":
                self.succeeded += 1
                if not self.pushes and self.words[pages[0]] != number + 1:
                    self.wrong += 1
            elif isinstance(event.error, kx.Cancelled):
                self.failed += 1
            else:
                raise event.error or kx.InternalError(f"room {event.room} ended as {event.state}")
        if event.released:
            del self.live[event.room]
            self.free.append(pages)
        else:
            self.live[event.room] = (number, pages, True)

    def until(self, total: int, link: Link) -> None:
        """Hands over rooms until there were so many, and all of them are over."""
        agent = self.agent
        step = max(1, total // _REPORTS)
        reported = self.next
        while self.next < total or self.live:
            while self.next < total and self.free:
                self._begin()
            while self.late:
                room = self.late.popleft()
                if room in self.live:
                    agent.cancel(room)
            if not self.ready.poll(_ROOM_S * 1000):
                raise kx.WaitTimeout(
                    f"nothing happened for {_ROOM_S:.0f} s with {len(self.live)} rooms under way"
                )
            for event in agent.poll():
                self._end(event)
            if self.next - reported >= step:
                reported = self.next
                link.send("progress", text=str(reported))

    def look(self) -> dict[str, Any]:
        """What this process holds, once nothing is under way on either side."""
        deadline = time.monotonic() + _QUIET_S
        # What waits to be acknowledged goes with the next heartbeat.
        while any(self.agent.stats()[name] for name in _TRANSIENT) and time.monotonic() < deadline:
            time.sleep(0.01)
        stats = self.agent.stats()
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return {
            "rss_bytes": pages * os.sysconf("SC_PAGE_SIZE"),
            # One of them is the listing's own.
            "fds": len(os.listdir("/proc/self/fd")) - 1,
            "threads": len(os.listdir("/proc/self/task")),
            "tables": {name: stats[name] for name in _TABLES},
        }


def _work(link: Link, config: dict[str, Any]) -> None:
    side = _Side(config)
    with side.agent as agent:
        link.send("listening", address=agent.address)
        side.source = link.receive()["source"]
        for total in config["totals"]:
            began = time.monotonic()
            side.until(total, link)
            seconds = time.monotonic() - began
            link.send("over", seconds=seconds)
            link.receive()
            link.send("looked", **side.look())
            link.receive()
        link.send("counted", succeeded=side.succeeded, failed=side.failed, wrong=side.wrong)
        link.receive()


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
