"""timm's `VisionTransformer`: which models qualify, what they cost, and how to rebuild one.

A model qualifies by the types of its block, attention and MLP, never by its name. Whatever could not be gated and
extracted exactly is refused here, before any work. timm's standard block has the members of our own, so that it is
gated and aligned as it is.

One file, though a long one: nothing else in the package knows a member of timm's models.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, NoReturn, TypeAlias, cast

import timm
import timm.layers as layers
import torch
from timm.data import resolve_data_config
from timm.models._features import FeatureGetterNet
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn

from hiap.errors import CheckpointError, InputError
from hiap.models.family import Family, ImageSize, Preprocessing, Recipe, Site, compact_widths, refuse
from hiap.nn import compact
from hiap.nn.compact import Widths
from hiap.nn.gates import GatedLinear
from hiap.nn.stem import Stem

__all__ = ["TIMM", "TimmFamily", "classes_in", "entry_point", "guess_weights", "preprocessing_of"]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any

_CLASSES = {cls.__name__: cls for cls in (VisionTransformer, VisionTransformerDistilled)}
_NORMS = {
    "LayerNorm": layers.LayerNorm,
    "LayerNormFp32": layers.LayerNormFp32,
    "RmsNorm": layers.RmsNorm,
    "RmsNormFp32": layers.RmsNormFp32,
    "torch.LayerNorm": nn.LayerNorm,
}
_NORMS |= {name: getattr(layers, name) for name in ("SimpleNorm", "SimpleNormFp32") if hasattr(layers, name)}
_ACTIVATIONS = {
    "GELU": nn.GELU,
    "GELU.tanh": functools.partial(nn.GELU, approximate="tanh"),
    "GELUTanh": layers.GELUTanh,
    "QuickGELU": layers.QuickGELU,
    "ReLU": nn.ReLU,
    "SiLU": nn.SiLU,
    "timm.GELU": layers.GELU,
}
_ACTIVATIONS |= {
    cls.__name__: cls
    for cls in (
        *(nn.CELU, nn.ELU, nn.Hardsigmoid, nn.Hardswish, nn.Identity, nn.LeakyReLU),
        *(nn.Mish, nn.ReLU6, nn.SELU, nn.Sigmoid, nn.Tanh),
    )
}
_ACTIVATIONS |= {f"timm.{name}": layers.get_act_layer(name) for name in ("hard_mish", "prelu", "sigmoid", "tanh")}

_POOLS = ("", "avg", "avgmax", "max", "token", "map", "prr")
_DEPTH_LIMIT = 1_000  # blocks, so that a wrong number does not build for hours
_SIZE_LIMIT = 1 << 24  # every other count


class TimmFamily(Family):
    """timm's `VisionTransformer`, with its standard block, attention and MLP."""

    name = "timm"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, VisionTransformer)

    def sites(self, model: ViT) -> list[Site]:
        if type(model.patch_embed) is not layers.PatchEmbed:
            refuse(
                "patch_embed",
                model.patch_embed,
                "only the plain patch embedding is counted and rebuilt exactly",
                "an exact count and a recipe for this stem",
            )
        if not isinstance(model.attn_pool, _pools()):
            refuse("attn_pool", model.attn_pool, "its cost is not known", "an exact MAC count for this pool")
        _classifiers(model)
        return [self._site(f"blocks.{i}", block, model.embed_dim) for i, block in enumerate(model.blocks)]

    def _site(self, name: str, block: Any, dim: int) -> Site:
        widths = compact_widths(block) if isinstance(block, compact.Block) else _widths(name, block)
        qk_norm = bool(widths.heads) and not isinstance(block.attn.q_norm, nn.Identity)
        return Site(self, name, block, dim, widths, qk_norm)

    def refuse_class(self, model: nn.Module) -> NoReturn:
        """Say why a model is not of this family."""
        reason = "it is not a timm VisionTransformer"
        if getattr(model, "rope", None) is not None or getattr(model, "rope_mixed", False):
            reason += ", and its rotary position embedding turns q/k dims in pairs"
        elif any("relpos" in type(m).__name__.lower() for m in model.modules()):
            reason += ", and its relative position bias belongs to the heads"
        refuse("the model", model, reason, "an adapter that names this family's attention and MLP layers")

    def stem(self, model: ViT) -> nn.Module:
        return cast(nn.Module, model.patch_embed)

    def input_shape(self, model: ViT, size: ImageSize = None) -> tuple[int, int, int]:
        embed, given = model.patch_embed, size is not None
        patch = embed.patch_size
        size = size if given else embed.img_size
        if size is None:
            raise InputError("the model has no fixed image size; pass img_size")
        height, width = map(int, size) if isinstance(size, Sequence) else (int(size), int(size))
        if given and not embed.dynamic_img_pad and (height % patch[0] or width % patch[1]):
            raise InputError(f"img_size {height}x{width} is not a multiple of the {patch[0]}x{patch[1]} patch")
        if height < patch[0] or width < patch[1]:
            raise InputError(f"img_size {height}x{width} is smaller than one {patch[0]}x{patch[1]} patch")
        return embed.proj.in_channels, height, width

    def tokens(self, model: ViT, size: ImageSize = None) -> int:
        rows, columns = model.patch_embed.dynamic_feat_size(self.input_shape(model, size)[1:])
        return int(rows * columns + model.num_prefix_tokens)

    def fixed_macs(self, model: ViT, size: ImageSize = None) -> int:
        n = self.tokens(model, size)
        macs = (n - model.num_prefix_tokens) * model.patch_embed.proj.weight.numel()
        pooled = 1
        if model.attn_pool is not None:
            macs += _pool_macs(model.attn_pool, n if model.pool_include_prefix else n - model.num_prefix_tokens)
        elif not model.global_pool:
            pooled = n  # the classifier runs on every token
        return int(macs + pooled * sum(linear.weight.numel() for linear in _classifiers(model)))

    def embed(self, model: ViT, images: Tensor) -> Tensor:
        return cast(Tensor, model.norm_pre(model._pos_embed(model.patch_embed(images))))

    def head(self, model: ViT, tokens: Tensor) -> Tensor:
        return cast(Tensor, model.forward_head(model.norm(tokens)))

    def outputs(self, model: ViT, images: Tensor) -> tuple[Tensor, ...]:
        features = model.forward_features(images)
        return features, model.forward_head(features)

    def fold_stem(self, model: ViT) -> nn.Module | None:
        embed = model.patch_embed
        if model.dynamic_img_size or embed.dynamic_img_pad or not isinstance(embed.norm, nn.Identity):
            return None
        proj, (rows, columns) = embed.proj, embed.grid_size
        zero = proj.weight.new_zeros(1, *((rows * columns,) if embed.flatten else (rows, columns)), model.embed_dim)
        table = model._pos_embed(zero).clone()
        if proj.bias is not None:
            table[:, model.num_prefix_tokens :] += proj.bias
        size, patch = self.input_shape(model)[1:], tuple(proj.kernel_size)
        stem = Stem(proj.weight.flatten(1), table, size, patch, model.num_prefix_tokens)
        model.patch_embed = nn.Identity()
        return stem if isinstance(model.norm_pre, nn.Identity) else nn.Sequential(stem, model.norm_pre)

    def tokens_read(self, model: ViT) -> int | None:
        return int(model.num_prefix_tokens) if model.global_pool == "token" else None

    def without_decay(self, model: ViT) -> set[str]:
        return set(model.no_weight_decay())

    def classes(self, model: ViT) -> int:
        return int(model.num_classes)

    def set_classes(self, model: ViT, classes: int) -> None:
        model.reset_classifier(classes)

    def classifier(self, model: ViT) -> list[nn.Module]:
        found = model.get_classifier()
        return list(found) if isinstance(found, tuple) else [found]

    def preprocessing(self, model: ViT) -> Preprocessing:
        return preprocessing_of(model)

    def usage(self, model: ViT) -> dict[str, Any]:
        given: Any = getattr(model, "pretrained_cfg", None)
        given = asdict(given) if is_dataclass(given) and not isinstance(given, type) else given
        # Where timm would fetch the dense weights from says nothing about this model.
        return {k: v for k, v in (given or {}).items() if k not in ("file", "source", "state_dict")}

    def set_usage(self, model: ViT, usage: Mapping[str, Any]) -> None:
        cfg = {k: tuple(v) if isinstance(v, list) else v for k, v in usage.items()}
        model.pretrained_cfg = model.default_cfg = cfg

    def check_usage(self, where: str, usage: Mapping[str, Any]) -> None:
        for name, value in usage.items():
            fits = _USAGE.get(name)
            if value is not None and fits is not None and not fits(value):
                raise CheckpointError(f"{where} has {name} {str(value)[:40]!r}, which timm cannot read")

    def saved_fields(self, model: ViT) -> dict[str, Any]:
        return {"num_features": model.num_features}

    def versions(self) -> dict[str, str]:
        return {"timm": timm.__version__}

    def build_dense(self, recipe: Recipe, widths: Sequence[Widths]) -> nn.Module:
        first = widths[0]
        plain = Widths(first.heads, first.qk_dim, first.qk_dim, first.neurons)
        if plain.heads and plain.neurons and all(one == plain for one in widths):
            ratio = _mlp_ratio(plain.neurons, recipe["arguments"]["embed_dim"])
            recipe = {**recipe, "arguments": {**recipe["arguments"], "num_heads": plain.heads, "mlp_ratio": ratio}}
        return self.build(recipe)

    def describe(self, model: ViT, origin: Recipe | None = None) -> Recipe:
        return _describe(model, origin)

    def build(self, recipe: Recipe) -> nn.Module:
        return cast(nn.Module, _build(recipe))


