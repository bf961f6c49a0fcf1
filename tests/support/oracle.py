"""What a plan must do: a slow model of pages, written from the documentation of layouts and nothing else.

Memory is an array with one number for each byte of a region. A byte that holds a part of the KV cache has the
*tag* of just that part: group, layer, tensor, head, token, and place in the row. All other bytes have
negative numbers, each its own. The model fills the sources, carries out the plan's writes byte for byte, and
then compares every byte of every destination: what was granted must have the right tag and have been written
once; nothing else may have been written.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvxfer as kx

BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8_e4m3": 8,
    "float8_e5m2": 8,
    "float8_e8m0": 8,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "uint4": 4,
    "float4_e2m1": 4,
}
Ints = npt.NDArray[np.int64]
Region = tuple[int, int, str]


class Wrong(AssertionError):
    """A plan does not do what it must."""


# ---------------------------------------------------------------- what a rank holds


def share(units: int, ranks: int, rank: int) -> range:
    """The heads, or units of a state's block, of one of several tensor-parallel ranks."""
    if units % ranks == 0:
        each = units // ranks
        return range(rank * each, (rank + 1) * each)
    if ranks % units == 0:
        head = rank // (ranks // units)
        return range(head, head + 1)
    raise ValueError(f"{units} units do not go over {ranks} ranks")


def layers_of(layout: kx.PageLayout, pp_size: int, pp_rank: int) -> range:
    """The layers of one pipeline rank: as given, else as even as possible, the first ranks with one more."""
    counts = layout.pp_layers or [
        layout.layers // pp_size + (rank < layout.layers % pp_size) for rank in range(pp_size)
    ]
    first = sum(counts[:pp_rank])
    return range(first, first + counts[pp_rank])


class Tensor(NamedTuple):
    """What has rows of its own in a layer: K, V, their scales, a row of a block of a state."""

    name: str
    heads: range
    row_bytes: int


class Part(NamedTuple):
    """One layer's page of one region, as it lies."""

    label: str
    size: int
    """Bytes of it."""
    offsets: dict[Tensor, Ints]
    """Where each row begins: `[head, slot]`."""


class _Pen:
    """Writes rows one after the other, and notes where."""

    def __init__(self) -> None:
        self.at = 0
        self.places: dict[Tensor, dict[tuple[int, int], int]] = {}

    def put(self, tensor: Tensor, head: int, slot: int) -> None:
        self.places.setdefault(tensor, {})[head, slot] = self.at
        self.at += tensor.row_bytes

    def part(self, label: str, slots: int) -> Part:
        offsets = {
            tensor: np.array(
                [[places[head, slot] for slot in range(slots)] for head in tensor.heads], np.int64
            ).reshape(len(tensor.heads), slots)
            for tensor, places in self.places.items()
        }
        return Part(label, self.at, offsets)


