"""Plans against a slow model of pages (`tests/support/oracle.py`), for layouts and rooms drawn at random.

`KVXFER_ORACLE_DRAWS` says how many are drawn; `make oracle-long` draws many.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from oracle import (
    Engine,
    Op,
    Planner,
    Push,
    Ranks,
    Room,
    Wrong,
    check,
    handoff,
    layers_of,
    lays,
    ops,
    share,
)
from oracle_draw import HEADS, SIZES, engines, fits, layouts, rooms

import kvxfer as kx

DRAWS = int(os.environ.get("KVXFER_ORACLE_DRAWS", "2000"))
pytestmark = pytest.mark.timeout(300 + DRAWS // 4)

Key = tuple[Push, "tuple[int, int] | None", Ranks]


def drawn(part: int) -> settings:
    """So many draws, as a part of all."""
    return settings(
        max_examples=max(20, DRAWS // part),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# ---------------------------------------------------------------- what plans do


@drawn(1)
@given(rooms())
def test_any_layout_goes_to_any_layout_byte_for_byte(room: Room) -> None:
    """Over all pairs of ranks, each granted byte has its tag and was written once; no other has changed."""
    check(room)


@drawn(5)
@given(engines())
def test_ranks_hold_and_pages_take_what_the_documentation_says(sides: tuple[Engine, Engine]) -> None:
    for engine in sides:
        for shard in engine.shards:
            for layout in engine.layouts:
                layers = layers_of(layout, engine.pp_size, shard.pp_rank)
                assert shard.layers(layout) == layers or not (len(layers) or len(shard.layers(layout)))
                if layout.kind not in ("latent", "state"):
                    assert shard.heads(layout) == share(layout.kv_heads, engine.tp_size, shard.tp_rank)
                found = lays(layout, shard)
                assert layout.parts == tuple(lay.part.label for lay in found)
                assert layout.page_extents(shard) == tuple((lay.page_bytes, lay.page_stride) for lay in found)


def replicated() -> st.SearchStrategy[tuple[Engine, Engine]]:
    """Several ranks hold the same head, or latent."""

    @st.composite
    def sides(draw: st.DrawFn) -> tuple[Engine, Engine]:
        src, dst = draw(st.sampled_from((2, 4, 6, 8))), draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
        heads = draw(st.sampled_from([n for n in (1, 2, 3, 4) if fits(n, src, dst) and n < src]))
        latent = draw(st.booleans())
        model: dict[str, Any] = {"kind": "latent" if latent else "heads", "layers": 1, "head_dim": 1}
        model.update(dtype="int8", **({} if latent else {"kv_heads": heads}))
        depth = draw(st.sampled_from((1, 1, 2)))
        return (
            Engine((draw(layouts(model, src, 1)),), src),
            Engine((draw(layouts(model, dst, depth)),), dst, depth),
        )

    return sides()


@drawn(8)
@given(rooms(replicated()), st.integers(200, 1200))
def test_replicas_write_equally_much(room: Room, tokens: int) -> None:
    """Each replica's link carries as much as the others', but for one block of tokens."""
    src, dst = room.src.layouts[0], room.dst.layouts[0]
    pages = [range(-(-tokens // layout.page_tokens)) for layout in (src, dst)]
    moved = check(handoff(room.src, room.dst, *pages, tokens))
    by_source = [
        sum(moved.get((s, d), 0) for d in range(len(room.dst.shards))) for s in range(len(room.src.shards))
    ]
    # A rank of the source has one head of one layer: the latent, or K and V.
    token = sum(tensor.row_bytes for lay in lays(src, room.src.shards[0]) for tensor in lay.part.offsets)
    both = math.lcm(src.page_tokens, dst.page_tokens)
    block = -(-64 // both) * both
    takers = max(1, room.dst.tp_size // (1 if src.kind == "latent" else src.kv_heads))
    assert max(by_source) - min(by_source) <= block * token * takers


# ---------------------------------------------------------------- the oracle objects


def everything(room: Room) -> list[tuple[Key, Op]]:
    """All writes of a room, with who makes them."""
    return [
        ((push, layers, (s, d)), op)
        for push in room.pushes
        for s in range(len(room.src.shards))
        for d in range(len(room.dst.shards))
        for layers in push.layers
        for op in ops(room, push, layers, (s, d))
    ]


def replay(writes: list[tuple[Key, Op]]) -> Planner:
    """A planner that says exactly this."""
    said: dict[Key, list[Op]] = {}
    for key, op in writes:
        said.setdefault(key, []).append(op)
    return lambda room, push, layers, ranks: said.get((push, layers, ranks), [])


Change = Callable[[Room, "list[tuple[Key, Op]]", int, int], "list[tuple[Key, Op]] | None"]


def altered(change: Callable[[Op], Op]) -> Change:
    def apply(room: Room, writes: list[tuple[Key, Op]], i: int, j: int) -> list[tuple[Key, Op]]:
        key, op = writes[i]
        return [*writes[:i], (key, change(op)), *writes[i + 1 :]]

    return apply


def swapped(room: Room, writes: list[tuple[Key, Op]], i: int, j: int) -> list[tuple[Key, Op]] | None:
    """Two writes of one plan go to each other's place."""
    mates = [n for n, (key, _) in enumerate(writes) if key == writes[i][0] and n != i]
    if not mates:
        return None
    j = mates[j % len(mates)]
    out = list(writes)
    for n, other in ((i, writes[j][1]), (j, writes[i][1])):
        key, op = writes[n]
        out[n] = (key, op._replace(dst_region=other.dst_region, dst_offset=other.dst_offset))
    return out


