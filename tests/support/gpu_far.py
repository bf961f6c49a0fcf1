"""The other process of the GPU tests and benchmarks: an order a line, an answer a line.

It has decode ranks, or prefill ranks whose pages are filled.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO

import numpy as np
from gpu_driver import DriverError, Gpu
from gpu_scene import LIMIT, TARGET, Prefill, Side, layout, transports

import kvxfer as kx


class _Decode:
    def __init__(self, config: dict[str, Any]) -> None:
        self.gpu = Gpu()
        self.sides: list[Side] = []
        self.agents: list[kx.Agent] = []
        for n in range(config["ranks"]):
            shard = kx.Shard(tp_rank=n, tp_size=config["ranks"])
            whole = layout(config["order"], config["heads"])
            side = Side(self.gpu, whole, shard, config["pages"], TARGET, config["kind"])
            agent = kx.Agent(
                f"d{n}",
                whole,
                shard,
                memory=side.memory,
                engine="d",
                role="decode",
                ucx_tls=transports(self.gpu),
                **config["agent"],
            )
            self.sides.append(side)
            self.agents.append(agent)

    def expect(self, order: dict[str, Any]) -> Any:
        for agent in self.agents:
            agent.expect(**order)

    def wait(self, room: int) -> Any:
        """The end of a room on all ranks: its state, and when it came (us of the host's monotonic clock)."""
        ended = []
        try:
            for agent in self.agents:
                ended.append(agent.wait(room, timeout=LIMIT))
                agent.poll()
        except kx.KvxferError as error:
            return {"state": type(error).__name__, "error": str(error)}
        return {
            "state": "Success",
            "at_us": max(event.stats.at_us for event in ended),
            "bytes": sum(event.stats.bytes for event in ended),
        }

    def state(self, room: int) -> Any:
        return [agent.state(room) for agent in self.agents]

    def check(self, order: dict[str, Any]) -> Any:
        found = [side.wrong(order["tokens"], order["pages"]) for side in self.sides]
        return next((text for text in found if text is not None), None)

    def paint(self, _: Any) -> Any:
        for side in self.sides:
            side.paint()

    def stats(self, _: Any) -> Any:
        return self.agents[0].stats()

    def peer_copy(self, order: dict[str, Any]) -> Any:
        """Milliseconds of copies of another process's memory into this one's, by CUDA IPC."""
        try:
            source = self.gpu.import_(bytes.fromhex(order["handle"]))
        except DriverError as error:
            return {"error": str(error)}
        stream, target = self.gpu.stream(), self.gpu.alloc(order["nbytes"])
        found = []
        for _ in range(order["rounds"]):
            begin = time.perf_counter()
            self.gpu.copy(target, source, order["nbytes"], stream)
            self.gpu.sync(stream)
            found.append((time.perf_counter() - begin) * 1e3)
        matches = bool(np.array_equal(self.gpu.read(target, 4096), self.gpu.read(source, 4096)))
        self.gpu.free(target)
        return {"ms": found, "right": matches}


class _Prefill:
    def __init__(self, config: dict[str, Any]) -> None:
        self.gpu = Gpu()
        self.prefill = Prefill(
            self.gpu, config["order"], pages=config["pages"], ranks=config["ranks"], **config["agent"]
        )
        self.agents = self.prefill.agents

    def address(self, _: Any) -> Any:
        return self.prefill.address

    def fill(self, order: dict[str, Any]) -> Any:
        self.prefill.fill(order["tokens"], order["pages"])

    def push(self, order: dict[str, Any]) -> Any:
        self.prefill.await_grant(order["room"])
        self.prefill.push(order["room"], order["pages"], order["tokens"])

    def drain(self, room: int) -> Any:
        self.prefill.drain(room)


def answers() -> TextIO:
    """Where answers go: what libraries print goes to the standard error instead."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return out


def main() -> None:
    out = answers()
    far: _Decode | _Prefill | None = None
    for line in sys.stdin:
        order = json.loads(line)
        if far is None:
            far = _Prefill(order) if order["role"] == "prefill" else _Decode(order)
            answer: Any = {"ready": True}
        else:
            ((name, argument),) = order.items()
            done: Callable[[Any], Any] = getattr(far, name)
            answer = {"done": done(argument)}
        print(json.dumps(answer), file=out)
    if far is not None:
        for agent in reversed(far.agents):
            assert agent.close() == []
        assert far.gpu.faults() == "", far.gpu.faults()


if __name__ == "__main__":
    main()
