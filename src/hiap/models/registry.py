"""The families that are known, and which of them a model is of."""

from __future__ import annotations

import sys
from importlib import import_module

from torch import nn

from hiap.errors import CheckpointError, InputError, UnsupportedModelError
from hiap.models.family import Family, Site
from hiap.models.timm import TIMM
from hiap.models.timm_beit import TIMM_BEIT
from hiap.models.timm_eva import TIMM_EVA
from hiap.nn.compact import Widths

__all__ = ["family_named", "family_of", "find_family", "register_family", "sites", "widths_of"]

_FAMILIES: dict[str, Family] = {family.name: family for family in (TIMM, TIMM_EVA, TIMM_BEIT)}
_LIBRARIES = ("torchvision", "transformers")  # each with a FAMILY in a module of ours, which is imported on demand


def register_family(family: Family) -> None:
    """Make a family known: models of it can be pruned, saved and, where it is registered too, loaded.

    Of several families that accept a model, the one registered last has it.
    """
    if not isinstance(family, Family):
        raise InputError(f"a family is an instance of a subclass of hiap.Family; found {family!r}")
    known = _of_library(family.name, needed=True) if family.name in _LIBRARIES else _FAMILIES.get(family.name)
    if known is not None and type(known).__qualname__ != type(family).__qualname__:
        raise InputError(f"there is another family with the name {family.name!r}: {type(known).__name__}")
    _FAMILIES.pop(family.name, None)
    _FAMILIES[family.name] = family


def family_of(model: nn.Module) -> Family:
    """The family of a model.

    Raises:
        UnsupportedModelError: it is of none.
    """
    found = find_family(model)
    if found is not None:
        return found
    for wrapped in ("module", "_orig_mod"):
        inner = getattr(model, wrapped, None)
        if isinstance(inner, nn.Module) and find_family(inner) is not None:
            raise UnsupportedModelError(f"the model is wrapped in {type(model).__name__}: pass model.{wrapped}")
    TIMM.refuse_class(model)


def find_family(model: nn.Module) -> Family | None:
    """The family of a model, the one registered last first; None if it is of none."""
    own = getattr(type(model), "own_family", None)  # of a network of ours that is made from models of any family
    if isinstance(own, Family):
        return own
    found = next((family for family in reversed(_FAMILIES.values()) if family.accepts(model)), None)
    return found or next((one for one in map(_of_library, _LIBRARIES) if one is not None and one.accepts(model)), None)


def _of_library(name: str, needed: bool = False) -> Family | None:
    """The family of a library's models; None where nobody has imported the library, so that none can be here."""
    if name not in sys.modules and not needed:
        return None
    family: Family = import_module(f"hiap.models.{name}").FAMILY
    return family


def family_named(name: object) -> Family:
    """The family that a saved model names.

    Raises:
        CheckpointError: it is not registered here.
    """
    found = _FAMILIES.get(name) if isinstance(name, str) else None
    if found is None and isinstance(name, str) and name in _LIBRARIES:
        found = _of_library(name, needed=True)
    if found is None:
        known = ", ".join(map(repr, _FAMILIES))
        raise CheckpointError(
            f"names the family {name!r}, which is not known here (known: {known}). Register it with "
            "hiap.register_family first"
        )
    return found


def sites(model: nn.Module) -> list[Site]:
    """The blocks of a dense, gated or compact model, in their order.

    Raises:
        UnsupportedModelError: with the module, the reason and what would be needed.
    """
    return family_of(model).sites(model)


def widths_of(model: nn.Module) -> list[Widths]:
    """The widths of the blocks of a model, in their order."""
    return [site.widths for site in sites(model)]
