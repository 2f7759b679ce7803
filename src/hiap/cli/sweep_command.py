"""`hiap sweep`: one run for every combination of some options, and a page that compares them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hiap.cli.arguments import add_config, given_options, positive, read_options, read_value
from hiap.errors import BudgetError, ConfigError, InputError
from hiap.sweep.grid import combinations, parse_axis, run_name
from hiap.training.config import Config

__all__ = ["EXAMPLES", "HELP", "add_arguments", "planned_runs", "run"]

HELP = "Prune with every combination of some options, and compare the results."
EXAMPLES = """examples:
  hiap sweep --grid target=35%,50%,70% --grid ratio=5:1,2:1 --model vit_tiny_patch16_224 --data photos/ --out runs/sweep
  hiap sweep --grid lr=1e-4,3e-4 --grid seed=0,1,2 --model vit_tiny_patch16_224 --data photos/ --target 50% --jobs 2
  hiap sweep --resume --out runs/sweep
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument(
        "--grid",
        action="append",
        metavar="OPTION=A,B",
        default=[],
        help="an option of `hiap prune` and its values, separated by commas, or by semicolons if the values contain "
        "commas; may be given several times",
    )
    command.add_argument(
        "--out", default="runs/sweep", help="folder of the sweep, with a run folder inside for each combination"
    )
    command.add_argument("--jobs", type=positive, metavar="N", help="runs at a time (default 1; with --ray, what fits)")
    command.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run on a Ray cluster: the one at this address or, without an address, the one that RAY_ADDRESS names, "
        "one that runs here, or a new one on this machine",
    )
    command.add_argument("--resume", action="store_true", help="continue the sweep in OUT, with its saved options")
    command.add_argument("--dry-run", action="store_true", help="check and list all runs of the sweep, and exit")
    add_config(command, every_option)


def planned_runs(options: argparse.Namespace) -> list[tuple[dict[str, str], str, Config]]:
    """The options of the grid, the name and the configuration of each run, all of them checked.

    Raises:
        InputError: with everything that is wrong with any combination.
    """
    axes = [parse_axis(text) for text in options.grid]
    found, wrong = combinations(axes), []
    twice = [axis.option for axis in axes if getattr(options, axis.option) is not None]
    if twice:
        flag = f"--{twice[0].replace('_', '-')}"
        raise InputError(f"{flag} is given and also in the grid: leave one of them out")
    values: dict[tuple[str, str], Any] = {}
    for axis in axes:
        for text in axis.values:
            try:
                values[axis.option, text] = text if axis.option == "config" else read_value(axis.option, text)
            except InputError as error:
                wrong.append(f"--grid {axis.option}: {error}")
    if wrong:
        raise InputError("the grid is wrong:\n  " + "\n  ".join(wrong))
    planned = []
    for one in found:
        chosen = argparse.Namespace(**vars(options))
        chosen.resume = False
        for option, text in one.items():
            setattr(chosen, option, values[option, text])
        try:
            planned.append((one, run_name(one), read_options(chosen)))
        except (ConfigError, BudgetError) as error:
            said = str(error).removeprefix("the configuration is wrong:\n").replace("\n  ", "\n    ").strip()
            wrong.append(f"{run_name(one)}:\n    {said}")
    if wrong:
        raise InputError(f"{len(wrong)} of {len(found)} combinations cannot run:\n  " + "\n  ".join(wrong))
    return planned


def run(options: argparse.Namespace) -> int:
    if not options.grid and not options.resume:
        raise InputError("hiap sweep needs something to vary, such as --grid target=35%,50%; or --resume --out FOLDER")
    if not options.grid and (given := given_options(options)):
        flag = f"--{next(iter(given)).replace('_', '-')}"
        raise InputError(f"--resume uses the options of the sweep: leave out {flag}")
    planned = planned_runs(options) if options.grid else []
    if options.dry_run:
        from hiap.sweep.sweep_folder import read_members  # which needs torch

        names = dict.fromkeys(
            [*(one.name for one in read_members(Path(options.out))), *(name for _, name, _ in planned)]
        )
        print("\n".join(str(Path(options.out, name)) for name in names))
        return 0
    return _go(options, planned)


def _go(options: argparse.Namespace, planned: list[tuple[dict[str, str], str, Config]]) -> int:
    from hiap.report.plotting import why_not
    from hiap.sweep.starting import Here, OnRay
    from hiap.sweep.summary import summarise, sweep_notes, sweep_table, text_table
    from hiap.sweep.sweep_folder import SweepFolder
    from hiap.sweep.sweeping import run_sweep, time_again

    def say(text: str) -> None:
        print(text, flush=True)

    starter = Here(options.jobs or 1) if options.ray is None else OnRay(options.ray or None, options.jobs)
    folder = SweepFolder(Path(options.out), planned)
    try:
        left = sum(member.state != "finished" for member in folder.members)
        say(f"runs in {options.out}: {len(folder.members)}, of which {left} to do, {starter.jobs} at a time")
        run_sweep(folder, starter, say)
        if isinstance(starter, Here):
            time_again(folder, say)
    finally:
        folder.close()
        if isinstance(starter, OnRay):
            starter.close()
    print("\n".join(text_table(sweep_table(folder.members, summarise(folder.members)))))
    for note in sweep_notes(folder.members):
        print(note)
    failed = [member for member in folder.members if member.state == "failed"]
    if failed:
        print(f"{len(failed)} of {len(folder.members)} runs failed; the same command tries them again")
    without = why_not()
    print(f"report: {folder.path / 'sweep.html'}" + (f" (without charts: {without})" if without else ""))
    return 1 if failed else 0
