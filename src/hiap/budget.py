"""A budget that is met: gates are held on a falling cost while they compete, and the last decision is exact.

Every gate has a worth. The units of greatest worth that fit the budget are open, counted on the network that extraction
would build, padding included; the logits are set to (or moved by) the distance of the worth from that threshold. At
the freeze the same threshold decides, and what room is left is filled unit by unit. The cost is never above the target.
"""

from __future__ import annotations

import copy
import math
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiap.attach import gates, gates_by_block
from hiap.compact import Widths
from hiap.cost import Cost
from hiap.families import timm as family
from hiap.topology import BlockTopology, Topology

__all__ = ["BudgetError", "Controller", "Floors", "Target"]

MACRO = ("head", "attention")  # the gates of the macro term; the others belong to the micro term
TIGHT = 0.005  # room of more than this share of the target is worth a second look
LIMIT = 8.0  # logits are held within it: p = 0.9997 and 0.0003

Worths = list[dict[str, Tensor]]


class _Ranked:
    """The worths of a block, sorted so that units above a threshold are counted by bisection."""

    def __init__(self, worth: dict[str, Tensor], heads: int) -> None:
        self.order = _rank("head", worth["head"]).tolist() if "head" in worth else list(range(heads))
        self.sorted: dict[str, list[Any]] = {
            kind: (values.flatten() if kind == "head" else values).sort(dim=-1).values.tolist()
            for kind, values in worth.items()
        }

    def __contains__(self, kind: str) -> bool:
        return kind in self.sorted

    def above(self, kind: str, threshold: float) -> int:
        """Units of the block that are worth more."""
        values = self.sorted[kind]
        return len(values) - bisect_right(values, threshold)

    def widest(self, kind: str, heads: int, threshold: float) -> int:
        """Dims worth more, in that of the best heads which has most of them."""
        rows = self.sorted[kind]
        return max(len(rows[h]) - bisect_right(rows[h], threshold) for h in self.order[:heads])

    def without(self, kind: str) -> _Ranked:
        """The same block, were it not for one kind of gate."""
        other = copy.copy(self)
        other.sorted = {name: values for name, values in self.sorted.items() if name != kind}
        return other

    def worth(self, kind: str, place: int) -> float:
        """The worth of the unit at a place of the ranking."""
        return float(self.sorted[kind][-1 - place])

    def worth_of_dims(self, kind: str, heads: int, place: int) -> float:
        """The highest worth of a dim at a place of the ranking of its head."""
        return float(max(self.sorted[kind][h][-1 - place] for h in self.order[:heads]))


Ranking = list[_Ranked]


class BudgetError(ValueError):
    """A target that cannot be read or cannot be reached."""


@dataclass(frozen=True)
class Target:
    """A budget as a user writes it.

    Attributes:
        unit: "macs", "params", "ms" or "mJ"; "share" (of the dense model's cost) or "x" (times cheaper than it).
    """

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """From "7.4G", "850M", "42%", "1.2M params", "1.8ms", "900mJ" or "2.0x".

        Raises:
            BudgetError: with the forms that are read.
        """
        suffix, amount = r"(%|x|ms|mj)", r"([KMG]?)\s*(macs|params|)"
        found = re.fullmatch(rf"\s*([0-9.]+)\s*(?:{suffix}|{amount})\s*", text, re.IGNORECASE)
        try:
            value = float(found[1]) if found else -1.0
        except ValueError:
            value = -1.0
        if not found or value <= 0:
            raise BudgetError(
                f"target {text!r} is not a budget; write it as 7.4G, 850M, 42% or '1.2M params', or with --cost as "
                "1.8ms or 2.0x"
            )
        if found[2]:
            unit = {"%": "share", "x": "x", "ms": "ms", "mj": "mJ"}[found[2].lower()]
            return cls(value / 100 if unit == "share" else value, unit)
        scale = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}[found[3].upper()]
        return cls(value * scale, "params" if found[4].lower() == "params" else "macs")

    def absolute(self, dense: float) -> float:
        """The target in the unit of the cost, given that of the dense model."""
        return {"share": self.value * dense, "x": dense / self.value}.get(self.unit, self.value)


