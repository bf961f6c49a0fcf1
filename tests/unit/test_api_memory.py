"""Pools, their views, and what an agent takes as its memory."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import kvxfer as kx
from kvxfer._memory import prepare

ONE = kx.Shard()
PAGE = 4 * 4 * 8 * 2


def layout(**changes: Any) -> kx.PageLayout:
    given: dict[str, Any] = {"layers": 2, "kv_heads": 4, "head_dim": 8, "page_tokens": 4, "dtype": "float16"}
    return kx.PageLayout(**(given | changes))


def tensor(pages: int = 3) -> np.ndarray[Any, Any]:
    return np.zeros((pages, 4, 4, 8), np.float16)


@pytest.mark.parametrize(
    ("changes", "part", "shape"),
    [
        ({}, "k", (6, 4, 4, 8)),
        ({"page_tokens": 16}, "v", (6, 4, 16, 8)),
        ({"order": "NHD", "page_tokens": 16}, "k", (6, 16, 4, 8)),
        ({"kind": "fused"}, "kv", (6, 2, 4, 4, 8)),
        ({"kind": "fused", "order": "NHD", "page_tokens": 2}, "kv", (6, 2, 2, 4, 8)),
        ({"kind": "latent", "head_dim": 576}, "latent", (6, 4, 576)),
    ],
)
def test_views(changes: dict[str, Any], part: str, shape: tuple[int, ...]) -> None:
    pool = kx.alloc(layout(**changes), ONE, pages=6)
    view = getattr(pool, part)(1)
    assert view is pool.tensors[0, 1, part]
    assert (view.shape, view.dtype, view.flags.c_contiguous, view.flags.writeable) == (
        shape,
        np.float16,
        True,
        True,
    )
    assert not view.any(), "a pool is zeroed"
    assert view.nbytes == 6 * pool.layouts[0].page_bytes(ONE)
    assert pool.nbytes >= sum(v.nbytes for v in pool.tensors.values())
    assert (pool.pages, pool.shard, pool.fabric) == ((6,), ONE, "shm")


def test_a_rank_has_its_own_heads_and_layers() -> None:
    pool = kx.alloc(layout(layers=5), kx.Shard(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2), pages=2)
    assert [key[1] for key in pool.tensors] == [3, 3, 4, 4]
    assert pool.v(4).shape == (2, 2, 4, 8)
    with pytest.raises(kx.BadArgument, match="layer 2 of group 0 is not here: the shard has 3 to 4"):
        pool.k(2)
    with pytest.raises(kx.BadArgument, match="no 'kv'"):
        pool.kv(3)
    with pytest.raises(kx.BadArgument, match="no group 1"):
        pool.k(3, group=1)


@pytest.mark.parametrize(
    ("dtype", "plain"), [("bfloat16", "uint16"), ("float8_e4m3", "uint8"), ("float8_e5m2", "uint8")]
)
def test_types_that_numpy_lacks(dtype: str, plain: str) -> None:
    view = kx.alloc(layout(dtype=dtype), ONE, pages=1).k(0)
    try:
        import ml_dtypes
    except ImportError:
        assert view.dtype == plain
    else:
        assert view.dtype == getattr(ml_dtypes, "float8_e4m3fn" if dtype == "float8_e4m3" else dtype)
    assert view.view(plain).shape == view.shape


def test_views_are_the_memory_and_keep_it() -> None:
    pool = kx.alloc(layout(), ONE, pages=6)
    pool.k(0)[2, 1, 3] = 7
    again, other = pool.tensors[0, 0, "k"], pool.v(0)
    part = again[2]
    del pool, again
    gc.collect()
    assert (part[1, 3] == 7).all()
    assert not other.any(), "K and V do not overlap"
    np.testing.assert_array_equal(np.from_dlpack(part), part)
    assert part.__dlpack_device__() == (1, 0)


def mapped(text: str) -> int:
    with open("/proc/self/maps") as maps:
        return sum(text in line for line in maps)


def test_memory_goes_with_its_last_view() -> None:
    gc.collect()
    before = (mapped("kvxfer-pool"), len(os.listdir("/proc/self/fd")))
    pool = kx.alloc(layout(), ONE, pages=6)
    view = pool.k(0)[1:]
    del pool
    gc.collect()
    assert mapped("kvxfer-pool") == before[0] + 1
    del view
    gc.collect()
    assert (mapped("kvxfer-pool"), len(os.listdir("/proc/self/fd"))) == before


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"pages": 0}, "0 pages"),
        ({"pages": -1}, "-1 pages"),
        ({"pages": [1, 2]}, "2 page counts for 1 groups"),
        ({"fabric": "rdma"}, "rdma"),
        ({"layout": []}, "empty list"),
        ({"shard": kx.Shard(0, 1, 2, 3)}, "no layer"),
        ({"shard": kx.Shard(0, 3)}, "4 KV heads"),
    ],
)
def test_pools_that_cannot_be(given: dict[str, Any], text: str) -> None:
    with pytest.raises(kx.BadArgument, match=text):
        kx.alloc(**({"layout": layout(), "shard": ONE} | given))


def test_too_much_memory_is_an_error() -> None:
    with pytest.raises(kx.BadArgument, match="too large"):
        kx.alloc(layout(layers=4096, head_dim=1 << 20), ONE, pages=2**32 - 1)
    with pytest.raises(kx.FabricError, match=str(4 * 1024 * 2**40)):
        kx.alloc(layout(head_dim=1 << 20, dtype="int8"), ONE, pages=2**26)


def test_groups_may_have_different_page_counts() -> None:
    window = layout(layers=1, page_tokens=8)
    pool = kx.alloc([layout(), window], ONE, pages=[5, 3])
    assert (pool.k(1).shape[0], pool.v(0, group=1).shape[:3]) == (5, (3, 4, 8))
    assert list(pool.tensors)[-1] == (1, 0, "v")
    assert prepare(pool, [layout(), window], ONE, read_only=False).pages == [5, 3]


class Torch:
    """As much of a torch tensor as is looked at."""

    def __init__(self, array: np.ndarray[Any, Any], device: str = "cpu") -> None:
        self.array, self.device = array, SimpleNamespace(type=device)
        self.shape = array.shape

    def stride(self) -> tuple[int, ...]:
        return tuple(n // self.array.itemsize for n in self.array.strides)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return self.array.flags.c_contiguous


class DLPack:
    """A producer that is no numpy array."""

    def __init__(self, array: np.ndarray[Any, Any], device: int = 1) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **given: Any) -> Any:
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (self.device, 0)


def raw(array: np.ndarray[Any, Any]) -> tuple[int, int]:
    return (array.ctypes.data, array.nbytes)


def same(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array


@pytest.mark.parametrize(
    "wrap", [same, Torch, DLPack, raw, memoryview, lambda a: a.reshape(-1).view("uint8")]
)
def test_every_kind_of_tensor(wrap: Any) -> None:
    arrays = [tensor() for _ in range(4)]
    got = prepare(
        [(wrap(arrays[0]), wrap(arrays[1])), [wrap(arrays[2]), wrap(arrays[3])]],
        layout(),
        ONE,
        read_only=False,
    )
    assert [region[:2] for region in got.regions] == [raw(array) for array in arrays]
    assert [region[2] for region in got.regions] == [None] * 4
    assert got.pages == [3]


def test_every_way_to_name_layers() -> None:
    arrays = {(layer, part): tensor() for layer in (0, 1) for part in "kv"}
    pairs = [(arrays[n, "k"], arrays[n, "v"]) for n in (0, 1)]
    want = prepare(pairs, layout(), ONE, read_only=False).regions
    for memory in (
        tuple(pairs),
        {1: pairs[1], 0: pairs[0]},
        {(0, 1): pairs[1], (0, 0): pairs[0]},
        {(0, n, part): array for (n, part), array in arrays.items()},
        {n: {"v": arrays[n, "v"], "k": arrays[n, "k"]} for n in (0, 1)},
    ):
        assert prepare(memory, layout(), ONE, read_only=False).regions == want
    for memory in (
        [pairs],
        {0: pairs},
        {0: dict(enumerate(pairs))},
        {(0, n): pair for n, pair in enumerate(pairs)},
    ):
        assert prepare(memory, [layout()], ONE, read_only=False).regions == want
    latent = layout(kind="latent")
    got = prepare([arrays[0, "k"], arrays[0, "v"]], latent, ONE, read_only=False)
    assert [region[:2] for region in got.regions] == [raw(arrays[0, "k"]), raw(arrays[0, "v"])]


def test_views_of_a_pool_are_known_as_such() -> None:
    pool = kx.alloc(layout(dtype="bfloat16"), ONE, pages=3)
    got = prepare(
        {key[:2]: (pool.k(key[1]), pool.v(key[1])) for key in pool.tensors},
        pool.layouts[0],
        ONE,
        read_only=False,
    )
    assert got.regions == prepare(pool, pool.layouts[0], ONE, read_only=False).regions
    assert {type(region[2]).__name__ for region in got.regions} == {"Allocation"}


def replaced(n: int, part: int, by: Any) -> list[list[Any]]:
    out = [[tensor(), tensor()] for _ in (0, 1)]
    out[n][part] = by
    return out


shared = tensor()

BAD = [
    ([(tensor(), tensor())], "1 layers, but the shard holds 2"),
    ({0: (tensor(), tensor())}, r"layers \[0\], but the shard holds 0 to 1"),
    ({(0, 0): 1, 1: 2}, "the key 1"),
    ({(0, 0, "q"): tensor()}, "parts of a 'kv' layout"),
    ([tensor(), tensor()], r"pair \(k, v\)"),
    ([(1, 2), (3, 4)], r"pair \(k, v\)"),
    (
        replaced(1, 0, tensor(4)),
        "k of group 0 layer 1 has 4 pages of 256 bytes, but k of group 0 layer 0 has 3",
    ),
    (replaced(0, 1, np.zeros(300, np.uint8)), "300 bytes, which is no multiple of a page's 256"),
    (replaced(0, 1, np.zeros(0, np.uint8)), "0 bytes"),
    (replaced(0, 0, tensor().transpose(0, 2, 1, 3)), "not contiguous"),
    (replaced(0, 0, Torch(tensor()[:, ::2])), "not contiguous"),
    (replaced(0, 0, memoryview(bytearray(1536))[::2]), "not contiguous"),
    (replaced(0, 0, b"\0" * 768), "read-only"),
    (replaced(0, 0, (0, 768)), "address 0"),
    (replaced(0, 0, (2**64 - 8, 768)), "are no memory"),
    ([(shared, tensor()), (tensor(), shared)], "k of group 0 layer 0 and v of group 0 layer 1 overlap"),
]


@pytest.mark.parametrize(("memory", "text"), BAD)
def test_wrong_memory_is_refused_with_the_numbers(memory: object, text: str) -> None:
    with pytest.raises(kx.BadArgument, match=text):
        kx.Agent("bad", layout(), ONE, memory=memory)


@pytest.mark.parametrize("gpu", [Torch(tensor(), "xpu"), DLPack(tensor(), 10), DLPack(tensor(), 8)])
def test_memory_of_other_devices_is_not_supported(gpu: object) -> None:
    with pytest.raises(kx.NotSupported, match="k of group 0 layer 0 is on"):
        kx.Agent("gpu", layout(), ONE, memory=replaced(0, 0, gpu))


@pytest.mark.parametrize(
    "interface", [{}, {"data": 5}, {"data": (4096, False), "shape": (3,), "typestr": "?"}]
)
def test_a_cuda_array_interface_that_cannot_be_used(interface: object) -> None:
    array = SimpleNamespace(__cuda_array_interface__=interface)
    with pytest.raises(kx.BadArgument, match="k of group 0 layer 0: its __cuda_array_interface__"):
        kx.Agent("gpu", layout(), ONE, memory=replaced(0, 0, array))


@pytest.mark.parametrize("memory", [None, 5, "memory", {1, 2}])
def test_memory_of_another_type(memory: object) -> None:
    with pytest.raises(TypeError, match="memory is"):
        kx.Agent("type", layout(), ONE, memory=memory)
    with pytest.raises(TypeError, match="object"):
        kx.Agent("type", layout(), ONE, memory=replaced(0, 0, object()))


def test_a_pool_for_another_layout_or_rank() -> None:
    pool = kx.alloc(layout(), ONE, pages=2)
    with pytest.raises(kx.BadArgument, match="the pool was made for"):
        kx.Agent("other", layout(order="NHD"), ONE, memory=pool)
    with pytest.raises(kx.BadArgument, match="the pool was made for"):
        kx.Agent("other", layout(), kx.Shard(0, 2), memory=pool)


def test_read_only_memory_may_be_sent_from() -> None:
    memory = [[tensor(), tensor()], [tensor(), tensor()]]
    memory[1][1].setflags(write=False)
    for role in ("decode", "both"):
        with pytest.raises(kx.BadArgument, match="v of group 0 layer 1 is read-only"):
            kx.Agent("read-only", layout(), ONE, memory=memory, role=role)
    assert prepare(memory, layout(), ONE, read_only=True).pages == [3]


class Owned(np.ndarray[Any, Any]):
    """An array whose end can be seen."""


@contextmanager
def counted() -> Iterator[Any]:
    import weakref

    alive: list[Any] = []

    def make() -> Any:
        array = tensor().view(Owned)
        alive.append(weakref.ref(array))
        return array

    make.left = lambda: sum(ref() is not None for ref in alive)  # type: ignore[attr-defined]
    yield make


def test_an_agent_keeps_its_memory_until_it_is_closed() -> None:
    with counted() as make:
        agent = kx.Agent("keeper", layout(), ONE, memory=[(make(), make()), (make(), make())])
        gc.collect()
        assert make.left() == 4
        assert agent.close() == []
        gc.collect()
        assert make.left() == 0
        assert agent.close() == []


def test_an_agent_that_did_not_start_keeps_nothing() -> None:
    with counted() as make:
        memory = [(make(), make()), (make(), make())]
        with pytest.raises(kx.KvxferError):
            kx.Agent("keeper", layout(), ONE, memory=memory, listen="127.0.0.1:notaport")
        del memory
        gc.collect()
        assert make.left() == 0


def test_torch_tensors() -> None:
    """bfloat16, which DLPack to numpy cannot carry."""
    torch = pytest.importorskip("torch")
    memory = [(torch.zeros(3, 4, 4, 8, dtype=torch.bfloat16), torch.zeros(3, 4, 4, 8, dtype=torch.bfloat16))]
    got = prepare(memory, layout(layers=1, dtype=torch.bfloat16), ONE, read_only=False)
    assert [region[:2] for region in got.regions] == [(t.data_ptr(), 768) for t in memory[0]]
    assert got.pages == [3]
    with pytest.raises(kx.BadArgument, match="not contiguous"):
        prepare([(memory[0][0].transpose(1, 3), memory[0][1])], layout(layers=1), ONE, read_only=False)
    plan = kx.plan_transfer(
        (layout(), ONE), (layout(), ONE), src_pages=torch.tensor([3]), dst_pages=torch.tensor([4]), tokens=4
    )
    assert plan.ops["src_offset"][0] == 3 * PAGE
    view = torch.from_dlpack(kx.alloc(layout(), ONE, pages=2).k(0))
    assert view.dtype == torch.float16


@pytest.mark.ucx
def test_an_agent_uses_the_transports_that_its_pool_was_made_for() -> None:
    layout, shard = kx.PageLayout(layers=1, kv_heads=1, head_dim=8, page_tokens=4, dtype="uint8"), kx.Shard()
    pool = kx.alloc(layout, shard, pages=2, fabric="ucx", ucx_tls="posix,self,tcp")
    with pytest.raises(kx.BadArgument, match=r"'tcp,self'.*'posix,self,tcp'"):
        kx.Agent("a", layout, shard, memory=pool, fabric="ucx", ucx_tls="tcp,self")
    with kx.Agent("a", layout, shard, memory=pool, fabric="ucx") as agent:
        assert agent.fabrics == ("ucx",)


@pytest.mark.parametrize(
    ("changes", "part", "shape", "strides"),
    [
        ({"kind": "packed"}, "kv", (6, 4, 4, 2, 8), (512, 128, 32, 16, 2)),
        ({"kind": "packed", "order": "NHD", "page_tokens": 2}, "kv", (6, 2, 4, 2, 8), (256, 128, 32, 16, 2)),
        ({"page_stride_bytes": 300}, "v", (6, 4, 4, 8), (300, 64, 16, 2)),
        ({"cross_layer": True}, "k", (6, 4, 4, 8), (512, 64, 16, 2)),
        ({"cross_layer": True, "layer_stride_bytes": 260}, "k", (6, 4, 4, 8), (520, 64, 16, 2)),
        ({"dtype": "uint4"}, "k", (6, 4, 4, 4), (64, 16, 4, 1)),
        ({"scale_dim": 3, "scale_stride_bytes": 256}, "v_scale", (6, 4, 4, 3), (256, 48, 12, 4)),
        ({"scale_dim": 3, "kind": "latent"}, "latent_scale", (6, 4, 3), (48, 12, 4)),
    ],
)
def test_views_of_what_is_not_plain(
    changes: dict[str, Any], part: str, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Every byte of every page of every view is its own: none is in two, and none outside of the pool."""
    pool = kx.alloc(layout(**changes), ONE, pages=6)
    view = pool.tensors[0, 1, part]
    assert (view.shape, view.strides) == (shape, strides)
    seen = 0
    for other in pool.tensors.values():
        whole = np.zeros(other.shape, other.dtype)
        whole.reshape(-1).view(np.uint8)[:] = 1
        assert not other.any()
        other[...] = whole
        seen += whole.nbytes
    assert sum(int(region.sum()) for region in pool._regions.values()) == seen


