"""Where the parts of the ViTs of Transformers are: classes, backbones, stems, heads.

Members have had several names over the years; they are told apart by which of them a module has. Transformers itself
is imported where one of its models is named or already exists.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from hiap.errors import ConfigError, InputError
from hiap.models.family import refuse

__all__ = [
    "CLASSES",
    "HEADS",
    "UNDECAYED",
    "USES",
    "WHOLE",
    "WHOLE_MODELS",
    "ViT",
    "attention_pool",
    "check_class",
    "classifiers",
    "config_of",
    "core_of",
    "first_of",
    "home_of",
    "is_backbone",
    "kind_of",
    "library",
    "pair",
    "patch_of",
    "place_of",
    "prefix_of",
    "reach",
    "read_tokens",
    "stem_of",
    "width_of",
]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any

INSTALL = 'pip install "hiap[transformers]"'
OLDEST = (5, 22)  # as in pyproject.toml: layers of older versions have other members, and return tuples


@dataclass(frozen=True)
class _Use:
    """How images are usually made ready for a kind of model."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "center"


_HALF = (0.5, 0.5, 0.5)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
USES = {
    "vit": _Use(_HALF, _HALF, "bilinear", crop_mode="squash"),
    "deit": _Use(*_IMAGENET, crop_pct=0.875),
    "dinov2": _Use(*_IMAGENET, crop_pct=0.875),
    "dinov3": _Use(*_IMAGENET, "bilinear", crop_mode="squash"),
    "clip": _Use((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "siglip": _Use(_HALF, _HALF, crop_mode="squash"),
}

# class -> its kind, and the class of its configuration
CLASSES = {
    "ViTForImageClassification": ("vit", "ViTConfig"),
    "ViTModel": ("vit", "ViTConfig"),
    "DeiTForImageClassification": ("deit", "DeiTConfig"),
    "DeiTForImageClassificationWithTeacher": ("deit", "DeiTConfig"),
    "DeiTModel": ("deit", "DeiTConfig"),
    "Dinov2ForImageClassification": ("dinov2", "Dinov2Config"),
    "Dinov2Model": ("dinov2", "Dinov2Config"),
    "Dinov2Backbone": ("dinov2", "Dinov2Config"),
    "Dinov2WithRegistersForImageClassification": ("dinov2", "Dinov2WithRegistersConfig"),
    "Dinov2WithRegistersModel": ("dinov2", "Dinov2WithRegistersConfig"),
    "Dinov2WithRegistersBackbone": ("dinov2", "Dinov2WithRegistersConfig"),
    "DINOv3ViTModel": ("dinov3", "DINOv3ViTConfig"),
    "DINOv3ViTBackbone": ("dinov3", "DINOv3ViTConfig"),
    "CLIPForImageClassification": ("clip", "CLIPVisionConfig"),
    "CLIPVisionModel": ("clip", "CLIPVisionConfig"),
    "CLIPVisionModelWithProjection": ("clip", "CLIPVisionConfig"),
    "SiglipForImageClassification": ("siglip", "SiglipVisionConfig"),
    "SiglipVisionModel": ("siglip", "SiglipVisionConfig"),
}
WHOLE = {"clip": "CLIPConfig", "siglip": "SiglipConfig"}  # what a classifier's configuration stands in
WHOLE_MODELS = ("CLIPModel", "SiglipModel")  # of images and texts
_CORES = ("vit", "deit", "dinov2", "dinov2_with_registers", "vision_model")  # the backbone inside a model
HEADS = ("classifier", "cls_classifier", "distillation_classifier")
_LISTS = ("layers", "encoder.layers", "encoder.layer", "model.layer")


def library() -> Any:
    """Transformers.

    Raises:
        ConfigError: it is not installed, cannot be imported, or is too old.
    """
    try:
        found = importlib.import_module("transformers")
    except ImportError as error:
        if not isinstance(error, ModuleNotFoundError) or error.name != "transformers":
            raise ConfigError(f"Transformers is installed but cannot be imported: {error}") from error
        raise ConfigError(f"models of Transformers need the package transformers: {INSTALL}") from error
    if tuple(int(part) for part in found.__version__.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(f"models of Transformers need {oldest} or newer; found {found.__version__}: {INSTALL}")
    return found


def check_class(model: nn.Module) -> None:
    """Refuse a model whose class is not known."""
    known = [getattr(library(), name, ()) for name in CLASSES]
    if any(isinstance(model, cls) for cls in known):
        return
    kind = type(model).__name__
    if kind in WHOLE_MODELS:
        needed = "its image tower alone: prune model.vision_model, and put it back with hiap.set_tower"
        refuse("the model", model, "it reads texts besides images", needed)
    if kind.startswith("Siglip2"):
        needed = "a SigLIP 2 of one image size, which Transformers loads as a SiglipModel"
        refuse("the model", model, "it takes packed patches of images of any shape (NaFlex)", needed)
    needed = f"a family of its own (docs/family.md); known classes: {', '.join(CLASSES)}"
    refuse("the model", model, "its class is not among those that are pruned exactly", needed)


def kind_of(model: nn.Module) -> str:
    return next(CLASSES[cls.__name__][0] for cls in type(model).__mro__ if cls.__name__ in CLASSES)


def core_of(model: ViT) -> ViT:
    """The backbone, with the embeddings and the norms."""
    return next((model._modules[name] for name in _CORES if name in model._modules), model)


def home_of(model: ViT) -> str:
    """The name of the list of layers."""
    core = next((name for name in _CORES if name in model._modules), "")
    return ".".join(part for part in (core, cast(str, place_of(core_of(model), _LISTS))) if part)


def config_of(model: ViT) -> Any:
    """The configuration of the image tower."""
    return getattr(model.config, "vision_config", model.config)


def stem_of(model: ViT) -> nn.Conv2d:
    embeddings = core_of(model).embeddings
    return cast(nn.Conv2d, first_of(embeddings, ("patch_embeddings.projection", "patch_embedding", "patch_embeddings")))


def patch_of(model: ViT) -> tuple[int, int]:
    return cast("tuple[int, int]", tuple(stem_of(model).kernel_size))


def width_of(model: ViT) -> int:
    return stem_of(model).out_channels


def prefix_of(model: ViT) -> int:
    """The number of tokens before those of the patches."""
    embeddings = core_of(model).embeddings
    registers = getattr(embeddings, "register_tokens", None)
    single = sum(hasattr(embeddings, name) for name in ("cls_token", "class_embedding", "distillation_token"))
    return single + (0 if registers is None else int(registers.shape[1]))


def classifiers(model: ViT) -> list[nn.Module]:
    """The layers that give the logits, of which a DeiT with a teacher has two."""
    return [model._modules[name] for name in HEADS if name in model._modules]


def attention_pool(core: ViT) -> ViT | None:
    return core.head if getattr(core, "use_head", False) else None


UNDECAYED = ("cls_token", "distillation_token", "register_tokens", "mask_token", "position_embedding", "probe")


def _read_token(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    x, heads = core.layernorm(tokens), classifiers(model)
    if heads:
        logits = [head(x[:, i]) for i, head in enumerate(heads)]
        return logits[0] if len(logits) == 1 else cast(Tensor, (logits[0] + logits[1]) / 2)
    return cast(Tensor, x if core.pooler is None else core.pooler(x))


def is_backbone(model: nn.Module) -> bool:
    """Whether a model gives feature maps of its stages instead of one result."""
    return any(cls.__name__.endswith("Backbone") for cls in type(model).__mro__ if cls.__name__ in CLASSES)


def _read_map(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    """The feature map of the last stage."""
    config = model.config
    if config.out_features[-1] != config.stage_names[-1]:
        raise InputError(
            f"only the last stage's feature map can be made from the last tokens; found {config.out_features[-1]}, "
            f"expected {config.stage_names[-1]} as the last of out_features"
        )
    last = getattr(core, "norm", None)
    norm = core.layernorm if last is None and config.apply_layernorm else last
    x = tokens if norm is None else norm(tokens)
    first = 1 + getattr(config, "num_register_tokens", 0)
    if last is not None or config.reshape_hidden_states:
        x = x[:, first:]
    if not config.reshape_hidden_states:
        return x
    (height, width), (down, right) = pair(config.image_size), pair(config.patch_size)
    return x.reshape(len(x), height // down, width // right, -1).permute(0, 3, 1, 2).contiguous()


def _read_dinov3(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    return cast(Tensor, core.norm(tokens)[:, 0])


def _read_dinov2(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    x = core.layernorm(tokens)
    if not hasattr(model, "classifier"):
        return cast(Tensor, x[:, 0])
    first = 1 + getattr(model.config, "num_register_tokens", 0)  # not of the stem, which may have been taken out
    return cast(Tensor, model.classifier(torch.cat([x[:, 0], x[:, first:].mean(1)], 1)))


def _read_clip(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    if hasattr(model, "classifier"):
        return cast(Tensor, model.classifier(tokens[:, 1:].mean(1)))
    x = core.post_layernorm(tokens[:, 0])
    return cast(Tensor, model.visual_projection(x) if hasattr(model, "visual_projection") else x)


def _read_siglip(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    x = core.post_layernorm(tokens)
    if hasattr(model, "classifier"):
        return cast(Tensor, model.classifier(x.mean(1)))
    pool = attention_pool(core)
    return cast(Tensor, x if pool is None else pool(x))


_READ: dict[str, Callable[[ViT, ViT, Tensor], Tensor]] = {
    "vit": _read_token,
    "deit": _read_token,
    "dinov2": _read_dinov2,
    "clip": _read_clip,
    "dinov3": _read_dinov3,
    "siglip": _read_siglip,
}


def read_tokens(model: ViT, tokens: Tensor) -> Tensor:
    """What a model makes of the tokens that leave its last block."""
    read = _read_map if is_backbone(model) else _READ[kind_of(model)]
    return read(model, core_of(model), tokens)


def place_of(module: nn.Module, names: Iterable[str]) -> str | None:
    """The first of these names that leads to something in a module."""
    return next((name for name in names if reach(module, name) is not None), None)


def reach(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def first_of(module: nn.Module, names: Iterable[str]) -> Any:
    place = place_of(module, names)
    return None if place is None else reach(module, place)


def pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
