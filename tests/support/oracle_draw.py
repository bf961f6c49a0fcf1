"""Rooms for the oracle: any layouts, shards, page tables and ranges of tokens that are allowed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from oracle import Engine, Lists, Push, Room, lays, pages_needed

import kvxfer as kx

SIZES = (1, 1, 2, 2, 3, 4, 4, 6, 8)
PAGES = (1, 2, 3, 4, 4, 6, 8, 16, 32, 48)
DTYPES = ("bfloat16", "float32", "float8_e4m3", "int4", "float16", "int8", "float4_e2m1")
HEADS = (1, 2, 3, 4, 6, 8, 12)
KINDS = ("heads", "heads", "heads", "heads", "latent", "state")


def fits(units: int, *sizes: int) -> bool:
    """Whether so many heads can be split over ranks of each of these sizes."""
    return all(units % size == 0 or size % units == 0 for size in sizes)


def page_ids(count: int, pool: int, how: str, rng: random.Random) -> tuple[int, ...]:
    """Pages of a list: side by side, backwards, or anywhere."""
    if how == "any":
        return tuple(rng.sample(range(pool), count))
    first = rng.randint(0, pool - count)
    ids = range(first, first + count)
    return tuple(ids if how == "side by side" else reversed(ids))


def lists(engine: Engine, start: int, end: int, pool: int, more: int, how: str, rng: random.Random) -> Lists:
    """A page list for each group, with up to `more` pages at its end that nobody needs."""
    out = []
    for layout in engine.layouts:
        need = pages_needed(layout, start, end)
        # A state has one page a room.
        spare = 0 if layout.state is not None else rng.randint(0, more)
        out.append(page_ids(need + spare, pool, how, rng))
    return tuple(out)


@st.composite
def models(draw: st.DrawFn, sizes: Sequence[int], kinds: Sequence[str]) -> dict[str, Any]:
    """What both sides have alike in a group."""
    kind = draw(st.sampled_from(kinds))
    layers = draw(st.integers(1, 3))
    if kind == "state":
        units = [n for n in HEADS if fits(n, *sizes)]
        block = st.tuples(
            st.sampled_from(units), st.integers(1, 5), st.integers(1, 3), st.sampled_from((0, 0, 1))
        )
        blocks = [kx.StateBlock(*b) for b in draw(st.lists(block, min_size=1, max_size=4))]
        # Each part up to the last one has a block.
        if all(b.part for b in blocks):
            blocks = [b._replace(part=0) for b in blocks]
        return {"kind": kind, "layers": layers, "state": blocks}
    dtype = draw(st.sampled_from(DTYPES))
    step = 2 if dtype in ("int4", "float4_e2m1") else 1
    model = {"kind": kind, "layers": layers, "dtype": dtype, "head_dim": step * draw(st.integers(1, 3))}
    if kind == "heads":
        model["kv_heads"] = draw(st.sampled_from([n for n in HEADS if fits(n, *sizes)]))
    if draw(st.integers(0, 3)) == 0:
        model["window_tokens"] = draw(st.integers(1, 60))
    if draw(st.integers(0, 3)) == 0:
        scale = draw(st.sampled_from(("float32", "float16", "float8_e8m0", "uint4")))
        model["scale_dtype"] = scale
        model["scale_dim"] = draw(st.integers(1, 2)) * (2 if scale == "uint4" else 1)
    return model


@st.composite
def layouts(draw: st.DrawFn, model: dict[str, Any], tp_size: int, pp_size: int) -> kx.PageLayout:
    """One side's layout of it."""
    plain = dict(model)
    if model["kind"] == "heads":
        plain["kind"] = draw(st.sampled_from(("kv", "kv", "fused", "packed")))
    if model["kind"] != "state":
        plain["order"] = draw(st.sampled_from(("HND", "NHD")))
        plain["page_tokens"] = draw(st.sampled_from(PAGES))
    if pp_size > 1 and draw(st.booleans()):
        cuts = sorted(draw(st.tuples(*[st.integers(0, model["layers"])] * (pp_size - 1))))
        plain["pp_layers"] = [b - a for a, b in zip([0, *cuts], [*cuts, model["layers"]], strict=True)]
    plain["cross_layer"] = draw(st.integers(0, 3)) == 0
    ranks = Engine((), tp_size, pp_size).shards

    def largest(layout: kx.PageLayout, scales: bool, what: str) -> int:
        found = [lay for shard in ranks for lay in lays(layout, shard)]
        sizes = [
            lay.part.size if what == "layer" else max(lay.page_bytes, lay.page_stride)
            for lay in found
            if lay.part.label.endswith("_scale") == scales
        ]
        return max(sizes)

    layout = kx.PageLayout(**plain)
    gaps = draw(st.sampled_from((None, None, (3, 0, 0), (0, 5, 0), (1, 7, 0), (0, 0, 2), (4, 1, 3))))
    if gaps is None:
        return layout
    layer, page, scale = gaps
    if layer and layout.cross_layer:
        plain["layer_stride_bytes"] = largest(layout, False, "layer") + layer
        layout = kx.PageLayout(**plain)
    if page:
        plain["page_stride_bytes"] = largest(layout, False, "page") + page
    if scale and layout.scale_dim is not None:
        plain["scale_stride_bytes"] = largest(layout, True, "page") + scale
    return kx.PageLayout(**plain)


