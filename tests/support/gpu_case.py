"""One case of `tests/gpu`, in a process of its own: gpu_case.py CASE [arguments].

It runs on a GPU, or on the stub driver where `KVXFER_CUDA_LIBRARY` names it; there with fewer tokens. A case
that cannot run here ends with status 77 and the reason.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from gpu_driver import Gpu, PackKernel
from gpu_scene import LIMIT, PAGE_TOKENS, Far, Prefill, Side, layout, permuted

import kvxfer as kx
from kvxfer import _kvxfer

PTX = Path(__file__).resolve().parents[2] / "cuda" / "ptx" / "pack.ptx"
SKIPPED = 77

gpu = Gpu()
TOKENS = 100 if gpu.is_stub else 500
REAL_TOKENS = 100 if gpu.is_stub else 2000
PAGES = -(-REAL_TOKENS // PAGE_TOKENS) + 8
# Long enough for a write that did not wait to be seen.
EARLY_S = 0.1


def cannot(why: str) -> NoReturn:
    print(why)
    sys.exit(SKIPPED)


def torch() -> Any:
    """torch, if this is a GPU that it can use."""
    if gpu.is_stub:
        cannot("torch finds no GPU on the stub driver")
    try:
        import torch as found
    except ImportError:
        cannot("torch is not installed")
    if not found.cuda.is_available():
        cannot("this torch has no CUDA")
    return found


def hand_off(
    order: str,
    *,
    staging: str = "auto",
    source: str = "device",
    target: str = "device",
    rounds: int = 2,
    pairs: int = 1,
    tokens: int = REAL_TOKENS,
) -> None:
    """Pairs of ranks of TP8 to one of TP4 each, in two processes; every byte as the oracle has it, also
    around the pages.
    """
    with (
        Far(order, pages=PAGES, heads=2 * pairs, ranks=pairs, kind=target, staging=staging) as decode,
        Prefill(gpu, order, pages=PAGES, ranks=2 * pairs, kind=source, staging=staging) as prefill,
    ):
        for n in range(rounds):
            src, dst = permuted(PAGES, tokens, 2 * n), permuted(PAGES, tokens, 2 * n + 1)
            prefill.fill(tokens, src)
            decode.order(paint=True)
            room = kx.new_room()
            decode.order(expect={"room": room, "pages": dst, "tokens": tokens, "source": prefill.address})
            prefill.push(room, src, tokens)
            ended = decode.order(wait=room)["done"]
            assert ended["state"] == "Success", ended
            assert decode.order(check={"tokens": tokens, "pages": dst})["done"] is None
            prefill.drain(room)
        print("prefill:", prefill.agents[0].stats())
        print("decode:", decode.order(stats=True)["done"])


def hnd() -> None:
    """Head-major pages of TP8 are whole parts of TP4's: 4 KiB each, written where they belong."""
    hand_off("HND")


def all_ranks() -> None:
    """All eight ranks to all four."""
    hand_off("HND", pairs=4, tokens=TOKENS, rounds=1)


def nhd() -> None:
    """Token-major pages fall into runs of 256 bytes."""
    hand_off("NHD", staging="always")


def nhd_direct() -> None:
    """The same as single writes."""
    hand_off("NHD", staging="never", rounds=1)


def from_pinned() -> None:
    """Pages that were offloaded to pinned memory of the host go from there to the device."""
    hand_off("HND", source="pinned")


def to_pinned() -> None:
    hand_off("HND", target="pinned")


def from_host() -> None:
    """Memory of the host that CUDA knows nothing of."""
    hand_off("HND", source="host")


