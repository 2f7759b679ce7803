"""Calibrating a latency table on whole networks: a branch among others is not as fast as copies of it in a row."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
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
GONE = 0.1  # of their branches
LEAST = 0.1  # of what a branch takes by itself


def calibrate(
    table: LatencyTable,
    model: nn.Module,
    clock: Callable[[nn.Module], float],
    say: Callable[[str], None] = lambda text: None,
) -> LatencyTable:
    """The table with what a branch takes more in a network, on average, added to every branch.

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
    over = [(sum(map(_branches, widths)), real - cost.of_widths(model, widths)) for widths, real in seen]
    more = sum(count * rest for count, rest in over) / sum(count**2 for count, _ in over)  # least squares
    return replace(
        table,
        attention=_raised(table.attention, more),
        ffn=_raised(table.ffn, more),
        last_attention=_raised(table.last_attention, more),
        last_ffn=_raised(table.last_ffn, more),
    )


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


def _branches(widths: Widths) -> int:
    return bool(widths.heads) + bool(widths.neurons)


def _raised(costs: Any, more: float) -> Any:
    values = torch.tensor([] if costs is None else costs, dtype=torch.float64)
    return None if costs is None else (values + more).maximum(LEAST * values).tolist()