TIMM = TimmFamily()


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """How images are made ready for any model of timm; one value of mean and std may stand for all channels."""
    own = resolve_data_config({}, model=model)
    names = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    return Preprocessing(size=tuple(own["input_size"][1:]), **{name: own[name] for name in names})


def entry_point(
    load: Callable[[str], nn.Module],
    pretrained_cfg: Any,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    features_only: bool = False,
    out_indices: int | Sequence[int] = 3,
    **unknown: Any,
) -> nn.Module:
    """What `timm.create_model("local-dir:FOLDER")` gives back, in training mode.

    Args:
        load: reads a compact model from a folder.
        features_only: the feature maps of the last blocks or of `out_indices`, as for timm's own ViTs.
    """
    folder = (pretrained_cfg or {}).get("file") if isinstance(pretrained_cfg, dict) else None
    if folder is None:
        raise InputError("hiap_vit describes a saved model: create it with timm.create_model('local-dir:FOLDER')")
    if unknown:
        raise InputError(
            f"hiap_vit takes num_classes, img_size, features_only and out_indices; found {', '.join(sorted(unknown))}"
        )
    model: ViT = load(folder)
    if num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
        model.__dict__.pop("class_names", None)
    if img_size is not None:
        model.set_input_size(img_size)
    result: nn.Module = FeatureGetterNet(model, out_indices) if features_only else model
    return result.train()


