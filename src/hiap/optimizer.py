"""The state of an optimiser: to and from named tensors, and from a network to the smaller one that was cut from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hiap.extract import source_name, take

__all__ = ["carry_optimizer", "pack_optimizer", "unpack_optimizer"]


def pack_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state of every parameter as `KEY.PARAMETER`: tensors, and what is no tensor."""
    names = {id(p): name for name, p in model.named_parameters()}
    flat = {f"{key}.{names[id(p)]}": value for p, state in optimizer.state.items() for key, value in state.items()}
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
        optimizer.state[p][key] = value


def carry_optimizer(
    old: torch.optim.Optimizer,
    big: nn.Module,
    new: torch.optim.Optimizer,
    small: nn.Module,
    cuts: dict[str, tuple[int, Tensor]],
) -> None:
    """Give the optimiser of the small network the state of the big one's, slice by slice."""
    parameters = dict(big.named_parameters())
    for name, p in small.named_parameters():
        source = parameters[source_name(name, parameters)]
        for key, value in old.state.get(source, {}).items():
            if isinstance(value, Tensor) and value.shape == source.shape:
                value = take(value, *cuts[name]) if name in cuts else value.clone()
            elif isinstance(value, Tensor):
                value = value.clone()
            new.state[p][key] = value
