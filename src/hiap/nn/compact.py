"""The plain modules of the small network. Nothing here knows of gates, topologies or families of models.

A block has a norm, a branch, a layer scale and a drop path, twice (`norm1`, `attn`, `ls1`, `drop_path1`; `norm2`,
`mlp`, ...); its Linears are `attn.qkv`, `attn.proj`, `mlp.fc1` and `mlp.fc2`. timm's blocks have the same names.
A branch is a full module, a `Constant` (all units gone: only the bias is left) or None (gone).

Some parts are optional: `Attention` turns queries and keys by rotary positions where it has a `Rotary`, and adds
relative positions to the scores where it has a `PositionBias`. `GluMlp` is an MLP whose neurons are each multiplied
by a gate that is computed from the input.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hiap.nn.position_bias import PositionBias
from hiap.nn.rotary import Rope, Rotary

__all__ = ["Attention", "Block", "Constant", "GluMlp", "Mlp", "Widths", "has_bias", "is_glu", "shrink_block"]

SCORES = 2**19  # of attention that plain products hold at once; more of them no longer fit into the cache of a CPU


@dataclass(frozen=True)
class Widths:
    """The widths of one block. None: the branch is gone; 0 heads or neurons: it is the constant bias."""

    heads: int | None
    qk_dim: int
    value_dim: int
    neurons: int | None


class Constant(nn.Module):
    """A branch without units: whatever comes in, the bias of its last layer goes out."""

    def __init__(self, dim: int, drop: nn.Module) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(dim))
        self.drop = drop

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Rope | None = None
    ) -> Tensor:
        x = self.drop(self.bias.expand_as(x))
        return x


class Attention(nn.Module):
    """Self-attention whose q/k width, value width and number of heads are free.

    Args:
        head_dim: the q/k width of the dense head, which sets the softmax scale whatever `qk_dim` is now.
        rotary: turns queries and keys by the table that a forward is handed as `rope`.
        position: what relative positions add to the scores.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qk_dim: int,
        value_dim: int,
        head_dim: int,
        qkv_bias: bool,
        proj_bias: bool,
        q_norm: nn.Module,
        k_norm: nn.Module,
        attn_drop: nn.Dropout,
        proj_drop: nn.Module,
        rotary: Rotary | None = None,
        position: PositionBias | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qk_dim = qk_dim
        self.value_dim = value_dim
        self.head_dim = head_dim
        self.split = [num_heads * qk_dim, num_heads * qk_dim, num_heads * value_dim]
        self.qkv = nn.Linear(dim, sum(self.split), bias=qkv_bias)
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.rotary = rotary
        self.position = position
        self.attn_drop = attn_drop
        self.proj = nn.Linear(num_heads * value_dim, dim, bias=proj_bias)
        self.proj_drop = proj_drop

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Rope | None = None
    ) -> Tensor:
        q, k, v = self.project(x, rope)
        x = self.attend(q, k, v, attn_mask, is_causal)
        return x

    def project(self, x: Tensor, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads."""
        return self.by_head(self.qkv(x), x.shape[1], rope)

    def by_head(self, rows: Tensor, tokens: int, rope: Rope | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the heads from what `qkv` gives, (B, N, ...) or (B * N, ...); N is `tokens`."""
        q, k, v = rows.split(self.split, dim=-1)  # type: ignore[no-untyped-call]
        q = self.q_norm(q.view(-1, tokens, self.num_heads, self.qk_dim)).transpose(1, 2)  # (B, H, N, Dqk)
        k = self.k_norm(k.view(-1, tokens, self.num_heads, self.qk_dim)).transpose(1, 2)  # (B, H, N, Dqk)
        v = v.view(-1, tokens, self.num_heads, self.value_dim).transpose(1, 2)  # (B, H, N, Dv)
        if self.rotary is not None:
            q, k = self.rotary(q, k, rope)
        return q, k, v

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """What the branch makes of queries, keys and values. (B, N, D)"""
        x: Tensor = self.proj_drop(self.proj(self.mix(q, k, v, attn_mask, is_causal)))
        return x

    def mix(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """The values of all heads, mixed by the attention of each. (B, N, H * Dv)"""
        if self.position is not None:
            bias = self.position().to(q.dtype)
            attn_mask = bias if attn_mask is None else bias + attn_mask
        scale, drop = self.head_dim**-0.5, self.attn_drop.p if self.training else 0.0
        unusual = attn_mask is not None or is_causal or drop
        if self.qk_dim == self.value_dim or unusual or not _is_unfused(q):
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask, drop, is_causal, scale=scale)
        elif q.shape[:3].numel() * q.shape[2] <= SCORES:
            mixed = ((q * scale) @ k.transpose(-2, -1)).softmax(dim=-1) @ v
        else:
            q, k, v = (F.pad(one, (0, max(self.qk_dim, self.value_dim) - one.shape[-1])) for one in (q, k, v))
            mixed = F.scaled_dot_product_attention(q, k, v, scale=scale)[..., : self.value_dim]
        x: Tensor = mixed.transpose(1, 2).reshape(q.shape[0], q.shape[2], self.split[2])
        return x

    def extra_repr(self) -> str:
        return f"heads={self.num_heads}, qk_dim={self.qk_dim}, value_dim={self.value_dim}"


def _is_unfused(q: Tensor) -> bool:
    """Whether torch has no fused kernel for attention of unequal q/k and value widths: on a CPU.

    Its own steps take about twice as long as plain products in float32. With many scores the equal widths of its fused
    kernel are faster still, filled up with zeros.
    """
    return q.device.type == "cpu" and q.dtype.itemsize >= 4 and not torch.compiler.is_compiling()


class Mlp(nn.Module):
    """Two Linears with an activation between them."""

    def __init__(
        self,
        dim: int,
        neurons: int,
        fc1_bias: bool,
        fc2_bias: bool,
        act: nn.Module,
        drop1: nn.Module,
        drop2: nn.Module,
    ) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, neurons, bias=fc1_bias)
        self.act = act
        self.drop1 = drop1
        self.fc2 = nn.Linear(neurons, dim, bias=fc2_bias)
        self.drop2 = drop2

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.act(self.fc1(x)))
        x = self.drop2(self.fc2(x))
        return x

    @property
    def neurons(self) -> int:
        return self.fc2.in_features


