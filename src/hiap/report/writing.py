"""Writes the report of a run in one of its formats."""

from __future__ import annotations

import json
from pathlib import Path

from hiap.atomic import scratch_beside, write_text
from hiap.errors import InputError
from hiap.report.gathering import RunData, gather_all
from hiap.report.markdown import markdown_of
from hiap.report.overview import overview
from hiap.report.page import page_of
from hiap.report.plotting import why_not

__all__ = ["REPORT_FORMATS", "report_text", "write_report"]

REPORT_FORMATS = ("html", "md", "json", "png")


def write_report(folder: Path, form: str = "html", output: Path | None = None) -> Path:
    """Write the report of a folder, and return where it is.

    Args:
        folder: of a run, of a ladder or of a compact model.
        form: one of REPORT_FORMATS.
        output: a file; by default report.EXTENSION in the folder of the run, or beside the folder of a model, which
            holds nothing but the model.

    Raises:
        InputError: there is neither a run nor a model, or what the format needs is not installed.
    """
    runs = gather_all(folder)
    home = runs[0].folder if len(runs) == 1 else folder
    if output is None:
        output = home / f"report.{form}"
        if form == "json":
            output = home / "report.all.json"  # report.json belongs to the run
        if runs[0].state == "model":
            output = home.resolve().with_name(f"{home.resolve().name}.{output.name}")
    if form == "png":
        without = why_not()
        if without:
            raise InputError(without)
        begun = [run for run in runs if run.state != "waiting"]
        with scratch_beside(output) as scratch:
            picture = scratch / output.name
            picture.write_bytes(overview(begun[-1]))
            picture.replace(output)
    else:
        write_text(output, report_text(runs, home.resolve().name, form))
    return output


def report_text(runs: list[RunData], title: str, form: str) -> str:
    """The report as text.

    Args:
        form: html, md or json.
    """
    if form == "html":
        return page_of(runs, title)
    if form == "md":
        return markdown_of(runs, title)
    entries = [{**run.numbers(), "missing": run.missing, "metrics": run.metrics} for run in runs]
    return json.dumps({"name": title, "runs": entries}, indent=1) + "\n"
