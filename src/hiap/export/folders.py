"""Folders for other libraries: Transformers reads all pruned models of its own, timm those its constructor can make."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hiap.atomic import replace_folder, scratch_beside
from hiap.errors import ExportError, InputError
from hiap.export.checking import compared
from hiap.export.formats import Opened
from hiap.export.network import description
from hiap.models.family import logits_of
from hiap.models.registry import family_of
from hiap.pruning.saving import is_compact
from hiap.speed.clock import DTYPES

__all__ = ["check_folder", "export_folder"]

OURS = {"config.json", "model.safetensors", "preprocessor_config.json"}  # that a folder may hold
INSTEAD = "Load the folder of hiap.save by timm.create_model('local-dir:FOLDER') after `import hiap`, or export to onnx"


def check_folder(
    model: nn.Module, target: Path, form: str, batch: int | None, quantized: bool, overwrite: bool
) -> None:
    """Raise an InputError if a model cannot be written there as a folder of this kind."""
    if batch is not None or quantized:
        raise InputError(f"{form} is a folder of weights: it takes any batch, and has no INT8. Leave these options out")
    if target.is_file():
        raise InputError(f"{target} is a file; {form} is written as a folder")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target} cannot be written: there is no folder {target.absolute().parent}")
    foreign = sorted(file.name for file in target.iterdir() if file.name not in OURS) if target.is_dir() else []
    if foreign:
        raise InputError(f"{target} holds {foreign[0]!r}, which would be lost: name another folder")
    if is_compact(target):
        raise InputError(f"{target} is a compact model of HiAP, which would be lost: name another folder")
    taken = [path for path in (target, Path(f"{target}.json")) if path.exists()]
    if taken and not overwrite:
        raise InputError(f"{taken[0]} exists already: name another folder, or pass --overwrite to replace it")
    if form == "timm":
        _plain_arguments(model)
    elif family_of(model).name != "transformers":
        raise InputError(f"{form} is for models of Transformers; found a {type(model).__name__}. {INSTEAD}")


def export_folder(
    model: nn.Module, target: Path, form: str, precision: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write a model as a folder, read it with the other library, compare, and only then put it in its place.

    Raises:
        ExportError: what the library reads computes something else. Nothing is written.
    """
    report = description(model, form, precision, None)
    write, read = (_write_timm, _read_timm) if form == "timm" else (_write_transformers, _read_transformers)
    with scratch_beside(target) as scratch:
        made, old = scratch / "new", scratch / "old"
        say(f"writing {form}")
        write(copy.deepcopy(model).cpu().eval().to(DTYPES[precision]), made, report)
        say(f"comparing what {form} reads")
        network = read(made, model).eval().float()
        with torch.inference_mode():
            found = Opened(lambda images: logits_of(network(torch.from_numpy(images))).numpy(), None)
            report |= compared(model, found, None, precision)
        report["bytes"] = sum(file.stat().st_size for file in made.iterdir())
        own = scratch / "report.json"
        own.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        replace_folder(target, made, old)
        own.replace(f"{target}.json")
    return report


def _write_transformers(model: nn.Module, folder: Path, about: dict[str, Any]) -> None:
    family = family_of(model)
    model.save_pretrained(folder)  # type: ignore[operator]
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name, content in family.saved_files(config | {family.usage_key: family.usage(model)}).items():
        (folder / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _read_transformers(folder: Path, like: nn.Module) -> nn.Module:
    import transformers

    from hiap.models.transformers_parts import HEADS

    auto = "AutoModelForImageClassification" if any(hasattr(like, head) for head in HEADS) else "AutoModel"
    found: nn.Module = getattr(transformers, auto).from_pretrained(folder)
    return found


def _plain_arguments(model: nn.Module) -> tuple[str, dict[str, Any], list[int]]:
    """timm's name and arguments of a model, and its blocks that are left.

    Raises:
        InputError: the constructor of timm cannot make it.
    """
    import timm

    family = family_of(model)
    usage = family.usage(model)
    name = str(usage.get("architecture"))
    if family.name != "timm" or not timm.is_model(name):
        raise InputError(f"timm is for models that timm knows by name; found a {type(model).__name__}. {INSTEAD}")
    sites = family.sites(model)
    left = [i for i, site in enumerate(sites) if (site.widths.heads, site.widths.neurons) != (None, None)]
    arguments = dict(family.describe(model, None)["arguments"])
    widths = [sites[i].widths for i in left]
    dim, heads = arguments["embed_dim"], arguments["num_heads"]
    for i, own in zip(left, widths, strict=True):
        if (own.heads, own.qk_dim, own.value_dim) != (heads, dim // heads, dim // heads) or not own.neurons:
            raise InputError(
                f"timm cannot make block {i} ({own}): it has whole branches of {heads} heads only. {INSTEAD}"
            )
        if own.neurons != widths[0].neurons:
            raise InputError(
                f"timm cannot make blocks of different widths: block {left[0]} has {widths[0].neurons} neurons, "
                f"block {i} {own.neurons}. {INSTEAD}"
            )
    if not left:
        raise InputError(f"timm cannot make a network without blocks. {INSTEAD}")
    layers = ("act_layer", "norm_layer", "norm_eps", "embed_norm", "embed_norm_layer", "embed_norm_eps", "mlp_layer")
    plain = {key: value for key, value in arguments.items() if key not in layers}  # those come with the name
    plain |= {"depth": len(left), "mlp_ratio": (int(widths[0].neurons or 0) + 0.5) / dim}
    return name, plain, left


def _write_timm(model: nn.Module, folder: Path, about: dict[str, Any]) -> None:
    import timm
    from timm.models import save_for_hf

    name, arguments, left = _plain_arguments(model)
    try:
        network = timm.create_model(name, pretrained=False, **arguments).to(next(model.parameters()).dtype)
        state = {}
        for key, tensor in model.state_dict().items():
            parts = key.split(".")
            if parts[0] == "blocks":
                if int(parts[1]) not in left:
                    continue
                parts[1] = str(left.index(int(parts[1])))
            state[".".join(parts)] = tensor
        network.load_state_dict(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"timm's {name} cannot hold this model: {error}. {INSTEAD}") from error
    usage = {key: value for key, value in family_of(model).usage(model).items() if key not in ("url", "hf_hub_id")}
    network.pretrained_cfg = {**usage, "custom_load": False, "num_classes": about["classes"]}
    more = {"label_names": about["class_names"]} if about["class_names"] else {}
    save_for_hf(network, str(folder), model_config=more, model_args=arguments, safe_serialization=True)


def _read_timm(folder: Path, like: nn.Module) -> nn.Module:
    import timm

    found: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return found
