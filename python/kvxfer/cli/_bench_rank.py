"""One side of the benchmarks that move bytes: memory of either kind, page lists, and a plain copy of them.

The geometry is that of one of eight ranks of Qwen3-32B (64 layers, 1 KV head of 128, bfloat16) unless a case
needs fewer layers. With one KV head, HND and NHD are the same bytes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

import kvxfer as kx
from kvxfer import _kvxfer
from kvxfer.cli._loopback import Fabric, Side, Waits

__all__ = [
    "LAYERS",
    "ROW_BYTES",
    "Ids",
    "Memory",
    "Pages",
    "Rank",
    "layout_of",
    "page_lists",
    "pieces_of",
    "quiet",
    "regions_of",
]

Memory: TypeAlias = Literal["kvxfer", "engine"]
Ids: TypeAlias = npt.NDArray[np.int32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Regions: TypeAlias = list[Bytes]

LAYERS = 64
ROW_BYTES = 256
"""Bytes of one token in one region: a head of 128 elements of 2 bytes."""

# The golden ratio's bits: neighbours in a count become numbers far apart.
_MIX = 0x9E3779B97F4A7C15
# The kernel's limit of pieces a call.
_IOV_MAX = 1024


def layout_of(layers: int, page_tokens: int, order: str = "HND") -> kx.PageLayout:
    """Pages of the benchmark's geometry; with 0 layers one region only, of the same rows."""
    if layers == 0:
        return kx.PageLayout(
            layers=1, head_dim=128, page_tokens=page_tokens, dtype="bfloat16", kind="latent", order=order
        )
    return kx.PageLayout(
        layers=layers, kv_heads=1, head_dim=128, page_tokens=page_tokens, dtype="bfloat16", order=order
    )


def page_lists(total: int, count: int, *, shuffled: bool, seed: int) -> list[Ids]:
    """As many page lists of `count` as there is room for among `total` pages, with no page in two of them."""
    ids = np.random.default_rng(seed).permutation(total) if shuffled else np.arange(total)
    return [ids[i : i + count].astype(np.int32) for i in range(0, total - count + 1, count)]


