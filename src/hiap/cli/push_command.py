"""`hiap push`: a saved model on the Hugging Face hub, with a model card."""

from __future__ import annotations

import argparse

from hiap.cli.lookup import compact_folder

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Put a saved compact model on the Hugging Face hub, with a model card made from it and its run."
EXAMPLES = """examples:
  hiap push runs/mine me/vit-small-half
  hiap push runs/mine me/vit-small-half --private --license apache-2.0
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    add = command.add_argument
    add("folder", help="a folder written by hiap.save, or that of a run")
    add("repo", metavar="USER/NAME", help="name on the hub; hiap.load reads it as hf://USER/NAME")
    add("--private", action="store_true", help="only you can see it")
    add(
        "--license",
        metavar="ID",
        help="licence of the weights, such as apache-2.0; by default that of the dense model, if known",
    )
    add("--message", metavar="TEXT", default="", help="commit message")
    add("--overwrite", action="store_true", help="update a model that is already on the hub")


def run(options: argparse.Namespace) -> int:
    import hiap
    from hiap.export.card import model_card
    from hiap.pruning.hub import check_name, upload

    check_name(options.repo)
    folder = compact_folder(options.folder)
    hiap.load(folder)  # which refuses damaged ones
    card = model_card(folder, options.repo, options.license)
    url = upload(folder, options.repo, {"README.md": card}, options.private, options.overwrite, options.message)
    print(f"{url}: load it with hiap.load('hf://{options.repo}')")
    return 0
