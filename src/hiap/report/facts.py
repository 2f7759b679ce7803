"""The facts of a run as tables of text, for the page, for Markdown and for the terminal alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from hiap.budget.cost import in_words
from hiap.report.decisions import MACRO_UNITS, UNIT_NAMES, Decisions
from hiap.report.gathering import STATES, RunData
from hiap.speed.deployed import Speed
from hiap.training.progress import clock

__all__ = ["Figure", "Table", "decision_sentences", "figures", "ladder_table", "topology_table", "verification"]

MICRO_UNITS = tuple(kind for kind in UNIT_NAMES if kind not in MACRO_UNITS)


@dataclass(frozen=True)
class Figure:
    """One number of the headline.

    Attributes:
        change: how compact compares with dense.
        good: whether the change is for the better; None where that is not the question.
    """

    name: str
    dense: str
    compact: str
    change: str
    good: bool | None = None


@dataclass(frozen=True)
class Table:
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def figures(run: RunData) -> list[Figure]:
    """Dense against compact, as far as it is known."""
    record, found = run.numbers(), []
    if run.state in ("running", "stopped"):
        found += _so_far(run)
    if "top1" in record:
        found.append(_accuracy(record))
    elif "error" in record:
        cosine = f"cosine {record['cosine']:.4f}" if "cosine" in record else ""
        found.append(Figure("Feature error", "0.00 %", f"{record['error']:.2f} %", cosine))
    for name, key in (("MACs", "macs"), ("Parameters", "params")):
        dense, compact = record.get(f"dense_{key}"), record.get(key)
        if compact is not None:
            change = f"{compact / dense - 1:+.1%}" if dense else ""
            found.append(Figure(name, in_words(dense) if dense else "", in_words(compact), change, bool(dense)))
    for one in record.get("speed") or ():
        speed = Speed(**one)
        times = (f"{speed.dense_ms:.2f} ms", f"{speed.compact_ms:.2f} ms")
        found.append(Figure(f"Latency, batch {speed.batch}", *times, speed.comparison(), speed.faster))
    return found


def _so_far(run: RunData) -> list[Figure]:
    """Where a run stands that has not finished."""
    if not run.metrics:
        return []
    last, dense, found = run.metrics[-1], run.record.get("dense_macs"), []
    total = run.config.get("epochs")
    if last.get("stage") == "dense":
        total = run.record.get("dense_epochs")
    stage = f"in the {last.get('stage', 'present')} stage"
    found.append(Figure("Epochs done", "", f"{last.get('epoch', 0)}" + (f" of {total}" if total else ""), stage))
    scored = next((line for line in reversed(run.metrics) if "top1" in line), None)
    if scored is not None and last.get("stage") != "dense":
        accuracy = _accuracy({"top1": scored["top1"], "dense_top1": run.record.get("dense_top1")})
        found.append(replace(accuracy, name=f"{accuracy.name} so far"))
    if dense and "hard_macs" in last:
        share = last["hard_macs"]
        found.append(Figure("MACs so far", in_words(dense), in_words(share * dense), f"{share - 1:+.1%}", share < 1))
    return found


def _accuracy(record: dict[str, Any]) -> Figure:
    compact, dense = record["top1"], record.get("dense_top1")
    if dense is None:
        return Figure("Top-1 accuracy", "", f"{compact:.2f} %", "")
    change = f"{compact - dense:+.2f} points"
    return Figure("Top-1 accuracy", f"{dense:.2f} %", f"{compact:.2f} %", change, compact >= dense or None)


def topology_table(run: RunData) -> Table:
    """What every block keeps."""
    known = all(block.macs is not None for block in run.blocks)
    head = ["block", "heads", "q/k dims", "value dims", "neurons", *(["MACs", "of dense"] if known else [])]
    rows = []
    for i, block in enumerate(run.blocks):
        now, dense = block.now, block.dense
        gone = not now.heads
        row = [
            str(i),
            "gone" if now.heads is None else f"{now.heads} of {dense.heads}",
            "-" if gone else f"{now.qk_dim} of {dense.qk_dim}",
            "-" if gone else f"{now.value_dim} of {dense.value_dim}",
            "gone" if now.neurons is None else f"{now.neurons} of {dense.neurons}",
        ]
        if block.macs is not None and block.dense_macs:
            row += [in_words(block.macs), f"{block.macs / block.dense_macs:.1%}"]
        rows.append(row)
    return Table(head, rows)


def ladder_table(runs: Sequence[RunData]) -> Table:
    """The sizes of a run side by side."""
    rows, score = [], "Feature error" if runs[0].metric == "error" else "Top-1 accuracy"
    for run in runs:
        by_name = {figure.name: figure for figure in figures(run)}
        cells = [run.name, str(run.config.get("target", "-")), STATES[run.state]]
        for name in (score, "MACs", "Parameters"):
            cells.append(by_name[name].compact if name in by_name else "-")
        speeds = [f"{figure.compact} ({figure.change})" for name, figure in by_name.items() if "Latency" in name]
        rows.append([*cells, speeds[-1] if speeds else "-"])
    return Table(["size", "target", "state", score.lower(), "MACs", "parameters", "latency, largest batch"], rows)


def verification(run: RunData) -> list[str]:
    """What was checked, in sentences."""
    said, saved, record = [], run.saved, run.record
    if "logit_difference" in saved:
        said.append(
            f"The outputs of the compact model are within {saved['logit_difference']:.1e} (relative) of those of the "
            f"gated model it was cut from; up to {saved['tolerance']:.0e} was allowed."
        )
        said.append(
            "When it was saved, it was rebuilt from its recipe and its weights, and gave the same outputs bit for bit."
        )
    if "macs" in record and record.get("dense_macs") and run.snapshots and "target" in run.snapshots[-1]:
        last = run.snapshots[-1]
        met = "within" if last["hard"] <= last["target"] * (1 + 1e-9) else "above"
        said.append(f"It costs {last['hard']:.2%} of the dense model, {met} the target of {last['target']:.2%}.")
    answers = record.get("answers")
    if answers:
        total = sum(answers.values())
        said.append(
            f"Of {total} validation images both models get {answers['both']} right, only the dense one "
            f"{answers['dense_only']}, only the compact one {answers['compact_only']}, neither {answers['neither']}."
        )
    if "seconds" in record:
        said.append(f"Training took {clock(record['seconds'])}, evaluations not counted.")
    return said


def decision_sentences(decisions: Decisions) -> list[str]:
    """When macro and micro decisions became final, and what came back."""
    said = []
    for name, kinds in (("Macro", MACRO_UNITS), ("Micro", MICRO_UNITS)):
        most, every = (decisions.settled(kinds, share) for share in (0.9, 1.0))
        if most is None or every is None:
            continue
        course = f"90 % were final at epoch {most:.1f}, the last one at epoch {every:.1f}"
        if every == decisions.at[0]:
            course = "none changed during the search"
        named = ", ".join(UNIT_NAMES[kind] for kind in kinds if kind in decisions.units)
        said.append(f"{name} decisions ({named}): {course}.")
    back = [f"{n} {UNIT_NAMES[kind]}" for kind, n in decisions.returned.items() if n]
    said.append(f"Closed at some time and open in the end: {', '.join(back) or 'none'}.")
    return said
