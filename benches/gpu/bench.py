"""One stage of benches/gpu/run.sh: bench.py STAGE --out FILE. It writes what it found as JSON.

Every stage runs on the stub driver too, with less of everything; its times mean nothing there, and say so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import nixl_end
import numpy as np
from gpu_driver import DriverError, Gpu, PackKernel
from gpu_scene import LIMIT, PAGE_TOKENS, TARGET, Far, Prefill, Side, layout, permuted, transports

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer._memory import ucx_wheel_dir

PTX = Path(__file__).resolve().parents[2] / "cuda" / "ptx" / "pack.ptx"

gpu = Gpu()
STUB = gpu.is_stub
TOKENS = 64 if STUB else 2000
PAGES = 2 * -(-TOKENS // PAGE_TOKENS)
ROUNDS = 2 if STUB else 20
# Hand-offs that do not count: they meet cold memory, and peers that are not in contact yet.
WARM_UP = 1 if STUB else 3

Found = dict[str, Any]


def spread(values: list[float]) -> Found:
    """Median and quarters."""
    low, middle, high = np.percentile(values, (25, 50, 75))
    return {"median": float(middle), "p25": float(low), "p75": float(high), "n": len(values)}


def percentiles(values: list[float]) -> Found:
    return {f"p{p:g}": float(np.percentile(values, p)) for p in (50, 90, 99, 100)} | {"n": len(values)}


# ---------------------------------------------------------------- what there is


def machine() -> Found:
    versions = {}
    for name in (
        "kvxfer",
        "numpy",
        "torch",
        "cupy-cuda13x",
        "cupy-cuda12x",
        "libucx-cu12",
        "nixl-cu13",
        "nixl-cu12",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    driver = Path("/proc/driver/nvidia/version")
    return {
        "gpu": gpu.name,
        "multiprocessors": gpu.multiprocessors,
        "cuda_of_the_driver": gpu.cuda,
        "driver": driver.read_text().splitlines()[0] if driver.exists() else None,
        "cpus": os.cpu_count(),
        "cpu": next(
            (
                line.split(":")[1].strip()
                for line in Path("/proc/cpuinfo").open()
                if line.startswith("model name")
            ),
            platform.machine(),
        ),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "glibc": platform.libc_ver()[1],
        "packages": versions,
        "ucx": _kvxfer._doctor_ucx(ucx_wheel_dir()),
    }


def doctor() -> Found:
    """What `kvxfer doctor` says of this host, without its own tests of fabrics."""
    done = subprocess.run(
        [sys.executable, "-m", "kvxfer.cli", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    found: Found = json.loads(done.stdout)
    return found


# ---------------------------------------------------------------- kernels


def _ways(
    kernel: PackKernel, source: int, target: int, total: int, row: int, stride: int, rows: int
) -> Found:
    """Packing and unpacking of pages in no order; of each page these rows, as far apart."""
    stream = gpu.stream()
    pages = total // (row * rows)
    at = np.random.default_rng(row).permutation(pages).astype(np.uint64) * np.uint64(rows * stride)
    apart = (at[:, None] + np.arange(rows, dtype=np.uint64) * np.uint64(stride)).reshape(-1)
    packed = np.arange(pages * rows, dtype=np.uint64) * np.uint64(row)
    scattered, gathered = (source + apart).astype(np.uint64), (target + packed).astype(np.uint64)
    found: Found = {}
    for way, from_, to in (("pack", scattered, gathered), ("unpack", gathered, scattered)):
        table, first, stripes, tiles = _kvxfer._pack_table(from_, to, np.full(len(from_), row, np.uint64))
        where = kernel.table(table)
        blocks_of = {"all": 2 * gpu.multiprocessors, "16": 16, "32": 32, "64": 64}
        # Each queues its work on a stream.
        works: dict[str, Callable[[int], None]] = {
            blocks: partial(kernel.launch, where, first, stripes, tiles, count)
            for blocks, count in blocks_of.items()
        }
        works["copy"] = partial(gpu.copy, target, source, total)
        times: dict[str, list[float]] = {name: [] for name in works}
        for n in range(ROUNDS + WARM_UP):
            for name, work in works.items():
                ms = gpu.time_ms(work, stream)
                if n >= WARM_UP:
                    times[name].append(ms)
        medians = {name: statistics.median(values) for name, values in times.items()}
        found[way] = {
            "stripes": stripes,
            # Read and written.
            "copy_gbytes_per_s": 2 * total / medians["copy"] / 1e6,
            "of_the_copy": {blocks: medians["copy"] / medians[blocks] for blocks in blocks_of},
            "gbytes_per_s": {blocks: 2 * total / medians[blocks] / 1e6 for blocks in blocks_of},
            "ms": {name: spread(values) for name, values in times.items()},
        }
        gpu.free(where)
    return found


def kernels() -> Found:
    """The pack kernel beside a copy of the same bytes from device to device, in turn."""
    kernel = PackKernel(gpu, PTX.read_bytes())
    total = (1 << 20) if STUB else (1 << 29)
    source, target = gpu.alloc(2 * total), gpu.alloc(total)
    gpu.write(source, np.random.default_rng(5).integers(0, 256, 2 * total, dtype=np.uint8))
    found: Found = {"bytes": total, "rows": {}}
    # Whole pages of one head, and one head of two of pages in NHD.
    for name, row, stride, rows in (("4 KiB", 4096, 4096, 1), ("256 B", 256, 512, PAGE_TOKENS)):
        for way, one in _ways(kernel, source, target, total, row, stride, rows).items():
            found["rows"][f"{name} {way}"] = one
    return found


# ---------------------------------------------------------------- hand-offs


def _hand_offs(
    order: str, ranks: int, heads: int, staging: str, *, tokens: int = TOKENS, rounds: int = ROUNDS
) -> Found:
    """Hand-offs from push to Success, beside a copy of the same bytes by CUDA IPC."""
    times, calls = [], []
    pages = 2 * -(-tokens // PAGE_TOKENS)
    with (
        Far(order, pages=pages, heads=heads, staging=staging) as decode,
        Prefill(gpu, order, pages=pages, ranks=ranks, staging=staging) as prefill,
    ):
        nbytes = 0
        for n in range(rounds + WARM_UP):
            src, dst = permuted(pages, tokens, 2 * n), permuted(pages, tokens, 2 * n + 1)
            # Filling many more takes the CPU too long.
            checked = n == 0 and tokens <= TOKENS
            if checked:
                prefill.fill(tokens, src)
            ids = np.array(src, np.int32)
            room = kx.new_room()
            decode.order(expect={"room": room, "pages": dst, "tokens": tokens, "source": prefill.address})
            prefill.await_grant(room)
            began = time.monotonic_ns()
            for agent in prefill.agents:
                agent.push(room, ids, tokens=tokens)
            called = time.monotonic_ns()
            ended = decode.order(wait=room)["done"]
            if ended["state"] != "Success":
                raise RuntimeError(f"{order}, {staging}: {ended}")
            if checked and (wrong := decode.order(check={"tokens": tokens, "pages": dst})["done"]):
                raise RuntimeError(wrong)
            nbytes = ended["bytes"]
            prefill.drain(room)
            if n >= WARM_UP:
                times.append(ended["at_us"] / 1e3 - began / 1e6)
                calls.append((called - began) / 1e3 / len(prefill.agents))
        stats = prefill.agents[0].stats()
        copy, by = _peer_copy(decode, nbytes, rounds)
    return {
        "tokens": tokens,
        "bytes": nbytes,
        "ms": spread(times),
        "gbytes_per_s": nbytes / statistics.median(times) / 1e6,
        "peer_copy_ms": copy,
        "peer_copy_by": by,
        "times_the_peer_copy": statistics.median(times) / copy["median"],
        "push_us": spread(calls),
        "stats": {key: stats[key] for key in stats if "deliver" in key or "packed" in key},
    }


def _peer_copy(decode: Far, nbytes: int, rounds: int) -> tuple[Found, str]:
    """Milliseconds of one contiguous copy from this process's memory to the other's, and how it was done."""
    memory = gpu.alloc(nbytes)
    try:
        order = {"handle": gpu.export(memory).hex(), "nbytes": nbytes, "rounds": rounds + WARM_UP}
        copied = decode.order(peer_copy=order)["done"]
        if "error" not in copied:
            if not copied["right"]:
                raise RuntimeError("the peer copy's bytes are wrong")
            return spread(copied["ms"][WARM_UP:]), "CUDA IPC"
        why = copied["error"]
    except DriverError as error:
        why = str(error)
    # Where IPC is not to be had, a copy within this process is the same on the same GPU.
    target, stream = gpu.alloc(nbytes), gpu.stream()
    work = partial(gpu.copy, target, memory, nbytes)
    times = [gpu.time_ms(work, stream) for _ in range(rounds + WARM_UP)]
    return spread(times[WARM_UP:]), f"a copy within the process: {why}"


def _each(scenes: dict[str, Callable[[], Found]]) -> Found:
    """All of them; one that fails leaves its error, and the others run."""
    found: Found = {}
    for name, scene in scenes.items():
        try:
            found[name] = scene()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        print(f"{name}: {found[name].get('ms', found[name])}", flush=True)
    return found


def hand_off() -> Found:
    """One rank's slice as it goes by default, and two ranks of TP8 to one of TP4 in both orders."""
    return _each(
        {
            "one rank, HND": partial(_hand_offs, "HND", 1, 1, "auto"),
            "one rank, HND, packed": partial(_hand_offs, "HND", 1, 1, "always"),
            "TP8 to TP4, HND": partial(_hand_offs, "HND", 2, 2, "auto"),
            "TP8 to TP4, NHD": partial(_hand_offs, "NHD", 2, 2, "auto"),
            "TP8 to TP4, NHD, packed": partial(_hand_offs, "NHD", 2, 2, "always"),
            "one rank, HND, 16 times the tokens": partial(
                _hand_offs, "HND", 1, 1, "auto", tokens=16 * TOKENS, rounds=min(ROUNDS, 5)
            ),
        }
    )


