"""The steps of a network on the kernels of `hiap.speed.kernels`: a matrix product with what stands around it, a branch.

Each has a tile, the sizes its kernel works in; without one it is plain PyTorch, which computes the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.nn.compact import Attention, Block, Mlp

__all__ = ["Attend", "FeedForward", "First", "Linear", "Plain", "Shift", "Tile", "scaled"]

WIDTH = 16  # rows of products are padded to multiples of it
NEURONS = 64  # and neurons to multiples of this

Tile: TypeAlias = "tuple[int, ...] | None"


class Linear(nn.Module):
    """A matrix product with what stands before and after it.

    Args:
        weight, bias: of the product, (out, in) and (out).
        norm: a LayerNorm before it.
        gelu: a key of `kernels.GELUS` after it; None for none.
        padded: to a multiple of this many outputs, which are zero.
    """

    weight: Tensor
    sums: Tensor | None
    bias: Tensor

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        norm: nn.LayerNorm | None = None,
        gelu: str | None = None,
        padded: int = WIDTH,
    ) -> None:
        super().__init__()
        weight = weight.double()
        bias = weight.new_zeros(len(weight)) if bias is None else bias.double()
        if norm is not None:
            bias = bias if norm.bias is None else bias + weight @ norm.bias.double()
            weight = weight if norm.weight is None else weight * norm.weight.double()
        room = -len(weight) % padded
        weight, bias = F.pad(weight, (0, 0, 0, room)).t().contiguous().to(dtype), F.pad(bias, (0, room))
        self.register_buffer("weight", weight)
        self.register_buffer("sums", None if norm is None else weight.double().sum(0).float())
        self.register_buffer("bias", bias.float())
        self.eps, self.gelu = 0.0 if norm is None else norm.eps, gelu
        self.tile: Tile = None

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.run(x, residual, self.tile)

    def run(self, x: Tensor, residual: Tensor | None = None, tile: Tile = None) -> Tensor:
        """In a form that need not be the fastest."""
        if tile is not None:
            from hiap.speed import kernels

            gelu = kernels.GELUS[self.gelu] if self.gelu else []
            given = (self.weight, self.sums, self.bias, residual, gelu, self.eps, list(tile))
            return cast(Tensor, kernels.linear(x, *given))
        if self.sums is not None:
            x = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        x = _GELU[self.gelu](F.linear(x, self.weight.t(), self.bias.to(x.dtype)))
        return x if residual is None else residual + x

    @property
    def key(self) -> tuple[Any, ...]:
        return (*self.weight.shape, self.sums is not None, self.gelu)


_GELU: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda x: x,
    "erf": F.gelu,
    "tanh": functools.partial(F.gelu, approximate="tanh"),
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
}


class Attend(nn.Module):
    """x + attention(norm(x)), for the first tokens.

    Args:
        first: how many tokens are read of the result; None for all.
    """

    def __init__(self, block: Block, dtype: torch.dtype, first: int | None) -> None:
        super().__init__()
        attn = cast(Attention, block.attn)
        self.heads, self.qk_dim, dim = attn.num_heads, attn.qk_dim, attn.value_dim
        self.first, self.scale = first, attn.head_dim**-0.5
        more = 0 if self.heads * dim % WIDTH == 0 else -dim % WIDTH  # values that are zero
        self.value_dim = dim + more
        queries = 2 * self.heads * self.qk_dim
        weight: Tensor = attn.qkv.weight
        bias: Tensor | None = attn.qkv.bias
        values = F.pad(weight[queries:].view(self.heads, dim, -1), (0, 0, 0, more)).flatten(0, 1)
        if bias is not None:
            bias = torch.cat([bias[:queries], F.pad(bias[queries:].view(self.heads, dim), (0, more)).flatten()])
        self.qkv = Linear(torch.cat([weight[:queries], values]), bias, dtype, cast(nn.LayerNorm, block.norm1))
        weight, bias = scaled(attn.proj, block.ls1)
        self.out = Linear(F.pad(weight.view(-1, self.heads, dim), (0, more)).flatten(1), bias, dtype, padded=1)
        self.tile: Tile = None

    def forward(self, x: Tensor) -> Tensor:
        first = self.first or x.shape[1]
        o = self.attend(self.qkv(x), self.tile)
        return cast(Tensor, self.out(o, x if first == x.shape[1] else x[:, :first].contiguous()))

    @property
    def key(self) -> tuple[Any, ...]:
        return (self.heads, self.qk_dim, self.value_dim, self.first)

    def attend(self, qkv: Tensor, tile: Tile) -> Tensor:
        first = self.first or qkv.shape[1]
        if tile is not None:
            from hiap.speed import kernels

            given = (self.heads, self.qk_dim, self.value_dim, first, self.scale, list(tile))
            return cast(Tensor, kernels.attend(qkv, *given))
        B = len(qkv)
        sizes = [self.heads * self.qk_dim] * 2 + [self.heads * self.value_dim]
        q, k, v = (
            part.reshape(B, -1, self.heads, part.shape[-1] // self.heads).transpose(1, 2)
            for part in qkv[..., : sum(sizes)].split(sizes, dim=-1)  # type: ignore[no-untyped-call]
        )
        o = F.scaled_dot_product_attention(q[:, :, :first], k, v, scale=self.scale).transpose(1, 2)
        return o.reshape(B, first, sizes[2])


class FeedForward(nn.Module):
    """x + ffn(norm(x)): in one pass where it has a tile, else as two products."""

    def __init__(self, block: Block, dtype: torch.dtype, gelu: str) -> None:
        super().__init__()
        mlp = cast(Mlp, block.mlp)
        self.fc1 = Linear(mlp.fc1.weight, mlp.fc1.bias, dtype, cast(nn.LayerNorm, block.norm2), gelu, NEURONS)
        weight, bias = scaled(mlp.fc2, block.ls2)
        self.out = Linear(F.pad(weight, (0, len(self.fc1.bias) - weight.shape[1])), bias, dtype, padded=1)
        self.register_buffer("across", self.fc1.weight.t().contiguous())  # for one pass
        self.tile: Tile = None

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.tile)

    def run(self, x: Tensor, tile: Tile) -> Tensor:
        """In a form that need not be the fastest."""
        if tile is None:
            return cast(Tensor, self.out(self.fc1(x), x))
        from hiap.speed import kernels

        fc1, out, gelu = self.fc1, self.out, kernels.GELUS[cast(str, self.fc1.gelu)]
        given = (self.across, fc1.bias, out.weight, out.bias, gelu, fc1.eps, list(tile))
        return cast(Tensor, kernels.ffn(x, *given))


class Shift(nn.Module):
    """x + a constant."""

    bias: Tensor

    def __init__(self, bias: Tensor) -> None:
        super().__init__()
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias.to(x.dtype)


class First(nn.Module):
    """The first tokens."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, x: Tensor) -> Tensor:
        return x[:, : self.tokens].contiguous()


class Plain(nn.Module):
    """A branch as it is, with its norm and residual."""

    def __init__(self, norm: nn.Module, branch: nn.Module, scale: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.branch, self.scale = norm.to(dtype), branch.to(dtype), scale.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, x + self.scale(self.branch(self.norm(x))))


def scaled(linear: nn.Linear, scale: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of the last layer of a branch with the layer scale in them."""
    gamma = getattr(scale, "gamma", None)
    if gamma is None:
        return linear.weight, linear.bias
    gamma = cast(Tensor, gamma).double()
    return linear.weight.double() * gamma[:, None], None if linear.bias is None else linear.bias.double() * gamma
