"""timm's `Eva`: the ViTs with rotary positions (DINOv3, PE, rope-vit, Sapiens 2) or gated MLPs (EVA, EVA-02).

Its attention reads the weight of `qkv` past its forward, ends in a reshape to the dense width, or has separate
projections, so that blocks are converted before they are gated, and back after. A converted block has a bias for keys
too wherever queries have one; it starts at zero, as in timm's model.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import timm.layers as layers
import torch
from timm.models.eva import Eva, EvaAttention, EvaBlock
from torch import Tensor, nn

from hiap.models.family import Recipe, Site, compact_pairs, compact_widths, refuse
from hiap.models.linears import joined, linear_of, parted, without_values
from hiap.models.timm import TimmFamily, check_units
from hiap.models.timm_eva_recipe import build_eva, describe_eva
from hiap.models.timm_recipe import mlp_ratio_of
from hiap.nn.compact import Attention, Block, GluMlp, Mlp, Widths, is_glu
from hiap.nn.position_bias import PositionBias
from hiap.nn.rotary import Rope, Rotary

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing since Python 3.11

__all__ = ["TIMM_EVA", "EvaFamily", "EvaSite", "RotaryBlock", "ShellBlock", "block_parts", "restored"]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any


class ShellBlock(Block):
    """A block made from one of timm's `Eva` or `Beit`.

    Attributes:
        shell: the block it was made from, without weights, so that it can become one again; none once it was cut.
    """

    shell: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no part of the network

    def of(self, block: nn.Module) -> Self:
        """Note the block that this one was made from."""
        self.shell = (without_values(block),)
        return self.train(block.training)


class RotaryBlock(ShellBlock):
    """A block that `Eva` can call."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        return super().forward(x, attn_mask, is_causal, None if rope is None else _table(rope))


@dataclass(frozen=True)
class EvaSite(Site):
    """A block of `Eva`.

    Attributes:
        per_head: the rotary table has angles of its own for each head.
    """

    per_head: bool = False

    @property
    def block(self) -> Block:
        return self.module if isinstance(self.module, Block) else _to_block(self.module, self.pairs, self.per_head)


class EvaFamily(TimmFamily):
    """timm's `Eva` with its pre-norm block."""

    name = "timm_eva"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, Eva)

    def sites(self, model: ViT) -> list[Site]:
        self._check_around(model)
        rotary, per_head = model.rope is not None, bool(getattr(model, "rope_mixed", False))
        if per_head and not hasattr(model.rope, "shift_coords"):
            reason = "this version of timm cannot compute it in float64, in which every extraction is checked"
            refuse("rope", model.rope, reason, "a newer timm")
        return [self._eva_site(f"blocks.{i}", block, model, rotary, per_head) for i, block in enumerate(model.blocks)]

    def _eva_site(self, name: str, block: ViT, model: ViT, rotary: bool, per_head: bool) -> Site:
        if isinstance(block, Block):
            widths, pairs = compact_widths(block), compact_pairs(block)
        else:
            widths = _widths(name, block)
            pairs = ("halves" if getattr(block.attn, "rotate_half", False) else "adjacent") if rotary else None
        qk_norm = bool(widths.heads) and not isinstance(cast(Any, block.attn).q_norm, nn.Identity)
        glu = is_glu(block) or isinstance(block.mlp, layers.SwiGLU)
        return EvaSite(self, name, block, model.embed_dim, widths, qk_norm, pairs, glu, per_head)

    def from_block(self, block: Block) -> nn.Module:
        return restored(block) if isinstance(block, ShellBlock) and block.shell else block

    def _pools_prefix(self, model: ViT) -> bool:
        return True

    def _placed(self, model: ViT, patches: Tensor) -> Tensor:
        return cast(Tensor, model._pos_embed(patches)[0])

    def ropes(self, model: ViT) -> Sequence[Rope | None]:
        if model.rope is None:
            return [None] * len(model.blocks)
        rope = copy.deepcopy(model.rope).eval()  # some change the positions in training
        cached = hasattr(rope, "feat_shape") and not model.dynamic_img_size
        grid = model.patch_embed.dynamic_feat_size(self.input_shape(model)[1:])
        with torch.no_grad():
            table = rope.get_embed() if cached else rope.get_embed(shape=grid)
        return [_table(table[i] if model.rope_mixed else table) for i in range(len(model.blocks))]

    def build_dense(self, recipe: Recipe, widths: Sequence[Widths]) -> nn.Module:
        first, dim = widths[0], recipe["arguments"]["embed_dim"]
        plain = Widths(recipe["arguments"]["num_heads"], first.qk_dim, first.qk_dim, first.neurons)
        if plain.neurons and all(one == plain for one in widths):
            recipe = {**recipe, "arguments": {**recipe["arguments"], "mlp_ratio": mlp_ratio_of(plain.neurons, dim)}}
        return self.build(recipe)

    def describe(self, model: ViT, origin: Recipe | None = None) -> Recipe:
        return describe_eva(model, self.input_shape(model)[1:], origin)

    def build(self, recipe: Recipe) -> nn.Module:
        return build_eva(recipe)


