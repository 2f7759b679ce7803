"""The report as Markdown: what a model card says of the pruning."""

from __future__ import annotations

from collections.abc import Sequence

from hiap.report.decisions import decisions_of
from hiap.report.facts import Table, decision_sentences, figures, ladder_table, topology_table, verification
from hiap.report.gathering import STATES, RunData
from hiap.report.margins import one_percent

__all__ = ["markdown_of", "markdown_table"]


def markdown_of(runs: Sequence[RunData], title: str) -> str:
    """The report of a run, or of the rungs of a ladder."""
    parts = [f"# {title}"]
    alone = len(runs) == 1 and runs[0].name == title
    if not alone:
        parts += ["## All sizes", markdown_table(ladder_table(runs))]
    for run in [one for one in runs if one.state != "waiting"]:
        if not alone:
            parts.append(f"## Size {run.name}")
        parts += _run(run, "##" if alone else "###")
    return "\n\n".join(parts) + "\n"


def _run(run: RunData, level: str) -> list[str]:
    parts = []
    named = [str(run.config[key]) for key in ("model", "data", "target") if run.config.get(key)]
    parts.append(" · ".join([*named, STATES[run.state]]))
    if run.missing:
        parts.append("\n".join(f"> {one[0].upper()}{one[1:]}." for one in run.missing))
    rows = [(one.name, one.dense, one.compact, one.change) for one in figures(run)]
    if rows:
        parts.append(markdown_table(Table(("", "dense", "compact", ""), rows)))
    decisions = decisions_of(run.snapshots, run.searched) if run.blocks else None
    if decisions is not None:
        parts += [f"{level} When it was decided", _list(decision_sentences(decisions))]
    if run.blocks:
        parts += [f"{level} Topology", markdown_table(topology_table(run))]
    if margins := one_percent(run.record):
        parts += [f"{level} One percent less, one percent more", _list(margins)]
    if checked := verification(run):
        parts += [f"{level} Verification", _list(checked)]
    if run.starts:
        last = run.starts[-1]
        versions = ", ".join(f"{name} {number}" for name, number in last.get("versions", {}).items())
        said = [f"`{run.starts[0].get('command', '')}`", str(last.get("device", "")), versions]
        parts += [f"{level} Where it comes from", _list([one for one in said if one])]
    return parts


def _list(sentences: Sequence[str]) -> str:
    return "\n".join(f"- {one}" for one in sentences)


def markdown_table(table: Table) -> str:
    """A table of Markdown."""
    rows = [table.head, ["---"] * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)
