"""Draws a chart as SVG that takes its colours from the page, with the numbers that show when the pointer is over it.

matplotlib does the drawing. Where it is not installed there are no charts, and `why_not` says how to get them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

__all__ = ["WIDE", "WIDTH", "Chart", "Line", "heat_chart", "line_chart", "why_not"]

WIDTH, WIDE = 340, 420  # points: of a chart of three in a row, and of two
LEFT, RIGHT, TOP, BOTTOM = 44, 14, 18, 32
SIZE = 10  # of text
COLOURS = {f"#a1b2c{i}": f"var(--c{i})" for i in range(1, 7)}  # what is drawn -> what the page gives
INK, FAINT = "#a1b2d1", "#a1b2d2"
COLOURS |= {INK: "var(--muted)", FAINT: "var(--rule)"}
HEAT = (0.23, 0.43, 0.88)  # of a cell; how much of it says the value


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        colour: 1 to 6.
        style: of matplotlib; "o" is points alone, "o-" points on a line.
    """

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: int
    style: str = "-"


@dataclass
class Chart:
    """A chart and what belongs to it.

    Attributes:
        wide: it is made for two in a row, and not for three.
        hover: what `page.js` needs to show numbers.
        legend: names with their colours, as CSS.
    """

    key: str
    title: str
    note: str
    svg: str
    wide: bool
    hover: dict[str, Any]
    legend: list[tuple[str, str, str]] = field(default_factory=list)


def why_not() -> str | None:
    """What is missing to draw charts, and how to get it."""
    return None if find_spec("matplotlib") else 'charts need matplotlib: pip install "hiap[report]"'


def line_chart(
    key: str,
    title: str,
    note: str,
    lines: Sequence[Line],
    *,
    stages: Sequence[tuple[str, float]] = (),
    percent: bool = False,
    log: bool = False,
    level: tuple[str, float] | None = None,
    show: Callable[[float], str] = lambda value: f"{value:.4g}",
    start: float = 0.0,
    end: float | None = None,
    axis: str = "epoch",
    width: int = WIDTH,
) -> Chart:
    """Lines over epochs.

    Args:
        stages: names of the stages of the run, with the time each begins.
        percent: values are shares, shown in percent.
        level: a name and a value to draw straight across.
        show: a value in words.
        start, end: of the axis of epochs.
        axis: what it counts, if not epochs.
    """
    figure, axes, box = _axes(width, 168)
    for line in lines:
        dots = line.style == "o" or len(line.x) == 1
        axes.plot(
            line.x,
            line.y,
            color=f"#a1b2c{line.colour}",
            linewidth=1.6,
            linestyle="none" if dots else line.style.removeprefix("o"),
            marker="o" if dots or line.style == "o-" else None,
            markersize=4,
            solid_capstyle="round",
        )
    if level is not None:
        axes.axhline(level[1], color=INK, linewidth=1, linestyle=(0, (3, 3)))
    times = [x for line in lines for x in line.x]
    last = max([*times, end or 0.0])
    last = last if last > start else start + 1
    axes.set_xlim(start, last)
    if log:
        axes.set_yscale("log")
    else:
        axes.margins(y=0.08)
        if percent:
            low, high = axes.get_ylim()
            axes.set_ylim(max(low, -0.02), min(high, 1.03))
    _finish_axes(axes, stages, percent, log, axis=axis)
    kinds = {"o": "dot", "--": "dash"}
    names = [(line.name, f"var(--c{line.colour})", kinds.get(line.style, "line")) for line in lines]
    series: list[dict[str, Any]] = [
        {"name": one.name, "colour": f"var(--c{one.colour})", "x": _round(one.x), "y": [show(v) for v in one.y]}
        for one in lines
    ]
    if level is not None:
        names.append((level[0], "var(--muted)", "dash"))
        series.append({"name": level[0], "colour": "var(--muted)", "x": [0], "y": [show(level[1])], "level": True})
    hover = {"kind": "lines", "box": box, "start": start, "end": last, "axis": axis, "series": series}
    return Chart(key, title, note, _svg(figure, key), width == WIDE, hover, names if len(names) > 1 else [])


