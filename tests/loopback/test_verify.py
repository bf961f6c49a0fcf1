"""Checksums between processes: what `verify=` finds, what it does not, and what it leaves as it was."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from two import Rank, events, eventually, fill, released

import kvxfer as kx

WIDE: dict[str, Any] = {"layers": 4, "kv_heads": 4, "head_dim": 128, "page_tokens": 16, "dtype": "float16"}
"""8 KiB a token."""
PAGES = 256
FABRICS = ["shm", pytest.param("ucx", marks=pytest.mark.ucx)]
VERIFY = ["full", "sample"]
OK = [("Success", True)]

both = pytest.mark.parametrize("fabric", FABRICS)
each = pytest.mark.parametrize("verify", VERIFY)


@contextlib.contextmanager
def local(
    name: str, fabric: str, layout: dict[str, Any] = WIDE, shard: kx.Shard | None = None, **agent: Any
) -> Iterator[tuple[kx.Agent, kx.Pool]]:
    """An agent of this process and its pool."""
    form, shard = kx.PageLayout(**layout), shard or kx.Shard()
    pool = kx.alloc(form, shard, pages=PAGES, fabric=fabric)
    fill(pool, 1)
    with kx.Agent(name, form, shard, memory=pool, fabric=fabric, **agent) as made:
        yield made, pool


def child(name: str, fabric: str, layout: dict[str, Any] = WIDE, **given: Any) -> Rank:
    return Rank(layout, pages=PAGES, alloc=fabric, name=name, fabric=fabric, **given)


def states(found: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    return [(ev["state"], ev["released"]) for ev in found]


def rows(pool: Any, layout: dict[str, Any], pages: list[int], start: int, tokens: int) -> dict[Any, Any]:
    """Tokens by (layer, part), as (token, head, byte), whatever order and page size they lie in."""
    found = {}
    each = layout["page_tokens"]
    for (_, layer, part), tensor in pool.items():
        taken = np.array(tensor).view(np.uint8)[pages]
        if layout.get("order", "HND") == "HND":
            taken = taken.swapaxes(1, 2)
        flat = taken.reshape(-1, *taken.shape[2:])
        first = start % each
        found[layer, part] = flat[first : first + tokens]
    return found


def ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(page) for page in rng.permutation(PAGES)[:count]]


def summed_between(stats: Callable[[], dict[str, int]], low: int, high: int) -> bool:
    return low <= stats()["summed_bytes"] <= high


@both
@each
def test_whole_rooms_and_chunks(fabric: str, verify: str) -> None:
    """The sums are made at both ends, of every byte or of a part of them, and agree."""
    rng = np.random.default_rng(1)
    with child("prefill", fabric, seed=7) as prefill, local("decode", fabric) as (decode, pool):
        want = prefill.reference()
        before = (0, 0)
        for chunked in (False, True):
            room, src, dst = kx.new_room(), ids(rng, 20), ids(rng, 20)
            decode.expect(room, dst, tokens=310, source=prefill.address, verify=verify)
            if chunked:
                for start, end in ((0, 24), (24, 160), (160, 310)):
                    for layers in ((0, 3), (3, 4)):
                        pages = src[start // 16 : -(-end // 16)]
                        prefill.push(room, pages, start=start, tokens=end - start, layers=layers, last=False)
                prefill.push(room, [], start=310, tokens=0, meta="all")
            else:
                prefill.push(room, src, tokens=310)
            (event,) = events(decode, released(room))
            assert event.state == "Success", event.error
            assert event.meta == (b"all" if chunked else None)
            assert states(prefill.end(room)) == OK
            ours = rows(pool.tensors, WIDE, dst, 0, 310)
            theirs = rows(want, WIDE, src, 0, 310)
            assert all(np.array_equal(ours[key], theirs[key]) for key in theirs)
            moved = 310 * 8192
            low, high = (moved, moved) if verify == "full" else (moved // 128, moved // 16)
            for stats, then in zip((decode.stats, prefill.stats), before, strict=True):
                # Published every few milliseconds.
                eventually(functools.partial(summed_between, stats, then + low, then + high), "both sum")
            before = (decode.stats()["summed_bytes"], prefill.stats()["summed_bytes"])


@both
def test_a_room_that_asks_for_none_pays_nothing(fabric: str) -> None:
    with child("prefill", fabric) as prefill, local("decode", fabric) as (decode, _):
        room = kx.new_room()
        decode.expect(room, [1, 2], tokens=32, source=prefill.address, verify=None)
        prefill.push(room, [3, 4], tokens=32)
        (event,) = events(decode, released(room))
        assert event.state == "Success"
        assert states(prefill.end(room)) == OK
        eventually(lambda: decode.stats()["succeeded"] == 1, "statistics are published")
        assert (decode.stats()["summed_bytes"], prefill.stats()["summed_bytes"]) == (0, 0)


SPLIT = [{"tp_rank": rank, "tp_size": 2} for rank in range(2)]
OTHER = WIDE | {"order": "NHD", "page_tokens": 24}


@both
@each
def test_two_ranks_to_one_with_another_order_and_page_size(fabric: str, verify: str) -> None:
    """Each source rank is summed by itself: HND in pages of 16 to NHD in pages of 24, from the middle on."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(child("p0", fabric, shard=SPLIT[0], seed=10, engine="prefill"))
        second = stack.enter_context(
            child("p1", fabric, shard=SPLIT[1], seed=11, engine="prefill", directory=first.address)
        )
        decode, pool = stack.enter_context(local("decode", fabric, OTHER))
        room, src, dst = kx.new_room(), [9, 3, 7, 1, 8], [4, 2, 9, 6]
        # The first page of a list holds `start`.
        decode.expect(room, dst, start=21, tokens=58, source=first.address, verify=verify)
        for rank in (first, second):
            rank.push(room, src, tokens=79)
        (event,) = events(decode, released(room))
        assert event.state == "Success", event.error
        got = rows(pool.tensors, OTHER, dst, 21, 58)
        for n, rank in enumerate((first, second)):
            assert states(rank.end(room)) == OK
            for key, tensor in rows(rank.reference(), WIDE, src, 0, 79).items():
                assert np.array_equal(got[key][:, 2 * n : 2 * n + 2], tensor[21:79]), key


