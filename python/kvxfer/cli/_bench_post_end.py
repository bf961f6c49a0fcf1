"""One of the two processes of `kvxfer bench post`.

Every number is the median (or another rank) of single calls, each between two readings of
`time.perf_counter_ns`, less what two readings with nothing between them take. Python's garbage collector is
off meanwhile.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import kvxfer as kx
from kvxfer.cli._loopback import AT_ONCE, PAGE_TOKENS, WARM_UP, End, Fabric, Side, shuffled
from kvxfer.cli._worker import Link, run

# Far longer than a transfer thread spins before it sleeps (`spin_us`, 50 by default).
_SLEEP_S = 1e-3
# The cost of page ids does not depend on how many layers have such pages, so one layer will do, and little
# memory.
_ONE_LAYER = kx.PageLayout(layers=1, kv_heads=1, head_dim=128, page_tokens=PAGE_TOKENS, dtype="bfloat16")
_PAGE_COUNTS = (125, 250, 500, 1000, 2000)
_CALLS = 300
# Orders and cancels that may be under way, far from filling the queue.
_BATCH = 50
# So many calls of one size in a row: far from filling the queue.
_TOGETHER = 10
_POLLS = 20_000
_WAKES = 100


def _clock_ns() -> int:
    """What two readings of the clock take."""
    clock = time.perf_counter_ns
    took = []
    for _ in range(2000):
        begin = clock()
        took.append(clock() - begin)
    return sorted(took)[len(took) // 2]


def _hand_offs(end: End, rooms: list[int], source: str, *, pushes: bool) -> list[dict[str, int]]:
    """Real hand-offs, a few at a time, as one step of an engine's loop makes them, with all grants there
    before the push.

    The first call of a group finds the transfer thread asleep and the caches full of other things.
    """
    clock, agent, tokens = time.perf_counter_ns, end.agent, end.tokens
    out = []
    for first in range(0, len(rooms), AT_ONCE):
        group = rooms[first : first + AT_ONCE]
        if pushes:
            end.await_grants(group)
        time.sleep(_SLEEP_S)
        calls = []
        for number, room in enumerate(group):
            submitted_us = time.monotonic_ns() // 1000
            if pushes:
                pages = end.sets[0]
                begin = clock()
                agent.push(room, pages, tokens=tokens)
                call_ns = clock() - begin
            else:
                pages = end.sets[number]
                begin = clock()
                agent.expect(room, pages, tokens=tokens, source=source)
                call_ns = clock() - begin
            calls.append({"number": number, "call_ns": call_ns, "submitted_us": submitted_us})
        for call, event in zip(calls, end.drain(group), strict=True):
            out.append({**call, "first_write_us": event.stats.first_write_at_us})
    return out[WARM_UP:]


def _wake_ns() -> int:
    """What it takes on this host to wake a sleeping thread by an eventfd, with nothing of kvxfer in it."""
    clock = time.perf_counter_ns
    signal = os.eventfd(0)
    awake = threading.Event()

    def sleep() -> None:
        for _ in range(_WAKES):
            os.eventfd_read(signal)
            awake.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    took = []
    for _ in range(_WAKES):
        time.sleep(_SLEEP_S)
        awake.clear()
        begin = clock()
        os.eventfd_write(signal, 1)
        took.append(clock() - begin)
        awake.wait()
    thread.join()
    os.close(signal)
    return sorted(took)[len(took) // 2]


def _drain(agent: kx.Agent, rooms: int) -> None:
    """Polls until so many rooms have been released."""
    while rooms:
        rooms -= sum(event.released for event in agent.poll())


def _pages_agent(fabric: Fabric, side: Side, most: int) -> kx.Agent:
    """An agent whose rooms are never asked for, with memory for `most` pages."""
    pool = kx.alloc(_ONE_LAYER, kx.Shard(), pages=most, fabric=fabric)
    return kx.Agent("pages", _ONE_LAYER, kx.Shard(), memory=pool, role=side, fabric=fabric, engine="pages")


def _by_pages(agent: kx.Agent) -> list[dict[str, Any]]:
    """What `push` costs by the number of pages, as array and as list: pushes that no peer asks for."""
    clock = time.perf_counter_ns
    out = []

    def push(pages: Any, tokens: int) -> int:
        room = kx.new_room()
        begin = clock()
        agent.push(room, pages, tokens=tokens)
        took = clock() - begin
        agent.cancel(room)
        return took

    for count in _PAGE_COUNTS:
        array = shuffled(max(_PAGE_COUNTS), count, seed=3)
        numbers = [int(page) for page in array]
        took: dict[str, list[int]] = {"array_ns": [], "list_ns": []}
        # In turns, so that a slow moment of the machine hits both alike.
        for call in range(_CALLS):
            took["array_ns"].append(push(array, count * PAGE_TOKENS))
            took["list_ns"].append(push(numbers, count * PAGE_TOKENS))
            if (call + 1) % (_BATCH // 2) == 0:
                _drain(agent, _BATCH)
        out.append({"pages": count, **took})
    return out


def _by_tokens(agent: kx.Agent, sizes: list[int], source: str | None) -> list[dict[str, Any]]:
    """Calls of each size, as array and as list: pushes, or with a source grants, which are cancelled at once.

    Ten in a row, which may find the transfer thread awake or asleep: what waking it costs is measured apart.
    """
    clock = time.perf_counter_ns
    most = agent.pages[0]
    took: list[dict[str, list[int]]] = [{"array_ns": [], "list_ns": [], "poll_ns": []} for _ in sizes]
    ids: list[list[Any]] = []
    for tokens in sizes:
        array = shuffled(most, -(-tokens // PAGE_TOKENS), seed=4)
        ids.append([array, array.tolist()])

    def one(pages: Any, tokens: int) -> int:
        room = kx.new_room()
        if source is None:
            begin = clock()
            agent.push(room, pages, tokens=tokens)
        else:
            begin = clock()
            agent.expect(room, pages, tokens=tokens, source=source)
        end = clock()
        agent.cancel(room)
        return end - begin

    # All sizes in turns, so that a slow moment of the machine hits them alike.
    for _ in range(_CALLS // _TOGETHER):
        for tokens, (array, numbers), times in zip(sizes, ids, took, strict=True):
            for kind, pages in (("array_ns", array), ("list_ns", numbers)):
                times[kind] += [one(pages, tokens) for _ in range(_TOGETHER)]
                left = _TOGETHER
                while left:
                    begin = clock()
                    events = agent.poll()
                    end = clock()
                    if len(events) == 1:
                        times["poll_ns"].append(end - begin)
                    left -= sum(event.released for event in events)
    return [{"tokens": tokens, **times} for tokens, times in zip(sizes, took, strict=True)]


def _empty_polls(poll: Callable[[], list[kx.Event]]) -> list[int]:
    clock = time.perf_counter_ns
    took = []
    for _ in range(_POLLS):
        begin = clock()
        poll()
        took.append(clock() - begin)
    # The caller wants ranks of it, not twenty thousand numbers.
    return [int(rank) for rank in np.percentile(took, (50, 99))]


def _work(link: Link, config: dict[str, Any]) -> None:
    pushes = config["side"] == "prefill"
    end = End(
        config["side"],
        config["fabric"],
        config["tokens"],
        pooled=True,
        secret=config["secret"],
        at_once=AT_ONCE,
    )
    with end.agent as agent:
        if pushes:
            end.fill()
        else:
            end.touch()
        link.send("listening", address=agent.address)
        source = link.receive()["source"]
        gc.disable()
        rooms = _hand_offs(end, config["rooms"], source, pushes=pushes)
        right = pushes or end.is_filled()
        link.send("handed-off", rooms=rooms, right=right, clock_ns=_clock_ns())
        # The other side is idle during what follows.
        go = link.receive()
        most = max(*_PAGE_COUNTS, *(-(-tokens // PAGE_TOKENS) for tokens in config["by_tokens"]))
        with _pages_agent(config["fabric"], config["side"], most) as pages:
            if pushes:
                by_tokens = _by_tokens(pages, config["by_tokens"], None)
                link.send("measured", by_pages=_by_pages(pages), by_tokens=by_tokens, address=pages.address)
            else:
                by_tokens = _by_tokens(pages, config["by_tokens"], go["source"])
                said = {"poll_ns": _empty_polls(agent.poll), "wake_ns": _wake_ns()}
                link.send("measured", **said, by_tokens=by_tokens)
            link.receive()


if __name__ == "__main__":
    run(_work, (kx.KvxferError,))
