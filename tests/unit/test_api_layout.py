"""Layouts, shards and plans as Python sees them."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import kvxfer as kx

ONE = kx.Shard()


def layout(**changes: Any) -> kx.PageLayout:
    given: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_dim": 8, "page_tokens": 4, "dtype": "float16"}
    return kx.PageLayout(**(given | changes))


def test_sizes_and_names() -> None:
    qwen = kx.PageLayout(layers=64, kv_heads=8, head_dim=128)
    assert (qwen.page_tokens, qwen.dtype, qwen.order, qwen.kind) == (16, "bfloat16", "HND", "kv")
    assert (qwen.item_bytes, qwen.row_bytes, qwen.parts) == (2, 256, ("k", "v"))
    assert qwen.page_bytes(ONE) == 16 * 8 * 256
    assert qwen.page_bytes(kx.Shard(tp_rank=3, tp_size=8)) == 4096
    assert layout(kind="fused").page_bytes(ONE) == 2 * layout().page_bytes(ONE)
    latent = layout(kind="latent")
    assert (latent.kv_heads, latent.parts, latent.page_bytes(kx.Shard(1, 2))) == (1, ("latent",), 4 * 16)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("bf16", "bfloat16"),
        ("torch.bfloat16", "bfloat16"),
        (np.float16, "float16"),
        (np.dtype("float32"), "float32"),
        (np.int8, "int8"),
        ("float8_e4m3fn", "float8_e4m3"),
    ],
)
def test_dtypes_by_many_names(dtype: object, name: str) -> None:
    assert layout(dtype=dtype).dtype == name


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"page_tokens": 0}, "page_tokens is 0"),
        ({"layers": 100_000}, "100000"),
        ({"layers": -1}, "-1 is out of range: 0 to 4294967295"),
        ({"head_dim": 1 << 32}, "4294967296"),
        ({"dtype": "float64"}, "float64"),
        ({"dtype": np.dtype("complex64")}, "complex64"),
        ({"order": "hnd"}, "hnd"),
        ({"kind": "mla"}, "mla"),
        ({"kv_heads": None}, "kv_heads"),
        ({"head_dim": 1 << 30}, "larger than"),
    ],
)
def test_bad_layouts_name_the_value(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(kx.BadArgument, match=text):
        layout(**changes)


def test_layouts_compare_hash_pickle_and_cannot_change() -> None:
    a = layout(order="NHD", kind="fused")
    b = pickle.loads(pickle.dumps(a))
    assert a == b
    assert hash(a) == hash(b)
    assert a != layout(kind="fused")
    assert a != "layout"
    assert len({a, b, layout()}) == 2
    assert eval(repr(a), {"PageLayout": kx.PageLayout}) == a
    with pytest.raises(AttributeError):
        a.layers = 3  # type: ignore[misc]
    # A latent has no heads, whatever the caller says.
    assert layout(kind="latent", kv_heads=7) == layout(kind="latent", kv_heads=None)


def test_shards() -> None:
    shard = kx.Shard(tp_rank=1, tp_size=2, pp_rank=1, pp_size=3)
    assert pickle.loads(pickle.dumps(shard)) == shard
    assert eval(repr(shard), {"Shard": kx.Shard}) == shard
    assert shard.layers(layout(layers=7)) == range(3, 5)
    assert shard.heads(layout()) == range(2, 4)
    assert [list(kx.Shard(rank, 4).heads(layout(kv_heads=2))) for rank in range(4)] == [[0], [0], [1], [1]]
    with pytest.raises(kx.BadArgument, match="tp_rank is 2 and tp_size 2"):
        kx.Shard(2, 2)
    with pytest.raises(kx.BadArgument, match="6 KV heads"):
        layout(kv_heads=6).page_bytes(kx.Shard(0, 4))
    with pytest.raises(TypeError):
        kx.Shard("0")  # type: ignore[arg-type]


def runs(plan: kx.Plan, layer: int, part: str, page_bytes: int) -> list[tuple[int, int, int]]:
    """(source page, destination page, bytes) of the writes of one region."""
    region = plan.src_regions.index((0, layer, part))
    ops = plan.ops[plan.ops["src_region"] == region]
    return [
        (int(op["src_offset"]) // page_bytes, int(op["dst_offset"]) // page_bytes, int(op["length"]))
        for op in ops
    ]


def test_case_8_a_prefix_is_cached_on_decode() -> None:
    page = layout().page_bytes(ONE)
    plan = kx.plan_transfer(
        (layout(), ONE), (layout(), ONE), src_pages=[10, 11, 12, 13, 14], dst_pages=[7, 9], start=12, tokens=8
    )
    for layer in (0, 1):
        for part in ("k", "v"):
            assert runs(plan, layer, part, page) == [(13, 7, page), (14, 9, page)]
    assert (len(plan), plan.bytes) == (8, 8 * page)
    assert repr(plan) == f"Plan(8 writes, {8 * page} bytes)"
    assert plan.ops.dtype.names == ("src_region", "src_offset", "dst_region", "dst_offset", "length")
    assert not plan.ops.flags.writeable


def test_case_9_nothing_to_send() -> None:
    plan = kx.plan_transfer((layout(), ONE), (layout(), ONE), src_pages=[1], dst_pages=[], start=4, tokens=0)
    assert (len(plan), plan.bytes, plan.ops.shape) == (0, 0, (0,))


def test_case_21_runs_are_joined_where_both_sides_are_contiguous() -> None:
    page = layout().page_bytes(ONE)
    plan = kx.plan_transfer(
        (layout(), ONE), (layout(), ONE), src_pages=[5, 6, 7], dst_pages=[9, 10, 12], tokens=12
    )
    assert runs(plan, 0, "k", page) == [(5, 9, 2 * page), (7, 12, page)]


def test_case_6_heads_from_two_ranks() -> None:
    """8 heads, TP4 to TP2: decode's second rank has heads 4 to 7 from the source's third and fourth."""
    eight = layout(kv_heads=8)
    seen = []
    for rank in range(4):
        plan = kx.plan_transfer(
            (eight, kx.Shard(rank, 4)), (eight, kx.Shard(1, 2)), src_pages=[0], dst_pages=[3], tokens=4
        )
        seen.append(plan.bytes)
    half = eight.page_bytes(kx.Shard(0, 4)) * 2 * 2
    assert seen == [0, 0, half, half]
    six = layout(kv_heads=6)
    with pytest.raises(kx.LayoutMismatch, match="6 heads cannot be split over 4"):
        kx.plan_transfer((six, kx.Shard(0, 4)), (six, kx.Shard(0, 2)), src_pages=[0], dst_pages=[0], tokens=4)


def test_a_plan_moves_what_it_says() -> None:
    """HND pages of 4 tokens into NHD pages of 2, by following the plan in numpy."""
    src_layout = layout(layers=1)
    dst_layout = layout(layers=1, order="NHD", page_tokens=2)
    source = kx.alloc(src_layout, ONE, pages=4)
    target = kx.alloc(dst_layout, ONE, pages=8)
    for part in ("k", "v"):
        view = source.tensors[0, 0, part]
        view[...] = np.arange(view.size).reshape(view.shape) + (1000 if part == "v" else 0)
    plan = kx.plan_transfer(
        (src_layout, ONE), (dst_layout, ONE), src_pages=[3, 1], dst_pages=[6, 0, 5, 2], tokens=7
    )
    flat = [
        {region: pool.tensors[region].view("uint8").reshape(-1) for region in regions}
        for pool, regions in ((source, plan.src_regions), (target, plan.dst_regions))
    ]
    for op in plan.ops:
        n = int(op["length"])
        here = flat[0][plan.src_regions[op["src_region"]]][op["src_offset"] :][:n]
        flat[1][plan.dst_regions[op["dst_region"]]][op["dst_offset"] :][:n] = here
    for token in range(7):
        a, b = [3, 1][token // 4], [6, 0, 5, 2][token // 2]
        np.testing.assert_array_equal(target.k(0)[b, token % 2], source.k(0)[a, :, token % 4])
        np.testing.assert_array_equal(target.v(0)[b, token % 2], source.v(0)[a, :, token % 4])
    assert not target.k(0)[2, 1].any(), "the eighth token was not asked for"


def iter_range(ids: list[int]) -> range:
    return range(ids[0], ids[-1] + 1)


@pytest.mark.parametrize("make", [list, tuple, np.array, lambda ids: np.array(ids, np.int32), iter_range])
def test_every_form_of_page_ids_gives_the_same_plan(make: Any) -> None:
    plans = [
        kx.plan_transfer(
            (layout(), ONE), (layout(), ONE), src_pages=pages, dst_pages=[5, 4, 3], tokens=12
        ).ops
        for pages in ([2, 3, 4], make([2, 3, 4]))
    ]
    np.testing.assert_array_equal(*plans)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "uint32", "int64", "uint64", ">i4"])
def test_integer_arrays_of_any_type_and_stride(dtype: str) -> None:
    table = np.array([[2, 9], [3, 9], [4, 9]], dtype)
    plan = kx.plan_transfer(
        (layout(), ONE), (layout(), ONE), src_pages=table[:, 0], dst_pages=[5, 4, 3], tokens=12
    )
    assert [run[0] for run in runs(plan, 0, "k", layout().page_bytes(ONE))] == [2, 3, 4]


def test_groups_have_their_own_page_lists() -> None:
    window = layout(layers=1, page_tokens=8)
    plan = kx.plan_transfer(
        ([layout(), window], ONE),
        ([layout(), window], ONE),
        src_pages=[[0, 1], [4]],
        dst_pages=[[2, 3], [5]],
        tokens=8,
    )
    last = plan.ops[plan.ops["src_region"] == plan.src_regions.index((1, 0, "v"))]
    assert (int(last["src_offset"][0]), int(last["dst_offset"][0])) == (4 * 512, 5 * 512)
    with pytest.raises(kx.BadArgument, match="1 page lists for 2 groups"):
        kx.plan_transfer(
            ([layout(), window], ONE), ([layout(), window], ONE), src_pages=[[0]], dst_pages=[[0]], tokens=1
        )


def test_layers_of_a_plan() -> None:
    def bytes_of(layers: Any) -> int:
        return kx.plan_transfer(
            (layout(), ONE), (layout(), ONE), src_pages=[0], dst_pages=[0], tokens=4, layers=layers
        ).bytes

    assert bytes_of(range(1, 2)) == bytes_of((0, 1)) == bytes_of(None) // 2
    for wrong in ((1, 1), range(2, 1), (-1, 1), range(0, 2, 2)):
        with pytest.raises(kx.BadArgument, match="layers"):
            bytes_of(wrong)
    with pytest.raises(TypeError):
        bytes_of([0, 1])


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"dst_pages": [1, 1]}, kx.PageError, "page 1 is twice"),
        ({"src_pages": [0, -1]}, kx.PageError, "source page -1 of group 0 is out of range"),
        ({"dst_pages": [0, 1 << 40]}, kx.PageError, f"destination page {1 << 40} of group 0 is out of range"),
        ({"dst_page_count": 2}, kx.PageError, "page 2 of group 0 is out of range: there are 2"),
        ({"src_pages": [0]}, kx.BadArgument, "source"),
        ({"tokens": -1}, kx.BadArgument, "-1"),
        ({"tokens": 1 << 64}, kx.BadArgument, "64 bits"),
        ({"start": (1 << 64) - 1}, kx.BadArgument, "too large"),
        ({"src_pages": [0.5, 1]}, TypeError, "float"),
        ({"src_pages": np.array([0.0, 1.0])}, TypeError, "float64"),
        ({"src_pages": np.array([True, False])}, TypeError, "bool"),
        ({"src_pages": np.zeros((2, 2), int)}, kx.BadArgument, r"shape \[2, 2\]"),
        ({"src_pages": "01"}, TypeError, "str"),
        ({"src_pages": {0, 1}}, TypeError, "set"),
        ({"src_page_count": [1, 2]}, kx.BadArgument, "2 source page counts for 1 groups"),
        ({"dst": (layout(head_dim=16), ONE)}, kx.LayoutMismatch, "head_dim"),
        ({"dst": (layout(dtype="bf16"), ONE)}, kx.LayoutMismatch, "dtype"),
    ],
)
def test_bad_requests(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    given: dict[str, Any] = {
        "src": (layout(), ONE),
        "dst": (layout(), ONE),
        "src_pages": [0, 1],
        "dst_pages": [1, 2],
        "tokens": 8,
    }
    with pytest.raises(error, match=text):
        kx.plan_transfer(**(given | changes))


def test_case_22_offsets_past_32_bits() -> None:
    big = layout(head_dim=512, page_tokens=16, kv_heads=4)
    assert big.page_bytes(ONE) == 65_536
    plan = kx.plan_transfer((big, ONE), (big, ONE), src_pages=[40_000], dst_pages=[3_000_000_000], tokens=16)
    assert int(plan.ops["src_offset"][0]) == 40_000 * 65_536
    assert int(plan.ops["dst_offset"][0]) == 3_000_000_000 * 65_536


def test_rooms() -> None:
    rooms = {kx.new_room() for _ in range(1000)}
    assert len(rooms) == 1000
    assert all(0 <= room < 1 << 63 for room in rooms)


MAMBA = (
    kx.StateBlock(units=8, unit_bytes=6, rows=3),
    kx.StateBlock(units=1, unit_bytes=4, rows=3),
    (8, 64, 1, 1),
)


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "packed", "page_stride_bytes": 4096},
        {"cross_layer": True},
        {"cross_layer": True, "layer_stride_bytes": 1024, "page_stride_bytes": 8192},
        {"pp_layers": (2, 0)},
        {"window_tokens": 100},
        {"scale_dim": 2, "scale_dtype": "float16", "scale_stride_bytes": 512, "k_scale": 0.5},
        {"dtype": "uint4"},
    ],
)
def test_what_is_not_plain_is_kept(given: dict[str, Any]) -> None:
    made = layout(**given)
    assert {key: getattr(made, key) for key in given} == given
    assert pickle.loads(pickle.dumps(made)) == made
    assert eval(repr(made), {"PageLayout": kx.PageLayout}) == made
    assert made != layout()
    assert hash(made) != hash(layout())


def test_plain_layouts_have_none_of_it() -> None:
    names = (
        "page_stride_bytes",
        "layer_stride_bytes",
        "pp_layers",
        "window_tokens",
        "scale_dim",
        "scale_dtype",
    )
    assert [getattr(layout(), name) for name in (*names, "scale_stride_bytes", "state")] == [None] * 8
    assert (layout().cross_layer, layout().k_scale, layout().v_scale) == (False, 1.0, 1.0)


def test_sizes_of_what_is_not_plain() -> None:
    page = layout().page_bytes(ONE)
    assert layout(dtype="uint4").row_bytes == 4
    assert layout(page_stride_bytes=4096).page_extents(ONE) == ((page, 4096),) * 2
    cross = layout(kind="fused", cross_layer=True)
    assert (cross.page_bytes(ONE), cross.page_extents(kx.Shard(0, 1, 0, 2))) == (
        4 * page,
        ((2 * page, 2 * page),),
    )
    apart = layout(cross_layer=True, layer_stride_bytes=page + 24)
    assert apart.page_extents(ONE) == ((2 * page + 24, 2 * page + 48),) * 2
    scaled = layout(scale_dim=1, scale_stride_bytes=100)
    assert scaled.parts == ("k", "v", "k_scale", "v_scale")
    assert scaled.page_extents(kx.Shard(0, 2)) == ((page // 2, page // 2),) * 2 + ((32, 100),) * 2
    state = kx.PageLayout(layers=3, kind="state", state=MAMBA)
    assert (state.parts, state.page_tokens) == (("state", "state1"), 1)
    assert state.page_extents(kx.Shard(1, 4)) == ((48, 48), (128, 128))
    assert state.state == (kx.StateBlock(8, 6, 3), kx.StateBlock(1, 4, 3), kx.StateBlock(8, 64, 1, 1))
    assert pickle.loads(pickle.dumps(state)) == state
    assert eval(repr(state), {"PageLayout": kx.PageLayout, "StateBlock": kx.StateBlock}) == state
    assert kx.Shard(0, 1, 1, 2).layers(layout(pp_layers=(0, 2))) == range(2)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": "uint4", "head_dim": 7}, "head_dim is 7 uint4; it must be a multiple of 2"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"page_stride_bytes": 0}, "page_stride_bytes is 0"),
        ({"layer_stride_bytes": 64}, "without cross_layer=True"),
        ({"pp_layers": (1, 2)}, "pp_layers add up to 3, but the group has 2 layers"),
        ({"pp_layers": ()}, "pp_layers has 0 counts"),
        ({"window_tokens": 0}, "window is 0 tokens"),
        ({"scale_dtype": "float16"}, "without scale_dim"),
        ({"scale_dim": 0}, "scale_dim is 0"),
        ({"k_scale": 0.0}, "k_scale is 0"),
        ({"v_scale": float("nan")}, "v_scale NaN"),
        ({"state": MAMBA}, 'kind is "kv", and state is given'),
        ({"kind": "state"}, "head_dim, page_tokens and dtype are not its own"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(kx.BadArgument, match=text):
        layout(**changes)


@pytest.mark.parametrize(
    ("blocks", "text"),
    [
        (None, "state is not"),
        ([], "state has 0 blocks; it has 1 to 16"),
        ([(0, 4, 1, 0)], "state block 0 has 0 units"),
        ([(1, 4, 1, 1)], "part 0 of the state has 0 bytes"),
        ([(1, 4, 1, 8)], "parts are below 8"),
    ],
)
def test_states_that_make_no_sense_are_refused(blocks: Any, text: str) -> None:
    with pytest.raises(kx.BadArgument, match=text):
        kx.PageLayout(layers=1, kind="state", state=blocks)


def test_a_stride_that_is_too_small_is_told_at_the_rank() -> None:
    small = layout(page_stride_bytes=layout().page_bytes(ONE) - 2)
    with pytest.raises(kx.BadArgument, match="page_stride_bytes is 254, but a page of part k takes 256"):
        small.page_extents(ONE)
    assert small.page_extents(kx.Shard(0, 2))[0] == (128, 254)


def test_a_window_plans_the_end_of_the_room() -> None:
    both = (layout(layers=1, kv_heads=1, window_tokens=6), ONE)
    row = both[0].row_bytes

    def tokens(plan: kx.Plan) -> list[tuple[int, int, int]]:
        first = plan.ops[plan.ops["src_region"] == 0]
        return [
            tuple(int(op[name]) // row for name in ("src_offset", "dst_offset", "length")) for op in first
        ]  # type: ignore[misc]

    # Tokens 4 to 9: all of page 1, and half of page 2.
    plan = kx.plan_transfer(both, both, src_pages=[5, 2], dst_pages=[0, 7], tokens=10)
    assert tokens(plan) == [(20, 0, 4), (8, 28, 2)]
    # A chunk of a room of 10 tokens: the last six of its 8 are 2 to 7, of which the room keeps 4 to 7.
    plan = kx.plan_transfer(both, both, src_pages=[9, 5], dst_pages=[0, 7], tokens=8, end=10)
    assert tokens(plan) == [(20, 0, 4)]
    with pytest.raises(kx.BadArgument, match="end is 7, before the end of the tokens, 8"):
        kx.plan_transfer(both, both, src_pages=[9, 5], dst_pages=[0, 7], tokens=8, end=7)
