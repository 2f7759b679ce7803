"""torchvision's `VisionTransformer`: where its parts are, and how to rebuild one.

Its attention never calls its projections as layers, so that blocks are converted before they are gated, and back after.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import vision_transformer as library

from hiap.errors import CheckpointError, InputError
from hiap.models.described import DescribedFamily
from hiap.models.family import ImageSize, Preprocessing, Recipe, refuse
from hiap.models.usage import with_usage
from hiap.nn.compact import Attention, Block
from hiap.nn.stem import Stem

__all__ = ["FAMILY", "TorchvisionFamily", "classes_of", "create", "present_names"]

ViT: TypeAlias = Any  # nn.Module types every attribute as Tensor | Module; here the members of a model are known

_NAMES = ("vit_b_16", "vit_b_32", "vit_l_16", "vit_l_32", "vit_h_14")
_WEIGHTS = {  # width and patch -> the weights that torchvision has for such a model
    (768, 16): "ViT_B_16_Weights",
    (768, 32): "ViT_B_32_Weights",
    (1024, 16): "ViT_L_16_Weights",
    (1024, 32): "ViT_L_32_Weights",
    (1280, 14): "ViT_H_14_Weights",
}
_COUNTS = ("image_size", "patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim")
_RATES = ("dropout", "attention_dropout")
_OTHERS = ("num_classes", "representation_size", "norm_eps")
_DEPTH_LIMIT = 1_000  # blocks, so that a wrong number does not build for hours
_SIZE_LIMIT = 1 << 24  # every other count


class TorchvisionFamily(DescribedFamily):
    """torchvision's `VisionTransformer` with its own blocks."""

    def __init__(self) -> None:
        super().__init__(
            "torchvision",
            library.VisionTransformer,
            blocks="encoder.layers",
            stem="conv_proj",
            head="heads.head",
            size="image_size",
            norm1="ln_1",
            attention="self_attention",
            proj_drop="dropout",
            norm2="ln_2",
            fc1="mlp.0",
            act="mlp.1",
            drop1="mlp.2",
            fc2="mlp.3",
            drop2="mlp.4",
            mean=(0.485, 0.456, 0.406),
            std=(0.229, 0.224, 0.225),
        )

    def _verify(self, model: ViT, widths: Mapping[str, int]) -> None:
        """The library's own classes are known; anything else is refused."""
        if type(model) is not library.VisionTransformer:
            refuse("the model", model, "it is not torchvision's own class", "a description (hiap.DescribedFamily)")
        for name in widths:
            block = model.get_submodule(name)
            for place, module, own in (
                (name, block, library.EncoderBlock),
                (f"{name}.mlp", block.mlp, library.MLPBlock),
            ):
                if type(module) is not own:
                    refuse(place, module, f"it is not torchvision's {own.__name__}", "rules to cut it")

    def input_shape(self, model: ViT, size: ImageSize = None) -> tuple[int, int, int]:
        convolution = next(m for m in model.conv_proj.modules() if isinstance(m, nn.Conv2d))
        return convolution.in_channels, *super().input_shape(model, size)[1:]

    def embed(self, model: ViT, images: Tensor) -> Tensor:
        x = model._process_input(images)
        x = torch.cat([model.class_token.expand(len(x), -1, -1), x], dim=1)
        return cast(Tensor, model.encoder.dropout(x + model.encoder.pos_embedding))

    def head(self, model: ViT, tokens: Tensor) -> Tensor:
        return cast(Tensor, model.heads(model.encoder.ln(tokens[:, :1])[:, 0]))

    def tokens_read(self, model: ViT) -> int | None:
        return 1

    def fold_stem(self, model: ViT) -> nn.Module | None:
        proj = model.conv_proj
        if not isinstance(proj, nn.Conv2d):
            return None
        table = model.encoder.pos_embedding.detach().clone()
        table[:, :1] += model.class_token
        if proj.bias is not None:
            table[:, 1:] += proj.bias
        size, patch = (model.image_size, model.image_size), (model.patch_size, model.patch_size)
        model.conv_proj = nn.Identity()
        return Stem(proj.weight.flatten(1), table, size, patch, 1)

    def without_decay(self, model: ViT) -> set[str]:
        return {"class_token", "encoder.pos_embedding"}

    def set_classes(self, model: ViT, classes: int) -> None:
        super().set_classes(model, classes)
        model.num_classes = classes

    def preprocessing(self, model: ViT) -> Preprocessing:
        return with_usage(_published(model), self.usage(model))

    def versions(self) -> dict[str, str]:
        return {"torchvision": torchvision.__version__}

    def describe(self, model: ViT, origin: Recipe | None = None) -> Recipe:
        if not isinstance(model.conv_proj, nn.Conv2d):
            raise CheckpointError("a torchvision model with conv_stem_configs cannot be rebuilt from a recipe")
        norm = model.encoder.ln
        if type(norm) is not nn.LayerNorm:
            raise CheckpointError(f"the norm {type(norm).__name__} has no name in a recipe; known: LayerNorm")
        recipe = {name: getattr(model, name) for name in (*_COUNTS, *_RATES, *_OTHERS) if hasattr(model, name)}
        heads = [
            model.hidden_dim // block.attn.head_dim  # the dense width, from which the softmax scale comes
            if isinstance(block, Block) and isinstance(block.attn, Attention)
            else getattr(block, "num_heads", 0)
            for block in model.encoder.layers
        ]
        return recipe | {
            "num_layers": len(model.encoder.layers),
            "num_heads": max(heads) or (origin or {}).get("num_heads", 1),
            "norm_eps": norm.eps,
        }

    def build(self, recipe: Recipe) -> nn.Module:
        _check_recipe(recipe)
        arguments = {name: value for name, value in recipe.items() if name != "norm_eps"}
        with torch.device("meta"):
            norm = functools.partial(nn.LayerNorm, eps=recipe["norm_eps"])
            return cast(nn.Module, library.VisionTransformer(norm_layer=norm, **arguments))