def elsewhere(room: Room, writes: list[tuple[Key, Op]], i: int, j: int) -> list[tuple[Key, Op]] | None:
    """A write goes to another destination rank than it should: heads 0,1,0,1 where they are 0,0,1,1."""
    (push, layers, (s, d)), op = writes[i]
    count = len(room.dst.shards)
    if count == 1:
        return None
    other = (d + 1 + j % (count - 1)) % count
    return [*writes[:i], ((push, layers, (s, other)), op), *writes[i + 1 :]]


def wrong_region(room: Room, writes: list[tuple[Key, Op]], i: int, j: int) -> list[tuple[Key, Op]] | None:
    """A write goes to another layer, K for V, or other scales."""
    key, op = writes[i]
    others = sorted({o.dst_region for k, o in writes if k[2][1] == key[2][1]} - {op.dst_region})
    if not others:
        return None
    return [*writes[:i], (key, op._replace(dst_region=others[j % len(others)])), *writes[i + 1 :]]


CHANGES: dict[str, Change] = {
    "left out": lambda room, writes, i, j: [*writes[:i], *writes[i + 1 :]],
    "made twice": lambda room, writes, i, j: [*writes, writes[i]],
    "a byte too far": altered(lambda op: op._replace(dst_offset=op.dst_offset + 1)),
    "a byte too early": altered(lambda op: op._replace(dst_offset=op.dst_offset - 1)),
    "read a byte too far": altered(lambda op: op._replace(src_offset=op.src_offset + 1)),
    "read a byte too early": altered(lambda op: op._replace(src_offset=op.src_offset - 1)),
    "a byte too long": altered(lambda op: op._replace(length=op.length + 1)),
    "a byte too short": altered(lambda op: op._replace(length=op.length - 1)),
    "swapped": swapped,
    "on another rank": elsewhere,
    "in another region": wrong_region,
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_oracle_objects_to_a_plan_with_one_write(name: str) -> None:
    """... left out, made twice, and so on."""
    objections = 0

    @drawn(60)
    @given(rooms(), st.integers(0, 1 << 30), st.integers(0, 1 << 30))
    def objects(room: Room, i: int, j: int) -> None:
        nonlocal objections
        writes = everything(room)
        assume(writes)
        changed = CHANGES[name](room, writes, i % len(writes), j)
        assume(changed is not None)
        assert changed is not None
        with pytest.raises(Wrong):
            check(room, replay(changed))
        objections += 1

    objects()
    assert objections >= 10


@pytest.mark.parametrize(
    "other",
    [{"order": "NHD"}, {"kind": "fused"}, {"kind": "packed"}, {"page_stride_bytes": 520}, {"page_tokens": 8}],
    ids=str,
)
def test_the_oracle_objects_to_a_plan_for_another_layout(other: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"layers": 1, "kv_heads": 4, "head_dim": 8, "page_tokens": 4, "dtype": "float16"}
    mine, theirs = kx.PageLayout(**plain), kx.PageLayout(**{**plain, **other})
    right = handoff(Engine((mine,)), Engine((mine,)), range(5), range(5), 20)
    check(right)
    wrong = Room(**{**vars(right), "dst": Engine((theirs,))})
    with pytest.raises(Wrong):
        check(wrong, lambda room, push, layers, ranks: ops(right, push, layers, ranks))


# ---------------------------------------------------------------- refusals


def again(layout: kx.PageLayout, **other: Any) -> kx.PageLayout:
    """The layout with something else, and without strides, which may be too small now."""
    plain = layout.__getnewargs_ex__()[1]
    for gap in ("page_stride_bytes", "layer_stride_bytes", "scale_stride_bytes"):
        plain.pop(gap, None)
    return kx.PageLayout(**{**plain, **other})


OF_STATES: dict[str, Callable[[kx.StateBlock], kx.StateBlock]] = {
    "units": lambda block: block._replace(units=block.units * 2),
    "unit_bytes": lambda block: block._replace(unit_bytes=block.unit_bytes + 1),
    "rows": lambda block: block._replace(rows=block.rows + 1),
}
FIELDS = (
    *("groups", "layers", "kind", "kv_heads", "head_dim", "dtype", "window_tokens", "scale_dim"),
    *("scale_dtype", "k_scale", "v_scale", *OF_STATES, "number of blocks"),
)


def different(layout: kx.PageLayout, field: str) -> tuple[kx.PageLayout, str]:
    """The layout with another value of a field that may not differ, and the field's name in the refusal."""
    if field == "layers":
        return again(layout, layers=layout.layers + 1, pp_layers=None), "layers"
    if layout.state is not None:
        if field == "number of blocks":
            return again(layout, state=[*layout.state, layout.state[0]]), "state blocks"
        blocks = list(layout.state)
        blocks[-1] = OF_STATES[field](blocks[-1])
        return again(layout, state=blocks), "state block"
    if field == "kind":
        return again(layout, kind="latent"), "kind"
    if field == "dtype":
        return again(layout, dtype="uint8"), "dtype"
    if field == "window_tokens":
        return again(layout, window_tokens=(layout.window_tokens or 6) + 1), "window"
    if field == "scale_dim":
        dim = 2 * (layout.scale_dim or 1)
        return again(layout, scale_dim=dim, scale_dtype=layout.scale_dtype or "int8"), "scales"
    if field == "scale_dtype":
        return again(layout, scale_dim=layout.scale_dim or 2, scale_dtype="int8"), "scales"
    other: dict[str, Any] = {"k_scale": 0.5, "v_scale": 2.0}
    return again(layout, **{field: other.get(field) or getattr(layout, field) * 2}), field


def refusals(src: Engine, dst: Engine) -> set[str]:
    """What each pair of ranks says; an error for a pair that says nothing."""
    said = set()
    for a in src.shards:
        for b in dst.shards:
            empty: list[list[int]] = [[] for _ in src.layouts]
            with pytest.raises(kx.LayoutMismatch) as refused:
                kx.plan_transfer(
                    (list(src.layouts), a), (list(dst.layouts), b), src_pages=empty, dst_pages=empty, tokens=0
                )
            said.add(str(refused.value))
    return said


@pytest.mark.parametrize("field", FIELDS)
def test_what_may_not_differ_is_refused_alike_by_every_pair_of_ranks(field: str) -> None:
    of_state = field in OF_STATES or field == "number of blocks"

    @drawn(60)
    @given(engines(most_groups=2, kinds=("state",) if of_state else ("heads",)), st.data())
    def refused(sides: tuple[Engine, Engine], data: st.DataObject) -> None:
        src, dst = sides
        # The other side as it was drawn, or with nothing else that differs.
        other = list(dst.layouts if data.draw(st.booleans()) else src.layouts)
        if field == "groups":
            other.append(other[0])
            text = f"groups differs: source has {len(src.layouts)}, destination has {len(other)}"
        else:
            g = data.draw(st.integers(0, len(other) - 1))
            other[g], name = different(again(other[g], pp_layers=None), field)
            text = f"{name} of group {g} differs: source has "
        wrong = Engine(tuple(other), dst.tp_size, dst.pp_size)
        (said,) = refusals(src, wrong)
        assert said.startswith(text)
        (back,) = refusals(wrong, src)
        ours, theirs = said.split("source has ")[1].split(", destination has ")
        assert ours != theirs
        assert back == f"{said.split('source has ')[0]}source has {theirs}, destination has {ours}"

    refused()


@drawn(20)
@given(st.sampled_from((*HEADS, 24)), st.sampled_from(SIZES), st.sampled_from(SIZES), st.booleans())
def test_case_06_heads_that_do_not_divide_are_refused_with_the_three_numbers(
    heads: int, prefill: int, decode: int, state: bool
) -> None:
    if state:
        layout = kx.PageLayout(layers=1, kind="state", state=[kx.StateBlock(units=heads, unit_bytes=2)])
    else:
        layout = kx.PageLayout(layers=1, kv_heads=heads, head_dim=2)
    src, dst = Engine((layout,), prefill), Engine((layout,), decode)
    if fits(heads, prefill, decode):
        pages = range(2)
        for a in src.shards:
            for b in dst.shards:
                kx.plan_transfer((layout, a), (layout, b), src_pages=pages, dst_pages=pages, tokens=1)
        return
    for text in refusals(src, dst):
        assert text.startswith(f"{heads} ")
        assert f"from tp_size {prefill} (source) to tp_size {decode} (destination)" in text
        assert "one number must divide the other" in text
