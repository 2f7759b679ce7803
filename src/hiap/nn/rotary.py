"""Rotary positions: q/k dims are turned in pairs, by angles that the model's own forward hands to its blocks.

The two dims of a pair stay or go together. Layouts of the pairs of a head with D dims:

- "adjacent": (0, 1), (2, 3), ...
- "halves": (0, D/2), (1, D/2 + 1), ...

An odd dim at the end is padding. It belongs to no pair and is not turned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Rope", "Rotary", "by_dim", "by_pair", "padded_pairs", "pair_count", "pair_of"]

# Sines and cosines, as wide as a dense head: (N, D), for each head (H, N, D), or for each image (B, 1 or H, N, D).
# N may be less than the number of tokens: the first tokens (class token, registers) are then not turned.
Rope: TypeAlias = tuple[Tensor, Tensor]


class Rotary(nn.Module):
    """Turns queries and keys. After a cut it gathers the part of the table that its own dims need.

    Args:
        head_dim: q/k width D of a dense head, and so of the table.
        layout: "adjacent" or "halves".
        per_head: the table has angles of its own for each dense head.
        whole: every head has all dims of the table in their order, so that nothing is gathered.

    Attributes:
        dims: the column of the table for each q/k dim of each head; with `per_head`, of all heads side by side.
            (heads * qk_dim)
        sin, cos: a table that is always the same, already gathered (`bake`); None: each forward brings one.
    """

    dims: Tensor
    sin: Tensor | None
    cos: Tensor | None

    def __init__(
        self, num_heads: int, qk_dim: int, head_dim: int, layout: str, per_head: bool = False, whole: bool = True
    ) -> None:
        super().__init__()
        self.num_heads, self.qk_dim, self.head_dim = num_heads, qk_dim, head_dim
        self.layout, self.per_head, self.whole = layout, per_head, whole
        self.columns = num_heads * head_dim if per_head else head_dim  # of the table, for all its heads
        heads = torch.arange(num_heads).unsqueeze(1) * (head_dim if per_head else 0)
        self.register_buffer("dims", (heads + torch.arange(qk_dim)).flatten())
        self.register_buffer("sin", None, persistent=False)
        self.register_buffer("cos", None, persistent=False)

    def shrunk(self, num_heads: int, qk_dim: int) -> Rotary:
        """The same for fewer heads or dims; which ones is left to `dims`."""
        same = qk_dim == self.qk_dim and (num_heads == self.num_heads or not self.per_head)
        made = Rotary(num_heads, qk_dim, self.head_dim, self.layout, self.per_head, self.whole and same)
        made.columns = self.columns
        return made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        dims: Any = state_dict.get(f"{prefix}dims")
        odd = isinstance(dims, Tensor) and dims.numel() > 0 and not dims.is_meta
        if odd and (dims.dtype != torch.long or not 0 <= int(dims.min()) <= int(dims.max()) < self.columns):
            raise RuntimeError(f"{prefix}dims must be columns of a table with {self.columns}")
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def forward(self, q: Tensor, k: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor]:
        """Queries of the first tokens and keys of all, turned. Each (B, H, tokens, qk_dim)

        Args:
            rope: the table. Without one the baked table is used; without that, nothing is turned.
        """
        table = self._own() if rope is None else self._gathered(rope)
        if table is None:
            return q, k
        first = k.shape[-2] - table[0].shape[-2]
        return self._turned(q, table, first), self._turned(k, table, first)

    def bake(self, rope: Rope) -> None:
        """Keep a table, so that a forward needs none."""
        self.sin, self.cos = self._gathered(rope)

    def extra_repr(self) -> str:
        heads = ", per head" if self.per_head else ""
        return f"{self.layout}, heads={self.num_heads}, qk_dim={self.qk_dim} of {self.head_dim}{heads}"

    def _own(self) -> Rope | None:
        return None if self.sin is None or self.cos is None else (self.sin, self.cos)

    def _gathered(self, rope: Rope) -> Rope:
        return rope if self.whole else (self._take(rope[0]), self._take(rope[1]))

    def _take(self, table: Tensor) -> Tensor:
        if self.per_head:
            table = table.movedim(-3, -2).flatten(-2)  # (..., N, H * D)
        elif table.ndim == 4:
            table = table.squeeze(1)
        taken = torch.unflatten(table.index_select(-1, self.dims), -1, (self.num_heads, self.qk_dim))
        return taken.movedim(-2, -3)  # (..., H, N, qk_dim)

    def _turned(self, x: Tensor, table: Rope, first: int) -> Tensor:
        patches = x[..., first:, :]
        if not patches.shape[-2]:
            return x
        even = self.qk_dim // 2 * 2
        sin, cos = (one[..., : patches.shape[-2], :even] for one in table)
        pairs, rest = patches[..., :even], patches[..., even:]
        turned = (pairs * cos + _quarter(pairs, self.layout) * sin).to(x.dtype)
        turned = torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned
        return torch.cat([x[..., :first, :], turned], dim=-2) if first else turned


def _quarter(x: Tensor, layout: str) -> Tensor:
    """Every pair (a, b) turned by a right angle: (-b, a)."""
    if layout == "halves":
        a, b = x.chunk(2, dim=-1)
        return torch.cat([-b, a], dim=-1)
    return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).reshape(x.shape)


def pair_count(dims: int, layout: str | None) -> int:
    """How many units the q/k dims of a head are cut in: pairs, or dims where there is no layout."""
    return dims if layout is None else dims // 2


def pair_of(dim: int, dims: int, layout: str) -> int:
    """The pair that a dim belongs to, of a head with so many; `dims // 2` for the odd one, which is in no pair."""
    return dim // 2 if layout == "adjacent" else dim % (dims // 2) if dim < dims // 2 * 2 else dims // 2


def by_dim(values: Tensor, layout: str | None, dims: int, rest: float = 1.0) -> Tensor:
    """What pairs have, for each of their dims; an odd dim gets `rest`. (..., pairs) to (..., dims)"""
    if layout is None:
        return values
    spread = torch.cat([values, values], -1) if layout == "halves" else values.repeat_interleave(2, -1)
    return F.pad(spread, (0, dims - spread.shape[-1]), value=rest)


def by_pair(values: Tensor, layout: str | None) -> Tensor:
    """The sum over the dims of each pair. (..., dims) to (..., pairs)"""
    if layout is None:
        return values
    even = values[..., : values.shape[-1] // 2 * 2]
    if layout == "halves":
        return torch.unflatten(even, -1, (2, -1)).sum(-2)
    return torch.unflatten(even, -1, (-1, 2)).sum(-1)


def padded_pairs(kept: Sequence[int], old: int, new: int, layout: str) -> list[int]:
    """The kept dims of a head of `old` dims as one of `new` dims in the same layout; -1 is padding.

    A head that keeps its width keeps every dim in its place.
    """
    if new == old:
        return [dim if dim in set(kept) else -1 for dim in range(old)]
    pairs = sorted({pair_of(dim, old, layout) for dim in kept} - {old // 2})
    pairs += [-1] * (new // 2 - len(pairs))
    if layout == "halves":
        dims = [*pairs, *(-1 if pair < 0 else pair + old // 2 for pair in pairs)]
    else:
        dims = [-1 if pair < 0 else 2 * pair + side for pair in pairs for side in (0, 1)]
    return dims + [-1] * (new % 2)
