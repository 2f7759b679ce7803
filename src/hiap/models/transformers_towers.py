"""A pruned image tower in a model of images and texts."""

from __future__ import annotations

from torch import nn

from hiap.errors import InputError
from hiap.models.transformers_configs import dense_config, is_pruned, note_in_config, record_of
from hiap.models.transformers_parts import WHOLE_MODELS, ViT, config_of, core_of, kind_of, library

__all__ = ["set_tower"]


def set_tower(model: ViT, tower: ViT) -> None:
    """Put a pruned image tower into a `CLIPModel` or a `SiglipModel`, in place.

    `get_image_features`, the logits of images and texts and `save_pretrained` then work with it.

    Args:
        model: of Transformers, of images and texts.
        tower: what `hiap.extract` or a run made of its `vision_model`, or of a model with the same tower: a
            `CLIPVisionModel`, a `CLIPVisionModelWithProjection` (whose projection is taken too), a
            `CLIPForImageClassification`, or the same of SigLIP.

    Raises:
        InputError: one of them is something else, or they do not fit.
    """
    fitting = {"clip": "CLIPModel", "siglip": "SiglipModel"}
    if not any(isinstance(model, getattr(library(), name)) for name in WHOLE_MODELS):
        raise InputError(f"a tower goes into a {' or a '.join(WHOLE_MODELS)}; found a {type(model).__name__}")
    if not is_pruned(getattr(tower, "config", None)):
        raise InputError(
            f"the tower must be a pruned one, of hiap.extract or hiap.load; found a {type(tower).__name__}"
        )
    if fitting.get(kind_of(tower)) != type(model).__name__:
        raise InputError(f"a {type(tower).__name__} does not fit into a {type(model).__name__}")
    old, new = model.config.vision_config, dense_config(config_of(tower))
    for name in ("hidden_size", "num_channels", "vision_use_head"):
        if getattr(old, name, None) != getattr(new, name, None):
            found = f"{getattr(new, name)} instead of {getattr(old, name)}"
            raise InputError(f"the tower does not fit into the {type(model).__name__}: its {name} is {found}")
    projection: nn.Linear | None = getattr(tower, "visual_projection", None)
    if projection is not None:
        if projection.weight.shape != model.visual_projection.weight.shape:
            shapes = " instead of ".join(str(tuple(one.weight.shape)) for one in (projection, model.visual_projection))
            raise InputError(f"the tower does not fit into the {type(model).__name__}: its projection is {shapes}")
        model.visual_projection = projection
    model.vision_model = core_of(tower)
    note_in_config(model, record_of(tower.config))
    model.config.vision_config = new
