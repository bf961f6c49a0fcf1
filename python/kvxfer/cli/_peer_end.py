"""One of the two processes of one library in `kvxfer bench peers`."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvxfer.cli._bench_rank import quiet
from kvxfer.cli._peer_base import PAGE_TOKENS, End, Turn, now_us
from kvxfer.cli._peer_kvxfer import KvxferEnd
from kvxfer.cli._peer_mooncake import MooncakeEnd
from kvxfer.cli._peer_nixl import NixlEnd
from kvxfer.cli._peer_ucxx import UcxxEnd
from kvxfer.cli._worker import Link, run


def _make(config: dict[str, Any]) -> End:
    common = (config["side"], config["memory"], config["fabric"], config["pages"])
    kind = config["library"]
    if kind == "nixl":
        return NixlEnd(*common, prepared=config["prepared"])
    if kind == "mooncake":
        return MooncakeEnd(*common)
    if kind == "ucxx":
        return UcxxEnd(*common)
    return KvxferEnd(*common, secret=config["secret"])


class _Work:
    """What keeps the target's thread busy, as a decode loop would: Python and numpy, for about 1 ms."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """CPU time that it took: no library's."""
        self._matrix = np.ones((96, 96), np.float32)

    def some(self) -> None:
        begin = time.thread_time()
        until = begin + 1e-3
        total = 0
        while time.thread_time() < until:
            (self._matrix @ self._matrix).sum()
            total += sum(range(200))
        self.seconds += time.thread_time() - begin


def _turn(message: dict[str, Any]) -> Turn:
    to, source = (np.array(message[key], np.int32) for key in ("to", "source"))
    return Turn(message["room"], to, source)


def _target(link: Link, end: End, message: dict[str, Any]) -> dict[str, Any]:
    turn, work = _turn(message), _Work()
    end.spoil(turn.to)
    begin = time.process_time()
    end.arm(turn)
    link.send("armed")
    ended_us = None
    if end.takes_part and not message["busy"]:
        ended_us = end.settle(turn)
    while message["busy"] and not link.waiting():
        work.some()
        if end.takes_part and ended_us is None and end.is_here():
            ended_us = end.settle(turn)
    link.receive()
    if ended_us is None:
        ended_us = end.settle(turn)
    cpu_s = time.process_time() - begin - work.seconds
    right = not message["checked"] or end.has(turn.to, turn.source, len(turn.to) * PAGE_TOKENS)
    return {"ended_us": ended_us, "cpu_s": cpu_s, "right": right}


def _source(end: End, message: dict[str, Any]) -> dict[str, Any]:
    turn = _turn(message)
    cpu, begin = time.process_time(), now_us()
    end.post(turn)
    posted = now_us()
    end.finish(turn)
    ended = now_us()
    cpu_s = time.process_time() - cpu
    return {"begun_us": begin, "post_us": posted - begin, "ended_us": ended, "cpu_s": cpu_s}


def _work(link: Link, config: dict[str, Any]) -> None:
    end = _make(config)
    link.send("ready", info=end.info(), version=end.version)
    end.connect(link.receive()["other"])
    link.send("connected")
    quiet()
    while (message := link.receive())["kind"] != "close":
        if config["side"] == "decode":
            link.send("moved", **_target(link, end, message))
        else:
            link.send("moved", **_source(end, message))
    end.close()


if __name__ == "__main__":
    run(_work, (RuntimeError, ImportError))