def pieces_of(
    to: Sequence[int] | Ids, source: Sequence[int] | Ids, tokens: int, page_tokens: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Byte offsets (to, from) and lengths of one region's pieces: neighbours on both sides are one piece."""
    page = page_tokens * ROW_BYTES
    d, s = (np.asarray(ids, np.int64) * page for ids in (to, source))
    lens = np.full(len(d), page, np.int64)
    lens[-1] = tokens * ROW_BYTES - (len(d) - 1) * page
    joined = (np.diff(d) == page) & (np.diff(s) == page)
    first = np.flatnonzero(np.concatenate(([True], ~joined)))
    return (
        d[first].astype(np.uint64),
        s[first].astype(np.uint64),
        np.add.reduceat(lens, first).astype(np.uint64),
    )


def regions_of(memory: Memory, fabric: Fabric, layout: kx.PageLayout, pages: int) -> tuple[Regions, Any]:
    """Regions as byte arrays, layer by layer, K before V; and what `kvxfer.Agent` takes as memory."""
    keys = [(layer, part) for layer in range(layout.layers) for part in layout.parts]
    if memory == "kvxfer":
        pool = kx.alloc(layout, kx.Shard(), pages=pages, fabric=fabric)
        return [pool.tensors[0, layer, part].view(np.uint8).reshape(-1) for layer, part in keys], pool
    # As an engine's allocator gives it: each tensor for itself.
    owner = {
        (0, layer, part): np.zeros(pages * layout.page_tokens * ROW_BYTES, np.uint8) for layer, part in keys
    }
    return list(owner.values()), owner


def _vectors(
    bases: Sequence[int], offsets: npt.NDArray[np.uint64], lens: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """The kernel's `struct iovec`s of the pieces of every region."""
    out = np.empty((len(bases), len(offsets), 2), np.uint64)
    out[:, :, 0] = np.asarray(bases, np.uint64)[:, np.newaxis] + offsets
    out[:, :, 1] = lens
    return out.reshape(-1, 2)


def _readv_ns(pid: int, ours: npt.NDArray[np.uint64], theirs: npt.NDArray[np.uint64]) -> int:
    readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
    word = ctypes.c_ulong
    readv.argtypes = [ctypes.c_int, ctypes.c_void_p, word, ctypes.c_void_p, word, word]
    readv.restype = ctypes.c_ssize_t
    calls = []
    for first in range(0, len(ours), _IOV_MAX):
        place, count = first * ours.strides[0], min(_IOV_MAX, len(ours) - first)
        calls.append((ours.ctypes.data + place, count, theirs.ctypes.data + place, count))
    read = 0
    begin = time.perf_counter_ns()
    for here, n_here, there, n_there in calls:
        read += readv(pid, here, n_here, there, n_there, 0)
    took = time.perf_counter_ns() - begin
    if read != int(ours[:, 1].sum()):
        error = ctypes.get_errno()
        raise OSError(error, f"process_vm_readv of process {pid}: {os.strerror(error)}")
    return took


class Pages:
    """One side's memory: what prefill has in each page, and whether it has come to decode.

    Args:
        side: `"prefill"` or `"decode"`.
        fabric: `"shm"` or `"ucx"`; of no account for engine memory.
        memory: `"kvxfer"` (from `kvxfer.alloc`) or `"engine"` (numpy's, as an engine's would be).
        layout: of both sides.
        pages: how many there are.
    """

    def __init__(self, side: Side, fabric: Fabric, memory: Memory, layout: kx.PageLayout, pages: int) -> None:
        self.side, self.layout, self.pages = side, layout, pages
        self.page_tokens = int(layout.page_tokens)
        self.page_bytes = self.page_tokens * ROW_BYTES
        self.regions, self.owner = regions_of(memory, fabric, layout, pages)
        # Every page is mapped before anything is timed, as those of a running engine are.
        for number, region in enumerate(self.regions):
            if side == "decode":
                region[:] = 0xA5
            else:
                self._contents(number, np.arange(pages), self.regions[number])

    def _contents(self, region: int, pages: npt.NDArray[Any], out: Bytes) -> Bytes:
        """What prefill has in these pages of a region: 8-byte words that differ by region, page and place."""
        words = self.page_bytes // 8
        view = out.view(np.uint64).reshape(len(pages), words)
        first = (pages.astype(np.uint64) + np.uint64(region * self.pages)) * np.uint64(words)
        np.add(first[:, np.newaxis], np.arange(words, dtype=np.uint64), out=view)
        np.multiply(view, np.uint64(_MIX), out=view)
        return out

    def has(self, to: Ids, source: Ids, tokens: int) -> bool:
        """Whether decode's pages `to` hold what prefill has in `source`, if that has as many pages."""
        wanted = np.empty(len(to) * self.page_bytes, np.uint8)
        for number, region in enumerate(self.regions):
            found = region.reshape(-1, self.page_bytes)[to].reshape(-1)
            self._contents(number, source, wanted)
            if not np.array_equal(found[: tokens * ROW_BYTES], wanted[: tokens * ROW_BYTES]):
                return False
        return True

    def spoil(self, to: Ids) -> None:
        """Writes something else into pages of decode's, so that `has` says what came since."""
        for region in self.regions:
            region.reshape(-1, self.page_bytes)[to] = 0xA5


class Rank(Pages, Waits):
    """Memory, an agent over it and, at decode, a second memory of the same kind to copy from.

    Args:
        side: `"prefill"` or `"decode"`.
        fabric: `"shm"` or `"ucx"`.
        memory: as in `Pages`.
        layout: of both sides.
        pages: pages of the pool.
        secret: what both sides know.
        copies: whether decode needs a second memory for `copy_ns`.
        options: more for `kvxfer.Agent`.
    """

    #: Asking a state costs the prefill side's core, which the other side may be copying on.
    ask_s = 2e-4

    def __init__(
        self,
        side: Side,
        fabric: Fabric,
        memory: Memory,
        layout: kx.PageLayout,
        pages: int,
        secret: str,
        *,
        copies: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(side, fabric, memory, layout, pages)
        self.near: Regions = []
        self.source_process: tuple[int, Sequence[int]] = (0, ())
        """At decode: prefill's process, and where its regions are there."""
        if side == "decode" and copies:
            self.near, self._near_owner = regions_of(memory, fabric, layout, pages)
            # Not what the other side sends: a page that was copied and then not handed off is seen.
            for region in self.near:
                region[:] = 0xA5
        self.agent = kx.Agent(
            side,
            layout,
            kx.Shard(),
            memory=self.owner,
            role=side,
            fabric=fabric,
            secret=secret,
            engine=side,
            **options,
        )

    def copy_ns(self, to: Sequence[Ids], source: Sequence[Ids], tokens: int) -> int:
        """Nanoseconds of copying the same pieces by plain memcpy, within this process, in one thread."""
        pairs = list(zip(self.regions, self.near, strict=True))
        took = 0
        for ours, theirs in zip(to, source, strict=True):
            dst, src, lens = pieces_of(ours, theirs, tokens, self.page_tokens)
            took += _kvxfer._bench_copy(pairs, dst=dst, src=src, lens=lens)
        return took

    def readv_ns(
        self, to: Sequence[Ids], source: Sequence[Ids], tokens: int, pid: int, bases: Sequence[int]
    ) -> int:
        """Nanoseconds of reading the same pieces out of another process by the kernel, 1,024 a call.

        Raises:
            OSError: if the kernel refuses, or reads less than it was asked to.
        """
        took = 0
        for ours, theirs in zip(to, source, strict=True):
            dst, src, lens = pieces_of(ours, theirs, tokens, self.page_tokens)
            here = [region.ctypes.data for region in self.regions]
            took += _readv_ns(pid, _vectors(here, dst, lens), _vectors(bases, src, lens))
        return took


def quiet() -> None:
    """Python's garbage collector runs no more: it would run in the middle of what is timed."""
    gc.collect()
    gc.disable()
