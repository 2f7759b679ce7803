"""`hiap evaluate`: accuracy of a model on the validation images."""

from __future__ import annotations

import argparse

from hiap.cli.arguments import add_config, positive
from hiap.cli.evaluate_file import evaluate_file
from hiap.cli.lookup import compact_folder
from hiap.errors import InputError
from hiap.export.formats import format_of

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Accuracy of a saved compact model, or of a dense one, on the validation part of a data set."
EXAMPLES = """examples:
  hiap evaluate runs/mine --data photos/
  hiap evaluate mine.onnx --data photos/
  hiap evaluate --model deit_small_patch16_224 --data imagenet/
  hiap evaluate --model vit_tiny_patch16_224 --weights my.safetensors --img-size 128 --data photos/
"""

# Options of a configuration that are taken: for a dense model alone, and for any
DENSE = ("model", "model_args", "weights", "pretrained", "img_size")
INPUT = ("data", "val_split", "input_key", "target_key", "download", "workers", "strict_data", "mean", "std")


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument(
        "folder",
        nargs="?",
        help="a folder written by hiap.save, that of a run, or a file of hiap export; or give --model",
    )
    add_config(command, every_option=True, only=(*DENSE, *INPUT))
    command.add_argument(
        "--batch-size", type=positive, default=None, help="images at a time (default 256, on a CPU 64)"
    )


def run(options: argparse.Namespace) -> int:
    import torch

    import hiap
    from hiap.models.registry import family_of
    from hiap.training.config import read_config
    from hiap.training.evaluate import evaluate
    from hiap.training.setup import dense_model, load_data

    given = {name: getattr(options, name) for name in (*DENSE, *INPUT) if getattr(options, name) is not None}
    if (options.folder is None) == (options.model is None):
        raise InputError("give either a folder, or --model NAME")
    if options.folder is not None and (wrong := [name for name in DENSE if name in given]):
        raise InputError(f"--{wrong[0].replace('_', '-')} goes with --model; a folder is scored as it is")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = read_config(None, {"lambda_macro": 0.0, **given})  # what it would be pruned to does not matter
    if options.folder is not None and format_of(options.folder) is not None:
        scores = evaluate_file(options.folder, config, options.batch_size or 64)
        print(f"top-1 {scores['top1']:.2f} %  top-5 {scores['top5']:.2f} %  {scores['images']} images")
        return 0
    if options.model:
        model = dense_model(config).to(device).eval()
    else:
        model = hiap.load(compact_folder(options.folder), device)
    family = family_of(model)
    family.sites(model)  # refuses what cannot be pruned
    classes = family.classes(model)
    if classes == 0:
        raise InputError(f"{config.weights or config.model} holds no classifier, so there is nothing to score")
    config.model_args = {"num_classes": classes}
    data = load_data(config, model, device)
    if data.classes != classes:
        raise InputError(f"the model has {classes} classes, the data {data.classes}")
    own, others = getattr(model, "class_names", None), data.class_names
    if own and others and own != others:
        first = next((a, b) for a, b in zip(own, others, strict=True) if a != b)
        raise InputError(f"the model was trained on other classes: {first[0]!r} stands where the data has {first[1]!r}")
    scores = evaluate(model, data, options.batch_size or (256 if device.type == "cuda" else 64))
    print(f"top-1 {scores['top1']:.2f} %  top-5 {scores['top5']:.2f} %  {scores['images']} images")
    return 0
