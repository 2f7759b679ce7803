"""What a network costs: multiply-accumulates, counted one for each multiply-add (paper, section 3.2).

`macs` is the exact count of a network as it is. `MacCost` is the differentiable cost of its gates: linear in the
expected number of open heads, value dims, q/k dims and neurons of each block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hiap.attach import gates_by_block, is_gated
from hiap.compact import Widths
from hiap.families import timm as family
from hiap.topology import Topology, harden

__all__ = ["Counts", "MacCost", "expected_counts", "hard_counts", "macs"]

ImageSize = int | tuple[int, int] | None


def macs(model: nn.Module, img_size: ImageSize = None, round_to: int = 1) -> int:
    """Exact MACs of one image, patch embedding and classifier included.

    A gated model is counted at its hard topology, as extraction with the same `round_to` would build it.

    Args:
        img_size: of the input; the model's own by default.
        round_to: the multiple that widths are padded to; it concerns gated models only.
    """
    sites = family.sites(model)
    widths = [site.widths for site in sites]
    if is_gated(model):
        blocks = harden(model).blocks
        widths = [block.widths(dense, round_to) for block, dense in zip(blocks, widths, strict=True)]
    n = family.tokens(model, img_size)
    return family.fixed_macs(model, img_size) + sum(
        _block_macs(n, site.dim, one) for site, one in zip(sites, widths, strict=True)
    )


def _block_macs(n: int, dim: int, widths: Widths) -> int:
    per_dim = 2 * n * dim + n * n  # two projections (q and k, or v and out) and one product with the N x N map
    attention = (widths.heads or 0) * (widths.qk_dim + widths.value_dim) * per_dim
    return attention + (widths.neurons or 0) * 2 * n * dim


@dataclass(frozen=True)
class Counts:
    """Open units of each block, expected or hard: E[a*g], E[a*g*d], E[a*g*e], E[b*c]. Each (L)."""

    heads: Tensor
    value_dims: Tensor
    qk_dims: Tensor
    neurons: Tensor


def expected_counts(model: nn.Module) -> Counts:
    """The expected numbers of open units of a gated model, differentiable in its logits.

    The noise of the gates is independent, so the expectation of a product is the product of the probabilities.
    """
    rows = []
    for site, gates in zip(family.sites(model), gates_by_block(model), strict=True):
        p = {kind: gate.probability() for kind, gate in gates.items()}
        like = next(iter(p.values())) if p else next(model.parameters())
        one = torch.ones(1, device=like.device, dtype=torch.promote_types(like.dtype, torch.float32))
        w = site.widths
        heads = (p.get("attention", one) * p.get("head", one)).expand(w.heads or 0, 1)
        rows.append(
            torch.stack(
                [
                    heads.sum(),
                    (heads * p.get("value_dim", one)).expand(w.heads or 0, w.value_dim).sum(),
                    (heads * p.get("qk_dim", one)).expand(w.heads or 0, w.qk_dim).sum(),
                    (p.get("block", one) * p.get("neuron", one)).expand(w.neurons or 0).sum(),
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


class MacCost:
    """The cost of a gated model: `fixed + macro(counts) + micro(counts)`.

    Args:
        model: a gated model (or an ungated one, of which everything counts as prunable).
        accounting: "exact" counts MACs as extraction saves them; "paper" uses the paper's C1, C2 and C3, which count
            FLOPs (two a MAC) and charge the value projection to the head.

    Attributes:
        fixed: cost of what no gate can remove: stem, classifier, protected blocks, ungated units.
        dense: the prunable cost with everything open; losses are divided by it.
    """

    def __init__(self, model: nn.Module, accounting: str = "exact", img_size: ImageSize = None) -> None:
        if accounting not in ("exact", "paper"):
            raise ValueError(f"accounting must be 'exact' or 'paper'; found {accounting!r}")
        sites, gates = family.sites(model), gates_by_block(model)
        ungated = not is_gated(model)
        n = family.tokens(model, img_size)
        self.fixed = float(family.fixed_macs(model, img_size) * (2 if accounting == "paper" else 1))
        self.dense = 0.0
        rows = []
        for site, kinds in zip(sites, gates, strict=True):
            w, d = site.widths, site.dim
            heads, qk, values, neurons = w.heads or 0, w.qk_dim, w.value_dim, w.neurons or 0
            if accounting == "paper" and "qk_dim" in kinds:
                raise ValueError("the paper's accounting has no q/k dims; use accounting='exact' with qk_dim gates")
            # A full unit's cost: head (fixed part), value dim, q/k dim, neuron.
            if accounting == "paper":
                unit = [2 * n * d * (2 * qk + values) + 2 * n * n * qk, 2 * n * d + 2 * n * n, 0, 4 * n * d]
            elif "qk_dim" in kinds:
                unit = [0, 2 * n * d + n * n, 2 * n * d + n * n, 2 * n * d]
            else:
                unit = [qk * (2 * n * d + n * n), 2 * n * d + n * n, 0, 2 * n * d]
            full = [heads, heads * values, heads * qk, neurons]
            branch = ungated or not kinds.keys().isdisjoint({"head", "attention"})
            prunable = [
                branch,
                branch or "value_dim" in kinds,
                branch or "qk_dim" in kinds,
                ungated or not kinds.keys().isdisjoint({"neuron", "block"}),
            ]
            self.fixed += sum(u * f for u, f, can in zip(unit, full, prunable, strict=True) if not can)
            self.dense += sum(u * f for u, f, can in zip(unit, full, prunable, strict=True) if can)
            rows.append([float(u) if can else 0.0 for u, can in zip(unit, prunable, strict=True)])
        weights = torch.tensor(rows, dtype=torch.float64).T
        self._head, self._value_dim, self._qk_dim, self._neuron = weights

    def macro(self, counts: Counts) -> Tensor:
        """Cost of open heads whatever their width; empty where q/k dims are gated."""
        return _dot(self._head, counts.heads)

    def micro(self, counts: Counts) -> Tensor:
        """Cost of value dims, neurons and, where they are gated, q/k dims."""
        return (
            _dot(self._value_dim, counts.value_dims)
            + _dot(self._qk_dim, counts.qk_dims)
            + _dot(self._neuron, counts.neurons)
        )

    def total(self, counts: Counts) -> Tensor:
        """Cost of the whole network."""
        return self.fixed + self.macro(counts) + self.micro(counts)


def _dot(weights: Tensor, counts: Tensor) -> Tensor:
    return (weights.to(counts) * counts).sum()
