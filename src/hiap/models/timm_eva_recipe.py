"""Recipes of timm's `Eva`: what config.json says of one, and the model that is built of it.

A compact model has our blocks whatever attention and MLP the dense one had. The recipe therefore always builds the
simplest of timm's variants that converts to the same blocks: one `qkv` with a bias for all three, packed gated MLPs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import timm.layers as layers
import torch
from timm.models.eva import Eva
from torch import nn

from hiap.errors import CheckpointError
from hiap.models.family import Recipe
from hiap.models.timm_recipe import (
    ACTIVATIONS,
    DEPTH_LIMIT,
    NORMS,
    POOLS,
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
from hiap.nn.compact import Attention, Constant, Mlp, is_glu

__all__ = ["build_eva", "describe_eva"]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any

_ROPES = {
    "RotaryEmbeddingCat": "cat",
    "RotaryEmbeddingMixed": "mixed",
    "RotaryEmbeddingDinoV3": "dinov3",
    "RotaryEmbeddingMRope": "mrope",
}
_COORDS = ("shift_coords", "jitter_coords", "rescale_coords")  # how some change the positions in training

# Arguments that only branches show, as they are where there is no branch and nothing else is known.
_NO_BRANCH: dict[str, Any] = {
    "num_heads": 1,
    "mlp_ratio": 4.0,
    "qkv_bias": False,
    "qk_norm": False,
    "swiglu_mlp": False,
    "init_values": None,
    "attn_only_layer_scale": False,
    "proj_drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "act_layer": "GELU",
}


def describe_eva(model: ViT, size: tuple[int, int], origin: Recipe | None) -> Recipe:
    """The recipe of a model for images of this size (`Family.describe`)."""
    if type(model) is not Eva:
        raise CheckpointError(f"{type(model).__name__} cannot be rebuilt from a recipe: expected Eva")
    known = {"norm_layer": "LayerNorm", "norm_eps": 1e-6, **_NO_BRANCH, **(origin or {}).get("arguments", {})}
    pool = model.attn_pool
    norm: Any = next((m for m in model.modules() if isinstance(m, tuple(NORMS.values()))), None)
    arguments = {
        "img_size": list(size),
        "patch_size": list(model.patch_embed.patch_size),
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        **{name: known[name] for name in _NO_BRANCH},
        **_describe_branches(model),
        "class_token": model.cls_token is not None,
        "num_reg_tokens": 0 if model.reg_token is None else model.reg_token.shape[1],
        "no_embed_class": model.no_embed_class,
        "use_abs_pos_emb": model.pos_embed is not None,
        "use_pre_transformer_norm": not isinstance(model.norm_pre, nn.Identity),
        "use_post_transformer_norm": not isinstance(model.norm, nn.Identity),
        "use_fc_norm": not isinstance(model.fc_norm, nn.Identity),
        "attn_pool_num_heads": None if pool is None else pool.num_heads,
        "attn_pool_mlp_ratio": None if pool is None else mlp_ratio_of(pool.mlp.fc1.out_features, model.embed_dim),
        "dynamic_img_size": model.dynamic_img_size,
        "dynamic_img_pad": model.patch_embed.dynamic_img_pad,
        "drop_rate": model.head_drop.p,
        "pos_drop_rate": model.pos_drop.p,
        "patch_drop_rate": getattr(model.patch_drop, "prob", 0.0),
        "norm_layer": known["norm_layer"] if norm is None else norm_name(norm),
        "norm_eps": known["norm_eps"] if norm is None else norm.eps,
    }
    rope = None if model.rope is None else _describe_rope(model)
    return {"class": "Eva", "arguments": arguments, "rope": rope, "drop_path": describe_drop_path(model, origin)}


def _describe_branches(model: ViT) -> dict[str, Any]:
    """What the branches that are left tell of the arguments."""
    found: dict[str, Any] = {}
    attn = next((block.attn for block in model.blocks if hasattr(block.attn, "head_dim")), None)
    block = next((block for block in model.blocks if hasattr(block.mlp, "fc2")), None)
    constants = [m for m in model.modules() if isinstance(m, Constant)]
    if constants:
        found["proj_drop_rate"] = constants[0].drop.p
    if attn is not None:
        qkv: Any = attn.qkv if attn.qkv is not None else attn.q_proj
        found |= {
            "num_heads": model.embed_dim // attn.head_dim,  # head_dim is the dense one, the origin of the softmax scale
            "qkv_bias": qkv.bias is not None or getattr(attn, "q_bias", None) is not None,
            "qk_norm": not isinstance(attn.q_norm, nn.Identity),
            "attn_drop_rate": attn.attn_drop.p,
            "proj_drop_rate": attn.proj_drop.p,
        }
    if block is not None:
        glu = is_glu(block) or isinstance(block.mlp, layers.SwiGLU)
        found |= {"proj_drop_rate": block.mlp.drop1.p, "swiglu_mlp": glu, "act_layer": activation_name(block.mlp.act)}
        if not isinstance(block.mlp, Mlp):  # only the dense width is an argument
            found["mlp_ratio"] = mlp_ratio_of(block.mlp.fc2.in_features, model.embed_dim)
    scaled = [(_scaled(b, "1"), _scaled(b, "2")) for b in model.blocks if b.attn is not None and b.mlp is not None]
    if any(first for first, _ in scaled):
        found |= {"init_values": 1e-5, "attn_only_layer_scale": not any(second for _, second in scaled)}
    return found


def _scaled(block: ViT, which: str) -> bool:
    return getattr(block, f"gamma_{which}", None) is not None or hasattr(getattr(block, f"ls{which}", None), "gamma")


def _describe_rope(model: ViT) -> dict[str, Any]:
    rope, kind = model.rope, _ROPES.get(type(model.rope).__name__)
    if kind is None:
        raise CheckpointError(
            f"the positions {type(rope).__name__} have no name in a recipe; known: {', '.join(_ROPES)}"
        )
    found = {"type": kind, "temperature": rope.temperature, "grid_indexing": rope.grid_indexing}
    halves = [_halves(block.attn) for block in model.blocks if hasattr(block.attn, "head_dim")]
    found["rotate_half"] = halves[0] if halves else kind in ("dinov3", "mrope")
    if kind in ("cat", "dinov3"):
        found["grid_offset"] = rope.grid_offset
    if kind == "cat" and rope.ref_feat_shape is not None:
        found["ref_feat_shape"] = list(rope.ref_feat_shape)
    if kind == "mrope":
        found["mrope_section"] = list(rope.mrope_section)
    return found | {name: value for name in _COORDS if (value := getattr(rope, name, None)) is not None}


def _halves(attn: ViT) -> bool:
    """Whether positions turn the dims i and i + D/2 together, not neighbours."""
    if isinstance(attn, Attention):
        return attn.rotary is not None and attn.rotary.layout == "halves"
    return bool(getattr(attn, "rotate_half", False))


def build_eva(recipe: Recipe) -> nn.Module:
    """The model of a recipe, on the meta device but for its rotary positions (`Family.build`)."""
    _check_recipe(recipe)
    arguments, rope = dict(recipe["arguments"]), recipe["rope"]
    act = arguments.pop("act_layer")
    arguments["norm_layer"] = functools.partial(NORMS[arguments["norm_layer"]], eps=arguments.pop("norm_eps"))
    for name in ("img_size", "patch_size"):
        arguments[name] = tuple(arguments[name])
    for name in ("qk_norm", "attn_only_layer_scale"):
        if not arguments[name]:  # which older versions of timm do not know
            del arguments[name]
    if rope is not None:
        arguments |= {
            f"rope_{name}": tuple(value) if isinstance(value, list) else value for name, value in rope.items()
        }
        arguments["ref_feat_shape"] = arguments.pop("rope_ref_feat_shape", None)
    with torch.device("meta"):
        model: ViT = Eva(**arguments, attn_type="rope", use_rot_pos_emb=rope is not None)
        for block in model.blocks:
            block.mlp.act = ACTIVATIONS[act]()
    if model.rope is not None:  # its buffers are in no file
        with torch.device("cpu"):
            model.rope.to_empty(device="cpu").init_non_persistent_buffers()
    set_drop_path(model, recipe)
    return model  # type: ignore[no-any-return]


_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("img_size", "patch_size"), is_size),
    **dict.fromkeys(("in_chans", "embed_dim", "num_heads"), is_count),
    **dict.fromkeys(("num_classes", "num_reg_tokens"), functools.partial(is_count, least=0)),
    **dict.fromkeys(
        (
            *("qkv_bias", "qk_norm", "swiglu_mlp", "attn_only_layer_scale", "class_token", "no_embed_class"),
            *("use_abs_pos_emb", "use_pre_transformer_norm", "use_post_transformer_norm", "use_fc_norm"),
            *("dynamic_img_size", "dynamic_img_pad"),
        ),
        is_flag,
    ),
    **dict.fromkeys(("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"), is_rate),
    "depth": functools.partial(is_count, most=DEPTH_LIMIT),
    "global_pool": is_one_of(POOLS),
    "mlp_ratio": functools.partial(is_number, most=1e6),
    "init_values": lambda value: value is None or is_number(value, 1e9),
    "attn_pool_num_heads": lambda value: value is None or is_count(value),
    "attn_pool_mlp_ratio": lambda value: value is None or is_number(value, 1e6),
    "act_layer": is_one_of(ACTIVATIONS),
    "norm_layer": is_one_of(NORMS),
    "norm_eps": functools.partial(is_number, most=1e9),
}
_ROPE: dict[str, Callable[[Any], bool]] = {
    "type": is_one_of(_ROPES.values()),
    "temperature": functools.partial(is_number, most=1e9),
    "grid_indexing": is_one_of(("ij", "xy")),
    "rotate_half": is_flag,
    "grid_offset": functools.partial(is_number, most=1e6),
    "ref_feat_shape": is_size,
    "mrope_section": lambda value: (
        isinstance(value, list) and len(value) == 3 and all(is_count(one, 0) for one in value)
    ),
    **dict.fromkeys(_COORDS, functools.partial(is_number, most=1e6)),
}


def _check_recipe(recipe: Any) -> None:
    """Refuse what no model has before anything of that size is built."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("arguments"), dict) or recipe.get("class") != "Eva":
        raise CheckpointError(
            "the skeleton must be an object with the class 'Eva', 'arguments', 'rope' and 'drop_path'"
        )
    check_arguments(recipe["arguments"], _ARGUMENTS)
    rope: Any = recipe.get("rope")
    if rope is not None:
        if not isinstance(rope, dict):
            raise CheckpointError("the rope of the skeleton must be an object, or null")
        check_arguments(rope, _ROPE, optional=set(_ROPE) - {"type", "temperature", "grid_indexing", "rotate_half"})
    check_together(recipe)
