"""What a search by time measures: the loss without a branch, and without a part of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

import torch
from torch import Tensor

from hiap.budget.controller import LIMIT, Controller
from hiap.pruning.attach import gates, set_gates
from hiap.training.context import Context
from hiap.training.phase import Phase

__all__ = ["loss_of_images", "measure_branches"]

IMAGES = 1024  # of a process that branches are measured on, at most
SHARE = 1 / 1024  # of all images that a run sees, for the first measurement; but a batch at least
PARTS = 8  # of a batch: each is an observation of the gradients


def measure_branches(phase: Phase, controller: Controller) -> None:
    """Measure all branches and parts of them, in the network with every gate open.

    The units of which a part consists are those of least value. Their values come from the gradients on the same
    images.
    """
    context, network = phase.context, phase.network
    size = context.config.batch_size
    count = max(1, round(min(IMAGES, SHARE * context.stop * size) / size))
    batches = list(islice(context.data.train(context.seen, 0, size, context.rank, context.world), count))
    images = min(IMAGES, len(batches) * (size // context.world))  # of this process, as of every other
    x, y = (torch.cat(part)[:images] for part in zip(*batches, strict=True))
    context.say(f"measure  {len(controller.measured)} branches and parts of them, on {images * context.world} images")
    before = [gate.logit.detach().clone() for gate in controller.all_gates]
    with torch.no_grad():
        for gate in controller.all_gates:
            gate.logit.fill_(LIMIT)
    set_gates(network, noise_scale=0.0)
    network.eval()
    for gate in gates(network):
        gate.train()  # the gradients of gates in eval are not heard
    for xs, ys in _parts(context, x, y, PARTS):
        terms = phase.terms(phase.forward, xs.to(context.device), ys.to(context.device))
        context.accelerator.backward(phase.weighted(terms))
        scaler = context.accelerator.scaler
        controller.observe(context.mean, scaler.get_scale() if scaler is not None else 1.0)
        phase.model.zero_grad()
    network.eval()
    loss = loss_of_images(phase, x, y)
    controller.measure(loss)
    controller.measure_curves(loss)
    with torch.no_grad():
        for gate, logit in zip(controller.all_gates, before, strict=True):
            gate.logit.copy_(logit)


@torch.no_grad()
def loss_of_images(phase: Phase, x: Tensor, y: Tensor) -> Callable[[], Tensor]:
    """The loss of the network of a phase as it is at each call, on the first images. The teacher is asked once."""
    context, objective, network = phase.context, phase.objective, phase.network
    x, y = x[:IMAGES], y[:IMAGES]
    parts = [(xs.to(context.device), ys.to(context.device)) for xs, ys in _parts(context, x, y, 1)]
    known = [(xs, ys, objective.goals(network, xs)) for xs, ys in parts]

    @torch.no_grad()
    def loss() -> Tensor:
        losses = [
            objective.weighted(objective.terms(network, xs, ys, goals)) * (len(xs) / len(x)) for xs, ys, goals in known
        ]
        return context.mean(torch.stack(losses).sum())

    return loss


def _parts(context: Context, x: Tensor, y: Tensor, count: int) -> list[tuple[Tensor, Tensor]]:
    """Images in so many parts a batch, at least; no part is greater than those that a step is computed in."""
    share = context.config.batch_size // context.world
    number = math.ceil(len(x) / max(1, share // max(count, context.config.accumulate)))
    return list(zip(x.tensor_split(number), y.tensor_split(number), strict=True))
