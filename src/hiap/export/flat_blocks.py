"""Blocks that keep the tokens of all images as the rows of one matrix.

A product with a bias is then one `Gemm` in ONNX. With a dimension for the images it is a product and an addition, which
is one more pass over the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import cast

from torch import Tensor, nn

from hiap.nn.compact import Attention, Block, Constant

__all__ = ["FlatBlocks", "flattened"]


class FlatBlocks(nn.Module):
    """Blocks in a row, from tokens (B, N, D) to tokens. For inference."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        tokens, rows = x.shape[1], x.flatten(0, 1)  # (B * N, D)
        for block in cast(Sequence[Block], self.blocks):
            attn = block.attn
            if isinstance(attn, Attention):
                mixed = attn.mix(*attn.by_head(attn.qkv(block.norm1(rows)), tokens))
                rows = rows + block.ls1(attn.proj(mixed.flatten(0, 1)))
            elif attn is not None:
                rows = rows + block.ls1(attn.bias)
            if isinstance(block.mlp, Constant):
                rows = rows + block.ls2(block.mlp.bias)
            elif block.mlp is not None:
                rows = rows + block.ls2(block.mlp(block.norm2(rows)))
        return rows.view(-1, tokens, rows.shape[-1])


def flattened(blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The same blocks, with those that follow each other and have the forward of `Block` as one module."""
    found: list[nn.Module] = []
    for plain, group in groupby(blocks, lambda block: type(block).forward is Block.forward):
        together = list(group)
        found += [FlatBlocks(cast(list[Block], together))] if plain else together
    return found
