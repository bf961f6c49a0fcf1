"""Code of a test that runs in a process of its own."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap

from ways import Way

SUPPORT = pathlib.Path(__file__).parent

START = """
import gc, json, os, resource, sys
sys.path.insert(0, {support!r})
import numpy as np
import kvxfer as kx
from guarded import footprint
FABRIC, TLS = {fabric!r}, {tls!r}
LAYOUT = kx.PageLayout(layers=2, kv_heads=1, head_dim=64, page_tokens=16, dtype="float16")
def pool(pages=8, fabric=FABRIC):
    return kx.alloc(LAYOUT, kx.Shard(), pages=pages, fabric=fabric, ucx_tls=TLS)
def agent(memory, name="it", **more):
    return kx.Agent(name, LAYOUT, kx.Shard(), memory=memory, fabric=FABRIC, ucx_tls=TLS, **more)
def whole(source, target):
    room = kx.new_room()
    target.expect(room, [1, 3], tokens=32, source=source.address)
    source.push(room, [2, 4], tokens=32)
    assert target.wait(room, timeout=30).state == "Success"
def set_limit(name, soft):
    which = getattr(resource, "RLIMIT_" + name)
    resource.setrlimit(which, (soft, resource.getrlimit(which)[1]))
"""


def script(way: Way, code: str) -> str:
    return START.format(support=str(SUPPORT), fabric=way.fabric, tls=way.tls) + textwrap.dedent(code)


def run(way: Way, code: str, *, prefix: tuple[str, ...] = (), seconds: float = 60) -> str:
    """Runs this in a process of its own, with an agent's means at hand."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", script(way, code)],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    # UCX writes its warnings to standard output.
    return "\n".join(line for line in done.stdout.splitlines() if " UCX " not in line)
