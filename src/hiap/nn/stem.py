"""The stem of a ViT for inference: one matrix product instead of a convolution, copies and a concatenation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hiap.errors import InputError

__all__ = ["Stem"]


class Stem(nn.Module):
    """Patch embedding, prefix tokens and positions: one matrix product and one addition.

    Args:
        weight: of the patch embedding, (D, C * P * Q).
        table: what is added to each token, (1, N, D); its first `prefix` rows are the prefix tokens themselves.
        size, patch: height and width of an image and of a patch.
    """

    def __init__(
        self, weight: Tensor, table: Tensor, size: tuple[int, int], patch: tuple[int, int], prefix: int
    ) -> None:
        super().__init__()
        weight = F.pad(weight, (0, -weight.shape[1] % 8))  # odd rows have slow products
        self.weight, self.table = (nn.Parameter(tensor, weight.requires_grad) for tensor in (weight, table))
        self.size, self.patch, self.prefix = size, patch, prefix

    def forward(self, x: Tensor) -> Tensor:
        B, C, H, W = x.shape
        if self.size != (H, W):
            raise InputError(f"the model is optimised for images of {self.size[0]}x{self.size[1]}; found {H}x{W}")
        P, Q = self.patch
        h, w = H // P, W // Q
        rows = x.new_zeros(B, self.prefix + h * w, self.weight.shape[1])
        x = x[..., : h * P, : w * Q]  # what does not fill a patch is not seen
        pixels = x.reshape(B, C, h, P, w, Q).permute(0, 2, 4, 1, 3, 5)  # (B, h, w, C, P, Q)
        rows[:, self.prefix :, : C * P * Q] = pixels.reshape(B, h * w, C * P * Q)
        return F.linear(rows, self.weight) + self.table
