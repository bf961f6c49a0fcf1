"""The parts that a layout's state is made of."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["StateBlock"]


class StateBlock(NamedTuple):
    """A part of a fixed-size state that is split over tensor-parallel ranks by itself.

    A state's page is a row of blocks: of each, the units that the rank holds. Blocks that follow each other
    in one part with the same number of `rows` share them: that row is repeated so often. For a Mamba-2 layer
    whose convolution is kept as `[kernel - 1, x | B | C]` and whose SSM state has a region of its own:

    >>> import kvxfer as kx
    >>> layout = kx.PageLayout(layers=24, kind="state", state=[
    ...     kx.StateBlock(units=64, unit_bytes=64 * 2, rows=3),  # x: heads of 64 channels
    ...     kx.StateBlock(units=8, unit_bytes=128 * 2, rows=3),  # B: groups of 128 channels
    ...     kx.StateBlock(units=8, unit_bytes=128 * 2, rows=3),  # C
    ...     kx.StateBlock(units=64, unit_bytes=64 * 128 * 4, part=1),  # SSM: heads of 64 x 128 floats
    ... ])
    >>> layout.parts, layout.page_extents(kx.Shard(tp_size=8))
    (('state', 'state1'), ((4608, 4608), (262144, 262144)))
    """

    units: int
    """Units of the whole model; ranks split them as they do KV heads, or share one."""
    unit_bytes: int
    """Bytes of a unit in each row."""
    rows: int = 1
    """How often the row of blocks is repeated."""
    part: int = 0
    """Which of the layer's regions, counted from 0."""
