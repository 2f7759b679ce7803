"""What a run says while it goes: one live line in a terminal, and one plain line an epoch everywhere."""

from __future__ import annotations

import sys
import time
from typing import Any

__all__ = ["Progress", "epoch_line"]

TERMS = ("task", "distill", "macro", "micro")


def epoch_line(line: dict[str, Any], target: str | None) -> str:
    """An epoch in words."""
    parts = [f"{line['stage']:7} epoch {line['epoch']:>4}", f"{line['images_per_s']:6.0f} images/s"]
    parts += [f"{name} {line[name]:.4f}" for name in TERMS if name in line]
    if "top1" in line:
        parts.append(f"top-1 {line['top1']:.2f} %")
    parts.append(f"MACs {line['hard_macs']:.1%}" + (f" -> {target}" if target else ""))
    if "temperature" in line:
        parts.append(f"tau {line['temperature']:.2f}  undecided {line['undecided']:.0%}")
        parts.append(f"open {line['open_heads']} heads, {line['open_blocks']} FFNs")
    return "  ".join(parts)


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

    def show(self, stage: str, done: int, total: int, images: int, terms: dict[str, float], rate: float) -> None:
        """Update the line.

        Args:
            done, total: steps of this stage since the process began, and those it has.
            images: a step.
            rate: the learning rate.
        """
        if self._live is None:
            return
        seconds = max(time.perf_counter() - self._began, 1e-9)
        left = seconds / max(done, 1) * (total - done)
        words = "  ".join(f"{name} {value:.3f}" for name, value in terms.items())
        speed = images * done / seconds
        self._live.update(f"{stage}  {done}/{total}  {speed:.0f} images/s  {_clock(left)} left  {words}  lr {rate:.1e}")

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
