"""Field cases about layouts, at the very numbers of the reports, through the slow model of pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle import Engine, Push, check, handoff, plan

import kvxfer as kx


def layout(**other: Any) -> kx.PageLayout:
    return kx.PageLayout(**{"layers": 1, "kv_heads": 2, "head_dim": 8, "page_tokens": 4, **other})


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_case_01_replicated_heads_down(order: str) -> None:
    """2 KV heads, TP4 to TP1: one writer for each of the two head slots."""
    both = (layout(order=order),)
    moved = check(handoff(Engine(both, 4), Engine(both), range(2), range(2), 8))
    assert sum(moved.values()) == 2 * 8 * 2 * 16
    assert len(moved) == 2, "8 tokens are one block: one replica of each head writes them"


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_case_02_replicated_heads_up(order: str) -> None:
    """2 KV heads, TP1 to TP4: ranks 0 to 3 get heads 0, 0, 1, 1."""
    both = (layout(order=order),)
    room = handoff(Engine(both), Engine(both, 4), range(2), range(2), 8)
    check(room)
    plans = [plan(room, room.pushes[0], None, (0, d)) for d in range(4)]
    assert all(p is not None for p in plans)
    sources = [p.ops["src_offset"].tolist() for p in plans if p is not None]
    assert sources[0] == sources[1] != sources[2] == sources[3]


@pytest.mark.parametrize("order", ["HND", "NHD"])
@pytest.mark.parametrize("other", ["HND", "NHD"])
def test_case_03_order_of_a_page(order: str, other: str) -> None:
    """Page of 4 tokens, 4 heads, dim 8, TP2 to TP1."""
    src, dst = layout(kv_heads=4, order=order), layout(kv_heads=4, order=other)
    check(handoff(Engine((src,), 2), Engine((dst,)), [0], [0], 4))


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (4, 2)])
def test_case_04_mla(prefill: int, decode: int) -> None:
    """Every decode rank wholly written, once; of four sources each carries its share."""
    latent = kx.PageLayout(layers=2, head_dim=576, kind="latent")
    moved = check(handoff(Engine((latent,), prefill), Engine((latent,), decode), range(16), range(16), 256))
    for d in range(decode):
        assert sum(n for (_, to), n in moved.items() if to == d) == 2 * 256 * 576 * 2
    by_source = {sum(n for (of, _), n in moved.items() if of == s) for s in range(prefill)}
    assert len(by_source) == 1


@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_case_05_page_sizes(order: str) -> None:
    """32 tokens a page to 16 and back, and 48 to 32 and back."""
    for a, b in ((32, 16), (48, 32)):
        large, small = Engine((layout(order=order, page_tokens=a),)), Engine((layout(page_tokens=b),))
        check(handoff(large, small, [3, 0], [5, 1, 4, 2][: 2 * a // b], 2 * a))
        check(handoff(small, large, [5, 1, 4, 2][: 2 * a // b], [3, 0], 2 * a))


def test_case_07_scales() -> None:
    """A data region and a scale region with other strides: both land."""
    src = layout(dtype="float8_e4m3", scale_dim=1, page_stride_bytes=80, scale_stride_bytes=48)
    dst = layout(dtype="float8_e4m3", scale_dim=1, page_stride_bytes=160, order="NHD")
    check(handoff(Engine((src,)), Engine((dst,)), [2, 0], [1, 3], 7))


def test_case_08_partial_prefix_hit() -> None:
    """Pages 10 to 14, of which decode has three: 13 to 7 and 14 to 9."""
    both = (layout(page_tokens=16),)
    room = handoff(Engine(both), Engine(both), [10, 11, 12, 13, 14], [7, 9], 80, start=48)
    assert check(room) == {(0, 0): 2 * 2 * 32 * 16}


def test_case_09_full_prefix_hit() -> None:
    both = (layout(page_tokens=16),)
    assert check(handoff(Engine(both), Engine(both), [10, 11, 12], [7], 48, start=48)) == {}


def test_case_10_chunked_prefill() -> None:
    """100 tokens in chunks of 48, pages of 16: all 7 pages; after a preemption only the new list is read."""
    both = (layout(page_tokens=16),)
    once = handoff(Engine(both), Engine(both), range(7), range(7), 100)
    chunks = [(0, 48, [3, 4, 5]), (48, 96, [6, 7, 8]), (96, 100, [9])]
    room = replace(once, pushes=tuple(Push(a, b, ((tuple(pages),),)) for a, b, pages in chunks), src_count=10)
    assert sum(check(room).values()) == 2 * 2 * 100 * 16
    # Whatever is in pages 3 to 5 by now, it has no tags.
    check(replace(once, pushes=(Push(0, 100, ((tuple(range(9, 16)),),)),), src_count=16))


def test_case_21_descriptors() -> None:
    """80 layers of K and V, 118 pages: a write for each shuffled page, one a region if contiguous."""
    both = layout(layers=80, kv_heads=1, page_tokens=16)
    shuffled = [(i * 37) % 118 for i in range(118)]
    for pages, writes in ((shuffled, 18_880), (range(118), 160)):
        ends = (both, kx.Shard()), (both, kx.Shard())
        assert len(kx.plan_transfer(*ends, src_pages=pages, dst_pages=pages, tokens=118 * 16)) == writes


def test_case_22_big_offsets() -> None:
    """Page 40,000 of 65,536 bytes is past 2^31; page 2^25 past 2^40."""
    both = kx.PageLayout(layers=1, kv_heads=8, head_dim=128, page_tokens=32)
    assert both.page_bytes(kx.Shard()) == 65_536
    ends = (both, kx.Shard()), (both, kx.Shard())
    plan = kx.plan_transfer(*ends, src_pages=[40_000], dst_pages=[1 << 25], tokens=32)
    assert plan.ops["src_offset"].tolist() == [40_000 * 65_536] * 2
    assert plan.ops["dst_offset"].tolist() == [1 << 41] * 2
