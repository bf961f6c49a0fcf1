"""Two processes hand off groups of every sort: full attention beside a sliding window, Mamba-like state,
scales in regions of their own, layers that share pages. What arrives is compared with what each layout says.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from rank_child import fill
from two import Rank

import kvxfer as kx

PAGES = 24
UCX = pytest.param("ucx", id="ucx-tcp", marks=pytest.mark.ucx)
FULL: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_dim": 8, "page_tokens": 4, "dtype": "float16"}
WINDOW: dict[str, Any] = {**FULL, "layers": 3, "kv_heads": 2, "window_tokens": 10}
STATE: dict[str, Any] = {
    "layers": 2,
    "kind": "state",
    # A convolution's [x | B | C] in three rows, and an SSM state; B and C are on every rank.
    "state": [(4, 6, 3, 0), (1, 4, 3, 0), (1, 4, 3, 0), (4, 32, 1, 1)],
}
FP8: dict[str, Any] = {
    "layers": 2,
    "kv_heads": 4,
    "head_dim": 8,
    "page_tokens": 4,
    "dtype": "float8_e4m3",
    "scale_dim": 2,
    "scale_dtype": "float32",
    "k_scale": 0.5,
}


def layouts(groups: list[dict[str, Any]]) -> list[kx.PageLayout]:
    return [kx.PageLayout(**group) for group in groups]


def logical(tensor: Any, layout: kx.PageLayout, part: str) -> np.ndarray[Any, Any]:
    """A region as `[page, token, head, ...]` of bytes, whatever its order; a state as it is."""
    found: np.ndarray[Any, Any] = np.ascontiguousarray(tensor).view(np.uint8)
    if layout.kind in ("kv", "packed") and layout.order == "HND":
        found = np.moveaxis(found, 1, 2)
    return found


class Engine:
    """Prefill ranks in processes of their own, and what each of them holds."""

    def __init__(self, groups: list[dict[str, Any]], tp: int, pp: int = 1, **agent: Any) -> None:
        self.groups = layouts(groups)
        self.stack = ExitStack()
        self.ranks: list[Rank] = []
        self.pools: list[kx.Pool] = []
        for rank in range(tp * pp):
            shard = {"tp_rank": rank % tp, "tp_size": tp, "pp_rank": rank // tp, "pp_size": pp}
            given = {**agent, "directory": self.ranks[0].address} if self.ranks else agent
            child = Rank(groups, shard, pages=PAGES, seed=rank + 1, engine="p", name=f"p{rank}", **given)
            self.ranks.append(self.stack.enter_context(child))
            pool = kx.alloc(self.groups, kx.Shard(**shard), pages=PAGES)
            fill(pool, rank + 1)
            self.pools.append(pool)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def head(self, group: int, layer: int, part: str, head: int) -> list[np.ndarray[Any, Any]]:
        """A head's `[page, token, ...]` on each rank that holds it."""
        layout, out = self.groups[group], []
        for pool in self.pools:
            heads = pool.shard.heads(layout)
            if head in heads and layer in pool.shard.layers(layout):
                tensor = logical(pool.tensors[group, layer, part], layout, part)
                out.append(tensor if layout.kind == "latent" else tensor[:, :, head - heads.start])
        return out


