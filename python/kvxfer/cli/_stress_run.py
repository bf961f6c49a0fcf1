"""The run of `kvxfer stress` over real processes: the router between them, and the hand that kills."""

from __future__ import annotations

import argparse
import collections
import json
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kvxfer.cli._doctor_look import SURVIVES_TCP_WRITERS
from kvxfer.cli._errors import CommandError
from kvxfer.cli._stress_plan import ENGINES, Plan, Rank, make_plan, ranks_of
from kvxfer.cli._stress_words import MAX_ROOMS
from kvxfer.cli._text import Counter, progress
from kvxfer.cli._workers import Message, Workers

__all__ = ["run_processes"]

_STEP_S = 60.0
# A room ends within milliseconds, over UCX a second after a death; a run in which none does for so long
# stands still, and what has not ended then counts as unended.
_STALL_S = 15.0
# A room's end is stamped with the time at which that turn of decode's thread began, which may be before the
# kill that the same turn noticed; on a busy machine a turn can stand still for long.
_TURN_US = 1e6
_TICK_S = 0.1
# What writes over TCP unless the user names transports; the other engine has kvxfer's choice of them.
_TCP_ENGINE, _TCP = "b", "tcp,self"


@dataclass
class _Process:
    """A prefill process."""

    name: str
    rank: Rank
    listening_s: float = 0.0
    address: str = ""


@dataclass
class _Done:
    """A kill that was carried out."""

    rank: Rank
    at_us: float
    in_flight: int


