"""`hiap diff`: two runs or models against each other."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiap.cli.lookup import check_one_size

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Compare two runs or compact models: accuracy, cost and topology."
EXAMPLES = "example:\n  hiap diff runs/deit_s_50 runs/deit_s_60"


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument("first", metavar="A", help="a folder of a run or of a compact model")
    command.add_argument("second", metavar="B", help="another one")


def run(options: argparse.Namespace) -> int:
    from hiap.report.facts import figures, topology_table
    from hiap.report.gathering import STATES, gather

    folders = [Path(folder) for folder in (options.first, options.second)]
    for folder in folders:
        check_one_size(folder)
    pair = [gather(folder) for folder in folders]
    for name, one in zip("AB", pair, strict=True):
        print(f"{name}  {one.folder}: {STATES[one.state]}")
    found = [{figure.name: figure.compact for figure in figures(one)} for one in pair]
    _print_table(
        ["", "A", "B"],
        [[name, *(one.get(name, "-") for one in found)] for name in dict.fromkeys([*found[0], *found[1]])],
    )
    options_differ = [
        [key, str(pair[0].config.get(key, "-")), str(pair[1].config.get(key, "-"))]
        for key in dict.fromkeys([*pair[0].config, *pair[1].config])
        if all(one.config for one in pair) and pair[0].config.get(key) != pair[1].config.get(key)
    ]
    if options_differ:
        _print_table(["option", "A", "B"], options_differ)
    tables = [topology_table(one) for one in pair]
    if tables[0].head[:5] != tables[1].head[:5] or not all(table.rows for table in tables):
        print("the topology of at least one of them is not known")
        return 0
    rows = [[f"{i}", *_sides(tables, i)] for i in range(max(len(table.rows) for table in tables))]
    differ = [row for row in rows if any("->" in cell for cell in row)]
    if not differ:
        print("the topologies have the same widths")
        return 0
    _print_table(list(tables[0].head[:5]), differ)
    print(f"{len(rows) - len(differ)} of {len(rows)} blocks have the same widths in both")
    return 0


def _sides(tables: Sequence[Any], i: int) -> list[str]:
    """The cells of a block, each as it is in both, or as A -> B."""
    rows = [table.rows[i] if i < len(table.rows) else ["no block"] * 5 for table in tables]
    return [one if one == other else f"{one} -> {other}" for one, other in zip(rows[0][1:5], rows[1][1:5], strict=True)]


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print()
    for row in [head, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
