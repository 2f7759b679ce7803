"""The `hiap` command: its parser, and how it ends.

Every other file here is one command, or what several of them share. A command gives its HELP, its EXAMPLES, the
arguments it takes (`add_arguments`) and what it does (`run`, which returns the exit status). None of them imports torch
before it runs, so that help comes at once.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from hiap.cli import (
    bench_command,
    demo_command,
    diff_command,
    evaluate_command,
    export_command,
    info_command,
    inspect_command,
    measure_command,
    plan_command,
    prune_command,
    push_command,
    report_command,
    sweep_command,
)
from hiap.errors import HiapError

__all__ = ["main"]

COMMANDS: dict[str, ModuleType] = {
    "prune": prune_command,
    "sweep": sweep_command,
    "demo": demo_command,
    "plan": plan_command,
    "evaluate": evaluate_command,
    "report": report_command,
    "info": info_command,
    "inspect": inspect_command,
    "diff": diff_command,
    "bench": bench_command,
    "measure": measure_command,
    "export": export_command,
    "push": push_command,
}
PACKAGE = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.command is None:
        _parser().print_help()
        return 0
    try:
        with _plain_warnings():
            status: int = options.run(options)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:  # a run that could save has said so
        print("hiap: stopped", file=sys.stderr)
        return 130
    except SystemExit as error:
        if error.code == 143:  # SIGTERM
            print("hiap: stopped", file=sys.stderr)
        raise
    except BrokenPipeError:  # whoever reads the output, `head` say, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (HiapError, OSError) as error:  # anything else is a bug, and has its traceback
        print(f"hiap: {error}", file=sys.stderr)
        return 1


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Our own warnings as one line each, without the line of code they come from."""
    usual = warnings.formatwarning

    def plain(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        ours = PACKAGE in Path(filename).parents and category is UserWarning
        return f"warning: {message}\n" if ours else usual(message, category, filename, lineno, line)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = usual


class _HelpAll(argparse.Action):
    """Shows the help of a command with all of its options."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        _parser(every_option=True).parse_args([parser.prog.split()[-1], "--help"])


def _parser(every_option: bool = False) -> argparse.ArgumentParser:
    """The parser of the command line.

    Args:
        every_option: help also shows the options that few people need.
    """
    parser = argparse.ArgumentParser(
        prog="hiap",
        description="Make Vision Transformers smaller and faster.",
        epilog="example: hiap prune --help",
    )
    parser.add_argument("--version", action="version", version=f"hiap {version('hiap')}")
    commands = parser.add_subparsers(dest="command", title="commands")
    for name, command in COMMANDS.items():
        added = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.register("action", "help_all", _HelpAll)
        added.set_defaults(run=command.run)
        command.add_arguments(added, every_option)
    return parser


if __name__ == "__main__":
    sys.exit(main())
