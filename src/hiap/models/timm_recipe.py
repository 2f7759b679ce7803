"""Recipes of timm's `VisionTransformer`: what config.json says of one, and the model that is built of it.

A recipe comes from a file, so that every value of it is checked before anything is built.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeAlias

import timm
import timm.layers as layers
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from timm.models.vitamin import GeGluMlp
from torch import nn

from hiap.errors import CheckpointError
from hiap.models.family import Recipe
from hiap.nn import compact

__all__ = [
    "ACTIVATIONS",
    "DEPTH_LIMIT",
    "NORMS",
    "POOLS",
    "USAGE",
    "activation_name",
    "build_vit",
    "check_arguments",
    "check_together",
    "describe_drop_path",
    "describe_vit",
    "is_count",
    "is_flag",
    "is_number",
    "is_one_of",
    "is_rate",
    "is_size",
    "mlp_ratio_of",
    "norm_name",
    "set_drop_path",
]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any

_CLASSES = {cls.__name__: cls for cls in (VisionTransformer, VisionTransformerDistilled)}
NORMS = {
    "LayerNorm": layers.LayerNorm,
    "LayerNormFp32": layers.LayerNormFp32,
    "RmsNorm": layers.RmsNorm,
    "RmsNormFp32": layers.RmsNormFp32,
    "torch.LayerNorm": nn.LayerNorm,
}
NORMS |= {name: getattr(layers, name) for name in ("SimpleNorm", "SimpleNormFp32") if hasattr(layers, name)}
ACTIVATIONS = {
    "GELU": nn.GELU,
    "GELU.tanh": functools.partial(nn.GELU, approximate="tanh"),
    "GELUTanh": layers.GELUTanh,
    "QuickGELU": layers.QuickGELU,
    "ReLU": nn.ReLU,
    "SiLU": nn.SiLU,
    "timm.GELU": layers.GELU,
}
ACTIVATIONS |= {
    cls.__name__: cls
    for cls in (
        *(nn.CELU, nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Identity, nn.LeakyReLU),
        *(nn.Mish, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.Tanh),
    )
}
ACTIVATIONS |= {f"timm.{name}": layers.get_act_layer(name) for name in ("hard_mish", "prelu", "sigmoid", "tanh")}

POOLS = ("", "avg", "avgmax", "max", "token", "map", "prr")
DEPTH_LIMIT = 1_000  # blocks, so that a wrong number does not build for hours
_SIZE_LIMIT = 1 << 24  # every other count


def mlp_ratio_of(neurons: int, dim: int) -> float:
    """The `mlp_ratio` for which timm's `int(dim * ratio)` gives `neurons`."""
    return (neurons + 0.5) / dim


def describe_vit(model: ViT, shape: tuple[int, int, int], origin: Recipe | None) -> Recipe:
    """The recipe of a model for images of this shape (`Family.describe`)."""
    if type(model).__name__ not in _CLASSES or type(model) is not _CLASSES[type(model).__name__]:
        raise CheckpointError(
            f"{type(model).__name__} cannot be rebuilt from a recipe: expected one of {', '.join(_CLASSES)}"
        )
    known = {"norm_layer": "LayerNorm", "norm_eps": 1e-6, **_NO_BRANCH, **(origin or {}).get("arguments", {})}
    pool, embed_norm = model.attn_pool, getattr(model.patch_embed, "norm", nn.Identity())
    norm_after_pool = not isinstance(model.fc_norm, nn.Identity)
    arguments = {
        "img_size": list(shape[1:]),
        "patch_size": list(model.patch_embed.patch_size),
        "in_chans": shape[0],
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        **{name: known[name] for name in (*_NO_BRANCH, *({"mlp_layer"} & known.keys()))},
        **_describe_branches(model),
        "class_token": model.has_class_token,
        "pos_embed": "none" if model.pos_embed is None else "learn",
        "no_embed_class": model.no_embed_class,
        "reg_tokens": model.num_reg_tokens,
        "pre_norm": not isinstance(model.norm_pre, nn.Identity),
        "final_norm": norm_after_pool or not isinstance(model.norm, nn.Identity),
        "fc_norm": norm_after_pool,
        "pool_include_prefix": model.pool_include_prefix,
        "dynamic_img_size": model.dynamic_img_size,
        "dynamic_img_pad": model.patch_embed.dynamic_img_pad,
        "drop_rate": model.head_drop.p,
        "pos_drop_rate": model.pos_drop.p,
        "patch_drop_rate": getattr(model.patch_drop, "prob", 0.0),
        "embed_norm": not isinstance(embed_norm, nn.Identity),
    }
    kinds, outside = tuple(NORMS.values()), set(model.patch_embed.modules())
    norm: Any = next((m for m in model.modules() if isinstance(m, kinds) and m not in outside), None)
    arguments["norm_layer"] = norm_name(norm) if norm is not None else known["norm_layer"]
    arguments["norm_eps"] = norm.eps if norm is not None else known["norm_eps"]
    if arguments["embed_norm"]:
        arguments |= {"embed_norm_layer": norm_name(embed_norm), "embed_norm_eps": embed_norm.eps}
    if pool is not None:
        arguments["num_heads"] = pool.num_heads
    if isinstance(pool, layers.AttentionPoolLatent) and pool.mlp is not None:
        arguments["mlp_ratio"] = mlp_ratio_of(pool.mlp.fc1.out_features, model.embed_dim)
    recipe = {"class": type(model).__name__, "arguments": arguments, "drop_path": describe_drop_path(model, origin)}
    return recipe | {"stem": _stem_name(model, origin)} if type(model.patch_embed) is layers.HybridEmbed else recipe


