"""A rank in a process of its own, driven by JSON lines on its standard input.

Its pool is filled from a seed, so that the other process knows every byte of it. An order is an object with
one key, the name of a method of `Rank` here, and its argument: `{"push": {...arguments of Agent.push}}`,
`{"cancel": room}`. Each is answered by one line, `{"done": ...}`, once it was carried out. Events are printed
as they come, as `{"event": ...}`. The end of the input closes the agent.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import selectors
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
from guarded import Guarded, footprint, scramble

import kvxfer as kx

Tensors = Mapping[tuple[int, int, str], Any]


def layouts(given: dict[str, Any] | list[dict[str, Any]]) -> Any:
    """A layout, or one of each group."""
    if not isinstance(given, dict):
        return [layouts(group) for group in given]
    if "state" in given:
        given = {**given, "state": [kx.StateBlock(*block) for block in given["state"]]}
    return kx.PageLayout(**given)


def ids(pages: list[Any]) -> Any:
    """A page list as engines have it, or one of each group."""
    if pages and isinstance(pages[0], list):
        return [np.array(group, np.int64) for group in pages]
    return np.array(pages, np.int64)


def fill(pool: kx.Pool, seed: int) -> None:
    """Words of eight bytes, none of which is there twice in any region of any seed."""
    for n, tensor in enumerate(pool.tensors.values()):
        # Pages with gaps between them are no one array of bytes.
        whole = tensor if tensor.flags.c_contiguous else np.empty_like(tensor, order="C")
        flat = whole.reshape(-1).view(np.uint8)
        words = scramble(np.arange(-(-flat.nbytes // 8), dtype=np.uint64), seed, n)
        flat[:] = words.view(np.uint8)[: flat.nbytes]
        if whole is not tensor:
            tensor[...] = whole


def digest(tensors: Tensors, pages: list[int]) -> str:
    """One checksum over these pages of every region, in their order."""
    found = hashlib.sha256()
    for _, tensor in sorted(tensors.items()):
        found.update(np.ascontiguousarray(np.asarray(tensor)[pages]).view(np.uint8).data)
    return found.hexdigest()


# Standard output is UCX's too, which writes its warnings there: they go to standard error.
OUT = os.fdopen(os.dup(1), "w")


def say(**what: Any) -> None:
    print(json.dumps(what), file=OUT, flush=True)


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
        layout, shard = layouts(setup["layout"]), kx.Shard(**setup["shard"])
        tls = setup["agent"].get("ucx_tls")
        self.footprint_before = footprint()
        self.guarded: Guarded | None = None
        self.pool: kx.Pool
        memory: Any
        if setup["guard"]:
            self.guarded = Guarded(
                layout, shard, pages=setup["pages"], seed=setup["seed"], fabric=setup["alloc"], tls=tls
            )
            self.pool = self.guarded.pool
            memory = self.guarded.memory
            self.tensors: Tensors = memory
        else:
            self.pool = kx.alloc(layout, shard, pages=setup["pages"], fabric=setup["alloc"], ucx_tls=tls)
            fill(self.pool, setup["seed"])
            memory = self.pool
            self.tensors = self.pool.tensors
        self.pushes: dict[int, kx.Push] = {}
        if setup["engine_memory"]:
            by_layer: dict[int, list[Any]] = {}
            for (_, layer, _), tensor in sorted(self.pool.tensors.items()):
                by_layer.setdefault(layer, []).append(np.array(tensor))
            memory = {layer: tuple(parts) for layer, parts in by_layer.items()}
        self.agent = kx.Agent(setup["name"], layout, shard, memory=memory, **setup["agent"])

    def push(self, given: dict[str, Any]) -> dict[str, Any]:
        given["pages"] = ids(given["pages"])
        meta = given.pop("meta", None)
        if given.get("layers") is not None:
            given["layers"] = tuple(given["layers"])
        push = self.agent.push(**given, meta=meta.encode() if meta is not None else None)
        self.pushes[push.id] = push
        return {"push": push.id}

    def expect(self, given: dict[str, Any]) -> None:
        given["pages"] = ids(given["pages"])
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
        return {"digest": digest(self.tensors, pages)}

    def stats(self, _: Any) -> dict[str, Any]:
        return {"stats": self.agent.stats()}

    def state(self, room: int) -> dict[str, Any]:
        return {"state": self.agent.state(room)}

    def evict(self, peer: str) -> None:
        self.agent.evict(peer)

    def footprint(self, _: Any) -> dict[str, Any]:
        return footprint()

    def settle(self, pages: list[int]) -> None:
        assert self.guarded
        self.guarded.settle(pages)

    def received(self, given: dict[str, Any]) -> None:
        assert self.guarded
        self.guarded.received(**given)

    def rest(self, granted: list[int]) -> None:
        assert self.guarded
        self.guarded.rest(granted)

    def arrived(self, given: dict[str, Any]) -> dict[str, Any]:
        """Whether something was written to these pages, waited for."""
        assert self.guarded
        until = time.monotonic() + given["seconds"]
        while not (found := self.guarded.arrived(given["pages"])) and time.monotonic() < until:
            pass
        return {"arrived": found}

    def limit(self, given: dict[str, int]) -> None:
        """Sets soft limits of this process, named as in `resource`."""
        for name, value in given.items():
            which = getattr(resource, f"RLIMIT_{name}")
            resource.setrlimit(which, (value, resource.getrlimit(which)[1]))

    def close(self, _: Any) -> dict[str, Any]:
        """Closes the agent: what it gives back, and what the process has open afterwards."""
        left = [{"room": one.room, "pages": one.pages, "peers": one.peers} for one in self.agent.close()]
        for ev in self.agent.poll():
            tell(ev)
        return {"left": left, "footprint": footprint()}


def main() -> None:
    os.dup2(2, 1)
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
                try:
                    say(done=getattr(rank, order)(given) or {})
                except kx.KvxferError as error:
                    say(done={"refused": type(error).__name__, "text": str(error)})


if __name__ == "__main__":
    main()
