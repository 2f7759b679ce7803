"""The page of a sweep: accuracy against MACs and against measured time, and all runs in one table."""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from hiap.report.elements import grid, section, table_of
from hiap.report.page import document
from hiap.report.plotting import Chart, Line, line_chart, why_not
from hiap.sweep.summary import MACS, Summary, sweep_notes, sweep_table
from hiap.sweep.sweep_folder import Member

__all__ = ["sweep_html"]

ON_FRONT, OFF_FRONT, DENSE = 1, 6, 2  # colours
LEAD = (
    "A model is on the Pareto front if no other one is at least as accurate for at most the same cost, and better in "
    "one of the two. Point at a chart for names and numbers."
)


def sweep_html(home: Path, members: Sequence[Member], summary: Summary) -> str:
    """The page, which needs nothing else but the reports of the runs that it links to.

    Args:
        home: the folder of the sweep.
    """
    title = home.resolve().name
    notes = sweep_notes(members)
    without = why_not()
    charts = []
    if without:
        notes.append(without)
    elif summary.models:
        charts = [chart for kind in summary.kinds if (chart := _chart(kind, summary)) is not None]
    table = sweep_table(members, summary)
    reports = {model.name: model.folder / "report.html" for model in summary.models}
    links = [_link(reports.get(row[0]), home) for row in table.rows]
    body = [_header(title, members), _notes(notes)]
    if charts:
        body.append(section("Accuracy and cost", grid(charts), LEAD))
    body.append(section("All runs", table_of("runs", table, links), "Each name leads to the report of its run."))
    return document(title, "HiAP sweep", "".join(body))


def _header(title: str, members: Sequence[Member]) -> str:
    failed, done = (sum(one.state == state for one in members) for state in ("failed", "finished"))
    values: dict[str, list[str]] = {}
    for member in members:
        for option, value in member.options.items():
            values.setdefault(option, [])
            values[option] += [value] if value not in values[option] else []
    marks = {option: "; " if any("," in one for one in found) else ", " for option, found in values.items()}
    grids = " · ".join(f"{option} {marks[option].join(found)}" for option, found in values.items())
    state = "finished" if done == len(members) else "stopped" if failed else "running"
    said = f"{done} of {len(members)} runs finished" + (f", {failed} failed" if failed else "")
    return (
        f'<header><div><p class="brand">HiAP sweep</p><h1>{escape(title)}</h1><p class="lead">{escape(grids)}</p></div>'
        f'<span class="state {state}">{escape(said)}</span></header>'
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f'<aside class="notes"><ul>{items}</ul></aside>' if items else ""


def _link(report: Path | None, home: Path) -> str | None:
    """Where a report is, as seen from the page."""
    return quote(os.path.relpath(report, home)) if report is not None and report.is_file() else None


def _chart(kind: str, summary: Summary) -> Chart | None:
    """Score over one cost: each model, those on the front joined by a line, and the dense models."""
    size, unit = _unit(summary, kind)
    known = [i for i in range(len(summary.models)) if summary.score(i) is not None and kind in summary.costs[i]]
    points = [(summary.costs[i][kind] / size, summary.score(i) or 0.0, i) for i in known]
    if not points:
        return None
    best = sorted((x, y) for x, y, i in points if kind in summary.fronts[i])
    lines = [Line("Pareto front", [x for x, _ in best], [y for _, y in best], ON_FRONT)]
    for x, y, i in points:
        lines.append(Line(summary.models[i].name, [x], [y], ON_FRONT if kind in summary.fronts[i] else OFF_FRONT, "o"))
    for one in summary.dense:
        if one.score is not None and kind in one.costs:
            lines.append(Line(one.name, [one.costs[kind] / size], [one.score], DENSE, "o"))
    label = "Accuracy" if summary.metric.key == "top1" else "Feature error"
    axis = f"MACs, {unit}" if kind == MACS else f"ms, {kind}"
    chart = line_chart(
        f"sweep-{kind.replace(' ', '-')}",
        f"{label} over {'MACs' if kind == MACS else f'latency, {kind}'}",
        f"{summary.metric.label[0].upper()}{summary.metric.label[1:]} on the validation images, in percent.",
        lines,
        show=lambda value: f"{value:.2f} %",
        end=1.04 * max(x for line in lines for x in line.x),
        axis=axis,
    )
    chart.hover["series"] = [one for one in chart.hover["series"] if one["name"] != "Pareto front"]
    shown = [("Pareto front", ON_FRONT, "line"), ("other runs", OFF_FRONT, "dot"), ("dense model", DENSE, "dot")]
    drawn = {line.colour for line in lines}
    chart.legend = [(name, f"var(--c{colour})", form) for name, colour, form in shown if colour in drawn]
    return chart


def _unit(summary: Summary, kind: str) -> tuple[float, str]:
    """The unit that the axis of a cost counts in."""
    if kind != MACS:
        return 1.0, "ms"
    most = max(one[MACS] for one in (*summary.costs, *(dense.costs for dense in summary.dense)))
    return next((size, unit) for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, "")) if most >= size)
