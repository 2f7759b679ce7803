"""What one percent more or less of the dense cost would have changed, as the gates of the run saw it."""

from __future__ import annotations

from typing import Any

from hiap.nn.compact import Widths

__all__ = ["one_percent"]

SHOWN = 6  # changes that are named


def one_percent(record: dict[str, Any]) -> list[str]:
    """In sentences: which widths would go for one percent less, and come for one more; nothing where it is not known.

    Args:
        record: of a run with a target.
    """
    found = record.get("neighbours") or []
    at = next((one for one in found if one["step"] == 0), None)
    if at is None:
        return []
    said = []
    for one in found:
        if one is at:
            continue
        less = one["step"] < 0
        if one["loss"] < 1 if less else one["loss"] > 1:  # widths are so coarse that it costs to use a budget up
            continue
        changes = _changes(at["widths"], one["widths"])
        named = "; ".join(changes[:SHOWN]) + (f"; and {len(changes) - SHOWN} more" if len(changes) > SHOWN else "")
        said.append(
            f"One percent {'less' if less else 'more'} of the dense cost would change {named or 'nothing'}. "
            f"The estimated loss would {_moved(one['loss'] - 1)}."
        )
    return said


def _moved(share: float) -> str:
    if abs(share) < 0.0005:
        return "stay about the same"
    return f"{'rise' if share > 0 else 'fall'} by {abs(share):.1%}"


def _changes(now: list[dict[str, Any]], then: list[dict[str, Any]]) -> list[str]:
    """The widths that differ, block by block."""
    names = {"heads": "heads", "qk_dim": "q/k dims", "value_dim": "value dims", "neurons": "neurons"}
    changes = []
    for i, (old, new) in enumerate(zip(now, then, strict=True)):
        before, after = Widths(**old), Widths(**new)
        for key, name in names.items():
            one, other = getattr(before, key), getattr(after, key)
            if one != other and not (key.endswith("_dim") and not (before.heads and after.heads)):
                changes.append(f"block {i}: {one or 'no'} {name} to {other or 'none'}")
    return changes
