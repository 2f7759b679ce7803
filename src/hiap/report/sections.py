"""The sections of the page, each as HTML."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import yaml

from hiap.report.charts import course_charts, decision_charts, evolution_charts, gate_charts, run_key
from hiap.report.decisions import decisions_of
from hiap.report.drawing import draw_network
from hiap.report.elements import grid, section, table_of
from hiap.report.facts import Figure, Table, decision_sentences, figures, ladder_table, topology_table, verification
from hiap.report.gathering import STATES, RunData
from hiap.report.margins import one_percent
from hiap.report.plotting import WIDE, Line, line_chart, why_not

__all__ = ["header", "ladder_section", "run_sections"]


def header(runs: Sequence[RunData], title: str) -> str:
    """The name of the run, what it pruned, and how it stands."""
    run = next((one for one in reversed(runs) if one.state != "waiting"), runs[-1])
    words = [run.config.get("model") or run.saved.get("skeleton", {}).get("name") or "Vision Transformer"]
    if run.config.get("data"):
        words.append(f"on {run.config['data']}")
    if run.config.get("target"):
        words.append(f"target {', '.join(str(one.config.get('target')) for one in runs)}")
    state = run.state
    if state == "finished" and any(one.state != "finished" for one in runs):
        state = "stopped"  # between two sizes
    said = escape(" · ".join(map(str, words)))
    return (
        f'<header><div><p class="brand">HiAP report</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{said}</p></div>'
        f'<span class="state {state}">{escape(STATES[state])}</span></header>'
    )


def ladder_section(runs: Sequence[RunData]) -> str:
    """All sizes in one table, with accuracy against MACs where there are two or more."""
    done = [run for run in runs if run.record.get("top1") is not None and run.record.get("dense_macs")]
    charts = []
    if len(done) > 1 and why_not() is None:
        shares = [run.record["macs"] / run.record["dense_macs"] for run in done]
        order = sorted(range(len(done)), key=lambda i: shares[i])
        scores = [done[i].record["top1"] for i in order]
        line = Line("compact models", [100 * shares[i] for i in order], scores, 1, "o-")
        dense = done[0].record.get("dense_top1")
        charts.append(
            line_chart(
                "ladder-accuracy",
                "Accuracy over cost, both in percent",
                "Top-1 on the validation images, over MACs as a share of the dense model.",
                [line],
                level=("dense model", dense) if dense is not None else None,
                show=lambda value: f"{value:.2f} %",
                start=max(0.0, 10 * (line.x[0] // 10) - 10),
                end=100.0,
                axis="MACs, percent of dense",
                width=WIDE,
            )
        )
    return section("All sizes", table_of("sizes", ladder_table(runs)) + grid(charts), "Each size is a run of its own.")


def run_sections(run: RunData) -> str:
    """Everything about one run."""
    return "".join(
        (
            _notes(run),
            _headline(run),
            _network(run),
            _learning(run),
            _gates(run),
            _topology(run),
            _margins(run),
            _checked(run),
            _pictures(run),
            _origin(run),
        )
    )


def _notes(run: RunData) -> str:
    notes = list(run.missing)
    without = why_not()
    if without and (run.metrics or run.snapshots):
        notes.append(without)
    items = "".join(f"<li>{escape(_sentence(note))}</li>" for note in notes)
    return f'<aside class="notes"><ul>{items}</ul></aside>' if items else ""


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text[-1] not in ".!?" else f"{text[0].upper()}{text[1:]}"


def _headline(run: RunData) -> str:
    found = figures(run)
    if not found:
        return ""
    cards = "".join(_card(figure) for figure in found)
    speeds = run.record.get("speed") or ()
    timed = "; ".join(f"batch {one['batch']}: {one['compact_form']}, {one['precision']}" for one in speeds)
    device = run.starts[-1].get("device", "") if run.starts else ""
    said = f"Latency is measured on {device or 'the machine of the run'}, each model in its fastest form ({timed})."
    return f'<div class="cards">{cards}</div>' + (f'<p class="fine">{escape(said)}</p>' if timed else "")


def _card(figure: Figure) -> str:
    was = f'<span class="was">dense {escape(figure.dense)}</span> ' if figure.dense else ""
    tone = {True: "good", False: "bad", None: ""}[figure.good]
    change = f'<span class="change {tone}">{escape(figure.change)}</span>' if figure.change else ""
    big = f'<p class="big">{escape(figure.compact)}</p>'
    return f'<div class="card"><h3>{escape(figure.name)}</h3>{big}<p>{was}{change}</p></div>'


def _network(run: RunData) -> str:
    if not run.blocks:
        return ""
    charts = evolution_charts(run) if why_not() is None else []
    lead = (
        "Outline: the dense model. Filled: what is kept. A head is filled as wide as its value dims and as high as its "
        "q/k dims that are kept; point at it for the numbers."
    )
    if run.state not in ("finished", "model"):
        decided = "freeze_step" in run.record
        now = "The widths are final." if decided else "This is how the gates stand now; they are still deciding."
        lead += f" {now}" if run.snapshots else ""
    parts = [section("The network", draw_network(run.blocks), lead)]
    if charts:
        lead = "What every block keeps over the search. The stronger the colour, the more is kept."
        parts.append(section("How it came about", grid(charts), lead))
    return "".join(parts)


def _learning(run: RunData) -> str:
    charts = course_charts(run) if why_not() is None else []
    return section("Training", grid(charts)) if charts else ""


def _gates(run: RunData) -> str:
    if not run.snapshots or not run.blocks:
        return ""
    decisions = decisions_of(run.snapshots, run.searched)
    drawn = why_not() is None
    parts = []
    if decisions is not None:
        said = "".join(f"<li>{escape(one)}</li>" for one in decision_sentences(decisions))
        charts = decision_charts(run, decisions) if drawn else []
        lead = "A decision is final when the unit stays open or closed until the end of the search."
        parts.append(section("When it was decided", f'<ul class="said">{said}</ul>{grid(charts)}', lead))
    if drawn:
        lead = "Probability that a gate is open, for all gates of a kind. In the end they should be near 0 or near 1."
        parts.append(section("Gate probabilities", grid(gate_charts(run)), lead))
    return "".join(parts)


def _topology(run: RunData) -> str:
    if not run.blocks:
        return ""
    lead = "Widths as they are built." if run.saved else "Open units; widths are means over open heads, rounded up."
    return section("Topology", table_of(f"{run_key(run)}-topology", topology_table(run)), lead)


def _margins(run: RunData) -> str:
    said = "".join(f"<li>{escape(one)}</li>" for one in one_percent(run.record))
    lead = "What the gates would have chosen for a slightly smaller or larger budget, and the loss they expected of it."
    return section("One percent less, one percent more", f'<ul class="said">{said}</ul>', lead) if said else ""


def _checked(run: RunData) -> str:
    said = "".join(f"<li>{escape(one)}</li>" for one in verification(run))
    return section("Verification", f'<ul class="said">{said}</ul>') if said else ""


def _pictures(run: RunData) -> str:
    if not run.pictures:
        return ""
    shown = "".join(
        f'<figure class="picture"><img alt="" src="data:image/png;base64,{escape(str(one.get("png", "")))}">'
        f"<figcaption><b>{escape(str(one.get('label')))}</b><br>compact says {escape(str(one.get('compact')))}"
        "</figcaption></figure>"
        for one in run.pictures
    )
    lost = run.record.get("answers", {}).get("dense_only", len(run.pictures))
    images = f"{len(run.pictures)} of the {lost} validation images"
    lead = f"{images} that the dense model gets right and the compact one wrong."
    return section("What was lost", f'<div class="pictures">{shown}</div>', lead)


def _origin(run: RunData) -> str:
    parts = []
    rows: list[tuple[str, str]] = []
    for i, start in enumerate(run.starts):
        rows.append(("command" if i == 0 else "taken up with", str(start.get("command", ""))))
    if run.starts:
        last = run.starts[-1]
        processes = f", {last['processes']} processes" if last.get("processes", 1) != 1 else ""
        rows += [
            ("started", str(run.starts[0].get("started", ""))),
            ("hardware", f"{last.get('device', '')}{processes}"),
            ("system", f"{last.get('system', '')}, Python {last.get('python', '')}"),
        ]
    versions: dict[str, Any] = (run.starts[-1] if run.starts else run.saved).get("versions", {})
    if versions:
        rows.append(("versions", ", ".join(f"{name} {number}" for name, number in versions.items())))
    if rows:
        parts.append(table_of(f"{run_key(run)}-origin", Table(("", ""), rows)))
    if run.config:
        text = escape(yaml.safe_dump(run.config, sort_keys=False))
        parts.append(f"<details><summary>Configuration, {len(run.config)} options</summary><pre>{text}</pre></details>")
    return section("Where it comes from", "".join(parts)) if parts else ""
