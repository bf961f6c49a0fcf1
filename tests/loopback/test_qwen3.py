"""The main job at its real size: one Qwen3-32B TP8 rank, 2,000 tokens, a hundred times in a row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from two import Prefill

import kvxfer as kx

LAYOUT: dict[str, Any] = {
    "layers": 64,
    "kv_heads": 1,
    "head_dim": 128,
    "page_tokens": 16,
    "dtype": "bfloat16",
    "order": "HND",
}
PAGES = 160
TOKENS = 2000
ROUNDS = 100


@pytest.mark.parametrize(
    ("fabric", "tls"),
    [
        pytest.param("shm", None, id="shm"),
        pytest.param("ucx", "tcp,self", id="ucx-tcp", marks=pytest.mark.ucx),
        pytest.param("ucx", "posix,self,tcp", id="ucx-posix", marks=pytest.mark.ucx),
    ],
)
@pytest.mark.timeout(240)
def test_2000_tokens_arrive_byte_for_byte_a_hundred_times(fabric: str, tls: str | None) -> None:
    options: dict[str, Any] = {"fabric": fabric, "ucx_tls": tls}
    layout, shard = kx.PageLayout(**LAYOUT), kx.Shard()
    pool = kx.alloc(layout, shard, pages=PAGES, fabric=fabric, ucx_tls=tls)
    views = {key: np.asarray(t).view(np.uint16) for key, t in pool.tensors.items()}
    rng = np.random.default_rng(7)
    with (
        Prefill(LAYOUT, pages=PAGES, alloc=fabric, **options) as prefill,
        kx.Agent("decode", layout, shard, memory=pool, **options) as decode,
    ):
        source = {key: t.view(np.uint16) for key, t in prefill.reference().items()}
        # Buffers that stay: with new ones, each comparison takes three times as long.
        found, wanted = (np.empty_like(views[0, 0, "k"][: TOKENS // 16]) for _ in range(2))
        for n in range(ROUNDS):
            room = kx.new_room()
            src = rng.permutation(PAGES)[: TOKENS // 16].astype(np.int32)
            dst = rng.permutation(PAGES)[: TOKENS // 16].astype(np.int32)
            rest = np.setdiff1d(np.arange(PAGES), dst)
            canary = {key: view[rest[:4]].copy() for key, view in views.items()}
            if n % 2:
                decode.expect(room, dst, tokens=TOKENS, source=prefill.address)
                prefill.push(room, src, tokens=TOKENS)
            else:
                prefill.push(room, src, tokens=TOKENS)
                decode.expect(room, dst, tokens=TOKENS, source=prefill.address)
            ev = decode.wait(room, timeout=60)
            assert (ev.state, ev.released) == ("Success", True)
            for key, view in views.items():
                np.take(view, dst, axis=0, out=found, mode="clip")
                np.take(source[key], src, axis=0, out=wanted, mode="clip")
                assert np.array_equal(found, wanted), (n, key)
                assert np.array_equal(view[rest[:4]], canary[key]), f"outside the grant: {n} {key}"
            polled = [e for e in decode.poll() if e.room == room]
            assert [(e.state, e.released) for e in polled] == [("Success", True)]
            assert prefill.event(room) == {"room": room, "state": "Success", "released": True, "error": None}
