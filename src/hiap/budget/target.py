"""A budget as people write it: "7.4G", "42%", "1.2M params", "50% params", "1.8ms", "2.0x"."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from hiap.errors import BudgetError

__all__ = ["BudgetError", "Target", "check_falling"]

LEAST = 1000.0  # a bare number below it is no count of MACs: its unit was forgotten
NEAR = 0.01  # of a target, that a model may end below it
FORMS = "7.4G, 850M, 42%, '1.2M params' or '42% params', or in time 1.8ms or 2.0x"


@dataclass(frozen=True)
class Target:
    """A budget.

    Attributes:
        unit: "macs", "params", "ms" or "mJ"; "share", "share of macs" or "share of params" (of the dense model's cost);
            "x" (times cheaper than it).
    """

    value: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Target:
        """From "7.4G", "850M", "42%", "1.2M params", "42% params", "1.8ms", "900mJ" or "2.0x".

        Raises:
            BudgetError: with the forms that are read, or what was probably meant.
        """
        shown = text.strip() if len(text) <= 40 else f"{text.strip()[:40]}..."
        number, counted = r"([0-9]+\.?[0-9]*|\.[0-9]+)", r"(macs|params|)"
        form = rf"{number}\s*(?:(x|ms|mj)|(%|[kmg]?)\s*{counted})"
        found = re.fullmatch(form, text.strip(), re.IGNORECASE | re.ASCII)
        value = float(found[1]) if found else 0.0
        if not found or not 0 < value < math.inf:
            raise BudgetError(f"target {shown!r} is not a budget; write it as {FORMS}")
        suffix, scale, counted = ((found[i] or "").lower() for i in (2, 3, 4))
        if suffix:
            target = cls(value, "mJ" if suffix == "mj" else suffix)
        elif scale == "%":
            target = cls(value / 100, f"share of {counted}" if counted else "share")
        else:
            target = cls(value * {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[scale], counted or "macs")
        if not (suffix or scale or counted) and value < LEAST:
            raise BudgetError(f"target {shown!r} has no unit: did you mean {_meant(value)}?")
        share = target.absolute(1.0)
        if (scale == "%" or suffix == "x") and share >= 1:
            more, less = ("more than", "less") if scale else ("slower than", "more than 1x, such as 2x")
            dense = "the dense model itself" if share == 1 else f"{more} the dense model"
            raise BudgetError(f"a target of {shown} is {dense}: nothing to prune; choose {less}")
        return target

    def absolute(self, dense: float) -> float:
        """The target in the unit of the cost, given that of the dense model."""
        if self.unit.startswith("share"):
            return self.value * dense
        return dense / self.value if self.unit == "x" else self.value

    @property
    def kind(self) -> str:
        """What is counted: "macs", "params", "time" or "energy". A bare share is one of MACs, or of a table's unit."""
        if self.unit in ("ms", "x", "mJ"):
            return "energy" if self.unit == "mJ" else "time"
        return "params" if self.unit.endswith("params") else "macs"


def check_falling(texts: Sequence[str]) -> None:
    """Refuse several targets that are not of one unit, or do not fall.

    Raises:
        BudgetError: with the first two that do not follow each other.
    """
    for before, after in pairwise(texts):
        large, small = Target.parse(before), Target.parse(after)
        if large.unit != small.unit:
            raise BudgetError(
                f"several targets must have one unit; found {before} and {after}: write 70%,50% or 0.8G,0.5G or 2x,3x"
            )
        if small.absolute(1.0) >= large.absolute(1.0):
            raise BudgetError(
                f"several targets must decrease; found {after} after {before}: name the largest model first"
            )
        if small.absolute(1.0) > (1 - NEAR) * large.absolute(1.0):
            raise BudgetError(f"{before} and {after} are too close: a model may end {NEAR:.0%} below its target")


def _meant(value: float) -> str:
    """What a number without a unit was probably meant to be."""
    if value < 1:
        return f"{100 * value:g}%"
    if value < 10:
        return f"{value:g}G" if value == 1 else f"{value:g}x (in time) or {value:g}G"
    return f"{value:g}%" if value < 100 else f"{value:g}M"
