"""Compact models on disk: `model.safetensors` and `config.json`, no pickle, no code (docs/format.md).

A folder appears whole or not at all. The weights carry a digest of the configuration, so an edited or exchanged file is
noticed before anything is built.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import safetensors.torch
import timm
import torch
from safetensors import SafetensorError, safe_open
from timm.models import register_model

from hiap.attach import is_gated
from hiap.compact import Widths
from hiap.cost import macs, macs_of_widths
from hiap.errors import CheckpointError
from hiap.extract import Provenance, probe, shrink
from hiap.families import timm as family
from hiap.families.timm import ViT
from hiap.topology import Topology

__all__ = ["load", "save"]

FORMAT = 1
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
DIGEST = "hiap_config_sha256"
EDITABLE = ("class_names", "pretrained_cfg")  # outside the digest: they describe the use, not the network
REQUIRED = ("skeleton", "blocks", "dense", "topology", "round_to", "macs", "logit_difference", "tolerance")

Folder = str | os.PathLike[str]


def save(compact: ViT, folder: Folder, class_names: Sequence[str] | None = None) -> None:
    """Write a compact model to a folder, replacing a compact model that is there.

    Args:
        class_names: in the order of the logits; by default those the model was loaded with or timm knows.

    Raises:
        CheckpointError: the model is not a compact one or cannot be rebuilt, or the folder holds something else.
            Nothing has been written.
    """
    target = Path(folder).resolve()
    check_target(target)
    if is_gated(compact) or not isinstance(getattr(compact, "hiap", None), Provenance):
        raise CheckpointError("only a compact model can be saved; make one with hiap.extract")
    config = _describe(compact, class_names)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in compact.state_dict().items()}
    _check_rebuild(compact, config, state)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target.parent} cannot be made a folder: {error}") from error
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as scratch:
        new, old = Path(scratch, "new"), Path(scratch, "old")
        new.mkdir()
        metadata = {"format": "pt", DIGEST: _digest(config)}
        safetensors.torch.save_file(state, new / WEIGHTS, metadata)
        (new / CONFIG).write_text(json.dumps(config, indent=1) + "\n")
        if target.exists():
            target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            if old.exists():
                old.rename(target)
            raise


def load(folder: Folder, device: torch.device | str = "cpu") -> ViT:
    """Read a compact model, in eval mode and the dtype it was saved in.

    Raises:
        CheckpointError: the folder is missing, damaged, edited, of an unknown format, or not a compact model.
    """
    path = Path(folder)
    config = _read_config(path)
    state = _read_weights(path, config, str(torch.device(device)))
    try:
        model = _build(config)
        model.load_state_dict(state, strict=True, assign=True)
        topology = Topology.from_json(config["topology"])
        dense = tuple(Widths(**widths) for widths in config["dense"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {CONFIG} does not describe the weights in {WEIGHTS}: {error}") from error
    model.hiap = Provenance(topology, dense, config["round_to"], config["logit_difference"], config["tolerance"])
    if config.get("class_names"):
        model.class_names = list(config["class_names"])
    if config.get("pretrained_cfg"):
        cfg = {k: tuple(v) if isinstance(v, list) else v for k, v in config["pretrained_cfg"].items()}
        model.pretrained_cfg = model.default_cfg = cfg
    return model.eval()


def _describe(model: ViT, class_names: Sequence[str] | None) -> dict[str, Any]:
    provenance: Provenance = model.hiap
    cfg: Any = getattr(model, "pretrained_cfg", None)
    cfg = asdict(cfg) if is_dataclass(cfg) and not isinstance(cfg, type) else cfg
    # Where timm would fetch the dense weights from says nothing about this folder.
    cfg = {k: v for k, v in (cfg or {}).items() if k not in ("file", "source", "state_dict")}
    if class_names is not None and len(class_names) != model.num_classes:
        raise CheckpointError(f"{len(class_names)} class names for {model.num_classes} classes")
    names = class_names if class_names is not None else getattr(model, "class_names", None) or cfg.get("label_names")
    if names is not None and len(names) != model.num_classes:
        names = None  # those of an earlier classifier
    return {
        "format": FORMAT,
        "architecture": hiap_vit.__name__,
        "family": family.FAMILY,
        "versions": {"hiap": version("hiap"), "torch": str(torch.__version__), "timm": timm.__version__},
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "macs": macs(model),
        "dense_macs": macs_of_widths(model, provenance.dense),
        "params": sum(p.numel() for p in model.parameters()),
        "round_to": provenance.round_to,
        "logit_difference": provenance.logit_difference,
        "tolerance": provenance.tolerance,
        "class_names": [str(name) for name in names] if names is not None else None,
        "pretrained_cfg": cfg,
        "skeleton": family.describe(model),
        "blocks": [asdict(site.widths) for site in family.sites(model)],
        "dense": [asdict(widths) for widths in provenance.dense],
        "topology": provenance.topology.to_json(),
    }


def _build(config: dict[str, Any]) -> ViT:
    """The network of a configuration, on the meta device."""
    return shrink(family.build(config["skeleton"]), [Widths(**widths) for widths in config["blocks"]])


def _check_rebuild(model: ViT, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Refuse a model that the recipe does not rebuild, as one with a classifier of somebody's own."""
    like = next(model.parameters())
    try:
        rebuilt = _build(config)
        rebuilt.load_state_dict(state, strict=True, assign=True)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"the model was changed in a way the recipe cannot express: {error}") from error
    for has, gives in zip_longest(str(model).splitlines(), str(rebuilt).splitlines(), fillvalue=""):
        if has != gives:
            raise CheckpointError(
                "the model was changed in a way the recipe cannot express: "
                f"it has {has.strip()!r}, the recipe gives {gives.strip()!r}"
            )
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        raise CheckpointError("some weights are not finite: the run that trained them has diverged")
    outputs = zip(probe(model, like.dtype), probe(rebuilt.to(like.device), like.dtype), strict=True)
    if not all(torch.equal(a, b) for a, b in outputs):
        raise CheckpointError("the model rebuilt from its recipe has other outputs: some layer was changed")


