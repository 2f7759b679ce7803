"""A budget that is met: gates are held on a falling cost while they compete, and the last decision is exact.

Every unit has a value. The allocation of the budget (`allocate`) tells which widths keep most of it, counted on the
network that extraction would build, padding included; the logits of the gates are set to the distance of each unit from
the last one that is kept. At the freeze the same allocation decides. The cost is never above the target.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from hiap.budget.allocate import Allocation
from hiap.budget.branches import Curves, Floors, Values
from hiap.budget.cost import Cost
from hiap.budget.target import BudgetError, Target
from hiap.errors import InputError
from hiap.models.family import Site
from hiap.models.registry import sites
from hiap.nn.compact import Widths
from hiap.nn.gates import Gate
from hiap.nn.rotary import pair_count, pair_of
from hiap.pruning.attach import gates, gates_by_block, is_gated
from hiap.pruning.topology import BlockTopology, Topology, harden

__all__ = ["LIMIT", "BudgetError", "Controller", "Floors", "Target"]

MACRO = ("head", "attention")  # the gates of the macro term; the others belong to the micro term
WHOLE = {"attention": ("head", "qk_dim", "value_dim"), "ffn": ("neuron",)}  # what closes a branch, what is in it
KEPT = (1 / 2, 1 / 8)  # of the units of a kind, where it is measured what goes of a branch with the others
LIMIT = 8.0  # logits are held within it: p = 0.9997 and 0.0003
DIGITS = 5  # of a value that count in the decision
NOTHING = 1e-30  # least value of a unit: its logarithm is taken
LEAST = 1e-200  # of learned values, the best being 1: shares of them are taken


class Controller:
    """Holds the gates of a model on a budget and decides the topology.

    Args:
        cost: of the network; its `block` counts a block of given widths exactly.
        target: absolute, in the unit of the cost.
        ratio: macro to micro. Units of a kind give way as if their cost were multiplied by its part; 0 protects a kind.
        mode: "importance" values a unit by its squared gate gradient and sets the logits, which get no gradient of the
            loss; "gradient" leaves them to the optimiser, shifts them down together, and takes them for the value of a
            unit per cost.
        window: observations the importance is averaged over.
        origin: widths of the dense model, which the floors are shares of, where the model is a pruned one.

    Attributes:
        widths: padded widths of the blocks at the last projection.
        measured: the gates of whole branches, where these are valued by `measure`: with "importance" and a cost of
            which a narrow branch has nearly as much as a wide one.
        by_measure: which of all values these are.

    Raises:
        BudgetError: the target is out of reach; the message has the range.
    """

    def __init__(
        self,
        model: nn.Module,
        cost: Cost,
        target: float,
        ratio: tuple[float, float] = (1.0, 1.0),
        floors: Floors | None = None,
        round_to: int = 8,
        mode: str = "importance",
        window: int = 100,
        origin: Sequence[Widths] | None = None,
    ) -> None:
        if not is_gated(model):
            raise InputError("the model has no gates; attach them with hiap.attach first")
        if mode not in ("importance", "gradient"):
            raise InputError(f"mode must be 'importance' or 'gradient'; found {mode!r}")
        if min(ratio) < 0 or max(ratio) == 0:
            raise BudgetError(f"macro:micro {ratio[0]:g}:{ratio[1]:g} must not be negative, and not both zero")
        self.sites = sites(model)
        self.kinds = gates_by_block(model)
        self.model, self.cost, self.round_to = model, cost, round_to
        self.target, self.mode, self.window = target, mode, window
        if ratio[0] and all("qk_dim" in kinds for kinds in self.kinds if kinds) and ratio[0] != ratio[1]:
            raise BudgetError(
                "with qk_dim gates heads have no fixed cost, so the macro term is empty: leave the ratio at 1:1"
            )
        self.weight = {kind: ratio[0] if kind in MACRO else ratio[1] for kinds in self.kinds for kind in kinds}
        self.all_gates = list(gates(model))
        size = sum(gate.logit.numel() for gate in self.all_gates)
        device = self.all_gates[0].logit.device
        self.gradient = torch.zeros(size, device=device)
        self.importance = torch.zeros(size, device=device)
        self.observations = 0
        self.listen(mode == "importance")
        for gate in self.all_gates:
            gate.learned = mode == "gradient"
        self.widths = [site.widths for site in self.sites]
        self.dense_cost = cost.of_widths(model, self.widths)
        movable = [{kind for kind in kinds if self.weight[kind]} for kinds in self.kinds]
        self.allocation = Allocation(self.sites, movable, cost, floors, round_to, origin)
        measurable = mode == "importance" and not cost.proportional and self.allocation.optional
        whole = {id(gate) for kinds in self.kinds for kind, gate in kinds.items() if measurable and kind in WHOLE}
        self.measured = [gate for gate in self.all_gates if id(gate) in whole]
        masks = [torch.full_like(gate.logit, id(gate) in whole, dtype=torch.bool) for gate in self.all_gates]
        self.by_measure = torch.cat(masks)
        self.curves = torch.zeros(0, len(KEPT), 2, dtype=torch.float64)
        self.low = self.allocation.least
        if not self.reaches(target):
            raise BudgetError(
                f"a target of {cost.say(target)} ({target / self.dense_cost:.1%}) is out of reach: floors, gates and "
                f"the ratio {ratio[0]:g}:{ratio[1]:g} allow {cost.say(self.low)} ({self.low / self.dense_cost:.1%}) up "
                f"to {cost.say(self.dense_cost)} (100%, the dense model)"
            )

    def listen(self, on: bool) -> None:
        """Whether backward passes add to the gradients that `observe` takes in."""
        for gate, part in zip(self.all_gates, self._split(self.gradient), strict=True):
            gate.gradient = part if on else None

    def observe(self, reduce: Callable[[Tensor], Tensor] = lambda x: x, scale: float = 1.0) -> None:
        """Take in the gate gradients of one optimiser step. Those that are not finite (float16) change nothing.

        Args:
            reduce: mean over processes.
            scale: the factor the loss was multiplied by.
        """
        if self.mode != "importance":
            return
        gradient = reduce(self.gradient / scale)
        self.observations += 1
        found = gradient.square()
        kept = self.by_measure | ~found.isfinite().all()  # no look at the device
        found = torch.where(kept, self.importance, found)
        self.importance.lerp_(found, 1 / min(self.observations, self.window))
        self.gradient.zero_()

    @torch.no_grad()
    def measure(self, loss: Callable[[], Tensor]) -> None:
        """Value whole branches by how much greater the loss is without them. It is averaged with what was known before.

        The squared gradient of a gate that is open tells little of the loss once it is closed: an FFN that the network
        can do without may have a steep one.

        Args:
            loss: of the network as it is now, its gates hard.
        """
        now, found = loss(), []
        for gate in self.measured:
            logit = gate.logit.clone()
            gate.logit.copy_(torch.where(logit > 0, -LIMIT, LIMIT))
            found.append((loss() - now) * torch.where(logit > 0, 1.0, -1.0))
            gate.logit.copy_(logit)
        known = self.importance[self.by_measure]
        grown = torch.cat(found).to(known).clamp(min=0)
        averaged = torch.where(known > 0, (known + grown) / 2, grown)
        self.importance[self.by_measure] = torch.where(grown.isfinite(), averaged, known)

    @torch.no_grad()
    def measure_curves(self, loss: Callable[[], Tensor]) -> None:
        """How much of a branch goes with a part of its units: the growth of the loss without those, by the growth
        without all of it.

        Args:
            loss: of the network as it is now, its gates hard. All of them are open, and `measure` has just been called.
        """
        least, shares, parts = loss(), [], []
        for kinds, values, whole, inside in self._branches(self.values()):
            most = float(values[whole]) * self.weight[whole]
            for kind in inside:
                logit, rows = kinds[kind].logit, _rows(kind, values[kind])
                ordered = rows.sort(dim=-1, descending=True)
                for kept in KEPT:
                    count = max(1, round(kept * rows.shape[-1]))
                    shares.append(float(ordered.values[:, count:].sum() / rows.sum()))
                    closed = torch.full_like(rows, LIMIT).scatter(-1, ordered.indices[:, count:], -LIMIT)
                    logit.copy_(closed.flatten())
                    parts.append(float(loss() - least) / most)
                logit.fill_(LIMIT)
        found = torch.tensor([shares, parts], dtype=torch.float64).t().nan_to_num(1.0)
        self.curves = found.clamp(0, 1).view(-1, len(KEPT), 2)

    def _branches(self, values: Sequence[Values]) -> Iterator[tuple[dict[str, Gate], Values, str, list[str]]]:
        """The branches that are valued by `measure`: gates and values of the block, what closes it, what is in it."""
        measured = set(map(id, self.measured))
        for kinds, block in zip(self.kinds, values, strict=True):
            for whole, inside in WHOLE.items():
                if whole in kinds and id(kinds[whole]) in measured:
                    yield kinds, block, whole, [kind for kind in inside if kind in block]

    def _losses(self, values: Sequence[Values]) -> Tensor:
        """What each choice of each branch loses."""
        if not len(self.curves):
            return self.allocation.losses(values)
        rest, curves = iter(self.curves), {id(block): Curves() for block in values}
        for _, block, _, inside in self._branches(values):
            curves[id(block)] |= {kind: next(rest) for kind in inside}
        return self.allocation.losses(values, list(curves.values()))

    def restore(self, importance: Tensor, observations: int, curves: Tensor | None = None) -> None:
        """Take up the state of an earlier controller; the logits come with the model."""
        self.importance.copy_(importance)
        self.observations = observations
        self.curves = self.curves if curves is None else curves.cpu().clone()

    @torch.no_grad()
    def project(self, allowed: float, sharpness: float) -> None:
        """Set or move the logits so that the hard, padded network costs no more than `allowed`."""
        allowed = max(allowed, self.target)
        if self.mode == "gradient":
            return self._shift(allowed)
        values = self.values()
        losses = self._losses(values)
        chosen, rate = self.allocation.spend(losses, allowed)
        self.widths = self.allocation.widths(chosen)
        inside, level = self.allocation.inside(chosen, losses, rate)
        logits = [
            (kinds[kind], ((value.log() - _bound(value.log(), kind, kept, worth[kind])) * sharpness).flatten())
            for kinds, block, kept, worth in zip(
                self.kinds, values, map(_units, self.sites, self.allocation.widths(inside)), level, strict=True
            )
            for kind, value in block.items()
        ]
        first = self.all_gates[0].logit
        flat = torch.cat([logit for _, logit in logits]).clamp(-LIMIT, LIMIT).to(first.device, first.dtype)
        for (gate, _), part in zip(logits, torch.split(flat, [len(logit) for _, logit in logits]), strict=True):
            gate.logit.copy_(part)

    def _shift(self, allowed: float) -> None:
        """Lower all movable logits together, as little as it takes to fit."""
        moved = [(gate, gate.logit.clone(), self.weight[kind]) for kinds in self.kinds for kind, gate in kinds.items()]
        worths = torch.cat([logit / weight for _, logit, weight in moved if weight]).sort().values.clamp(min=0).tolist()
        worths.append(worths[-1] * (1 + 1e-6))  # rounding may leave the last one open

        def fits(shift: float) -> bool:
            for gate, logit, weight in moved:
                gate.logit.copy_((logit - shift * weight).clamp(-LIMIT, LIMIT))
            self.widths = harden(self.model).widths(self.round_to)
            return self.cost.of_widths(self.model, self.widths) <= allowed

        if not fits(0.0):
            fits(worths[bisect_left(worths, True, key=fits)])

    def reaches(self, target: float) -> bool:
        """Whether a network of this cost can be had."""
        return self.low <= target < self.dense_cost

    def decide(self, target: float | None = None) -> Topology:
        """The topology, without zero padding: never above the target, and at most 1 % below it.

        Where units are so large that no network is within 1 %, it is the one that comes nearest.

        Values are rounded to five digits first, and of equal units the first stay: units that are worth the same are
        decided alike, whatever the last bits of a run say. Runs whose values agree to some digits (one process against
        two) mostly agree in the topology, but not always: two units can lie just where one is cut.
        """
        values = self._rounded_values()
        losses = self._losses(values)
        widths = self.allocation.widths(self.allocation.settle(losses, self.target if target is None else target))
        blocks = tuple(
            _block_topology(site, now, {kind: _rank(kind, value) for kind, value in block.items()})
            for site, now, block in zip(self.sites, widths, values, strict=True)
        )
        return Topology(blocks, tuple(site.widths for site in self.sites))

    def neighbours(self, distance: float, target: float) -> list[dict[str, Any]]:
        """The networks that budgets just below, at and just above the target would give; those that can be reached.

        Args:
            distance: from one budget to the next, in the unit of the cost.
            target: what has been decided on.

        Returns:
            steps from the target, budget, cost, padded widths, and estimated loss as a multiple of that at the target.
        """
        found: list[dict[str, Any]] = []
        losses = self._losses(self._rounded_values())
        rows = torch.arange(len(losses))
        for step in (-1, 0, 1):
            allowed = target + step * distance
            if self.reaches(allowed):
                chosen = self.allocation.settle(losses, allowed)
                widths = self.allocation.widths(chosen)
                cost = self.cost.of_widths(self.model, widths)
                lost = float(losses[rows, chosen].sum())
                found.append({"step": step, "allowed": allowed, "cost": cost, "loss": lost})
                found[-1]["widths"] = [asdict(one) for one in widths]
        at = next(one["loss"] for one in found if not one["step"]) or 1.0
        return [{**one, "loss": one["loss"] / at} for one in found]

    def _rounded_values(self) -> list[Values]:
        return [{kind: _rounded(value) for kind, value in block.items()} for block in self.values()]

    def values(self) -> list[Values]:
        """What is lost with each movable unit, in CPU float64."""
        known = self.importance if self.mode == "importance" else torch.cat([gate.logit for gate in self.all_gates])
        known = known.detach().cpu().double()
        if not known.isfinite().all():
            raise InputError("the values of some gates are not finite: the run that trained them has diverged")
        parts = dict(zip(map(id, self.all_gates), self._split(known), strict=True))
        values = [
            {kind: parts[id(gate)].view(gate.shape) for kind, gate in kinds.items() if self.weight[kind]}
            for kinds in self.kinds
        ]
        if self.mode == "importance":
            return [{k: value / self.weight[k] + NOTHING for k, value in block.items()} for block in values]
        worths = [{kind: value / self.weight[kind] for kind, value in block.items()} for block in values]
        top = max(float(worth.max()) for block in worths for worth in block.values())
        return [
            {kind: (worth - top).exp().clamp(min=LEAST) * max(price[kind], NOTHING) for kind, worth in block.items()}
            for block, price in zip(worths, self.allocation.prices(), strict=True)
        ]

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, [gate.logit.numel() for gate in self.all_gates])


def _rounded(values: Tensor) -> Tensor:
    """Positive values to so many significant digits that noise in the last bits of float32 is gone."""
    scale = 10.0 ** (DIGITS - 1 - values.log10().floor())
    return (values * scale).round() / scale


def _units(site: Site, widths: Widths) -> dict[str, int | None]:
    """How many units of each kind these widths have room for, in a head where the kind is a dim."""
    queries = pair_count(widths.qk_dim, site.pairs)
    return {"head": widths.heads, "value_dim": widths.value_dim, "qk_dim": queries, "neuron": widths.neurons}


def _bound(values: Tensor, kind: str, kept: dict[str, int | None], level: float) -> Tensor:
    """Where units begin to be open: at the level, if it is between those that are kept and those that are not.

    Args:
        values: logarithms.
        kept: units of the block, were its branches open: those inside a closed branch keep their own ranking, so that
            the branch can come back.
        level: the value from which on a unit is worth its cost.
    """
    bound = torch.full((1,), level, dtype=values.dtype).log()
    if kind not in kept:
        return bound
    rows, count = _rows(kind, values), kept[kind] or 0
    ends = torch.full((len(rows), 1), math.inf, dtype=values.dtype)
    ordered = torch.cat([ends, rows.sort(dim=-1, descending=True).values, -ends], dim=-1)
    least, most = ordered[:, count], ordered[:, count + 1]  # of those that are kept, of the others
    middle = (least.clamp(max=most + 2.0) + most.clamp(min=least - 2.0)) / 2
    return torch.where((bound > most) & (bound < least), bound, middle).view(-1, *[1] * (values.ndim - 1))


def _rows(kind: str, values: Tensor) -> Tensor:
    """The values of units that are ranked together: all heads or neurons, or the dims of a head. (rows, units)"""
    return values.view(1, -1) if kind in ("head", "neuron") else values


def _rank(kind: str, values: Tensor) -> Tensor:
    """Indices from the most to the least worth: of heads or neurons, or of the dims of each head."""
    return (values.flatten() if kind == "head" else values).argsort(dim=-1, descending=True, stable=True)


def _block_topology(site: Site, now: Widths, rank: dict[str, Tensor]) -> BlockTopology:
    """The units of greatest worth that fill these widths exactly."""
    dims = site.widths.qk_dim

    def best(kind: str, count: int, head: int | None = None) -> tuple[int, ...]:
        if kind not in rank or (kind == "qk_dim" and count == dims):
            return tuple(range(count))
        order = rank[kind] if head is None else rank[kind][head]
        if kind == "qk_dim" and site.pairs is not None:
            pairs = set(order[: count // 2].tolist())
            return tuple(dim for dim in range(dims) if pair_of(dim, dims, site.pairs) in pairs)
        return tuple(sorted(order[:count].tolist()))

    heads = None if now.heads is None else best("head", now.heads)
    return BlockTopology(
        heads,
        tuple(best("value_dim", now.value_dim, h) for h in heads or ()),
        tuple(best("qk_dim", now.qk_dim, h) for h in heads or ()),
        None if now.neurons is None else best("neuron", now.neurons),
    )
