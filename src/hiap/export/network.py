"""The network as it is exported: optimised, from float32 images to float32 logits, and what it must be told of images.

`hiap.optimize` writes its rows of pixels in place, which a graph can only express by scattering. Here the tokens of the
prefix are appended by padding instead, which every runtime does well.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.errors import ExportError
from hiap.export.flat_blocks import flattened
from hiap.export.formats import INPUT, OUTPUT
from hiap.models.family import logits_of
from hiap.models.registry import family_of
from hiap.nn.stem import Stem
from hiap.pruning.count import macs
from hiap.speed.inference import optimize

__all__ = ["Deployable", "description", "traced"]


class PaddedStem(nn.Module):
    """A stem that pads its tokens with those of the prefix."""

    def __init__(self, stem: Stem, channels: int) -> None:
        super().__init__()
        self.patch, self.prefix = stem.patch, stem.prefix
        self.weight = nn.Parameter(stem.weight[:, : channels * stem.patch[0] * stem.patch[1]].contiguous(), False)
        self.table = nn.Parameter(stem.table.detach(), False)

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        P, Q = self.patch
        h, w = H // P, W // Q
        pixels = x[..., : h * P, : w * Q].reshape(B, C, h, P, w, Q).permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, P, Q)
        tokens = F.linear(pixels.reshape(B, h * w, C * P * Q), self.weight)
        return F.pad(tokens, (0, 0, self.prefix, 0)) + self.table


class Deployable(nn.Module):
    """A model for export: normalised float32 images to float32 logits, whatever it computes in.

    Args:
        model: dense or compact; it is copied.
        dtype: that it computes in.
        last_block: whether the last block computes only what the classifier reads.
        flat: whether tokens are the rows of one matrix: see `FlatBlocks`.
    """

    def __init__(
        self, model: nn.Module, dtype: torch.dtype = torch.float32, last_block: bool = True, flat: bool = False
    ) -> None:
        super().__init__()
        source = copy.deepcopy(model).cpu().float().eval()
        self.shape = family_of(source).input_shape(source)
        self.dtype = dtype
        self.network = optimize(source, dtype, 1, pad=False, last_block=last_block).requires_grad_(False)
        if self.network.stem is None and not self.network.whole:  # it takes images of any size; a file does not
            self.network.stem = self.network.family.fold_fixed_stem(self.network.model)
        if flat and not self.network.whole:
            self.network.blocks = nn.ModuleList(flattened(list(self.network.blocks)))
        stem = self.network.stem
        if isinstance(stem, Stem):
            self.network.stem = PaddedStem(stem, self.shape[0])
        elif isinstance(stem, nn.Sequential) and isinstance(stem[0], Stem):
            stem[0] = PaddedStem(stem[0], self.shape[0])

    def forward(self, images: Tensor) -> Tensor:
        return logits_of(self.network(images.to(self.dtype))).float()


def traced(network: nn.Module, shape: Sequence[int], batch: int | None) -> torch.export.ExportedProgram:
    """The graph of a network.

    Args:
        shape: of one input, without the batch.
        batch: inputs at a time; None for any number.

    Raises:
        ExportError: torch cannot trace it so.
    """
    shapes = None if batch else ({0: torch.export.Dim("batch", min=1)},)
    images = torch.zeros(batch or 2, *shape)
    try:
        return torch.export.export(network, (images,), dynamic_shapes=shapes, strict=False)
    except Exception:  # of many kinds; the other way of tracing takes longer and may still work
        try:
            return torch.export.export(network, (images,), dynamic_shapes=shapes, strict=True)
        except Exception as error:
            mend = "" if batch else "; a fixed batch may work: --batch 1"
            raise ExportError(f"torch.export cannot trace this network: {error}{mend}") from error


def description(model: nn.Module, form: str, precision: str, batch: int | None) -> dict[str, Any]:
    """All that whoever runs the file must know of its images and classes, as JSON values."""
    family = family_of(model)
    own, (channels, *size), classes = family.preprocessing(model), family.input_shape(model), family.classes(model)
    mean, std = (values[:1] * channels if len(set(values)) == 1 else values for values in (own.mean, own.std))
    merging = family.merging(model)
    names = getattr(model, "class_names", None) or family.usage(model).get("label_names")
    return {
        "format": form,
        "precision": precision,
        "batch": batch or "dynamic",
        "input": INPUT,
        "output": OUTPUT,
        "channels": channels,
        "size": size,
        "mean": list(mean),
        "std": list(std),
        "interpolation": own.interpolation,
        "crop_pct": own.crop_pct,
        "crop_mode": own.crop_mode,
        "classes": classes,
        "class_names": [str(name) for name in names] if names and len(names) == classes else None,
        "macs": macs(model),
        **({"merge_tokens": merging[0]} if merging else {}),
        "versions": {"hiap": version("hiap"), "torch": str(torch.__version__)},
    }