TIMM_EVA = EvaFamily()


def _table(rope: Tensor) -> Rope:
    sin, cos = rope.chunk(2, dim=-1)
    return sin, cos


def _widths(name: str, block: ViT) -> Widths:
    if type(block) is not EvaBlock:
        reason = "it normalises after the branch, so a closed branch is not a zero"
        reason = reason if "PostNorm" in type(block).__name__ else "it is not timm's pre-norm EvaBlock"
        refuse(name, block, reason, "rules to gate and cut this block")
    attn, mlp = block.attn, block.mlp
    if type(attn) not in (EvaAttention, layers.AttentionRope):
        refuse(f"{name}.attn", attn, "it is not timm's EvaAttention or AttentionRope", "rules to cut this attention")
    if getattr(attn, "num_kv_groups", 1) > 1:
        reason = "several heads share keys and values, which cannot be removed with one of them"
        refuse(f"{name}.attn", attn, reason, "heads with keys and values of their own")
    if getattr(attn, "gate", None) is not None:
        refuse(f"{name}.attn.gate", attn.gate, "gated attention adds a third factor", "rules to cut the gate as well")
    if type(mlp) not in (layers.Mlp, layers.GluMlp, layers.SwiGLU):
        refuse(f"{name}.mlp", mlp, "it is not timm's Mlp, GluMlp or SwiGLU", "rules to cut this MLP")
    names = ["attn.qkv"] if attn.qkv is not None else ["attn.q_proj", "attn.k_proj", "attn.v_proj"]
    names += ["mlp.fc1_g", "mlp.fc1_x"] if isinstance(mlp, layers.SwiGLU) else ["mlp.fc1"]
    check_units(name, block, [*names, "attn.proj", "mlp.fc2"])
    return Widths(attn.num_heads, attn.head_dim, attn.head_dim, mlp.fc2.in_features)


def _to_block(block: ViT, pairs: str | None, per_head: bool) -> RotaryBlock:
    heads, width = block.attn.num_heads, block.attn.head_dim
    rotary = None if pairs is None else Rotary(heads, width, width, pairs, per_head).to(block.norm1.weight.device)
    return RotaryBlock(*block_parts(block, width, rotary)).of(block)


