"""Adapter for timm's `VisionTransformer`: which models qualify, what they cost, and how to rebuild one.

A model qualifies by the types of its block, attention and MLP, never by its name. Whatever could not be
gated and extracted exactly is refused here, before any work.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import timm.layers as layers
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from hiap import compact
from hiap.compact import Widths
from hiap.errors import CheckpointError, UnsupportedModelError
from hiap.gates import GatedLinear

__all__ = [
    "FAMILY",
    "Site",
    "ViT",
    "build",
    "describe",
    "fixed_macs",
    "image_size",
    "mlp_ratio",
    "sites",
    "stem",
    "tokens",
]

FAMILY = "timm"

# nn.Module types every attribute as Tensor | Module; a model whose members are known is Any to the type checker.
ViT: TypeAlias = Any

_CLASSES = {cls.__name__: cls for cls in (VisionTransformer, VisionTransformerDistilled)}
_NORMS = {
    "LayerNorm": layers.LayerNorm,
    "LayerNormFp32": layers.LayerNormFp32,
    "RmsNorm": layers.RmsNorm,
    "RmsNormFp32": layers.RmsNormFp32,
    "torch.LayerNorm": nn.LayerNorm,
}
_ACTIVATIONS = {
    "GELU": nn.GELU,
    "GELU.tanh": functools.partial(nn.GELU, approximate="tanh"),
    "GELUTanh": layers.GELUTanh,
    "QuickGELU": layers.QuickGELU,
    "ReLU": nn.ReLU,
    "SiLU": nn.SiLU,
    "timm.GELU": layers.GELU,
}


@dataclass(frozen=True)
class Site:
    """One block of the model: what can be gated in it, and its present widths."""

    name: str
    block: ViT
    dim: int
    widths: Widths

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised, which ties all q/k dims of a head together."""
        return bool(self.widths.heads) and not isinstance(self.block.attn.q_norm, nn.Identity)


def sites(model: ViT) -> list[Site]:
    """The blocks of a dense, gated or compact model.

    Raises:
        UnsupportedModelError: with the module, the reason and what would be needed.
    """
    if not isinstance(model, VisionTransformer):
        _refuse_class(model)
    if type(model.patch_embed) is not layers.PatchEmbed:
        _refuse(
            "patch_embed",
            model.patch_embed,
            "only the plain patch embedding is counted and rebuilt exactly",
            "an exact count and a recipe for this stem",
        )
    if not isinstance(model.attn_pool, _pools()):
        _refuse("attn_pool", model.attn_pool, "its cost is not known", "an exact MAC count for this pool")
    _classifiers(model)
    return [
        Site(f"blocks.{i}", block, model.embed_dim, _widths(f"blocks.{i}", block))
        for i, block in enumerate(model.blocks)
    ]


