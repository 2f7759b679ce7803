"""The grid of a sweep: some options with several values each, and all combinations of them."""

from __future__ import annotations

import difflib
import hashlib
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from hiap.errors import InputError
from hiap.training.options import help_of

__all__ = ["Axis", "combinations", "parse_axis", "run_name"]

UNSAFE = re.compile(r"[^\w.%+-]+")  # in the name of a folder
LONGEST = 120  # bytes of such a name


@dataclass(frozen=True)
class Axis:
    """An option and its values, as they were written."""

    option: str
    values: tuple[str, ...]


def parse_axis(text: str) -> Axis:
    """From "target=35%,50%", or "keep_blocks=0,11;0" where the values themselves have commas.

    Raises:
        InputError: there is no such option, or it has no values, or one value twice.
    """
    name, equals, listed = text.partition("=")
    option = name.strip().removeprefix("--").replace("-", "_")
    if not equals or not option:
        raise InputError(f"--grid {text!r} must be an option and its values, such as target=35%,50%")
    known = ["config", *(one for one, _, _ in help_of())]
    if option not in known:
        close = difflib.get_close_matches(option, known, 1)
        meant = f"did you mean {close[0]}?" if close else "`hiap sweep --help-all` lists all options"
        raise InputError(f"--grid {text!r}: there is no option {option!r}; {meant}")
    values = tuple(value.strip() for value in listed.split(";" if ";" in listed else ",") if value.strip())
    if not values:
        raise InputError(f"--grid {text!r} has no values: separate them with commas, such as target=35%,50%")
    twice = [value for value in values if values.count(value) > 1]
    if twice:
        raise InputError(f"--grid {text!r} has the value {twice[0]!r} twice")
    return Axis(option, values)


def combinations(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination of the values; the last option changes fastest.

    Raises:
        InputError: an option is named twice, or two combinations would share a folder.
    """
    names = [axis.option for axis in axes]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise InputError(f"--grid {twice[0]} is given twice: write all of its values in one")
    found = [dict(zip(names, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))]
    seen: dict[str, dict[str, str]] = {}
    for one in found:
        other = seen.setdefault(run_name(one), one)
        if other is not one:
            differ = next(name for name in one if one[name] != other[name])
            raise InputError(
                f"the values {other[differ]!r} and {one[differ]!r} of {differ} would share the folder {run_name(one)}; "
                "write one of them differently"
            )
    return found


def run_name(options: dict[str, str]) -> str:
    """The folder of a combination, such as "target=35%_ratio=5-1"; a very long name ends in a digest of the whole."""
    name = "_".join(f"{option}={UNSAFE.sub('-', value)}" for option, value in options.items())
    if len(name.encode()) <= LONGEST:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name.encode()[: LONGEST - 9].decode(errors='ignore')}-{digest}"
