"""The parts that pages are made of, as HTML: sections, tables and charts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape

from hiap.report.facts import Table
from hiap.report.plotting import Chart

__all__ = ["grid", "section", "table_of"]


def section(title: str, body: str, lead: str = "") -> str:
    """A heading, a sentence about what follows, and what follows."""
    said = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"<section><h2>{escape(title)}</h2>{said}{body}</section>"


def table_of(key: str, table: Table, links: Sequence[str | None] = ()) -> str:
    """A table that can be copied.

    Args:
        key: its name on the page.
        links: for each row, where its first cell leads, if anywhere.
    """
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    head = f"<thead><tr>{head}</tr></thead>" if any(table.head) else ""
    cells = [[escape(cell) for cell in row] for row in table.rows]
    for row, link in zip(cells, links, strict=False):
        row[0] = f'<a href="{escape(link)}">{row[0]}</a>' if link else row[0]
    rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in cells)
    kind = "plain" if not head else "numbers"
    return (
        f'<div class="table"><button class="copy" type="button" data-copy="{key}">Copy</button>'
        f'<div class="scroll"><table id="{key}" class="{kind}">{head}<tbody>{rows}</tbody></table></div></div>'
    )


def grid(charts: Sequence[Chart]) -> str:
    """Charts beside each other."""
    pairs = " pairs" if charts and charts[0].wide else ""
    return f'<div class="grid{pairs}">{"".join(_chart(chart) for chart in charts)}</div>' if charts else ""


def _chart(chart: Chart) -> str:
    legend = "".join(
        f'<span><i class="{kind}" style="--c:{colour}"></i>{escape(name)}</span>' for name, colour, kind in chart.legend
    )
    data = json.dumps(chart.hover, separators=(",", ":")).replace("<", "\\u003c")
    return (
        f'<figure class="chart" role="img" aria-label="{escape(chart.title)}"><h3>{escape(chart.title)}</h3>'
        f'<div class="legend">{legend}</div>{chart.svg}'
        f'<figcaption>{escape(chart.note)}</figcaption><script type="application/json">{data}</script></figure>'
    )
