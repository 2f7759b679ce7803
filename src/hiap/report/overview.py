"""A run in one picture: the network, the accuracy, the cost, and how heads and neurons went."""

from __future__ import annotations

import io
from typing import Any

import numpy as np

from hiap.report.facts import figures
from hiap.report.gathering import RunData

__all__ = ["overview"]

KEPT, LESS, SECOND, INK, FAINT = "#3a6de0", "#e3e5ea", "#d77d1f", "#55585f", "#e3e1dc"


def overview(run: RunData) -> bytes:
    """A PNG; panels without data are left out."""
    from matplotlib.figure import Figure

    panels = [panel for panel, there in _panels(run) if there]
    columns = min(2, max(len(panels), 1))
    rows = -(-max(len(panels), 1) // columns)
    figure = Figure(figsize=(6.2 * columns, 0.9 + 3.1 * rows), dpi=144, layout="constrained", facecolor="white")
    said = "    ".join(f"{one.name} {one.dense} to {one.compact}" for one in figures(run)[:3])
    figure.suptitle(f"{run.name}\n{said}" if said else run.name, fontsize=11, color=INK)
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for one, panel in zip(axes, panels, strict=False):
        panel(run, one)
        one.tick_params(length=0, labelsize=8, colors=INK)
        for side in one.spines.values():
            side.set_visible(False)
    for one in axes[len(panels) :]:
        one.set_visible(False)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()


def _panels(run: RunData) -> list[tuple[Any, bool]]:
    scored = any(run.metric in line for line in run.metrics)
    seen = bool(run.snapshots and run.blocks)
    return [(_network, bool(run.blocks)), (_accuracy, scored), (_cost, seen), (_neurons, seen)]


def _network(run: RunData, axes: Any) -> None:
    """Shares of heads and of neurons that are kept, block by block."""
    places = np.arange(len(run.blocks))
    for shift, colour, name, shares in (
        (-0.2, KEPT, "heads", [(b.now.heads or 0) / (b.dense.heads or 1) for b in run.blocks]),
        (0.2, SECOND, "neurons", [(b.now.neurons or 0) / (b.dense.neurons or 1) for b in run.blocks]),
    ):
        axes.barh(places + shift, 1.0, 0.34, color=LESS)
        axes.barh(places + shift, shares, 0.34, color=colour, label=name)
    axes.set_yticks(places)
    axes.invert_yaxis()
    axes.set_title("Kept of every block", fontsize=9, color=INK, loc="left")
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _accuracy(run: RunData, axes: Any) -> None:
    lines = [line for line in run.metrics if run.metric in line]
    axes.plot([line["at"] for line in lines], [line[run.metric] for line in lines], color=KEPT, marker=".")
    if run.metric == "top1" and "dense_top1" in run.record:
        axes.axhline(run.record["dense_top1"], color=INK, linewidth=1, linestyle=":")
    name = "Top-1 in percent (dotted: dense)" if run.metric == "top1" else "Feature error in percent"
    axes.set_title(f"{name}, over epochs", fontsize=9, color=INK, loc="left")
    axes.grid(axis="y", color=FAINT)


def _cost(run: RunData, axes: Any) -> None:
    at = [one["at"] for one in run.snapshots]
    for key, colour in (("hard", KEPT), ("expected", SECOND)):
        if all(key in one for one in run.snapshots):
            axes.plot(at, [one[key] for one in run.snapshots], color=colour, label=key)
    axes.set_title("Cost, share of the dense model, over epochs", fontsize=9, color=INK, loc="left")
    axes.legend(frameon=False, fontsize=8)
    axes.grid(axis="y", color=FAINT)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")


def _neurons(run: RunData, axes: Any) -> None:
    counts = np.array([one["neurons"] for one in run.snapshots], dtype=float).T
    share = counts / np.maximum([[block.dense.neurons or 1] for block in run.blocks], 1)
    extent = (run.snapshots[0]["at"], max(run.snapshots[-1]["at"], 1e-9), len(share) - 0.5, -0.5)
    axes.imshow(share, aspect="auto", cmap="Blues", vmin=0, vmax=1, extent=extent, interpolation="nearest")
    axes.set_title("Neurons kept of every block, over epochs", fontsize=9, color=INK, loc="left")
