"""8-bit matrix products in PyTorch, by torchao: the Linears of the blocks, as INT8 or as float8 (fp8).

Activations are rounded in every run, by a scale for each token (INT8) or each tensor (fp8). The patch embedding, norms,
attention itself and the classifier stay as they are: they are little of the work.
"""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.models.family import logits_of
from hiap.models.registry import family_of

__all__ = ["EIGHT_BITS", "EightBits", "check_eight_bits"]

EIGHT_BITS = ("int8", "fp8")
CAPABILITY = (8, 9)  # the first of CUDA with products of float8
MULTIPLE = {"int8": 8, "fp8": 16}  # of both widths of a layer, that products on CUDA want


def check_eight_bits(kind: str, device: torch.device) -> None:
    """Raise an InputError if layers cannot be rounded so on this device, with what to do about it."""
    if kind not in EIGHT_BITS:
        raise InputError(f"quantize must be one of {', '.join(EIGHT_BITS)}; found {kind!r}")
    if kind == "fp8":
        if device.type != "cuda":
            raise InputError(
                f"fp8 needs a CUDA device of compute capability 8.9 or newer; found {device.type}: use int8"
            )
        own = torch.cuda.get_device_capability(device)
        if own < CAPABILITY:
            raise InputError(
                f"fp8 needs a CUDA device of compute capability 8.9 or newer; found {own[0]}.{own[1]}: use int8"
            )
    try:
        _library()
    except ImportError as error:
        raise InputError(
            f'{kind} in PyTorch needs the package torchao ({error}): pip install "hiap[torchao]"'
        ) from error


def _library() -> Any:
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # it warns about parts of itself that are not used here
    try:
        from torchao import quantization

        return quantization
    finally:
        logging.disable(before)


def _multiple(kind: str, device: torch.device) -> int:
    """Of which both widths of a layer must be a multiple."""
    return MULTIPLE[kind] if device.type == "cuda" else 1


class EightBits(nn.Module):
    """A copy of a model whose blocks multiply with 8-bit weights: float images to float32 logits.

    On CUDA, layers whose widths are no multiple of 8 (INT8) or 16 (fp8) stay as they are, because there is no fast
    product for them. `hiap.extract` rounds widths to multiples of 8 unless it is told otherwise.

    Args:
        model: dense or compact.
        kind: "int8" or "fp8"; `check_eight_bits` has passed.
        device, dtype: where the copy is, and what it computes in besides.

    Attributes:
        rounded, left: Linears of the blocks with 8-bit weights, and without.
    """

    def __init__(self, model: nn.Module, kind: str, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        library = _library()
        self.dtype = dtype
        self.network = copy.deepcopy(model).to(device, dtype).eval().requires_grad_(False)
        sites = family_of(self.network).open(self.network)  # some blocks use their weights past the forward of a Linear
        layers = [module for site in sites for module in site.module.modules() if type(module) is nn.Linear]
        multiple = _multiple(kind, device)
        chosen = {id(one) for one in layers if not (one.in_features % multiple or one.out_features % multiple)}
        config = {
            "int8": library.Int8DynamicActivationInt8WeightConfig,
            "fp8": library.Float8DynamicActivationFloat8WeightConfig,
        }[kind](set_inductor_config=False)  # which would change how other networks are compiled
        library.quantize_(self.network, config, filter_fn=lambda module, name: id(module) in chosen)
        self.rounded = sum(type(one.weight) is not nn.Parameter for one in layers)
        self.left = len(layers) - self.rounded
        if not self.rounded:
            raise InputError(
                f"{kind}: none of the {len(layers)} layers of the blocks has widths that are multiples of {multiple}"
            )

    def forward(self, images: Tensor) -> Tensor:
        return logits_of(self.network(images.to(self.dtype))).float()
