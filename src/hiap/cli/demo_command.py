"""`hiap demo`: the recipe of the digits, which needs no download."""

from __future__ import annotations

import argparse

from hiap.cli import prune_command
from hiap.training.config import read_config

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Train a small ViT on handwritten digits and prune it to half of its MACs; no download."
EXAMPLES = "example:\n  hiap demo --out runs/digits"


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument("--out", default="runs/digits", help="folder of the run (default runs/digits)")


def run(options: argparse.Namespace) -> int:
    return prune_command.start(read_config("digits"), options.out)