class GluMlp(Mlp):
    """An MLP with gated neurons: `act(gate) * up`. The rows of both are in `fc1`, so that a neuron has two.

    Args:
        gate_last: the second half of `fc1` is the gate, not the first.
    """

    def __init__(
        self,
        dim: int,
        neurons: int,
        fc1_bias: bool,
        fc2_bias: bool,
        act: nn.Module,
        drop1: nn.Module,
        drop2: nn.Module,
        gate_last: bool = False,
    ) -> None:
        super().__init__(dim, neurons, fc1_bias, fc2_bias, act, drop1, drop2)
        self.fc1 = nn.Linear(dim, 2 * neurons, bias=fc1_bias)
        self.gate_last = gate_last

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.fc1(x).chunk(2, dim=-1)
        x = first * self.act(second) if self.gate_last else self.act(first) * second
        x = self.drop2(self.fc2(self.drop1(x)))
        return x

    def extra_repr(self) -> str:
        return f"gate_last={self.gate_last}"


class Block(nn.Module):
    """A pre-norm transformer block; either branch may be missing.

    A layer scale (`ls1`, `ls2`) is an Identity, or has its factors as `gamma`.

    Attributes:
        converted: made from a block of another kind, that it can be turned back into as long as nothing was cut.
        glu: its MLP has gated neurons, or had them where it is gone.
    """

    converted = False
    glu = False

    def __init__(
        self,
        norm1: nn.Module,
        attn: Attention | Constant | None,
        ls1: nn.Module,
        drop_path1: nn.Module,
        norm2: nn.Module,
        mlp: Mlp | Constant | None,
        ls2: nn.Module,
        drop_path2: nn.Module,
    ) -> None:
        super().__init__()
        self.norm1 = norm1
        self.attn = attn
        self.ls1 = ls1
        self.drop_path1 = drop_path1
        self.norm2 = norm2
        self.mlp = mlp
        self.ls2 = ls2
        self.drop_path2 = drop_path2

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Rope | None = None
    ) -> Tensor:
        if self.attn is not None:
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask, is_causal, rope)))
        if self.mlp is not None:
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
        return x


