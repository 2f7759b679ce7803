"""What changes over a run, as functions of the step alone: temperature, noise, budget, sharpness (paper, section 3.4).

A run has `total` steps; the topology is decided in the first `freeze` of them. The paper decides over all of its 300
epochs; a run of any other length, or one that freezes early, goes through the same values in its own time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hiap.training.config import Config

__all__ = ["BATCH", "Schedule", "dense_rate", "make_schedule", "projection_interval", "pruning_rate"]

PAPER_EPOCHS = 300
PROJECTIONS = 100  # times the budget moves in a run
BATCH = 256  # by default, and what the rates below are given for
PRUNING, MOST = 5e-4, 1e-3  # peak learning rate while pruning, and the most it becomes with large batches
LONG = 300_000  # images in all epochs, from which on the rate falls
FINE_TUNING, SCRATCH = 1e-4, 1e-3  # peak learning rate of a dense model, with weights and without


def pruning_rate(batch: int, images: int) -> float:
    """The default peak learning rate of a run: it grows with the root of the batch and falls in long runs.

    Short runs of ViT-Ti on Tiny-ImageNet are best at 2e-4, 5e-4 and 5e-4 to 1e-3 with batches of 64, 256 and 1024
    (docs/results.md); the paper's 300 epochs of ImageNet, at batch 256, get 4.6e-5, and it uses 5e-5.

    Args:
        images: seen in all epochs together. From 300,000 on the rate falls with their cube root.
    """
    return min(PRUNING * math.sqrt(batch / BATCH), MOST) * min(1.0, float((LONG / images) ** (1 / 3)))


def dense_rate(batch: int, trained: bool) -> float:
    """The default peak learning rate of the dense epochs: trained weights are only fine-tuned.

    ViT-Ti with a new classifier is best at 1e-4 to 2e-4, with batches of 64 and of 256; 1e-3 costs 5 to 8 points.
    """
    return (FINE_TUNING if trained else SCRATCH) * max(1.0, math.sqrt(batch / BATCH))


@dataclass(frozen=True)
class Schedule:
    """The course of a run.

    Attributes:
        total: steps of the run.
        freeze: steps after which the topology is final.
        tau_start, tau_decay, tau_floor: `max(start * decay^epoch, floor)` over 300 virtual epochs before the freeze.
        noise_start, noise_end: noise scale at the first step and at the freeze, linear between. The paper's stays at 1.
        ramp_start, ramp_end: where the budget begins and ends to fall, as shares of the steps before the freeze.
        ramp_power: 1 falls evenly, 3 fast first.
        sharp_start, sharp_end: logits per unit of log-importance, rising geometrically.
    """

    total: int
    freeze: int
    tau_start: float = 2.0
    tau_decay: float = 0.98
    tau_floor: float = 0.05
    noise_start: float = 1.0
    noise_end: float = 1.0
    ramp_start: float = 0.05
    ramp_end: float = 0.9
    ramp_power: float = 1.0
    sharp_start: float = 2.0
    sharp_end: float = 20.0

    def progress(self, step: int) -> float:
        """How far the search is: 0 at the first step, 1 at the freeze."""
        return min(step / self.freeze, 1.0)

    def temperature(self, step: int) -> float:
        epoch = min(step * PAPER_EPOCHS // self.freeze, PAPER_EPOCHS)
        return max(self.tau_start * float(self.tau_decay**epoch), self.tau_floor)

    def noise(self, step: int) -> float:
        return self.noise_start + (self.noise_end - self.noise_start) * self.progress(step)

    def budget(self, step: int, dense: float, target: float) -> float:
        """The cost allowed at a step: `dense` before the ramp, `target` after it."""
        ramp = (self.progress(step) - self.ramp_start) / (self.ramp_end - self.ramp_start)
        left = float((1.0 - min(max(ramp, 0.0), 1.0)) ** self.ramp_power)
        return target + (dense - target) * left

    def sharpness(self, step: int) -> float:
        return float(self.sharp_start * (self.sharp_end / self.sharp_start) ** self.progress(step))


def make_schedule(config: Config, steps: int) -> Schedule:
    """The course of a run of so many steps; with a target it freezes early and without noise."""
    freeze, noise = (0.15, 0.0) if config.target else (1.0, 1.0)
    same = ("tau_start", "tau_decay", "tau_floor", "noise_start", "ramp_start", "ramp_end", "ramp_power")
    return Schedule(
        total=steps,
        freeze=max(1, round((config.freeze_at or freeze) * steps)),
        noise_end=noise if config.noise_end is None else config.noise_end,
        **{name: getattr(config, name) for name in (*same, "sharp_start", "sharp_end")},
    )


def projection_interval(search: int) -> int:
    """Steps from one move of the budget to the next, in a search of so many."""
    return max(1, search // PROJECTIONS)
