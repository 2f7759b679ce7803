"""What a budget is best spent on: a width for every branch, so that all of them fit and the least is lost.

A branch, the attention or the FFN of a block, can be built in many widths, or not at all. Each choice has a cost and a
loss: the values of the units it has no room for, where cost is proportional to them; else the part of the branch's own
value that goes with theirs. Choosing one width for each branch is a knapsack, solved with a Lagrange multiplier: for a
given multiplier each branch picks its width independently, and the multiplier is the least one for which the network
fits. Room that is left is then filled; where units are too large for that, a dynamic programme finds what uses the
budget. Costs may have steps and fixed parts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from hiap.budget.cost import Cost
from hiap.models.family import Site
from hiap.nn.compact import Widths
from hiap.nn.rotary import by_dim

__all__ = ["Allocation", "Branch", "Floors", "Values"]

GONE = Widths(None, 0, 0, None)
STEPS = 16  # that the dims of a head fall in, at most
TIGHT = 0.01  # room of more than this share of the budget is worth a loss
ROUNDING = 1e-12  # of sums, relative
HALVINGS = 64  # of the range of rates, which spans e^+-RANGE
RANGE = 90.0
WAYS = 4096  # to choose for some branches that are told apart where room is packed
PAIRS = 2**18  # of them and the choices of one more branch, at most

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

    def losses(self, values: Values, proportional: bool = True) -> Tensor:
        """What each choice loses: what is left of a branch or head never loses more than the whole of it. (choices)

        Args:
            proportional: units lose what they are worth. Else they share what the branch is worth, and those that go
                first take the most of it: with a share s of all units' value goes 1 - (1 - s)^2 of the branch.
        """
        inside = self._inside(values)
        if self.choices[-1] != GONE:
            return inside
        whole = values[self.gate].view(1)
        if proportional:
            return torch.cat([inside.minimum(whole), whole])
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


def _slope(prices: Tensor, widths: Sequence[int]) -> float:
    """Price of a unit, from the greatest width to the least; nothing where there is one width."""
    return float(prices[0] - prices[-1]) / max(widths[0] - widths[-1], 1)


class Allocation:
    """All branches of a network with the cost of every choice.

    Args:
        movable: the kinds of units that may be closed, block by block.
        multiple: that widths are built in.
        origin: widths that the floors are shares of; those of the blocks by default.
    """

    def __init__(
        self,
        sites: Sequence[Site],
        movable: Sequence[Collection[str]],
        cost: Cost,
        floors: Floors | None = None,
        multiple: int = 8,
        origin: Sequence[Widths] | None = None,
    ) -> None:
        self.proportional = cost.proportional
        self.dense = [site.widths for site in sites]
        self.branches: list[tuple[int, Branch]] = []
        for i, (site, kinds, whole) in enumerate(zip(sites, movable, origin or self.dense, strict=True)):
            arguments = (site.widths, kinds, floors or Floors(), multiple, whole)
            self.branches += [(i, AttentionBranch(*arguments, site.pairs))] if site.widths.heads else []
            self.branches += [(i, FFN(*arguments))] if site.widths.neurons else []
        blocks = [(sites[i], branch.choices) for i, branch in self.branches]
        self.cost, self.price = (
            _stack([torch.tensor([of(site, w) for w in choices], dtype=torch.float64) for site, choices in blocks], pad)
            for of, pad in ((cost.block, math.inf), (cost.price, 0.0))
        )
        constant = [Widths(None if w.heads else w.heads, 0, 0, None if w.neurons else w.neurons) for w in self.dense]
        self.outside = cost.outside + sum(cost.block(site, rest) for site, rest in zip(sites, constant, strict=True))
        every = [self.outside, *self.cost[self.cost.isfinite()].tolist()]
        self.rounding = 0.0 if all(float(one).is_integer() for one in every) else ROUNDING  # whole numbers add exactly

    @property
    def optional(self) -> bool:
        """Whether every branch that can be narrower can be left out too."""
        return all(branch.choices[-1] == GONE or len(branch.choices) == 1 for _, branch in self.branches)

    @property
    def least(self) -> float:
        """Cost of the cheapest network."""
        return (self.outside + float(self.cost.min(dim=1).values.sum())) * (1 + 2 * self.rounding)

    def losses(self, values: Sequence[Values]) -> Tensor:
        """What each choice of each branch loses. (branches, choices)"""
        return _stack([branch.losses(values[i], self.proportional) for i, branch in self.branches])

    def spend(self, losses: Tensor, allowed: float) -> tuple[Tensor, float]:
        """The choices of least loss that fit, and the rate at which branches made them."""
        if self._total(losses.argmin(dim=1)) <= allowed * (1 + ROUNDING):
            return losses.argmin(dim=1), 0.0
        low, high = -RANGE, RANGE
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            if self._total(self._choose(losses, math.exp(middle))) <= allowed:
                high = middle
            else:
                low = middle
        chosen = self._choose(losses, math.exp(high))
        return chosen if self._total(chosen) <= allowed else self.cost.argmin(dim=1), math.exp(high)

    def settle(self, losses: Tensor, allowed: float) -> Tensor:
        """The same, and nothing fits into the room that is left; where it is much, it is worth a loss to use it."""
        allowed *= 1 - self.rounding
        chosen = self._fill(self.spend(losses, allowed)[0], losses, allowed)
        if self._total(chosen) >= (1 - TIGHT) * allowed:
            return chosen
        packed = self._fill(self._pack(losses, allowed), losses, allowed)
        return max(packed, chosen, key=self._total)

    def _pack(self, losses: Tensor, allowed: float) -> Tensor:
        """The choices of least loss among those that leave little room; where none do, those of the greatest cost.

        A dynamic programme over the branches: of all ways to choose so far that cost the same, the one that loses least
        goes on. That is exact as long as there are at most WAYS different costs; beyond, near ones count as the same.
        Costs are added up as they are, so whatever is found does fit.
        """
        room = allowed - self.outside
        least = self.cost.min(dim=1).values
        ahead = least.flip(0).cumsum(0).flip(0) - least  # what the branches to come cost at least
        cost = loss = torch.zeros(1, dtype=torch.float64)
        steps = []
        for costs, lost, rest in zip(self.cost, losses, ahead.tolist(), strict=True):
            choices = _distinct(costs, lost, room - rest, PAIRS // len(cost))
            cost, loss = ((a.unsqueeze(1) + b[choices]).flatten() for a, b in ((cost, costs), (loss, lost)))
            kept = _distinct(cost, loss, room - rest, WAYS)
            steps.append((kept // len(choices), choices[kept % len(choices)]))
            cost, loss = cost[kept], loss[kept]
        tight = cost >= min(room - TIGHT * allowed, float(cost.max()))
        way = int(torch.where(tight, loss, math.inf).argmin())
        found = []
        for before, choices in reversed(steps):
            found.append(int(choices[way]))
            way = int(before[way])
        return torch.tensor(found[::-1])

    def _fill(self, chosen: Tensor, losses: Tensor, allowed: float) -> Tensor:
        """Widen branches, those first that gain most for the cost, until nothing fits."""
        chosen, rows = chosen.clone(), torch.arange(len(chosen))
        while True:
            more = self.cost - self.cost[rows, chosen].unsqueeze(1)
            less = losses[rows, chosen].unsqueeze(1) - losses
            room = allowed - self._total(chosen)
            fits = (more >= 0) & (more <= room) & (less >= 0) & (more + less > 0)
            if not fits.any():
                return chosen
            best = int(torch.where(fits, less / more.clamp(min=ROUNDING * allowed), -1.0).argmax())
            chosen[best // self.cost.shape[1]] = best % self.cost.shape[1]

    def inside(self, chosen: Tensor, losses: Tensor, rate: float) -> tuple[Tensor, list[dict[str, float]]]:
        """The best choice of each branch but to leave it out, and the value from which on a unit is worth its cost.

        The latter is given block by block for every kind. A branch of greater value is kept at this rate; at the very
        rate that decides between two choices, it is the chosen one that is right.
        """
        weighed = losses + rate * self.price
        level = [{kind: rate * price for kind, price in block.items()} for block in self.prices()]
        for row, lost, (i, branch), choice in zip(weighed, losses, self.branches, chosen.tolist(), strict=True):
            last = len(branch.choices) - 1
            if branch.choices[last] == GONE:
                row[last] = math.inf
                least, whole = float(row.min()), float(lost[last])
                level[i][branch.gate] = max(least, whole * 1.001) if choice == last else min(least, whole / 1.001)
        return weighed.argmin(dim=1), level

    def prices(self) -> list[dict[str, float]]:
        """What a unit of each kind costs, block by block, in the dense network."""
        result: list[dict[str, float]] = [{} for _ in self.dense]
        for (i, branch), price in zip(self.branches, self.price, strict=True):
            result[i] |= branch.prices(price)
        return result

    def widths(self, chosen: Tensor) -> list[Widths]:
        """Widths of the blocks."""
        parts: list[dict[str, Widths]] = [{} for _ in self.dense]
        for (i, branch), choice in zip(self.branches, chosen.tolist(), strict=True):
            parts[i][branch.gate] = branch.choices[choice]
        result = []
        for dense, part in zip(self.dense, parts, strict=True):
            attention, ffn = part.get("attention", dense), part.get("ffn", dense)
            result.append(Widths(attention.heads, attention.qk_dim, attention.value_dim, ffn.neurons))
        return result

    def _choose(self, losses: Tensor, rate: float) -> Tensor:
        return (losses + rate * self.price).argmin(dim=1)

    def _total(self, chosen: Tensor) -> float:
        return self.outside + float(self.cost.gather(1, chosen.unsqueeze(1)).sum())


def _distinct(cost: Tensor, loss: Tensor, most: float, limit: int) -> Tensor:
    """The index of the least loss for each cost up to the most; if there are more than the limit, for about so many."""
    fits = (cost <= most).nonzero().flatten()
    cost, loss = cost[fits], loss[fits]
    different, group = torch.unique((cost / (ROUNDING * most)).round(), return_inverse=True)
    if len(different) > limit:
        group = (cost * (limit / cost.max())).long()
    least = torch.full((int(group.max()) + 1,), math.inf, dtype=loss.dtype).scatter_reduce(0, group, loss, "amin")
    best = (loss == least[group]).nonzero().flatten()
    first = torch.full((len(least),), len(loss)).scatter_reduce(0, group[best], best, "amin")
    return fits[first[first < len(loss)]]


def _stack(rows: Sequence[Tensor], pad: float = math.inf) -> Tensor:
    """Rows of different lengths in one tensor."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad)
