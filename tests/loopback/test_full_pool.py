"""An engine whose pages are all in use: it is told at once, and goes on when a room's pages come back."""

from __future__ import annotations

import numpy as np
import pytest
from two import events, released

import kvxfer as kx

LAYOUT = kx.PageLayout(layers=2, kv_heads=1, head_dim=16, page_tokens=16, dtype="float16")
PAGES = 20
TOKENS = 8 * 16


def test_case_23_a_full_pool_takes_the_third_room_after_a_release() -> None:
    source, target = (kx.alloc(LAYOUT, kx.Shard(), pages=PAGES, fabric="shm") for _ in range(2))
    for page in range(PAGES):
        source.k(0)[page] = page + 1
    with (
        kx.Agent("prefill-0", LAYOUT, kx.Shard(), memory=source, fabric="shm") as prefill,
        kx.Agent("decode-0", LAYOUT, kx.Shard(), memory=target, fabric="shm") as decode,
    ):
        pool = kx.PagePool(PAGES)
        with pytest.raises(kx.PageError, match="21 pages are wanted, but the pool has 20 in all"):
            pool.take(21)
        held = {}
        for _ in range(2):
            room = kx.new_room()
            held[room] = pool.take(8)
            decode.expect(room, held[room], tokens=TOKENS, source=prefill.address)
        with pytest.raises(kx.PoolFull, match="4 of the pool's 20 are free"):
            pool.take(8)
        first, second = held
        sent = np.arange(8, dtype=np.int32)
        prefill.push(first, sent, tokens=TOKENS)
        events(decode, released(first))
        pool.give(held[first])

        third = kx.new_room()
        held[third] = pool.take(8)
        assert set(held[third]) == set(held[first]), "the pages that came back"
        decode.expect(third, held[third], tokens=TOKENS, source=prefill.address)
        for room in (second, third):
            prefill.push(room, sent[::-1].copy(), tokens=TOKENS)
        for room in (second, third):
            assert decode.wait(room, timeout=60).state == "Success"
            assert np.array_equal(target.k(0)[held[room]], source.k(0)[sent[::-1]])
        assert decode.stats()["protocol_errors"] == 0


def test_case_23_pages_of_a_failed_room_come_back_with_its_release_and_not_before() -> None:
    source, target = (kx.alloc(LAYOUT, kx.Shard(), pages=PAGES, fabric="shm") for _ in range(2))
    with (
        kx.Agent("prefill-0", LAYOUT, kx.Shard(), memory=source, fabric="shm") as prefill,
        kx.Agent("decode-0", LAYOUT, kx.Shard(), memory=target, fabric="shm") as decode,
    ):
        pool = kx.PagePool(PAGES)
        for _ in range(30):
            room, pages = kx.new_room(), pool.take(16)
            decode.expect(room, pages, tokens=TOKENS * 2, source=prefill.address)
            with pytest.raises(kx.PoolFull):
                pool.take(16)
            decode.cancel(room)
            found = events(decode, released(room))
            assert isinstance(found[0].error, kx.Cancelled)
            # The agent agrees that they are free: it takes them for the next room at once.
            pool.give(pages)
        assert len(pool) == PAGES
