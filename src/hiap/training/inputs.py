"""What a run is given, and must be given again when it goes on: data, weights, files."""

from __future__ import annotations

import hashlib
import platform
import shlex
import sys
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from hiap.budget.latency import LatencyTable
from hiap.errors import RunError
from hiap.models.registry import family_of
from hiap.pruning.count import geometry
from hiap.pruning.digest import digest_tensors
from hiap.speed.clock import device_name
from hiap.training.context import Context
from hiap.training.run_folder import checkpoints

__all__ = [
    "FORMAT",
    "TABLE",
    "backbone_tensors",
    "check_inputs",
    "course",
    "environment",
    "inputs_record",
    "kept_table",
]

FORMAT = 2  # of the state of a run
TABLE = "latency.json"  # in the folder of a run
FILES = ("teacher_weights", "cost")  # that must not change between two parts of a run


def inputs_record(context: Context) -> dict[str, Any]:
    """What is reported of the inputs of a run."""
    parts = context.parts
    record: dict[str, Any] = {
        "dense_macs": parts.dense_macs,
        "dense_params": sum(p.numel() for p in parts.model.parameters()),
        "lr": parts.lr,
        "objective": context.config.objective,
        "dense_widths": [asdict(site.widths) for site in parts.sites],
        "geometry": geometry(parts.model, context.config.merge_tokens),
        "steps_per_epoch": parts.per_epoch,
        "dense_epochs": parts.dense_epochs,
        "dense_digest": digest_tensors(parts.model.state_dict()),
        "backbone_digest": digest_tensors(backbone_tensors(parts.model)),
    }
    if parts.descent is not None and parts.descent.dense_top1 is not None:
        record["dense_top1"] = parts.descent.dense_top1
    if parts.start is not None:
        record["start_digest"] = digest_tensors(parts.start.state_dict())
    if parts.table is not None:
        record["table_digest"] = hashlib.sha256(repr(parts.table).encode()).hexdigest()
    for name in FILES:
        if file := getattr(context.config, name):
            record[f"{name}_digest"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return record


def environment(context: Context) -> dict[str, Any]:
    """The command of a run, when it began, and what it runs on."""
    names = ("hiap", "torch", "timm", "accelerate", "transformers", "numpy")
    return {
        "command": shlex.join([Path(sys.argv[0]).name.replace("__main__.py", "hiap"), *sys.argv[1:]]),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "device": device_name(context.device),
        "processes": context.world,
        "system": platform.platform(terse=True),
        "python": platform.python_version(),
        "versions": {name: found for name in names if (found := _version(name)) is not None},
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def backbone_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model outside its classifier, which may be a new, random one in every run."""
    layers = family_of(model).classifier(model)
    heads = tuple(f"{name}." for name, module in model.named_modules() if any(module is layer for layer in layers))
    return {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(heads)}


def kept_table(out: Path) -> LatencyTable | None:
    """The latencies that the run in a folder has measured at its start, if it has."""
    file = out / TABLE
    return LatencyTable.load(file) if file.exists() and checkpoints(out) else None


def course(context: Context) -> dict[str, Any]:
    """What the steps of a run depend on besides its configuration: it must be the same when it goes on."""
    parts, names = context.parts, ("dense_epochs", "per_epoch", "lr", "dense_lr")
    data = {"training images": parts.data.train_size, "classes": parts.data.classes}
    return {**data, "batch_size": context.config.batch_size, **{name: getattr(parts, name) for name in names}}


def check_inputs(context: Context, out: Path, given: Sequence[str], state: dict[str, Any]) -> None:
    """Refuse to go on with other data, another model or other files than the run began with.

    Args:
        given: what came from Python instead of the configuration.
        state: of the checkpoint.

    Raises:
        RunError: naming what has changed.
    """
    if "stage" in state and state.get("format") != FORMAT:
        raise RunError(
            f"{out} holds a run of another version of hiap: go on with that version, or begin again with another --out"
        )
    if state["processes"] != context.world:
        warnings.warn(
            f"the run began with {state['processes']} processes and continues with {context.world}: this works, but "
            "the result is not bit-identical to that of an uninterrupted run",
            stacklevel=2,
        )
    began, now = f"since the run in {out} began", course(context)
    if state["given"] != given:
        names = ", ".join(state["given"]) or "none of data, cost and model"
        raise RunError(f"{out} holds a run that was given {names} in Python: pass the same, resume=True")
    if changed := [name for name, value in now.items() if state["course"][name] != value]:
        found = "; ".join(f"{name} {now[name]} (was {state['course'][name]})" for name in changed)
        raise RunError(f"the data has changed {began}: {found}; put it back, or begin again with another --out")
    for name in FILES:
        if state["record"].get(f"{name}_digest") != context.record.get(f"{name}_digest"):
            raise RunError(f"{getattr(context.config, name)} has changed {began}; put the old one back")
    if state["record"].get("table_digest") != context.record.get("table_digest"):
        raise RunError(f"{out / TABLE}, which the run has measured, is missing or has changed {began}; put it back")
    if state["record"].get("start_digest") != context.record.get("start_digest"):
        raise RunError(f"the larger model that the run in {out} began with has changed {began}; put it back")
    if state["record"]["dense_digest"] != context.record["dense_digest"]:
        weights = context.config.weights
        what = weights if "model" not in given and weights else "the dense model"
        raise RunError(f"{what} has changed {began}; put the old weights back")