def shrink_block(block: Block, dim: int, widths: Widths) -> Block:
    """Build the compact form of a block: new Linears on the meta device, everything else taken over.

    Args:
        block: one of ours, or one with the same members; its norms, layer scales and drops move to the result.
        dim: embedding width D.
    """
    gone = nn.Identity
    norm1, ls1, drop_path1 = block.norm1, block.ls1, block.drop_path1
    norm2, ls2, drop_path2 = block.norm2, block.ls2, block.drop_path2
    new_attn: Attention | Constant | None = None
    new_mlp: Mlp | Constant | None = None
    with torch.device("meta"):
        if widths.heads is None or (widths.heads == 0 and not has_bias(block.attn, "proj")):
            norm1, ls1, drop_path1 = gone(), gone(), gone()
        elif widths.heads == 0:
            constant, attn = block.attn, cast(Attention, block.attn)
            norm1 = gone()
            new_attn = Constant(dim, constant.drop if isinstance(constant, Constant) else attn.proj_drop)
        else:
            attn = cast(Attention, block.attn)
            rotary: Rotary | None = getattr(attn, "rotary", None)
            position: PositionBias | None = getattr(attn, "position", None)
            new_attn = Attention(
                dim,
                widths.heads,
                widths.qk_dim,
                widths.value_dim,
                attn.head_dim,
                attn.qkv.bias is not None,
                attn.proj.bias is not None,
                attn.q_norm,
                attn.k_norm,
                attn.attn_drop,
                attn.proj_drop,
                rotary and rotary.shrunk(widths.heads, widths.qk_dim),
                position and position.shrunk(widths.heads),
            )
        if widths.neurons is None or (widths.neurons == 0 and not has_bias(block.mlp, "fc2")):
            norm2, ls2, drop_path2 = gone(), gone(), gone()
        elif widths.neurons == 0:
            left, mlp = block.mlp, cast(Mlp, block.mlp)
            norm2 = gone()
            new_mlp = Constant(dim, left.drop if isinstance(left, Constant) else mlp.drop2)
        else:
            mlp = cast(Mlp, block.mlp)
            biases, drops = (mlp.fc1.bias is not None, mlp.fc2.bias is not None), (mlp.drop1, mlp.drop2)
            if is_glu(block):
                new_mlp = GluMlp(dim, widths.neurons, *biases, mlp.act, *drops, cast(GluMlp, mlp).gate_last)
            else:
                new_mlp = Mlp(dim, widths.neurons, *biases, mlp.act, *drops)
    kind = type(block) if isinstance(block, Block) else Block  # a family's own kind of block stays one
    made = kind(norm1, new_attn, ls1, drop_path1, norm2, new_mlp, ls2, drop_path2)
    made.glu = is_glu(block)
    return made.train(block.training)


def is_glu(block: nn.Module) -> bool:
    """Whether the MLP of a block, ours or one with the same members, has gated neurons."""
    return bool(getattr(block, "glu", False)) or hasattr(getattr(block, "mlp", None), "gate_last")


def has_bias(branch: nn.Module | None, last: str) -> bool:
    """Whether a bias outlives the units of a branch, of which `last` is the last layer."""
    return isinstance(branch, Constant) or cast(nn.Linear, getattr(branch, last)).bias is not None
