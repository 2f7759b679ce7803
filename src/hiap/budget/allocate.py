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

import torch
from torch import Tensor

from hiap.budget.branches import FFN, GONE, AttentionBranch, Branch, Curves, Floors, Values
from hiap.budget.cost import Cost
from hiap.models.family import Site
from hiap.nn.compact import Widths

__all__ = ["Allocation"]

TIGHT = 0.01  # room of more than this share of the budget is worth a loss
ROUNDING = 1e-12  # of sums, relative
HALVINGS = 64  # of the range of rates, which spans e^+-RANGE
RANGE = 90.0
WAYS = 4096  # to choose for some branches that are told apart where room is packed
PAIRS = 2**18  # of them and the choices of one more branch, at most


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

    def losses(self, values: Sequence[Values], curves: Sequence[Curves] | None = None) -> Tensor:
        """What each choice of each branch loses. (branches, choices)"""
        return _stack(
            [branch.losses(values[i], self.proportional, curves[i] if curves else None) for i, branch in self.branches]
        )

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