@lru_cache(maxsize=4096)
def parts(layout: kx.PageLayout, tp_size: int, tp_rank: int) -> tuple[Part, ...]:
    """The regions of a layer, and where everything lies in one layer's page of each."""
    if layout.state is not None:
        return tuple(_state_parts(layout.state, tp_size, tp_rank))
    heads = range(1) if layout.kind == "latent" else share(layout.kv_heads, tp_size, tp_rank)
    rows = [("", layout.head_dim * BITS[layout.dtype] // 8)]
    if layout.scale_dim is not None:
        assert layout.scale_dtype is not None
        rows.append(("_scale", layout.scale_dim * BITS[layout.scale_dtype] // 8))
    out = []
    for suffix, row in rows:
        k, v, latent = (Tensor(name + suffix, heads, row) for name in ("k", "v", "latent"))
        # Each region: passes over the page, each with the tensors that lie side by side.
        regions: dict[str, list[list[Tensor]]] = {
            "kv": {"k": [[k]], "v": [[v]]},
            "fused": {"kv": [[k], [v]]},
            "packed": {"kv": [[k, v]]},
            "latent": {"latent": [[latent]]},
        }[layout.kind]
        for label, passes in regions.items():
            pen = _Pen()
            for side_by_side in passes:
                for head, slot in _walk(layout.order, heads, range(layout.page_tokens)):
                    for tensor in side_by_side:
                        pen.put(tensor, head, slot)
            out.append(pen.part(label + suffix, layout.page_tokens))
    return tuple(out)


def _walk(order: str, heads: range, slots: range) -> Iterator[tuple[int, int]]:
    if order == "HND":
        yield from itertools.product(heads, slots)
    else:
        for slot, head in itertools.product(slots, heads):
            yield head, slot


def _state_parts(blocks: Sequence[kx.StateBlock], tp_size: int, tp_rank: int) -> Iterator[Part]:
    for part in range(max(block.part for block in blocks) + 1):
        here = [(index, block) for index, block in enumerate(blocks) if block.part == part]
        pen = _Pen()
        for rows, band in itertools.groupby(here, key=lambda numbered: numbered[1].rows):
            shared = list(band)
            for row in range(rows):
                for index, block in shared:
                    units = share(block.units, tp_size, tp_rank)
                    for unit in units:
                        pen.put(Tensor(f"block{index}row{row}", units, block.unit_bytes), unit, 0)
        yield pen.part("state" if part == 0 else f"state{part}", 1)


class Lay(NamedTuple):
    """How one part lies over a whole region."""

    part: Part
    layer_stride: int
    """From layer to layer of a page; zero where each has a region of its own."""
    page_bytes: int
    page_stride: int


@lru_cache(maxsize=4096)
def lays(layout: kx.PageLayout, shard: kx.Shard) -> tuple[Lay, ...]:
    """All parts of a rank."""
    count = len(layers_of(layout, shard.pp_size, shard.pp_rank))
    out = []
    for part in parts(layout, shard.tp_size, shard.tp_rank):
        scales = part.label.endswith("_scale")
        given = layout.scale_stride_bytes if scales else layout.page_stride_bytes
        if layout.cross_layer and count:
            # Scales of layers that share a page follow each other without a gap.
            one = part.size if scales else layout.layer_stride_bytes or part.size
            out.append(Lay(part, one, (count - 1) * one + part.size, given or count * one))
        else:
            out.append(Lay(part, 0, part.size, given or part.size))
    return tuple(out)


# ---------------------------------------------------------------- engines, rooms


@dataclass(frozen=True)
class Engine:
    """All ranks of one side."""

    layouts: tuple[kx.PageLayout, ...]
    tp_size: int = 1
    pp_size: int = 1

    @property
    def shards(self) -> list[kx.Shard]:
        return [
            kx.Shard(tp_rank=tp, tp_size=self.tp_size, pp_rank=pp, pp_size=self.pp_size)
            for pp in range(self.pp_size)
            for tp in range(self.tp_size)
        ]


def held(layout: kx.PageLayout, start: int, end: int) -> range:
    """The tokens that a group holds of some that end at `end`; a state is one that stands for all."""
    if layout.state is not None:
        return range(max(start, end - 1), end)
    if layout.window_tokens is not None:
        return range(max(start, end - layout.window_tokens), end)
    return range(start, end)


def pages_needed(layout: kx.PageLayout, start: int, end: int) -> int:
    """Length of the page list for tokens `start` to `end`."""
    tokens = held(layout, start, end)
    if not tokens:
        return 0
    return (tokens[-1] // layout.page_tokens) - (tokens[0] // layout.page_tokens) + 1


Lists = tuple[tuple[int, ...], ...]
"""A page list for each group."""


@dataclass(frozen=True)
class Push:
    """Prefill's order to deliver tokens, in one or several ranges of layers."""

    start: int
    end: int
    pages: tuple[Lists, ...]
    """Of each source rank."""
    layers: tuple[tuple[int, int] | None, ...] = (None,)


@dataclass(frozen=True)
class Room:
    """One hand-off: tokens `start` to `end` are granted."""

    src: Engine
    dst: Engine
    start: int
    end: int
    grants: tuple[Lists, ...]
    """Of each destination rank."""
    pushes: tuple[Push, ...]
    src_count: int
    dst_count: int
    """Pages that each rank has in every group."""


def handoff(
    src: Engine,
    dst: Engine,
    src_pages: Sequence[int],
    dst_pages: Sequence[int],
    end: int,
    *,
    start: int = 0,
    pushed_from: int = 0,
) -> Room:
    """A room of one push, where all ranks of a side have the same page list."""
    return Room(
        src=src,
        dst=dst,
        start=start,
        end=end,
        grants=((tuple(dst_pages),),) * len(dst.shards),
        pushes=(Push(pushed_from, end, ((tuple(src_pages),),) * len(src.shards)),),
        src_count=max(src_pages) + 1,
        dst_count=max(dst_pages) + 1,
    )


# ---------------------------------------------------------------- memory


def _tag(g: int, layer: int, tensor: Tensor, heads: Ints, tokens: Ints) -> Ints:
    """Tags of rows' bytes: `[head, token, byte]`."""
    # Bits: 8 for group and layer each, 12 for the tensor, 8 for the head, 16 for the token, 12 for the byte.
    base = (g << 56) | (layer << 48) | (_number(tensor.name) << 36)
    rows = base + (heads[:, None] << 28) + (tokens[None, :] << 12)
    tags: Ints = rows[:, :, None] + np.arange(tensor.row_bytes, dtype=np.int64)
    return tags


_NAMES: dict[str, int] = {}


def _number(name: str) -> int:
    return _NAMES.setdefault(name, len(_NAMES))


def tell(tag: int) -> str:
    """A tag for people."""
    if tag < 0:
        return "what belongs to nothing"
    name = next(name for name, number in _NAMES.items() if number == (tag >> 36) & 0xFFF)
    return (
        f"group {tag >> 56}, layer {(tag >> 48) & 0xFF}, {name}, head {(tag >> 28) & 0xFF}, token "
        f"{(tag >> 12) & 0xFFFF}, byte {tag & 0xFFF}"
    )


@dataclass
class Rank:
    """One rank's memory: a number for each byte, and how often it was written."""

    engine: Engine
    shard: kx.Shard
    page_count: int
    bytes: dict[Region, Ints] = field(default_factory=dict)
    writes: dict[Region, Ints] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nobody = 1
        for g, layout in enumerate(self.engine.layouts):
            layers = layers_of(layout, self.shard.pp_size, self.shard.pp_rank)
            for layer in layers[:1] if layout.cross_layer else layers:
                for lay in lays(layout, self.shard):
                    size = (self.page_count - 1) * lay.page_stride + lay.page_bytes
                    self.bytes[g, layer, lay.part.label] = -np.arange(nobody, nobody + size, dtype=np.int64)
                    self.writes[g, layer, lay.part.label] = np.zeros(size, np.int64)
                    nobody += size

    def rows(self, g: int, pages: Sequence[int], tokens: range) -> Iterator[tuple[Region, Ints, Ints]]:
        """Where the bytes of these tokens are, and their tags; `pages` begins with the first token's."""
        if not tokens:
            return
        layout = self.engine.layouts[g]
        layers = layers_of(layout, self.shard.pp_size, self.shard.pp_rank)
        token = np.array(tokens, np.int64)
        page = np.array(pages, np.int64)[token // layout.page_tokens - tokens[0] // layout.page_tokens]
        slot = token % layout.page_tokens
        for layer in layers:
            for lay in lays(layout, self.shard):
                region = (g, layers[0] if layout.cross_layer else layer, lay.part.label)
                base = page * lay.page_stride + (layer - layers[0]) * lay.layer_stride
                for tensor, offsets in lay.part.offsets.items():
                    row = offsets[:, slot] + base
                    at = row[:, :, None] + np.arange(tensor.row_bytes, dtype=np.int64)
                    yield region, at, _tag(g, layer, tensor, np.array(tensor.heads, np.int64), token)

    def fill(self, push: Push, pages: Lists) -> None:
        """What prefill has computed when it pushes."""
        for g, layout in enumerate(self.engine.layouts):
            for region, at, tags in self.rows(g, pages[g], held(layout, push.start, push.end)):
                self.bytes[region][at] = tags

    def compare(self, room: Room, grant: Lists) -> None:
        """Everything that was granted is there, written once, and nothing else has changed."""
        granted = {region: np.zeros(len(have), bool) for region, have in self.bytes.items()}
        for g, layout in enumerate(self.engine.layouts):
            for region, at, tags in self.rows(g, grant[g], held(layout, room.start, room.end)):
                have = self.bytes[region][at]
                if (have != tags).any():
                    bad = tuple(int(i) for i in np.argwhere(have != tags)[0])
                    raise Wrong(
                        f"{self.shard}, {region}, offset {at[bad]}: should be {tell(int(tags[bad]))}; is "
                        f"{tell(int(have[bad]))}"
                    )
                granted[region][at] = True
        for region, count in self.writes.items():
            wrong = np.flatnonzero(count != granted[region])
            if len(wrong):
                at0 = int(wrong[0])
                due = int(granted[region][at0])
                raise Wrong(f"{self.shard}, {region}, offset {at0}: written {count[at0]} times, not {due}")


# ---------------------------------------------------------------- carrying out plans


class Op(NamedTuple):
    """One write."""

    src_region: Region
    src_offset: int
    dst_region: Region
    dst_offset: int
    length: int


Ranks = tuple[int, int]
Planner = Callable[[Room, Push, "tuple[int, int] | None", Ranks], list[Op]]


def plan(room: Room, push: Push, layers: tuple[int, int] | None, ranks: Ranks) -> kx.Plan | None:
    """The planner's own answer for one pair of ranks; None if decode has all of the push already."""
    start = max(push.start, room.start)
    if start >= push.end:
        return None
    return kx.plan_transfer(
        (list(room.src.layouts), room.src.shards[ranks[0]]),
        (list(room.dst.layouts), room.dst.shards[ranks[1]]),
        src_pages=[list(pages) for pages in push.pages[ranks[0]]],
        dst_pages=[list(pages) for pages in room.grants[ranks[1]]],
        tokens=push.end - start,
        start=start,
        src_start=push.start,
        dst_start=room.start,
        end=room.end,
        layers=layers,
        src_page_count=room.src_count,
        dst_page_count=room.dst_count,
    )


def ops(room: Room, push: Push, layers: tuple[int, int] | None, ranks: Ranks) -> list[Op]:
    """The planner's writes, with a look at what else the plan says."""
    found = plan(room, push, layers, ranks)
    if found is None:
        return []
    table = found.ops
    moved = int(table["length"].sum())
    if len(found) != len(table) or found.bytes != moved:
        raise Wrong(f"{found} has {len(table)} writes of {moved} bytes")
    before, after = table[:-1], table[1:]
    joined = np.ones(len(before), bool)
    for side in ("src", "dst"):
        joined &= before[f"{side}_region"] == after[f"{side}_region"]
        joined &= before[f"{side}_offset"] + before["length"] == after[f"{side}_offset"]
    if joined.any():
        raise Wrong(
            f"{before[joined][0]} and {after[joined][0]} follow each other on both sides: they are one"
        )
    sources, targets = found.src_regions, found.dst_regions
    return [Op(sources[a], b, targets[c], d, n) for a, b, c, d, n in _rows(table)]


def _rows(table: npt.NDArray[np.void]) -> list[tuple[int, int, int, int, int]]:
    rows: Any = table[["src_region", "src_offset", "dst_region", "dst_offset", "length"]].tolist()
    return rows


def carry_out(op: Op, source: Rank, target: Rank) -> None:
    """One write, byte for byte."""
    src_region, src, dst_region, dst, length = op
    for name, rank, region, offset in (
        ("source", source, src_region, src),
        ("destination", target, dst_region, dst),
    ):
        have = rank.bytes.get(region)
        if have is None:
            raise Wrong(f"{op}: the {name} has no such region, but {sorted(rank.bytes)}")
        if length < 1 or offset < 0 or offset + length > len(have):
            raise Wrong(f"{op}: the {name}'s region has {len(have)} bytes")
    target.bytes[dst_region][dst : dst + length] = source.bytes[src_region][src : src + length]
    target.writes[dst_region][dst : dst + length] += 1


def check(room: Room, planner: Planner = ops) -> dict[Ranks, int]:
    """Hands the room off, all source ranks to all destination ranks; the bytes that each pair moved."""
    targets = [Rank(room.dst, shard, room.dst_count) for shard in room.dst.shards]
    moved: dict[Ranks, int] = {}
    for push in room.pushes:
        for s, shard in enumerate(room.src.shards):
            source = Rank(room.src, shard, room.src_count)
            source.fill(push, push.pages[s])
            for d, target in enumerate(targets):
                for layers in push.layers:
                    for op in planner(room, push, layers, (s, d)):
                        carry_out(op, source, target)
                        moved[s, d] = moved.get((s, d), 0) + op.length
    for target, grant in zip(targets, room.grants, strict=True):
        target.compare(room, grant)
    return moved
