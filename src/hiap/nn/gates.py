"""Gumbel-Sigmoid gates (paper, sections 3.1 and 3.3).

A gate multiplies a unit of the network by `z = sigmoid((logit + noise) / temperature)` while training and by
the hard decision `logit > 0` in eval. `P(z > 0.5) = sigmoid(logit)` at every temperature, so `sigmoid(logit)`
is the expected hard gate and the number every cost is computed from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["START_LOGIT", "Gate", "values"]

START_LOGIT = 5.0  # p = 0.993: open, and near enough to the slope of the sigmoid to learn
START_TEMPERATURE = 2.0
CLOSED = 1e-8  # a gate value below it is 0


class Gate(nn.Module):
    """A group of independent gates of one granularity.

    Attributes:
        logit: the learnable logits, kept flat: optimiser factories spare 1-D parameters from weight decay.
        noise: the logistic noise of the present draw, scaled; zero until the first draw.
        temperature: of the relaxation; it has no effect in eval.
        noise_scale: 1 is the paper's noise, 0 none.
        gradient: where set, every backward pass adds the gradient of the loss in the gate values to it. It tells how
            much the loss leans on a unit, also where the sigmoid is flat and the gradient in the logit vanishes.
        learned: whether the loss has a gradient in the logits; not where a controller sets them.
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
        self.learned = True

    def forward(self) -> Tensor:
        """The gate values: relaxed and noisy in training, 0 or 1 in eval. (*shape)"""
        return values([self])[0]

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


def values(gates: Sequence[Gate]) -> Tensor:
    """The values of gates of one shape, mode and temperature (paper, eq. 6). (gates, *shape)

    Next to nothing is nothing: at low temperatures closed gates would else make denormal numbers of the weights, which
    CPUs multiply 30 times slower.
    """
    first = gates[0]
    if not first.training:
        return torch.stack([gate.hard() for gate in gates]).to(first.logit.dtype)
    noisy = torch.stack([gate.logit for gate in gates]) + torch.stack([gate.noise for gate in gates])
    return F.threshold(torch.sigmoid(noisy / first.temperature), CLOSED, 0.0).view(-1, *first.shape)