def events() -> dict[str, Callable[[int], Any]]:
    """Every form of what a push waits for, made of a stream of this process."""

    def raw(stream: int) -> int:
        event = gpu.event()
        gpu.record(event, stream)
        return event

    forms: dict[str, Callable[[int], Any]] = {
        "event": raw,
        "protocol": _Protocol,
    }
    if gpu.is_stub:
        return forms
    try:
        import torch as found
    except ImportError:
        pass
    else:
        forms["torch stream"] = found.cuda.ExternalStream

        def torch_event(stream: int) -> Any:
            event = found.cuda.Event()
            event.record(found.cuda.ExternalStream(stream))
            return event

        forms["torch event"] = torch_event
    try:
        import cupy
    except ImportError:
        pass
    else:
        forms["cupy stream"] = cupy.cuda.ExternalStream

        def cupy_event(stream: int) -> Any:
            event = cupy.cuda.Event(disable_timing=True)
            event.record(cupy.cuda.ExternalStream(stream))
            return event

        forms["cupy event"] = cupy_event
    return forms


class _Protocol:
    """A stream by NVIDIA's protocol, which is looked up on the type."""

    def __init__(self, stream: int) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream


def late_event() -> None:
    """The pages are written by work that stands still: nothing is sent until it is done."""
    forms = events()
    stream = gpu.stream()
    with (
        Far("HND", pages=PAGES) as decode,
        Prefill(gpu, "HND", pages=PAGES) as prefill,
    ):
        (one, two) = prefill.sides
        # What the pages will be, beside them.
        ready = {}
        for side in (one, two):
            side.fill(TOKENS, src := permuted(PAGES, TOKENS, 1))
            for key, at in side.addresses.items():
                ready[side, key] = gpu.alloc(side.nbytes)
                gpu.copy(ready[side, key], at, side.nbytes, stream)
        gpu.sync(stream)
        for n, (name, form) in enumerate(forms.items()):
            for side in (one, two):
                side.paint()
            decode.order(paint=True)
            room, dst = kx.new_room(), permuted(PAGES, TOKENS, 10 + n)
            decode.order(expect={"room": room, "pages": dst, "tokens": TOKENS, "source": prefill.address})
            prefill.await_grant(room)
            gate = gpu.gate(stream)
            try:
                for (side, key), saved in ready.items():
                    gpu.copy(side.addresses[key], saved, side.nbytes, stream)
                began = time.perf_counter()
                prefill.push(room, src, TOKENS, event=form(stream))
                assert time.perf_counter() - began < LIMIT / 4, f"{name}: push waited for the device"
                time.sleep(EARLY_S)
                # No token of it has come: all is background.
                assert decode.order(check={"tokens": 0, "pages": []})["done"] is None, f"{name}: sent early"
                assert decode.order(state=room)["done"] != ["Success"], name
            finally:
                gate.open()
            ended = decode.order(wait=room)["done"]
            assert ended["state"] == "Success", (name, ended)
            assert decode.order(check={"tokens": TOKENS, "pages": dst})["done"] is None, name
            prefill.drain(room)
            print("waited for:", name)


def layers() -> None:
    """An event for each quarter of the layers: nothing succeeds before the last of them, and all arrive."""
    streams = [gpu.stream() for _ in range(4)]
    with (
        Far("HND", pages=PAGES) as decode,
        Prefill(gpu, "HND", pages=PAGES) as prefill,
    ):
        src, dst = permuted(PAGES, TOKENS, 1), permuted(PAGES, TOKENS, 2)
        prefill.fill(TOKENS, src)
        room = kx.new_room()
        decode.order(expect={"room": room, "pages": dst, "tokens": TOKENS, "source": prefill.address})
        gates = [gpu.gate(stream) for stream in streams]
        for n, stream in enumerate(streams):
            prefill.push(
                room, src, TOKENS, layers=(16 * n, 16 * n + 16), event=_Protocol(stream), last=n == 3
            )
        # A driver may run the host functions that hold the streams on one thread, in the order of the calls.
        for gate in reversed(gates) if gpu.is_stub else gates:
            time.sleep(0.02)
            assert decode.order(state=room)["done"] != ["Success"]
            gate.open()
        ended = decode.order(wait=room)["done"]
        assert ended["state"] == "Success", ended
        assert decode.order(check={"tokens": TOKENS, "pages": dst})["done"] is None
        prefill.drain(room)


