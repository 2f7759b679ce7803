"""Weights under gates, for all layers of one shape at once.

A step of a small batch is bound by the number of operations that it starts. Twelve blocks have twelve layers of each
shape, so their weights are stacked and scaled together, before the forward pass that uses them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hiap.nn.gates import Gate, values
from hiap.nn.rotary import by_dim, by_pair

__all__ = ["Ahead", "Layout", "ScaledWeights"]

INNER = ("head", "value_dim", "neuron")  # scale inputs of proj and fc2
WHOLE = ("attention", "ffn")  # scale their whole output


@dataclass(frozen=True)
class Layout:
    """What the gates of a Linear multiply.

    Attributes:
        kinds: granularities of its gates.
        units: shape of the gated units; their number is the number of gated inputs (or, for qk_dim, of the first
            outputs).
        pairs: the layout of q/k dims that rotary positions turn in pairs: a pair has one gate.
        shape: of the weight.
        bias: whether there is one.
    """

    kinds: tuple[str, ...]
    units: tuple[int, ...]
    pairs: str | None
    shape: tuple[int, ...]
    bias: bool

    @cached_property
    def scales_bias(self) -> bool:
        return self.bias and any(kind in WHOLE or kind == "qk_dim" for kind in self.kinds)

    def scales(self, values: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """What gate values multiply, of several layers.

        Args:
            values: of each granularity, (layers, *shape of the gate).

        Returns:
            inputs (layers, 1, inputs), outputs (layers, 1, 1) or (layers, outputs, 1), and both together.
        """
        inputs: Tensor | None = None
        outputs: Tensor | None = None
        for name, z in values.items():
            if name in WHOLE:
                outputs = z.unsqueeze(-1)
            elif name == "qk_dim":
                z = by_dim(z, self.pairs, self.units[-1]).flatten(1)
                outputs = torch.cat([z, z.new_ones(len(z), self.shape[0] - z.shape[1])], 1).unsqueeze(-1)
            else:
                inputs = z if inputs is None else inputs * z
        if inputs is not None:
            inputs = inputs.expand(len(inputs), *self.units).reshape(len(inputs), 1, -1)
        scale = outputs if inputs is None else inputs if outputs is None else inputs * outputs
        assert scale is not None
        return inputs, outputs, scale

    def gradients(
        self,
        values: dict[str, Tensor],
        inputs: Tensor | None,
        outputs: Tensor | None,
        product: Tensor,
        bias_product: Tensor | None,
    ) -> dict[str, Tensor]:
        """Gradients in the gate values.

        Args:
            values, inputs, outputs: as `scales` takes and returns them.
            product, bias_product: weights and biases times the gradients in the scaled ones.
        """
        found: dict[str, Tensor] = {}
        columns = product.sum(1)
        for name in values:
            if name in WHOLE:
                whole = (columns if inputs is None else columns * inputs.squeeze(1)).sum(1)
                whole = whole if bias_product is None else whole + bias_product.sum(1)
                found[name] = whole.unsqueeze(1)
            elif name == "qk_dim":
                rows = product.sum(2) if bias_product is None else product.sum(2) + bias_product
                queries = rows[:, : torch.Size(self.units).numel()]
                found[name] = by_pair(queries.view(-1, *self.units), self.pairs)
        if inputs is not None:
            columns = (columns if outputs is None else columns * outputs.squeeze(-1)).view(-1, *self.units)
            inner = [name for name in values if name in INNER]
            for name in inner:
                gradient = columns
                for other in inner:
                    gradient = gradient if other == name else gradient * values[other]
                found[name] = gradient.sum_to_size(values[name].shape)
        return found


class Ahead:
    """The weight of a layer for the coming forward pass; None if it was not scaled ahead.

    Attributes:
        state: of weights and gates that it was made from.
        recorded: whether the forward pass that uses it records a graph. One that does not is repeated in the backward
            pass, and must make a graph of its own there.
        spent: whether its backward pass has been: its graph is gone.
        used: whether the layer has looked for it since.
    """

    def __init__(self) -> None:
        self.used = True
        self.clear()

    def clear(self) -> None:
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        self.state: Any = None
        self.recorded, self.spent = True, False

    def __deepcopy__(self, memo: dict[int, Any]) -> Ahead:
        return Ahead()

    def __reduce__(self) -> Any:
        return Ahead, ()


class ScaledWeights(torch.autograd.Function):
    """The weights and biases of layers under their gates, with one node in the graph.

    Gradients of gate values go to the logits that are learned and, where it is set, are added to `Gate.gradient`. What
    a backward pass needs is kept beside autograd's saved tensors: gradient checkpointing would look for it in every
    repeated forward pass, but weights that were scaled ahead are not scaled again.

    Args:
        layout: of all layers.
        gates: of each layer, by granularity.
        dtype: of the scaled weights; that of the weights by default.
        ahead: where results are kept.
        tensors: all weights, then all biases where gates scale them, then the logits of each granularity.
    """

    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        gates: Sequence[dict[str, Gate]],
        dtype: torch.dtype | None,
        ahead: Sequence[Ahead],
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        count = len(gates)
        weights, biases = tensors[:count], tensors[count : 2 * count] if layout.scales_bias else ()
        ctx.values = {kind: values([own[kind] for own in gates]) for kind in layout.kinds}
        ctx.temperatures = {kind: gate.temperature for kind, gate in gates[0].items() if gate.training}
        ctx.inputs, ctx.outputs, ctx.scale = layout.scales(ctx.values)
        ctx.layout, ctx.gates, ctx.weights, ctx.biases = layout, gates, weights, biases
        ctx.ahead = [weakref.ref(one) for one in ahead]  # which hold the results, and so this node
        ctx.versions = [tensor._version for tensor in (*weights, *biases)]
        ctx.set_materialize_grads(False)
        weight = stacked(weights)
        results: tuple[Tensor, ...] = (weight * ctx.scale).to(dtype or weight.dtype).unbind()
        if biases:
            bias = stacked(biases)
            results += (bias * ctx.outputs.flatten(1)).to(dtype or bias.dtype).unbind()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        if ctx.versions != [tensor._version for tensor in (*ctx.weights, *ctx.biases)]:
            raise RuntimeError("weights under gates were modified in place between the forward and the backward pass")
        layout: Layout = ctx.layout
        count, scale, needed = len(ctx.weights), ctx.scale, ctx.needs_input_grad[4:]
        weight, grad = stacked(ctx.weights), _gradient(grads[:count], ctx.weights)
        to_tensors: list[Tensor | None] = [None] * count
        if any(needed[:count]):
            to_tensors = list((grad * scale).to(weight.dtype).unbind())
        product, bias_product = grad.to(scale.dtype) * weight, None
        if ctx.biases:
            bias, grad = stacked(ctx.biases), _gradient(grads[count:], ctx.biases)
            to_tensors += (grad * ctx.outputs.flatten(1)).to(bias.dtype).unbind()
            bias_product = grad.to(scale.dtype) * bias
        to_tensors = [to if grad is not None else None for to, grad in zip(to_tensors, grads, strict=True)]
        passed = [any(grad is not None for grad in grads[i::count]) for i in range(count)]  # others were left out
        found = layout.gradients(ctx.values, ctx.inputs, ctx.outputs, product, bias_product)
        heard: list[tuple[Tensor, Tensor]] = []
        for kind in layout.kinds:
            own, gradient = [gates[kind] for gates in ctx.gates], found[kind].flatten(1)
            learned: list[Tensor | None] = [None] * count
            if kind in ctx.temperatures:  # where the gates are in training
                parts = zip(own, gradient.unbind(), passed, strict=True)
                heard += [(gate.gradient, part) for gate, part, yes in parts if yes and gate.gradient is not None]
                if any(needed[len(to_tensors) :][:count]) and any(gate.learned for gate in own):
                    z = ctx.values[kind].flatten(1)
                    slopes = z * (1 - z) / ctx.temperatures[kind]
                    parts = zip(own, (gradient * slopes).unbind(), passed, strict=True)
                    learned = [part if yes and gate.learned else None for gate, part, yes in parts]
            to_tensors += learned
        if heard:
            torch._foreach_add_(*map(list, zip(*heard, strict=True)))
        for one in ctx.ahead:
            if (ahead := one()) is not None:
                ahead.spent = True
        return None, None, None, None, *to_tensors


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """A view where there is but one."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _gradient(grads: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> Tensor:
    """Stacked, with the dtype of the tensors; 0 for a layer that the forward pass left out."""
    own = [torch.zeros_like(tensor) if grad is None else grad for grad, tensor in zip(grads, tensors, strict=True)]
    return stacked(own).to(tensors[0].dtype)