def _check_recipe(recipe: Any) -> None:
    """Refuse what no model has before anything of that size is built."""
    wanted = {*_COUNTS, *_RATES, *_OTHERS}
    if not isinstance(recipe, dict) or set(recipe) != wanted:
        raise CheckpointError(f"the skeleton must have {', '.join(sorted(wanted))}")

    def is_count(name: str, most: int = _SIZE_LIMIT) -> bool:
        return type(recipe[name]) is int and 1 <= recipe[name] <= most

    def is_rate(name: str) -> bool:
        return type(recipe[name]) in (int, float) and 0 <= recipe[name] <= 1

    fits = {name: is_count(name) for name in (*_COUNTS, "num_classes")} | {name: is_rate(name) for name in _RATES}
    fits |= {"num_layers": is_count("num_layers", _DEPTH_LIMIT), "norm_eps": is_rate("norm_eps")}
    fits["representation_size"] = recipe["representation_size"] is None or is_count("representation_size")
    for name, fit in fits.items():
        if not fit:
            raise CheckpointError(f"the skeleton has {name} {str(recipe[name])[:40]!r}, which no model has")
    for part, whole in (("num_heads", "hidden_dim"), ("patch_size", "image_size")):
        if recipe[whole] % recipe[part]:
            raise CheckpointError(
                f"the skeleton has {part} {recipe[part]}, which does not divide {whole} {recipe[whole]}"
            )


def _published(model: ViT) -> Preprocessing:
    """What torchvision says of its weights for such a model: width, patch and image size tell them apart."""
    size = (model.image_size, model.image_size)
    known = getattr(library, _WEIGHTS.get((model.hidden_dim, model.patch_size), ""), ())
    presets = [weights.transforms() for weights in known]
    preset = next((one for one in presets if one.crop_size == [model.image_size]), None)
    if preset is None:  # of no published weights: as the first of all, which were trained on ImageNet alone
        preset = library.ViT_B_16_Weights.IMAGENET1K_V1.transforms()
    crop = preset.crop_size[0] / preset.resize_size[0]
    return Preprocessing(size, tuple(preset.mean), tuple(preset.std), preset.interpolation.value, crop)


def create(name: str, pretrained: bool, arguments: Mapping[str, Any]) -> nn.Module:
    """A model of torchvision by its name.

    Args:
        pretrained: with the weights that torchvision takes by default, which are fetched.
        arguments: of its constructor; `img_size` is another name of `image_size`.

    Raises:
        InputError: torchvision has no ViT of this name.
    """
    if name not in _NAMES:
        raise InputError(f"it has no ViT {name!r}; known: {', '.join(_NAMES)}")
    given = {"image_size" if key == "img_size" else key: value for key, value in arguments.items()}
    return cast(nn.Module, getattr(library, name)(weights="DEFAULT" if pretrained else None, **given))


def present_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names that tensors have today: published files still have older ones for the MLPs."""
    new = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3."}
    return {functools.reduce(lambda key, old: key.replace(old, new[old]), new, key): t for key, t in state.items()}


def classes_of(state: dict[str, Tensor]) -> int | None:
    """The number of classes that weights are for; None where they do not tell."""
    classifier = state.get("heads.head.weight")
    return int(classifier.shape[0]) if classifier is not None and classifier.ndim == 2 else None


FAMILY = TorchvisionFamily()
