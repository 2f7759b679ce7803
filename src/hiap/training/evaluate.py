"""Accuracy on the validation images of a data set, shared among processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from hiap.data.interface import Data, val_part
from hiap.errors import InputError
from hiap.models.family import logits_of

__all__ = ["Interrupted", "alone", "evaluate"]


class Interrupted(Exception):  # noqa: N818 (nothing is wrong)
    """An evaluation that was asked to stop."""


def alone(counts: Tensor) -> Tensor:
    """The sum over processes where there is one."""
    return counts


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    batch: int = 256,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    stop: Callable[[], bool] = lambda: False,
    reduce: Callable[[Tensor], Tensor] = alone,
    rank: int = 0,
    world: int = 1,
) -> dict[str, float]:
    """Top-1 and top-5 in percent, and how many images were seen. The model is used in the mode it is in.

    With several processes each scores its part of the images, and all get the figures of the whole: counts are whole
    numbers, so their sum is exact. A part may be empty.

    Args:
        stop: asked before every batch. With several processes it must say the same in all of them, such as never: one
            that stops alone leaves the others waiting in `reduce`.
        reduce: sums a tensor of whole numbers, on the model's device, over all processes. It is called once.
        rank, world: the number of this process, and how many there are.

    Raises:
        Interrupted: `stop` said so.
        InputError: there is no image; in all processes alike.
    """
    device = next(model.parameters()).device
    counts = torch.zeros(3, dtype=torch.long, device=device)  # right at first, among the best five, images
    for x, y in val_part(data, batch, rank, world):
        if stop():
            raise Interrupted
        x, y = x.to(device), y.to(device)
        with autocast():
            logits = logits_of(model(x))
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == y.unsqueeze(1)
        counts += torch.stack([best[:, 0].sum(), best.sum(), best.new_tensor(len(y), dtype=torch.long)])
    top1, top5, images = reduce(counts).tolist()
    if not images:
        raise InputError("there is no image to validate on")
    return {"top1": 100 * top1 / images, "top5": 100 * top5 / images, "images": images}
