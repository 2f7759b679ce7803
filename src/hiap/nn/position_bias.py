"""Relative positions: what the distance of two tokens adds to the score of each head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["PositionBias"]


class PositionBias(nn.Module):
    """A value for each distance and each head. A head that is cut takes its column with it.

    Args:
        index: the row of the table for every pair of tokens. (N, N)

    Attributes:
        table: (distances, heads)
    """

    index: Tensor

    def __init__(self, distances: int, num_heads: int, index: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.empty(distances, num_heads))
        self.register_buffer("index", index, persistent=False)

    def shrunk(self, num_heads: int) -> PositionBias:
        """The same for fewer heads; which ones is left to the table."""
        return PositionBias(self.table.shape[0], num_heads, self.index)

    def forward(self) -> Tensor:
        """What is added to the scores. (1, H, N, N)"""
        found = self.table[self.index.flatten()].view(*self.index.shape, -1)
        return found.permute(2, 0, 1).contiguous().unsqueeze(0)

    def extra_repr(self) -> str:
        return f"distances={self.table.shape[0]}, heads={self.table.shape[1]}"
