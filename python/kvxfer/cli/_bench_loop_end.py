"""The processes of `kvxfer bench loop`: the decode loop, who sends to it, and who only copies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvxfer as kx
from kvxfer.cli._bench_rank import LAYERS, Rank, layout_of, page_lists, quiet
from kvxfer.cli._loopback import ROOM_S
from kvxfer.cli._peer_base import PAGE_TOKENS, Turn, now_us
from kvxfer.cli._peer_nixl import NixlEnd
from kvxfer.cli._worker import Link, run

# Hand-offs that have pages of their own; at 16 a second two are under way at most.
_SETS = 8
_SIDE = 192
_CALIBRATE_STEPS = 60
_LOOK_S = 1e-3


def _pin(cores: list[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)


def _next(link: Link) -> dict[str, Any] | None:
    """The next block, once everybody who takes part knows of it; None at the end."""
    block = link.receive()
    if block["kind"] == "close":
        return None
    link.send("armed")
    return {**block, **link.receive()}


class _Work:
    """One step of the loop: products of matrices, and some Python between them, as a scheduler has."""

    def __init__(self, step_s: float) -> None:
        self._a = np.random.default_rng(5).random((_SIDE, _SIDE), np.float32)
        self._b = self._a.copy()
        self.count = 1
        took = []
        for _ in range(_CALIBRATE_STEPS):
            begin = time.perf_counter()
            self.step()
            took.append(time.perf_counter() - begin)
        self.count = max(1, round(step_s / sorted(took)[len(took) // 2]))

    def step(self) -> None:
        for _ in range(self.count):
            np.tanh(self._a @ self._b, out=self._b)
            sum(range(50))


def _wait_until(start_us: float) -> None:
    while (left := start_us - now_us()) > 0:
        time.sleep(left / 1e6)


def _run_block(
    block: dict[str, Any], work: _Work, begin_one: Callable[[int], bool], look: Callable[[], None]
) -> dict[str, Any]:
    """The loop, for so long: what has arrived is begun between two steps, and one look a step is had."""
    arrivals, end_us = block["arrivals_us"], block["start_us"] + block["seconds"] * 1e6
    steps, posts = [], []
    begun = 0
    _wait_until(block["start_us"])
    while (step_us := now_us()) < end_us:
        if begun < len(arrivals) and block["start_us"] + arrivals[begun] <= step_us:
            before = now_us()
            if begin_one(begun):
                begun += 1
                posts.append((now_us() - before) / 1e3)
        look()
        work.step()
        steps.append((now_us() - step_us) / 1e3)
    return {"steps_ms": steps, "posts_ms": posts, "left": len(arrivals) - begun}


def _lists(rank: Any, tokens: int, seed: int) -> Any:
    return page_lists(rank.pages, -(-tokens // PAGE_TOKENS), shuffled=True, seed=seed)


class _Kvxfer:
    """The receiving half of kvxfer in the loop."""

    def __init__(self, rank: Rank, tokens: int, source: str) -> None:
        self._rank, self._tokens, self._source = rank, tokens, source
        self._lists = _lists(rank, tokens, 2)
        self._free = list(range(len(self._lists)))
        self._sets: dict[int, int] = {}
        self.rooms: list[int] = []

    def begin(self, number: int) -> bool:
        if not self._free:
            return False
        room = self.rooms[number]
        self._sets[room] = self._free.pop(0)
        pages = self._lists[self._sets[room]]
        self._rank.agent.expect(room, pages, tokens=self._tokens, source=self._source)
        return True

    def look(self) -> None:
        for event in self._rank.agent.poll():
            if event.error is not None:
                raise event.error
            if event.released:
                self._free.append(self._sets.pop(event.room))

    def settle(self) -> None:
        deadline = time.monotonic() + ROOM_S
        while self._sets:
            self.look()
            time.sleep(_LOOK_S)
            if time.monotonic() > deadline:
                raise kx.TransferTimeout(f"{len(self._sets)} rooms have not ended in {ROOM_S:.0f} s")


def _decode(link: Link, config: dict[str, Any]) -> None:
    _pin(config["other_cores"])
    rank = _rank("decode", config)
    with rank.agent as agent:
        link.send("ready", address=agent.address)
        kvxfer = _Kvxfer(rank, config["tokens"], link.receive()["source"])
        _pin(config["loop_cores"])
        work = _Work(config["step_s"])
        link.send("calibrated", count=work.count)
        quiet()
        while (block := _next(link)) is not None:
            if block["who"] == "kvxfer":
                kvxfer.rooms = block["rooms"]
                said = _run_block(block, work, kvxfer.begin, kvxfer.look)
                # Of those that have not begun no other side knows.
                for number in range(len(block["rooms"]) - said["left"], len(block["rooms"])):
                    kvxfer.settle()
                    kvxfer.begin(number)
                kvxfer.settle()
            else:
                # A block that is not kvxfer's has no arrivals in this process.
                said = _run_block({**block, "arrivals_us": []}, work, lambda _: True, lambda: None)
            link.send("done", **said)


def _prefill(link: Link, config: dict[str, Any]) -> None:
    _pin(config["other_cores"])
    rank = _rank("prefill", config)
    lists = _lists(rank, config["tokens"], 1)
    with rank.agent as agent:
        link.send("ready", address=agent.address)
        link.receive()
        quiet()
        while (block := _next(link)) is not None:
            for number, (room, at_us) in enumerate(zip(block["rooms"], block["arrivals_us"], strict=True)):
                _wait_until(block["start_us"] + at_us)
                agent.push(room, lists[number % len(lists)], tokens=config["tokens"])
            rank.drain(block["rooms"])
            link.send("done")


def _rank(side: Any, config: dict[str, Any]) -> Rank:
    count = -(-config["tokens"] // PAGE_TOKENS)
    cores = config["other_cores"]
    return Rank(
        side,
        config["fabric"],
        "kvxfer",
        layout_of(LAYERS, PAGE_TOKENS),
        _SETS * count,
        config["secret"],
        copies=False,
        cpu=cores[0] if cores else None,
    )


def _copier(link: Link, config: dict[str, Any]) -> None:
    """A process that has nothing to do with the loop, and copies as many bytes in the same pieces."""
    _pin(config["other_cores"])
    count = -(-config["tokens"] // PAGE_TOKENS)
    layout = layout_of(LAYERS, PAGE_TOKENS)
    rank = Rank("decode", "shm", "kvxfer", layout, _SETS * count, config["secret"])
    to, source = _lists(rank, config["tokens"], 2), _lists(rank, config["tokens"], 1)
    with rank.agent:
        rank.copy_ns(to, source, config["tokens"])
        link.send("ready")
        link.receive()
        quiet()
        while (block := _next(link)) is not None:
            for number, at_us in enumerate(block["arrivals_us"]):
                _wait_until(block["start_us"] + at_us)
                i = number % _SETS
                rank.copy_ns([to[i]], [source[i]], config["tokens"])
            link.send("done")


def _nixl(link: Link, config: dict[str, Any]) -> None:
    """The decode loop whose thread posts NIXL's reads itself, or the side that is read."""
    _pin(config["other_cores"])
    reads, tokens = config["role"] == "nixl-decode", config["tokens"]
    count = -(-tokens // PAGE_TOKENS)
    side = "decode" if reads else "prefill"
    end = NixlEnd(side, "engine", "shm", _SETS * count, prepared=True, reads=True)
    link.send("ready", info=end.info(), version=end.version)
    end.connect(link.receive()["other"])
    if not reads:
        link.send("connected")
        link.receive()
        return
    to, source = _lists(end, tokens, 2), _lists(end, tokens, 1)
    link.send("connected")
    _pin(config["loop_cores"])
    work = _Work(config["step_s"])
    link.send("calibrated", count=work.count)
    quiet()

    def begin(number: int) -> bool:
        # One handle at a time is enough: the post itself takes most of the time that there is.
        if end.posted and not end.is_done():
            return False
        end.release()
        end.post(Turn(0, to[number % _SETS], source[number % _SETS]))
        return True

    def look() -> None:
        if end.posted:
            end.is_done()

    for number in range(_SETS):
        while not begin(number):
            pass
    while not end.is_done():
        pass
    right = end.has(to[-1], source[-1], tokens)
    while (block := _next(link)) is not None:
        arrivals = block["arrivals_us"] if block["who"] == "nixl" else []
        said = _run_block({**block, "arrivals_us": arrivals}, work, begin, look)
        while not end.is_done():
            pass
        link.send("done", **said, right=right)


def _work(link: Link, config: dict[str, Any]) -> None:
    roles = {
        "decode": _decode,
        "prefill": _prefill,
        "copier": _copier,
        "nixl-decode": _nixl,
        "nixl-prefill": _nixl,
    }
    roles[config["role"]](link, config)


if __name__ == "__main__":
    run(_work, (kx.KvxferError, RuntimeError, ImportError))
