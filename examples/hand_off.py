"""Two processes hand off one request's pages, the way an engine's connector would do it.

Run it: `.venv/bin/python examples/hand_off.py`. Decode keeps ticking while its pages fill; it only polls.
"""

from __future__ import annotations

import multiprocessing as mp
import time
from multiprocessing.connection import Connection

import numpy as np

import kvxfer as kx

LAYOUT = kx.PageLayout(layers=8, kv_heads=2, head_dim=64, page_tokens=16, dtype="float16")
SHARD = kx.Shard()
TOKENS = 500
PAGES = -(-TOKENS // LAYOUT.page_tokens)


def prefill(pipe: Connection) -> None:
    """Computes a prompt layer by layer, and pushes each as soon as it is there."""
    pool = kx.alloc(LAYOUT, SHARD, pages=64)
    with kx.Agent("prefill-0", LAYOUT, SHARD, memory=pool) as agent:
        pipe.send(agent.address)
        room = pipe.recv()
        pages = np.random.default_rng(1).permutation(64)[:PAGES].astype(np.int32)
        for layer in range(LAYOUT.layers):
            pool.k(layer)[pages] = layer + 1  # the model would do this
            pool.v(layer)[pages] = -(layer + 1)
            agent.push(
                room,
                pages,
                tokens=TOKENS,
                layers=(layer, layer + 1),
                last=layer == LAYOUT.layers - 1,
                meta=b"the first token" if layer == LAYOUT.layers - 1 else None,
            )
        agent.wait(room, timeout=30)  # from here on the pages are prefill's again


def main() -> None:
    """Decode: grants its free pages, goes on with its loop, and finds the pages full."""
    context = mp.get_context("spawn")
    pipe, other = context.Pipe()
    child = context.Process(target=prefill, args=(other,))
    child.start()
    pool = kx.alloc(LAYOUT, SHARD, pages=64)
    with kx.Agent("decode-0", LAYOUT, SHARD, memory=pool) as agent:
        source, room = pipe.recv(), kx.new_room()
        pages = np.arange(64 - PAGES, 64, dtype=np.int32)
        agent.expect(room, pages, tokens=TOKENS, source=source)
        pipe.send(room)
        ticks, done = 0, None
        while done is None:
            time.sleep(0.001)  # one step of the decode loop, for everybody else's tokens
            ticks += 1
            done = next((ev for ev in agent.poll() if ev.room == room), None)
        if done.error is not None:
            raise done.error
        full = pages[:-1]
        assert all((pool.k(n)[full] == n + 1).all() for n in range(LAYOUT.layers))
        print(f"{done.stats.bytes} bytes arrived while decode ticked {ticks} times; meta: {done.meta!r}")
    child.join(30)


if __name__ == "__main__":
    main()
