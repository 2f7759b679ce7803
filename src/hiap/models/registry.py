"""The families that are known, and which of them a model is of."""

from __future__ import annotations

from torch import nn

from hiap.errors import CheckpointError, InputError, UnsupportedModelError
from hiap.models.family import Family, Site
from hiap.models.timm import TIMM
from hiap.models.transformers import TRANSFORMERS
from hiap.nn.compact import Widths

__all__ = ["family_named", "family_of", "register_family", "sites", "widths_of"]

_FAMILIES: dict[str, Family] = {TIMM.name: TIMM}
_OPTIONAL: dict[str, Family] = {TRANSFORMERS.name: TRANSFORMERS}  # of packages that need not be there


def register_family(family: Family) -> None:
    """Make a family known: models of it can be pruned, saved and, where it is registered too, loaded."""
    if not isinstance(family, Family):
        raise InputError(f"a family is an instance of a subclass of hiap.Family; found {family!r}")
    known = (_OPTIONAL | _FAMILIES).get(family.name)
    if known is not None and type(known) is not type(family):
        raise InputError(f"there is another family with the name {family.name!r}: {type(known).__name__}")
    _FAMILIES[family.name] = family


def family_of(model: nn.Module) -> Family:
    """The family of a model.

    Raises:
        UnsupportedModelError: it is of none.
    """
    found = _find(model)
    if found is not None:
        return found
    for wrapped in ("module", "_orig_mod"):
        inner = getattr(model, wrapped, None)
        if isinstance(inner, nn.Module) and _find(inner) is not None:
            raise UnsupportedModelError(f"the model is wrapped in {type(model).__name__}: pass model.{wrapped}")
    TIMM.refuse_class(model)


def _find(model: nn.Module) -> Family | None:
    return next((family for family in (_OPTIONAL | _FAMILIES).values() if family.accepts(model)), None)


def family_named(name: object) -> Family:
    """The family that a saved model names.

    Raises:
        CheckpointError: it is not registered here.
    """
    found = (_OPTIONAL | _FAMILIES).get(name) if isinstance(name, str) else None
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
