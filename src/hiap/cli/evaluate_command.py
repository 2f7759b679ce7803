"""`hiap evaluate`: accuracy of a model on the validation images, or how good its features are."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from hiap.atomic import write_text
from hiap.cli.arguments import add_config, positive
from hiap.cli.evaluate_file import evaluate_file
from hiap.cli.lookup import check_writable, compact_folder
from hiap.errors import InputError
from hiap.export.formats import format_of

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Accuracy of a saved compact model, or of a dense one, on the validation part of a data set."
EXAMPLES = """examples:
  hiap evaluate runs/mine --data photos/
  hiap evaluate mine.onnx --data photos/
  hiap evaluate runs/mine --data photos/ --merge-tokens 8
  hiap evaluate runs/mine --data photos/ --quantize int8
  hiap evaluate runs/backbone --against dense --data photos/ --knn --linear-probe
  hiap evaluate --model deit_small_patch16_224 --data imagenet/
  hiap evaluate --model vit_tiny_patch16_224 --weights my.safetensors --img-size 128 --data photos/
"""

# Options of a configuration that are taken: for a dense model alone, and for any
DENSE = ("model", "model_args", "weights", "pretrained", "img_size")
INPUT = ("data", "val_split", "input_key", "target_key", "download", "workers", "strict_data", "mean", "std")
USAGE = ("mean", "std", "interpolation", "crop_pct", "crop_mode")  # how images are made ready
PROMPT = "a photo of a {}."


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
    merging = "merge this many tokens in each block, for speed; the --against model is not changed"
    command.add_argument("--merge-tokens", type=positive, metavar="R", help=merging)
    rounding = "8-bit weights with torchao: int8, or fp8 (a CUDA device of compute capability 8.9 or newer)"
    command.add_argument("--quantize", metavar="KIND", help=rounding)
    command.add_argument("--out", dest="json", metavar="FILE", help="write the figures here, as JSON")
    add = command.add_argument_group("features, instead of the classifier").add_argument
    add("--knn", action="store_true", help="top-1 of the nearest training images, by cosine similarity")
    add("--neighbours", type=positive, help="how many of them vote (default 20)")
    add("--linear-probe", action="store_true", help="top-1 of a logistic regression on the training images")
    add("--zero-shot", metavar="FOLDER", help="top-1 from the class names; FOLDER has the whole CLIP or SigLIP model")
    add("--prompt", metavar="TEXT", help=f"the text for a class, with --zero-shot (default {PROMPT!r})")
    add("--against", metavar="WHICH", help="compare with 'dense', the dense model of the run, or with another folder")


def run(options: argparse.Namespace) -> int:
    import torch

    import hiap
    from hiap.models.registry import family_of
    from hiap.speed.eight_bits import check_eight_bits
    from hiap.training.config import read_config
    from hiap.training.setup import dense_model

    given = {name: getattr(options, name) for name in (*DENSE, *INPUT) if getattr(options, name) is not None}
    probes = options.knn or options.linear_probe or options.zero_shot is not None
    if (options.folder is None) == (options.model is None):
        raise InputError("give either a folder, or --model NAME")
    if options.folder is not None and (wrong := [name for name in DENSE if name in given]):
        raise InputError(f"--{wrong[0].replace('_', '-')} goes with --model; a folder is scored as it is")
    for name, needed, there in (
        ("against", "--knn, --linear-probe or --zero-shot", probes and options.folder is not None),
        ("neighbours", "--knn", options.knn),
        ("prompt", "--zero-shot", options.zero_shot is not None),
    ):
        if getattr(options, name) is not None and not there:
            raise InputError(f"--{name} goes with {needed}" + (" and a folder" if name == "against" else ""))
    check_writable(options.json)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exported = options.folder is not None and format_of(options.folder) is not None
    if exported and options.merge_tokens:
        raise InputError(f"{options.folder} is an exported file: merge tokens when you write it (hiap export)")
    if exported and options.quantize:
        raise InputError(f"{options.folder} is an exported file: quantise it when you write it (hiap export)")
    if probes and options.quantize:
        raise InputError("--quantize is for the classifier: leave out --knn, --linear-probe and --zero-shot")
    if options.quantize:
        check_eight_bits(options.quantize, device)
    if exported and probes:
        raise InputError(f"{options.folder} gives only logits: --knn, --linear-probe and --zero-shot need a folder")
    objective = {"objective": "features"} if probes else {}
    # what it would be pruned to does not matter
    config = read_config(None, {"lambda_macro": 0.0, **objective, **given})
    if exported:
        figures = evaluate_file(options.folder, config, options.batch_size or 64)
        print(f"top-1 {figures['top1']:.2f} %  top-5 {figures['top5']:.2f} %  {figures['images']} images")
        return _written(options.json, figures)
    if options.model:
        name, model = "dense", dense_model(config).to(device).eval()
    else:
        name, model = "compact", hiap.load(compact_folder(options.folder), device)
    family_of(model).sites(model)  # refuses what cannot be pruned
    if options.merge_tokens:
        model = hiap.merge_tokens(model, options.merge_tokens)
    batch = options.batch_size or (256 if device.type == "cuda" else 64)
    if probes:
        models = {name: model} if options.against is None else {**_other(options, device), name: model}
        figures = _probed(options, config, models, batch, device)
    else:
        name = options.folder or config.weights or config.model
        figures = _classified(name, config, model, batch, device, options.quantize)
    merging = family_of(model).merging(model)
    return _written(options.json, figures | ({"merge_tokens": merging[0]} if merging else {}))


def _written(file: str | None, figures: dict[str, Any]) -> int:
    if file:
        write_text(file, json.dumps(figures, indent=1) + "\n")
    return 0


def _classified(
    given: str, config: Any, model: Any, batch: int, device: Any, quantize: str | None = None
) -> dict[str, Any]:
    """Print top-1 and top-5 of the classifier of a model; `given` is what it was given as, for errors."""
    import torch

    from hiap.models.registry import family_of
    from hiap.speed.eight_bits import EightBits
    from hiap.training.evaluate import evaluate
    from hiap.training.setup import load_data

    classes = family_of(model).classes(model)
    if classes == 0:
        raise InputError(f"{given} has no classifier, so only its features can be scored: pass --knn or --linear-probe")
    config.model_args = {"num_classes": classes}
    data = load_data(config, model, device)
    if data.classes != classes:
        raise InputError(f"the model has {classes} classes, the data {data.classes}")
    own, others = getattr(model, "class_names", None), data.class_names
    if own and others and own != others:
        first = next((a, b) for a, b in zip(own, others, strict=True) if a != b)
        raise InputError(f"the model was trained on other classes: {first[0]!r} stands where the data has {first[1]!r}")
    more: dict[str, Any] = {}
    if quantize:
        rest = "bf16" if device.type == "cuda" else "fp32"
        model = EightBits(model, quantize, device, torch.bfloat16 if rest == "bf16" else torch.float32)
        more = {"quantize": quantize, "rounded_layers": model.rounded, "other_layers": model.left}
        print(f"{model.rounded} layers of the blocks in {quantize}, {model.left} in {rest}")
    scores = evaluate(model, data, batch)
    print(f"top-1 {scores['top1']:.2f} %  top-5 {scores['top5']:.2f} %  {scores['images']} images")
    return {**scores, **more}


def _probed(options: Any, config: Any, models: dict[str, Any], batch: int, device: Any) -> dict[str, Any]:
    """Print what the features of each model are worth, side by side."""
    from dataclasses import replace

    from hiap.training import probes
    from hiap.training.features import feature_width

    config = replace(config, objective="labels")  # which are read here
    neighbours = options.neighbours or probes.NEIGHBOURS
    scores: dict[str, dict[str, float]] = {}
    texts: Any = None
    figures: dict[str, Any] = {"neighbours": neighbours, "temperature": probes.TEMPERATURE} if options.knn else {}
    for name, model in models.items():
        data = _labelled_data(options, config, model, device)
        if options.zero_shot is not None and texts is None:
            texts = probes.class_texts(options.zero_shot, data.class_names, options.prompt or PROMPT, device)
            for width in map(feature_width, models.values()):
                if texts.shape[1] != width:
                    raise InputError(
                        f"the model gives {width} features, the texts of {options.zero_shot} have {texts.shape[1]}: "
                        "they are of another model"
                    )
        queries = probes.embed_images(model, data.val(batch))
        figures["images"] = len(queries[1])
        found = scores[name] = {}
        if options.knn or options.linear_probe:
            bank = probes.embed_images(model, data.bank(batch))
            figures["bank"] = len(bank[1])
        if options.knn:
            found["knn"] = probes.knn_top1(bank, queries, neighbours)
        if options.linear_probe:
            found["linear_probe"], decay = probes.linear_probe(bank, queries)
            figures.setdefault("weight_decay", {})[name] = decay
        if options.zero_shot is not None:
            found["zero_shot"] = probes.zero_shot_top1(texts, queries)
    _print(scores, figures)
    return {**figures, **scores}


def _labelled_data(options: Any, config: Any, model: Any, device: Any) -> Any:
    """The data of a configuration as a model sees it; what the probes need of it is there."""
    from hiap.data.files import SHARE, is_labelled
    from hiap.training.setup import load_data

    try:
        data = load_data(config, model, device)
    except InputError as error:
        if not Path(config.data).exists() or is_labelled(config.data, config.val_split or SHARE):
            raise
        what = "nearest neighbours" if options.knn else "linear probes" if options.linear_probe else "zero-shot scores"
        raise InputError(f"{what} need labelled images: {error}") from error
    if (options.knn or options.linear_probe) and not hasattr(data, "bank"):
        raise InputError(f"--data {config.data}: its training images cannot be read without augmentation")
    if options.zero_shot is not None and not data.class_names:
        raise InputError(f"--data {config.data}: its class names are not known, and --zero-shot needs them")
    return data


def _print(scores: dict[str, dict[str, float]], figures: dict[str, Any]) -> None:
    """A row for each kind of score, a column for each model."""
    labels = {"knn": "kNN top-1", "linear_probe": "linear probe", "zero_shot": "zero-shot"}
    if len(scores) > 1:
        print(f"{'':14}" + "".join(f"{name:>12}" for name in scores))
    for kind in next(iter(scores.values())):
        values = [found[kind] for found in scores.values()]
        change = f"  {values[-1] - values[0]:+.2f} points" if len(values) > 1 else ""
        print(f"{labels[kind]:14}" + "".join(f"{value:>10.2f} %" for value in values) + change)
    bank = f", {figures['bank']} training images" if "bank" in figures else ""
    print(f"{figures['images']} validation images{bank}")


def _other(options: argparse.Namespace, device: Any) -> dict[str, Any]:
    """The model that a folder is compared with, by its name."""
    import hiap
    from hiap.models.registry import family_of
    from hiap.pruning.merging import unmerged
    from hiap.training.config import read_config
    from hiap.training.run_folder import CONFIG
    from hiap.training.rungs import first_folder
    from hiap.training.setup import dense_model

    if options.against != "dense":
        return {"other": hiap.load(compact_folder(options.against), device)}
    compact = compact_folder(options.folder)
    runs = [path for path in (Path(options.folder), compact.parent) if (path / CONFIG).is_file()]
    if not runs:
        raise InputError(
            f"{options.folder} is not the folder of a run, so its dense model is not known: score it with --model NAME"
        )
    run = first_folder(runs[0])
    config = read_config(run / CONFIG)
    model, own = unmerged(dense_model(config)), unmerged(hiap.load(compact))
    _check_dense(run, config, model, own)
    family = family_of(model)
    shared = {name: value for name, value in family.usage(own).items() if name in USAGE}
    family.set_usage(model, {**family.usage(model), **shared})  # both see the same images
    return {"dense": model.to(device).eval()}


def _check_dense(run: Path, config: Any, model: Any, own: Any) -> None:
    """Load the weights that the run kept of its dense model, and refuse a model that is not the one that was pruned.

    Args:
        model: what the configuration of the run names.
        own: the compact model of the run.
    """
    from hiap.models.registry import family_of
    from hiap.pruning.digest import digest_tensors
    from hiap.pruning.extract import provenance_of
    from hiap.training.inputs import backbone_tensors
    from hiap.training.run_folder import DENSE as WEIGHTS
    from hiap.training.run_folder import load_dense

    family, before, after = family_of(model), provenance_of(model), provenance_of(own)
    kept, report = (run / WEIGHTS).is_file(), run / "report.json"
    widths = before.dense if before else tuple(site.widths for site in family.sites(model))
    same = family is family_of(own) and after is not None and widths == after.dense
    if same and kept:  # it was trained first
        family.set_classes(model, family.classes(own))
        try:
            model.load_state_dict(load_dense(run))
        except RuntimeError:  # names or shapes of tensors
            same = False
    elif same:
        record = json.loads(report.read_text()) if report.is_file() else {}
        found = {"backbone_digest": backbone_tensors(model), "dense_digest": model.state_dict()}
        same = any(record.get(name) == digest_tensors(tensors) for name, tensors in found.items())
    if same:
        return
    if config.trained or kept:
        raise InputError(
            f"the dense model that {run} names is not the one that was pruned: it came from Python or changed"
        )
    raise InputError(f"the dense model of {run} was not kept: its weights were random, or it came from Python")
