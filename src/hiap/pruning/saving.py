"""Compact models on disk: `model.safetensors` and `config.json`, no pickle, no code (docs/format.md).

A folder appears whole or not at all. The weights carry a digest of the configuration and one of themselves, so an
edited, damaged or exchanged file is noticed, and the same model always gives the same bytes.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from hiap.atomic import SET_ASIDE, replace_folder, scratch_beside
from hiap.errors import CheckpointError
from hiap.models.family import Family
from hiap.models.registry import family_named, family_of
from hiap.models.transformers_configs import is_pruned
from hiap.pruning.attach import detach, is_gated
from hiap.pruning.count import macs, macs_of_widths
from hiap.pruning.digest import digest_tensors
from hiap.pruning.extract import note_provenance, probe, provenance_of, shrink
from hiap.pruning.hub import local_folder
from hiap.pruning.merging import Merged, check_mergeable, unmerged
from hiap.pruning.rebuilding import MALFORMED, narrow, read_provenance, usage_key, with_fresh_tables

__all__ = ["check_savable", "check_target", "is_compact", "load", "save"]

FORMAT = 1
ARCHITECTURE = "hiap_vit"  # that timm finds the model by
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")  # a user may put them there
DIGEST = "hiap_config_sha256"
TENSORS_DIGEST = "hiap_tensors_sha256"
EDITABLE = ("class_names", "pretrained_cfg", "preprocessing")  # outside the digest: how the network is used
REQUIRED = ("skeleton", "blocks", "dense", "topology", "round_to", "macs", "logit_difference", "tolerance")

Folder = str | os.PathLike[str]


def save(compact: nn.Module, folder: Folder, class_names: Sequence[str] | None = None) -> None:
    """Write a compact model to a folder, replacing a compact model that is there.

    The weights of one that merges tokens (`merge_tokens`) are those of the model inside it, and `config.json` says how
    many tokens each block merges. `load` merges again; timm and Transformers read the same folder, and do not merge.

    Args:
        class_names: in the order of the logits; by default those the model was loaded with or timm knows, if they are
            as many as the classes. After a new classifier of as many other classes, pass the new names.

    Raises:
        CheckpointError: the model is not a compact one or cannot be rebuilt, the folder holds something else, or the
            files cannot be written. What was in the folder is still there.
    """
    target = Path(folder).resolve()
    check_target(target)
    if is_gated(compact) or provenance_of(compact) is None:
        mend = "make one with hiap.extract"
        if is_pruned(getattr(compact, "config", None)):  # texts and images, with a pruned tower
            mend = "save this one with model.save_pretrained, or its tower (model.vision_model) with hiap.save"
        raise CheckpointError(f"only a compact model can be saved; {mend}")
    config, compact = _describe(compact, class_names), unmerged(compact)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in compact.state_dict().items()}
    _check_rebuild(compact, config, state)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{target.parent} cannot be created as a folder: {error}") from error
    try:
        _write(target, config, state)
    except (OSError, SafetensorError) as error:
        left = "the model that was there is unchanged" if target.exists() else "nothing was written"
        raise CheckpointError(f"{target} cannot be written: {error}; {left}") from error


def _write(target: Path, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    with scratch_beside(target) as scratch:
        new, old = scratch / "new", scratch / SET_ASIDE / target.name
        new.mkdir()
        old.parent.mkdir()
        metadata = {"format": "pt", DIGEST: _digest(config), TENSORS_DIGEST: digest_tensors(state)}
        safetensors.torch.save_file(state, new / WEIGHTS, metadata)
        _sort_metadata(new / WEIGHTS)
        for name, content in {CONFIG: _in_bytes(config), **_beside(target, config)}.items():
            (new / name).write_text(content.decode(), encoding="utf-8")
        shutil.copymode(new / CONFIG, new / WEIGHTS)  # safetensors shuts everybody else out
        replace_folder(target, new, old)


def _in_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def _beside(target: Path, config: dict[str, Any]) -> dict[str, bytes]:
    """Files for other programs: those of the family, and a processor that the user has put into the folder."""
    family = family_named(config["family"])
    files = {name: _in_bytes(value) for name, value in family.saved_files(config).items()}
    old = _read_config(target) if (target / CONFIG).is_file() else None
    made = {} if old is None else family_named(old["family"]).saved_files(old)
    for name in PROCESSORS:
        if (target / name).is_file():
            there = (target / name).read_bytes()
            if name not in made or there != _in_bytes(made[name]):
                files[name] = there
    return files


def _sort_metadata(file: Path) -> None:
    """Put the metadata of a safetensors file, which come in any order, in one order; the header keeps its length."""
    with file.open("r+b") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        stream.seek(8)
        stream.write(json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size))


def check_savable(model: nn.Module) -> None:
    """Tell before any training whether what is extracted from a model can be saved.

    Args:
        model: dense, gated or compact; it may be on the meta device.

    Raises:
        CheckpointError: with the part of the model that no recipe expresses.
        UnsupportedModelError: the model cannot be pruned at all.
    """
    family, provenance = family_of(model), provenance_of(model)
    recipe = _as_json("the recipe", family.describe(model, provenance.recipe if provenance is not None else None))
    widths = [site.widths for site in family.sites(model)]
    weightless = {
        id(tensor): nn.Parameter(torch.empty_like(tensor, device="meta"), tensor.requires_grad)
        for tensor in model.parameters()
    }
    whole = shrink(detach(copy.deepcopy(model, weightless)), widths)
    _compare(whole, shrink(family.build(recipe), widths))
    _usage(family, model)


def load(folder: Folder, device: torch.device | str = "cpu") -> nn.Module:
    """Read a compact model, in eval mode and the dtype it was saved in. On the Hugging Face hub: hf://USER/NAME.

    Raises:
        CheckpointError: the folder is missing, damaged, edited, of an unknown format, or not a compact model.
        ConfigError: it is a model of Transformers, which is not installed or too old.
    """
    path, device = local_folder(folder), torch.device(device)
    config = _read_config(path)
    state = _read_weights(path, config)
    try:
        model = _build(config)
        model.load_state_dict(state, strict=True, assign=True)
        _cast_buffers(model)
        note_provenance(model, read_provenance(config))
        if merging := config.get("merge_tokens"):
            check_mergeable(model)
    except MALFORMED as error:
        raise CheckpointError(f"{path}: {CONFIG} does not describe the weights in {WEIGHTS}: {error}") from error
    if config.get("class_names"):
        model.class_names = list(config["class_names"])  # type: ignore[assignment]
    if config.get(usage_key(config)):
        family_of(model).set_usage(model, config[usage_key(config)])
    return (Merged(model, merging) if merging else model).to(device).eval()


def _cast_buffers(model: nn.Module) -> None:
    """Give what is in no file, such as tables of positions, the dtype of the weights, if they all have the same."""
    dtypes = {p.dtype for p in model.parameters()}
    if len(dtypes) == 1 and family_of(model).casts_buffers:
        model.to(dtypes.pop())


def _usage(family: Family, model: nn.Module) -> dict[str, Any]:
    """How the model is used, as JSON values."""
    usage = family.usage(model)
    family.check_usage("model.pretrained_cfg", _as_json("model.pretrained_cfg", usage))
    return usage


def _as_json(what: str, value: dict[str, Any]) -> dict[str, Any]:
    """A value as it comes back from a JSON file."""
    try:
        return dict(json.loads(json.dumps(value)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{what} cannot be written as JSON: {error}") from error


def _describe(model: nn.Module, class_names: Sequence[str] | None) -> dict[str, Any]:
    whole, model = model, unmerged(model)
    family, provenance, merging = family_of(model), provenance_of(model), family_of(whole).merging(whole)
    assert provenance is not None
    usage, classes = _usage(family, model), family.classes(model)
    if class_names is not None and len(class_names) != classes:
        raise CheckpointError(f"{len(class_names)} class names for {classes} classes")
    names: Any = class_names
    if names is None:
        names = getattr(model, "class_names", None) or usage.get("label_names")
    if names is not None and len(names) != classes:
        names = None  # those of an earlier classifier
    if names is None:
        usage.pop("label_names", None)
    return {
        "format": FORMAT,
        "architecture": ARCHITECTURE,
        "family": family.name,
        "versions": {"hiap": version("hiap"), "torch": str(torch.__version__), **family.versions()},
        "num_classes": classes,
        **family.saved_fields(model),
        "macs": macs(whole),
        **({"merge_tokens": merging[0]} if merging and merging[0] else {}),
        "dense_macs": macs_of_widths(model, provenance.dense),
        "params": sum(p.numel() for p in model.parameters()),
        "round_to": provenance.round_to,
        "logit_difference": provenance.logit_difference,
        "tolerance": provenance.tolerance,
        "class_names": [str(name) for name in names] if names is not None else None,
        family.usage_key: usage,
        "skeleton": _as_json("the recipe", family.describe(model, provenance.recipe)),
        "blocks": [asdict(site.widths) for site in family.sites(model)],
        "dense": [asdict(widths) for widths in provenance.dense],
        "topology": provenance.topology.to_json(),
    }


def _build(config: dict[str, Any]) -> nn.Module:
    """The network of a configuration, on the meta device."""
    return narrow(family_named(config["family"]).build(config["skeleton"]), config)


def _compare(model: nn.Module, rebuilt: nn.Module) -> None:
    """Raise a CheckpointError at the first module of a compact model that its recipe does not give."""
    has, gives = dict(model.named_modules()), dict(rebuilt.named_modules())
    for name in [*has, *gives]:
        one, other = _in_words(has.get(name)), _in_words(gives.get(name))
        if one != other:
            raise CheckpointError(f"{CHANGED}: {name or 'the model'} is {one}, the recipe gives {other}")
    shapes = [{name: tuple(tensor.shape) for name, tensor in one.state_dict().items()} for one in (model, rebuilt)]
    for name in [*shapes[0], *shapes[1]]:
        if shapes[0].get(name) != shapes[1].get(name):
            has_shape, gives_shape = (shape.get(name, "none") for shape in shapes)
            raise CheckpointError(f"{CHANGED}: {name} has the shape {has_shape}, the recipe gives {gives_shape}")


CHANGED = "the model has a part the recipe cannot express"


def _in_words(module: nn.Module | None) -> str:
    """A module without its children. Equal numbers read alike, be they integers or floats."""
    if module is None:
        return "missing"
    words = module.extra_repr()
    if "eps" not in words and hasattr(module, "eps"):
        words += f"eps={module.eps}"
    words = re.sub(r"(?<![\w.])\d+(\.\d+)?(e[-+]?\d+)?(?![\w.])", lambda n: repr(float(n[0])).removesuffix(".0"), words)
    return f"{type(module).__name__}({words})"


def _check_rebuild(model: nn.Module, config: dict[str, Any], state: dict[str, torch.Tensor]) -> None:
    """Refuse a model that the recipe does not rebuild, as one with a classifier of somebody's own."""
    like = next(model.parameters())
    rebuilt = _build(config)
    _compare(model, rebuilt)
    try:
        rebuilt.load_state_dict(state, strict=True, assign=True)
        _cast_buffers(rebuilt)
    except (RuntimeError, ValueError) as error:
        raise CheckpointError(f"{CHANGED}: {error}") from error
    if not all(bool(tensor.isfinite().all()) for tensor in state.values()):
        raise CheckpointError("some weights are not finite: the run that trained them has diverged")
    own = with_fresh_tables(copy.deepcopy(model), rebuilt)
    pair = (one.to(like.device, like.dtype) for one in (own, rebuilt))  # tables of positions as well
    outputs = zip(*(probe(one, like.dtype) for one in pair), strict=True)
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
        inside = sorted(entry.name for entry in target.iterdir() if entry.name not in PROCESSORS)
        foreign = [name for name in inside if name not in (CONFIG, WEIGHTS)]
        if foreign:
            raise CheckpointError(
                f"{target} holds {foreign[0]!r}, which saving would remove; name an empty folder or one that holds "
                f"only {CONFIG} and {WEIGHTS}"
            )
        if inside:
            _read_config(target)


