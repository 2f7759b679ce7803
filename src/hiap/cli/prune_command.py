"""`hiap prune`: prune a model and print what it has become."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hiap.cli.arguments import add_config, read_options
from hiap.errors import InputError
from hiap.training.config import Config

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run", "start"]

HELP = "Prune a trained ViT to a budget in one training phase."
EXAMPLES = """examples:
  hiap prune --model deit_small_patch16_224 --data imagenet/ --target 3.1G --epochs 300 --out runs/deit_s
  hiap prune --model vit_tiny_patch16_224 --weights my.safetensors --img-size 128 --data photos/ --target 42%
  accelerate launch -m hiap prune --config deit_base_imagenet --data imagenet/ --out runs/deit_b
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument("--out", help="folder of the run; the result is in OUT/compact (default runs/NAME)")
    command.add_argument(
        "--resume", action="store_true", help="go on with the run in OUT, whose options are read there"
    )
    command.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    add_config(command, every_option)


def run(options: argparse.Namespace) -> int:
    config = read_options(options)
    if options.print_config:
        print(config.to_yaml(), end="")
        return 0
    default = f"runs/{config.data if config.data == 'digits' else config.model}"
    return start(config, options.out or default, options.resume)


def start(config: Config, out: str, resume: bool = False) -> int:
    """Prune, and print the report; returns the exit status."""
    if os.environ.get("RANK", "0") == "0":
        print("reading the model and the data", flush=True)
    try:
        from hiap.training.loop import prune
    except ImportError as error:
        raise InputError(f"training needs {error.name}: pip install 'hiap[train]'") from error
    result = prune(config, Path(out), resume=resume)
    if result.main:
        from hiap.cli.report import report

        report(result, config)
    return 0
