"""NIXL on the same pages: the source writes them, in two processes on one GPU. Run by bench.py.

On the stub driver a device's memory is the host's, and is given to NIXL as such.
"""

from __future__ import annotations

import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
from gpu_driver import Gpu
from gpu_far import answers
from gpu_scene import PAGE_TOKENS, SOURCE, TARGET, Side, layout, permuted

import kvxfer as kx

NAMES = ("nixl_cu13", "nixl_cu12", "nixl")


def library() -> Any:
    """NIXL's module, whichever wheel is installed; or the reasons why there is none."""
    reasons = []
    for name in NAMES:
        try:
            found = importlib.import_module(name)
        except Exception as error:  # A library of it may be missing, in any way.
            reasons.append(f"{name}: {error}")
            continue
        if hasattr(found, "nixl_agent"):
            return found
        try:
            return importlib.import_module(f"{name}._api")
        except Exception as error:
            reasons.append(f"{name}._api: {error}")
    return reasons


class End:
    """One side: a rank's pages, registered with an agent of NIXL's."""

    def __init__(self, name: str, pages: int, background: int) -> None:
        nixl = library()
        self.gpu = Gpu()
        self.kind = "DRAM" if self.gpu.is_stub else "VRAM"
        self.side = Side(self.gpu, layout("HND", 1), kx.Shard(), pages, background)
        self.bases = list(self.side.addresses.values())
        self.agent = nixl.nixl_agent(name, nixl.nixl_agent_config(backends=["UCX"]))
        regions = [(base, self.side.nbytes, self.gpu.ordinal, "") for base in self.bases]
        if not self.agent.register_memory(regions, self.kind):
            raise RuntimeError("NIXL did not register the memory")

    def rows(self, bases: list[int], ids: list[int]) -> Any:
        """Pages, as NIXL takes them: address, length, device."""
        size = self.side.page_bytes
        at = np.array(bases, np.uint64)[:, None] + np.array(ids, np.uint64) * np.uint64(size)
        rows = np.zeros((at.size, 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = at.reshape(-1), size, self.gpu.ordinal
        return rows


def compare(tokens: int, pages: int, rounds: int, warm_up: int) -> dict[str, Any]:
    """Milliseconds of hand-offs of this many tokens, from the call until NIXL says that it is done."""
    found = library()
    if isinstance(found, list):
        return {"absent": found}
    child = subprocess.Popen(
        [sys.executable, __file__, str(pages)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ.copy(),
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        other = json.loads(child.stdout.readline())
        end = End("prefill", pages, SOURCE)
        name = end.agent.add_remote_agent(bytes.fromhex(other["metadata"]))
        name = name.decode() if isinstance(name, bytes) else name
        times: dict[str, list[float]] = {"described": [], "prepared": []}
        whole = list(range(pages))
        ours = end.agent.prep_xfer_dlist("NIXL_INIT_AGENT", end.rows(end.bases, whole), end.kind)
        theirs = end.agent.prep_xfer_dlist(name, end.rows(other["bases"], whole), end.kind)
        first = np.arange(len(end.bases), dtype=np.int32)[:, None] * np.int32(pages)
        wrong = None
        for n in range(rounds + warm_up):
            src, dst = permuted(pages, tokens, 2 * n), permuted(pages, tokens, 2 * n + 1)
            if n == 0:
                end.side.fill(tokens, src)
            for way, values in times.items():
                began = time.perf_counter_ns()
                if way == "prepared":
                    indices = [(first + np.array(ids, np.int32)).reshape(-1) for ids in (src, dst)]
                    handle = end.agent.make_prepped_xfer("WRITE", ours, indices[0], theirs, indices[1])
                else:
                    here = end.agent.get_xfer_descs(end.rows(end.bases, src), end.kind)
                    there = end.agent.get_xfer_descs(end.rows(other["bases"], dst), end.kind)
                    handle = end.agent.initialize_xfer("WRITE", here, there, name)
                state = end.agent.transfer(handle)
                while state not in ("DONE", "ERR"):
                    state = end.agent.check_xfer_state(handle)
                if state == "ERR":
                    raise RuntimeError("NIXL says that the transfer failed")
                if n >= warm_up:
                    values.append((time.perf_counter_ns() - began) / 1e6)
                end.agent.release_xfer_handle(handle)
            if n == 0:
                child.stdin.write(json.dumps({"tokens": tokens, "pages": dst}) + "\n")
                child.stdin.flush()
                wrong = json.loads(child.stdout.readline())
        nbytes = -(-tokens // PAGE_TOKENS) * end.side.page_bytes * len(end.bases)
        return {
            "module": found.__name__,
            "bytes": nbytes,
            "wrong": wrong,
            "ms": {way: statistics.median(values) for way, values in times.items()},
        }
    finally:
        child.stdin.close()
        try:
            child.wait(10)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def main() -> None:
    """The target."""
    out = answers()
    end = End("decode", int(sys.argv[1]), TARGET)
    print(json.dumps({"metadata": end.agent.get_agent_metadata().hex(), "bases": end.bases}), file=out)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(end.side.wrong(order["tokens"], order["pages"])), file=out)


if __name__ == "__main__":
    main()
