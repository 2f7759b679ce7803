"""A file compared with the model it was made from, in numbers: the differences of their logits, and their times."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hiap.errors import ExportError
from hiap.export.formats import Opened
from hiap.export.network import Deployable
from hiap.models.family import logits_of
from hiap.models.registry import family_of
from hiap.speed.clock import device_name, timings

__all__ = ["ALLOWED", "agreement", "compared", "timed"]

# Largest difference from the logits of PyTorch in float32, relative to the largest of them. INT8 has no such bound: how
# far it is off depends on the network, so that it is measured and told.
ALLOWED = {"fp32": 1e-4, "fp16": 2e-2, "int8": None}
BATCHES = (1, 2, 7)  # that a file for any number of images is tried with
AT_ONCE = 32  # images, where there are many to compare


@torch.no_grad()
def compared(model: nn.Module, opened: Opened, batch: int | None, precision: str) -> dict[str, Any]:
    """The differences of a file from the model on random images, by batch size.

    Raises:
        ExportError: one is too large, or the file gives something that is no number.
    """
    reference = copy.deepcopy(model).cpu().float().eval()
    allowed, shape = ALLOWED[precision], family_of(model).input_shape(model)
    found = {}
    for count in (batch,) if batch else BATCHES:
        images = torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))
        expected = logits_of(reference(images))
        difference = _difference(expected, torch.from_numpy(opened.run(images.numpy())))
        if not difference <= (float("inf") if allowed is None else allowed):
            told = "" if allowed is None else f", allowed {allowed:g} in {precision}"
            raise ExportError(
                f"the file computes something else: with {count} images its logits differ by {difference:.3g} of the "
                f"largest{told}. Nothing was written"
            )
        found[str(count)] = difference
    return {"difference": found, "tolerance": allowed}


@torch.no_grad()
def agreement(model: nn.Module, opened: Opened, images: Tensor | None, batch: int | None) -> dict[str, Any]:
    """How far a file that rounds coarsely is from the model.

    Args:
        images: normalised (N, C, H, W); by default random ones.
        batch: images at a time that the file takes; None for any number.

    Returns:
        The images, the largest difference relative to the largest logit, and the share of images with the same class
        (None where the model has no classes).
    """
    reference, family = copy.deepcopy(model).cpu().float().eval(), family_of(model)
    real, step = images is not None, batch or AT_ONCE
    if images is None:
        images = torch.randn(4 * step, *family.input_shape(model), generator=torch.Generator().manual_seed(0))
    parts = images[: max(len(images) // step, 1) * step if batch else None].split(step)  # type: ignore[no-untyped-call]
    expected = torch.cat([logits_of(reference(part)) for part in parts])
    found = torch.cat([torch.from_numpy(opened.run(part.numpy())) for part in parts])
    same = float((expected.argmax(-1) == found.argmax(-1)).float().mean()) if family.classes(model) else None
    kind = "calibration" if real else "random"
    difference = _difference(expected, found)
    return {"images": len(expected), "kind": kind, "difference": difference, "top1_agreement": same}


def _difference(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape:
        raise ExportError(f"the file gives logits of shape {tuple(found.shape)}, the model {tuple(expected.shape)}")
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny))


def timed(network: Deployable, files: Mapping[str, Opened], batch: int) -> dict[str, Any]:
    """Milliseconds of files, by the name of each, and of the same network in PyTorch, in turns on the CPU."""
    cpu = torch.device("cpu")
    images = torch.randn(batch, *network.shape)
    array = images.numpy()
    calls = [lambda one=one: one.run(array) for one in files.values()]
    with torch.inference_mode():
        times = timings([*calls, lambda: network(images)], cpu, 2, 10)
    names = [*files, "torch"]
    ms = {name: statistics.median(rounds) for name, rounds in zip(names, times, strict=True)}
    return {"timed_batch": batch, "ms": ms, "device": device_name(cpu)}