def tokens_of(pages: list[int], tensor: np.ndarray[Any, Any], first: int, tokens: range) -> list[Any]:
    """These tokens' bytes; `pages[0]` holds token `first`."""
    each = tensor.shape[1]
    return [tensor[pages[token // each - first // each], token % each] for token in tokens]


@pytest.mark.parametrize("fabric", ["shm", UCX])
@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("tp", [1, 2])
def test_full_and_sliding_window(fabric: str, order: str, tp: int) -> None:
    """In chunks: each brings the pages of the last tokens that prefill still holds, and what is sent of them
    are the last ones of the room.
    """
    theirs = [FULL, WINDOW]
    ours = layouts([{**FULL, "order": order}, {**WINDOW, "order": order, "page_tokens": 8}])
    options = {"fabric": fabric, "ucx_tls": "tcp,self" if fabric == "ucx" else None}
    shard = kx.Shard()
    pool = kx.alloc(ours, shard, pages=PAGES)
    before = {key: np.array(t) for key, t in pool.tensors.items()}
    with (
        Engine(theirs, tp, **options) as engine,
        kx.Agent("decode", ours, shard, memory=pool, **options) as decode,
    ):
        room = kx.new_room()
        # Tokens 17 to 26 are in the window, from the middle of page 4 on (of page 2 here).
        full, window = [3, 9, 1, 7, 2, 11, 5], [6, 4]
        decode.expect(room, [full, window], tokens=27, source=engine.ranks[0].address, verify="full")
        sources = [20, 14, 8, 2, 17, 11, 5]
        for rank in engine.ranks:
            # The last ten tokens of the first chunk are 10 to 19; the second has only 20 to 26.
            rank.push(room=room, pages=[sources[:5], [12, 1, 13]], start=0, tokens=20, last=False)
            rank.push(room=room, pages=[sources[5:], [4, 9]], start=20, tokens=7)
        ev = decode.wait(room, 30)
        assert (ev.state, ev.released) == ("Success", True)
        for group, first, dst, src in [(0, 0, full, sources), (1, 17, window, [13, 4, 9])]:
            layout = ours[group]
            for layer in range(layout.layers):
                for part, head in [(p, h) for p in ("k", "v") for h in range(layout.kv_heads)]:
                    got = logical(pool.tensors[group, layer, part], layout, part)[:, :, head]
                    found = tokens_of(dst, got, first, range(first, 27))
                    for source in engine.head(group, layer, part, head):
                        wanted = tokens_of(src, source, first, range(first, 27))
                        assert np.array_equal(found, wanted), (group, layer, part, head)
        for (group, layer, part), tensor in pool.tensors.items():
            rest = np.setdiff1d(np.arange(PAGES), [full, window][group])
            assert np.array_equal(np.asarray(tensor)[rest], before[group, layer, part][rest])
        for rank in engine.ranks:
            assert rank.event(room) == {"room": room, "state": "Success", "released": True, "error": None}


@pytest.mark.parametrize("fabric", ["shm", UCX])
def test_state_is_cut_apart_and_goes_with_the_last_token(fabric: str) -> None:
    options = {"fabric": fabric, "ucx_tls": "tcp,self" if fabric == "ucx" else None}
    ours, shard = layouts([FULL, STATE]), kx.Shard()
    pool = kx.alloc(ours, shard, pages=PAGES)
    with (
        Engine([FULL, STATE], 2, **options) as engine,
        kx.Agent("decode", ours, shard, memory=pool, **options) as decode,
    ):
        room = kx.new_room()
        decode.expect(room, [[3, 9, 1], [6]], tokens=12, source=engine.ranks[0].address, verify="full")
        for rank in engine.ranks:
            rank.push(room=room, pages=[[5, 2], [8]], start=0, tokens=8, last=False)
            rank.push(room=room, pages=[[4], [8]], start=8, tokens=4)
        assert decode.wait(room, 30).state == "Success"
        for layer in range(2):
            low, high = ([p.state(layer, n, group=1)[8] for n in (0, 1)] for p in engine.pools)
            conv, ssm = (pool.state(layer, n, group=1)[6] for n in (0, 1))
            assert np.array_equal(ssm, np.concatenate([low[1], high[1]]))
            rows = conv.reshape(3, 32)
            halves = [p[0].reshape(3, 20) for p in (low, high)]
            assert np.array_equal(rows[:, :24], np.concatenate([h[:, :12] for h in halves], axis=1)), "x"
            # B and C are on both ranks, of which one wrote them: for each layer another.
            written = [np.array_equal(rows[:, 24:], h[:, 12:]) for h in halves]
            assert written == [layer == 0, layer == 1]
            others = np.setdiff1d(np.arange(PAGES), [6])
            assert not pool.state(layer, 0, group=1)[others].any()


@pytest.mark.parametrize("fabric", ["shm", UCX])
def test_case_07_scale_regions_arrive_with_the_data(fabric: str) -> None:
    """Data and scales have other strides, other pages and other orders on either side; both land."""
    options = {"fabric": fabric, "ucx_tls": "tcp,self" if fabric == "ucx" else None}
    # A page of a rank's data takes 4 x 2 x 8 bytes, its scales 4 x 2 x 2 x 4.
    theirs = {**FP8, "page_stride_bytes": 80, "scale_stride_bytes": 96}
    ours = layouts([{**FP8, "order": "NHD", "page_tokens": 8, "kind": "packed"}])
    shard = kx.Shard()
    pool = kx.alloc(ours, shard, pages=PAGES)
    with (
        Engine([theirs], 2, **options) as engine,
        kx.Agent("decode", ours, shard, memory=pool, **options) as decode,
    ):
        room = kx.new_room()
        decode.expect(room, [[3, 9]], tokens=11, source=engine.ranks[0].address, verify="full")
        for rank in engine.ranks:
            rank.push(room=room, pages=[[5, 2, 7]], tokens=11)
        assert decode.wait(room, 30).state == "Success"
        for layer, head, suffix in [(n, h, s) for n in range(2) for h in range(4) for s in ("", "_scale")]:
            # [page, token, head, K or V, bytes]
            got = logical(pool.tensors[0, layer, "kv" + suffix], ours[0], "kv")[:, :, head]
            for n, part in enumerate(("k", "v")):
                (source,) = engine.head(0, layer, part + suffix, head)
                found = tokens_of([3, 9], got[:, :, n], 0, range(11))
                assert np.array_equal(found, tokens_of([5, 2, 7], source, 0, range(11))), (layer, head, part)


def test_case_07_other_scales_are_refused_at_connect() -> None:
    shard = kx.Shard()
    for other, words in [
        ({"k_scale": 1.0}, "k_scale of group 0 differs: source has 0.5, destination has 1"),
        ({"scale_dim": 1}, "scales of group 0 differs: source has 2 float32 a token and head"),
        ({"scale_dim": None, "scale_dtype": None}, "destination has none"),
    ]:
        ours = kx.PageLayout(**{**FP8, **other})
        pool = kx.alloc([ours], shard, pages=PAGES)
        with Engine([FP8], 1) as engine, kx.Agent("decode", [ours], shard, memory=pool) as decode:
            room = kx.new_room()
            decode.expect(room, [[3]], tokens=4, source=engine.ranks[0].address)
            with pytest.raises(kx.LayoutMismatch, match=words):
                decode.wait(room, 30)


@pytest.mark.parametrize("fabric", ["shm", UCX])
def test_case_04_latents_of_four_ranks_go_to_two_and_all_four_are_released(fabric: str) -> None:
    """Every rank has other bytes here, so that they tell who wrote them: each wrote a quarter of all."""
    options = {"fabric": fabric, "ucx_tls": "tcp,self" if fabric == "ucx" else None}
    latent = {"layers": 2, "head_dim": 24, "page_tokens": 16, "dtype": "float16", "kind": "latent"}
    (ours,) = layouts([latent])
    src, dst = list(range(16)), [p + 8 for p in range(15, -1, -1)]
    with ExitStack() as stack:
        engine = stack.enter_context(Engine([latent], 4, **options))
        decodes = []
        for rank in range(2):
            shard = kx.Shard(rank, 2)
            pool = kx.alloc(ours, shard, pages=PAGES)
            agent = stack.enter_context(kx.Agent(f"d{rank}", ours, shard, memory=pool, **options))
            decodes.append((pool, agent))
        room = kx.new_room()
        for _, agent in decodes:
            agent.expect(room, dst, tokens=256, source=engine.ranks[0].address, verify="full")
        for source in engine.ranks:
            source.push(room=room, pages=src, tokens=256)
        written = [0] * 4
        for pool, agent in decodes:
            assert agent.wait(room, 30).state == "Success"
            for layer in range(2):
                got = np.ascontiguousarray(pool.latent(layer)[dst]).view(np.uint8).reshape(256, -1)
                sources = [
                    np.ascontiguousarray(p.latent(layer)[src]).view(np.uint8).reshape(256, -1)
                    for p in engine.pools
                ]
                from_rank = np.array([(got == source).all(axis=1) for source in sources])
                assert (from_rank.sum(axis=0) == 1).all(), "each token comes from exactly one rank"
                for n, count in enumerate(from_rank.sum(axis=1)):
                    written[n] += int(count)
            assert not np.asarray(pool.latent(0))[:8].any()
        assert written == [256] * 4
        # A prompt shorter than a share: two of the four ranks write nothing, and end it all the same.
        short = kx.new_room()
        for _, agent in decodes:
            agent.expect(short, dst[:1], tokens=10, source=engine.ranks[0].address, verify="full")
        for source in engine.ranks:
            source.push(room=short, pages=src[:1], tokens=10)
        assert [agent.wait(short, 30).state for _, agent in decodes] == ["Success", "Success"]
        for source, which in [(s, r) for s in engine.ranks for r in (room, short)]:
            assert source.event(which) == {"room": which, "state": "Success", "released": True, "error": None}


@pytest.mark.parametrize("fabric", ["shm", UCX])
def test_layers_that_share_pages(fabric: str) -> None:
    """Prefill has all layers in one page, with gaps; decode has a region a layer."""
    options = {"fabric": fabric, "ucx_tls": "tcp,self" if fabric == "ucx" else None}
    theirs = {
        **FULL,
        "kind": "fused",
        "cross_layer": True,
        "layer_stride_bytes": 640,
        "page_stride_bytes": 1536,
    }
    ours = layouts([{**FULL, "kind": "packed", "order": "NHD"}])
    shard = kx.Shard()
    pool = kx.alloc(ours, shard, pages=PAGES)
    with (
        Engine([theirs], 1, **options) as engine,
        kx.Agent("decode", ours, shard, memory=pool, **options) as decode,
    ):
        room = kx.new_room()
        decode.expect(room, [[3, 9]], tokens=8, source=engine.ranks[0].address, verify="full")
        engine.ranks[0].push(room=room, pages=[[5, 2]], tokens=8)
        assert decode.wait(room, 30).state == "Success"
        for layer in range(2):
            # [page, K or V, head, token, dim] to [page, token, head, K or V, dim]
            wanted = np.moveaxis(engine.pools[0].kv(layer)[[5, 2]].view(np.uint16), (1, 2, 3), (3, 2, 1))
            assert np.array_equal(pool.kv(layer)[[3, 9]].view(np.uint16), wanted)


@pytest.mark.parametrize("fabric", ["shm", UCX])
def test_pipelines_that_split_layers_in_a_way_of_their_own(fabric: str) -> None:
    """Three layers as 2 and 1, all in one page of each rank, whose pages are therefore of other sizes; to a
    rank with the last two of them.
    """
    options = {"fabric": fabric, "ucx_tls": "tcp,self" if fabric == "ucx" else None}
    layout = {**FULL, "layers": 3}
    ours = layouts([{**layout, "pp_layers": (1, 2)}])
    shard = kx.Shard(0, 1, 1, 2)
    pool = kx.alloc(ours, shard, pages=PAGES)
    assert [key[1] for key in pool.tensors] == [1, 1, 2, 2]
    with (
        Engine([{**layout, "pp_layers": (2, 1), "cross_layer": True}], 2, 2, **options) as engine,
        kx.Agent("decode", ours, shard, memory=pool, **options) as decode,
    ):
        room = kx.new_room()
        decode.expect(room, [[3, 9]], tokens=8, source=engine.ranks[0].address, verify="full")
        for rank in engine.ranks:
            rank.push(room=room, pages=[[5, 2]], tokens=8)
        assert decode.wait(room, 30).state == "Success"
        for layer, part, head in [(n, p, h) for n in (1, 2) for p in ("k", "v") for h in range(4)]:
            got = logical(pool.tensors[0, layer, part], ours[0], part)[[3, 9], :, head]
            (source,) = engine.head(0, layer, part, head)
            assert np.array_equal(got, source[[5, 2]]), (layer, part, head)
