"""A digest of tensors: whether two models have the same weights."""

from __future__ import annotations

import hashlib

import torch

__all__ = ["digest_tensors"]


def digest_tensors(state: dict[str, torch.Tensor]) -> str:
    """A digest of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(state.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
