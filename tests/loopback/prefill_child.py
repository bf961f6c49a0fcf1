"""A prefill rank in a process of its own, driven by JSON lines on its standard input.

Its pool is filled from a seed, so that the other process knows every byte of it. Orders are
`{"push": {...arguments of Agent.push}}`, `{"fill": seed}`, `{"cancel": room}`, `{"open": room}`, `{"close": true}`;
each is answered by one line. Events are printed as they come, as `{"event": ...}`.
"""

from __future__ import annotations

import json
import selectors
import sys
from typing import Any

import numpy as np

import kvxfer as kx


def fill(pool: kx.Pool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for tensor in pool.tensors.values():
        flat = tensor.reshape(-1).view(np.uint8)
        flat[:] = np.frombuffer(rng.bytes(flat.nbytes), np.uint8)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    setup = json.loads(sys.stdin.readline())
    layout, shard = kx.PageLayout(**setup["layout"]), kx.Shard(**setup["shard"])
    tls = setup.get("agent", {}).get("ucx_tls")
    pool = kx.alloc(layout, shard, pages=setup["pages"], fabric=setup["alloc"], ucx_tls=tls)
    fill(pool, setup["seed"])
    memory: Any = pool
    if setup.get("engine_memory"):
        memory = {key: np.array(tensor) for key, tensor in pool.tensors.items()}
        by_layer: dict[int, list[Any]] = {}
        for (_, layer, _), tensor in sorted(memory.items()):
            by_layer.setdefault(layer, []).append(tensor)
        memory = {layer: tuple(parts) for layer, parts in by_layer.items()}
    agent = kx.Agent(setup["name"], layout, shard, memory=memory, **setup.get("agent", {}))
    say(address=agent.address)
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(agent.fileno(), selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not sys.stdin:
                for ev in agent.poll():
                    error = type(ev.error).__name__ if ev.error else None
                    say(event=dict(room=ev.room, state=ev.state, released=ev.released, error=error))
                continue
            line = sys.stdin.readline()
            if not line:
                agent.close()
                return
            order = json.loads(line)
            if "push" in order:
                arguments = order["push"]
                arguments["pages"] = np.array(arguments["pages"], np.int32)
                meta = arguments.pop("meta", None)
                agent.push(**arguments, meta=meta.encode() if meta else None)
            elif "fill" in order:
                fill(pool, order["fill"])
            elif "cancel" in order:
                agent.cancel(order["cancel"])
            elif "open" in order:
                agent.open(order["open"])
            say(done=True)


if __name__ == "__main__":
    main()