def _widths(name: str, block: ViT) -> Widths:
    if isinstance(block, compact.Block):
        return _compact_widths(block)
    if type(block) is not Block:
        _refuse_block(name, block)
    attn, mlp = block.attn, block.mlp
    if type(attn) is not layers.Attention:
        _refuse(f"{name}.attn", attn, "it is not timm's standard attention", "rules to cut this attention")
    if type(mlp) is not layers.Mlp:
        kind = (
            "a gated MLP joins its neurons in pairs" if "glu" in type(mlp).__name__.lower() else "it is not timm's Mlp"
        )
        _refuse(f"{name}.mlp", mlp, kind, "rules to cut this MLP")
    if getattr(attn, "gate", None) is not None:
        _refuse(f"{name}.attn.gate", attn.gate, "gated attention adds a third factor", "rules to cut the gate as well")
    between = "a norm between the units and the layer that reads them changes when a unit goes"
    for owner, member in (("attn", attn.norm), ("mlp", mlp.norm)):
        if not isinstance(member, nn.Identity):
            _refuse(
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
            _refuse(f"{name}.{owner}.{member}", linear, reason, "the layer in its plain form")
    return Widths(attn.num_heads, attn.head_dim, attn.head_dim, mlp.fc1.out_features)


def _compact_widths(block: compact.Block) -> Widths:
    attn, mlp = block.attn, block.mlp
    neurons = mlp.fc1.out_features if isinstance(mlp, compact.Mlp) else None if mlp is None else 0
    if isinstance(attn, compact.Attention):
        return Widths(attn.num_heads, attn.qk_dim, attn.value_dim, neurons)
    return Widths(None if attn is None else 0, 0, 0, neurons)


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer is a Linear whose weight is its parameter, not made of others (a mask, a norm of weights)."""
    return type(module) in (nn.Linear, GatedLinear) and module._parameters.get("weight") is not None


def _refuse(name: str, module: nn.Module, reason: str, needed: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{name} is a {type(module).__name__}: {reason}. To support it HiAP would need {needed}."
    )


def _refuse_class(model: ViT) -> NoReturn:
    for wrapped in ("module", "_orig_mod"):
        if isinstance(getattr(model, wrapped, None), VisionTransformer):
            raise UnsupportedModelError(f"the model is wrapped in {type(model).__name__}: pass model.{wrapped}")
    reason = "it is not a timm VisionTransformer"
    if getattr(model, "rope", None) is not None or getattr(model, "rope_mixed", False):
        reason += ", and its rotary position embedding turns q/k dims in pairs"
    elif any("relpos" in type(m).__name__.lower() for m in model.modules()):
        reason += ", and its relative position bias belongs to the heads"
    _refuse("the model", model, reason, "an adapter that names this family's attention and MLP layers")


def _refuse_block(name: str, block: ViT) -> NoReturn:
    kind = type(block).__name__
    if "Parallel" in kind:
        reason = "its branches run in parallel"
    elif "Post" in kind:
        reason = "it normalises after the branch, so a closed branch is not a zero"
    else:
        reason = "it is not timm's standard pre-norm block"
    _refuse(name, block, reason, "rules to gate and cut this block")


def stem(model: ViT) -> nn.Module:
    """The module every forward enters first, and only once."""
    module: nn.Module = model.patch_embed
    return module


def image_size(model: ViT, size: int | tuple[int, int] | None = None) -> tuple[int, int]:
    """Height and width of the input: the model's own unless given."""
    given, patch = size is not None, model.patch_embed.patch_size
    size = size if given else model.patch_embed.img_size
    if size is None:
        raise ValueError("the model has no fixed image size; pass img_size")
    height, width = map(int, size) if isinstance(size, Sequence) else (int(size), int(size))
    if given and not model.patch_embed.dynamic_img_pad and (height % patch[0] or width % patch[1]):
        raise ValueError(f"img_size {height}x{width} is not a multiple of the {patch[0]}x{patch[1]} patch")
    if height < patch[0] or width < patch[1]:
        raise ValueError(f"img_size {height}x{width} is smaller than one {patch[0]}x{patch[1]} patch")
    return height, width


def tokens(model: ViT, img_size: int | tuple[int, int] | None = None) -> int:
    """Sequence length N, prefix tokens included."""
    rows, columns = model.patch_embed.dynamic_feat_size(image_size(model, img_size))
    return int(rows * columns + model.num_prefix_tokens)


def fixed_macs(model: ViT, img_size: int | tuple[int, int] | None = None) -> int:
    """MACs of everything outside the blocks: patch embedding, attention pool, classifiers."""
    n = tokens(model, img_size)
    macs = (n - model.num_prefix_tokens) * model.patch_embed.proj.weight.numel()
    pooled = 1
    if model.attn_pool is not None:
        macs += _pool_macs(model.attn_pool, n if model.pool_include_prefix else n - model.num_prefix_tokens)
    elif not model.global_pool:
        pooled = n  # the classifier runs on every token
    return int(macs + pooled * sum(linear.weight.numel() for linear in _classifiers(model)))


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
                _refuse("head", module, "its cost is not known", "a classifier made of Linears and norms")
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


def mlp_ratio(neurons: int, dim: int) -> float:
    """What timm, which cuts the product off, makes so many neurons of."""
    return (neurons + 0.5) / dim


def describe(model: ViT) -> dict[str, Any]:
    """The recipe of a compact model's skeleton: a class and constructor arguments, as JSON values.

    Raises:
        CheckpointError: for a part that has no entry in the recipe.
    """
    if type(model).__name__ not in _CLASSES or type(model) is not _CLASSES[type(model).__name__]:
        raise CheckpointError(
            f"{type(model).__name__} cannot be rebuilt from a recipe: expected one of {', '.join(_CLASSES)}"
        )
    attn = next(_members(model, "attn", compact.Attention), None)
    mlp = next(_members(model, "mlp", compact.Mlp), None)
    pool = model.attn_pool
    norm_after_pool = not isinstance(model.fc_norm, nn.Identity)
    final_norm = norm_after_pool or not isinstance(model.norm, nn.Identity)
    norms: list[Any] = [m for m in model.modules() if isinstance(m, tuple(_NORMS.values()))]
    inside = [name for name, _ in model.blocks.named_parameters()]
    latent = isinstance(pool, layers.AttentionPoolLatent)
    arguments = {
        "img_size": list(image_size(model)),
        "patch_size": list(model.patch_embed.patch_size),
        "in_chans": model.patch_embed.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        # Of the dense block only head_dim matters, as the origin of the softmax scale.
        "num_heads": pool.num_heads if pool is not None else model.embed_dim // attn.head_dim if attn else 1,
        "mlp_ratio": mlp_ratio(pool.mlp.fc1.out_features, model.embed_dim) if latent and pool.mlp else 4.0,
        "qkv_bias": attn is not None and attn.qkv.bias is not None,
        "qk_norm": attn is not None and not isinstance(attn.q_norm, nn.Identity),
        "proj_bias": any(name.endswith(("proj.bias", "fc2.bias", "attn.bias", "mlp.bias")) for name in inside),
        "init_values": 1e-5 if any(isinstance(m, layers.LayerScale) for m in model.modules()) else None,
        "class_token": model.has_class_token,
        "pos_embed": "none" if model.pos_embed is None else "learn",
        "no_embed_class": model.no_embed_class,
        "reg_tokens": model.num_reg_tokens,
        "pre_norm": not isinstance(model.norm_pre, nn.Identity),
        "final_norm": final_norm,
        "fc_norm": norm_after_pool,
        "pool_include_prefix": model.pool_include_prefix,
        "dynamic_img_size": model.dynamic_img_size,
        "dynamic_img_pad": model.patch_embed.dynamic_img_pad,
        "drop_rate": model.head_drop.p,
        "pos_drop_rate": model.pos_drop.p,
        "patch_drop_rate": getattr(model.patch_drop, "prob", 0.0),
        "proj_drop_rate": _drop_rate(mlp, attn, next(_members(model, "mlp", compact.Constant), None)),
        "attn_drop_rate": attn.attn_drop.p if attn else 0.0,
        "norm_layer": _norm_name(norms[0]) if norms else "LayerNorm",
        "norm_eps": norms[0].eps if norms else 1e-6,
        "embed_norm": not isinstance(model.patch_embed.norm, nn.Identity),
        "act_layer": _activation_name(mlp.act) if mlp else "GELU",
    }
    drop_path = [
        [getattr(drop, "drop_prob", 0.0) for drop in (block.drop_path1, block.drop_path2)] for block in model.blocks
    ]
    return {"class": type(model).__name__, "arguments": arguments, "drop_path": drop_path}


def build(recipe: dict[str, Any]) -> ViT:
    """The dense skeleton of a recipe, on the meta device."""
    arguments = dict(recipe["arguments"])
    norm = functools.partial(_NORMS[arguments["norm_layer"]], eps=arguments.pop("norm_eps"))
    arguments["norm_layer"] = norm
    arguments["embed_norm_layer"] = norm if arguments.pop("embed_norm") else None
    arguments["act_layer"] = _ACTIVATIONS[arguments["act_layer"]]
    for name in ("img_size", "patch_size"):
        arguments[name] = tuple(arguments[name])
    with torch.device("meta"):
        model = _CLASSES[recipe["class"]](**arguments)
    for block, (first, second) in zip(model.blocks, recipe["drop_path"], strict=True):
        block.drop_path1 = layers.DropPath(first) if first else nn.Identity()
        block.drop_path2 = layers.DropPath(second) if second else nn.Identity()
    return model


def _members(model: ViT, name: str, kind: type) -> Iterator[Any]:
    return (getattr(block, name) for block in model.blocks if isinstance(getattr(block, name), kind))


def _drop_rate(*branches: Any) -> float:
    """The dropout of the first branch there is."""
    for branch in branches:
        for name in ("drop1", "proj_drop", "drop"):
            if hasattr(branch, name):
                return float(getattr(branch, name).p)
    return 0.0


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
