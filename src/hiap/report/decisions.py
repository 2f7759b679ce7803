"""When the gates decided: how many of the decisions were final at a time, and which closed units came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hiap.nn.compact import Widths
from hiap.training.snapshots import UNITS, unpack

__all__ = ["MACRO_UNITS", "UNIT_NAMES", "Decisions", "decisions_of"]

MACRO_UNITS = ("heads", "ffns")  # whole structures; the others are parts of them
UNIT_NAMES = {
    "heads": "heads",
    "ffns": "FFNs",
    "value_dims": "value dims",
    "qk_dims": "q/k dims",
    "neurons": "neurons",
}


@dataclass(frozen=True)
class Decisions:
    """The decisions of a search, for each kind of unit that has any.

    Attributes:
        at: time of each snapshot, in epochs.
        units: how many there are.
        final: at each snapshot, the share of units that are from then on as they are at the end.
        back: at each snapshot, how many units are open that were closed in the one before.
        returned: units that were closed at some time, and are open at the end.
    """

    at: list[float]
    units: dict[str, int]
    final: dict[str, list[float]]
    back: dict[str, list[int]]
    returned: dict[str, int]

    def settled(self, kinds: Sequence[str], share: float) -> float | None:
        """When this share of the decisions of some kinds was final; None if there are none."""
        total = sum(self.units.get(kind, 0) for kind in kinds)
        for i, at in enumerate(self.at if total else ()):
            if sum(self.final[kind][i] * self.units[kind] for kind in kinds if kind in self.units) >= share * total:
                return at
        return None


def decisions_of(snapshots: Sequence[dict[str, Any]], dense: Sequence[Widths]) -> Decisions | None:
    """What the snapshots of a search tell; None where there are fewer than two."""
    if len(snapshots) < 2:
        return None
    masks = [unpack(one["decisions"], dense) for one in snapshots]
    units, final, back, returned = {}, {}, {}, {}
    for kind in UNITS:
        rows = np.stack([mask[kind] for mask in masks])  # (snapshots, units)
        if not rows.shape[1]:
            continue
        changed = rows[1:] != rows[:-1]
        last = np.where(changed.any(0), len(rows) - 1 - np.argmax(changed[::-1], axis=0), 0)
        units[kind] = rows.shape[1]
        final[kind] = [float((last <= i).mean()) for i in range(len(rows))]
        back[kind] = [0, *(changed & rows[1:]).sum(1).tolist()]
        returned[kind] = int((rows[-1] & ~rows.all(0)).sum())
    return Decisions([float(one["at"]) for one in snapshots], units, final, back, returned)