def capture() -> None:
    """A graph that another thread captures in the global mode is whole, while pushes wait for events."""
    stream, captured = gpu.stream(), gpu.stream()
    a, b = gpu.alloc(1 << 20), gpu.alloc(1 << 20)
    with (
        Far("HND", pages=PAGES) as decode,
        Prefill(gpu, "HND", pages=PAGES) as prefill,
    ):
        src, dst = permuted(PAGES, TOKENS, 1), permuted(PAGES, TOKENS, 2)
        prefill.fill(TOKENS, src)
        room = kx.new_room()
        decode.order(expect={"room": room, "pages": dst, "tokens": TOKENS, "source": prefill.address})
        prefill.await_grant(room)
        gate = gpu.gate(stream)
        failed: list[BaseException] = []

        def capture_graph() -> None:
            try:
                gpu.use()
                gpu.begin_capture(captured)
                for _ in range(20):
                    gpu.copy(b, a, 1 << 20, captured)
                    # The transfer thread asks the push's event many times meanwhile.
                    time.sleep(0.005)
                graph = gpu.end_capture(captured)
                gpu.launch(graph, captured)
                gpu.sync(captured)
            except BaseException as error:
                failed.append(error)

        prefill.push(room, src, TOKENS, event=_Protocol(stream))
        thread = threading.Thread(target=capture_graph)
        thread.start()
        thread.join(LIMIT)
        gate.open()
        assert not failed, failed
        ended = decode.order(wait=room)["done"]
        assert ended["state"] == "Success", ended
        assert decode.order(check={"tokens": TOKENS, "pages": dst})["done"] is None
        prefill.drain(room)


