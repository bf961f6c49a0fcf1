"""Qwen3-32B's KV cache on a GPU: a rank's pages, what they must hold by the oracle, and the other process.

A byte of a token is a number made of the oracle's tag for it; a byte that belongs to no token handed off has
its side's background.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import oracle
from gpu_driver import Bytes, Gpu

import kvxfer as kx

if TYPE_CHECKING:
    from typing_extensions import Self

# Of 8 KV heads a prefill rank of TP8 has one, and a decode rank of TP4 two. Fewer ranks have fewer heads in
# all, so that what a rank holds stays as it is.
QWEN3_32B: dict[str, Any] = {
    "layers": 64,
    "head_dim": 128,
    "page_tokens": 16,
    "dtype": "bfloat16",
}
PAGE_TOKENS = 16
SOURCE, TARGET = 0x5A, 0xA5
LIMIT = 60.0
CHILD = Path(__file__).with_name("gpu_far.py")


def layout(order: str, heads: int) -> kx.PageLayout:
    return kx.PageLayout(**QWEN3_32B, kv_heads=heads, order=order)


def transports(gpu: Gpu) -> str | None:
    """On a GPU what kvxfer chooses. No other process gets at the stub's memory: there it goes by TCP."""
    return "tcp,self,cuda_copy" if gpu.is_stub else None


def permuted(pool: int, tokens: int, seed: int) -> list[int]:
    """Page ids for these tokens, in no order."""
    count = -(-tokens // PAGE_TOKENS)
    return [int(n) for n in np.random.default_rng(seed).permutation(pool)[:count]]


class Side:
    """One rank's pages: a region for K and V of each layer.

    `kind` is `"device"`, `"pinned"` (memory of the host that CUDA knows) or `"host"` (kvxfer's own).
    """

    def __init__(
        self,
        gpu: Gpu,
        layout: kx.PageLayout,
        shard: kx.Shard,
        pages: int,
        background: int,
        kind: str = "device",
    ) -> None:
        self.gpu, self.shard, self.pages, self.background, self.kind = gpu, shard, pages, background, kind
        self.layout = layout
        self._rank = oracle.Rank(oracle.Engine((self.layout,), tp_size=shard.tp_size), shard, 1)
        self.page_bytes: int = self.layout.page_extents(shard)[0][1]
        self.nbytes = self.page_bytes * pages
        self.addresses: dict[oracle.Region, int] = {}
        self._pool: kx.Pool | None = None
        keys = [(0, layer, part) for layer in range(self.layout.layers) for part in ("k", "v")]
        if kind == "host":
            self._pool = kx.alloc(self.layout, shard, pages=pages)
        for key in keys:
            if self._pool is not None:
                self.addresses[key] = int(np.asarray(self._pool.tensors[key]).ctypes.data)
            else:
                self.addresses[key] = (gpu.pinned if kind == "pinned" else gpu.alloc)(self.nbytes)
        self.paint()

    @property
    def memory(self) -> Any:
        """For `Agent(memory=)`."""
        if self._pool is not None:
            return self._pool
        given = {
            key: kx.DeviceMemory(address, self.nbytes, self.gpu.ordinal)
            for key, address in self.addresses.items()
        }
        return [(given[0, n, "k"], given[0, n, "v"]) for n in range(self.layout.layers)]

    def paint(self) -> None:
        """The background everywhere."""
        image = np.full(self.nbytes, self.background, np.uint8)
        for address in self.addresses.values():
            self._write(address, image)

    def images(self, tokens: int, pages: list[int]) -> dict[oracle.Region, Bytes]:
        """What the regions hold with these tokens in these pages."""
        found = {key: np.full(self.nbytes, self.background, np.uint8) for key in self.addresses}
        for key, at, tags in self._rank.rows(0, pages, range(tokens)):
            found[key][at] = (tags.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)).astype(
                np.uint8
            )
        return found

    def fill(self, tokens: int, pages: list[int]) -> None:
        """As prefill leaves the pages."""
        for key, image in self.images(tokens, pages).items():
            self._write(self.addresses[key], image)

    def wrong(self, tokens: int, pages: list[int]) -> str | None:
        """Where something else is than these tokens in these pages, and the background around them."""
        for key, image in self.images(tokens, pages).items():
            have = self._read(self.addresses[key])
            bad = np.flatnonzero(have != image)
            if len(bad):
                at = int(bad[0])
                first = f"the first at {at}: {have[at]}, not {image[at]}"
                return f"{self.shard} {key}: {len(bad)} wrong bytes, {first}"
        return None

    def _write(self, address: int, image: Bytes) -> None:
        if self.kind == "device":
            self.gpu.write(address, image)
        else:
            _host(address, len(image))[:] = image

    def _read(self, address: int) -> Bytes:
        return self.gpu.read(address, self.nbytes) if self.kind == "device" else _host(address, self.nbytes)


