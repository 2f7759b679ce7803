"""`hiap prune`: prune a model and print what it has become."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hiap.cli.arguments import add_config, given_options, read_options
from hiap.errors import InputError
from hiap.training.config import Config
from hiap.training.rungs import further_config, rung_table

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run", "start"]

FIXED = ("model", "model_args", "weights", "pretrained", "img_size", "dense_epochs", "dense_lr", "objective", "deploy")

HELP = "Prune a trained ViT to a budget in one training phase."
EXAMPLES = """examples:
  hiap prune --model deit_small_patch16_224 --data imagenet/ --target 3.1G --epochs 300 --out runs/deit_s
  hiap prune --model vit_tiny_patch16_224 --weights my.safetensors --img-size 128 --data photos/ --target 42%
  hiap prune --model vit_tiny_patch16_224 --data photos/ --target 70%,50%,35% --epochs 30 --out runs/sizes
  hiap prune --from runs/sizes --target 25% --epochs 10
  accelerate launch -m hiap prune --config deit_base_imagenet --data imagenet/ --out runs/deit_b
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument(
        "--out",
        help="folder of the run; the result is in OUT/compact, with several targets in OUT/TARGET/compact (default "
        "runs/NAME)",
    )
    command.add_argument(
        "--from",
        dest="source",
        metavar="RUN",
        help="add the target to a finished run: prune its smallest model further, into RUN/TARGET",
    )
    command.add_argument("--resume", action="store_true", help="continue the run in OUT, with its saved options")
    command.add_argument("--print-config", action="store_true", help="print the resolved configuration and exit")
    add_config(command, every_option)


def run(options: argparse.Namespace) -> int:
    if options.source is not None:
        return _further(options)
    config = read_options(options)
    if options.print_config:
        print(config.to_yaml(), end="")
        return 0
    default = f"runs/{config.data if config.data == 'digits' else config.model}"
    return start(config, options.out or default, options.resume)


def _further(options: argparse.Namespace) -> int:
    """Add sizes to a finished run."""
    given = given_options(options)
    wrong = [name for name in FIXED if name in given]
    wrong += [name for name in ("out", "resume", "config") if getattr(options, name)]
    if wrong:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
        raise InputError(
            f"--from {options.source} uses the model, the table and the folder of that run: leave out {flags}"
        )
    if "target" not in given:
        raise InputError(f"--from {options.source} needs a --target below that run's, such as 25%")
    config = further_config(Path(options.source), given)
    if options.print_config:
        print(config.to_yaml(), end="")
        return 0
    return start(config, options.source, further=True)


def start(config: Config, out: str, resume: bool = False, further: bool = False) -> int:
    """Prune, and print the report of each size; returns the exit status."""
    if os.environ.get("RANK", "0") == "0":
        print("reading the model and the data", flush=True)
    try:
        from hiap.training.loop import prune
    except ImportError as error:
        raise InputError(f"training needs {error.name}: pip install 'hiap[train]'") from error
    from hiap.cli.report import report

    result = prune(
        config, Path(out), resume=resume, further=further, each=lambda one: report(one) if one.main else None
    )
    if result.main and result.rungs:
        print("\n".join(["all sizes:", *rung_table(result.rungs)]))
    return 0