class _Run:
    def __init__(self, workers: Workers, plan: Plan, config: dict[str, Any], counter: Counter) -> None:
        self.workers, self.plan, self.config, self.counter = workers, plan, config, counter
        self.processes: dict[Rank, _Process] = {}
        self.ended: list[Message] = []
        # Rooms that decode has started and that have not ended, and when they started.
        self.active: dict[int, float] = {}
        self.kills_left = list(plan.kills)
        self.dying: _Process | None = None
        self.kills: list[_Done] = []
        self.drained = False
        self.moved_s = time.monotonic()
        # The process that will take the next victim's place.
        self.successor = ""
        self.successor_ready = False
        self.generation = 0

    def start(self) -> None:
        """Every process, until all of them listen."""
        ranks = [rank for engine in ENGINES for rank in ranks_of(engine)]
        self.workers.start("decode", "kvxfer.cli._stress_decode", {**self.config, "ucx_tls": self._tls(None)})
        names = {rank: self._spare(rank) for rank in ranks}
        self.workers.receive(["decode", *names.values()], "ready", _STEP_S)
        sources: dict[str, str] = {}
        for rank in ranks:
            directory = sources.get(rank.engine)
            self._go_live(names[rank], rank, "127.0.0.1:0", directory)
            said = self.workers.receive([names[rank]], "listening", _STEP_S)
            address = said[names[rank]]["address"]
            self.processes[rank] = _Process(names[rank], rank, time.monotonic(), address)
            sources.setdefault(rank.engine, address)
        self._prepare_successor()
        self.workers.send(["decode"], sources=sources)
        self.moved_s = time.monotonic()

    def _tls(self, engine: str | None) -> str | None:
        """UCX's transports for the ranks of an engine, or decode."""
        named: str | None = self.config["ucx_tls"]
        return _TCP if self.config["fabric"] == "ucx" and named is None and engine == _TCP_ENGINE else named

    def _spare(self, rank: Rank) -> str:
        """Starts a process that gets everything ready and waits for its address."""
        self.generation += 1
        name = f"{rank.name}.{self.generation}"
        config = {
            **self.config,
            "engine": rank.engine,
            "tp_rank": rank.tp_rank,
            "ucx_tls": self._tls(rank.engine),
        }
        self.workers.start(name, "kvxfer.cli._stress_prefill", config)
        return name

    def _go_live(self, name: str, rank: Rank, listen: str, directory: str | None) -> None:
        self.workers.send([name], listen=listen, directory=directory if rank.tp_rank else None)

    def _prepare_successor(self) -> None:
        """The process that will take the next victim's place starts early, so that the gap is short."""
        if self.kills_left:
            self.successor = self._spare(self.kills_left[0].rank)
            self.successor_ready = False

    def work(self) -> None:
        """Until decode has seen every room end and who is to die has died, or nothing moves."""
        while not self.drained or self.dying is not None:
            got = self.workers.next(_TICK_S)
            if got is not None:
                self._heard(*got)
            if self._kill_is_due():
                kill = self.kills_left.pop(0)
                self.dying = self.processes[kill.rank]
                self.workers.send([self.dying.name], doom_s=kill.delay_s)
                # Decode waits for this, so that the victim has rooms.
                self.workers.send(["decode"], kills=len(self.kills) + 1)
            if self.kills_left and self.successor and not self.successor_ready:
                # Decode waits for the kill, and the kill for this process: a slow start is no stall.
                if time.monotonic() - self.moved_s > _STEP_S:
                    raise CommandError(f"{self.successor} did not start within {_STEP_S:.0f} s")
            elif time.monotonic() - self.moved_s > _STALL_S:
                if not self.drained:
                    self.workers.send(["decode"], stop=True)
                    self.workers.receive(["decode"], "drained", _STEP_S)
                return

    def _kill_is_due(self) -> bool:
        if self.drained or not self.kills_left or self.dying is not None or not self.successor_ready:
            return False
        return len(self.active) + len(self.ended) >= self.kills_left[0].after

    def _heard(self, name: str, said: Message) -> None:
        event = said["event"]
        if event == "started":
            self._started(said["rooms"])
        elif event == "ended":
            self._ended(said["rooms"])
        elif event == "ready" and name == self.successor:
            self.successor_ready = True
        elif event == "dying" and self.dying is not None:
            self._replace(self.dying, said)
        elif event == "listening":
            self._took_over(name, said["address"])
        elif event == "drained":
            self.drained = True

    def _engine(self, engine: str) -> list[_Process]:
        return [process for rank, process in self.processes.items() if rank.engine == engine]

    def _started(self, indices: Iterable[int]) -> None:
        self.moved_s = time.monotonic()
        by_engine: dict[str, list[int]] = {}
        for index in indices:
            self.active[index] = self.moved_s
            by_engine.setdefault(self.plan.rooms[index].engine, []).append(index)
        for engine, rooms in by_engine.items():
            self.workers.send([p.name for p in self._engine(engine) if p.address], push=rooms)

    def _ended(self, rooms: Iterable[Message]) -> None:
        over: dict[str, list[int]] = {}
        for one in rooms:
            self.moved_s = time.monotonic()
            self.ended.append(one)
            started_s = self.active.pop(one["index"], 0.0)
            # A process that restarted meanwhile waits for a grant that its predecessor had, or for one that
            # was never made because of the death. Only the router knows.
            for process in self._engine(self.plan.rooms[one["index"]].engine):
                if process.address and (one["error"] == "PeerLost" or process.listening_s > started_s):
                    over.setdefault(process.name, []).append(one["index"])
        for name, indices in over.items():
            self.workers.send([name], over=indices)
        self.counter.show(len(self.ended), len(self.plan.rooms))

    def _replace(self, victim: _Process, said: Message) -> None:
        self.workers.kill(victim.name)
        self.kills.append(_Done(victim.rank, said["at_us"], said["in_flight"]))
        address, victim.address = victim.address, ""
        directory = None
        if victim.rank.tp_rank:
            directory = self.processes[ranks_of(victim.rank.engine)[0]].address
        self.processes[victim.rank] = _Process(self.successor, victim.rank)
        self._go_live(self.successor, victim.rank, address, directory)

    def _took_over(self, name: str, address: str) -> None:
        """A successor listens where its predecessor did: it is given what the engine still has to push."""
        assert self.dying is not None
        process = next(p for p in self.processes.values() if p.name == name)
        process.listening_s, process.address = time.monotonic(), address
        rooms = [i for i in sorted(self.active) if self.plan.rooms[i].engine == process.rank.engine]
        self.workers.send([name], push=rooms)
        self.dying = None
        self.moved_s = time.monotonic()
        self._prepare_successor()

    def finish(self) -> dict[str, Message]:
        """Ends the sources, then decode; their reports."""
        names = [process.name for process in self.processes.values() if process.address]
        self.workers.send(names, finish=True)
        reports = self.workers.receive(names, "report", _STEP_S)
        self.workers.send(names, close=True)
        self.workers.finish(names, _STEP_S)
        self.workers.send(["decode"], report=True)
        reports |= self.workers.receive(["decode"], "report", _STEP_S)
        self.workers.send(["decode"], close=True)
        self.workers.finish(["decode"], _STEP_S)
        return reports

    def figures(self, reports: dict[str, Message]) -> dict[str, Any]:
        """What the run is to be judged by."""
        failed = [one for one in self.ended if one["state"] == "Failed"]
        cancelled = [one for one in failed if one["error"] == "Cancelled"]
        drains = sorted(one["drain_ms"] for one in failed)
        kinds = collections.Counter(one["error"] for one in failed)
        unexpected = [one for one in failed if not self._is_expected(one)]
        told = [line for report in reports.values() for line in report["told"]]
        told += [f"room {one['index']} failed by itself: {one['text']}" for one in unexpected]
        told += [f"{name}: {report['gauges']}" for name, report in reports.items() if report["gauges"]]

        def total(key: str) -> int:
            return sum(report[key] for report in reports.values())

        by_kill = [(kill, self._lost(n)) for n, kill in enumerate(self.kills)]
        gauges = sum(sum(report["gauges"].values()) for report in reports.values())
        return {
            "rooms": len(self.plan.rooms),
            "succeeded": len(self.ended) - len(failed),
            "failed": len(failed) - len(cancelled),
            "cancelled": len(cancelled),
            "unended": total("unended"),
            "corrupt_bytes": total("corrupt_bytes"),
            "leaked_pages": total("leaked_pages") + total("unreleased") + gauges,
            "late_writes": total("late_writes"),
            "double_ends": total("double_ends"),
            "unexpected_failures": len(unexpected),
            "cancelled_mid_write": sum(any(one["cut_off"].values()) for one in cancelled),
            # By its own word it was in the middle, and decode found its bytes in a room that failed then.
            "kills_mid_write": sum(bool(k.in_flight and lost) for k, lost in by_kill),
            "drain_ms_p50": _rank(drains, 50),
            "drain_ms_p99": _rank(drains, 99),
            "kills": len(self.kills),
            # The stricter sign, which a victim that takes long to die over shm leaves no more.
            "kills_cut_off": sum(any(one["cut_off"][k.rank.name] for one in lost) for k, lost in by_kill),
            "cancel_orders": total("cancels"),
            "failures": dict(sorted(kinds.items())),
            "bytes": sum(one["bytes"] for one in self.ended),
            "told": told,
        }

    def _is_expected(self, failed: Message) -> bool:
        """Whether somebody gave the room up, or killed one of its sources."""
        room = self.plan.rooms[failed["index"]]
        if failed["error"] == "Cancelled":
            return room.cancel is not None
        latest_us = failed["failed_us"] + _TURN_US
        killed = (k for k in self.kills if k.rank.engine == room.engine)
        return failed["error"] == "PeerLost" and any(k.at_us <= latest_us for k in killed)

    def _lost(self, number: int) -> list[Message]:
        """Rooms that failed because of a kill, with something of the victim's in their pages."""
        kill = self.kills[number]
        later = [other.at_us for other in self.kills[number + 1 :]]
        until_us = later[0] if later else float("inf")
        return [
            one
            for one in self.ended
            if one["error"] == "PeerLost"
            and kill.rank.name in one["cut_off"]
            and kill.at_us <= one["failed_us"] + _TURN_US
            and one["failed_us"] < until_us
        ]


