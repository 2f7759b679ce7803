"""What a run says while it goes: a bar with the time left in a terminal, and one plain line an epoch everywhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from hiap.training.metrics import METRICS

__all__ = ["Progress", "Stopwatch", "clock", "epoch_line"]

KEYS = [metric.key for metric in METRICS]


def epoch_line(line: dict[str, Any], target: str | None) -> str:
    """An epoch in words, within 80 columns; metrics.jsonl has all of it."""
    return f"{line['stage']:7} {line['epoch']:>3}/{line['epochs']:<3} {_state(line, target)}  {clock(line['seconds'])}"


def _state(line: dict[str, Any], target: str | None) -> str:
    """The loss and the network, as far as the line has them."""
    parts = [f"loss {line['loss']:.3f}"]
    parts += [metric.say(line[metric.key]) for metric in METRICS if metric.key in line]
    goal = f" -> {target}" if target else ""
    if line["stage"] == "dense":
        return "  ".join(parts)
    if "cost" in line:
        parts.append(f"cost {line['cost']:.4g}{goal}")
    elif "hard_macs" in line:
        parts.append(f"MACs {line['hard_macs']:.1%}{goal}")
    return "  ".join(parts)


class Stopwatch:
    """Seconds, lap by lap."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        before, self._since = self._since, time.perf_counter()
        return self._since - before


class Progress:
    """The bar of a whole run; there is none where the output is not a terminal or rich is not installed.

    Args:
        total: steps of the run.
    """

    def __init__(self, enabled: bool, total: int) -> None:
        self._bar: Any = None
        if enabled and sys.stdout.isatty():
            try:
                from rich import progress
            except ImportError:
                return
            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=16),
                progress.TaskProgressColumn(),
                progress.TimeRemainingColumn(compact=True),
                progress.TextColumn("left  {task.fields[state]}"),
            )
            self._bar = progress.Progress(*columns, transient=True, speed_estimate_period=120)
            self._task = self._bar.add_task("starting", total=total, state="")
            self._bar.start()

    def show(self, now: dict[str, Any], done: int, target: str | None) -> None:
        """Move the bar.

        Args:
            now: stage, epoch, epochs, loss and what is known of the network.
            done: steps of the whole run.
        """
        if self._bar is not None:
            stage = f"{now['stage']} {now['epoch']}/{now['epochs']}"
            now = {name: value for name, value in now.items() if name not in KEYS}  # of another epoch
            self._bar.update(self._task, completed=done, description=stage, state=_state(now, target))

    def say(self, text: str) -> None:
        """Print a line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


def clock(seconds: float) -> str:
    """A duration as 0:12 or 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
