"""`merge_tokens`: a dense or compact model that merges similar tokens on their way."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from hiap.errors import ExtractionError, InputError, UnsupportedModelError
from hiap.models.family import Family, ImageSize, Preprocessing, Recipe, Site, logits_of
from hiap.models.registry import family_of, widths_of
from hiap.nn.token_merging import MergingBlocks, run_merging
from hiap.pruning.attach import is_gated
from hiap.pruning.extract import TOLERANCE, check_dtype, difference, probe_images, provenance_of, rebuild
from hiap.pruning.topology import Topology

__all__ = ["Merged", "MergedFamily", "check_mergeable", "check_merged", "merge_tokens", "unmerged"]


class MergedFamily(Family):
    """What is known of a model that merges tokens: what is known of the model inside it."""

    name = "merged"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, Merged)

    def sites(self, model: nn.Module) -> list[Site]:
        family, inside = _inside(model)
        return [replace(site, name=f"model.{site.name}") for site in family.sites(inside)]

    def stem(self, model: nn.Module) -> nn.Module:
        family, inside = _inside(model)
        return family.stem(inside)

    def input_shape(self, model: nn.Module, size: ImageSize = None) -> tuple[int, int, int]:
        family, inside = _inside(model)
        return family.input_shape(inside, size)

    def tokens(self, model: nn.Module, size: ImageSize = None) -> int:
        family, inside = _inside(model)
        return family.tokens(inside, size)

    def fixed_macs(self, model: nn.Module, size: ImageSize = None) -> int:
        family, inside = _inside(model)
        return family.fixed_macs(inside, size)

    def merging(self, model: nn.Module) -> tuple[int, int] | None:
        own = cast(Merged, model)
        return own.most, own.prefix

    def embed(self, model: nn.Module, images: Tensor) -> Tensor:
        family, inside = _inside(model)
        return family.embed(inside, images)

    def head(self, model: nn.Module, tokens: Tensor) -> Tensor:
        family, inside = _inside(model)
        return family.head(inside, tokens)

    def fold_stem(self, model: nn.Module) -> nn.Module | None:
        family, inside = _inside(model)
        return family.fold_stem(inside)

    def fold_fixed_stem(self, model: nn.Module) -> nn.Module | None:
        family, inside = _inside(model)
        return family.fold_fixed_stem(inside)

    def tokens_read(self, model: nn.Module) -> int | None:
        family, inside = _inside(model)
        return family.tokens_read(inside)

    def take_blocks(self, model: nn.Module) -> list[nn.Module]:
        family, inside = _inside(model)
        own = cast(Merged, model)
        return [MergingBlocks(family.take_blocks(inside), own.most, own.prefix, own.restore)]

    def classes(self, model: nn.Module) -> int:
        family, inside = _inside(model)
        return family.classes(inside)

    def classifier(self, model: nn.Module) -> list[nn.Module]:
        family, inside = _inside(model)
        return family.classifier(inside)

    def set_classes(self, model: nn.Module, classes: int) -> None:
        family, inside = _inside(model)
        family.set_classes(inside, classes)

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        family, inside = _inside(model)
        return family.preprocessing(inside)

    def usage(self, model: nn.Module) -> dict[str, Any]:
        family, inside = _inside(model)
        return family.usage(inside)

    def set_usage(self, model: nn.Module, usage: Mapping[str, Any]) -> None:
        family, inside = _inside(model)
        family.set_usage(inside, usage)

    def ends(self, model: nn.Module) -> list[nn.Module]:
        return list(cast(Merged, model).ends)

    def without_decay(self, model: nn.Module) -> set[str]:
        family, inside = _inside(model)
        return {f"model.{name}" for name in family.without_decay(inside)}

    def unread(self, model: nn.Module) -> list[nn.Parameter]:
        family, inside = _inside(model)
        return family.unread(inside)

    def describe(self, model: nn.Module, origin: Recipe | None = None) -> Recipe:
        family, inside = _inside(model)
        return family.describe(inside, origin)

    def build(self, recipe: Recipe) -> nn.Module:
        raise NotImplementedError("a recipe is that of the model inside, whose family builds it")


def _inside(model: nn.Module) -> tuple[Family, nn.Module]:
    own = cast(Merged, model)
    return own.family, own.model


class Merged(nn.Module):
    """A model whose blocks merge tokens. Made by `merge_tokens`.

    Args:
        model: that `check_mergeable` accepts, with blocks of ours; it becomes a part of this one.
        most: how many tokens each block merges away.

    Attributes:
        ends: modules that hooks can be put on, to see what each block sends on: see `Family.ends`.
    """

    own_family = MergedFamily()

    def __init__(self, model: nn.Module, most: int) -> None:
        super().__init__()
        self.family = family_of(model)
        self.model = model
        self.most, self.prefix = most, self.family.prefix_tokens(model)
        self.restore = self.family.tokens_read(model) is None
        self.names = [site.name for site in self.family.sites(model)]
        self.ends = nn.ModuleList(nn.Identity() for _ in self.names)
        if (provenance := provenance_of(model)) is not None:
            self.hiap = provenance
        if names := getattr(model, "class_names", None):
            self.class_names = names

    def forward(self, images: Tensor) -> Tensor:
        blocks = [self.model.get_submodule(name) for name in self.names]
        x = self.family.embed(self.model, images)
        x = run_merging(blocks, x, self.most, self.prefix, self.restore, tuple(self.ends))
        return self.family.head(self.model, x)

    def extra_repr(self) -> str:
        return f"most={self.most}, prefix={self.prefix}"


@torch.no_grad()
def merge_tokens(model: nn.Module, r: int) -> Merged:
    """A copy of a dense or compact model in which every block with attention merges `r` pairs of similar tokens.

    Fewer tokens make the later layers cheaper, at some loss of accuracy; nothing is trained. The result is counted,
    optimised, exported and, if the model is a compact one, saved like any model (`macs`, `optimize`, `export_model`,
    `save`). With r = 0 it computes what the model does, which is checked here.

    Args:
        r: tokens that each block merges away, at most half of those it has. Class tokens and registers are not merged.

    Raises:
        InputError: r is no whole number of at least 0, the model has gates or merges tokens already, or there is no
            attention to merge by.
        UnsupportedModelError: its attention knows the places of tokens (rotary or relative positions), or its family
            does not come apart.
        ExtractionError: the logits without merging are not those of the model.
    """
    if type(r) is not int or r < 0:
        raise InputError(f"the number of tokens to merge in a block must be a whole number, 0 or more; found {r!r}")
    if isinstance(model, Merged):
        raise InputError(
            f"the model merges tokens already, {model.most} in each block: start from the model inside it (its "
            "attribute `model`)"
        )
    if is_gated(model):
        raise InputError("the model has gates: extract it first")
    check_mergeable(model)
    source = copy.deepcopy(model).eval()
    source = rebuild(source, Topology.from_counts(source), widths_of(source))
    merged = Merged(source, r).eval()
    _check_unmerged(model, merged)
    return merged


def unmerged(model: nn.Module) -> nn.Module:
    """The model inside one that merges tokens; any other model is returned as it is."""
    return model.model if isinstance(model, Merged) else model


def check_mergeable(model: nn.Module) -> None:
    """Refuse a model whose tokens cannot be merged.

    Raises:
        InputError: there is no attention to merge by.
        UnsupportedModelError: its attention knows the places of tokens, or its family does not come apart.
    """
    family = family_of(model)
    found = family.sites(model)
    if not family.comes_apart:
        raise UnsupportedModelError(
            f"models of the family {family.name!r} run by their own forward, so that nothing can merge tokens between "
            "their layers. To support them HiAP would need `embed` and `head` (docs/family.md)."
        )
    if not any(site.widths.heads for site in found):
        raise InputError("no block of the model has attention, so that no tokens can be compared and merged")
    for site in found:
        if site.pairs is not None:
            _refuse_positions(site, "rotary")
        if getattr(site.block.attn, "position", None) is not None:
            _refuse_positions(site, "relative")


def check_merged(model: nn.Module, r: int) -> None:
    """Refuse a model that cannot merge so many tokens in each block and have some left.

    Raises:
        InputError: r is too large, or there is no attention to merge by.
        UnsupportedModelError: see `check_mergeable`.
    """
    check_mergeable(model)
    family = family_of(model)
    blocks = sum(bool(site.widths.heads) for site in family.sites(model))
    patches = family.tokens(model) - family.prefix_tokens(model)
    if r * blocks >= patches:
        raise InputError(
            f"merging {r} tokens in each of {blocks} blocks leaves none: an image has {patches} patch tokens. "
            + (f"Merge at most {most}" if (most := (patches - 1) // blocks) else "Merge none")
        )


def _refuse_positions(site: Site, kind: str) -> NoReturn:
    raise UnsupportedModelError(
        f"{site.name} has {kind} positions: its attention knows where each token is, and a merged token is in several "
        "places. Token merging works with models whose positions are added to the tokens."
    )


def _check_unmerged(model: nn.Module, merged: Merged) -> None:
    """Compare a model with one made from it that would merge nothing."""
    dtype, device = check_dtype(model), next(model.parameters()).device
    plain = copy.deepcopy(merged).to(dtype)
    plain.most = 0
    x = probe_images(model, 2).to(device, dtype)
    expected = logits_of(copy.deepcopy(model).eval().to(dtype)(x))
    measured = difference([expected], [plain(x)])
    if not measured <= TOLERANCE[dtype]:
        raise ExtractionError(
            f"the network does not reproduce its model without merging any tokens: they differ by {measured:.3g}"
        )