def single_writes() -> Found:
    """The same as single writes of 4 KiB and of 256 bytes, which may take long."""
    rounds = min(ROUNDS, 3)
    return _each(
        {
            "one rank, HND, single writes": partial(_hand_offs, "HND", 1, 1, "never", rounds=rounds),
            "TP8 to TP4, NHD, single writes": partial(_hand_offs, "NHD", 2, 2, "never", rounds=rounds),
        }
    )


def protocols() -> Found:
    """What UCX says that it does with such writes: its own tables, for whoever asks why something is slow."""
    script = "import bench; bench.ROUNDS, bench.WARM_UP = 1, 0; bench._hand_offs('HND', 1, 1, 'auto')"
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "UCX_PROTO_INFO": "y", "UCX_LOG_FILE": f"{folder}/%p"},
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )
        said = [path.read_text(errors="replace").splitlines() for path in sorted(Path(folder).iterdir())]
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return {"said": [lines[:1500] for lines in said]}


# ---------------------------------------------------------------- a decode loop


class Loop:
    """A decode step: a CUDA graph of a model's matrix products with torch, or the stub's stand-in for it."""

    LAYERS, HIDDEN, BATCH = 64, 5120, 32

    def __init__(self) -> None:
        self._stream = gpu.stream()
        if STUB:
            self._a, self._b = gpu.alloc(1 << 20), gpu.alloc(1 << 20)
            gpu.begin_capture(self._stream)
            graph = gpu.end_capture(self._stream)
            self._launch: Callable[[], None] = lambda: gpu.launch(graph, self._stream)
            self._wait: Callable[[], None] = lambda: gpu.sync(self._stream)
            return
        import torch

        # As much memory as one rank of TP4 of a 32B model reads a step: 16 GB.
        weights = [
            torch.randn(self.HIDDEN, 5 * self.HIDDEN, dtype=torch.bfloat16, device="cuda") * 0.01
            for _ in range(self.LAYERS)
        ]
        x = torch.randn(self.BATCH, self.HIDDEN, dtype=torch.bfloat16, device="cuda")

        def step() -> Any:
            y = x
            for weight in weights:
                y = torch.tanh((y @ weight)[:, : self.HIDDEN])
            return y

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.synchronize()
        recorded = torch.cuda.CUDAGraph()
        with torch.cuda.graph(recorded):
            self._out = step()
        self._kept = (weights, x)
        self._launch = recorded.replay
        self._wait = torch.cuda.current_stream().synchronize

    def step(self) -> float:
        """Milliseconds of one step, with the wait for its end that a decode loop has anyway."""
        began = time.perf_counter_ns()
        self._launch()
        self._wait()
        return (time.perf_counter_ns() - began) / 1e6


