"""`export_model`: write a model for another runtime, run what was written, compare, and only then keep it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiap.atomic import SET_ASIDE, put_back, scratch_beside
from hiap.errors import InputError
from hiap.export.checking import agreement, compared, timed
from hiap.export.folders import check_folder, export_folder
from hiap.export.formats import FOLDERS, PRECISIONS_OUT, QUANTIZATIONS, SUFFIXES, ExportFormat, find_format
from hiap.export.network import Deployable, description, traced
from hiap.models.registry import family_of
from hiap.speed.clock import DTYPES

__all__ = ["check_export", "export_model", "publish"]

CALIBRATED_AT_ONCE = 8  # images, where the file takes any number


def export_model(
    model: nn.Module,
    out: str | os.PathLike[str],
    form: str | None = None,
    precision: str = "fp32",
    batch: int | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] = lambda text: None,
    quantize: str | None = None,
    calibration: Tensor | None = None,
) -> dict[str, Any]:
    """Write a dense or compact model as a file for another runtime, with a report beside it (OUT.json).

    The file takes normalised float32 images of one size and gives float32 logits. It is run in its own runtime and
    compared with the model before it appears, and carries the preprocessing and the class names.

    Args:
        form: "onnx", "openvino", "pt2" or "aoti" (compiled ahead of time); by default what the suffix of `out` says.
            "transformers" and "timm" write a folder that these libraries read.
        precision: "fp32" or "fp16", of weights and of what is computed between images and logits.
        batch: images at a time; by default any number.
        overwrite: replace existing files.
        say: is told of progress.
        quantize: "int8" stores the weights as INT8, and computes the products with them so. What that changes is
            measured and reported; there is no bound on it.
        calibration: a few hundred normalised images (N, C, H, W), to find the ranges of activations from. Without,
            they are found anew in every run, which is slower.

    Returns:
        The report: preprocessing, the largest difference, bytes, and ms of this runtime and of PyTorch.

    Raises:
        InputError: a setting is unknown, a package is missing, or the file cannot be written there.
        ExportError: the model cannot be exported, or the file computes something else. Nothing is written.
    """
    target = Path(out)
    kind = check_export(model, target, form, precision, batch, overwrite, quantize, calibration is not None)
    if kind is None:
        return export_folder(model, target, str(form), precision, say)
    _check_calibration(model, batch, calibration)
    about = description(model, kind.name, quantize or precision, batch)
    if quantize:
        images = 0 if calibration is None else len(calibration)
        about["quantization"] = {"method": "static" if images else "dynamic", "calibration_images": images}
    dtype = DTYPES[precision] if kind.casts else torch.float32
    say(f"tracing the network for {'any batch' if batch is None else f'a batch of {batch}'}")
    # INT8 is made from products without a bias: onnxruntime would round the bias of a Gemm too.
    network = Deployable(model, dtype, flat=kind.flat and quantize is None)
    program = traced(network, network.shape, batch)
    threads = torch.get_num_threads()
    with scratch_beside(target) as folder:
        made, plain = folder / target.name, folder / "fp32" / target.name
        say(f"writing {kind.name}")
        if quantize:
            plain.parent.mkdir()
            kind.write(program, plain, json.dumps(about), precision)
            say(f"quantising to {quantize}")
            array = None if calibration is None else calibration.float().cpu().numpy()
            at_once = batch or min(CALIBRATED_AT_ONCE, images or CALIBRATED_AT_ONCE)
            notes = kind.quantize(plain, made, json.dumps(about), array, at_once)
        else:
            kind.write(program, made, json.dumps(about), precision)
        say(f"comparing {kind.runtime} with PyTorch")
        files = {kind.runtime: kind.open(made, threads)}
        report = about | compared(model, files[kind.runtime], batch, quantize or precision)
        if quantize:
            report["quantization"] = {**report["quantization"], **notes}
            report["agreement"] = agreement(model, files[kind.runtime], calibration, batch)
            files[f"{kind.runtime} fp32"] = kind.open(plain, threads)
            report["bytes_fp32"] = _size(kind, plain)
        report["bytes"] = _size(kind, made)
        report |= timed(network if dtype == torch.float32 else Deployable(model), files, batch or 1)
        del files  # which may hold what is open
        companions = [file for file in kind.files(made)[1:] if file.exists()]
        own = Path(f"{made}.json")
        own.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        unused = [file for file in kind.files(target) if not (folder / file.name).exists()]
        publish(made, companions, own, target)
        for file in unused:  # of the model that was replaced
            file.unlink(missing_ok=True)
    return report


def check_export(
    model: nn.Module,
    target: Path,
    form: str | None,
    precision: str,
    batch: int | None,
    overwrite: bool,
    quantize: str | None,
    calibrated: bool,
) -> ExportFormat | None:
    """The format of a file that can be written there; None for a folder. Calibration images may be read afterwards.

    Raises:
        InputError: a setting is unknown, a package is missing, or the file cannot be written there.
    """
    if form in FOLDERS:
        _check_precision(precision)
        check_folder(model, target, str(form), batch, quantize is not None or calibrated, overwrite)
        return None
    kind = _check(target, form, precision, batch, overwrite)
    _check_quantization(kind, precision, quantize, calibrated)
    return kind


def _size(kind: ExportFormat, file: Path) -> int:
    return sum(one.stat().st_size for one in kind.files(file) if one.exists())


def _check(target: Path, form: str | None, precision: str, batch: int | None, overwrite: bool) -> ExportFormat:
    """The format of a file that can be written there."""
    if target.is_dir():
        raise InputError(f"{target} cannot be written: it is a folder")
    name = SUFFIXES.get(target.suffix.lower()) if form is None else form  # whatever is there now
    if name is None:
        raise InputError(f"{target} has no known extension: name it {', '.join(f'FILE{one}' for one in SUFFIXES)}")
    kind = find_format(name)
    if target.suffix != kind.suffix:
        raise InputError(f"a file of {kind.name} ends in {kind.suffix}; found {target}")
    _check_precision(precision)
    if batch is not None and batch < 1:
        raise InputError(f"batch must be at least 1; found {batch}")
    if not target.absolute().parent.is_dir():
        raise InputError(f"{target} cannot be written: there is no folder {target.absolute().parent}")
    taken = [file for file in (*kind.files(target), Path(f"{target}.json")) if file.exists()]
    if taken and not overwrite:
        raise InputError(f"{taken[0]} exists already: name another file, or pass --overwrite to replace it")
    kind.check()
    return kind


def _check_precision(precision: str) -> None:
    if precision not in PRECISIONS_OUT:
        raise InputError(f"precision must be one of {', '.join(PRECISIONS_OUT)}; found {precision!r}")


def _check_quantization(kind: ExportFormat, precision: str, quantize: str | None, calibrated: bool) -> None:
    if quantize is None:
        if calibrated:
            raise InputError("calibration images need --quantize int8")
        return
    if quantize not in QUANTIZATIONS:
        raise InputError(f"quantize must be one of {', '.join(QUANTIZATIONS)}; found {quantize!r}")
    if precision != "fp32":
        raise InputError(f"{quantize} is made from fp32; found the precision {precision!r}: leave it out")
    kind.check_int8(calibrated)


def _check_calibration(model: nn.Module, batch: int | None, calibration: Tensor | None) -> None:
    if calibration is None:
        return
    shape = tuple(family_of(model).input_shape(model))
    if calibration.dim() != 4 or tuple(calibration.shape[1:]) != shape or len(calibration) < (batch or 1):
        raise InputError(
            f"calibration must be {batch or 'one'} or more images (N, {', '.join(map(str, shape))}); found the shape "
            f"{tuple(calibration.shape)}"
        )
    if not bool(calibration.isfinite().all()):
        raise InputError("some calibration images have values that are not finite")


def publish(made: Path, companions: list[Path], report: Path, target: Path) -> None:
    """Move finished files to their places. A kill in between never leaves a file beside parts of another one.

    Files that are replaced together are set aside first: they come back if this fails, or when the next export to the
    same place begins.
    """
    aside, places = made.parent / SET_ASIDE, [target.parent / file.name for file in (made, *companions, report)]
    if not companions:
        places[-1].unlink(missing_ok=True)
        made.replace(target)
        report.replace(places[-1])
        return
    aside.mkdir()
    try:
        for place in places:  # the one that names the others goes first, and comes last
            if place.exists():
                place.replace(aside / place.name)
        for file in (*companions, made, report):
            file.replace(target.parent / file.name)
    except BaseException:
        put_back(aside, target.parent)
        raise