def _widths(name: str, block: ViT) -> Widths:
    if type(block) is not Block:
        _refuse_block(name, block)
    attn, mlp = block.attn, block.mlp
    if type(attn) is not layers.Attention:
        refuse(f"{name}.attn", attn, "it is not timm's standard attention", "rules to cut this attention")
    if type(mlp) is not layers.Mlp:
        kind = (
            "a gated MLP joins its neurons in pairs" if "glu" in type(mlp).__name__.lower() else "it is not timm's Mlp"
        )
        refuse(f"{name}.mlp", mlp, kind, "rules to cut this MLP")
    if getattr(attn, "gate", None) is not None:
        refuse(f"{name}.attn.gate", attn.gate, "gated attention adds a third factor", "rules to cut the gate as well")
    between = "a norm between the units and the layer that reads them changes when a unit goes"
    for owner, member in (("attn", attn.norm), ("mlp", mlp.norm)):
        if not isinstance(member, nn.Identity):
            refuse(
                f"{name}.{owner}.norm", member, between, "a model without this norm (scale_attn_norm, scale_mlp_norm)"
            )
    for owner, parent, member in (
        ("attn", attn, "qkv"),
        ("attn", attn, "proj"),
        ("mlp", mlp, "fc1"),
        ("mlp", mlp, "fc2"),
    ):
        linear = getattr(parent, member)
        if not _is_linear(linear):
            reason = "it is not a plain nn.Linear with a weight of its own"
            refuse(f"{name}.{owner}.{member}", linear, reason, "the layer in its plain form")
    return Widths(attn.num_heads, attn.head_dim, attn.head_dim, mlp.fc1.out_features)


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer is a Linear whose weight is its parameter, not made of others (a mask, a norm of weights)."""
    return type(module) in (nn.Linear, GatedLinear) and module._parameters.get("weight") is not None


def _refuse_block(name: str, block: ViT) -> NoReturn:
    kind = type(block).__name__
    if "Parallel" in kind:
        reason = "its branches run in parallel"
    elif "Post" in kind:
        reason = "it normalises after the branch, so a closed branch is not a zero"
    else:
        reason = "it is not timm's standard pre-norm block"
    refuse(name, block, reason, "rules to gate and cut this block")


def _classifiers(model: ViT) -> list[nn.Linear]:
    """The Linears that turn features into logits."""
    linears = []
    for head in (model.head, getattr(model, "head_dist", None)):
        for module in head.modules() if head is not None else ():
            if isinstance(module, nn.Linear):
                linears.append(module)
            elif next(module.parameters(recurse=False), None) is not None and not isinstance(
                module, tuple(_NORMS.values())
            ):
                refuse("head", module, "its cost is not known", "a classifier made of Linears and norms")
    return linears


def _pools() -> tuple[type, ...]:
    prr = getattr(layers, "AttentionPoolPrr", None)  # newer timm only
    return (type(None), layers.AttentionPoolLatent) + ((prr,) if prr else ())


def _pool_macs(pool: ViT, n: int) -> int:
    if not isinstance(pool, layers.AttentionPoolLatent):
        return 2 * n * n * int(pool.out_features)  # AttentionPoolPrr: attention without projections
    latents, width = pool.latent_len, pool.num_heads * pool.head_dim
    per_latent = [m for m in (pool.q, pool.proj) if isinstance(m, nn.Linear)]
    if pool.mlp is not None:
        per_latent += [pool.mlp.fc1, pool.mlp.fc2]
    return int(
        latents * sum(m.weight.numel() for m in per_latent) + n * pool.kv.weight.numel() + 2 * latents * n * width
    )


def _mlp_ratio(neurons: int, dim: int) -> float:
    """The `mlp_ratio` for which timm's `int(dim * ratio)` gives `neurons`."""
    return (neurons + 0.5) / dim