def _host(address: int, nbytes: int) -> Bytes:
    """Memory of the host as an array."""
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)


class Far:
    """The ranks of one side, in a process of their own on the same GPU.

    Of the decode side `ranks` ranks that share `heads` heads; of the prefill side `ranks` ranks with a head
    each. `env` is for that process alone.
    """

    def __init__(
        self,
        order: str,
        *,
        pages: int,
        role: str = "decode",
        heads: int = 2,
        ranks: int = 1,
        kind: str = "device",
        env: dict[str, str] | None = None,
        **agent: Any,
    ) -> None:
        self._child = subprocess.Popen(
            [sys.executable, str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(env or {})},
        )
        self.order(role=role, order=order, pages=pages, heads=heads, ranks=ranks, kind=kind, agent=agent)

    def order(self, **order: Any) -> dict[str, Any]:
        """Has it done, and returns what it says."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        assert line, f"the other process ended with {self._child.wait(20)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._child.stdout.close()


class Prefill:
    """Prefill ranks with a head each: two, whose heads one decode rank has, or another number."""

    def __init__(
        self,
        gpu: Gpu,
        order: str,
        *,
        pages: int,
        ranks: int = 2,
        kind: str = "device",
        **agent: Any,
    ) -> None:
        self.sides = [
            Side(gpu, layout(order, ranks), kx.Shard(tp_rank=n, tp_size=ranks), pages, SOURCE, kind)
            for n in range(ranks)
        ]
        self.agents: list[kx.Agent] = []
        for n, side in enumerate(self.sides):
            self.agents.append(
                kx.Agent(
                    f"p{n}",
                    side.layout,
                    side.shard,
                    memory=side.memory,
                    engine="p",
                    directory=self.agents[0].address if self.agents else None,
                    role="prefill",
                    ucx_tls=transports(gpu),
                    **agent,
                )
            )

    @property
    def address(self) -> str:
        return self.agents[0].address

    def fill(self, tokens: int, pages: list[int]) -> None:
        for side in self.sides:
            side.fill(tokens, pages)

    def push(self, room: int, pages: list[int], tokens: int, **more: Any) -> None:
        for agent in self.agents:
            agent.push(room, pages, tokens=tokens, **more)

    def await_grant(self, room: int) -> None:
        """Until decode's pages are known, so that what is timed from here on is the hand-off alone."""
        until = time.monotonic() + LIMIT
        for agent in self.agents:
            agent.open(room)
        for agent in self.agents:
            while agent.state(room) == "Bootstrapping":
                assert time.monotonic() < until, f"no grant for room {room} in {LIMIT:.0f} s"
                time.sleep(20e-6)

    def drain(self, room: int) -> None:
        """Until the pages are free again."""
        for agent in self.agents:
            agent.wait(room, timeout=LIMIT)
            until = time.monotonic() + LIMIT
            while not any(event.room == room and event.released for event in agent.poll()):
                assert time.monotonic() < until, f"room {room} is not released"
                time.sleep(50e-6)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in reversed(self.agents):
            assert agent.close() == []