@st.composite
def engines(draw: st.DrawFn, most_groups: int = 3, kinds: Sequence[str] = KINDS) -> tuple[Engine, Engine]:
    """Two sides that fit."""
    sizes = draw(st.tuples(st.sampled_from(SIZES), st.sampled_from(SIZES)))
    depths = draw(st.tuples(st.sampled_from((1, 1, 1, 2, 3)), st.sampled_from((1, 1, 1, 2, 3))))
    groups = draw(st.lists(models(sizes, kinds), min_size=1, max_size=most_groups))
    sides = [
        Engine(tuple(draw(layouts(model, tp, pp)) for model in groups), tp, pp)
        for tp, pp in zip(sizes, depths, strict=True)
    ]
    return sides[0], sides[1]


@st.composite
def rooms(draw: st.DrawFn, sides: st.SearchStrategy[tuple[Engine, Engine]] | None = None) -> Room:
    """Two sides that fit, and a hand-off in chunks and ranges of layers, after a cached prefix."""
    src, dst = draw(engines() if sides is None else sides)
    end = draw(st.one_of(st.integers(1, 20), st.integers(1, 50), st.integers(1, 140)))
    start = draw(st.one_of(st.just(0), st.integers(0, end)))
    first = draw(st.one_of(st.just(0), st.integers(0, start)))
    cuts = sorted(set(draw(st.lists(st.integers(first, end), max_size=2))) - {first, end})
    layers = max(layout.layers for layout in src.layouts)
    layer_cuts = sorted(set(draw(st.lists(st.integers(1, layers), max_size=2))) - {layers})
    how = draw(st.sampled_from(("side by side", "any", "backwards")))
    more = draw(st.integers(0, 2))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    ranges: tuple[tuple[int, int] | None, ...] = (None,)
    if layer_cuts:
        ranges = tuple(zip([0, *layer_cuts], [*layer_cuts, layers], strict=True))

    def pool(engine: Engine, first: int) -> int:
        return max(pages_needed(layout, first, end) for layout in engine.layouts) + more + 1

    src_count, dst_count = pool(src, first), pool(dst, start)
    return Room(
        src=src,
        dst=dst,
        start=start,
        end=end,
        grants=tuple(lists(dst, start, end, dst_count, more, how, rng) for _ in dst.shards),
        pushes=tuple(
            Push(a, b, tuple(lists(src, a, b, src_count, more, how, rng) for _ in src.shards), ranges)
            for a, b in zip([first, *cuts], [*cuts, end], strict=True)
            if a < b
        ),
        src_count=src_count,
        dst_count=dst_count,
    )