def heat_chart(
    key: str,
    title: str,
    note: str,
    times: Sequence[float],
    rows: Sequence[str],
    strength: Any,
    tips: Sequence[Sequence[str]],
    *,
    bottom_up: bool = False,
    ticks: Sequence[tuple[float, str]] | None = None,
    side: str = "",
    width: int = WIDTH,
) -> Chart:
    """A field of cells, row by row over epochs; the stronger the colour, the greater the value.

    Args:
        strength: from 0 to 1, (rows, times).
        tips: what is said of a cell, (rows, times).
        bottom_up: the first row is at the bottom.
        ticks: places between 0 (the start of the first row) and len(rows), and what stands there; the rows' own names
            by default.
        side: what the rows are.
    """
    figure, axes, box = _axes(width, max(96, min(13 * len(rows), 260)) if not bottom_up else 130)
    columns = min(120, max(len(times) * 2, 40))
    first, last = times[0], max(times[-1], times[0] + 1e-9)
    edges = first + (np.arange(columns) + 0.5) / columns * (last - first)
    at = (np.searchsorted(np.asarray(times), edges, side="right") - 1).clip(0, len(times) - 1)
    cells = np.empty((len(rows), columns, 4))
    cells[..., :3] = HEAT
    cells[..., 3] = np.asarray(strength, dtype=float)[:, at]
    extent = (first, last, 0, len(rows)) if bottom_up else (first, last, len(rows), 0)
    axes.imshow(cells, aspect="auto", interpolation="none", extent=extent, origin="lower" if bottom_up else "upper")
    each = max(1, -(-len(rows) // 14))
    marks = ticks or [(i + 0.5, name) for i, name in enumerate(rows) if i % each == 0]
    axes.set_yticks([place for place, _ in marks], [text for _, text in marks])
    axes.set_ylabel(side, color=INK, fontsize=SIZE, labelpad=4)
    _finish_axes(axes, (), False, False, grid=False)
    hover = {"kind": "heat", "box": box, "start": first, "end": last, "x": _round(times), "up": bottom_up}
    return Chart(key, title, note, _svg(figure, key), width == WIDE, hover | {"tips": [list(row) for row in tips]})


def _axes(width: float, height: float) -> tuple[Any, Any, list[float]]:
    """A figure whose axes are this high, the axes, and where they are in it: left, top, width, height."""
    from matplotlib.figure import Figure

    whole = height + TOP + BOTTOM
    figure = Figure(figsize=(width / 72, whole / 72))
    figure.patch.set_visible(False)
    inside = width - LEFT - RIGHT
    axes = figure.add_axes((LEFT / width, BOTTOM / whole, inside / width, height / whole))
    axes.patch.set_visible(False)
    return figure, axes, [LEFT, TOP, inside, height]


def _finish_axes(
    axes: Any, stages: Sequence[tuple[str, float]], percent: bool, log: bool, grid: bool = True, axis: str = "epoch"
) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side == "bottom" and grid)
        axes.spines[side].set_color(FAINT)
    axes.tick_params(length=0, colors=INK, labelsize=SIZE, pad=4)
    axes.set_xlabel(axis, color=INK, fontsize=SIZE, labelpad=1, loc="right")
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=axes.get_xlim()[1] - axes.get_xlim()[0] >= 3))
    if not grid:
        return
    axes.grid(axis="y", color=FAINT, linewidth=0.8)
    axes.set_axisbelow(True)
    if log:
        axes.yaxis.set_major_locator(LogLocator(numticks=5))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}" if percent else _short(value)))
    start, end = axes.get_xlim()
    for i, (name, begin) in enumerate(stages if len(stages) > 1 else ()):
        until = min(stages[i + 1][1] if i + 1 < len(stages) else end, end)
        if begin >= end or until <= start:
            continue
        if begin > start:
            axes.axvline(begin, color=FAINT, linewidth=1)
        if (until - begin) / (end - start) > 0.12:
            top = axes.get_xaxis_transform()
            axes.text(
                begin + 0.012 * (end - start), 1.02, name, transform=top, color=INK, fontsize=SIZE - 0.5, va="bottom"
            )


def _svg(figure: Any, key: str) -> str:
    """The drawing, with the page's colours and names of its own for its parts."""
    import matplotlib

    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": key}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r'(url\(#|href="#)', rf"\g<1>{key}-", text)
    text = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", text, count=1)
    text = re.sub(r'(<svg[^>]*?) width="[^"]*"', r'\1 aria-hidden="true"', text, count=1)
    for drawn, given in COLOURS.items():
        text = text.replace(drawn, given)
    return re.sub(r"\n\s*", "\n", text)


def _short(value: float) -> str:
    """A number on an axis: 0.00075 as 7.5e-4."""
    return f"{value:g}" if value == 0 or abs(value) >= 0.01 else f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")


def _round(values: Sequence[float]) -> list[float]:
    return [round(float(value), 4) for value in values]
