"""How the vLLM connector sees the memory of KV pages, from shapes and strides alone."""

import pytest

import kvxfer as kx
from kvxfer.vllm.layout import Cache, Form, Model, form_of

MODEL = Model(layers=3, kv_heads=4, head_dim=8)
ITEM = 2


def cache(shape: tuple[int, ...], strides: tuple[int, ...], **kwargs: object) -> Cache:
    facts: dict[str, object] = {"dtype": "bfloat16", "layer_bytes": None, "item_bytes": ITEM, "isa": None}
    return Cache(shape, strides, **{**facts, **kwargs})  # type: ignore[arg-type]


def form(shape: tuple[int, ...], strides: tuple[int, ...], tp: int = 1, **kwargs: object) -> Form:
    return form_of(cache(shape, strides, **kwargs), MODEL, kx.Shard(tp_rank=0, tp_size=tp))


def test_head_first_and_token_first_are_told_apart() -> None:
    hnd = form((9, 4, 16, 16), (1024, 256, 16, 1))
    nhd = form((9, 4, 16, 16), (1024, 16, 64, 1))
    assert (hnd.layout.order, nhd.layout.order) == ("HND", "NHD")
    assert (hnd.unit, hnd.layout.kind, hnd.layout.page_tokens, hnd.layout.kv_heads) == (1, "packed", 16, 4)
    assert hnd.converts is None
    assert hnd.layout.page_bytes(kx.Shard()) == 1024 * ITEM


def test_a_ranks_heads_are_a_share_of_the_models() -> None:
    assert form((9, 2, 16, 16), (512, 256, 16, 1), tp=2).layout.kv_heads == 4
    with pytest.raises(kx.NotSupported, match="expected 2 heads"):
        form((9, 4, 16, 16), (1024, 256, 16, 1), tp=2)


def test_blocks_outermost_are_one_region_of_all_layers() -> None:
    cross = form((9, 4, 16, 16), (3072, 256, 16, 1), layer_bytes=1024 * ITEM)
    assert cross.layout.cross_layer
    assert cross.layout.page_stride_bytes == 3072 * ITEM
    assert cross.layout.layer_stride_bytes == 1024 * ITEM
    gaps = form((9, 4, 16, 16), (2048, 256, 16, 1), layer_bytes=9 * 2048 * ITEM)
    assert not gaps.layout.cross_layer
    assert gaps.layout.page_stride_bytes == 2048 * ITEM


def test_tiles_of_a_cpu_kernel_are_units_whatever_the_block() -> None:
    small = form((9, 4, 32, 16), (2048, 512, 16, 1), isa="vec")
    large = form((9, 4, 64, 16), (4096, 1024, 16, 1), isa="vec")
    assert (small.unit, large.unit) == (32, 32)
    assert (small.converts, large.converts) == (None, "vec")
    assert (small.layout.page_tokens, large.layout.page_tokens) == (1, 2)
    # The same to a peer: else a hand-off is refused.
    assert (small.mode, small.layout.head_dim) == (large.mode, large.layout.head_dim)
    other = form((9, 4, 32, 16), (2048, 512, 16, 1), isa="amx")
    assert other.mode != small.mode


def test_whole_blocks_as_units_need_no_copy() -> None:
    facts = cache((9, 4, 64, 16), (4096, 1024, 16, 1), isa="vec")
    whole = form_of(facts, MODEL, kx.Shard(), "block")
    assert (whole.unit, whole.converts, whole.layout.page_tokens) == (64, None, 1)
    assert whole.layout.page_bytes(kx.Shard()) == 4096 * ITEM


@pytest.mark.parametrize(
    ("shape", "strides", "isa", "says"),
    [
        ((9, 16, 16), (256, 16, 1), None, "MLA"),
        ((9, 4, 16, 12), (768, 192, 12, 1), None, "2 \\* 8"),
        ((9, 4, 16, 16), (1024, 256, 1, 16), None, "side by side"),
        ((9, 4, 16, 16), (1024, 300, 16, 1), None, "neither heads nor tokens"),
        ((9, 4, 16, 16), (512, 256, 16, 1), None, "overlap"),
        ((9, 4, 16, 16), (1024, 256, 16, 1), "vec", "tiles of 32"),
        ((9, 4, 32, 16), (4096, 512, 16, 1), "vec", "not contiguous"),
    ],
)
def test_what_is_not_known_is_refused_with_what_was_found(
    shape: tuple[int, ...], strides: tuple[int, ...], isa: str | None, says: str
) -> None:
    with pytest.raises(kx.NotSupported, match=says):
        form(shape, strides, isa=isa)
