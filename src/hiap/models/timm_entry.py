"""What `timm.create_model("local-dir:FOLDER")` gives back for a folder of `hiap.save`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from timm.models._features import FeatureGetterNet
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from hiap.errors import InputError

__all__ = ["entry_point"]


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
    model: Any = load(folder)
    if not isinstance(model, (VisionTransformer, Eva, Beit)):
        asked = {"num_classes": num_classes, "img_size": img_size, "features_only": features_only or None}
        given = [name for name, value in asked.items() if value is not None]
        if given:
            raise InputError(
                f"{folder} holds a {type(model).__name__}, which is not a timm model: {', '.join(given)} cannot be "
                "set. Load it with hiap.load"
            )
        found: nn.Module = model.train()
        return found
    if num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
        model.__dict__.pop("class_names", None)
    wanted = (img_size, img_size) if isinstance(img_size, int) else img_size
    if wanted is not None and tuple(wanted) != model.patch_embed.img_size:
        if isinstance(model, Beit):
            height, width = model.patch_embed.img_size
            raise InputError(f"a pruned BEiT is for images of one size, {height}x{width}; found {img_size}")
        model.set_input_size(wanted)
    result: nn.Module = FeatureGetterNet(model, out_indices) if features_only else model
    return result.train()