def block_parts(
    block: ViT, width: int, rotary: Rotary | None = None, position: PositionBias | None = None
) -> tuple[Any, ...]:
    """What a `Block` is made of, from a block of timm's `Eva` or `Beit` with heads of this width."""
    attn, mlp, dim = block.attn, block.mlp, block.attn.proj.out_features
    heads = attn.num_heads
    qkv, fc1 = _qkv(attn), joined([mlp.fc1_g, mlp.fc1_x]) if isinstance(mlp, layers.SwiGLU) else mlp.fc1
    same = nn.Identity()
    with torch.device("meta"):  # their Linears come at once
        new_attn = Attention(
            *(dim, heads, width, width, width, qkv.bias is not None, attn.proj.bias is not None),
            *(getattr(attn, "q_norm", same), getattr(attn, "k_norm", same), attn.attn_drop, attn.proj_drop),
            *(rotary, position),
        )
        parts = (dim, 1, True, True, mlp.act, mlp.drop1, mlp.drop2)
        new_mlp = Mlp(*parts) if isinstance(mlp, layers.Mlp) else GluMlp(*parts, getattr(mlp, "gate_last", False))
    new_attn.qkv, new_attn.proj, new_mlp.fc1, new_mlp.fc2 = qkv, attn.proj, fc1, mlp.fc2
    scale1, scale2 = (_scale(gamma) for gamma in (block.gamma_1, block.gamma_2))
    return (
        *(block.norm1, new_attn, scale1, block.drop_path1),
        *(block.norm2, new_mlp, scale2, block.drop_path2),
    )


def _qkv(attn: ViT) -> nn.Linear:
    if getattr(attn, "qkv", None) is None:
        return joined([attn.q_proj, attn.k_proj, attn.v_proj])
    if getattr(attn, "q_bias", None) is None:
        return cast(nn.Linear, attn.qkv)
    bias = torch.cat([attn.q_bias.detach(), attn.k_bias.to(attn.q_bias.device), attn.v_bias.detach()])
    return linear_of(attn.qkv.weight, nn.Parameter(bias, attn.q_bias.requires_grad), attn.training)


def _scale(gamma: nn.Parameter | None) -> nn.Module:
    if gamma is None:
        return nn.Identity()
    scale: nn.Module = layers.LayerScale(gamma.shape[0], device="meta")
    scale.gamma = gamma
    return scale


def restored(block: ShellBlock) -> nn.Module:
    """The block of timm that a converted one was made from, with its present weights."""
    shell: ViT = block.shell[0]
    attn, mlp = cast(Attention, block.attn), cast(Mlp, block.mlp)
    shell.norm1, shell.norm2, shell.drop_path1, shell.drop_path2 = (
        *(block.norm1, block.norm2),
        *(block.drop_path1, block.drop_path2),
    )
    for name, scale in (("gamma_1", block.ls1), ("gamma_2", block.ls2)):
        if isinstance(scale, layers.LayerScale):
            setattr(shell, name, scale.gamma)
    old, parts = shell.attn, None
    if old.qkv is None:
        old.q_proj, old.k_proj, old.v_proj = parts = parted(attn.qkv, attn.split)
    elif getattr(old, "q_bias", None) is not None:
        query, key, value = (part.detach().clone() for part in torch.split(attn.qkv.bias, attn.split))
        trained = attn.qkv.bias.requires_grad
        old.qkv = linear_of(cast(nn.Parameter, attn.qkv.weight), None, attn.training)
        old.q_bias, old.v_bias, old.k_bias = nn.Parameter(query, trained), nn.Parameter(value, trained), key
    else:
        old.qkv = attn.qkv
    if parts is not None and isinstance(old, EvaAttention) and not _has_values(parts[1].bias):
        parts[1].bias = None  # type: ignore[assignment]  # timm's keys have none
    old.proj, old.attn_drop, old.proj_drop = attn.proj, attn.attn_drop, attn.proj_drop
    if hasattr(old, "q_norm"):
        old.q_norm, old.k_norm = attn.q_norm, attn.k_norm
    if attn.position is not None:
        old.relative_position_bias_table, old.relative_position_index = attn.position.table, attn.position.index
    if isinstance(shell.mlp, layers.SwiGLU):
        shell.mlp.fc1_g, shell.mlp.fc1_x = parted(mlp.fc1, [mlp.neurons, mlp.neurons])
    else:
        shell.mlp.fc1 = mlp.fc1
    shell.mlp.act, shell.mlp.drop1, shell.mlp.fc2, shell.mlp.drop2 = mlp.act, mlp.drop1, mlp.fc2, mlp.drop2
    return cast(nn.Module, shell.train(block.training))


def _has_values(bias: Tensor | None) -> bool:
    return bias is not None and not bias.is_meta and bool(bias.any())
