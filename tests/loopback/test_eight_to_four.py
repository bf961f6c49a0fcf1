"""Eight prefill and four decode processes at Qwen3-32B's geometry, but for the number of layers."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from rank_child import digest, fill
from two import Rank

import kvxfer as kx

TOKENS, PAGES = 2000, 160
LAYOUT: dict[str, Any] = {"layers": 2, "kv_heads": 8, "head_dim": 128, "page_tokens": 16, "dtype": "bfloat16"}


def expected(sources: list[kx.Pool], layout: kx.PageLayout, shard: kx.Shard, pages: Any) -> Any:
    """What a decode rank's pages hold: the heads of two prefill ranks beside each other."""
    axis = 1 if layout.order == "HND" else 2
    ranks = [pool for pool in sources if pool.shard.heads(layout)[0] in shard.heads(layout)]
    keys = sources[0].tensors
    return {
        key: np.concatenate([np.asarray(r.tensors[key]).view(np.uint16)[pages] for r in ranks], axis=axis)
        for key in keys
    }


@pytest.mark.parametrize(
    ("fabric", "tls"),
    [
        pytest.param("shm", None, id="shm"),
        pytest.param("ucx", "tcp,self", id="ucx-tcp", marks=pytest.mark.ucx),
    ],
)
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.timeout(240)
def test_2000_tokens_go_from_eight_ranks_to_four(order: str, fabric: str, tls: str | None) -> None:
    options: dict[str, Any] = {"fabric": fabric, "ucx_tls": tls, "alloc": fabric}
    layout = {**LAYOUT, "order": order}
    rng = np.random.default_rng(7)
    src, dst = ([int(p) for p in rng.permutation(PAGES)[: TOKENS // 16]] for _ in range(2))
    room = kx.new_room()
    with ExitStack() as stack:
        prefill: list[Rank] = []
        for rank in range(8):
            directory = {"directory": prefill[0].address} if prefill else {}
            shard = {"tp_rank": rank, "tp_size": 8}
            child = Rank(
                layout, shard, pages=PAGES, seed=rank + 1, name=f"p{rank}", engine="p", **options, **directory
            )
            prefill.append(stack.enter_context(child))
        decode: list[Rank] = []
        for rank in range(4):
            shard = {"tp_rank": rank, "tp_size": 4}
            child = Rank(layout, shard, pages=PAGES, seed=100 + rank, name=f"d{rank}", engine="d", **options)
            decode.append(stack.enter_context(child))
        given = {"room": room, "pages": dst, "tokens": TOKENS, "verify": "full"}
        for child in decode:
            child.order(expect={**given, "source": prefill[0].address})
        for child in prefill:
            child.push(room, src, tokens=TOKENS)
        want = {"room": room, "state": "Success", "released": True, "error": None}
        for child in [*decode, *prefill]:
            assert child.event(room) == want

        pools = [kx.alloc(child.layout, child.shard, pages=PAGES) for child in prefill]
        for n, pool in enumerate(pools):
            fill(pool, n + 1)
        rest = [p for p in range(PAGES) if p not in dst]
        for n, child in enumerate(decode):
            whole = range(TOKENS // 16)
            right = digest(expected(pools, child.layout, child.shard, src), list(whole))
            assert child.order(digest=dst)["digest"] == right
            before = kx.alloc(child.layout, child.shard, pages=PAGES)
            fill(before, 100 + n)
            assert child.order(digest=rest)["digest"] == digest(before.tensors, rest), "outside the grant"
