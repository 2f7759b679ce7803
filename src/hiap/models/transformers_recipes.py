"""Recipes of models of Transformers: what shapes a network, and what values it may have in a file."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from hiap.errors import CheckpointError
from hiap.models.transformers_parts import CLASSES, HEADS, WHOLE, ViT, library

__all__ = ["OPTIONS", "SHAPES", "USAGE", "around", "check_recipe", "made", "quiet"]

_DEPTH_LIMIT = 1_000  # layers, so that a wrong number does not build for hours
_SIZE_LIMIT = 1 << 24  # every other count


def made(cls: Any, config: Any, classes: int, **options: Any) -> ViT:
    """A model of a configuration; one of SigLIP cannot begin without classes, so that all lose them afterwards."""
    if "Classification" in cls.__name__:
        config.num_labels = classes or 1
    model = cls(config, **options)
    if not classes:
        for name in HEADS:
            if name in model._modules:
                setattr(model, name, nn.Identity())
        config.num_labels = model.num_labels = 0
    return model


def _is_count(value: Any, least: int = 1, most: int = _SIZE_LIMIT) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


def _is_size(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    return _is_number(value, 1.0)


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and value in importlib.import_module("transformers.activations").ACT2FN


def _is_stages(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0 and all(isinstance(one, str) for one in value)


def _is_angle(value: Any) -> bool:
    return value is None or _is_number(value, 1e9)


_ANY: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_channels"), _is_count),
    "num_hidden_layers": functools.partial(_is_count, most=_DEPTH_LIMIT),
    "hidden_act": _is_activation,
    "layer_norm_eps": functools.partial(_is_number, most=1e9),
    **dict.fromkeys(("image_size", "patch_size"), _is_size),
}
_BERT: dict[str, Callable[[Any], bool]] = {
    **_ANY,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), _is_rate),
    "qkv_bias": _is_flag,
}
_POOLED: dict[str, Callable[[Any], bool]] = {
    **_BERT,
    **dict.fromkeys(("intermediate_size", "pooler_output_size"), _is_count),
    "pooler_act": _is_activation,
}
_DINO: dict[str, Callable[[Any], bool]] = {
    **_BERT,
    "mlp_ratio": functools.partial(_is_number, most=_SIZE_LIMIT),
    "layerscale_value": functools.partial(_is_number, most=1e9),
    "drop_path_rate": _is_rate,
    "use_swiglu_ffn": _is_flag,
}
_TOWER: dict[str, Callable[[Any], bool]] = {**_ANY, "intermediate_size": _is_count, "attention_dropout": _is_rate}

# class of a configuration -> what of it shapes the network, and what values it may have
SHAPES: dict[str, dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("ViTConfig", "DeiTConfig"), _POOLED),
    "Dinov2Config": {**_DINO, "use_mask_token": _is_flag},
    "Dinov2WithRegistersConfig": {**_DINO, "num_register_tokens": functools.partial(_is_count, least=0)},
    "DINOv3ViTConfig": {
        **_TOWER,
        **dict.fromkeys(("query_bias", "key_bias", "value_bias", "proj_bias", "mlp_bias", "use_gated_mlp"), _is_flag),
        **dict.fromkeys(("pos_embed_shift", "pos_embed_jitter", "pos_embed_rescale"), _is_angle),
        "num_register_tokens": functools.partial(_is_count, least=0),
        "layerscale_value": functools.partial(_is_number, most=1e9),
        "rope_theta": functools.partial(_is_number, most=1e9),
        "drop_path_rate": _is_rate,
    },
    "CLIPVisionConfig": {**_TOWER, "projection_dim": _is_count},
    "SiglipVisionConfig": {**_TOWER, "vision_use_head": _is_flag},
}
_OPTIONAL = {
    "use_mask_token",
    "use_swiglu_ffn",
    "vision_use_head",
    "pooler_output_size",
    "pooler_act",
}  # not in every version
# class -> what else tells its models apart: arguments of the constructor, or how a backbone gives its stages
_MADE_WITH: dict[str, Callable[[Any], bool]] = {"add_pooling_layer": _is_flag, "use_mask_token": _is_flag}
_STAGES: dict[str, Callable[[Any], bool]] = {
    "out_features": _is_stages,
    "apply_layernorm": _is_flag,
    "reshape_hidden_states": _is_flag,
}
OPTIONS = {
    **dict.fromkeys(("ViTModel", "DeiTModel"), _MADE_WITH),
    **dict.fromkeys(("Dinov2Backbone", "Dinov2WithRegistersBackbone", "DINOv3ViTBackbone"), _STAGES),
}


def check_recipe(recipe: Any) -> None:
    """Refuse what no model has before anything of that size is built."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("config"), dict):
        raise CheckpointError("the skeleton must be an object with 'class', 'config' and 'num_labels'")
    cls, config = recipe.get("class"), recipe["config"]
    if not isinstance(cls, str) or cls not in CLASSES:
        raise CheckpointError(f"the class of the skeleton must be one of {', '.join(CLASSES)}")
    more = OPTIONS.get(cls, {})
    if set(recipe) != {"class", "config", "num_labels", *more}:
        raise CheckpointError(f"the skeleton of a {cls} must have exactly class, config, num_labels {sorted(more)}")
    if not _is_count(recipe["num_labels"], 0) or not all(fits(recipe[name]) for name, fits in more.items()):
        raise CheckpointError("the skeleton has a num_labels or an option that no model has")
    known = SHAPES[CLASSES[cls][1]]
    odd = sorted(set(config) ^ (set(known) - (_OPTIONAL - set(config))))
    if odd:
        raise CheckpointError(f"the skeleton {'has an unknown' if odd[0] in config else 'lacks the'} entry {odd[0]}")
    for name, value in config.items():
        if not known[name](value):
            raise CheckpointError(f"the skeleton has {name} {str(value)[:40]!r}, which no model has")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise CheckpointError(
            f"the skeleton has {config['num_attention_heads']} heads, which do not divide {config['hidden_size']}"
        )


def _is_list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(one) in kinds for one in value)


USAGE: dict[str, Callable[[Any], bool]] = {
    "input_size": lambda value: _is_list(value, int) and len(value) == 3 and min(value) > 0,
    **dict.fromkeys(("mean", "std"), lambda value: _is_list(value, int, float) and len(value) > 0),
    "crop_pct": lambda value: type(value) in (int, float) and value > 0,
    **dict.fromkeys(("interpolation", "crop_mode"), lambda value: isinstance(value, str)),
    "num_classes": lambda value: type(value) is int and value >= 0,
    "label_names": lambda value: _is_list(value, str),
}


def around(kind: str, config: Any) -> Any:
    """The configuration of images and texts around that of an image tower."""
    with quiet():  # it warns of its own usual values for texts
        return getattr(library(), WHOLE[kind])(vision_config=config.to_dict())


@contextmanager
def quiet() -> Iterator[None]:
    """Keep Transformers from printing what its models do not find in a file."""
    logging = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