def _stem_name(model: ViT, origin: Recipe | None) -> str:
    """The name of a model of timm that has the same hybrid stem: no recipe expresses a convolutional network."""
    cfg: Any = getattr(model, "pretrained_cfg", None) or {}
    own = cfg.get("architecture") if isinstance(cfg, dict) else getattr(cfg, "architecture", None)
    name = (origin or {}).get("stem") or own
    if not isinstance(name, str) or not timm.is_model(name):
        raise CheckpointError(f"the stem is a {type(model.patch_embed).__name__} of no model that timm knows by name")
    return name


def describe_drop_path(model: ViT, origin: Recipe | None) -> list[list[float]]:
    """The rates of stochastic depth, a pair for each block; those of branches that are gone come from the origin."""
    before = (origin or {}).get("drop_path", [[0.0, 0.0]] * len(model.blocks))
    return [
        [
            getattr(drop, "drop_prob", 0.0) if branch is not None else rate
            for branch, drop, rate in zip(
                (block.attn, block.mlp), (block.drop_path1, block.drop_path2), rates, strict=True
            )
        ]
        for block, rates in zip(model.blocks, before, strict=True)
    ]


# Arguments that only branches show, as they are where there is no branch and nothing else is known.
_NO_BRANCH = {
    "num_heads": 1,
    "mlp_ratio": 4.0,
    "qkv_bias": False,
    "qk_norm": False,
    "proj_bias": False,
    "init_values": None,
    "proj_drop_rate": 0.0,
    "attn_drop_rate": 0.0,
    "act_layer": "GELU",
}


def _describe_branches(model: ViT) -> dict[str, Any]:
    """What the branches that are left tell of the arguments."""
    found: dict[str, Any] = {}
    attn = next((block.attn for block in model.blocks if hasattr(block.attn, "qkv")), None)
    block = next((block for block in model.blocks if hasattr(block.mlp, "act")), None)
    constants = [m for m in model.modules() if isinstance(m, compact.Constant)]
    if constants:
        found |= {"proj_bias": True, "proj_drop_rate": constants[0].drop.p}
    if attn is not None:
        found |= {
            "num_heads": model.embed_dim // attn.head_dim,  # head_dim is the dense one, the origin of the softmax scale
            "qkv_bias": attn.qkv.bias is not None,
            "qk_norm": not isinstance(attn.q_norm, nn.Identity),
            "proj_bias": attn.proj.bias is not None,
            "attn_drop_rate": attn.attn_drop.p,
            "proj_drop_rate": attn.proj_drop.p,
        }
    if block is not None:
        mlp = block.mlp
        last = mlp.w2 if isinstance(mlp, GeGluMlp) else mlp.fc2
        found |= {
            "proj_bias": last.bias is not None,
            "proj_drop_rate": getattr(getattr(mlp, "drop1", None), "p", 0.0),
            "act_layer": activation_name(mlp.act),
        }
        if isinstance(mlp, GeGluMlp) or isinstance(block.norm2, nn.Sequential):
            found["mlp_layer"] = "geglu"
        elif hasattr(mlp, "gate_last"):
            found["mlp_layer"] = "gate_last" if mlp.gate_last else "gate_first"
        if not isinstance(mlp, compact.Mlp):  # only the dense width is an argument
            hidden = last.in_features if isinstance(mlp, GeGluMlp) else mlp.fc1.out_features
            found["mlp_ratio"] = mlp_ratio_of(hidden, model.embed_dim)
    if any(isinstance(m, layers.LayerScale) for m in model.modules()):
        found["init_values"] = 1e-5
    return found


