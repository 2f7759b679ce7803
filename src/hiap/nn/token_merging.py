"""Token merging: between the attention and the FFN of a block, the most similar pairs of tokens become one token each.

The patch tokens are split in two: those at even places and those at odd places. Each even token finds the odd token
whose key is most similar to its own. The best pairs are merged: the odd token becomes the mean of both, weighted by how
many patches each stands for, and the even token goes. A token that stands for s patches counts s times in all later
attention, because log(s) is added to its scores. What is left stays in the order of the image. Prefix tokens (class
token, registers) are never merged.

The idea is that of ToMe (Bolya et al., "Token Merging: Your ViT But Faster", 2023).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.nn.compact import Attention, Block

__all__ = [
    "BlockTokens",
    "Matching",
    "MergingBlocks",
    "match_tokens",
    "merge_pairs",
    "merged_count",
    "run_merging",
    "token_bias",
    "tokens_by_block",
]


def merged_count(tokens: int, prefix: int, most: int) -> int:
    """How many of so many tokens a block merges away: `most`, but at most half of those that are not of the prefix."""
    return max(min(most, (tokens - prefix) // 2), 0)


class BlockTokens(NamedTuple):
    """How many tokens a block works on."""

    attention: int
    ffn: int
    compared: int = 0  # pairs of an even and an odd token


def tokens_by_block(tokens: int, prefix: int, most: int, attends: Iterable[bool]) -> list[BlockTokens]:
    """The tokens of each block of a network that merges; `attends` tells which of them have attention."""
    found = []
    for attention in attends:
        gone, patches = merged_count(tokens, prefix, most) if attention else 0, tokens - prefix
        found.append(BlockTokens(tokens, tokens - gone, (patches + 1) // 2 * (patches // 2) if gone else 0))
        tokens -= gone
    return found


class Matching(NamedTuple):
    """Which tokens merge, as places among M tokens."""

    source: Tensor  # tokens that go, (B, R)
    target: Tensor  # the token that each of them is merged into, (B, R)
    kept: Tensor  # all that stay, in ascending order, (B, M - R)


def match_tokens(keys: Tensor, count: int) -> Matching:
    """Choose so many pairs of tokens by the cosine similarity of their keys (B, M, D)."""
    B, M, _ = keys.shape
    keys = F.normalize(keys, dim=-1)
    best, partner = (keys[:, ::2] @ keys[:, 1::2].transpose(1, 2)).max(dim=-1)  # of each even token
    order = best.topk(best.shape[1], dim=-1).indices
    source = order[:, :count]
    odd = torch.arange(1, M, 2, device=keys.device).expand(B, -1)
    kept = torch.cat([2 * order[:, count:], odd], dim=1).sort(dim=-1).values
    return Matching(2 * source, 2 * partner.gather(1, source) + 1, kept)


def merge_pairs(x: Tensor, sizes: Tensor, matching: Matching) -> tuple[Tensor, Tensor]:
    """Merge tokens (B, M, D) that stand for `sizes` (B, M) patches each. Returns both for the tokens that stay."""
    D, (source, target, kept) = x.shape[-1], matching
    total = x.to(sizes.dtype) * sizes.unsqueeze(-1)
    total = total.scatter_add(1, _wide(target, D), total.gather(1, _wide(source, D)))
    sizes = sizes.scatter_add(1, target, sizes.gather(1, source)).gather(1, kept)
    mean = total.gather(1, _wide(kept, D)) / sizes.unsqueeze(-1)
    return mean.to(x.dtype), sizes


def _new_places(matching: Matching) -> Tensor:
    """Where each of M tokens is after merging: its place among those that stay, or that of its partner. (B, M)"""
    source, target, kept = matching
    M = kept.shape[1] + source.shape[1]
    own = torch.arange(M, device=kept.device).expand(kept.shape[0], -1)  # len would fix the batch in a traced graph
    rank = torch.zeros_like(own).scatter(1, kept, own[:, : kept.shape[1]])
    return rank.gather(1, own.scatter(1, source, target))


def _wide(index: Tensor, dim: int) -> Tensor:
    """An index of tokens for all of their dims."""
    return index.unsqueeze(-1).expand(-1, -1, dim)


def run_merging(
    blocks: Iterable[nn.Module],
    x: Tensor,
    most: int,
    prefix: int,
    restore: bool,
    ends: Sequence[nn.Module] = (),
) -> Tensor:
    """Tokens (B, N, D) through blocks that merge. Blocks without attention have no keys, and merge nothing.

    Args:
        blocks: each a `Block`; the last may be a module that is called with tokens and `token_bias`.
        most: how many tokens a block merges away (`merged_count`).
        prefix: how many of the first tokens are never merged.
        restore: put each merged token back in the places of all its patches, for heads that read all tokens. A mean
            over them is then weighted by size.
        ends: one for each block. Those with hooks are called with what the block sends on, all tokens put back.
    """
    restore = restore or any(end._forward_hooks for end in ends)
    sizes: Tensor | None = None  # patches that each token stands for, (B, N); None while all are 1
    places: Tensor | None = None  # of the token that each patch is in, among those after the prefix
    for i, block in enumerate(blocks):
        if not isinstance(block, Block):
            x = block(x, token_bias(sizes, x.dtype))
            continue
        keys: Tensor | None = None
        if isinstance(block.attn, Attention):
            q, k, v = block.attn.project(block.norm1(x))
            keys = k.mean(dim=1)[:, prefix:]
            x = x + block.drop_path1(block.ls1(block.attn.attend(q, k, v, token_bias(sizes, q.dtype))))
        elif block.attn is not None:
            x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        count = merged_count(x.shape[1], prefix, most)
        if keys is not None and count:
            matching = match_tokens(keys, count)
            if sizes is None:
                sizes = x.new_ones(x.shape[:2], dtype=torch.promote_types(x.dtype, torch.float32))
            if restore:
                moved = _new_places(matching)
                places = moved if places is None else moved.gather(1, places)
            merged, left = merge_pairs(x[:, prefix:], sizes[:, prefix:], matching)
            x, sizes = torch.cat([x[:, :prefix], merged], dim=1), torch.cat([sizes[:, :prefix], left], dim=1)
        if block.mlp is not None:
            x = x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))
        if ends and ends[i]._forward_hooks:
            ends[i](_put_back(x, places, prefix))
    return _put_back(x, places, prefix)


def _put_back(x: Tensor, places: Tensor | None, prefix: int) -> Tensor:
    """Each merged token in the places of all its patches; as it is where nothing is known of places."""
    if places is None:
        return x
    return torch.cat([x[:, :prefix], x[:, prefix:].gather(1, _wide(places, x.shape[-1]))], dim=1)


def token_bias(sizes: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """What is added to the scores of attention, so that a token counts as often as it has patches. (B, 1, 1, N)"""
    return None if sizes is None else sizes.log().to(dtype)[:, None, None, :]


class MergingBlocks(nn.Module):
    """All blocks of a network as one module, from tokens to tokens: see `run_merging`."""

    def __init__(self, blocks: Iterable[nn.Module], most: int, prefix: int, restore: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.most, self.prefix, self.restore = most, prefix, restore

    def forward(self, x: Tensor) -> Tensor:
        return run_merging(self.blocks, x, self.most, self.prefix, self.restore)

    def extra_repr(self) -> str:
        return f"most={self.most}, prefix={self.prefix}, restore={self.restore}"
