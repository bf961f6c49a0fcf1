"""One of the two processes of `kvxfer bench transfer`."""

from __future__ import annotations

import os
import select
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np

import kvxfer as kx
from kvxfer.cli._bench_rank import Ids, Rank, layout_of, page_lists, quiet, regions_of
from kvxfer.cli._loopback import ROOM_S
from kvxfer.cli._worker import Link, run

# An agent publishes its counters every few milliseconds.
_COUNTERS_S = 0.05
# Far longer than a transfer thread spins before it sleeps (`spin_us`, 50 by default).
_SLEEP_S = 2e-3
# So long after the large rooms have begun, all of them have had several turns.
_UNDER_WAY_S = 0.01


def _now_us() -> float:
    return time.monotonic_ns() / 1e3


def _lists(rank: Rank, case: dict[str, Any], side: str) -> list[Ids]:
    count = -(-case["tokens"] // rank.page_tokens)
    return page_lists(
        rank.pages, count, shuffled=case["pages"] == "shuffled", seed=1 if side == "prefill" else 2
    )


def _some(lists: list[Ids], turn: int, count: int) -> list[Ids]:
    """The `turn`-th `count` lists, around: a page is not used again before most others were."""
    return [lists[(turn * count + i) % len(lists)] for i in range(count)]


def _case(rank: Rank, case: dict[str, Any], source: str) -> dict[str, Any]:
    """Hand-offs of one size, and at decode as many plain copies, in turns."""
    pushes, tokens = rank.side == "prefill", case["tokens"]
    ours, theirs = (_lists(rank, case, side) for side in ("decode", "prefill"))
    times: list[list[float]] = []
    copies: list[float] = []
    reads: list[float] = []
    writes = moved = 0
    right = True
    # Before and after: what the counters say of one row only.
    time.sleep(_COUNTERS_S)
    before = rank.agent.stats()["data_syscalls"]
    for turn, rooms in enumerate(case["rooms"]):
        count = len(rooms)
        to, sources = _some(ours, 2 * turn, count), _some(theirs, 2 * turn, count)
        if pushes:
            rank.await_grants(rooms)
            times.append([_now_us()])
            for room, pages in zip(rooms, sources, strict=True):
                rank.agent.push(room, pages, tokens=tokens)
            events = rank.drain(rooms, case["limit_s"])
        else:
            # Every other time the copy comes first, and it has pages of its own: neither finds the caches
            # warm more often.
            copied = _some(ours, 2 * turn + 1, count), _some(theirs, 2 * turn + 1, count)
            if turn % 2:
                copies.append(rank.copy_ns(*copied, tokens) / 1e3)
            for room, pages in zip(rooms, to, strict=True):
                rank.agent.expect(room, pages, tokens=tokens, source=source)
            events = rank.drain(rooms, case["limit_s"])
            times.append([event.stats.at_us for event in events])
            if not turn % 2:
                copies.append(rank.copy_ns(*copied, tokens) / 1e3)
            if case["reads"]:
                reads.append(rank.readv_ns(*copied, tokens, *rank.source_process) / 1e3)
            if turn == len(case["rooms"]) - 1:
                right = all(
                    rank.has(a, b, tokens) for a, b in list(zip(to, sources, strict=True))[: case["checked"]]
                )
        writes += sum(event.stats.writes for event in events)
        moved += sum(event.stats.bytes for event in events)
    time.sleep(_COUNTERS_S)
    turns = len(case["rooms"])
    return {
        "times_us": times,
        "copies_us": copies,
        "reads_us": reads,
        "writes": writes / turns,
        "bytes": moved // turns,
        "syscalls": (rank.agent.stats()["data_syscalls"] - before) / turns,
        "right": right,
    }


def _fairness(rank: Rank, case: dict[str, Any], source: str) -> dict[str, Any]:
    """A small room alone and behind large ones that are under way, in turns."""
    pushes, small = rank.side == "prefill", case["small_tokens"]
    large, count = case["large_tokens"], case["large_rooms"]
    need = -(-large // rank.page_tokens)
    ids = np.random.default_rng(1 if pushes else 2).permutation(rank.pages).astype(np.int32)
    # Prefill may push the same pages for several rooms.
    bigs = [ids[0 if pushes else i * need :][:need] for i in range(count)]
    few = -(-small // rank.page_tokens)
    little = ids[len(ids) - few :]
    out: dict[str, list[float]] = {"alone_us": [], "beside_us": [], "large_us": []}
    for turn in case["turns"]:
        for room, beside in ((turn["alone"], []), (turn["beside"], turn["large"])):
            rooms = [*beside, room]
            if pushes:
                rank.await_grants(rooms)
                for big, pages in zip(beside, bigs, strict=False):
                    rank.agent.push(big, pages, tokens=large)
                if beside:
                    time.sleep(_UNDER_WAY_S)
                at_us = _now_us()
                rank.agent.push(room, little, tokens=small)
                rank.drain(rooms, case["limit_s"])
            else:
                for big, pages in zip(beside, bigs, strict=False):
                    rank.agent.expect(big, pages, tokens=large, source=source)
                rank.agent.expect(room, little, tokens=small, source=source)
                events = rank.drain(rooms, case["limit_s"])
                at_us = events[-1].stats.at_us
                if beside:
                    out["large_us"].append(max(event.stats.at_us for event in events[:-1]))
            out["beside_us" if beside else "alone_us"].append(at_us)
    return out


def _await_success(rank: Rank, room: int, *, spins: bool) -> tuple[float, float]:
    """When this room's `Success` was in the caller's hand, and when the transfer thread had it.

    Who spins polls without a pause, who does not sleeps on the descriptor.
    """
    poller = select.poll()
    poller.register(rank.agent.fileno(), select.POLLIN)
    deadline = time.monotonic() + ROOM_S
    seen = at_us = 0.0
    released = False
    while not (seen and released):
        if not spins:
            poller.poll(1000)
        for event in rank.agent.poll():
            if event.room != room:
                continue
            if event.error is not None:
                raise event.error
            if event.state == "Success":
                seen, at_us = _now_us(), event.stats.at_us
            released = released or event.released
        if time.monotonic() > deadline:
            raise kx.TransferTimeout(f"room {room} has not ended in {ROOM_S:.0f} s")
    return seen, at_us


def _latency(rank: Rank, case: dict[str, Any], source: str) -> dict[str, Any]:
    """Small hand-offs whose grant is there already, one at a time, after a pause or without one."""
    pushes, tokens = rank.side == "prefill", case["tokens"]
    lists = page_lists(rank.pages, -(-tokens // rank.page_tokens), shuffled=True, seed=1)
    times, events, copies = [], [], []
    for turn, room in enumerate(case["rooms"]):
        pages = _some(lists, turn, 1)[0]
        if pushes:
            rank.await_grants([room])
            time.sleep(_SLEEP_S)
            at_us = _now_us()
            rank.agent.push(room, pages, tokens=tokens)
            times.append(at_us)
            rank.drain([room])
        else:
            rank.agent.expect(room, pages, tokens=tokens, source=source)
            seen_us, at_us = _await_success(rank, room, spins=case["spins"])
            times.append(seen_us)
            events.append(at_us)
            copies.append(rank.copy_ns([_some(lists, turn + 1, 1)[0]], [pages], tokens) / 1e3)
    return {"times_us": times, "events_us": events, "copies_us": copies}


def _ping_pong(link: Link, case: dict[str, Any], side: str, host: str) -> dict[str, Any]:
    """Round trips of a small frame over TCP between the two processes: the control channel without kvxfer."""
    frame, rounds = case["frame_bytes"], case["rounds"]
    if side == "prefill":
        with socket.create_server((host, 0)) as server:
            link.send("serving", port=server.getsockname()[1])
            there, _ = server.accept()
        with there:
            there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(rounds):
                there.sendall(there.recv(frame, socket.MSG_WAITALL))
        return {}
    link.send("serving")
    port = link.receive()["port"]
    times = []
    with socket.create_connection((host, port)) as there:
        there.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        message = bytes(frame)
        for _ in range(rounds):
            begin = _now_us()
            there.sendall(message)
            there.recv(frame, socket.MSG_WAITALL)
            times.append(_now_us() - begin)
    return {"times_us": times}


def _anonymous_bytes() -> int:
    """Memory of this process's own: neither files, as libraries are, nor shared memory, as pools are."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise RuntimeError("/proc/self/status has no RssAnon")


def _in_flight(rank: Rank, case: dict[str, Any], source: str, before: int) -> dict[str, Any]:
    """Many rooms that are granted and not pushed: what they and the agent hold."""
    rooms, tokens = case["rooms"], case["tokens"]
    if rank.side == "decode":
        lists = page_lists(rank.pages, -(-tokens // rank.page_tokens), shuffled=True, seed=2)
        for room, pages in zip(rooms, lists, strict=True):
            rank.agent.expect(room, pages, tokens=tokens, source=source)
    else:
        rank.await_grants(rooms)
    time.sleep(_COUNTERS_S)
    held = _anonymous_bytes() - before
    # Prefill has seen every grant; who cancels is of no account.
    if rank.side == "prefill":
        for room in rooms:
            rank.agent.cancel(room)
    left = set(rooms)
    while left:
        left -= {event.room for event in rank.agent.poll() if event.released}
        time.sleep(1e-3)
    return {"bytes": held}


def _work(link: Link, config: dict[str, Any]) -> None:
    # What a pool, and threads of numpy's, take is there before the agent is.
    warm = regions_of(config["memory"], config["fabric"], layout_of(0, 16), 16)
    before = _anonymous_bytes()
    del warm
    rank = Rank(
        config["side"],
        config["fabric"],
        config["memory"],
        layout_of(config["layers"], config["page_tokens"], config["order"]),
        config["pages"][config["side"]],
        config["secret"],
        copies=config["copies"],
        **config["options"],
        cpu=config["cpus"].get(config["side"]),
    )
    with rank.agent as agent:
        bases = [region.ctypes.data for region in rank.regions]
        link.send("listening", address=agent.address, pid=os.getpid(), bases=bases)
        told = link.receive()
        source = told["source"]
        rank.source_process = (told["pid"], told["bases"])
        quiet()
        while (case := link.receive())["kind"] != "close":
            if case["kind"] == "in-flight":
                said = _in_flight(rank, case, source, before)
            elif case["kind"] == "ping":
                said = _ping_pong(link, case, config["side"], "127.0.0.1")
            else:
                said = {"size": _case, "fair": _fairness, "latency": _latency}[case["kind"]](
                    rank, case, source
                )
            link.send("measured", **said)


if __name__ == "__main__":
    run(_work, (kx.KvxferError, OSError))
