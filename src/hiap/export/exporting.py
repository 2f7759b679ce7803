"""`export_model`: write a model for another runtime, run what was written, compare, and only then keep it."""

from __future__ import annotations

import copy
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiap.atomic import scratch_beside
from hiap.errors import ExportError, InputError
from hiap.export.formats import PRECISIONS_OUT, SUFFIXES, ExportFormat, Opened, find_format, format_of
from hiap.export.network import Deployable, description, traced
from hiap.models.family import logits_of
from hiap.models.registry import family_of
from hiap.speed.clock import DTYPES, device_name, timings

__all__ = ["ALLOWED", "export_model", "publish"]

# Largest difference from the logits of PyTorch in float32, relative to the largest of them
ALLOWED = {"fp32": 1e-4, "fp16": 2e-2}
BATCHES = (1, 2, 7)  # that a file for any number of images is tried with


def export_model(
    model: nn.Module,
    out: str | os.PathLike[str],
    form: str | None = None,
    precision: str = "fp32",
    batch: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Write a dense or compact model as a file for another runtime, with a report beside it (OUT.json).

    The file takes normalised float32 images of one size and gives float32 logits. It is run in its own runtime and
    compared with the model before it appears, and carries the preprocessing and the class names.

    Args:
        form: "onnx", "openvino" or "pt2"; by default what the suffix of `out` says.
        precision: "fp32" or "fp16", of weights and of what is computed between images and logits.
        batch: images at a time; by default any number.
        overwrite: replace files that are there.
        say: is told of progress.

    Returns:
        The report: preprocessing, the largest difference, bytes, and ms of this runtime and of PyTorch.

    Raises:
        InputError: a setting is unknown, a package is missing, or the file cannot be written there.
        ExportError: the model cannot be exported, or the file computes something else. Nothing is written.
    """
    target = Path(out)
    kind = _check(target, form, precision, batch, overwrite)
    about = description(model, kind.name, precision, batch)
    dtype = DTYPES[precision] if kind.casts else torch.float32
    say(f"tracing the network for {'any batch' if batch is None else f'a batch of {batch}'}")
    network = Deployable(model, dtype)
    program = traced(network, network.shape, batch)
    with scratch_beside(target) as folder:
        made = folder / target.name
        say(f"writing {kind.name}")
        kind.write(program, made, json.dumps(about), precision)
        say(f"comparing {kind.runtime} with PyTorch")
        opened = kind.open(made, torch.get_num_threads())
        report = about | _compared(model, opened, batch, precision)
        report |= {"bytes": sum(file.stat().st_size for file in folder.iterdir())}
        report |= _timed(network if dtype == torch.float32 else Deployable(model), opened, kind, batch or 1)
        del opened  # which may hold the files
        companions = sorted(file for file in folder.iterdir() if file != made)
        own = Path(f"{made}.json")
        own.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unused = [file for file in kind.files(target) if not (folder / file.name).exists()]
        publish(made, companions, own, target)
        for file in unused:  # of the model that was replaced
            file.unlink(missing_ok=True)
    return report


def _check(target: Path, form: str | None, precision: str, batch: int | None, overwrite: bool) -> ExportFormat:
    """The format of a file that can be written there."""
    if target.is_dir():
        raise InputError(f"{target} cannot be written: it is a folder")
    kind = format_of(target) if form is None else find_format(form)
    if kind is None:
        raise InputError(f"{target} does not say its format: name it {', '.join(f'FILE{one}' for one in SUFFIXES)}")
    if target.suffix != kind.suffix:
        raise InputError(f"a file of {kind.name} ends in {kind.suffix}; found {target}")
    if precision not in PRECISIONS_OUT:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS_OUT)}; found {precision!r}")
    if batch is not None and batch < 1:
        raise InputError(f"batch must be at least 1; found {batch}")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target} cannot be written: there is no folder {target.absolute().parent}")
    taken = [file for file in (*kind.files(target), Path(f"{target}.json")) if file.exists()]
    if taken and not overwrite:
        raise InputError(f"{taken[0]} exists already: name another file, or pass --overwrite to replace it")
    kind.check()
    return kind


@torch.no_grad()
def _compared(model: nn.Module, opened: Opened, batch: int | None, precision: str) -> dict[str, Any]:
    """The differences of a file from the model, by batch size.

    Raises:
        ExportError: one is too large.
    """
    reference = copy.deepcopy(model).cpu().float().eval()
    allowed, shape = ALLOWED[precision], family_of(model).input_shape(model)
    found = {}
    for count in (batch,) if batch else BATCHES:
        images = torch.randn(count, *shape, generator=torch.Generator().manual_seed(count))
        expected = logits_of(reference(images))
        difference = _difference(expected, torch.from_numpy(opened.run(images.numpy())))
        if not difference <= allowed:
            raise ExportError(
                f"the file computes something else: with {count} images its logits differ by {difference:.3g} of the "
                f"largest, allowed {allowed:g} in {precision}. Nothing was written"
            )
        found[str(count)] = difference
    return {"difference": found, "tolerance": allowed}


def _difference(expected: Tensor, found: Tensor) -> float:
    if expected.shape != found.shape:
        raise ExportError(f"the file gives logits of shape {tuple(found.shape)}, the model {tuple(expected.shape)}")
    return float((expected - found).abs().max() / expected.abs().max().clamp(min=torch.finfo(expected.dtype).tiny))


def _timed(network: Deployable, opened: Opened, kind: ExportFormat, batch: int) -> dict[str, Any]:
    """Milliseconds of the file and of the same network in PyTorch, in turns on the CPU."""
    cpu = torch.device("cpu")
    images = torch.randn(batch, *network.shape)
    array = images.numpy()
    with torch.inference_mode():
        times = timings([lambda: opened.run(array), lambda: network(images)], cpu, 2, 10)
    own, torchs = (statistics.median(rounds) for rounds in times)
    return {"timed_batch": batch, "ms": {kind.runtime: own, "torch": torchs}, "device": device_name(cpu)}


def publish(made: Path, companions: list[Path], report: Path, target: Path) -> None:
    """Move finished files to their places. A kill in between never leaves a file beside parts of another one."""
    Path(f"{target}.json").unlink(missing_ok=True)
    if companions:
        target.unlink(missing_ok=True)
    for file in (*companions, made, report):
        file.replace(target.parent / file.name)
