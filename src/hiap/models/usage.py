"""How a model is used, as it is saved with it: what of it can be read, and what it changes in the preprocessing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from hiap.errors import CheckpointError
from hiap.models.family import Preprocessing

__all__ = ["check_entries", "with_usage"]


def _numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(type(one) in (int, float) for one in value)


_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "input_size": lambda value: _numbers(value) and len(value) == 3 and all(type(n) is int and n > 0 for n in value),
    "mean": _numbers,
    "std": lambda value: _numbers(value) and min(value) > 0,
    "crop_pct": lambda value: type(value) in (int, float) and value > 0,
    "interpolation": lambda value: isinstance(value, str),
    "crop_mode": lambda value: isinstance(value, str),
}


def check_entries(where: str, usage: Mapping[str, Any]) -> None:
    """Raise a CheckpointError for a value that could not be read; `where` names it."""
    for name, value in usage.items():
        fits = _ENTRIES.get(name)
        if fits is not None and not fits(value):
            raise CheckpointError(f"{where} has {name} {str(value)[:40]!r}, which cannot be read")


def with_usage(own: Preprocessing, usage: Mapping[str, Any]) -> Preprocessing:
    """The preprocessing that was noted with a model, and its own where nothing was."""
    found = {name: usage[name] for name in ("interpolation", "crop_pct", "crop_mode") if name in usage}
    found |= {name: tuple(usage[name]) for name in ("mean", "std") if name in usage}
    return replace(own, **found)
