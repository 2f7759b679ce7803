"""The charts of a run: what was learned, what it cost, and how the network came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hiap.report.decisions import MACRO_UNITS, UNIT_NAMES, Decisions
from hiap.report.gathering import RunData
from hiap.report.plotting import WIDE, WIDTH, Chart, Line, heat_chart, line_chart
from hiap.training.snapshots import BINS

__all__ = ["course_charts", "decision_charts", "evolution_charts", "gate_charts"]

NOT_TERMS = (
    *("stage", "step", "epoch", "at", "seconds", "images_per_s", "loss", "lr", "top1", "top5", "error", "cosine"),
    *("soft_top1", "soft_error", "undecided", "expected_macs", "hard_macs", "cost", "open_heads", "open_ffns"),
    "temperature",
)
TERMS = {  # names of terms of the loss, in words
    "task": "labels",
    "distill": "distillation",
    "features": "features",
    "tokens": "tokens",
    "pooled": "pooled output",
    "macro": "macro cost",
    "micro": "micro cost",
}
GATE_NAMES = {
    "head": "heads",
    "attention": "whole attention",
    "value_dim": "value dims",
    "qk_dim": "q/k dims",
    "ffn": "whole FFNs",
    "neuron": "neurons",
}


def _stages(run: RunData) -> list[tuple[str, float]]:
    """The stages of a run with the time each begins."""
    found: dict[str, float] = {}
    before = 0.0
    for line in run.metrics:
        found.setdefault(line.get("stage", ""), before)
        before = line["at"]
    steps, freeze = run.record.get("steps_per_epoch"), run.record.get("freeze_step")
    if steps and freeze and "recover" in found:  # an epoch counts for the stage of its last step
        found["recover"] = run.record.get("dense_epochs", 0) + freeze / steps
    return list(found.items())


def _line(name: str, entries: Sequence[dict[str, Any]], key: str, colour: int, style: str = "-") -> list[Line]:
    """One line of the entries that have the key, if any do."""
    known = [entry for entry in entries if isinstance(entry.get(key), int | float)]
    return [Line(name, [one["at"] for one in known], [one[key] for one in known], colour, style)] if known else []


def course_charts(run: RunData) -> list[Chart]:
    """Accuracy, loss, cost, temperature and learning rate over the run."""
    if not run.metrics:
        return []
    stages, end, key, charts = _stages(run), run.metrics[-1]["at"], run.metric, []
    label = "Accuracy" if key == "top1" else "Feature error"
    scored = _line("gates hard" if run.snapshots else "compact", run.metrics, key, 1)
    soft = _line("gates soft", [*_soft_ends(run), *run.metrics], f"soft_{key}", 2, "o")
    if scored:
        dense = run.record.get("dense_top1") if key == "top1" else None
        note = "On the validation images. Hard: every gate open or closed, as in the network that is saved."
        charts.append(
            line_chart(
                f"{run_key(run)}-accuracy",
                f"{label}, percent",
                note + (" Soft: as in training." if soft else ""),
                [*scored, *soft],
                stages=stages,
                level=("dense model", dense) if dense is not None else None,
                show=lambda value: f"{value:.2f} %",
                end=end,
            )
        )
    terms = [name for name in dict.fromkeys(k for line in run.metrics for k in line) if name not in NOT_TERMS]
    lines = _line("total", run.metrics, "loss", 1)
    for i, name in enumerate(terms[:5]):
        lines += _line(TERMS.get(name, name.replace("_", " ")), run.metrics, name, i + 2)
    if lines:
        note = "Of the last step of each epoch; the total weighs its terms, which are shown without weights."
        taught = "distill" in terms or "features" in terms or "tokens" in terms
        note += "" if taught else " This run has no distillation."
        charts.append(
            line_chart(
                f"{run_key(run)}-loss", "Loss and its terms", note, lines, stages=stages, end=end, log=_wide(lines)
            )
        )
    charts += _cost_charts(run, stages, end)
    rate = _line("learning rate", run.metrics, "lr", 3)
    if rate:
        charts.append(
            line_chart(f"{run_key(run)}-lr", "Learning rate", "At the end of each epoch.", rate, stages=stages, end=end)
        )
    if run.snapshots:
        charts.append(_undecided(run))
    return charts


def _undecided(run: RunData) -> Chart:
    """The share of gates that have not made up their mind."""
    shares = []
    for one in run.snapshots:
        bins = np.array(list(one["histograms"].values())).sum(0)
        shares.append(float(bins[1:-1].sum() / max(bins.sum(), 1)))
    line = Line("undecided", [one["at"] for one in run.snapshots], shares, 5)
    return line_chart(
        f"{run_key(run)}-undecided",
        "Undecided gates",
        "Over the search: share of all gates whose probability is between 0.05 and 0.95.",
        [line],
        percent=True,
        show=lambda value: f"{value:.1%}",
        start=line.x[0],
    )


def _soft_ends(run: RunData) -> list[dict[str, Any]]:
    """Scores with soft gates at the first step of the search and at its last one."""
    record, key, first = run.record, f"soft_{run.metric}", run.record.get("dense_epochs", 0)
    found = [{"at": first, key: record[f"{key}_start"]}] if f"{key}_start" in record else []
    if key in record and "freeze_step" in record and "steps_per_epoch" in record:
        found.append({"at": first + record["freeze_step"] / record["steps_per_epoch"], key: record[key]})
    return found


def _wide(lines: Sequence[Line]) -> bool:
    """Whether positive values of very different sizes ask for a logarithmic axis."""
    values = [value for line in lines for value in line.y]
    return min(values) > 0 and max(values) > 50 * min(values)


def _cost_charts(run: RunData, stages: Sequence[tuple[str, float]], end: float) -> list[Chart]:
    charts, start = [], 0.0
    entries = run.snapshots or run.metrics
    if run.snapshots:  # what happens in the search alone is drawn over the search alone
        stages, start, end = (), run.snapshots[0]["at"], run.snapshots[-1]["at"]
    hard, expected = ("hard", "expected") if run.snapshots else ("hard_macs", "expected_macs")
    lines = _line("budget at the time", entries, "allowed", 6, "--") + _line("expected", entries, expected, 2)
    lines += _line("hard", entries, hard, 1)
    if lines:
        target = run.snapshots[-1].get("target") if run.snapshots else None
        charts.append(
            line_chart(
                f"{run_key(run)}-cost",
                "Cost, share of the dense model",
                "Over the search. Expected: gates count with their probability. Hard: the network they would give now.",
                lines,
                stages=stages,
                percent=True,
                level=("target", target) if target is not None else None,
                show=lambda value: f"{value:.1%}",
                start=start,
                end=end,
            )
        )
    temperature = _line("temperature", entries, "temperature", 4)
    if temperature:
        note = "Of the gates, over the search. As it falls, they turn from soft weights into decisions."
        charts.append(
            line_chart(
                f"{run_key(run)}-temperature",
                "Temperature",
                note,
                temperature,
                stages=stages,
                start=start,
                end=end,
                log=True,
            )
        )
    return charts


def evolution_charts(run: RunData) -> list[Chart]:
    """What every layer keeps over the search: heads, value dims, q/k dims and neurons."""
    charts, dense = [], run.dense
    full = {
        "heads": [w.heads or 0 for w in dense],
        "value_dims": [(w.heads or 0) * w.value_dim for w in dense],
        "qk_dims": [(w.heads or 0) * w.qk_dim for w in dense],
        "neurons": [w.neurons or 0 for w in dense],
    }
    times = [one["at"] for one in run.snapshots]
    for kind, sizes in full.items():
        counts = np.array([one[kind] for one in run.snapshots], dtype=float).T if times else np.zeros((0, 0))
        if not sum(sizes) or not counts.size:
            continue
        whole = np.array(sizes, dtype=float)[:, None]
        share = counts / np.maximum(whole, 1)
        tips = [
            [f"block {i}: {int(n)} of {sizes[i]} {UNIT_NAMES[kind]} ({n / max(sizes[i], 1):.0%})" for n in row]
            for i, row in enumerate(counts)
        ]
        lost = 1 - counts[:, -1].sum() / sum(sizes)
        note = f"{int(counts[:, -1].sum())} of {sum(sizes)} are left, {lost:.0%} are gone."
        title = UNIT_NAMES[kind][0].upper() + UNIT_NAMES[kind][1:]
        rows = [str(i) for i in range(len(sizes))]
        charts.append(
            heat_chart(f"{run_key(run)}-{kind}", title, note, times, rows, share, tips, side="block", width=WIDE)
        )
    return charts


def gate_charts(run: RunData) -> list[Chart]:
    """How the probabilities of the gates are spread over time, kind by kind."""
    charts = []
    times = [one["at"] for one in run.snapshots]
    kinds = [kind for kind in GATE_NAMES if times and all(kind in one["histograms"] for one in run.snapshots)]
    for kind in kinds:
        counts = np.array([one["histograms"][kind] for one in run.snapshots], dtype=float).T
        total = max(counts[:, 0].sum(), 1)
        tips = [
            [f"{int(n)} of {int(total)} gates between {i / BINS:.2f} and {(i + 1) / BINS:.2f}" for n in row]
            for i, row in enumerate(counts)
        ]
        middle = counts[1:-1, -1].sum() / total
        note = f"{int(total)} gates; at the end {middle:.0%} are between 0.05 and 0.95."
        charts.append(
            heat_chart(
                f"{run_key(run)}-p-{kind}",
                GATE_NAMES[kind][0].upper() + GATE_NAMES[kind][1:],
                note,
                times,
                [f"{i / BINS:.2f}" for i in range(BINS)],
                (counts / total) ** 0.4,
                tips,
                bottom_up=True,
                ticks=[(0.0, "0"), (BINS / 2, "0.5"), (float(BINS), "1")],
                width=WIDE if len(kinds) in (2, 4) else WIDTH,
            )
        )
    return charts


def decision_charts(run: RunData, decisions: Decisions) -> list[Chart]:
    """When decisions became final, and when closed units came back."""
    colours = {kind: i + 1 for i, kind in enumerate(UNIT_NAMES)}
    start, end = decisions.at[0], decisions.at[-1]
    lines = [
        Line(UNIT_NAMES[kind], decisions.at, share, colours[kind], "--" if kind in MACRO_UNITS else "-")
        for kind, share in decisions.final.items()
    ]
    settled = line_chart(
        f"{run_key(run)}-settled",
        "Decisions that are final",
        "Share of the units that are, from then on, as they are in the end. Dashed: macro (heads and FFNs).",
        lines,
        percent=True,
        show=lambda value: f"{value:.1%}",
        start=start,
        end=end,
        width=WIDE,
    )
    back = [
        Line(UNIT_NAMES[kind], decisions.at, [float(n) for n in counts], colours[kind])
        for kind, counts in decisions.back.items()
        if any(counts)
    ]
    if not back:
        return [settled]
    note = "Units that are open, and were closed in the snapshot before."
    shown = line_chart(
        f"{run_key(run)}-back",
        "Closed units that came back",
        note,
        back,
        show=lambda value: f"{value:.0f}",
        start=start,
        end=end,
        width=WIDE,
    )
    return [settled, shown]


def run_key(run: RunData) -> str:
    """A name for the parts of this run on a page."""
    return "r" + "".join(c if c.isalnum() else "-" for c in run.name)
