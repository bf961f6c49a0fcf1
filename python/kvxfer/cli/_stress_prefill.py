"""A prefill rank of `kvxfer stress`: fills pages, pushes them, and gives them away again when it may."""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any

import kvxfer as kx
from kvxfer.cli._stress_cancel import Canceller
from kvxfer.cli._stress_plan import LAYOUT, SLICE_BYTES, Plan, Rank, Room, make_plan
from kvxfer.cli._stress_words import Found, Ids, Memory
from kvxfer.cli._worker import Link, run

# Rooms are pushed in volleys, as an engine's step has them, so that they overlap: when there are so many, or
# the oldest has waited for so long. Before its death a rank waits for more.
_VOLLEY, _VOLLEY_S = 24, 0.03
_LAST_VOLLEY, _LAST_VOLLEY_S = 96, 0.5
# Of which it pushes so many at least. Then it waits until so many rooms are in Transferring, or after a while
# any, and dies at the latest after so long.
_LEAST, _IN_FLIGHT, _IN_FLIGHT_S, _LATEST_S = 8, 4, 1.0, 5.0
_TICK_S = 0.001
# How long nothing may happen before the rest counts as stuck.
_STALL_S = 10.0
_GAUGES = ("inbound", "outbound", "granted_pages", "quarantined_pages", "deliveries")
_SETTLE_S = 2.0


@dataclass
class _Job:
    """A room that was pushed here."""

    room: Room
    pages: Ids
    ended: bool = False
    released: bool = False


@dataclass
class _Doom:
    """When this process dies: `delay_s` after its bytes were seen in flight, or at the latest."""

    delay_s: float
    patient_s: float
    latest_s: float
    # Whether the last volley has begun.
    ready: bool = False
    due_s: float | None = None


