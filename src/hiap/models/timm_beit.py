"""timm's `Beit`: BEiT and BEiT v2, whose heads have relative positions of their own.

The value that a distance adds to a score belongs to one head, so that it goes with the head. Like `Eva`'s, its
attention reads the weight of `qkv` past its forward: blocks are converted before they are gated, and back after.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import timm.layers as layers
import torch
from timm.models import beit as library
from torch import Tensor, nn

from hiap.errors import CheckpointError
from hiap.models.family import Recipe, Site, compact_widths, refuse
from hiap.models.timm import TimmFamily, check_units
from hiap.models.timm_eva import ShellBlock, block_parts, restored
from hiap.models.timm_recipe import (
    ACTIVATIONS,
    DEPTH_LIMIT,
    NORMS,
    activation_name,
    check_arguments,
    check_together,
    describe_drop_path,
    is_count,
    is_flag,
    is_number,
    is_one_of,
    is_rate,
    is_size,
    mlp_ratio_of,
    norm_name,
    set_drop_path,
)
from hiap.nn.compact import Attention, Block, Constant, Mlp, Widths, is_glu
from hiap.nn.position_bias import PositionBias

__all__ = ["TIMM_BEIT", "BeitBlock", "BeitFamily"]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any


class BeitBlock(ShellBlock):
    """A block that `Beit` can call."""

    def forward(self, x: Tensor, shared_rel_pos_bias: None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


class BeitFamily(TimmFamily):
    """timm's `Beit` with relative positions in each block, or without any."""

    name = "timm_beit"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, library.Beit)

    def sites(self, model: ViT) -> list[Site]:
        self._check_around(model)
        if model.rel_pos_bias is not None:
            reason = "all blocks share its relative positions, which cannot be removed with a head of one block"
            refuse("rel_pos_bias", model.rel_pos_bias, reason, "relative positions in each block")
        return [self._beit_site(f"blocks.{i}", block, model.embed_dim) for i, block in enumerate(model.blocks)]

    def _beit_site(self, name: str, block: ViT, dim: int) -> Site:
        widths = compact_widths(block) if isinstance(block, Block) else _widths(name, block)
        return Site(self, name, block, dim, widths, glu=is_glu(block) or isinstance(block.mlp, layers.SwiGLU))

    def to_block(self, block: ViT) -> Block:
        attn, width = block.attn, _head_dim(block.attn)
        position = None
        if attn.relative_position_bias_table is not None:
            table = attn.relative_position_bias_table
            with torch.device("meta"):
                position = PositionBias(table.shape[0], table.shape[1], attn.relative_position_index)
            position.table = table
        return BeitBlock(*block_parts(block, width, None, position)).of(block)

    def from_block(self, block: Block) -> nn.Module:
        return restored(block) if isinstance(block, BeitBlock) and block.shell else block

    def _placed(self, model: ViT, patches: Tensor) -> Tensor:
        x = torch.cat((model.cls_token.expand(len(patches), -1, -1), patches), dim=1)
        return cast(Tensor, model.pos_drop(x if model.pos_embed is None else x + model.pos_embed))

    def embed(self, model: ViT, images: Tensor) -> Tensor:
        return self._placed(model, model.patch_embed(images))

    def without_decay(self, model: ViT) -> set[str]:
        tables = {name for name, _ in model.named_parameters() if name.endswith("position.table")}
        return set(model.no_weight_decay()) | tables

    def build_dense(self, recipe: Recipe, widths: Sequence[Widths]) -> nn.Module:
        return self.build(recipe)

    def describe(self, model: ViT, origin: Recipe | None = None) -> Recipe:
        if type(model) is not library.Beit:
            raise CheckpointError(f"{type(model).__name__} cannot be rebuilt from a recipe: expected Beit")
        return _describe(model, self.input_shape(model), origin)

    def build(self, recipe: Recipe) -> nn.Module:
        return _build(recipe)


TIMM_BEIT = BeitFamily()


def _widths(name: str, block: ViT) -> Widths:
    if type(block) is not library.Block or type(block.attn) is not library.Attention:
        refuse(name, block, "it is not timm's block of BEiT", "rules to gate and cut this block")
    mlp, width = block.mlp, _head_dim(block.attn)
    if type(mlp) not in (layers.Mlp, layers.SwiGLU):
        refuse(f"{name}.mlp", mlp, "it is not timm's Mlp or SwiGLU", "rules to cut this MLP")
    inside = ["mlp.fc1_g", "mlp.fc1_x"] if isinstance(mlp, layers.SwiGLU) else ["mlp.fc1"]
    check_units(name, block, ["attn.qkv", "attn.proj", *inside, "mlp.fc2"])
    return Widths(block.attn.num_heads, width, width, mlp.fc2.in_features)


