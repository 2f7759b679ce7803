"""What a run counts: the cost of a configuration, the table of its device, the controller of its target."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from hiap.budget.controller import Controller, Floors
from hiap.budget.cost import Cost, MacCost, ParamCost
from hiap.budget.deploy import Deployment
from hiap.budget.latency import UNITS, LatencyCost, LatencyTable
from hiap.budget.target import Target
from hiap.errors import InputError
from hiap.export.latency_tables import other_runtime
from hiap.models.registry import widths_of
from hiap.nn.compact import Widths
from hiap.pruning.extract import shrink
from hiap.speed.clock import Alone, device_name, materialise
from hiap.speed.measure import measure, measured
from hiap.training.config import Config, ConfigError

__all__ = ["make_controller", "make_cost", "measure_error", "measure_here", "measured_there"]


def make_cost(model: nn.Module, config: Config, table: LatencyTable | None = None) -> Cost:
    """The cost a configuration's target or penalties are about.

    Args:
        table: of the device of the run, for a target in time where the configuration names none.
    """
    target = Target.parse(config.target) if config.target else None
    if target is None:
        return MacCost(model, config.accounting)
    if table is not None:
        return LatencyCost(model, table)
    if config.cost is None:
        if target.unit.endswith("params"):
            return ParamCost(model)
        return MacCost(model, merge_tokens=config.merge_tokens)
    cost = LatencyCost.load(config.cost, model)
    if target.unit in UNITS and target.unit != cost.table.unit:
        raise ConfigError(f"the target is in {target.unit}, the table {config.cost} in {cost.table.unit}")
    return cost


def measure_here(model: nn.Module, config: Config, device: torch.device, say: Callable[[str], None]) -> LatencyTable:
    """The latency table of a model on this device, run as the configuration deploys it.

    Raises:
        LatencyError: the device cannot run it so.
    """
    assert config.target is not None
    unit = "mJ" if Target.parse(config.target).unit == "mJ" else "ms"
    how = Deployment.parse(config.deploy, device.type == "cuda")
    device = device if how.runtime == "torch" else torch.device("cpu")
    other = other_runtime(how.runtime, device, how.precision, unit)
    mode = how.mode if other is None else how.runtime
    say(f"measuring {config.model} on {device_name(device)}: {how.precision}, batch {how.batch}, {mode}")
    return measure(model, device, how.precision, how.batch, unit, how.mode, config.model, say=say, other=other)


def measured_there(
    cost: LatencyCost,
    networks: tuple[nn.Module, nn.Module] | None,
    device: torch.device,
    alone: Alone = nullcontext,
) -> dict[str, Any]:
    """What the clock says of the dense and the compact model in the runtime of the table, if this is its device."""
    table = cost.table
    if table.runtime == "torch":
        return measured(cost, networks, device, alone=alone)
    cpu = torch.device("cpu")
    if table.device != device_name(cpu):
        return {}
    try:
        other = other_runtime(table.runtime, cpu, table.precision, table.unit)
    except InputError as error:
        warnings.warn(f"the network cannot be timed here: {error}", stacklevel=2)
        return {}
    return measured(cost, networks, cpu, other, alone)


def measure_error(
    cost: LatencyCost,
    model: nn.Module,
    widths: Sequence[Widths],
    device: torch.device,
    alone: Alone = nullcontext,
) -> float | None:
    """How much slower a network is, against the dense one, than the table says: 1.02 is two per cent.

    None where the table is of another device.

    Args:
        model: the dense model.
        widths: of the blocks of the network. Its weights do not matter.
        alone: held while the clock runs.
    """
    network = materialise(shrink(copy.deepcopy(model), widths), next(model.parameters()).device).eval()
    found = measured_there(cost, (model, network), device, alone)
    if not found:
        return None
    clock: float = found["measured"] / found["dense_measured"]
    return clock / (cost.of_widths(model, widths) / cost.of_widths(model, widths_of(model)))


def make_controller(
    model: nn.Module,
    config: Config,
    cost: Cost,
    steps: int,
    dense: float | None = None,
    origin: Sequence[Widths] | None = None,
    error: float = 1.0,
) -> Controller:
    """The controller of a configuration's target.

    Args:
        dense: what a target in percent is a share of; by default the cost of the model.
        origin: widths that the floors are shares of; by default those of the model.
        error: how many times the cost by a latency table networks are known to take.
    """
    assert config.target is not None
    dense = cost.of_widths(model, widths_of(model)) if dense is None else dense
    floors = Floors(config.min_heads, config.min_value_dims, config.min_neurons)
    window = max(10, round(config.gate_window * steps))
    ratio = (config.ratio[0], config.ratio[1])
    target = Target.parse(config.target).absolute(dense) / error
    return Controller(model, cost, target, ratio, floors, config.round_to, config.gate_mode, window, origin)
