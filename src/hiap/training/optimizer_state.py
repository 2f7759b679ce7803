"""The state of an optimiser: to and from named tensors, and from a network to the smaller one that was cut from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hiap.pruning.extract import source_name, take

__all__ = ["carry_optimizer", "group_counters", "pack_optimizer", "set_group_counters", "unpack_optimizer"]


SET = ("params", "lr", "initial_lr", "weight_decay")  # of a group, by the run itself


def _state(optimizer: torch.optim.Optimizer) -> Any:
    """What it keeps of each parameter; timm's Lookahead keeps it in the optimiser that it wraps."""
    return getattr(optimizer, "_base_optimizer", optimizer).state


def group_counters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What some optimisers count for a group instead of for each parameter, beside their plain options, as JSON."""
    return [
        {
            key: [value.item()] if isinstance(value, Tensor) else value
            for key, value in group.items()
            if key not in SET and (isinstance(value, int | float) or (isinstance(value, Tensor) and value.ndim == 0))
        }
        for group in optimizer.param_groups
    ]


def set_group_counters(optimizer: torch.optim.Optimizer, counters: list[dict[str, Any]]) -> None:
    """Give an optimiser the counters of one like it, or of one whose last groups it lacks."""
    for group, own in zip(optimizer.param_groups, counters, strict=False):
        group.update({key: torch.tensor(value[0]) if isinstance(value, list) else value for key, value in own.items()})


def pack_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every parameter as `KEY.PARAMETER`: tensors, and what is no tensor."""
    names = {id(p): name for name, p in model.named_parameters()}
    flat = {f"{key}.{names[id(p)]}": value for p, state in _state(optimizer).items() for key, value in state.items()}
    tensors = {name: value for name, value in flat.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in flat.items() if name not in tensors}


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, Tensor], scalars: dict[str, Any]
) -> None:
    """Give the optimiser of a model the state that `pack_optimizer` took."""
    parameters = dict(model.named_parameters())
    for name, value in (tensors | scalars).items():
        key, _, parameter = name.partition(".")
        p = parameters[parameter]
        if isinstance(value, Tensor):  # counters stay on the CPU
            value = value.clone() if value.ndim == 0 else value.to(p.device, copy=True)
        _state(optimizer)[p][key] = value


def carry_optimizer(
    old: torch.optim.Optimizer,
    big: nn.Module,
    new: torch.optim.Optimizer,
    small: nn.Module,
    cuts: dict[str, tuple[int, Tensor]],
) -> None:
    """Give the optimiser of the small network the state of the big one's, slice by slice.

    What is not kept unit by unit (factored moments) cannot be cut: that of a parameter that was cut begins anew.
    """
    set_group_counters(new, group_counters(old))
    parameters = dict(big.named_parameters())
    for name, p in small.named_parameters():
        source = parameters[source_name(name, parameters)]
        known = _state(old).get(source, {})
        tensors = [value for value in known.values() if isinstance(value, Tensor)]
        if name in cuts and any(value.ndim and value.shape != source.shape for value in tensors):
            continue
        for key, value in known.items():
            if isinstance(value, Tensor):
                cut = name in cuts and value.shape == source.shape
                value = take(value, *cuts[name]) if cut else value.clone()
            _state(new)[p][key] = value
