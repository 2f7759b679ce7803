"""The figure that a run is judged by on the validation images."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ERROR", "METRICS", "TOP1", "Metric"]


@dataclass(frozen=True)
class Metric:
    """A figure in percent.

    Attributes:
        key: in records.
        label: in print.
        sign: 1 where more is better, else -1.
    """

    key: str
    label: str
    sign: int

    def better(self, one: float, other: float) -> bool:
        return self.sign * one > self.sign * other

    def say(self, value: float) -> str:
        return f"{self.label} {value:.2f} %"


TOP1 = Metric("top1", "top-1", 1)
ERROR = Metric("error", "feature error", -1)
METRICS = (TOP1, ERROR)
