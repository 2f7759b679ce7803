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
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GRANULARITIES", "Gate", "GatedLinear", "NoiseSource"]

GRANULARITIES = ("head", "block", "value_dim", "neuron", "qk_dim", "attention")

START_LOGIT = 5.0  # p = 0.993: open, and near enough to the slope of the sigmoid to learn
START_TEMPERATURE = 2.0


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

    def forward(self) -> Tensor:
        """The gate values: relaxed and noisy in training, 0 or 1 in eval. (*shape)"""
        if not self.training:
            return self.hard().to(self.logit.dtype)
        z = torch.sigmoid((self.logit + self.noise) / self.temperature)
        if self.gradient is not None and z.requires_grad:
            z.register_hook(self._observe)  # type: ignore[no-untyped-call]
        return z.view(self.shape)

    def _observe(self, gradient: Tensor) -> None:
        if self.gradient is not None:
            self.gradient.add_(gradient)

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
        return self


class GatedLinear(nn.Linear):
    """A Linear whose weight is scaled by gates; its own tensors keep their names.

    Args:
        linear: the layer to gate; its parameters are shared, not copied.
        units: shape of the gated units; their number is the number of gated inputs (or, for qk_dim, of the
            first outputs).
        gates: by granularity. `attention` and `block` scale the whole output, bias included; `qk_dim` scales the
            query rows, which come first; the others scale the inputs.
    """

    def __init__(self, linear: nn.Linear, units: Sequence[int], gates: dict[str, Gate]) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        _take_over(self, linear)
        self.units = torch.Size(units)
        self.gates = nn.ModuleDict(gates).train(linear.training)

    def plain(self) -> nn.Linear:
        """The ungated layer, on the same parameters."""
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        _take_over(linear, self)
        return linear

    def forward(self, input: Tensor) -> Tensor:
        inputs: Tensor | None = None  # (in_features)
        outputs: Tensor | None = None  # (1) or (out_features)
        for name, gate in self.gates.items():
            z = gate()
            if name in ("attention", "block"):
                outputs = z
            elif name == "qk_dim":
                outputs = torch.cat([z.flatten(), z.new_ones(self.out_features - z.numel())])
            else:
                z = z.expand(self.units).flatten()
                inputs = z if inputs is None else inputs * z
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        if inputs is not None:
            weight = weight * inputs
        if outputs is not None:
            weight = weight * outputs.unsqueeze(-1)
            bias = bias if bias is None else (bias * outputs).to(self.weight.dtype)
        return F.linear(input, weight.to(self.weight.dtype), bias)


def _take_over(new: nn.Linear, old: nn.Linear) -> None:
    """Move parameters, mode and the user's hooks from one Linear to another."""
    new.weight, new.bias, new.training = old.weight, old.bias, old.training
    vars(new).update({name: value for name, value in vars(old).items() if "hook" in name})


class NoiseSource:
    """Draws the noise of all gates of a model, once a forward pass in training.

    It is a forward pre-hook of the module that every forward enters first. Inside a backward pass it does nothing, so
    gradient checkpointing sees one draw on recompute. A draw depends on `seed` and on the number of draws before it,
    never on torch's global generator or on the device: all processes of a run that share the seed share the draw.
    """

    def __init__(self, gates: Sequence[Gate], seed: int = 0) -> None:
        self.gates = list(gates)
        self.seed = seed
        self.draws = 0

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: Any) -> None:
        recomputing = torch._C._current_graph_task_id() != -1
        if not recomputing and any(gate.training for gate in self.gates):
            self.draw()

    def draw(self) -> None:
        generator = torch.Generator("cpu").manual_seed((self.seed * 1_000_003 + self.draws) % 2**63)
        self.draws += 1
        sizes = [gate.logit.numel() for gate in self.gates]
        uniform = torch.rand(sum(sizes), generator=generator, dtype=torch.float64, device="cpu")
        noise = uniform.clamp_(1e-12, 1 - 1e-12).logit_()
        first = self.gates[0].logit
        noise = noise.to(first.dtype)
        if first.device.type == "cuda":  # from pageable memory the copy would wait for all work before it
            noise = noise.pin_memory()
        noise = noise.to(first.device, non_blocking=True)
        for gate, part in zip(self.gates, torch.split(noise, sizes), strict=True):
            gate.noise = part.to(gate.logit.device) * gate.noise_scale
