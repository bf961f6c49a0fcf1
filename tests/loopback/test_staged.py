"""Pushes of small runs over UCX: the same bytes packed or not, whoever chooses, with few slots too."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from rank_child import digest, fill
from two import Rank, eventually

import kvxfer as kx

pytestmark = pytest.mark.ucx

PAGES = 64
LAYOUT: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_dim": 64, "page_tokens": 16, "order": "NHD"}
each_tls = pytest.mark.parametrize("tls", ["tcp,self", "posix,self,tcp"])
SUCCESS = [("Success", True)]


class Pair:
    """Ranks of prefill at TP2, and one of decode at TP1: a run for each token and half of the heads."""

    def __init__(
        self, stack: ExitStack, tls: str, *, sends: dict[str, Any], takes: dict[str, Any], **layout: Any
    ) -> None:
        form = {**LAYOUT, **layout}
        options: dict[str, Any] = {"alloc": "ucx", "fabric": "ucx", "ucx_tls": tls, "pages": PAGES}
        self.prefill: list[Rank] = []
        for rank in range(2):
            near: dict[str, Any] = {"directory": self.prefill[0].address} if rank else {}
            child = Rank(
                form,
                {"tp_rank": rank, "tp_size": 2},
                seed=rank + 1,
                name=f"p{rank}",
                engine="p",
                **options,
                **sends,
                **near,
            )
            self.prefill.append(stack.enter_context(child))
        self.decode = stack.enter_context(Rank(form, seed=99, name="decode", **{**options, **takes}))
        self.pools = [kx.alloc(r.layout, r.shard, pages=PAGES, fabric="shm") for r in self.prefill]
        for n, pool in enumerate(self.pools):
            fill(pool, n + 1)

    def begin(self, src: list[int], dst: list[int], tokens: int, **given: Any) -> int:
        room = kx.new_room()
        source = self.prefill[0].address
        self.decode.expect(room, dst, tokens=tokens, source=source, **given)
        for rank in self.prefill:
            rank.push(room, src, tokens=tokens)
        return room

    def ends(self, room: int) -> None:
        for rank in (self.decode, *self.prefill):
            found = [(ev["state"], ev["released"]) for ev in rank.end(room)]
            assert found == SUCCESS, rank.last

    def right(self, src: list[int], second: list[int] | None = None) -> str:
        """What whole pages of decode hold of these pages of prefill, of the second rank if it has others."""
        axis = 2 if self.decode.layout.order == "NHD" else 1
        keys = self.pools[0].tensors
        pages = (src, src if second is None else second)
        halves = {
            key: [np.asarray(pool.tensors[key])[of] for pool, of in zip(self.pools, pages, strict=True)]
            for key in keys
        }
        whole = {key: np.concatenate(parts, axis=axis) for key, parts in halves.items()}
        return digest(whole, list(range(len(src))))

    def packed(self) -> tuple[int, int]:
        """Deliveries of both ranks that went packed, and that could have."""
        stats = [rank.stats() for rank in self.prefill]
        return sum(s["packed_deliveries"] for s in stats), sum(s["direct_deliveries"] for s in stats)


def ids(rng: np.random.Generator, count: int) -> list[int]:
    return [int(page) for page in rng.permutation(PAGES)[:count]]


@each_tls
@pytest.mark.parametrize(
    ("sends", "takes", "goes"),
    [
        ("always", "always", "packed"),
        ("always", "auto", "packed"),
        ("never", "always", "plain"),
        ("always", "never", "plain"),
        ("auto", "auto", "either"),
    ],
)
def test_packed_or_not_the_bytes_are_the_same(tls: str, sends: str, takes: str, goes: str) -> None:
    rng = np.random.default_rng(5)
    if goes == "either" and tls.startswith("tcp"):
        # A write each takes many times as long there: whatever else is measured, that is seen.
        goes = "packed"
    with ExitStack() as stack:
        pair = Pair(stack, tls, sends={"staging": sends}, takes={"staging": takes})
        for verify in (None, "full"):
            src, dst = ids(rng, 20), ids(rng, 20)
            rest = [page for page in range(PAGES) if page not in dst]
            before = pair.decode.digest(rest)
            pair.ends(pair.begin(src, dst, 320, verify=verify))
            assert pair.decode.digest(dst) == pair.right(src)
            assert pair.decode.digest(rest) == before, "outside the grant"
        assert pair.decode.stats()["stale_refused"] == 0

        def told() -> bool:
            packed, direct = pair.packed()
            return {
                "packed": (packed, direct) == (4, 0),
                "plain": (packed, direct) == (0, 0),
                "either": packed + direct == 4,
            }[goes]

        eventually(told, f"{pair.packed()} deliveries packed and not, wanted: {goes}")
        eventually(lambda: pair.decode.stats()["staging_slots"] == 0, "every slot is free")


def test_large_runs_are_never_packed_by_choice() -> None:
    with ExitStack() as stack:
        pair = Pair(stack, "posix,self,tcp", sends={}, takes={}, order="HND", head_dim=128, dtype="float32")
        src, dst = list(range(20)), list(range(20, 40))
        pair.ends(pair.begin(src, dst, 320))
        assert pair.decode.digest(dst) == pair.right(src)
        assert pair.packed() == (0, 0), "no ring was offered: nobody pays for one"


def test_large_runs_are_measured_too_where_pages_are_not_memory_of_ucxs_own() -> None:
    """Its shared memory reaches the ring and not the pages: only measuring says which way is faster."""
    with ExitStack() as stack:
        large: dict[str, Any] = {"order": "HND", "head_dim": 128, "dtype": "float32"}
        pair = Pair(stack, "posix,self,tcp", sends={}, takes={"alloc": "shm"}, **large)
        for src, dst in ((list(range(20)), list(range(20, 40))), (list(range(0, 40, 2)), list(range(20)))):
            pair.ends(pair.begin(src, dst, 320))
            assert pair.decode.digest(dst) == pair.right(src)
        eventually(lambda: sum(pair.packed()) == 4, f"{pair.packed()} deliveries packed and not")


@each_tls
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_many_rooms_share_a_ring_of_few_slots(tls: str, slots: int) -> None:
    """It is full nearly all the time: rooms wait for slots, and none waits for ever."""
    rng = np.random.default_rng(slots)
    few = {"staging": "always", "staging_slots": slots, "staging_slot_bytes": 4096}
    with ExitStack() as stack:
        pair = Pair(stack, tls, sends={"staging": "always"}, takes=few)
        for _ in range(3):
            src, dst = ids(rng, 60), ids(rng, 60)
            rooms = [
                pair.begin(src[n : n + 3], dst[n : n + 3], 48, verify="full" if n % 2 else None)
                for n in range(0, 60, 3)
            ]
            for room in rooms:
                pair.ends(room)
            assert pair.decode.digest(dst) == pair.right(src)
        eventually(lambda: pair.decode.stats()["staging_slots"] == 0, "every slot is free")


@each_tls
def test_a_push_that_is_taken_back_in_mid_slice_is_replaced(tls: str) -> None:
    few = {"staging": "always", "staging_slots": 2, "staging_slot_bytes": 4096}
    with ExitStack() as stack:
        pair = Pair(stack, tls, sends={"staging": "always"}, takes=few)
        rng = np.random.default_rng(2)
        for _ in range(5):
            src, other, dst = ids(rng, 40), ids(rng, 40), ids(rng, 40)
            room = kx.new_room()
            pair.decode.expect(room, dst, tokens=640, source=pair.prefill[0].address)
            for rank in pair.prefill:
                push = rank.push(room, other, tokens=640)
                rank.order(retract=push)
                rank.push(room, src, tokens=640)
            for rank in (pair.decode, *pair.prefill):
                events = [ev for ev in rank.end(room) if ev["state"] != "Retracted"]
                while not events:
                    events = [ev for ev in rank.end(room) if ev["state"] != "Retracted"]
                assert [(ev["state"], ev["released"]) for ev in events] == SUCCESS, rank.last
            got = pair.decode.digest(dst)
            # Where a rank had delivered all of it before the order to take it back, that stands.
            either = [pair.right(a, b) for a in (src, other) for b in (src, other)]
            assert got in either, "of one push or the other of each rank, not of both"
        eventually(lambda: pair.decode.stats()["staging_slots"] == 0, "every slot is free")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"staging": "sometimes"}, "auto, always and never"),
        ({"staging_slots": 0}, "1 to 65536 slots"),
        ({"staging_slots": 70000}, "1 to 65536 slots"),
        ({"staging_slot_bytes": 100}, "4096 to 16777216 bytes"),
        ({"staging_slot_bytes": 1 << 25}, "4096 to 16777216 bytes"),
        ({"staging_slot_bytes": 1 << 24, "staging_slots": 65536}, "less than 2^40"),
    ],
)
def test_rings_that_cannot_be_are_refused(given: dict[str, Any], text: str) -> None:
    layout = kx.PageLayout(**LAYOUT)
    pool = kx.alloc(layout, kx.Shard(), pages=2)
    with pytest.raises(kx.BadArgument, match=text.replace("^", r"\^")):
        kx.Agent("a", layout, kx.Shard(), memory=pool, **given)


def test_a_ring_that_nobody_asks_for_may_have_any_size() -> None:
    layout = kx.PageLayout(**LAYOUT)
    pool = kx.alloc(layout, kx.Shard(), pages=2)
    with kx.Agent("a", layout, kx.Shard(), memory=pool, staging="never", staging_slots=0) as agent:
        assert agent.stats()["staging_slots"] == 0
