"""`hiap plan`: what a run would do."""

from __future__ import annotations

import argparse

from hiap.cli.arguments import add_config, read_options

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Show what a run would do, without training: which targets are reachable, and how long it takes."
EXAMPLES = "example:\n  hiap plan --model deit_small_patch16_224 --no-pretrained --data imagenet/ --target 3.1G"


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    add_config(command, every_option)


def run(options: argparse.Namespace) -> int:
    from hiap.training.plan import plan

    for line in plan(read_options(options)):
        print(line)
    return 0
