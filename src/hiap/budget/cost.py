"""The differentiable cost of gates (paper, section 3.2).

`MacCost` and `ParamCost` are linear in the expected number of open heads, value dims, q/k dims and neurons of each
block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.models.family import ImageSize, Site
from hiap.models.registry import family_of, sites
from hiap.nn.compact import Widths, has_bias
from hiap.pruning.attach import gates, gates_by_block, is_gated
from hiap.pruning.count import Counts, block_macs, block_tokens

__all__ = [
    "Cost",
    "LinearCost",
    "MacCost",
    "ParamCost",
    "in_words",
]


def in_words(number: float) -> str:
    """A number with its thousands as k, M or G."""
    for prefix, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3f} {prefix}"
    return f"{number:.4g}"


class Cost:
    """What a network costs, additive over its blocks: `fixed + macro(counts) + micro(counts)`.

    Attributes:
        outside: cost of everything but the blocks.
        fixed: cost of what no gate can remove: stem, classifier, protected blocks, ungated units.
        dense: the prunable cost with everything open; losses are divided by it.
        unit: what it is counted in.
        proportional: a branch of half the units costs about half.
    """

    unit = "MACs"
    proportional = True
    outside: float
    fixed: float
    dense: float

    def block(self, site: Site, widths: Widths) -> float:
        """Exact cost of a block of these widths: the sum of its branches; it never falls when a width grows."""
        raise NotImplementedError

    def macro(self, counts: Counts) -> Tensor:
        """Cost of open heads whatever their width."""
        raise NotImplementedError

    def micro(self, counts: Counts) -> Tensor:
        """Cost of what heads and FFNs have in them."""
        raise NotImplementedError

    def say(self, value: float) -> str:
        """A cost in words."""
        return f"{in_words(value)} {self.unit}"

    def price(self, site: Site, widths: Widths) -> float:
        """What a block of these widths is charged where units compete for the budget: its cost."""
        return self.block(site, widths)

    def total(self, counts: Counts) -> Tensor:
        """Cost of the whole network."""
        return self.fixed + self.macro(counts) + self.micro(counts)

    def of_widths(self, model: nn.Module, widths: Sequence[Widths]) -> float:
        """Cost of the whole network, were its blocks of these widths."""
        return self.outside + sum(self.block(site, one) for site, one in zip(sites(model), widths, strict=True))


class LinearCost(Cost):
    """A cost that is linear in the open units.

    Args:
        model: a gated model (or an ungated one, of which everything counts as prunable).
    """

    def __init__(self, model: nn.Module, outside: float) -> None:
        kinds_by_block = gates_by_block(model)
        ungated = not is_gated(model)
        self.outside = self.fixed = float(outside)
        self.dense = 0.0
        rows = []
        for site, kinds in zip(sites(model), kinds_by_block, strict=True):
            w = site.widths
            unit = self.unit_costs(site, "qk_dim" in kinds)
            full = [w.heads or 0, (w.heads or 0) * w.value_dim, (w.heads or 0) * w.qk_dim, w.neurons or 0]
            branch = ungated or not kinds.keys().isdisjoint({"head", "attention"})
            prunable = [
                branch,
                branch or "value_dim" in kinds,
                branch or "qk_dim" in kinds,
                ungated or not kinds.keys().isdisjoint({"neuron", "ffn"}),
            ]
            self.fixed += sum(u * f for u, f, can in zip(unit, full, prunable, strict=True) if not can)
            self.dense += sum(u * f for u, f, can in zip(unit, full, prunable, strict=True) if can)
            rows.append([float(u) if can else 0.0 for u, can in zip(unit, prunable, strict=True)])
        weights = torch.tensor(rows, dtype=torch.float64).T
        self._head, self._value_dim, self._qk_dim, self._neuron = weights

    def unit_costs(self, site: Site, qk_gated: bool) -> tuple[float, float, float, float]:
        """Cost of a head (its fixed part), a value dim, a q/k dim (0 where heads carry it) and a neuron."""
        raise NotImplementedError

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


class MacCost(LinearCost):
    """Multiply-accumulates of one image.

    Args:
        accounting: "exact" counts MACs as extraction saves them; "paper" uses the paper's C1, C2 and C3, which count
            FLOPs (two a MAC) and charge the value projection to the head.
        merge_tokens: how many tokens each block merges away. Blocks must keep their attention, or those after them
            would have more tokens than are counted. `block` is exact; the expected cost of comparing keys takes the
            heads of a block to be equally wide.
    """

    def __init__(
        self, model: nn.Module, accounting: str = "exact", img_size: ImageSize = None, merge_tokens: int = 0
    ) -> None:
        if accounting not in ("exact", "paper"):
            raise InputError(f"accounting must be 'exact' or 'paper'; found {accounting!r}")
        self.accounting = accounting
        family = family_of(model)
        found = family.sites(model)
        tokens = block_tokens(model, [site.widths for site in found], img_size, merge_tokens)
        self.tokens = {site.name: n for site, n in zip(found, tokens, strict=True)}
        self.per_mac = 2 if accounting == "paper" else 1
        super().__init__(model, family.fixed_macs(model, img_size) * self.per_mac)

    def unit_costs(self, site: Site, qk_gated: bool) -> tuple[float, float, float, float]:
        (n, left, compared), d, w = self.tokens[site.name], site.dim, site.widths
        neuron = (2 + site.glu) * left * d
        if self.accounting == "paper":
            if qk_gated:
                raise InputError("the paper's accounting has no q/k dims; use accounting='exact' with qk_dim gates")
            c1 = 2 * n * d * (2 * w.qk_dim + w.value_dim) + 2 * n * n * w.qk_dim
            return c1, 2 * n * d + 2 * n * n, 0, 2 * neuron
        dim = 2 * n * d + n * n
        query = dim + compared / (w.heads or 1)
        return (0, dim, query, neuron) if qk_gated else (w.qk_dim * query, dim, 0, neuron)

    def block(self, site: Site, widths: Widths) -> int:
        return self.per_mac * block_macs(self.tokens[site.name], site.dim, widths, site.glu)


class ParamCost(LinearCost):
    """Parameters. Linear in the units but for what goes with a whole branch (norm, bias, layer scale)."""

    unit = "parameters"

    def __init__(self, model: nn.Module) -> None:
        logits = {id(gate.logit) for gate in gates(model)}
        whole = sum(p.numel() for p in model.parameters() if id(p) not in logits)
        super().__init__(model, whole - sum(self.block(site, site.widths) for site in sites(model)))
        self.fixed = whole - self.dense

    def unit_costs(self, site: Site, qk_gated: bool) -> tuple[float, float, float, float]:
        d, w = site.dim, site.widths
        row = d + (site.attention.qkv.bias is not None) if w.heads else 0
        neuron = (1 + site.glu) * (d + (site.ffn.fc1.bias is not None)) + d if w.neurons else 0
        own = _own_of_head(site)
        return (own, row + d, 2 * row, neuron) if qk_gated else (own + 2 * row * w.qk_dim, row + d, 0, neuron)

    def block(self, site: Site, widths: Widths) -> int:
        block, (head, value_dim, _, neuron) = site.block, self.unit_costs(site, False)
        total = 0.0
        if widths.heads:
            own = _own_of_head(site)
            per_head = own + (head - own) * widths.qk_dim / site.widths.qk_dim + value_dim * widths.value_dim
            total += widths.heads * per_head + _numel([block.norm1, site.attention.q_norm, site.attention.k_norm])
        if widths.neurons:
            total += widths.neurons * neuron + _numel([block.norm2])
        for left, branch, scale, last in (
            (widths.heads, block.attn, block.ls1, "proj"),
            (widths.neurons, block.mlp, block.ls2, "fc2"),
        ):
            if left is not None and (left or has_bias(branch, last)):
                total += site.dim * has_bias(branch, last) + _numel([scale])
        return int(total)


def _own_of_head(site: Site) -> int:
    """Parameters that a head has whatever its widths: those of its relative positions."""
    position = getattr(site.attention, "position", None) if site.widths.heads else None
    return 0 if position is None else int(position.table.shape[0])


def _numel(modules: Sequence[nn.Module]) -> int:
    return sum(p.numel() for module in modules for p in module.parameters())


def _dot(weights: Tensor, counts: Tensor) -> Tensor:
    return (weights.to(counts) * counts).sum()