@both
@each
def test_one_rank_to_two_with_another_order_and_page_size(fabric: str, verify: str) -> None:
    with contextlib.ExitStack() as stack:
        prefill, _ = stack.enter_context(local("prefill", fabric, OTHER))
        ranks = [
            stack.enter_context(child(f"d{n}", fabric, WIDE, shard=SPLIT[n], seed=20 + n, engine="decode"))
            for n in range(2)
        ]
        room, src, dst = kx.new_room(), [4, 2, 9, 6], [9, 3, 7, 1, 8]
        for rank in ranks:
            rank.expect(room, dst, tokens=79, source=prefill.address, verify=verify)
        prefill.push(room, src, tokens=79)
        (event,) = events(prefill, released(room))
        assert event.state == "Success", event.error
        for rank in ranks:
            assert states(rank.end(room)) == OK
        eventually(lambda: prefill.stats()["summed_bytes"] > 0, "the source is summed")


def sums(text: str) -> list[str]:
    return re.findall(r"0x[0-9a-f]{16}", text)


@both
def test_a_flipped_byte_is_always_found_by_full(fabric: str) -> None:
    """Both sides fail and name both sums; the pages come back, and the source serves others as before."""
    with (
        child("prefill", fabric, seed=5) as prefill,
        local("decode", fabric, _flaw="flip-a-byte") as (decode, _),
        local("sound", fabric) as (sound, pool),
    ):
        for n in range(12):
            room = kx.new_room()
            decode.expect(room, [1, 2, 3], start=n, tokens=7 + n, source=prefill.address, verify="full")
            prefill.push(room, [4, 5, 6], start=n, tokens=7 + n)
            found = events(decode, released(room))
            assert found[0].state == "Failed"
            assert isinstance(found[0].error, kx.ChecksumMismatch)
            ours, theirs = sums(str(found[0].error))
            assert ours != theirs
            with pytest.raises(kx.ChecksumMismatch):
                decode.wait(room)
            assert prefill.event(room)["error"] == "ChecksumMismatch"
            assert sums(prefill.last["text"]) == [ours, theirs]
            if not prefill.last["event"]["released"]:
                prefill.end(room)
        # The same source is as good as ever to who receives its bytes whole.
        room = kx.new_room()
        sound.expect(room, [1, 2, 3], tokens=40, source=prefill.address, verify="full")
        prefill.push(room, [4, 5, 6], tokens=40)
        (event,) = events(sound, released(room))
        assert event.state == "Success", event.error
        got, want = (
            rows(pool.tensors, WIDE, [1, 2, 3], 0, 40),
            rows(prefill.reference(), WIDE, [4, 5, 6], 0, 40),
        )
        assert all(np.array_equal(got[key], want[key]) for key in want)
        for side in (decode, prefill):
            eventually(lambda side=side: side.stats()["quarantined_pages"] == 0, "counted")