def kernels() -> None:
    """The kernel's copies of random tables are those of the table, and it writes nothing else."""
    kernel, stream = PackKernel(gpu, PTX.read_bytes()), gpu.stream()
    rng = np.random.default_rng(11)
    size = 4 << 20
    for n in range(12 if gpu.is_stub else 60):
        rows = int(rng.integers(1, 400))
        aligned = int(rng.choice([1, 2, 4, 8, 16, 256]))
        longest = int(rng.choice([64, 300, 4096, 9000]))
        lens = rng.integers(1, max(2, longest // aligned), rows, dtype=np.int64) * aligned
        if rng.random() < 0.5:
            # Rows at even distances become stripes.
            lens[:] = lens[0]
        gaps = rng.integers(0, 4, rows, dtype=np.int64) * aligned
        if rng.random() < 0.5:
            gaps[:] = gaps[0]
        starts = np.cumsum(lens + gaps) - lens - gaps
        fits = starts + lens <= size
        lens, starts = lens[fits], starts[fits]
        packed = np.cumsum(lens) - lens
        packing = bool(rng.random() < 0.5)
        from_, to = (starts, packed) if packing else (packed, starts)
        source, target = gpu.alloc(size), gpu.alloc(size)
        data = rng.integers(0, 256, size, dtype=np.uint8)
        gpu.write(source, data)
        gpu.fill(target, 0xEE, size)
        table, first, stripes, tiles = _kvxfer._pack_table(
            (source + from_).astype(np.uint64), (target + to).astype(np.uint64), lens.astype(np.uint64)
        )
        at = kernel.table(table)
        blocks = int(rng.choice([1, 3, 16, 4 * gpu.multiprocessors]))
        kernel.launch(at, first, stripes, tiles, blocks, stream)
        gpu.sync(stream)
        want = np.full(size, 0xEE, np.uint8)
        for s, d, length in zip(from_.tolist(), to.tolist(), lens.tolist(), strict=True):
            want[d : d + length] = data[s : s + length]
        have = gpu.read(target, size)
        bad = np.flatnonzero(have != want)
        assert len(bad) == 0, (
            f"table {n} of {stripes} stripes: byte {bad[0]} is {have[bad[0]]}, not {want[bad[0]]}"
        )
        for address in (source, target, at):
            gpu.free(address)


def memory() -> None:
    """What can be handed off is taken, and what cannot is refused with what to do."""
    stream = gpu.stream()
    small = kx.PageLayout(layers=1, kv_heads=2, head_dim=64, page_tokens=16, dtype="float16")
    half = small.page_extents(kx.Shard())[0][1] * 64
    nbytes = 2 * half
    tls = "tcp,self,cuda_copy" if gpu.is_stub else None

    def start(address: int) -> tuple[str, ...]:
        given = [tuple(kx.DeviceMemory(address + n * half, half, 0) for n in range(2))]
        with kx.Agent("x", small, kx.Shard(), memory=given, ucx_tls=tls, role="prefill") as agent:
            return agent.fabrics

    assert start(gpu.alloc(nbytes)) == ("ucx",)
    assert "shm" in start(gpu.pinned(nbytes))
    for address, text in (
        (gpu.managed(nbytes), "managed memory"),
        (gpu.pooled(nbytes, stream), "expandable_segments:False"),
        (gpu.virtual(nbytes), "expandable_segments:False"),
    ):
        with pytest.raises(kx.NotSupported, match=text):
            start(address)
    plain = np.zeros(nbytes, np.uint8)
    with pytest.raises(kx.BadArgument, match="CUDA does not know it"):
        start(plain.ctypes.data)


def torch_memory() -> None:
    """Tensors of torch are pages; of expandable segments or the asynchronous allocator they are refused."""
    found = torch()
    wanted = sys.argv[2]
    small = kx.PageLayout(layers=1, kv_heads=2, head_dim=64, page_tokens=16, dtype="float16")
    # Larger than what torch gives out of its small blocks.
    tensors = [found.zeros(4096, 2, 16, 64, dtype=found.float16, device="cuda") for _ in range(2)]

    def start() -> None:
        kx.Agent("x", small, kx.Shard(), memory=[tuple(tensors)], role="prefill").close()

    print(os.environ.get("PYTORCH_CUDA_ALLOC_CONF"))
    if wanted == "taken":
        start()
    else:
        with pytest.raises(kx.NotSupported, match="expandable_segments:False"):
            start()


def cupy_memory() -> None:
    """Arrays of cupy are pages."""
    if gpu.is_stub:
        cannot("cupy finds no GPU on the stub driver")
    try:
        import cupy
    except ImportError:
        cannot("cupy is not installed")
    small = kx.PageLayout(layers=1, kv_heads=2, head_dim=64, page_tokens=16, dtype="float16")
    arrays = tuple(cupy.zeros((64, 2, 16, 64), cupy.float16) for _ in range(2))
    with kx.Agent("x", small, kx.Shard(), memory=[arrays], role="prefill") as agent:
        assert agent.fabrics == ("ucx",)


def visible() -> None:
    """Work that is queued after `Success` sees the bytes."""
    # In one process, so that nothing but the event stands between arrival and use.
    pages = layout("HND", 1)
    source, target = (Side(gpu, pages, kx.Shard(), PAGES, background) for background in (1, 2))
    tls = "tcp,self,cuda_copy" if gpu.is_stub else None
    stream, kept = gpu.stream(), gpu.alloc(target.nbytes)
    key = (0, 63, "v")
    with (
        kx.Agent("p", pages, source.shard, memory=source.memory, role="prefill", ucx_tls=tls) as p,
        kx.Agent("d", pages, target.shard, memory=target.memory, role="decode", ucx_tls=tls) as d,
    ):
        for n in range(3 if gpu.is_stub else 20):
            src, dst = permuted(PAGES, TOKENS, 2 * n), permuted(PAGES, TOKENS, 2 * n + 1)
            source.fill(TOKENS, src)
            target.paint()
            room = kx.new_room()
            d.expect(room, dst, tokens=TOKENS, source=p.address)
            p.push(room, src, tokens=TOKENS)
            d.wait(room, timeout=LIMIT)
            gpu.copy(kept, target.addresses[key], target.nbytes, stream)
            gpu.sync(stream)
            assert np.array_equal(gpu.read(kept, target.nbytes), target.images(TOKENS, dst)[key])
            p.wait(room, timeout=LIMIT)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    assert gpu.faults() == "", gpu.faults()
    print("passed")
