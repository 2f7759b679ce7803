"""`hiap report`: the report of a run, finished or not, or of a saved model."""

from __future__ import annotations

import argparse
from pathlib import Path

from hiap.cli.lookup import check_writable

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Write the report of a run, even while it is running, or of a saved model."
EXAMPLES = """examples:
  hiap report runs/deit_s
  hiap report runs/deit_s --format md -o README.md
  hiap report runs/deit_s --format png
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument("folder", help="a folder of `hiap prune`, or one written by hiap.save")
    command.add_argument(
        "--format",
        default="html",
        choices=("html", "md", "json", "png"),
        help="html: a page that needs nothing else (default); md: for a model card; json: the numbers; png: a picture",
    )
    command.add_argument("-o", "--out", "--output", dest="output", metavar="FILE", help="file to write")


def run(options: argparse.Namespace) -> int:
    from hiap.report.plotting import why_not
    from hiap.report.writing import write_report

    check_writable(options.output)
    path = write_report(Path(options.folder), options.format, Path(options.output) if options.output else None)
    print(path)
    without = why_not()
    if options.format == "html" and without:
        print(f"without charts: {without}")
    return 0
