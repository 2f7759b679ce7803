"""The image processor of a model of Transformers, as the JSON files beside its weights describe it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hiap.models.transformers_parts import CLASSES, USES, pair

__all__ = ["PROCESSOR", "processor_of", "read_processor"]

PROCESSOR = "preprocessor_config.json"
_NESTED = "processor_config.json"  # of texts and images: that of images is one of its entries
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_BY_NAME = {name: number for number, name in _RESAMPLE.items()}


def processor_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The image processor that a saved configuration implies.

    Args:
        config: what config.json holds, with `preprocessing`.

    Returns:
        What `preprocessor_config.json` should hold. None where the mean and std are not known, or where no processor of
        Transformers treats images in the same way.
    """
    known, classes = config.get("preprocessing") or {}, config.get("architectures") or [""]
    if classes[0] not in CLASSES or not (known.get("mean") and known.get("std")):
        return None
    usual = USES[CLASSES[classes[0]][0]]
    how, crop, share = (known.get(name) or getattr(usual, name) for name in ("interpolation", "crop_mode", "crop_pct"))
    height, width = pair((config.get("vision_config") or config)["image_size"])
    if how not in _BY_NAME or crop not in ("squash", "center") or (crop == "center" and height != width):
        return None
    image, (down, right) = {"height": height, "width": width}, (int(edge / share + 1e-6) for edge in (height, width))
    size = {"height": down, "width": right} if crop == "squash" else {"shortest_edge": down}
    crops = {"crop_size": image} if size != image else {}
    return {
        "image_processor_type": "CLIPImageProcessor" if crops else "ViTImageProcessor",  # which does not crop
        **{
            "do_resize": True,
            "size": size,
            "do_center_crop": bool(crops),
            **crops,
            "resample": _BY_NAME[how],
            "do_rescale": True,
            "rescale_factor": 1 / 255,
        },
        **{"do_normalize": True, "image_mean": list(known["mean"]), "image_std": list(known["std"])},
        "do_convert_rgb": True,
    }


def read_processor(where: str) -> tuple[str, dict[str, Any]]:
    """What the image processor in a folder, or of a name on the hub, says of mean, std, resampling and crop.

    Returns:
        The file that says so, and the usage by our names; nothing where there is no such file.
    """
    file, given = _find(where)
    size = given.get("size")
    usage = {"mean": given.get("image_mean"), "std": given.get("image_std")}
    usage["interpolation"] = _RESAMPLE.get(given.get("resample", -1))
    edge, crop = _edge(size), _edge(given.get("crop_size"))
    if given.get("do_center_crop") and edge and crop:
        usage |= {"crop_pct": crop / edge, "crop_mode": "center"}
    elif isinstance(size, int) or "height" in (size or {}):
        usage |= {"crop_pct": 1.0, "crop_mode": "squash"}
    if given and not given.get("do_normalize", True):
        usage |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    return file, {key: value for key, value in usage.items() if value is not None}


def _find(where: str) -> tuple[str, dict[str, Any]]:
    """The file with the image processor and its content; as in Transformers, the nested one comes first."""
    for name in (_NESTED, PROCESSOR):
        file: Any = Path(where) / name
        if not Path(where).is_dir():
            quietly = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
            file = importlib.import_module("transformers.utils").cached_file(where, name, **quietly)
        if file is None or not Path(file).is_file():
            continue
        given = json.loads(Path(file).read_text(encoding="utf-8"))
        given = given.get("image_processor") if name == _NESTED else given
        if given:
            return str(file), dict(given)
    return "", {}


def _edge(size: Any) -> int | None:
    """One number for a size that is written as one, or as height and width, or as the shortest edge."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size if isinstance(size, int) and size > 0 else None
