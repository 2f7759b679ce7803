"""What a run says while it goes: one live line in a terminal, and one plain line an epoch everywhere."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Progress", "Stopwatch", "epoch_line"]

TERMS = ("task", "distill", "features", "macro", "micro", "feasible_head", "feasible_dim", "feasible_ffn")


def epoch_line(line: dict[str, Any], target: str | None) -> str:
    """An epoch in words."""
    return "  ".join(
        [f"{line['stage']:7} epoch {line['epoch']:>4}", f"{line['images_per_s']:6.0f} images/s", *_state(line, target)]
    )


def _state(line: dict[str, Any], target: str | None) -> list[str]:
    """The losses and the network, as far as the line has them."""
    parts = [f"{name} {line[name]:.4f}" for name in TERMS if name in line]
    if "top1" in line:
        parts.append(f"top-1 {line['top1']:.2f} %")
    goal = f" -> {target}" if target else ""
    if "hard_macs" in line:
        parts.append(f"MACs {line['hard_macs']:.1%}" + ("" if "cost" in line else goal))
    if "cost" in line:
        parts.append(f"cost {line['cost']:.4g}{goal}")
    if "temperature" in line:
        parts.append(f"tau {line['temperature']:.2f}")
    if "undecided" in line:
        parts.append(f"undecided {line['undecided']:.0%}")
    if "open_heads" in line:
        parts.append(f"open {line['open_heads']} heads, {line['open_blocks']} FFNs")
    return parts


class Stopwatch:
    """Seconds, lap by lap."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before


class Progress:
    """The live line; it does nothing where the output is not a terminal or rich is not installed."""

    def __init__(self, enabled: bool) -> None:
        self._live: Any = None
        self._began = time.perf_counter()
        if enabled and sys.stdout.isatty():
            try:
                from rich.live import Live
            except ImportError:
                return
            self._live = Live("", refresh_per_second=4, transient=True)
            self._live.start()

    def show(self, now: dict[str, Any], images: int, target: str | None, done: int, total: int) -> None:
        """Update the line.

        Args:
            now: stage, epoch, the terms of the loss and what is known of the network.
            images: a step.
            done, total: steps of this stage since the process began, and those it has.
        """
        if self._live is None:
            return
        seconds = max(time.perf_counter() - self._began, 1e-9)
        left = _clock(seconds / max(done, 1) * (total - done))
        speed = images * done / seconds
        head = f"{now['stage']} epoch {now['epoch']}  {speed:.0f} images/s  {left} left"
        self._live.update("  ".join([head, *_state(now, target)]))

    def restart(self) -> None:
        """Begin another stage."""
        self._began = time.perf_counter()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._live is not None:
            self._live.console.print(text, highlight=False)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
