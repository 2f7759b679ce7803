"""Linears joined and parted: what families need to turn their blocks into ours and back."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

__all__ = ["joined", "linear_of", "parted", "without_values"]


def without_values(module: nn.Module) -> nn.Module:
    """A copy of a module whose parameters are on the meta device."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()}
    return copy.deepcopy(module, empty)


def linear_of(weight: nn.Parameter, bias: nn.Parameter | None, training: bool) -> nn.Linear:
    """A Linear on these parameters."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    linear.weight = weight
    linear.bias = bias  # type: ignore[assignment]
    return linear.train(training)


def joined(layers: list[nn.Linear]) -> nn.Linear:
    """One Linear with the outputs of several. If some of them have a bias, those without get zeros."""
    first = layers[0]
    weight = _parameter(torch.cat([layer.weight.detach() for layer in layers]), first.weight)
    biases: list[nn.Parameter | None] = [layer.bias for layer in layers]
    some = next((bias for bias in biases if bias is not None), None)
    bias = None
    if some is not None:
        each = zip(layers, biases, strict=True)
        whole = [one.weight.new_zeros(one.out_features) if own is None else own.detach() for one, own in each]
        bias = _parameter(torch.cat(whole), some)
    return linear_of(weight, bias, first.training)


def parted(layer: nn.Linear, sizes: list[int]) -> list[nn.Linear]:
    """Several Linears, each with so many outputs of one."""
    weights = [_parameter(part.detach().clone(), layer.weight) for part in torch.split(layer.weight, sizes)]
    biases: list[nn.Parameter | None] = [None] * len(sizes)
    if layer.bias is not None:
        biases = [_parameter(part.detach().clone(), layer.bias) for part in torch.split(layer.bias, sizes)]
    return [linear_of(weight, bias, layer.training) for weight, bias in zip(weights, biases, strict=True)]


def _parameter(tensor: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, like.requires_grad)
