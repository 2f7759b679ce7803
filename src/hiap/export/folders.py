"""Folders for other libraries: Transformers reads all pruned models of its own, timm those its constructor can make."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hiap.atomic import SET_ASIDE, replace_folder, scratch_beside
from hiap.errors import ExportError, InputError
from hiap.export.checking import compared
from hiap.export.formats import Opened
from hiap.export.network import description
from hiap.export.timm_folder import instead_of, plain_arguments, read_timm, write_timm
from hiap.models.family import logits_of
from hiap.models.registry import family_of
from hiap.pruning.saving import is_compact
from hiap.speed.clock import DTYPES

__all__ = ["check_folder", "export_folder"]

OURS = {"config.json", "model.safetensors", "preprocessor_config.json"}  # that a folder may hold


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
        plain_arguments(model)
    elif family_of(model).name != "transformers":
        found = f"{type(model).__name__} of {family_of(model).name.partition('_')[0]}"
        raise InputError(f"{form} is for models of Transformers; found a {found}. {instead_of(model)}")


def export_folder(
    model: nn.Module, target: Path, form: str, precision: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """Write a model as a folder, read it with the other library, compare, and only then put it in its place.

    Raises:
        ExportError: what the library reads computes something else. Nothing is written.
    """
    report = description(model, form, precision, None)
    write, read = (write_timm, read_timm) if form == "timm" else (_write_transformers, _read_transformers)
    with scratch_beside(target) as scratch:
        made, old = scratch / "new", scratch / SET_ASIDE / target.name
        old.parent.mkdir()
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
        Path(f"{target}.json").unlink(missing_ok=True)  # it is of the folder that is replaced
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

    from hiap.models.transformers_configs import is_pruned
    from hiap.models.transformers_parts import HEADS

    auto = "AutoModelForImageClassification" if any(hasattr(like, head) for head in HEADS) else "AutoModel"
    # Auto classes give pruned models back as what they were; dense ones are of a class that one asks for.
    reader: Any = getattr(transformers, auto) if is_pruned(getattr(like, "config", None)) else type(like)
    found: nn.Module
    found, report = reader.from_pretrained(folder, output_loading_info=True)
    if report["missing_keys"]:
        raise ExportError(
            f"Transformers adds {min(report['missing_keys'])!r} to a {type(like).__name__} that it reads, because its "
            "configuration cannot say that the model has none. Export it to onnx, or prune it first"
        )
    return found
