"""Helpers for tests with two real processes."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

import numpy as np
from prefill_child import fill

import kvxfer as kx

HERE = pathlib.Path(__file__).parent


class Prefill:
    """A prefill rank in a child process; a context manager that never leaves it running."""

    def __init__(
        self,
        layout: dict[str, Any],
        shard: dict[str, Any] | None = None,
        *,
        pages: int,
        seed: int = 1,
        alloc: str = "auto",
        name: str = "prefill",
        env: dict[str, str] | None = None,
        engine_memory: bool = False,
        **agent: Any,
    ) -> None:
        self.layout, self.shard = kx.PageLayout(**layout), kx.Shard(**(shard or {}))
        self.pages, self.seed, self.alloc = pages, seed, alloc
        self.events: list[dict[str, Any]] = []
        self.child = subprocess.Popen(
            [sys.executable, str(HERE / "prefill_child.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **(env or {})},
        )
        setup = dict(
            layout=layout,
            shard=shard or {},
            pages=pages,
            seed=seed,
            alloc=alloc,
            name=name,
            engine_memory=engine_memory,
            agent=agent,
        )
        self._send(setup)
        self.address = self._read()["address"]

    def _send(self, order: dict[str, Any]) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(json.dumps(order) + "\n")
        self.child.stdin.flush()

    def _read(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, f"the prefill process ended with {self.child.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, **order: Any) -> None:
        """Gives an order and waits until it was taken."""
        self._send(order)
        while "done" not in (answer := self._read()):
            self.events.append(answer["event"])

    def push(self, room: int, pages: Any, **arguments: Any) -> None:
        self.order(push=dict(room=room, pages=[int(p) for p in pages], **arguments))

    def event(self, room: int) -> dict[str, Any]:
        """The next event of this room."""
        while True:
            for i, ev in enumerate(self.events):
                if ev["room"] == room:
                    return self.events.pop(i)
            self.events.append(self._read()["event"])

    def reference(self) -> dict[tuple[int, int, int], np.ndarray]:
        """What the child's pool holds, by (group, layer, part)."""
        pool = kx.alloc(self.layout, self.shard, pages=self.pages, fabric="shm")
        fill(pool, self.seed)
        return {key: np.array(tensor) for key, tensor in pool.tensors.items()}

    def __enter__(self) -> Prefill:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.child.stdin is not None and self.child.stdout is not None
        if self.child.poll() is None:
            self.child.stdin.close()
            try:
                self.child.wait(20)
            except subprocess.TimeoutExpired:
                self.child.kill()
                raise
            finally:
                self.child.wait()
        self.child.stdout.close()
