"""Calibrating a latency table on whole networks: a branch among others is not as fast as copies of it in a row."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.models.registry import widths_of
from hiap.nn.compact import Widths
from hiap.pruning.extract import shrink
from hiap.speed.clock import materialise

__all__ = ["calibrate", "random_widths"]

NETWORKS = 4  # random ones, beside the dense
DENSE = 3.0  # how much the dense one weighs
GONE = 0.1  # of their branches
LEAST = 0.1  # of what a branch takes by itself


def calibrate(
    table: LatencyTable,
    model: nn.Module,
    clock: Callable[[nn.Module], float],
    say: Callable[[str], None] = lambda text: None,
) -> LatencyTable:
    """The table with the costs of branches as they are in whole networks: all scaled by one factor, plus a constant.

    Both are fitted to the dense network and some random ones. The dense one counts more: speed-ups are against it.

    Args:
        model: that the table is of.
        clock: what a whole network takes, in the unit of the table.
    """
    cost, chance = LatencyCost(model, table), random.Random(0)
    seen = [(widths_of(model), table.dense)]
    for number in range(NETWORKS):
        say(f"whole networks: {number + 1} of {NETWORKS}")
        widths = random_widths(model, table, chance)
        network = materialise(shrink(copy.deepcopy(model), widths), next(model.parameters()).device)
        seen.append((widths, clock(network.eval())))
    branches = torch.tensor(
        [[cost.of_widths(model, one) - table.outside, _branches(one)] for one, _ in seen], dtype=torch.float64
    )
    real = torch.tensor([found for _, found in seen], dtype=torch.float64)
    weights = torch.tensor([DENSE] + [1.0] * NETWORKS, dtype=torch.float64) / real  # errors are relative
    rows, wanted = weights[:, None] * branches, weights * (real - table.outside)
    scale, more = torch.linalg.lstsq(rows, wanted[:, None], driver="gelsd").solution.flatten().tolist()
    found = replace(
        table,
        attention=_fitted(table.attention, scale, more),
        ffn=_fitted(table.ffn, scale, more),
        last_attention=_fitted(table.last_attention, scale, more),
        last_ffn=_fitted(table.last_ffn, scale, more),
    )
    fitted = LatencyCost(model, found)
    errors = [fitted.of_widths(model, widths) / whole - 1 for widths, whole in seen]
    say(f"whole networks: the table is within {max(map(abs, errors)):.1%} of those measured")
    return found


def random_widths(model: nn.Module, table: LatencyTable, chance: random.Random) -> list[Widths]:
    """Widths of the grid for every block, drawn at random; some branches are gone."""

    def draw(axis: list[int], most: int) -> int:
        return chance.choice([width for width in axis if width <= most] or [most])

    found = []
    for dense in widths_of(model):
        attends, feeds = (bool(whole) and chance.random() >= GONE for whole in (dense.heads, dense.neurons))
        heads, neurons = draw(table.heads, dense.heads or 0), draw(table.neurons, dense.neurons or 0)
        queries, values = draw(table.qk_dim, dense.qk_dim), draw(table.value_dim, dense.value_dim)
        attention = Widths(heads, queries, values, None) if attends else Widths(None, 0, 0, None)
        found.append(replace(attention, neurons=neurons if feeds else None))
    return found


def _branches(widths: Sequence[Widths]) -> int:
    return sum(bool(one.heads) + bool(one.neurons) for one in widths)


def _fitted(costs: Any, scale: float, more: float) -> Any:
    values = torch.tensor([] if costs is None else costs, dtype=torch.float64)
    return None if costs is None else (scale * values + more).maximum(LEAST * values).tolist()
