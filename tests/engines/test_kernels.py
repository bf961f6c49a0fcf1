"""What vLLM's own CPU kernels write into KV pages is what `layout` says that they do."""

import pytest
import torch
import vllm._custom_ops as ops
from vllm.platforms import current_platform

from kvxfer.vllm.layout import TILE, blocks_of, can_convert, tiles_of

current_platform.import_kernels()

HEADS = 3


def write(isa: str, key: torch.Tensor, value: torch.Tensor, block: int) -> torch.Tensor:
    """Pages of `block` tokens as the kernel fills them: [blocks, heads, tokens, 2 * head_dim]."""
    tokens, _, head_dim = key.shape
    pages = torch.zeros(-(-tokens // block), HEADS, 2 * block, head_dim, dtype=torch.bfloat16)
    keys, values = pages.chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, keys, values, torch.arange(tokens), isa)
    return pages.view(-1, HEADS, block, 2 * head_dim)


@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block", [64, 96, 128])
@pytest.mark.parametrize("tokens", [1, 31, 192, 384])
def test_case_05_tiles_of_blocks_of_any_size_are_those_of_blocks_of_one_tile(
    isa: str, head_dim: int, block: int, tokens: int
) -> None:
    assert can_convert(isa)
    torch.manual_seed(0)
    key, value = torch.randn(2, tokens, HEADS, head_dim).bfloat16()
    small, large = write(isa, key, value, TILE), write(isa, key, value, block)
    # [tiles of the prompt, heads, K and V, elements]
    wanted = tiles_of(small, isa)[:, :, 0]
    got = tiles_of(large, isa).permute(0, 2, 1, 3, 4).reshape(-1, HEADS, 2, TILE * head_dim)
    assert torch.equal(got[: len(wanted)], wanted)
    assert torch.equal(blocks_of(tiles_of(large, isa), isa, block), large)


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_a_block_of_one_tile_is_moved_as_it_lies(isa: str) -> None:
    key, value = torch.randn(2, 96, HEADS, 64).bfloat16()
    pages = write(isa, key, value, TILE)
    assert torch.equal(tiles_of(pages, isa).reshape(3, -1), pages.reshape(3, -1))
