"""timm's `VisionTransformer`: which models qualify, what they cost, and how to rebuild one.

A model qualifies by the types of its block, attention and MLP, never by its name. Whatever could not be gated and
extracted exactly is refused here, before any work. timm's standard block has the members of our own, so that it is
gated and aligned as it is.

Its recipes are in `timm_recipe`; the rotary ViTs of timm are in `timm_eva`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from typing import Any, NoReturn, TypeAlias, cast

import timm
import timm.layers as layers
import torch
from timm.data import resolve_data_config
from timm.models.vision_transformer import Block, VisionTransformer
from timm.models.vitamin import GeGluMlp
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hiap.errors import CheckpointError, InputError
from hiap.models.family import Family, ImageSize, Preprocessing, Recipe, Site, compact_widths, refuse
from hiap.models.linears import joined, parted, without_values
from hiap.models.timm_recipe import NORMS, USAGE, build_vit, describe_vit, mlp_ratio_of
from hiap.nn import compact
from hiap.nn.compact import Widths
from hiap.nn.gated_linear import GatedLinear
from hiap.nn.stem import Stem

__all__ = ["TIMM", "TimmFamily", "check_units", "preprocessing_of"]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any

_OTHERS = {  # what else is to say of timm's own classes
    "NaFlexVit": ", and its images have any size, so that it has no fixed number of tokens and MACs",
    "VisionTransformerRelPos": ", and a separate network makes its relative positions, once for all images",
    "VisionTransformerSAM": ", and its blocks attend in windows, with relative positions that multiply the queries",
}
_STEMS = (layers.PatchEmbed, layers.HybridEmbed)


class TimmFamily(Family):
    """timm's `VisionTransformer`, with its standard block and attention, and its plain or gated MLP."""

    name = "timm"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, VisionTransformer)

    def sites(self, model: ViT) -> list[Site]:
        self._check_around(model)
        return [self._site(f"blocks.{i}", block, model.embed_dim) for i, block in enumerate(model.blocks)]

    def _check_around(self, model: ViT) -> None:
        """Refuse a model for what is outside its blocks."""
        if type(model.patch_embed) not in _STEMS:
            refuse(
                "patch_embed",
                model.patch_embed,
                "only the plain and the hybrid patch embedding are counted and rebuilt exactly",
                "an exact count and a recipe for this stem",
            )
        if not isinstance(getattr(model, "attn_pool", None), _pools()):
            refuse("attn_pool", model.attn_pool, "its cost is not known", "an exact MAC count for this pool")
        _classifiers(model)

    def _site(self, name: str, block: Any, dim: int) -> Site:
        widths = compact_widths(block) if isinstance(block, compact.Block) else _widths(name, block)
        qk_norm = bool(widths.heads) and not isinstance(block.attn.q_norm, nn.Identity)
        glu = compact.is_glu(block) or isinstance(block.mlp, GeGluMlp)
        return Site(self, name, block, dim, widths, qk_norm, glu=glu)

    def to_block(self, block: ViT) -> compact.Block:
        return _converted(block) if isinstance(block.mlp, GeGluMlp) else cast(compact.Block, block)

    def from_block(self, block: compact.Block) -> nn.Module:
        return _restored(block) if "shell" in vars(block) else block

    def refuse_class(self, model: nn.Module) -> NoReturn:
        """Say why a model is not of this family."""
        reason = "it is not a timm VisionTransformer" + _OTHERS.get(type(model).__name__, "")
        needed = "a description of its blocks: hiap.DescribedFamily takes a dozen lines (docs/family.md)"
        refuse("the model", model, reason, needed)

    def stem(self, model: ViT) -> nn.Module:
        return cast(nn.Module, model.patch_embed)

    def input_shape(self, model: ViT, size: ImageSize = None) -> tuple[int, int, int]:
        embed, given = model.patch_embed, size is not None
        patch = _patch(embed)
        size = size if given else embed.img_size
        if size is None:
            raise InputError("the model has no fixed image size; pass img_size")
        height, width = map(int, size) if isinstance(size, Sequence) else (int(size), int(size))
        if given and not getattr(embed, "dynamic_img_pad", False) and (height % patch[0] or width % patch[1]):
            raise InputError(f"img_size {height}x{width} is not a multiple of the {patch[0]}x{patch[1]} patch")
        if height < patch[0] or width < patch[1]:
            raise InputError(f"img_size {height}x{width} is smaller than one {patch[0]}x{patch[1]} patch")
        return _channels(embed), height, width

    def tokens(self, model: ViT, size: ImageSize = None) -> int:
        rows, columns = model.patch_embed.dynamic_feat_size(self.input_shape(model, size)[1:])
        return int(rows * columns + model.num_prefix_tokens)

    def fixed_macs(self, model: ViT, size: ImageSize = None) -> int:
        n = self.tokens(model, size)
        proj = model.patch_embed.proj
        macs = 0 if isinstance(proj, nn.Identity) else (n - model.num_prefix_tokens) * proj.weight.numel()
        macs += _backbone_macs(model.patch_embed, self.input_shape(model, size))
        pooled = 1
        if getattr(model, "attn_pool", None) is not None:
            macs += _pool_macs(model.attn_pool, n if self._pools_prefix(model) else n - model.num_prefix_tokens)
        elif not model.global_pool:
            pooled = n  # the classifier runs on every token
        return int(macs + pooled * sum(linear.weight.numel() for linear in _classifiers(model)))

    def _pools_prefix(self, model: ViT) -> bool:
        """Whether the attention pool reads the prefix tokens as well."""
        return bool(model.pool_include_prefix)

    def _placed(self, model: ViT, patches: Tensor) -> Tensor:
        """Tokens from patches: prefix tokens and positions are added."""
        return cast(Tensor, model._pos_embed(patches))

    def embed(self, model: ViT, images: Tensor) -> Tensor:
        return cast(Tensor, model.norm_pre(self._placed(model, model.patch_embed(images))))

    def head(self, model: ViT, tokens: Tensor) -> Tensor:
        return cast(Tensor, model.forward_head(model.norm(tokens)))

    def outputs(self, model: ViT, images: Tensor) -> tuple[Tensor, ...]:
        features = model.forward_features(images)
        return features, model.forward_head(features)

    def fold_stem(self, model: ViT) -> nn.Module | None:
        any_size = getattr(model, "dynamic_img_size", False) or getattr(model.patch_embed, "dynamic_img_pad", False)
        return None if any_size else self.fold_fixed_stem(model)

    def fold_fixed_stem(self, model: ViT) -> nn.Module | None:
        embed = model.patch_embed
        if type(embed) is not layers.PatchEmbed or not isinstance(embed.norm, nn.Identity):
            return None
        if embed.dynamic_img_pad and any(side % of for side, of in zip(embed.img_size, embed.patch_size, strict=True)):
            return None
        proj, (rows, columns) = embed.proj, embed.grid_size
        zero = proj.weight.new_zeros(1, *((rows * columns,) if embed.flatten else (rows, columns)), model.embed_dim)
        table = self._placed(model, zero).clone()
        if proj.bias is not None:
            table[:, model.num_prefix_tokens :] += proj.bias
        size, patch = self.input_shape(model)[1:], tuple(proj.kernel_size)
        stem = Stem(proj.weight.flatten(1), table, size, patch, model.num_prefix_tokens)
        model.patch_embed = nn.Identity()
        norm_pre = getattr(model, "norm_pre", None)
        return stem if isinstance(norm_pre, nn.Identity | None) else nn.Sequential(stem, norm_pre)

    def tokens_read(self, model: ViT) -> int | None:
        return int(model.num_prefix_tokens) if model.global_pool == "token" else None

    def prefix_tokens(self, model: ViT) -> int:
        return int(model.num_prefix_tokens)

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
            fits = USAGE.get(name)
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
            packed = recipe["arguments"].get("mlp_layer", "geglu") != "geglu"
            hidden = plain.neurons * (2 if packed else 1)
            ratio = mlp_ratio_of(hidden, recipe["arguments"]["embed_dim"])
            recipe = {**recipe, "arguments": {**recipe["arguments"], "num_heads": plain.heads, "mlp_ratio": ratio}}
        return self.build(recipe)

    def describe(self, model: ViT, origin: Recipe | None = None) -> Recipe:
        return describe_vit(model, self.input_shape(model), origin)

    def build(self, recipe: Recipe) -> nn.Module:
        return cast(nn.Module, build_vit(recipe))


