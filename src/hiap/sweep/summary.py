"""What came of a sweep: every model with its accuracy, its size and its measured time, and which of them are best.

A model is on the Pareto front if no other one is at least as good for at most the same cost, and better in one of both.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hiap.budget.cost import in_words
from hiap.report.facts import Table
from hiap.sweep.sweep_folder import Member, SweptModel
from hiap.training.metrics import ERROR, TOP1, Metric
from hiap.training.run_folder import starts

__all__ = ["DenseModel", "Summary", "front", "models_json", "summarise", "sweep_notes", "sweep_table", "text_table"]

KEYS = ("dense_top1", "top1", "error", "dense_macs", "macs", "dense_params", "params", "speed")
MACS = "MACs"


@dataclass(frozen=True)
class DenseModel:
    """A dense model that runs began with; its times are medians over those runs."""

    name: str
    score: float | None
    params: int
    costs: dict[str, float]


@dataclass(frozen=True)
class Summary:
    """The models of a sweep.

    Attributes:
        metric: what they are judged by.
        models: that are finished, in the order of the runs.
        costs: of each model: MACs, and ms at each batch size.
        fronts: for each model, the costs on whose Pareto front it is.
        dense: the models they were made from.
    """

    metric: Metric
    models: list[SweptModel]
    costs: list[dict[str, float]]
    fronts: list[list[str]]
    dense: list[DenseModel]

    @property
    def kinds(self) -> list[str]:
        """The costs that are known: "MACs", "batch 1" and so on."""
        return list(dict.fromkeys(kind for one in self.costs for kind in one))

    def of(self, member: Member) -> list[int]:
        """Which models a run has made."""
        return [i for i, model in enumerate(self.models) if model.run == member.name]

    def score(self, i: int) -> float | None:
        """How good a model is; None where the run was judged by something else."""
        found = self.models[i].record.get(self.metric.key)
        return None if found is None else float(found)


def summarise(members: Sequence[Member]) -> Summary:
    """Put the finished models of a sweep side by side."""
    models = [model for member in members if member.state == "finished" for model in member.models()]
    metric = TOP1 if any(TOP1.key in model.record for model in models) or not models else ERROR
    costs = [_costs(model.record, "") for model in models]
    fronts: list[list[str]] = [[] for _ in models]
    for kind in dict.fromkeys(kind for one in costs for kind in one):
        known = [i for i, model in enumerate(models) if metric.key in model.record and kind in costs[i]]
        points = [(costs[i][kind], metric.sign * models[i].record[metric.key]) for i in known]
        for place in front(points):
            fronts[known[place]].append(kind)
    return Summary(metric, models, costs, fronts, _dense(models, metric))


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points of (cost, score) no other one beats."""

    def beaten(one: tuple[float, float]) -> bool:
        return any(cost <= one[0] and score >= one[1] and (cost, score) != one for cost, score in points)

    return [i for i, one in enumerate(points) if not beaten(one)]


def _costs(record: dict[str, Any], of: str) -> dict[str, float]:
    """MACs and ms of a model; of the dense one, where `of` is "dense_"."""
    found = {MACS: float(record[f"{of}macs"])}
    return found | {f"batch {one['batch']}": float(one[f"{of or 'compact_'}ms"]) for one in record["speed"]}


def _dense(models: Sequence[SweptModel], metric: Metric) -> list[DenseModel]:
    groups: dict[tuple[int, int], list[SweptModel]] = {}
    for model in models:
        groups.setdefault((model.record["dense_macs"], model.record["dense_params"]), []).append(model)
    found = []
    for (_, params), group in groups.items():
        scores = [one.record["dense_top1"] for one in group if one.record.get("dense_top1") is not None]
        costs = [_costs(one.record, "dense_") for one in group]
        middle = {kind: statistics.median(one[kind] for one in costs if kind in one) for kind in costs[0]}
        name = "dense" if len(groups) == 1 else f"dense, of {group[0].name}"
        score = statistics.median(scores) if scores and metric is TOP1 else None
        found.append(DenseModel(name, score, params, middle))
    return found


def sweep_table(members: Sequence[Member], summary: Summary) -> Table:
    """The dense models, then a row for each model or, where there is none, for each run."""
    kinds = [kind for kind in summary.kinds if kind != MACS]
    head = ["run", summary.metric.label, MACS, "parameters", *(f"latency, {kind}" for kind in kinds), "Pareto front"]
    rows = [_row(one.name, one.score, one.costs, one.params, kinds, "") for one in summary.dense]
    for member in members:
        made = summary.of(member)
        for i in made:
            params, said = summary.models[i].record["params"], ", ".join(summary.fronts[i])
            rows.append(_row(summary.models[i].name, summary.score(i), summary.costs[i], params, kinds, said))
        if not made:
            state = "failed" if member.state == "failed" else "not finished"
            rows.append([member.name, *["-"] * (3 + len(kinds)), state])
    return Table(head, rows)


def _row(
    name: str, score: float | None, costs: dict[str, float], params: int, kinds: Iterable[str], said: str
) -> list[str]:
    times = [f"{costs[kind]:.2f} ms" if kind in costs else "-" for kind in kinds]
    return [name, "-" if score is None else f"{score:.2f} %", in_words(costs[MACS]), in_words(params), *times, said]


def text_table(table: Table) -> list[str]:
    """A table for the terminal: names to the left, numbers to the right."""
    rows = [list(table.head), *(list(row) for row in table.rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.head))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(widths[i]) if i in (0, last) else cell.rjust(widths[i]) for i, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def sweep_notes(members: Sequence[Member]) -> list[str]:
    """What a reader of the table must know."""
    notes = [f"{one.name} failed: {' '.join(one.message.split())}" for one in members if one.state == "failed"]
    done = [one for one in members if one.state == "finished"]
    shared = [one for one in done if one.shared]
    if shared:
        notes.append(
            f"The times of {len(shared)} of {len(done)} runs were measured while other runs used the same machine; "
            "hiap bench times a model alone."
        )
    devices = {start[-1].get("device") for one in done if (start := starts(one.folder))}
    if len(devices) > 1:
        notes.append(f"The times were measured on different devices: {', '.join(sorted(map(str, devices)))}.")
    return notes


def models_json(members: Sequence[Member], summary: Summary) -> dict[str, dict[str, Any]]:
    """The models of each run as JSON values, by the name of the run."""
    found = {}
    for member in members:
        entries = []
        for i in summary.of(member):
            name, record = summary.models[i].name, summary.models[i].record
            known = {key: record[key] for key in KEYS if record.get(key) is not None}
            entries.append({"name": name, **known, "pareto": summary.fronts[i]})
        found[member.name] = {"models": entries}
    return found