def check_target(target: Path) -> None:
    """Refuse a folder that a model cannot be saved as."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target} is a file; name a folder")
    if target == Path.cwd() or target in Path.cwd().parents:
        raise CheckpointError(
            f"{target} is or holds the working folder and cannot be replaced; name a folder inside it"
        )
    if target.is_dir():
        foreign = sorted(entry.name for entry in target.iterdir() if entry.name not in (CONFIG, WEIGHTS))
        if foreign:
            raise CheckpointError(
                f"{target} holds {foreign[0]!r}, which saving would remove; name an empty folder or one that holds "
                f"only {CONFIG} and {WEIGHTS}"
            )
        if any(target.iterdir()):
            _read_config(target)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder")
    file = path / CONFIG
    if not file.is_file():
        raise CheckpointError(f"{path} has no {CONFIG}: it is not a compact model")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON ({error}); it was edited or cut short") from error
    if not isinstance(config, dict) or config.get("architecture") != hiap_vit.__name__:
        raise CheckpointError(
            f"{file} is not a compact model's (no architecture {hiap_vit.__name__!r}): another project's?"
        )
    if config.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {config.get('format')!r}; this version reads {FORMAT}. Update hiap to read a newer one"
        )
    if config.get("family") != family.FAMILY:
        raise CheckpointError(f"{file} names the family {config.get('family')!r}; this version knows {family.FAMILY!r}")
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)}; it was edited")
    names, cfg = config.get("class_names"), config.get("pretrained_cfg")
    if names is not None and (not isinstance(names, list) or len(names) != config.get("num_classes")):
        raise CheckpointError(f"{file}: class_names must be a list of {config.get('num_classes')} names, or null")
    if cfg is not None and not isinstance(cfg, dict):
        raise CheckpointError(f"{file}: pretrained_cfg must be an object")
    return config


def _read_weights(path: Path, config: dict[str, Any], device: str) -> dict[str, torch.Tensor]:
    file = path / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}")
    try:
        with safe_open(file, "pt", device=device) as weights:
            digest = (weights.metadata() or {}).get(DIGEST)
            if digest is None:
                raise CheckpointError(f"{file} was not written by hiap.save: it has no digest of its {CONFIG}")
            if digest != _digest(config):
                raise CheckpointError(f"{path / CONFIG} was edited, or belongs to other weights than {WEIGHTS}")
            return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error})") from error


def _digest(config: dict[str, Any]) -> str:
    bound = {key: value for key, value in config.items() if key not in EDITABLE}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()


@register_model  # type: ignore[untyped-decorator]
def hiap_vit(
    pretrained: bool = False,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: Any = None,
    cache_dir: Any = None,
    num_classes: int | None = None,
    img_size: int | tuple[int, int] | None = None,
    **unknown: Any,
) -> ViT:
    """timm's entry point, for `timm.create_model("local-dir:FOLDER")`; the weights are always loaded."""
    folder = (pretrained_cfg or {}).get("file") if isinstance(pretrained_cfg, dict) else None
    if folder is None:
        raise ValueError("hiap_vit describes a saved model: create it with timm.create_model('local-dir:FOLDER')")
    if unknown:
        raise ValueError(f"hiap_vit takes num_classes and img_size; found {', '.join(sorted(unknown))}")
    model = load(folder)
    if num_classes is not None and num_classes != model.num_classes:
        model.reset_classifier(num_classes)
    if img_size is not None:
        model.set_input_size(img_size)
    return model.train()
