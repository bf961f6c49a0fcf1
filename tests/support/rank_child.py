"""A rank in a process of its own, driven by JSON lines on its standard input.

Its pool is filled from a seed, so that the other process knows every byte of it. An order is an object with
one key, the name of a method of `Rank` here, and its argument: `{"push": {...arguments of Agent.push}}`,
`{"cancel": room}`. Each is answered by one line, `{"done": ...}`, once it was carried out. Events are printed
as they come, as `{"event": ...}`. The end of the input closes the agent.
"""

from __future__ import annotations

import hashlib
import json
import selectors
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

import kvxfer as kx

Tensors = Mapping[tuple[int, int, str], Any]


def fill(pool: kx.Pool, seed: int) -> None:
    """Words of eight bytes, none of which is there twice in any region of any seed."""
    for n, tensor in enumerate(pool.tensors.values()):
        flat = tensor.reshape(-1).view(np.uint8)
        words = np.arange(-(-flat.nbytes // 8), dtype=np.uint64)
        words += np.uint64((seed << 48) + (n << 32))
        words *= np.uint64(0x9E3779B97F4A7C15)
        words ^= words >> np.uint64(29)
        flat[:] = words.view(np.uint8)[: flat.nbytes]


def digest(tensors: Tensors, pages: list[int]) -> str:
    """One checksum over these pages of every region, in their order."""
    found = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        found.update(np.ascontiguousarray(np.asarray(tensor)[pages]).view(np.uint8).data)
    return found.hexdigest()


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def tell(ev: kx.Event) -> None:
    say(
        event={
            "room": ev.room,
            "state": ev.state,
            "released": ev.released,
            "error": type(ev.error).__name__ if ev.error else None,
        },
        text=str(ev.error) if ev.error else None,
        meta=ev.meta.decode() if ev.meta is not None else None,
        push=ev.push.id if ev.push else None,
    )


class Rank:
    def __init__(self, setup: dict[str, Any]) -> None:
        layout, shard = kx.PageLayout(**setup["layout"]), kx.Shard(**setup["shard"])
        tls = setup["agent"].get("ucx_tls")
        self.pool = kx.alloc(layout, shard, pages=setup["pages"], fabric=setup["alloc"], ucx_tls=tls)
        fill(self.pool, setup["seed"])
        self.pushes: dict[int, kx.Push] = {}
        memory: Any = self.pool
        if setup["engine_memory"]:
            by_layer: dict[int, list[Any]] = {}
            for (_, layer, _), tensor in sorted(self.pool.tensors.items()):
                by_layer.setdefault(layer, []).append(np.array(tensor))
            memory = {layer: tuple(parts) for layer, parts in by_layer.items()}
        self.agent = kx.Agent(setup["name"], layout, shard, memory=memory, **setup["agent"])

    def push(self, given: dict[str, Any]) -> dict[str, Any]:
        given["pages"] = np.array(given["pages"], np.int64)
        meta = given.pop("meta", None)
        if given.get("layers") is not None:
            given["layers"] = tuple(given["layers"])
        push = self.agent.push(**given, meta=meta.encode() if meta is not None else None)
        self.pushes[push.id] = push
        return {"push": push.id}

    def expect(self, given: dict[str, Any]) -> None:
        given["pages"] = np.array(given["pages"], np.int64)
        self.agent.expect(**given)

    def retract(self, push: int) -> None:
        self.agent.retract(self.pushes[push])

    def fill(self, seed: int) -> None:
        fill(self.pool, seed)

    def cancel(self, room: int) -> None:
        self.agent.cancel(room)

    def open(self, room: int) -> None:
        self.agent.open(room)

    def digest(self, pages: list[int]) -> dict[str, Any]:
        return {"digest": digest(self.pool.tensors, pages)}

    def stats(self, _: Any) -> dict[str, Any]:
        return {"stats": self.agent.stats()}


def main() -> None:
    rank = Rank(json.loads(sys.stdin.readline()))
    say(address=rank.agent.address)
    with selectors.DefaultSelector() as selector:
        selector.register(sys.stdin, selectors.EVENT_READ, "order")
        selector.register(rank.agent.fileno(), selectors.EVENT_READ, "event")
        while True:
            for key, _ in selector.select():
                if key.data == "event":
                    for ev in rank.agent.poll():
                        tell(ev)
                    continue
                line = sys.stdin.readline()
                if not line:
                    rank.agent.close()
                    return
                ((order, given),) = json.loads(line).items()
                say(done=getattr(rank, order)(given) or {})


if __name__ == "__main__":
    main()
