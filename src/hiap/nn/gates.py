"""Gumbel-Sigmoid gates and the Linear that carries them (paper, sections 3.1 and 3.3).

A gate multiplies a unit of the network by `z = sigmoid((logit + noise) / temperature)` while training and by
the hard decision `logit > 0` in eval. `P(z > 0.5) = sigmoid(logit)` at every temperature, so `sigmoid(logit)`
is the expected hard gate and the number every cost is computed from.

Gates scale the weight of a Linear rather than its activations: `proj(x * z) == x @ (W * z).T`. A product
the size of the weight is nothing next to a pass over (batch, tokens, features), and no forward is rewritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.nn.granularities import OLD_NAMES
from hiap.nn.rotary import by_dim, by_pair

__all__ = ["Gate", "GatedLinear", "NoiseSource"]

INNER = ("head", "value_dim", "neuron")  # scale inputs of proj and fc2
WHOLE = ("attention", "ffn")  # scale their whole output

START_LOGIT = 5.0  # p = 0.993: open, and near enough to the slope of the sigmoid to learn
START_TEMPERATURE = 2.0
CLOSED = 1e-8  # a gate value below it is 0


@dataclass(frozen=True)
class Drawn:
    """The values and slopes of a gate in the present draw, with what they were computed from."""

    values: Tensor
    slopes: Tensor
    key: tuple[int, float]


class Gate(nn.Module):
    """A group of independent gates of one granularity.

    Attributes:
        logit: the learnable logits, kept flat: optimiser factories spare 1-D parameters from weight decay.
        noise: the logistic noise of the present draw, scaled; zero until the first draw.
        temperature: of the relaxation; it has no effect in eval.
        noise_scale: 1 is the paper's noise, 0 none.
        gradient: where set, every backward pass adds the gradient of the loss in the gate values to it. It tells how
            much the loss leans on a unit, also where the sigmoid is flat and the gradient in the logit vanishes.
    """

    noise: Tensor

    def __init__(
        self, shape: Sequence[int], logit: float = START_LOGIT, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.shape = torch.Size(shape)
        size = math.prod(shape)
        self.logit = nn.Parameter(torch.full((size,), logit, dtype=torch.float32, device=device))
        self.register_buffer("noise", torch.zeros(size, device=device), persistent=False)
        self.temperature = START_TEMPERATURE
        self.noise_scale = 1.0
        self.gradient: Tensor | None = None
        self.drawn: Drawn | None = None

    def forward(self) -> Tensor:
        """The gate values: relaxed and noisy in training, 0 or 1 in eval. (*shape)"""
        if not self.training:
            return self.hard().to(self.logit.dtype)
        return _relaxed(self.logit + self.noise, self.temperature).view(self.shape)

    @torch.no_grad()
    def values(self) -> tuple[Tensor, Tensor | None]:
        """The gate values without their graph, and their slope in the logits (None in eval). Each (*shape)"""
        if not self.training:
            return self(), None
        drawn = self.drawn
        if drawn is not None and drawn.key == (self.logit._version, self.temperature):
            return drawn.values.view(self.shape), drawn.slopes.view(self.shape)
        z = self()
        return z, z * (1 - z) / self.temperature

    def probability(self) -> Tensor:
        """The expected hard gate, differentiable. (*shape)"""
        return torch.sigmoid(self.logit).view(self.shape)

    def hard(self) -> Tensor:
        """The decision, as booleans. (*shape)"""
        return (self.logit.detach() > 0).view(self.shape)

    def extra_repr(self) -> str:
        return f"{tuple(self.shape)}, temperature={self.temperature:g}, noise_scale={self.noise_scale:g}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Gate:
        # A half-precision logit near 5 cannot move by a step of 5e-3, so `half()` and `to(bfloat16)` move
        # gates to the device they name and leave them in float32.
        def wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype.itemsize >= 4 else tensor.to(moved.device)

        super()._apply(wide, recurse)  # type: ignore[no-untyped-call]
        self.drawn = None
        return self


class GatedLinear(nn.Linear):
    """A Linear whose weight is scaled by gates; its own tensors keep their names.

    Args:
        linear: the layer to gate; its parameters are shared, not copied.
        units: shape of the gated units; their number is the number of gated inputs (or, for qk_dim, of the
            first outputs).
        gates: by granularity. `attention` and `ffn` scale the whole output, bias included; `qk_dim` scales the
            query rows, which come first; the others scale the inputs.
        pairs: the layout of q/k dims that rotary positions turn in pairs: a pair has one gate.
    """

    def __init__(
        self, linear: nn.Linear, units: Sequence[int], gates: dict[str, Gate], pairs: str | None = None
    ) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        _take_over(self, linear)
        self.units = torch.Size(units)
        self.pairs = pairs
        self.gates = nn.ModuleDict(gates).train(linear.training)

    def plain(self) -> nn.Linear:
        """The ungated layer, on the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        _take_over(linear, self)
        return linear

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for old, new in OLD_NAMES.items():
            key = f"{prefix}gates.{old}.logit"
            if key in state_dict:
                state_dict[f"{prefix}gates.{new}.logit"] = state_dict.pop(key)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def by_kind(self) -> dict[str, Gate]:
        """The gates by granularity."""
        return {kind: gate for kind, gate in self.gates.items() if isinstance(gate, Gate)}

    def forward(self, input: Tensor) -> Tensor:
        gates = self.by_kind()
        if any(gate.training for gate in gates.values()):
            weight, bias = _ScaledWeight.apply(self, self.weight, self.bias, *[gate.logit for gate in gates.values()])
        else:
            _, outputs, scale = self.scales({kind: gate() for kind, gate in gates.items()})
            weight, bias = _scaled(self.weight, self.bias, outputs, scale)
        return F.linear(input, weight, bias)

    def scales(self, values: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """What gate values multiply: inputs (in_features), outputs (1) or (out_features, 1), and the weight."""
        inputs: Tensor | None = None
        outputs: Tensor | None = None
        for name, z in values.items():
            if name in WHOLE:
                outputs = z
            elif name == "qk_dim":
                z = by_dim(z, self.pairs, self.units[-1])
                outputs = torch.cat([z.flatten(), z.new_ones(self.out_features - z.numel())]).unsqueeze(1)
            else:
                inputs = z if inputs is None else inputs * z
        if inputs is not None:
            inputs = inputs.expand(self.units).reshape(-1)
        scale = outputs if inputs is None else inputs if outputs is None else inputs * outputs
        assert scale is not None
        return inputs, outputs, scale


class _ScaledWeight(torch.autograd.Function):
    """The weight and bias of a GatedLinear under its gates, with one node in the graph instead of twenty.

    Gradients of gate values go to the logits and, where it is set, are added to `Gate.gradient`.
    """

    @staticmethod
    def forward(
        ctx: Any, layer: GatedLinear, weight: Tensor, bias: Tensor | None, *logits: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        ctx.layer = layer
        ctx.values = {name: gate.values() for name, gate in layer.by_kind().items()}
        inputs, outputs, scale = layer.scales({name: z for name, (z, _) in ctx.values.items()})
        ctx.save_for_backward(weight, bias, inputs, outputs, scale)
        return _scaled(weight, bias, outputs, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        weight, bias, inputs, outputs, scale = ctx.saved_tensors
        layer: GatedLinear = ctx.layer
        grad_weight, grad_bias = grads
        to_weight = (grad_weight * scale).to(weight.dtype) if ctx.needs_input_grad[1] else None
        to_bias = grad_bias
        if outputs is not None and grad_bias is not None:
            to_bias = (grad_bias * outputs.view(-1)).to(bias.dtype)
        product = grad_weight.to(scale.dtype) * weight
        found: dict[str, Tensor] = {}
        columns = product.sum(0) if inputs is not None else None
        for name in ctx.values:
            if name in WHOLE:
                whole = (columns * inputs).sum() if columns is not None else product.sum()
                whole = whole if bias is None else whole + (grad_bias.to(scale.dtype) * bias).sum()
                found[name] = whole.view(1)
            elif name == "qk_dim":
                rows = product.sum(1) if bias is None else product.sum(1) + grad_bias * bias
                found[name] = by_pair(rows[: layer.units.numel()].view(layer.units), layer.pairs)
        if columns is not None:
            columns = (columns if outputs is None else columns * outputs).view(layer.units)
            inner = [name for name in ctx.values if name in INNER]
            for name in inner:
                gradient = columns
                for other in inner:
                    gradient = gradient if other == name else gradient * ctx.values[other][0]
                found[name] = gradient.sum_to_size(ctx.values[name][0].shape)
        to_logits: list[Tensor | None] = []
        for (name, gate), needed in zip(layer.by_kind().items(), ctx.needs_input_grad[3:], strict=True):
            slope = ctx.values[name][1]
            if slope is not None and gate.gradient is not None:
                gate.gradient.add_(found[name].view(-1))
            gradient = (found[name] * slope).view(-1).to(gate.logit.dtype) if slope is not None and needed else None
            to_logits.append(gradient)
        return None, to_weight, to_bias, *to_logits


def _relaxed(noisy: Tensor, temperature: float) -> Tensor:
    """The gate values of noisy logits (paper, eq. 6).

    Next to nothing is nothing: at low temperatures closed gates would else make denormal numbers of the weights, which
    CPUs multiply 30 times slower.
    """
    return F.threshold(torch.sigmoid(noisy / temperature), CLOSED, 0.0)


def _scaled(weight: Tensor, bias: Tensor | None, outputs: Tensor | None, scale: Tensor) -> tuple[Tensor, Tensor | None]:
    """Weight and bias under gates."""
    if bias is not None:
        # A view, so that autograd does not take an unscaled bias for an output that is an input.
        bias = bias.view_as(bias) if outputs is None else (bias * outputs.view(-1)).to(bias.dtype)
    return (weight * scale).to(weight.dtype), bias


def _take_over(new: nn.Linear, old: nn.Linear) -> None:
    """Move parameters, mode and the user's hooks from one Linear to another."""
    new.weight, new.bias, new.training = old.weight, old.bias, old.training
    vars(new).update({name: value for name, value in vars(old).items() if "hook" in name})


class NoiseSource:
    """Draws the noise of all gates of a model, once a forward pass in training.

    It is a forward pre-hook of the module that every forward enters first. Inside a backward pass it does nothing, so
    gradient checkpointing sees one draw on recompute. A draw depends on `seed`, the number of draws before it and the
    kind of device, never on torch's global generator: all processes of a run that share the seed share the draw.
    """

    def __init__(self, gates: Sequence[Gate], seed: int = 0) -> None:
        self.gates = list(gates)
        self.seed = seed
        self.draws = 0

    def __call__(self, module: nn.Module, args: Any) -> None:
        if any(gate.training for gate in self.gates):
            self._draw_unless_recomputing()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _draw_unless_recomputing(self) -> None:
        if torch._C._current_graph_task_id() == -1:
            self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        first = self.gates[0].logit
        generator = torch.Generator(first.device).manual_seed((self.seed * 1_000_003 + self.draws) % 2**63)
        self.draws += 1
        sizes = [gate.logit.numel() for gate in self.gates]
        noise = torch.rand(sum(sizes), generator=generator, dtype=first.dtype, device=first.device)
        tiny = torch.finfo(first.dtype).eps
        noise = noise.clamp_(tiny, 1 - tiny).logit_()
        scales, temperatures = {gate.noise_scale for gate in self.gates}, {gate.temperature for gate in self.gates}
        alike = len(scales) == len(temperatures) == 1 and all(gate.logit.device == first.device for gate in self.gates)
        if alike:  # the usual case: one operation for all gates
            noise.mul_(scales.pop())
            temperature = temperatures.pop()
            z = _relaxed(torch.cat([gate.logit for gate in self.gates]) + noise, temperature)
            slopes = torch.split(z * (1 - z) / temperature, sizes)
            for gate, values, slope in zip(self.gates, torch.split(z, sizes), slopes, strict=True):
                gate.drawn = Drawn(values, slope, (gate.logit._version, temperature))
        for gate, part in zip(self.gates, torch.split(noise, sizes), strict=True):
            gate.noise = part if alike else part.to(gate.logit.device) * gate.noise_scale
            gate.drawn = gate.drawn if alike else None