def build_vit(recipe: Recipe) -> ViT:
    """The model of a recipe, on the meta device (`Family.build`)."""
    _check_recipe(recipe)
    arguments = dict(recipe["arguments"])
    norm = functools.partial(NORMS[arguments["norm_layer"]], eps=arguments.pop("norm_eps"))
    arguments["norm_layer"] = norm
    embed = NORMS.get(arguments.pop("embed_norm_layer", None), norm)
    embed = functools.partial(embed, eps=arguments.pop("embed_norm_eps", norm.keywords["eps"]))
    arguments["embed_norm_layer"] = embed if arguments.pop("embed_norm") else None
    arguments["act_layer"] = ACTIVATIONS[arguments["act_layer"]]
    if "mlp_layer" in arguments:
        arguments["mlp_layer"] = _GATED[arguments["mlp_layer"]]
    for name in ("img_size", "patch_size"):
        arguments[name] = tuple(arguments[name])
    if recipe["class"] == VisionTransformer.__name__:
        arguments["weight_init"] = "skip"  # most of the time it takes, and there is nothing to initialise
    with torch.device("meta"):
        if "stem" in recipe:
            like = {name: arguments[name] for name in ("img_size", "patch_size", "in_chans", "embed_dim", "num_heads")}
            stem = timm.create_model(recipe["stem"], **like, depth=1).patch_embed
            arguments["embed_layer"] = lambda **given: stem
        model: ViT = _CLASSES[recipe["class"]](**arguments)
    set_drop_path(model, recipe)
    return model


def set_drop_path(model: ViT, recipe: Recipe) -> None:
    """Give the blocks of a model the stochastic depth of a recipe."""
    for block, (first, second) in zip(model.blocks, recipe["drop_path"], strict=True):
        block.drop_path1 = layers.DropPath(first) if first else nn.Identity()
        block.drop_path2 = layers.DropPath(second) if second else nn.Identity()


def is_count(value: Any, least: int = 1, most: int = _SIZE_LIMIT) -> bool:
    return type(value) is int and least <= value <= most


def is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