TIMM = TimmFamily()


def preprocessing_of(model: nn.Module) -> Preprocessing:
    """How images are made ready for any model of timm; one value of mean and std may stand for all channels."""
    own = resolve_data_config({}, model=model)
    names = ("mean", "std", "interpolation", "crop_pct", "crop_mode")
    return Preprocessing(size=tuple(own["input_size"][1:]), **{name: own[name] for name in names})


def _widths(name: str, block: ViT) -> Widths:
    if type(block) is not Block:
        _refuse_block(name, block)
    attn, mlp = block.attn, block.mlp
    if type(attn) is not layers.Attention:
        reason = "it is not timm's standard attention"
        if hasattr(attn, "sub_norm"):
            reason = "its heads normalise their values, so that removing a value dim changes the others"
        refuse(f"{name}.attn", attn, reason, "rules to cut this attention")
    if type(mlp) not in (layers.Mlp, layers.GluMlp, GeGluMlp):
        refuse(f"{name}.mlp", mlp, "it is not timm's Mlp, GluMlp or GeGluMlp", "rules to cut this MLP")
    if getattr(attn, "gate", None) is not None:
        refuse(f"{name}.attn.gate", attn.gate, "gated attention adds a third factor", "rules to cut the gate as well")
    inside = ("fc1", "fc2") if not isinstance(mlp, GeGluMlp) else ("w0", "w1", "w2")
    check_units(name, block, ("attn.qkv", "attn.proj", *(f"mlp.{one}" for one in inside)))
    last = block.get_submodule(f"mlp.{inside[-1]}")
    return Widths(attn.num_heads, attn.head_dim, attn.head_dim, last.in_features)