def _describe(model: ViT, origin: Recipe | None) -> Recipe:
    if type(model).__name__ not in _CLASSES or type(model) is not _CLASSES[type(model).__name__]:
        raise CheckpointError(
            f"{type(model).__name__} cannot be rebuilt from a recipe: expected one of {', '.join(_CLASSES)}"
        )
    known = {"norm_layer": "LayerNorm", "norm_eps": 1e-6, **_NO_BRANCH, **(origin or {}).get("arguments", {})}
    pool, embed_norm = model.attn_pool, model.patch_embed.norm
    norm_after_pool = not isinstance(model.fc_norm, nn.Identity)
    arguments = {
        "img_size": list(TIMM.input_shape(model)[1:]),
        "patch_size": list(model.patch_embed.patch_size),
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        **{name: known[name] for name in _NO_BRANCH},
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
    kinds = tuple(_NORMS.values())
    norm: Any = next((m for m in model.modules() if isinstance(m, kinds) and m is not embed_norm), None)
    arguments["norm_layer"] = _norm_name(norm) if norm is not None else known["norm_layer"]
    arguments["norm_eps"] = norm.eps if norm is not None else known["norm_eps"]
    if arguments["embed_norm"]:
        arguments |= {"embed_norm_layer": _norm_name(embed_norm), "embed_norm_eps": embed_norm.eps}
    if pool is not None:
        arguments["num_heads"] = pool.num_heads
    if isinstance(pool, layers.AttentionPoolLatent) and pool.mlp is not None:
        arguments["mlp_ratio"] = _mlp_ratio(pool.mlp.fc1.out_features, model.embed_dim)
    before = (origin or {}).get("drop_path", [[0.0, 0.0]] * len(model.blocks))
    drop_path = [
        [
            getattr(drop, "drop_prob", 0.0) if branch is not None else rate
            for branch, drop, rate in zip(
                (block.attn, block.mlp), (block.drop_path1, block.drop_path2), rates, strict=True
            )
        ]
        for block, rates in zip(model.blocks, before, strict=True)
    ]
    return {"class": type(model).__name__, "arguments": arguments, "drop_path": drop_path}


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
    mlp = next((block.mlp for block in model.blocks if hasattr(block.mlp, "fc1")), None)
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
    if mlp is not None:
        found |= {
            "proj_bias": mlp.fc2.bias is not None,
            "proj_drop_rate": mlp.drop1.p,
            "act_layer": _activation_name(mlp.act),
        }
        if isinstance(mlp, layers.Mlp):  # only the dense width is an argument
            found["mlp_ratio"] = _mlp_ratio(mlp.fc1.out_features, model.embed_dim)
    if any(isinstance(m, layers.LayerScale) for m in model.modules()):
        found["init_values"] = 1e-5
    return found


def _build(recipe: Recipe) -> ViT:
    _check_recipe(recipe)
    arguments = dict(recipe["arguments"])
    norm = functools.partial(_NORMS[arguments["norm_layer"]], eps=arguments.pop("norm_eps"))
    arguments["norm_layer"] = norm
    embed = _NORMS.get(arguments.pop("embed_norm_layer", None), norm)
    embed = functools.partial(embed, eps=arguments.pop("embed_norm_eps", norm.keywords["eps"]))
    arguments["embed_norm_layer"] = embed if arguments.pop("embed_norm") else None
    arguments["act_layer"] = _ACTIVATIONS[arguments["act_layer"]]
    for name in ("img_size", "patch_size"):
        arguments[name] = tuple(arguments[name])
    if recipe["class"] == VisionTransformer.__name__:
        arguments["weight_init"] = "skip"  # most of the time it takes, and there is nothing to initialise
    with torch.device("meta"):
        model: ViT = _CLASSES[recipe["class"]](**arguments)
    for block, (first, second) in zip(model.blocks, recipe["drop_path"], strict=True):
        block.drop_path1 = layers.DropPath(first) if first else nn.Identity()
        block.drop_path2 = layers.DropPath(second) if second else nn.Identity()
    return model


def _is_count(value: Any, least: int = 1, most: int = _SIZE_LIMIT) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


def _is_size(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and all(_is_count(side) for side in value)


def _is_rate(value: Any) -> bool:
    return _is_number(value, 1.0)


def _is_one_of(names: Iterable[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


_ARGUMENTS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("img_size", "patch_size"), _is_size),
    **dict.fromkeys(("in_chans", "embed_dim", "num_heads"), _is_count),
    **dict.fromkeys(("num_classes", "reg_tokens"), functools.partial(_is_count, least=0)),
    **dict.fromkeys(
        (
            *("qkv_bias", "qk_norm", "proj_bias", "class_token", "no_embed_class", "pre_norm", "final_norm"),
            *("fc_norm", "pool_include_prefix", "dynamic_img_size", "dynamic_img_pad", "embed_norm"),
        ),
        lambda value: isinstance(value, bool),
    ),
    **dict.fromkeys(
        ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate"),
        _is_rate,
    ),
    **dict.fromkeys(("norm_eps", "embed_norm_eps"), functools.partial(_is_number, most=1e9)),
    **dict.fromkeys(("norm_layer", "embed_norm_layer"), _is_one_of(_NORMS)),
    "depth": functools.partial(_is_count, most=_DEPTH_LIMIT),
    "global_pool": _is_one_of(_POOLS),
    "mlp_ratio": functools.partial(_is_number, most=_SIZE_LIMIT),
    "init_values": lambda value: value is None or _is_number(value, 1e9),
    "pos_embed": _is_one_of(("", "none", "learn")),
    "act_layer": _is_one_of(_ACTIVATIONS),
}
_OPTIONAL = {"embed_norm_layer", "embed_norm_eps"}


def _check_recipe(recipe: Any) -> None:
    """Refuse what no model has before anything of that size is built."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("arguments"), dict):
        raise CheckpointError("the skeleton must be an object with 'class', 'arguments' and 'drop_path'")
    arguments = recipe["arguments"]
    if not _is_one_of(_CLASSES)(recipe.get("class")):
        raise CheckpointError(f"the class of the skeleton must be one of {', '.join(_CLASSES)}")
    odd = sorted(set(arguments) ^ (set(_ARGUMENTS) - (_OPTIONAL - set(arguments))))
    if odd:
        raise CheckpointError(
            f"the skeleton {'has an unknown' if odd[0] in arguments else 'lacks the'} argument {odd[0]}"
        )
    for name, value in arguments.items():
        if not _ARGUMENTS[name](value):
            raise CheckpointError(f"the skeleton has {name} {str(value)[:40]!r}, which no model has")
    if arguments["embed_dim"] % arguments["num_heads"]:
        raise CheckpointError(
            f"the skeleton has {arguments['num_heads']} heads, which do not divide the width {arguments['embed_dim']}"
        )
    if arguments["global_pool"] == "token" and not arguments["class_token"]:
        raise CheckpointError("the skeleton pools the class token but has none")
    rates: Any = recipe.get("drop_path")
    pairs = isinstance(rates, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in rates)
    if not pairs or len(rates) != arguments["depth"] or not all(_is_rate(rate) for pair in rates for rate in pair):
        raise CheckpointError(f"drop_path must be {arguments['depth']} pairs of rates")


def _norm_name(module: nn.Module) -> str:
    for name, cls in _NORMS.items():
        if type(module) is cls:
            return name
    raise CheckpointError(f"the norm {type(module).__name__} has no name in a recipe; known: {', '.join(_NORMS)}")


def _activation_name(module: nn.Module) -> str:
    for name, make in _ACTIVATIONS.items():
        if type(module) is type(make()) and str(module) == str(make()):
            return name
    raise CheckpointError(f"the activation {module} has no name in a recipe; known: {', '.join(_ACTIVATIONS)}")


def _is_list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(one) in kinds for one in value)


# What timm and hiap read of a pretrained_cfg.
_USAGE: dict[str, Callable[[Any], bool]] = {
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


# What names and shapes of weights tell of the model they are for.
_STEM = "patch_embed.proj.weight"
_TOKENS = ("cls_token", "reg_token", "dist_token")
_MARKS = ("reg_token", "dist_token", "blocks.0.ls1.gamma")  # what tells kinds of ViT apart
_SIZES = {  # width and depth -> the word in timm's names
    (192, 12): "tiny",
    (384, 12): "small",
    (512, 12): "medium",
    (768, 12): "base",
    (1024, 24): "large",
    (1280, 32): "huge",
    (1408, 40): "giant",
    (1664, 48): "gigantic",
    (1152, 27): "so400m",
}


def classes_in(state: Mapping[str, Tensor]) -> int | None:
    """The number of classes that weights are for, 0 where they hold no classifier; None where they do not tell."""
    if "head.weight" in state and state["head.weight"].ndim == 2:
        return int(state["head.weight"].shape[0])
    return 0 if _STEM in state and not any(name.startswith("head") for name in state) else None


def guess_weights(model: Any, state: dict[str, Tensor], name: str) -> str | None:
    """What to pass for weights that do not fit a ViT, as far as their sizes tell."""
    own = model.state_dict()
    if _STEM not in own or _STEM not in state or state[_STEM].ndim != 4 or not hasattr(model, "blocks"):
        return None
    width, _, patch, _ = state[_STEM].shape
    depth = len({found[1] for key in state if (found := re.match(r"blocks\.(\d+)\.", key))})
    tokens = {key: state[key].shape[1] for key in _TOKENS if key in state and state[key].ndim == 3}
    size = _image_size(model, state, tokens)
    like = (width, depth, patch, [key in state for key in _MARKS])
    if like == (own[_STEM].shape[0], len(model.blocks), own[_STEM].shape[2], [key in own for key in _MARKS]):
        if size and size != model.patch_embed.img_size[0]:
            return f"these look like weights for img_size {size}: pass --img-size {size}"
        return None
    word = _SIZES.get((width, depth))
    if word is None:
        return None
    kinds = [re.sub("|".join(_SIZES.values()), word, re.sub(r"patch\d+", f"patch{patch}", name))]
    if "dist_token" in state:
        kinds.insert(0, f"deit_{word}_distilled_patch{patch}_224")
    elif "dist_token" in own:
        kinds.insert(0, f"deit_{word}_patch{patch}_224")
    elif "blocks.0.ls1.gamma" in state:
        registers = f"reg{tokens['reg_token']}_" if "reg_token" in tokens else ""
        kinds += [f"vit_{word}_patch{patch}_{registers}dinov2", f"deit3_{word}_patch{patch}_224"]
    kinds.append(f"vit_{word}_patch{patch}_224")
    best = next((kind for kind in kinds if kind != name and timm.is_model(kind)), None)
    if best is None:
        return None
    preset = timm.get_pretrained_cfg(best)
    at = f" --img-size {size}" if size and preset and size != preset.input_size[-1] else ""
    return f"looks like {best} (width {width}, {depth} blocks, patch {patch}): pass --model {best}{at}"


def _image_size(model: Any, state: dict[str, Tensor], tokens: dict[str, int]) -> int | None:
    """The size of the square images that position embeddings are for; some models have them for patches alone."""
    if "pos_embed" not in state or state["pos_embed"].ndim != 3:
        return None
    prefixes = [sum(tokens.values()), 0]
    for prefix in reversed(prefixes) if getattr(model, "no_embed_class", False) else prefixes:
        patches = max(state["pos_embed"].shape[1] - prefix, 0)
        side = math.isqrt(patches)
        if side and side * side == patches:
            return side * int(state[_STEM].shape[2])
    return None