def is_size(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(is_count(side) for side in value)


def is_rate(value: Any) -> bool:
    return is_number(value, 1.0)


def is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def is_one_of(names: Iterable[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


_GATED = {
    "gate_first": functools.partial(layers.GluMlp, gate_last=False),
    "gate_last": layers.GluMlp,
    "geglu": GeGluMlp,
}
_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("img_size", "patch_size"), is_size),
    **dict.fromkeys(("in_chans", "embed_dim", "num_heads"), is_count),
    **dict.fromkeys(("num_classes", "reg_tokens"), functools.partial(is_count, least=0)),
    **dict.fromkeys(
        (
            *("qkv_bias", "qk_norm", "proj_bias", "class_token", "no_embed_class", "pre_norm", "final_norm"),
            *("fc_norm", "pool_include_prefix", "dynamic_img_size", "dynamic_img_pad", "embed_norm"),
        ),
        is_flag,
    ),
    **dict.fromkeys(
        ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"),
        is_rate,
    ),
    **dict.fromkeys(("norm_eps", "embed_norm_eps"), functools.partial(is_number, most=1e9)),
    **dict.fromkeys(("norm_layer", "embed_norm_layer"), is_one_of(NORMS)),
    "depth": functools.partial(is_count, most=DEPTH_LIMIT),
    "global_pool": is_one_of(POOLS),
    "mlp_ratio": functools.partial(is_number, most=_SIZE_LIMIT),
    "init_values": lambda value: value is None or is_number(value, 1e9),
    "pos_embed": is_one_of(("", "none", "learn")),
    "act_layer": is_one_of(ACTIVATIONS),
    "mlp_layer": is_one_of(_GATED),
}
_OPTIONAL = {"embed_norm_layer", "embed_norm_eps", "mlp_layer"}


def _check_recipe(recipe: Any) -> None:
    """Refuse what no model has before anything of that size is built."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("arguments"), dict):
        raise CheckpointError("the skeleton must be an object with 'class', 'arguments' and 'drop_path'")
    arguments = recipe["arguments"]
    if not is_one_of(_CLASSES)(recipe.get("class")):
        raise CheckpointError(f"the class of the skeleton must be one of {', '.join(_CLASSES)}")
    check_arguments(arguments, _ARGUMENTS, _OPTIONAL)
    if "stem" in recipe and not (isinstance(recipe["stem"], str) and timm.is_model(recipe["stem"])):
        raise CheckpointError(f"the skeleton has the stem of {str(recipe['stem'])[:40]!r}, which timm does not know")
    check_together(recipe)


def check_arguments(
    arguments: dict[str, Any], fits: dict[str, Callable[[Any], bool]], optional: Collection[str] = ()
) -> None:
    """Raise a CheckpointError for an argument that is unknown, missing, or has a value that no model has."""
    odd = sorted(set(arguments) ^ (set(fits) - (set(optional) - set(arguments))))
    if odd:
        raise CheckpointError(
            f"the skeleton {'has an unknown' if odd[0] in arguments else 'lacks the'} argument {odd[0]}"
        )
    for name, value in arguments.items():
        if not fits[name](value):
            raise CheckpointError(f"the skeleton has {name} {str(value)[:40]!r}, which no model has")


def check_together(recipe: dict[str, Any]) -> None:
    """Raise a CheckpointError where checked arguments do not go together, or with the rates of stochastic depth."""
    arguments = recipe["arguments"]
    if arguments["embed_dim"] % arguments["num_heads"]:
        raise CheckpointError(
            f"the skeleton has {arguments['num_heads']} heads, which do not divide the width {arguments['embed_dim']}"
        )
    if arguments["global_pool"] == "token" and not arguments["class_token"]:
        raise CheckpointError("the skeleton pools the class token but has none")
    rates: Any = recipe.get("drop_path")
    pairs = isinstance(rates, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in rates)
    if not pairs or len(rates) != arguments["depth"] or not all(is_rate(rate) for pair in rates for rate in pair):
        raise CheckpointError(f"drop_path must be {arguments['depth']} pairs of rates")


def norm_name(module: nn.Module) -> str:
    """The name of a norm in a recipe."""
    for name, cls in NORMS.items():
        if type(module) is cls:
            return name
    raise CheckpointError(f"the norm {type(module).__name__} has no name in a recipe; known: {', '.join(NORMS)}")


def activation_name(module: nn.Module) -> str:
    """The name of an activation in a recipe."""
    for name, make in ACTIVATIONS.items():
        if type(module) is type(make()) and str(module) == str(make()):
            return name
    raise CheckpointError(f"the activation {module} has no name in a recipe; known: {', '.join(ACTIVATIONS)}")


def _is_list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(one) in kinds for one in value)


# What timm and hiap read of a pretrained_cfg.
USAGE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        ("input_size", "test_input_size", "min_input_size"),
        lambda value: _is_list(value, int) and len(value) == 3 and min(value) > 0,
    ),
    **dict.fromkeys(("mean", "std"), lambda value: _is_list(value, int, float) and len(value) > 0),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), lambda value: type(value) in (int, float) and value > 0),
    **dict.fromkeys(("interpolation", "crop_mode", "architecture", "tag"), lambda value: isinstance(value, str)),
    "num_classes": lambda value: type(value) is int and value >= 0,
    "fixed_input_size": lambda value: isinstance(value, bool),
    "label_names": lambda value: _is_list(value, str),
}