def _converted(block: ViT) -> compact.Block:
    """A block with ViTamin's MLP as one of ours. It normalises its input a second time: both norms go together."""
    attn, mlp, dim = block.attn, block.mlp, block.attn.proj.out_features
    with torch.device("meta"):  # their Linears come at once
        new_attn = compact.Attention(
            *(dim, attn.num_heads, attn.head_dim, attn.head_dim, attn.head_dim, True, True),
            *(attn.q_norm, attn.k_norm, attn.attn_drop, attn.proj_drop),
        )
        drop1, drop2 = (getattr(mlp, name, nn.Dropout(0.0)) for name in ("drop1", "drop2"))  # newer timm only
        new_mlp = compact.GluMlp(dim, 1, True, True, mlp.act, drop1, drop2)
    new_attn.qkv, new_attn.proj, new_mlp.fc1, new_mlp.fc2 = attn.qkv, attn.proj, joined([mlp.w0, mlp.w1]), mlp.w2
    norm2 = nn.Sequential(block.norm2, mlp.norm)
    parts = (block.norm1, new_attn, block.ls1, block.drop_path1, norm2, new_mlp, block.ls2, block.drop_path2)
    made = compact.Block(*parts)
    made.shell = (without_values(block),)  # type: ignore[assignment]  # in a tuple: no part of the network
    return made.train(block.training)


def _restored(block: compact.Block) -> nn.Module:
    """The block that `_converted` was given, with its present weights."""
    shell: ViT = vars(block)["shell"][0]
    attn, mlp, norms = cast(compact.Attention, block.attn), cast(compact.Mlp, block.mlp), cast(Any, block.norm2)
    shell.norm1, shell.norm2, shell.mlp.norm = block.norm1, norms[0], norms[1]
    shell.attn.qkv, shell.attn.proj, shell.attn.q_norm, shell.attn.k_norm = (
        attn.qkv,
        attn.proj,
        attn.q_norm,
        attn.k_norm,
    )
    shell.ls1, shell.ls2, shell.drop_path1, shell.drop_path2 = block.ls1, block.ls2, block.drop_path1, block.drop_path2
    (shell.mlp.w0, shell.mlp.w1), shell.mlp.w2 = parted(mlp.fc1, [mlp.neurons, mlp.neurons]), mlp.fc2
    return cast(nn.Module, shell.train(block.training))


def check_units(name: str, block: ViT, linears: Iterable[str]) -> None:
    """Refuse a block of timm with a norm between units and the layer that reads them, or with odd Linears."""
    between = "a norm between the units and the layer that reads them changes when a unit is removed"
    none = nn.Identity()
    for owner, member in (("attn", getattr(block.attn, "norm", none)), ("mlp", getattr(block.mlp, "norm", none))):
        if not isinstance(member, nn.Identity) and not isinstance(block.mlp, GeGluMlp):  # which is before the units
            refuse(
                f"{name}.{owner}.norm", member, between, "a model without this norm (scale_attn_norm, scale_mlp_norm)"
            )
    for path in linears:
        linear = block.get_submodule(path)
        if not _is_linear(linear):
            reason = "it is not a plain nn.Linear with a weight of its own"
            refuse(f"{name}.{path}", linear, reason, "the layer in its plain form")


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


def _patch(embed: ViT) -> tuple[int, int]:
    """Height and width of the pixels that a token comes from, in a hybrid stem through the whole backbone."""
    if type(embed) is layers.PatchEmbed:
        return cast("tuple[int, int]", embed.patch_size)
    ratio = embed.feat_ratio(as_scalar=False)
    return int(ratio[0]), int(ratio[1])


def _channels(embed: ViT) -> int:
    """Channels of an image: what the first convolution reads."""
    return int(next(m.in_channels for m in embed.modules() if isinstance(m, nn.Conv2d)))


def _backbone_macs(embed: ViT, shape: tuple[int, int, int]) -> int:
    """MACs of the convolutional network in a hybrid stem, counted by torch on the meta device; none in a plain stem."""
    if not isinstance(embed, layers.HybridEmbed):
        return 0
    backbone = without_values(embed.backbone).to("meta").requires_grad_(False).eval()
    with FlopCounterMode(display=False) as counter:
        backbone(torch.empty(1, *shape, device="meta"))
    return int(counter.get_total_flops() // 2)


def _classifiers(model: ViT) -> list[nn.Linear]:
    """The Linears that turn features into logits."""
    linears = []
    for head in (model.head, getattr(model, "head_dist", None)):
        for module in head.modules() if head is not None else ():
            if isinstance(module, nn.Linear):
                linears.append(module)
            elif next(module.parameters(recurse=False), None) is not None and not isinstance(
                module, tuple(NORMS.values())
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