def is_compact(folder: Path) -> bool:
    """Whether a folder holds what `save` has written, be it of another version, or damaged."""
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and config.get("architecture") == ARCHITECTURE


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
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    if isinstance(config, dict) and str(config.get("model_type")).startswith("hiap_") and "format" not in config:
        raise CheckpointError(
            f"{path} was written by save_pretrained: load it with from_pretrained of an auto class of Transformers"
        )
    if not isinstance(config, dict) or config.get("architecture") != ARCHITECTURE:
        raise CheckpointError(f"{file} is not a compact model's (no architecture {ARCHITECTURE!r}): another project's?")
    if config.get("format") != FORMAT:
        raise CheckpointError(
            f"{file} has format {config.get('format')!r}; this version reads {FORMAT}. Update hiap to read a newer one"
        )
    try:
        family_named(config.get("family"))
    except CheckpointError as error:
        raise CheckpointError(f"{file} {error}") from error
    missing = [key for key in REQUIRED if key not in config]
    if missing:
        raise CheckpointError(f"{file} lacks {', '.join(missing)}; it was edited")
    _check_values(file, config)
    return config


def _check_values(file: Path, config: dict[str, Any]) -> None:
    for name, least in (("round_to", 1), ("num_classes", 0), *([("merge_tokens", 1)] * ("merge_tokens" in config))):
        if type(config.get(name)) is not int or config[name] < least:
            raise CheckpointError(f"{file}: {name} must be a count; found {str(config.get(name))[:40]!r}")
    for name in ("logit_difference", "tolerance"):
        if type(config[name]) not in (int, float):
            raise CheckpointError(f"{file}: {name} must be a number; found {str(config[name])[:40]!r}")
    names, key = config.get("class_names"), usage_key(config)
    usage = config.get(key)
    if names is not None and not (_is_list(names, str) and len(names) == config["num_classes"]):
        raise CheckpointError(f"{file}: class_names must be a list of {config['num_classes']} names, or null")
    if usage is not None and not isinstance(usage, dict):
        raise CheckpointError(f"{file}: {key} must be an object")
    family_named(config["family"]).check_usage(f"{file}: {key}", usage or {})


def _is_list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(one) in kinds for one in value)


def _read_weights(path: Path, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    file = path / WEIGHTS
    if not file.is_file():
        raise CheckpointError(f"{path} has no {WEIGHTS}")
    try:
        with safe_open(file, "pt") as weights:
            metadata = weights.metadata() or {}
            if DIGEST not in metadata:
                raise CheckpointError(f"{file} was not written by hiap.save: it has no digest of its {CONFIG}")
            if metadata[DIGEST] != _digest(config):
                raise CheckpointError(f"{path / CONFIG} was edited, or belongs to other weights than {WEIGHTS}")
            state = {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is damaged or cut short ({error})") from error
    # Folders of earlier versions have no digest of their tensors.
    if TENSORS_DIGEST in metadata and metadata[TENSORS_DIGEST] != digest_tensors(state):
        raise CheckpointError(f"{file} is damaged: its tensors are not those that were saved")
    return state


def _digest(config: dict[str, Any]) -> str:
    bound = {key: value for key, value in config.items() if key not in EDITABLE}
    return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()