def _head_dim(attn: ViT) -> int:
    return int(attn.proj.in_features // attn.num_heads)


# Arguments that only branches show, as they are where there is no branch and nothing else is known.
_NO_BRANCH: dict[str, Any] = {
    "num_heads": 1,
    "mlp_ratio": 4.0,
    "qkv_bias": False,
    "swiglu_mlp": False,
    "init_values": None,
    "proj_drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "act_layer": "GELU",
    "use_rel_pos_bias": False,
}


def _describe(model: ViT, shape: tuple[int, int, int], origin: Recipe | None) -> Recipe:
    known = {"norm_layer": "LayerNorm", "norm_eps": 1e-6, **_NO_BRANCH, **(origin or {}).get("arguments", {})}
    norm: Any = next((m for m in model.modules() if isinstance(m, tuple(NORMS.values()))), None)
    arguments = {
        "img_size": list(shape[1:]),
        "patch_size": list(model.patch_embed.patch_size),
        "in_chans": shape[0],
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        **{name: known[name] for name in _NO_BRANCH},
        **_describe_branches(model),
        "use_abs_pos_emb": model.pos_embed is not None,
        "use_fc_norm": not isinstance(model.fc_norm, nn.Identity),
        "drop_rate": model.head_drop.p,
        "pos_drop_rate": model.pos_drop.p,
        "norm_layer": known["norm_layer"] if norm is None else norm_name(norm),
        "norm_eps": known["norm_eps"] if norm is None else norm.eps,
    }
    return {"class": "Beit", "arguments": arguments, "drop_path": describe_drop_path(model, origin)}


def _describe_branches(model: ViT) -> dict[str, Any]:
    """What the branches that are left tell of the arguments."""
    found: dict[str, Any] = {}
    attn = next((block.attn for block in model.blocks if hasattr(block.attn, "qkv")), None)
    block = next((block for block in model.blocks if hasattr(block.mlp, "fc2")), None)
    constants = [m for m in model.modules() if isinstance(m, Constant)]
    if constants:
        found["proj_drop_rate"] = constants[0].drop.p
    if attn is not None:
        ours = isinstance(attn, Attention)
        found |= {
            "num_heads": model.embed_dim // (attn.head_dim if ours else _head_dim(attn)),
            "qkv_bias": attn.qkv.bias is not None or getattr(attn, "q_bias", None) is not None,
            "attn_drop_rate": attn.attn_drop.p,
            "proj_drop_rate": attn.proj_drop.p,
            "use_rel_pos_bias": (attn.position if ours else attn.relative_position_bias_table) is not None,
        }
    if block is not None:
        glu = is_glu(block) or isinstance(block.mlp, layers.SwiGLU)
        found |= {"proj_drop_rate": block.mlp.drop1.p, "swiglu_mlp": glu, "act_layer": activation_name(block.mlp.act)}
        if not isinstance(block.mlp, Mlp):  # only the dense width is an argument
            found["mlp_ratio"] = mlp_ratio_of(block.mlp.fc2.in_features, model.embed_dim)
    if any(name.endswith((".gamma", "gamma_1", "gamma_2")) for name, _ in model.named_parameters()):
        found["init_values"] = 1e-5
    return found


def _build(recipe: Recipe) -> nn.Module:
    _check_recipe(recipe)
    arguments = dict(recipe["arguments"])
    act = arguments.pop("act_layer")
    arguments["norm_layer"] = functools.partial(NORMS[arguments["norm_layer"]], eps=arguments.pop("norm_eps"))
    for name in ("img_size", "patch_size"):
        arguments[name] = tuple(arguments[name])
    if arguments["use_fc_norm"] == (arguments["global_pool"] == "avg"):  # which older versions of timm do not ask
        del arguments["use_fc_norm"]
    with torch.device("meta"):
        model: ViT = library.Beit(**arguments)
    for block in model.blocks:
        block.mlp.act = ACTIVATIONS[act]()
        for name, buffer in list(block.attn.named_buffers()):  # which are in no file
            block.attn.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
        with torch.device("cpu"):
            block.attn.init_non_persistent_buffers()
    set_drop_path(model, recipe)
    return model  # type: ignore[no-any-return]


_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("img_size", "patch_size"), is_size),
    **dict.fromkeys(("in_chans", "embed_dim", "num_heads"), is_count),
    **dict.fromkeys(("qkv_bias", "swiglu_mlp", "use_abs_pos_emb", "use_rel_pos_bias", "use_fc_norm"), is_flag),
    **dict.fromkeys(("drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate"), is_rate),
    "num_classes": functools.partial(is_count, least=0),
    "depth": functools.partial(is_count, most=DEPTH_LIMIT),
    "global_pool": is_one_of(("", "avg", "token")),
    "mlp_ratio": functools.partial(is_number, most=1e6),
    "init_values": lambda value: value is None or is_number(value, 1e9),
    "act_layer": is_one_of(ACTIVATIONS),
    "norm_layer": is_one_of(NORMS),
    "norm_eps": functools.partial(is_number, most=1e9),
}


def _check_recipe(recipe: Any) -> None:
    """Refuse what no model has before anything of that size is built."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("arguments"), dict) or recipe.get("class") != "Beit":
        raise CheckpointError("the skeleton must have the class 'Beit', 'arguments' and 'drop_path'")
    check_arguments(recipe["arguments"], _ARGUMENTS)
    check_together({**recipe, "arguments": {**recipe["arguments"], "class_token": True}})