class _Prefill:
    def __init__(self, link: Link, config: dict[str, Any], rank: Rank, plan: Plan) -> None:
        self.link, self.config, self.rank, self.plan = link, config, rank, plan
        self.found = Found()
        pool = kx.alloc(
            LAYOUT,
            rank.shard,
            pages=plan.prefill_pages,
            fabric=config["fabric"],
            ucx_tls=config["ucx_tls"],
        )
        self.memory = Memory(pool, self.found)
        self.granted_pages = len(self.memory.free)
        link.send("ready")
        where = link.receive()
        self.agent = kx.Agent(
            rank.name,
            LAYOUT,
            rank.shard,
            memory=pool,
            listen=where["listen"],
            directory=where["directory"],
            engine=rank.engine,
            role="prefill",
            fabric=config["fabric"],
            ucx_tls=config["ucx_tls"],
            slice_bytes=SLICE_BYTES[rank.engine],
            secret=config["secret"],
            _flaw=config["flaw"],
        )
        self.cancels = Canceller(self.agent, rank.name, self._is_in_flight)
        self.orders: collections.deque[Room] = collections.deque()
        self.jobs: dict[int, _Job] = {}
        self.refused: set[int] = set()
        self.double_ends = 0
        self.doom: _Doom | None = None
        # Since when orders wait.
        self.waiting_s = 0.0
        self.finishing = False
        link.send("listening", address=self.agent.address)

    def _is_in_flight(self, room: Room) -> bool:
        return self.agent.state(room.room) == "Transferring"

    def work(self) -> None:
        """Until the command says that it is over, or it kills this process."""
        moved_s = time.monotonic()
        while True:
            busy = self._obey()
            for event in self.agent.poll():
                busy = True
                self._happened(event)
            if self._may_push():
                busy |= self._push()
            if self.doom is not None:
                self._die_in_flight(self.doom)
                busy = True
            if busy:
                moved_s = time.monotonic()
            elif self.finishing and (self._is_over() or time.monotonic() - moved_s > _STALL_S):
                return
            else:
                select.select([self.agent], [], [], _TICK_S)

    def _obey(self) -> bool:
        if not self.link.waiting():
            return False
        message = self.link.receive()
        if not self.orders:
            self.waiting_s = time.monotonic()
        self.orders += (self.plan.rooms[index] for index in message.get("push", ()))
        for index in message.get("over", ()):
            # The router knows that the room has ended; a restarted engine would wait for its grant.
            job = self.jobs.get(index)
            if job is not None and not job.ended:
                with contextlib.suppress(kx.UnknownRoom):
                    self.agent.cancel(job.room.room)
            elif job is None:
                self.orders = collections.deque(room for room in self.orders if room.index != index)
        if "doom_s" in message:
            self.waiting_s = time.monotonic()
            patient_s, latest_s = (self.waiting_s + seconds for seconds in (_IN_FLIGHT_S, _LATEST_S))
            self.doom = _Doom(message["doom_s"], patient_s, latest_s)
        self.finishing |= "finish" in message
        return True

    def _may_push(self) -> bool:
        volley, patience = (_VOLLEY, _VOLLEY_S) if self.doom is None else (_LAST_VOLLEY, _LAST_VOLLEY_S)
        return len(self.orders) >= volley or time.monotonic() - self.waiting_s > patience

    def _push(self) -> bool:
        """Fills pages for the orders that there are, then pushes them together; whether there were any."""
        batch: list[_Job] = []
        while self.orders and len(batch) < _LAST_VOLLEY:
            pages = self.memory.take(self.orders[0].pages)
            if pages is None:
                break
            room = self.orders.popleft()
            self.memory.fill(room, pages)
            batch.append(_Job(room, pages))
        for number, job in enumerate(batch):
            self._push_one(job)
            if self.doom is not None and number >= min(_LEAST, len(batch) - 1):
                self.doom.ready = True
                self._die_in_flight(self.doom)
        return bool(batch)

    def _push_one(self, job: _Job) -> None:
        room = job.room
        self.jobs[room.index] = job
        for layers in room.pushes:
            last = layers == room.pushes[-1]
            while True:
                try:
                    self.agent.push(room.room, job.pages, tokens=room.tokens, layers=layers, last=last)
                except kx.QueueFull:
                    time.sleep(_TICK_S)
                    continue
                except (kx.Cancelled, kx.PeerLost):
                    # It failed before all of it was pushed. If none was, no event comes.
                    if layers == room.pushes[0]:
                        self.refused.add(room.index)
                        job.ended = True
                        self._release(job)
                    return
                break
            if layers == room.pushes[0]:
                self.cancels.add(room)

    def _die_in_flight(self, doom: _Doom) -> None:
        """Kills this process if bytes are in flight; from outside that moment could only be guessed."""
        now = time.monotonic()
        if not doom.ready and now < doom.latest_s:
            return
        in_flight = sum(
            self.agent.state(job.room.room) == "Transferring" for job in self.jobs.values() if not job.ended
        )
        if doom.due_s is None and in_flight >= (_IN_FLIGHT if now < doom.patient_s else 1):
            doom.due_s = now + doom.delay_s
        if (in_flight and doom.due_s is not None and now >= doom.due_s) or now >= doom.latest_s:
            self.link.send("dying", in_flight=in_flight, at_us=time.monotonic_ns() / 1e3)
            os.kill(os.getpid(), signal.SIGKILL)

    def _happened(self, event: kx.Event) -> None:
        job = self._job_of(event.room)
        terminal = event.state in ("Success", "Failed")
        if job is None or job.released or (terminal and job.ended):
            self.double_ends += 1
            self.found.tell(f"{self.rank.name}: {event} after its end")
            return
        if terminal:
            job.ended = True
            self.cancels.forget(job.room)
        if event.released:
            self._release(job)

    def _job_of(self, number: int) -> _Job | None:
        index = self.config["by_number"].get(number)
        return None if index in self.refused else self.jobs.get(index)

    def _release(self, job: _Job) -> None:
        job.released = True
        # Whatever is read from here on is wrong.
        self.memory.refill(job.pages)
        self.memory.put(job.pages)

    def _is_over(self) -> bool:
        return not self.orders and all(job.released for job in self.jobs.values())

    def report(self) -> dict[str, Any]:
        """What is left, with the agent closed."""
        self.cancels.stop()
        unended = [job.room.index for job in self.jobs.values() if not job.released]
        for index in unended:
            state = self.agent.state(self.plan.rooms[index].room)
            self.found.tell(f"{self.rank.name}: room {index} has not ended: {state}")
        gauges = settled(self.agent)
        unreleased = self.agent.close()
        self.memory.scan_canaries()
        back = set(self.memory.free)
        return {
            **self.found.as_dict(),
            "unended": len(unended) + len(self.orders),
            "leaked_pages": self.granted_pages - len(back),
            "gauges": gauges,
            "unreleased": sum(len(pages) for one in unreleased for pages in one.pages),
            "double_ends": self.double_ends,
            "cancels": self.cancels.orders,
        }


def settled(agent: kx.Agent) -> dict[str, int]:
    """The gauges that are not zero, though nothing is under way any more; they are some milliseconds old."""
    deadline = time.monotonic() + _SETTLE_S
    while True:
        stats = agent.stats()
        gauges = {name: stats[name] for name in _GAUGES if stats[name]}
        if not gauges or time.monotonic() > deadline:
            return gauges
        time.sleep(_TICK_S)


def _work(link: Link, config: dict[str, Any]) -> None:
    # The thread that cancels is to have its turn between two copies of numpy's.
    sys.setswitchinterval(0.0005)
    plan = make_plan(**config["plan"])
    config["by_number"] = {room.room: room.index for room in plan.rooms}
    prefill = _Prefill(link, config, Rank(config["engine"], config["tp_rank"]), plan)
    prefill.work()
    link.send("report", **prefill.report())
    link.receive()


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