def _rank(ordered: Sequence[float], percent: float) -> float | None:
    """A percentile; None of nothing."""
    if not ordered:
        return None
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))], 3)


def _ucx() -> dict[str, Any]:
    """The UCX that the processes are going to load, by a process that loads it."""
    with Workers() as workers:
        workers.start("ucx", "kvxfer.cli._doctor_look", {"what": "ucx"})
        found: dict[str, Any] = workers.receive(["ucx"], "found", _STEP_S)["ucx"]["found"]
    return found


def _named(ucx: dict[str, Any]) -> str:
    return f"UCX {'.'.join(str(number) for number in ucx['version'])} ({ucx['path']})"


def run_processes(options: argparse.Namespace) -> dict[str, Any]:
    """Runs it all over `options.fabric`; the figures.

    Raises:
        CommandError: if a process fails, which is no figure.
    """
    if options.rooms > MAX_ROOMS:
        raise CommandError(f"{options.rooms} rooms are too many: a word in memory has room for {MAX_ROOMS}")
    numbers: dict[str, Any] = {
        name: getattr(options, name) for name in ("seed", "rooms", "concurrent", "cancel", "kill")
    }
    ucx = _ucx() if options.fabric == "ucx" else None
    if ucx is not None and options.ucx_tls is None and tuple(ucx["version"]) < SURVIVES_TCP_WRITERS:
        progress(f"{_named(ucx)} can abort decode when a writer over TCP dies: that engine is not killed")
        numbers["spared"] = [_TCP_ENGINE]
    config = {
        "plan": numbers,
        "fabric": options.fabric,
        "ucx_tls": options.ucx_tls,
        "flaw": options.flaw,
        "secret": secrets.token_hex(32),
    }
    counter = Counter(quiet=options.json)
    with Workers() as workers:
        run = _Run(workers, make_plan(**numbers), config, counter)
        run.start()
        began = time.monotonic()
        run.work()
        counter.end()
        took = time.monotonic() - began
        found = run.figures(run.finish()) | {"transfer_s": round(took, 3)}
        if ucx is not None:
            found["ucx"] = _named(ucx)
        if options.log is not None:
            _write_log(options.log, run, found)
    return found


def _write_log(path: str, run: _Run, found: dict[str, Any]) -> None:
    """Kills, the ends of rooms in the order in which decode saw them, and what was found: lines of JSON."""
    lines: list[dict[str, Any]] = [
        {"kill": kill.rank.name, "at_us": kill.at_us, "in_flight": kill.in_flight} for kill in run.kills
    ]
    lines += run.ended
    lines += [{"told": line} for line in found["told"]]
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error