def loop() -> Found:
    """What hand-offs cost a loop that pushes them, and one at which they arrive: one each ten steps."""
    steps, blocks, every = (6, 2, 3) if STUB else (50, 8, 10)
    found: Found = {"tokens_of_a_hand_off": TOKENS, "steps_between_hand_offs": every}
    decode_loop = Loop()
    for _ in range(5):
        decode_loop.step()
    calls: dict[str, list[float]] = {"push_us": [], "poll_us": [], "expect_us": []}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.perf_counter_ns()
        answer = call()
        calls[name].append((time.perf_counter_ns() - began) / 1e3)
        return answer

    # Pushes out of this process.
    with Far("HND", pages=PAGES, heads=1) as decode, Prefill(gpu, "HND", pages=PAGES, ranks=1) as prefill:
        agent = prefill.agents[0]
        src = permuted(PAGES, TOKENS, 1)
        prefill.fill(TOKENS, src)
        ids = np.array(src, np.int32)
        rooms: list[int] = []

        def grant() -> None:
            room = kx.new_room()
            dst = permuted(PAGES, TOKENS, 100 + len(rooms))
            decode.order(expect={"room": room, "pages": dst, "tokens": TOKENS, "source": prefill.address})
            prefill.await_grant(room)
            rooms.append(room)

        grant()
        agent.push(rooms[-1], ids, tokens=TOKENS)
        prefill.drain(rooms[-1])
        pending: list[int] = []

        def push(n: int) -> None:
            if n % every == 0:
                pending.append(rooms.pop())
                timed("push_us", lambda: agent.push(pending[-1], ids, tokens=TOKENS))
            timed("poll_us", agent.poll)

        times: dict[str, list[float]] = {"without": [], "with": []}
        rooms.clear()
        for block in range(blocks):
            for name in ("without", "with") if block % 2 == 0 else ("with", "without"):
                for n in range(steps):
                    if name == "with" and n % every == 0:
                        # The grant takes another process's time, and not the loop's.
                        for room in pending:
                            _ended(decode, room)
                        pending.clear()
                        grant()
                    began = time.perf_counter_ns()
                    if name == "with":
                        push(n)
                    called = (time.perf_counter_ns() - began) / 1e6
                    times[name].append(called + decode_loop.step())
                for room in pending:
                    _ended(decode, room)
                pending.clear()
        found["pushing"] = _compared(times)
        agent.poll()

    # Arrivals in this process.
    whole = layout("HND", 1)
    side = Side(gpu, whole, kx.Shard(), PAGES, TARGET)
    with (
        kx.Agent(
            "d", whole, kx.Shard(), memory=side.memory, role="decode", engine="d", ucx_tls=transports(gpu)
        ) as agent,
        Far("HND", pages=PAGES, role="prefill", ranks=1) as far,
    ):
        address = far.order(address=None)["done"]
        far.order(fill={"tokens": TOKENS, "pages": src})
        dst = np.array(permuted(PAGES, TOKENS, 3), np.int32)

        def one(room: int) -> None:
            timed("expect_us", lambda: agent.expect(room, dst, tokens=TOKENS, source=address))

        room = kx.new_room()
        one(room)
        far.order(push={"room": room, "pages": src, "tokens": TOKENS})
        agent.wait(room, timeout=LIMIT)
        far.order(drain=room)
        calls["expect_us"].clear()
        times = {"without": [], "with": []}
        waiting: int | None = None
        for block in range(blocks):
            for name in ("without", "with") if block % 2 == 0 else ("with", "without"):
                for n in range(steps):
                    began = time.perf_counter_ns()
                    if name == "with" and n % every == 0:
                        waiting = kx.new_room()
                        one(waiting)
                    if name == "with":
                        timed("poll_us", agent.poll)
                    called = (time.perf_counter_ns() - began) / 1e6
                    if name == "with" and n % every == 0 and waiting is not None:
                        # Posted here, so that it is under way while the steps run.
                        far.order(push={"room": waiting, "pages": src, "tokens": TOKENS})
                    times[name].append(called + decode_loop.step())
                    if name == "with" and n % every == every - 1 and waiting is not None:
                        agent.wait(waiting, timeout=LIMIT)
                        far.order(drain=waiting)
                        waiting = None
                if waiting is not None:
                    agent.wait(waiting, timeout=LIMIT)
                    far.order(drain=waiting)
                    waiting = None
        found["receiving"] = _compared(times)
        agent.poll()
        wrong = side.wrong(TOKENS, [int(n) for n in dst])
        if wrong is not None:
            raise RuntimeError(wrong)
    return found | {name: percentiles(values) for name, values in calls.items()}


