"""Weights for timm's ViTs: what their names and shapes tell of the model they are for."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import timm
from torch import Tensor

__all__ = ["classes_in", "guess_weights"]

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
