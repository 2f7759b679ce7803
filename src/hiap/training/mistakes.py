"""Where the compact model and the dense one disagree on the validation images, with pictures of what was lost."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from hiap.data.interface import val_part
from hiap.models.family import logits_of
from hiap.training.context import Context

__all__ = ["compare_answers"]

PICTURES = 12  # at most
SIDE = 112  # pixels of the longer side of a thumbnail
CASES = ("neither", "compact_only", "dense_only", "both")  # who was right


@torch.no_grad()
def compare_answers(context: Context, dense: nn.Module, compact: nn.Module) -> tuple[dict[str, int], list[Any]]:
    """How many validation images each model gets right, and some that only the dense one does.

    Processes share the images; the pictures are from those of the main process, spread evenly over them.

    Args:
        dense, compact: in eval mode, on the device of the run.

    Returns:
        images by who was right, and for each picture its label, both answers and a PNG in base64.
    """
    counts = torch.zeros(len(CASES), dtype=torch.long, device=context.device)
    lost: list[tuple[Tensor, list[int]]] = []
    every, seen = 1, 0  # of the images that were lost, each `every`-th is kept
    for x, y in val_part(context.data, context.config.batch_size, context.rank, context.world):
        x, y = x.to(context.device), y.to(context.device)
        with context.accelerator.autocast():
            answers = [logits_of(model(x)).argmax(-1) for model in (dense, compact)]
        right = 2 * (answers[0] == y).long() + (answers[1] == y).long()
        counts += torch.bincount(right, minlength=len(CASES))
        for i in (right == 2).nonzero().flatten().tolist() if context.main else ():
            if seen % every == 0:
                lost.append((x[i].float().cpu(), [int(one[i]) for one in (y, *answers)]))
                if len(lost) == 2 * PICTURES:
                    lost, every = lost[::2], 2 * every
            seen += 1
    found = dict(zip(CASES, context.sum(counts).tolist(), strict=True))
    step = max(1, len(lost) // PICTURES)
    names, pictures = context.data.class_names, []
    for pixels, numbers in lost[::step][:PICTURES]:
        picture = thumbnail(pixels, context.parts.mean_std)
        if picture is not None:
            said = [names[n] if names and n < len(names) else str(n) for n in numbers]
            pictures.append({**dict(zip(("label", "dense", "compact"), said, strict=True)), "png": picture})
    return found, pictures


def thumbnail(pixels: Tensor, mean_std: tuple[Sequence[float], Sequence[float]]) -> str | None:
    """A normalised image (C, H, W) as a small PNG in base64; None if it has neither one channel nor three."""
    if pixels.ndim != 3 or len(pixels) not in (1, 3):
        return None
    mean, std = (torch.tensor(list(values)).view(-1, 1, 1) for values in mean_std)
    array = ((pixels * std + mean).clamp(0, 1) * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0).numpy()
    image = Image.fromarray(array)
    small = max(image.size) < SIDE // 2
    scale = SIDE / max(image.size)
    if scale < 1 or small:  # few pixels stay sharp
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        image = image.resize(size, Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.quantize(128).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
