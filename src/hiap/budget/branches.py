"""A branch of a block, its attention or its FFN: the widths it can be built in, and what each of them loses."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from hiap.nn.compact import Widths
from hiap.nn.rotary import by_dim

__all__ = ["FFN", "GONE", "AttentionBranch", "Branch", "Curves", "Floors", "Values"]

GONE = Widths(None, 0, 0, None)
STEPS = 16  # that the dims of a head fall in, at most
NOTHING = 1e-12  # least difference of two shares

# what goes of a branch with a share of the value of its units, by kind: points (share, part)
Curves = dict[str, Tensor]
Values = dict[str, Tensor]  # of the units of a block, by kind of gate; closing a kind that is not there is no choice


@dataclass(frozen=True)
class Floors:
    """What every open branch keeps: heads a layer, shares of a head's value dims and of an FFN's neurons."""

    heads: int = 1
    value_dims: float = 0.125
    neurons: float = 0.02


class Branch:
    """The widths that one branch can be built in, the widest first, and none of it last.

    Attributes:
        gate: the kind of gate that closes the whole branch.
        choices: widths of a block that has this branch alone.
    """

    gate: str
    choices: list[Widths]

    def losses(self, values: Values, proportional: bool = True, curves: Curves | None = None) -> Tensor:
        """What each choice loses: what is left of a branch or head never loses more than the whole of it. (choices)

        Args:
            proportional: units lose what they are worth. Else they share what the branch is worth, and those that go
                first take the most of it: with a share s of all units' value goes 1 - (1 - s)^2 of the branch.
            curves: what goes of the branch instead, where that was measured.
        """
        inside = self._inside(values)
        if self.choices[-1] != GONE:
            return inside
        whole = values[self.gate].view(1)
        if proportional:
            return torch.cat([inside.minimum(whole), whole])
        if curves:
            lost = [_on_curve(share, curves[kind]) for kind, share in self._shares(values).items()]
            return torch.cat([whole * torch.stack(lost).sum(0).clamp(max=1), whole])
        left = (1 - inside / self._all(values)).clamp(min=0)
        return torch.cat([whole * (1 - left.square()), whole])

    def prices(self, price: Tensor) -> dict[str, float]:
        """What a unit of each kind costs on the way from the whole branch to the least, given the price of choices."""
        raise NotImplementedError

    def _inside(self, values: Values) -> Tensor:
        """What the units are worth that each choice has no room for."""
        raise NotImplementedError

    def _all(self, values: Values) -> float:
        """What all units are worth."""
        raise NotImplementedError

    def _shares(self, values: Values) -> Values:
        """For every kind of unit the share of its value that each choice has no room for. (choices but the last)"""
        raise NotImplementedError


class FFN(Branch):
    gate = "ffn"

    def __init__(self, dense: Widths, movable: Collection[str], floors: Floors, multiple: int, origin: Widths) -> None:
        assert dense.neurons is not None
        floor = floors.neurons * (origin.neurons or 0)
        self.neurons = _axis(dense.neurons, floor, multiple, "neuron" in movable)
        self.choices = [Widths(None, 0, 0, n) for n in self.neurons] + [GONE] * (self.gate in movable)

    def _inside(self, values: Values) -> Tensor:
        return _lost(values.get("neuron"), self.neurons)

    def _all(self, values: Values) -> float:
        return float(values["neuron"].sum()) if "neuron" in values else math.inf

    def _shares(self, values: Values) -> Values:
        return {"neuron": self._inside(values) / self._all(values)} if "neuron" in values else {}

    def prices(self, price: Tensor) -> dict[str, float]:
        return {"ffn": float(price[0]), "neuron": _slope(price[: len(self.neurons)], self.neurons)}


class AttentionBranch(Branch):
    """The attention of a block. Where rotary positions pair the q/k dims, whole pairs stay or go."""

    gate = "attention"

    def __init__(
        self,
        dense: Widths,
        movable: Collection[str],
        floors: Floors,
        multiple: int,
        origin: Widths,
        pairs: str | None = None,
    ) -> None:
        assert dense.heads
        self.pairs = pairs
        least = min(floors.heads, dense.heads) if "head" in movable else dense.heads
        self.heads = list(range(dense.heads, least - 1, -1))
        even = multiple if pairs is None else math.lcm(multiple, 2)
        self.qk_dims = _axis(dense.qk_dim, 0.0, even, "qk_dim" in movable, STEPS)
        floor = floors.value_dims * origin.value_dim
        self.value_dims = _axis(dense.value_dim, floor, multiple, "value_dim" in movable, STEPS)
        widths = [Widths(*one, None) for one in product(self.heads, self.qk_dims, self.value_dims) if one[0]]
        self.choices = widths + [Widths(0, 0, 0, None)] * (least == 0) + [GONE] * (self.gate in movable)

    def _inside(self, values: Values) -> Tensor:
        """Closed heads, and the dims that open ones have no room for. The best heads stay."""
        head = values["head"].flatten() if "head" in values else torch.full((self.heads[0],), math.inf).double()
        order = head.argsort(descending=True, stable=True)
        queries, vals = (
            _lost(of, axis).expand(len(order), -1)
            for of, axis in ((self._queries(values), self.qk_dims), (values.get("value_dim"), self.value_dims))
        )
        dims = (queries[:, :, None] + vals[:, None, :]).minimum(head[:, None, None])[order].cumsum(0)
        closed = _lost(head if "head" in values else None, self.heads)
        some = [n for n in self.heads if n]
        inside = closed[: len(some), None, None] + dims[[n - 1 for n in some]]
        return torch.cat([inside.flatten(), closed[len(some) :]])

    def _shares(self, values: Values) -> Values:
        """Dims are counted in all heads, closed ones too."""
        some = [n for n in self.heads if n]
        axes = {"head": some, "qk_dim": self.qk_dims, "value_dim": self.value_dims}
        shares = {}
        for at, (kind, axis) in enumerate(axes.items()):
            units = self._queries(values) if kind == "qk_dim" else values.get(kind)
            if units is not None:
                rows = units.view(1, -1) if kind == "head" else units
                lost = _lost(rows, axis).sum(0) / units.sum()
                grid = lost.view([-1 if i == at else 1 for i in range(3)]).expand(*map(len, axes.values())).flatten()
                shares[kind] = torch.cat([grid, torch.ones(len(self.heads) - len(some)).double()])
        return shares

    def _queries(self, values: Values) -> Tensor | None:
        """What each q/k dim is worth: half of its pair. (heads, dims)"""
        found = values.get("qk_dim")
        return found if found is None or self.pairs is None else by_dim(found / 2, self.pairs, self.qk_dims[0], 0.0)

    def _all(self, values: Values) -> float:
        if "head" in values:
            return float(values["head"].sum())
        return sum(float(values[kind].sum()) for kind in ("qk_dim", "value_dim") if kind in values) or math.inf

    def prices(self, price: Tensor) -> dict[str, float]:
        heads = [n for n in self.heads if n]
        shape = (len(heads), len(self.qk_dims), len(self.value_dims))
        grid = price[: math.prod(shape)].view(shape)
        return {
            "attention": float(price[0]),
            "head": _slope(grid[:, 0, 0], heads),
            "qk_dim": _slope(grid[0, :, 0], self.qk_dims) / heads[0] * (1 if self.pairs is None else 2),
            "value_dim": _slope(grid[0, 0, :], self.value_dims) / heads[0],
        }


def _axis(full: int, floor: float, multiple: int, movable: bool, steps: int | None = None) -> list[int]:
    """Widths from the whole one down to the least: multiples, but for the whole one itself, in about so many steps.

    Args:
        floor: units that are kept at least.
    """
    if not movable:
        return [full]
    step = multiple * -(-full // (steps * multiple)) if steps else multiple
    least = -(-max(math.ceil(floor), 1) // multiple) * multiple
    between = range((full - 1) // step * step, least, -step)
    return [full, *between, *([least] if least < full else [])]


def _lost(values: Tensor | None, kept: Sequence[int]) -> Tensor:
    """The values that do not fit where so many of the greatest are kept; for every row of values. (..., len(kept))"""
    if values is None:
        return torch.zeros(len(kept), dtype=torch.float64)
    least_first = values.sort(dim=-1).values
    sums = torch.cat([torch.zeros_like(least_first[..., :1]), least_first.cumsum(-1)], dim=-1)
    return sums[..., [values.shape[-1] - n for n in kept]]


def _on_curve(shares: Tensor, curve: Tensor) -> Tensor:
    """Straight between the points of a curve, which begins at (0, 0), never falls and ends at (1, 1).

    Args:
        curve: shares of value, and of the branch. (points, 2)
    """
    ends = curve.new_tensor([[0.0, 0.0], [1.0, 1.0]])
    x, y = torch.cat([ends[:1], curve[curve[:, 0].argsort()], ends[1:]]).clamp(0, 1).t().contiguous()
    y = y.cummax(0).values
    right = torch.searchsorted(x, shares.contiguous()).clamp(1, len(x) - 1)
    run = (x[right] - x[right - 1]).clamp(min=NOTHING)
    found: Tensor = y[right - 1] + (y[right] - y[right - 1]) * ((shares - x[right - 1]) / run).clamp(0, 1)
    return found


def _slope(prices: Tensor, widths: Sequence[int]) -> float:
    """Price of a unit, from the greatest width to the least; nothing where there is one width."""
    return float(prices[0] - prices[-1]) / max(widths[0] - widths[-1], 1)