def test_a_state_is_bytes() -> None:
    blocks = [kx.StateBlock(4, 6, 3), kx.StateBlock(1, 2, 3), kx.StateBlock(4, 8, part=1)]
    pool = kx.alloc(kx.PageLayout(layers=2, kind="state", state=blocks), kx.Shard(1, 2), pages=3)
    assert [pool.state(1, part).shape for part in (0, 1)] == [(3, 42), (3, 16)]
    with pytest.raises(kx.BadArgument, match="group 0 has no 'state2': a 'state' layout has state, state1"):
        pool.state(0, 2)


def regions(memory: object, item: kx.PageLayout) -> list[tuple[int, int]]:
    found = prepare(memory, item, ONE, read_only=False)
    return [(nbytes, pages) for (_, nbytes, _), pages in zip(found.regions, found.pages * 4, strict=False)]


def test_pages_with_gaps_may_be_a_strided_tensor_or_all_of_the_memory() -> None:
    item = layout(layers=1, kind="fused", page_stride_bytes=640)
    whole = np.zeros((3, 320), np.float16)
    pages: np.ndarray[Any, Any] = np.ndarray(
        (3, 2, 4, 4, 8), np.float16, whole, strides=(640, 256, 64, 16, 2)
    )
    assert regions([pages], item) == [(2 * 640 + 512, 3)]
    assert regions([Torch(pages)], item) == [(2 * 640 + 512, 3)]
    assert regions([whole], item) == [(3 * 640, 3)]
    assert regions([whole.reshape(-1)[: 2 * 320 + 256]], item) == [(2 * 640 + 512, 3)]
    with pytest.raises(kx.BadArgument, match="no multiple of a page's 512, 640 bytes apart"):
        regions([whole.reshape(-1)[:700]], item)
    with pytest.raises(kx.BadArgument, match="not contiguous"):
        regions([np.zeros((6, 2, 4, 4, 8), np.float16)[::2]], item)


def test_layers_that_share_pages_are_one_tensor() -> None:
    item = layout(layers=3, kind="packed", cross_layer=True)
    whole = np.zeros((5, 3, 4, 4, 2, 8), np.float16)
    for memory in (whole, [whole], {0: whole}, {(0, 0): whole}, {"kv": whole}):
        assert regions(memory, item) == [(5 * 3 * 512, 5)]
    apart = layout(layers=3, cross_layer=True)
    k, v = (np.zeros((5, 3, 4, 4, 8), np.float16) for _ in range(2))
    for memory in ((k, v), {"k": k, "v": v}, {(0, 0, "k"): k, (0, 0, "v"): v}):
        assert regions(memory, apart) == [(5 * 3 * 256, 5)] * 2