@both
def test_a_flipped_byte_is_found_by_a_sample_if_its_row_is_in_it(fabric: str) -> None:
    """Both truths of a sample: most single bytes pass, and a room that passes has that byte wrong."""
    passed = caught = 0
    with (
        child("prefill", fabric, seed=5) as prefill,
        local("decode", fabric, _flaw="flip-a-byte") as (decode, pool),
    ):
        for n in range(48):
            room = kx.new_room()
            decode.expect(room, [1, 2, 3], start=n, tokens=9, source=prefill.address, verify="sample")
            prefill.push(room, [4, 5, 6], start=n, tokens=9)
            event = events(decode, released(room))[0]
            got, want = rows(pool.tensors, WIDE, [1, 2], n, 9), rows(prefill.reference(), WIDE, [4, 5], n, 9)
            assert sum(int((got[key] != want[key]).sum()) for key in want) == 1
            if event.state == "Success":
                passed += 1
            else:
                assert isinstance(event.error, kx.ChecksumMismatch)
                caught += 1
            prefill.end(room)
        # Which rows are sampled depends on their places only, so these are the same in every run.
        assert (passed > 24, caught > 0) == (True, True), (passed, caught)
        # The first and the last token of a push are always in it: here there is no other.
        room = kx.new_room()
        decode.expect(room, [1], tokens=2, source=prefill.address, verify="sample")
        prefill.push(room, [4], tokens=2)
        assert isinstance(events(decode, released(room))[0].error, kx.ChecksumMismatch)


@both
@each
def test_taken_back_and_pushed_again(fabric: str, verify: str) -> None:
    """The engine takes pushes back at any time, also while either side sums them, and pushes others."""
    rng = np.random.default_rng(3)
    with (
        child("prefill", fabric, seed=5, slice_bytes=4096) as prefill,
        local("decode", fabric, slice_bytes=4096) as (decode, pool),
    ):
        for n in range(24):
            room, dst, old, new = kx.new_room(), ids(rng, 16), ids(rng, 16), ids(rng, 16)
            decode.expect(room, dst, tokens=256, source=prefill.address, verify=verify)
            gone = prefill.push(room, old, tokens=256, last=False)
            if n % 3:
                # By then something is delivered, and more often than not something is being summed.
                seen = decode.stats()["summed_bytes"]
                met = functools.partial(summed_between, decode.stats, seen + 1, 1 << 60)
                with contextlib.suppress(AssertionError):
                    eventually(met, "a sum", seconds=0.004 * n, pause=0)
            prefill.order(retract=gone)
            prefill.push(room, new, tokens=256)
            (event,) = events(decode, released(room))
            assert event.state == "Success", event.error
            found = [prefill.event(room), prefill.event(room)]
            assert sorted(ev["state"] for ev in found) == ["Retracted", "Success"]
            got, want = rows(pool.tensors, WIDE, dst, 0, 256), rows(prefill.reference(), WIDE, new, 0, 256)
            assert all(np.array_equal(got[key], want[key]) for key in want), f"round {n}"


@both
@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_cancelled_while_it_is_summed(fabric: str, who: str) -> None:
    """The sum stops, both sides end once, the pages come back and the next room uses them."""
    total = 128 * 16 * 8192
    hits = 0
    with (
        local(who, fabric, slice_bytes=4096) as (mine, _),
        child("peer", fabric, seed=9, slice_bytes=4096) as peer,
    ):
        pages = list(range(128))
        for _ in range(20):
            eventually(lambda: mine.stats()["deliveries"] == 0, "nothing is under way")
            before, room = mine.stats()["summed_bytes"], kx.new_room()

            def summed(before: int = before) -> int:
                return mine.stats()["summed_bytes"] - before

            if who == "decode":
                mine.expect(room, pages, tokens=2048, source=peer.address, verify="full")
                peer.push(room, pages, tokens=2048)
            else:
                peer.expect(room, pages, tokens=2048, source=mine.address, verify="full")
                mine.push(room, pages, tokens=2048)
            eventually(lambda summed=summed: summed() > 0, "the sum begins", seconds=30, pause=0)
            with contextlib.suppress(kx.UnknownRoom):  # it was over already
                mine.cancel(room)
            found = events(mine, released(room))
            ended = [ev for ev in found if ev.state in ("Success", "Failed")]
            assert len(ended) == 1
            assert len([ev for ev in found if ev.released]) == 1
            if ended[0].state == "Failed":
                assert isinstance(ended[0].error, kx.Cancelled)
                eventually(lambda: mine.stats()["deliveries"] == 0, "the sum stops")
                hits += summed() < total
            assert states(peer.end(room))[-1][1]
            if hits >= 3:
                break
        assert hits > 0, "no cancel met a sum"
        room = kx.new_room()
        if who == "decode":
            mine.expect(room, pages, tokens=2048, source=peer.address, verify="full")
            peer.push(room, pages, tokens=2048)
        else:
            peer.expect(room, pages, tokens=2048, source=mine.address, verify="full")
            mine.push(room, pages, tokens=2048)
        assert events(mine, released(room), seconds=60)[-1].state == "Success"
        assert states(peer.end(room)) == OK
