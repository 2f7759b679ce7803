"""What a network has and computes: multiply-accumulates, one for each multiply-add, and open units.

`macs` is exact: it is what `torch.utils.flop_counter` counts, halved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hiap.models.family import ImageSize
from hiap.models.registry import family_of, sites, widths_of
from hiap.nn.compact import Widths
from hiap.nn.rotary import by_dim
from hiap.nn.token_merging import BlockTokens, tokens_by_block
from hiap.pruning.attach import gates_by_block, is_gated
from hiap.pruning.topology import Topology, harden

__all__ = [
    "Counts",
    "block_macs",
    "block_tokens",
    "expected_counts",
    "geometry",
    "hard_counts",
    "macs",
    "macs_of_widths",
]


def macs(model: nn.Module, img_size: ImageSize = None, round_to: int = 1) -> int:
    """Exact MACs of one image, patch embedding and classifier included.

    A gated model is counted at its hard topology, as extraction with the same `round_to` would build it.

    Args:
        img_size: of the input; the model's own by default.
        round_to: the multiple that widths are padded to; it concerns gated models only.
    """
    widths = widths_of(model)
    if is_gated(model):
        blocks = harden(model).blocks
        widths = [block.widths(dense, round_to) for block, dense in zip(blocks, widths, strict=True)]
    return macs_of_widths(model, widths, img_size)


def macs_of_widths(
    model: nn.Module, widths: Sequence[Widths], img_size: ImageSize = None, merge_tokens: int = 0
) -> int:
    """Exact MACs of one image, were the blocks of the model of these widths.

    Args:
        merge_tokens: how many tokens each block would merge away, of a model that does not merge by itself.
    """
    family = family_of(model)
    tokens = block_tokens(model, widths, img_size, merge_tokens)
    blocks = zip(family.sites(model), widths, tokens, strict=True)
    return family.fixed_macs(model, img_size) + sum(block_macs(n, site.dim, w, site.glu) for site, w, n in blocks)


def block_tokens(
    model: nn.Module, widths: Sequence[Widths], img_size: ImageSize = None, merge_tokens: int = 0
) -> list[BlockTokens]:
    """The tokens of each block, were the blocks of the model of these widths."""
    family = family_of(model)
    most, prefix = family.merging(model) or (merge_tokens, family.prefix_tokens(model))
    return tokens_by_block(family.tokens(model, img_size), prefix, most, [bool(one.heads) for one in widths])


def block_macs(n: int | BlockTokens, dim: int, widths: Widths, glu: bool = False) -> int:
    """Exact MACs of a block of these widths on n tokens; gated neurons (`glu`) have three matrices, others two.

    Where tokens merge, attention and FFN have their own numbers, and the keys of pairs are compared.
    """
    n = BlockTokens(n, n) if isinstance(n, int) else n
    per_dim = 2 * n.attention * dim + n.attention**2  # two projections (q and k, or v and out) and one N x N map
    attention = (widths.heads or 0) * (widths.qk_dim + widths.value_dim) * per_dim
    matching = n.compared * widths.qk_dim if widths.heads else 0
    return attention + matching + (widths.neurons or 0) * (2 + glu) * n.ffn * dim


def geometry(model: nn.Module, merge_tokens: int = 0) -> dict[str, Any]:
    """What the MACs of a network depend on besides its widths, as JSON values: see `block_macs`.

    Args:
        merge_tokens: how many tokens each block will merge away, of a model that does not merge by itself.
    """
    family = family_of(model)
    found = family.sites(model)
    size = {
        "tokens": family.tokens(model),
        "fixed_macs": family.fixed_macs(model),
        "dims": [site.dim for site in found],
        "glu": [bool(site.glu) for site in found],
    }
    if merge_tokens or family.merging(model):
        size["merged"] = [list(n) for n in block_tokens(model, [site.widths for site in found], None, merge_tokens)]
    return size


@dataclass(frozen=True)
class Counts:
    """Open units of each block, expected or hard: E[a*g], E[a*g*d], E[a*g*e], E[b*c]. Each (L)."""

    heads: Tensor
    value_dims: Tensor
    qk_dims: Tensor
    neurons: Tensor


def expected_counts(model: nn.Module) -> Counts:
    """The expected numbers of open units of a gated model, differentiable in its logits.

    The noise of the gates is independent, so the expectation of a product is the product of the probabilities. What has
    no gate is open.
    """
    probabilities = [{k: gate.probability() for k, gate in kinds.items()} for kinds in gates_by_block(model)]
    found = sites(model)
    some = next((p for block in probabilities for p in block.values()), torch.ones(1, dtype=torch.float64))
    one = torch.ones(1, device=some.device, dtype=some.dtype)
    rows = []
    for p, site in zip(probabilities, found, strict=True):
        w = site.widths
        queries = by_dim(p["qk_dim"], site.pairs, w.qk_dim) if "qk_dim" in p else one
        heads = (p.get("attention", one) * p.get("head", one)).expand(w.heads or 0, 1)
        rows.append(
            torch.stack(
                [
                    heads.sum(),
                    (heads * p.get("value_dim", one)).expand(w.heads or 0, w.value_dim).sum(),
                    (heads * queries).expand(w.heads or 0, w.qk_dim).sum(),
                    (p.get("ffn", one) * p.get("neuron", one)).expand(w.neurons or 0).sum(),
                ]
            )
        )
    return Counts(*torch.stack(rows, dim=1))


def hard_counts(topology: Topology) -> Counts:
    """The numbers of units a topology keeps, without padding."""
    rows = [
        (
            len(block.heads or ()),
            sum(len(dims) for dims in block.value_dims),
            sum(len(dims) for dims in block.qk_dims),
            len(block.neurons or ()),
        )
        for block in topology.blocks
    ]
    return Counts(*torch.tensor(rows, dtype=torch.float64).T)
