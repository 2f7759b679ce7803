"""The page: one HTML file with everything in it, for phone, screen and print, light and dark."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files

from hiap.report.gathering import RunData
from hiap.report.sections import header, ladder_section, run_sections

__all__ = ["document", "page_of"]


def page_of(runs: Sequence[RunData], title: str) -> str:
    """The page of a run, or of the rungs of a ladder."""
    begun = [run for run in runs if run.state != "waiting"]
    if len(runs) == 1 and runs[0].name == title:
        body = run_sections(runs[0])
    else:
        rungs = [
            f'<details class="rung"{" open" if run is begun[-1] else ""}><summary>Size {escape(run.name)}</summary>'
            f"{run_sections(run)}</details>"
            for run in begun
        ]
        body = ladder_section(runs) + "".join(rungs)
    return document(title, "HiAP report", header(runs, title) + body)


def document(title: str, kind: str, body: str) -> str:
    """A whole page.

    Args:
        kind: what it is, beside its title.
    """
    room = files("hiap.report")
    style, script = ((room / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)} \N{MIDDLE DOT} {escape(kind)}</title><style>{style}</style></head>"
        f"<body><main>{body}"
        "<footer>Made by HiAP. This file needs nothing else.</footer></main>"
        f'<div id="tip" role="status" hidden></div><script>{script}</script></body></html>\n'
    )
