"""Accuracy on the validation part of a data set."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from hiap.data.sources import Data
from hiap.errors import InputError

__all__ = ["Interrupted", "evaluate"]


class Interrupted(Exception):  # noqa: N818 (nothing is wrong)
    """An evaluation that was asked to stop."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    data: Data,
    batch: int = 256,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, float]:
    """Top-1 and top-5 in percent, and how many images were seen. The model is used in the mode it is in.

    Args:
        stop: asked before every batch.

    Raises:
        Interrupted: `stop` said so.
    """
    right = torch.zeros(2)
    seen = 0
    device = next(model.parameters()).device
    for x, y in data.val(batch):
        if stop():
            raise Interrupted
        x, y = x.to(device), y.to(device)
        with autocast():
            logits = model(x)
        best = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == y.unsqueeze(1)
        right += torch.stack([best[:, 0].sum(), best.sum()]).cpu()
        seen += len(y)
    if not seen:
        raise InputError("there is no image to validate on")
    return {"top1": 100 * right[0].item() / seen, "top5": 100 * right[1].item() / seen, "images": seen}
