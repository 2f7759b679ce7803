"""Models of Transformers by name: folders that `save_pretrained` wrote, and names on the hub."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from hiap.errors import ConfigError, InputError
from hiap.models.family import ImageSize
from hiap.models.transformers import FAMILY
from hiap.models.transformers_auto import pruned_class
from hiap.models.transformers_configs import is_pruned
from hiap.models.transformers_parts import (
    CLASSES,
    HEADS,
    ViT,
    config_of,
    core_of,
    library,
    pair,
    patch_of,
    prefix_of,
    stem_of,
    width_of,
)
from hiap.models.transformers_processor import read_processor
from hiap.models.transformers_recipes import around, made, quiet

__all__ = ["PREFIX", "hub_model"]

PREFIX = "hf:"  # of a folder or a name on the hub, in --model

_BY_TYPE = {
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    "dinov3_vit": "DINOv3ViTModel",
    **dict.fromkeys(("clip", "clip_vision_model"), "CLIPForImageClassification"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "SiglipForImageClassification"),
}
_TOWERS = {"clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel"}
_BARE = {  # by the type of the configuration, the class that gives features
    "dinov2": "Dinov2Model",
    "dinov2_with_registers": "Dinov2WithRegistersModel",
    **dict.fromkeys(("clip", "clip_vision_model"), "CLIPVisionModelWithProjection"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "SiglipVisionModel"),
}
_WITH_TEXTS = "Load it with AutoModel, prune its vision_model, and put that back with hiap.set_tower"
_REFUSED = {
    "siglip2": "it takes packed patches of images of any shape (NaFlex). A SigLIP 2 of one image size is a siglip",
    **dict.fromkeys(("hiap_clip", "hiap_siglip"), f"it reads texts besides images. {_WITH_TEXTS}"),
}


def hub_model(name: str, pretrained: bool, arguments: Mapping[str, Any], features: bool = False) -> nn.Module:
    """The classifier in a folder that `save_pretrained` wrote, or of a name on the hub.

    A pruned model, and one of a kind that has no class with a classifier, comes as it is.

    Args:
        name: "hf:FOLDER" or "hf:NAME".
        pretrained: load its weights. Where they hold no classifier, the model has 0 classes.
        arguments: `img_size`, to which positions are interpolated, and `num_classes`, for a model without weights.
        features: the bare model is wanted where the class has one whose output is useful by itself: of CLIP and SigLIP
            the image tower with its embedding, of DINOv2 the backbone.

    Raises:
        ConfigError: Transformers is missing or cannot make it, or the model is of a kind that cannot be pruned.
    """
    hf, where = library(), name.removeprefix(PREFIX)
    odd = sorted(set(arguments) - {"img_size", "num_classes"})
    if odd:
        raise ConfigError(f"{name} takes img_size and num_classes as model_args; found {', '.join(odd)}")
    try:
        config = hf.AutoConfig.from_pretrained(where, trust_remote_code=False)
        file, usage = read_processor(where)
        FAMILY.check_usage(file, usage)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be loaded ({_reason(error)}). Pass hf: and a folder that save_pretrained wrote"
        ) from error
    cls = _class_for(config)
    if cls is None:
        reason = _REFUSED.get(config.model_type.removesuffix("_vision_model"))
        if reason:
            raise ConfigError(f"{name} is a {config.model_type}, which cannot be pruned: {reason}")
        known = ", ".join(sorted(_BY_TYPE))
        raise ConfigError(f"{name} is a {config.model_type}, which cannot be pruned; known: {known}")
    try:
        if is_pruned(config):
            model = _load(pruned_class(getattr(hf, cls), config.__class__), where, config, pretrained)
        elif features and config.model_type in _BARE:
            model = _load_bare(hf, where, config, pretrained)
        elif config.model_type in _TOWERS:
            model = _load_tower(hf, cls, where, config, pretrained)
        else:
            model = _load(getattr(hf, cls), where, config, pretrained)
        if not pretrained and "num_classes" in arguments:
            FAMILY.set_classes(model, arguments["num_classes"])
        size = arguments.get("img_size")
        if size is not None and pair(size) != pair(config_of(model).image_size):
            model = _resized(model, size)
    except Exception as error:
        raise ConfigError(f"Transformers cannot make the model {name}: {_reason(error)}") from error
    FAMILY.set_usage(model, {**FAMILY.usage(model), **usage})
    return cast(nn.Module, model.float().train())


def _class_for(config: Any) -> str | None:
    given = (getattr(config, "architectures", None) or [""])[0]
    if given in CLASSES and ("Classification" in given or is_pruned(config)):
        return str(given)
    return _BY_TYPE.get(config.model_type)


def _load(cls: Any, where: str, config: Any, pretrained: bool) -> ViT:
    if not pretrained:
        return cls(config)
    with quiet():  # what is missing is told below, and what is not needed does not matter
        model, report = cls.from_pretrained(where, config=config, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    heads = [key for key in missing if key.split(".")[0] in HEADS]
    if len(heads) < len(missing):
        lost = next(key for key in missing if key not in heads)
        raise InputError(f"its weights lack {lost}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}")
    if report.get("mismatched_keys"):
        raise InputError(f"its weights have another shape for {sorted(map(str, report['mismatched_keys']))[0]}")
    if heads:
        FAMILY.set_classes(model, 0)
    return model


def _load_bare(hf: Any, where: str, config: Any, pretrained: bool) -> ViT:
    """The model without a classifier. A CLIP tower that was saved without its projection stays so."""
    given, bare = (getattr(config, "architectures", None) or [""])[0], _BARE[config.model_type]
    own = config.vision_config if hasattr(config, "vision_config") else config
    if own is not config and hasattr(config, "projection_dim"):
        own.projection_dim = config.projection_dim
    return _load(getattr(hf, given if given == "CLIPVisionModel" else bare), where, own, pretrained)


def _load_tower(hf: Any, cls: str, where: str, config: Any, pretrained: bool) -> ViT:
    """A classifier around an image tower that was saved alone."""
    model = made(getattr(hf, cls), around(CLASSES[cls][0], config), 0)
    if pretrained:
        given = (getattr(config, "architectures", None) or [""])[0]
        bare = given if given in CLASSES else _TOWERS[config.model_type]
        tower = core_of(_load(getattr(hf, bare), where, config, True))
        model.vision_model.to(stem_of(tower).weight.dtype).load_state_dict(tower.state_dict())
    return model


def _resized(model: ViT, size: ImageSize) -> ViT:
    """The same model for another image size, its positions interpolated as the model itself does it."""
    patch, embeddings = patch_of(model), core_of(model).embeddings
    height, width = pair(size)
    if height % patch[0] or width % patch[1] or height != width:
        raise InputError(f"img_size must be square and a multiple of the {patch[0]}x{patch[1]} patch; found {size}")
    positions = None
    registers = getattr(embeddings, "register_tokens", None)  # they come after the positions
    placed = prefix_of(model) - (0 if registers is None else registers.shape[1])
    like = torch.empty(1, (height // patch[0]) * (width // patch[1]) + placed, width_of(model))
    if hasattr(embeddings, "interpolate_pos_encoding"):  # rotary positions are computed for any size
        with torch.no_grad():
            positions = embeddings.interpolate_pos_encoding(like, height, width)
    config = copy.deepcopy(model.config)
    getattr(config, "vision_config", config).image_size = height
    resized = made(type(model), config, FAMILY.classes(model))
    state = model.state_dict()
    for name in state:
        if positions is not None and "position_embedding" in name:
            state[name] = positions.reshape(resized.state_dict()[name].shape)
    resized.load_state_dict(state)
    return resized


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