def _ended(decode: Far, room: int) -> None:
    ended = decode.order(wait=room)["done"]
    if ended["state"] != "Success":
        raise RuntimeError(f"room {room}: {ended}")


def _compared(times: dict[str, list[float]]) -> Found:
    medians = {name: statistics.median(values) for name, values in times.items()}
    means = {name: statistics.fmean(values) for name, values in times.items()}
    return {
        "step_ms": {name: spread(values) for name, values in times.items()},
        "slower_by_percent": 100 * (medians["with"] / medians["without"] - 1),
        "mean_slower_by_percent": 100 * (means["with"] / means["without"] - 1),
    }


def nixl() -> Found:
    """NIXL on pages of the same kind, if its wheel is here."""
    return nixl_end.compare(TOKENS, PAGES, ROUNDS, WARM_UP)


STAGES: dict[str, Callable[[], Found]] = {
    "machine": machine,
    "doctor": doctor,
    "kernels": kernels,
    "hand_off": hand_off,
    "loop": loop,
    "nixl": nixl,
    "single_writes": single_writes,
    "protocols": protocols,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    began = time.monotonic()
    found = STAGES[options.stage]()
    found["stage_s"] = round(time.monotonic() - began, 1)
    found["stub"] = STUB
    options.out.write_text(json.dumps(found, indent=1) + "\n")
    failed = [name for name, one in found.items() if isinstance(one, dict) and "error" in one]
    # What doctor finds wrong with a host is no failure of it.
    if failed and options.stage != "doctor":
        sys.exit(f"failed: {', '.join(failed)}")
    faults = gpu.faults()
    if faults:
        sys.exit(f"what the driver does not allow: {faults}")
    print(f"{options.stage}: done in {found['stage_s']} s")


if __name__ == "__main__":
    main()