@dataclass(frozen=True)
class Floors:
    """What every open branch keeps: heads a layer, shares of a head's value dims and of an FFN's neurons."""

    heads: int = 1
    value_dims: float = 0.125
    neurons: float = 0.02


class Controller:
    """Holds the gates of a model on a budget and decides the topology.

    Args:
        cost: of the network; its `block` counts a block of given widths exactly.
        target: absolute, in the unit of the cost.
        ratio: macro to micro. Units of a kind give way as if their cost were multiplied by its part; 0 protects a kind.
        mode: "importance" sets each logit to its unit's squared gate gradient per cost, against the threshold;
            "gradient" leaves the logits to the optimiser and shifts them down together.
        window: observations the importance is averaged over.

    Attributes:
        widths: padded widths of the blocks at the last projection.

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
    ) -> None:
        if mode not in ("importance", "gradient"):
            raise ValueError(f"mode must be 'importance' or 'gradient'; found {mode!r}")
        if min(ratio) < 0 or max(ratio) == 0:
            raise BudgetError(f"macro:micro {ratio[0]:g}:{ratio[1]:g} must not be negative, and not both zero")
        self.sites = family.sites(model)
        self.kinds = gates_by_block(model)
        self.cost, self.target, self.round_to, self.mode, self.window = cost, target, round_to, mode, window
        self.floors = floors or Floors()
        if ratio[0] and all("qk_dim" in kinds for kinds in self.kinds if kinds) and ratio[0] != ratio[1]:
            raise BudgetError(
                "with qk_dim gates nothing of a head is fixed and the macro term is empty: leave the ratio 1:1"
            )
        self.weight = {kind: ratio[0] if kind in MACRO else ratio[1] for kinds in self.kinds for kind in kinds}
        self.all_gates = list(gates(model))
        size = sum(gate.logit.numel() for gate in self.all_gates)
        device = self.all_gates[0].logit.device
        self.gradient = torch.zeros(size, device=device)
        self.importance = torch.zeros(size, device=device)
        self.observations = 0
        self._known: Tensor | None = None
        if mode == "importance":
            for gate, part in zip(self.all_gates, self._split(self.gradient), strict=True):
                gate.gradient = part
        self.widths = [site.widths for site in self.sites]
        self.dense_cost = self._cost([site.widths for site in self.sites])
        self.low = self._cost(self._widths(self._rankings(self._constant_worths()), math.inf))
        if not self.low <= target < self.dense_cost:
            raise BudgetError(
                f"target {target:.4g} is out of reach: floors, gates and the ratio {ratio[0]:g}:{ratio[1]:g} allow "
                f"{self.low:.4g} ({self.low / self.dense_cost:.1%}) up to {self.dense_cost:.4g} (100%, the dense model)"
            )

    def observe(self, reduce: Callable[[Tensor], Tensor] = lambda x: x, scale: float = 1.0) -> None:
        """Take in the gate gradients of one optimiser step.

        Args:
            reduce: mean over processes.
            scale: the factor the loss was multiplied by.
        """
        if self.mode != "importance":
            return
        gradient = reduce(self.gradient / scale)
        self.observations += 1
        self.importance.lerp_(gradient.square(), 1 / min(self.observations, self.window))
        self.gradient.zero_()

    def restore(self, importance: Tensor, observations: int) -> None:
        """Take up the state of an earlier controller; the logits come with the model."""
        self.importance.copy_(importance)
        self.observations, self._known = observations, None

    @torch.no_grad()
    def project(self, allowed: float, sharpness: float) -> None:
        """Set or move the logits so that the hard, padded network costs no more than `allowed`."""
        worths = self.worths()
        ranks = self._rankings(worths)
        threshold = self._threshold(worths, ranks, max(allowed, self.target))
        self.widths = self._widths(ranks, threshold)
        logits = dict(zip(map(id, self.all_gates), self._split(self._logits()), strict=True))
        for site, kinds, worth, rank in zip(self.sites, self.kinds, worths, ranks, strict=True):
            inner = self._block_widths(site.widths, rank.without("attention").without("block"), threshold)
            for kind, values in worth.items():
                key = id(kinds[kind])
                if self.mode == "importance":
                    logits[key] = ((values - _level(values, threshold, kind, inner)) * sharpness).flatten()
                else:
                    logits[key] = logits[key] - max(threshold, 0.0) * self.weight[kind]
        flat = torch.cat([logits[id(gate)] for gate in self.all_gates]).clamp(-LIMIT, LIMIT)
        first = self.all_gates[0].logit
        flat = flat.to(first.dtype)
        self._known = flat.double() if self.mode == "importance" else None
        for gate, part in zip(self.all_gates, self._split(flat.to(first.device)), strict=True):
            gate.logit.copy_(part)

    def _logits(self) -> Tensor:
        """All logits in CPU float64; where this object alone sets them, without asking the device."""
        if self._known is None:
            return torch.cat([gate.logit.detach() for gate in self.all_gates]).cpu().double()
        return self._known

    def decide(self) -> Topology:
        """The topology: at most the target, with no room left that any unit fits in, and no zero padding."""
        worths = self.worths()
        ranks = self._rankings(worths)
        threshold = self._threshold(worths, ranks, self.target)
        widths = self._fill(self._widths(ranks, threshold), ranks, threshold)
        if self.target - self._cost(widths) > TIGHT * self.target:
            widths = self._exchange(widths, ranks, threshold)
        blocks = tuple(
            _block_topology(now, {kind: _rank(kind, values) for kind, values in worth.items()})
            for now, worth in zip(widths, worths, strict=True)
        )
        return Topology(blocks, tuple(site.widths for site in self.sites))

    def _fill(self, widths: list[Widths], ranks: Ranking, threshold: float) -> list[Widths]:
        """Open what is worth most of what fits, until nothing fits."""
        widths = list(widths)
        while True:
            slack = self.target - self._cost(widths)
            best: tuple[float, int, Widths] | None = None
            for i, now in enumerate(widths):
                for worth, wider in self._moves(i, now, ranks[i], threshold):
                    if self._price(i, now, wider) <= slack and (best is None or worth > best[0]):
                        best = (worth, i, wider)
            if best is None:
                return widths
            widths[best[1]] = best[2]

    def _exchange(self, widths: list[Widths], ranks: Ranking, threshold: float) -> list[Widths]:
        """Where only large units are left to open: open one, pay with the least neurons or heads, fill again."""
        best = widths
        for i, now in enumerate(widths):
            for _, wider in self._moves(i, now, ranks[i], threshold):
                trial = [*widths[:i], wider, *widths[i + 1 :]]
                while self._cost(trial) > self.target:
                    payments = [pay for j, one in enumerate(trial) for pay in self._fewer_neurons(j, one, ranks[j])]
                    payments = payments or [
                        pay for j, one in enumerate(trial) if j != i for pay in self._fewer_heads(j, one, ranks[j])
                    ]
                    if not payments:
                        break
                    _, j, narrower = min(payments, key=lambda pay: pay[0])
                    trial[j] = narrower
                if self._cost(best) < self._cost(trial) <= self.target:
                    best = trial
        return self._fill(best, ranks, threshold)

    def _fewer_neurons(self, index: int, now: Widths, rank: _Ranked) -> Iterator[tuple[float, int, Widths]]:
        """What a block is without its least neurons, with their worth; nothing at the floor."""
        full = self.sites[index].widths.neurons or 0
        least = self._pad(max(math.ceil(self.floors.neurons * full), 1), full)
        fewer = max(self._pad((now.neurons or 0) - self.round_to, full), least)
        if now.neurons and "neuron" in rank and fewer < now.neurons:
            yield rank.worth("neuron", now.neurons - 1), index, replace(now, neurons=fewer)

    def _fewer_heads(self, index: int, now: Widths, rank: _Ranked) -> Iterator[tuple[float, int, Widths]]:
        """Likewise, without its least head."""
        if now.heads and "head" in rank and now.heads > max(self.floors.heads, 1):
            yield rank.worth("head", now.heads - 1), index, replace(now, heads=now.heads - 1)

    def _price(self, index: int, now: Widths, then: Widths) -> float:
        return self.cost.block(self.sites[index], then) - self.cost.block(self.sites[index], now)

    def worths(self) -> Worths:
        """What each movable unit is worth, in CPU float64; units above a common threshold are kept."""
        logits = dict(zip(map(id, self.all_gates), self._split(self._logits()), strict=True))
        if self.mode == "gradient":
            return [
                {k: logits[id(gate)].view(gate.shape) / self.weight[k] for k, gate in kinds.items() if self.weight[k]}
                for kinds in self.kinds
            ]
        parts = dict(zip(map(id, self.all_gates), self._split(self.importance.cpu().double()), strict=True))
        result = []
        for site, kinds in zip(self.sites, self.kinds, strict=True):
            price = self.cost.prices(
                site, {k: torch.sigmoid(logits[id(gate)]).view(gate.shape) for k, gate in kinds.items()}
            )
            result.append(
                {
                    kind: torch.log(parts[id(gate)].view(gate.shape) + 1e-30)
                    - torch.log(price[kind] * self.weight[kind])
                    for kind, gate in kinds.items()
                    if self.weight[kind]
                }
            )
        return result

    def _rankings(self, worths: Worths) -> Ranking:
        return [_Ranked(worth, site.widths.heads or 0) for worth, site in zip(worths, self.sites, strict=True)]

    def _threshold(self, worths: Worths, ranks: Ranking, allowed: float) -> float:
        """The lowest threshold at which the padded network fits."""
        values = torch.cat([values.flatten() for worth in worths for values in worth.values()]).sort().values
        if self._cost(self._widths(ranks, -math.inf)) <= allowed:
            return float(values[0]) - 1e3
        low, high = 0, len(values) - 1  # at the highest value everything movable is closed
        while low < high:
            middle = (low + high) // 2
            if self._cost(self._widths(ranks, float(values[middle]))) <= allowed:
                high = middle
            else:
                low = middle + 1
        return float(values[high])

    def _widths(self, ranks: Ranking, threshold: float) -> list[Widths]:
        """Padded widths of every block with the units above the threshold and the floors."""
        return [self._block_widths(site.widths, rank, threshold) for site, rank in zip(self.sites, ranks, strict=True)]

    def _block_widths(self, dense: Widths, rank: _Ranked, threshold: float) -> Widths:
        heads, qk_dim, value_dim, neurons = dense.heads, dense.qk_dim, dense.value_dim, dense.neurons
        if heads:
            if "head" in rank:
                heads = max(rank.above("head", threshold), min(self.floors.heads, heads))
            if "value_dim" in rank and heads:
                count = rank.widest("value_dim", heads, threshold)
                value_dim = self._pad(max(count, math.ceil(self.floors.value_dims * value_dim), 1), value_dim)
            if "qk_dim" in rank and heads:
                qk_dim = self._pad(max(rank.widest("qk_dim", heads, threshold), 1), qk_dim)
            if "attention" in rank and not rank.above("attention", threshold):
                heads = None
        if neurons:
            if "neuron" in rank:
                count = rank.above("neuron", threshold)
                neurons = self._pad(max(count, math.ceil(self.floors.neurons * neurons), 1), neurons)
            if "block" in rank and not rank.above("block", threshold):
                neurons = None
        return Widths(heads, qk_dim, value_dim, neurons) if heads else Widths(heads, 0, 0, neurons)

    def _moves(self, index: int, now: Widths, rank: _Ranked, threshold: float) -> Iterator[tuple[float, Widths]]:
        """The ways to open a little more of a block, each with the worth of what it opens.

        A branch that comes back at its floor is worth least: it is taken only where nothing else fits the room left.
        """
        dense = self.sites[index].widths
        if now.heads:
            if "head" in rank and now.heads < (dense.heads or 0):
                yield rank.worth("head", now.heads), replace(now, heads=now.heads + 1)
            for kind, width, full in (
                ("value_dim", now.value_dim, dense.value_dim),
                ("qk_dim", now.qk_dim, dense.qk_dim),
            ):
                if kind in rank and width < full:
                    worth = rank.worth_of_dims(kind, now.heads, width)
                    yield worth, replace(now, **{kind: self._pad(width + 1, full)})
        elif "attention" in rank and now.heads is None and dense.heads:
            rest = rank.without("attention")
            for worth, level in ((rank.worth("attention", 0), threshold), (-math.inf, math.inf)):
                yield worth, replace(self._block_widths(dense, rest, level), neurons=now.neurons)
        if now.neurons and "neuron" in rank and now.neurons < (dense.neurons or 0):
            wider = self._pad(now.neurons + 1, dense.neurons or 0)
            yield rank.worth("neuron", now.neurons), replace(now, neurons=wider)
        if now.neurons is None and "block" in rank and dense.neurons:
            rest = rank.without("block")
            for worth, level in ((rank.worth("block", 0), threshold), (-math.inf, math.inf)):
                yield worth, replace(now, neurons=self._block_widths(dense, rest, level).neurons)

    def _pad(self, count: int, limit: int) -> int:
        return min(-(-count // self.round_to) * self.round_to, limit)

    def _cost(self, widths: Sequence[Widths]) -> float:
        return self.cost.outside + sum(self.cost.block(s, w) for s, w in zip(self.sites, widths, strict=True))

    def _constant_worths(self) -> Worths:
        return [
            {k: torch.zeros(gate.shape, dtype=torch.float64) for k, gate in kinds.items() if self.weight[k]}
            for kinds in self.kinds
        ]

    def _split(self, flat: Tensor) -> Sequence[Tensor]:
        return torch.split(flat, [gate.logit.numel() for gate in self.all_gates])


def _level(values: Tensor, threshold: float, kind: str, widths: Widths) -> Tensor:
    """The worth from which on units are open: the threshold, or less where floors and padding keep more.

    Args:
        widths: of the block, were its branches open: units inside a closed branch keep their own ranking, so that the
            branch can come back.
    """
    kept = {"head": widths.heads, "value_dim": widths.value_dim, "qk_dim": widths.qk_dim, "neuron": widths.neurons}
    count = kept.get(kind)
    level = torch.full((1,), threshold, dtype=values.dtype)
    if not count:
        return level
    rows = values.view(1, -1) if kind in ("head", "neuron") else values
    ordered = rows.sort(dim=-1, descending=True).values
    after = ordered[:, count] if count < ordered.shape[1] else ordered[:, -1] - 1.0
    middle = (ordered[:, count - 1] + after) / 2
    return middle.clamp(max=threshold).view(-1, *[1] * (values.ndim - 1))


def _rank(kind: str, values: Tensor) -> Tensor:
    """Indices from the most to the least worth: of heads or neurons, or of the dims of each head."""
    return (values.flatten() if kind == "head" else values).argsort(dim=-1, descending=True, stable=True)


def _block_topology(now: Widths, rank: dict[str, Tensor]) -> BlockTopology:
    """The units of greatest worth that fill these widths exactly."""

    def best(kind: str, count: int, head: int | None = None) -> tuple[int, ...]:
        if kind not in rank:
            return tuple(range(count))
        order = rank[kind] if head is None else rank[kind][head]
        return tuple(sorted(order[:count].tolist()))

    heads = None if now.heads is None else best("head", now.heads)
    return BlockTopology(
        heads,
        tuple(best("value_dim", now.value_dim, h) for h in heads or ()),
        tuple(best("qk_dim", now.qk_dim, h) for h in heads or ()),
        None if now.neurons is None else best("neuron", now.neurons),
    )
