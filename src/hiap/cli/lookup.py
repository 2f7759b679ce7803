"""What several commands look up before they begin: a saved model, a device, a dense model, a file to write."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hiap.errors import InputError
from hiap.training.rungs import read_rungs

__all__ = ["check_one_size", "check_writable", "compact_folder", "find_device", "random_model"]


def compact_folder(folder: str) -> Path:
    """The folder of a compact model: the one given, the result of the run in it, or that of hf://USER/NAME."""
    from hiap.pruning.hub import local_folder

    path = local_folder(folder)
    if (path / "config.json").is_file():
        return path
    check_one_size(path)
    if (path / "config.yaml").is_file() and not (path / "compact").is_dir():
        raise InputError(f"{folder} holds a run that has not finished: there is no {path / 'compact'} yet")
    return path / "compact" if (path / "compact").is_dir() else path


def check_one_size(path: Path) -> None:
    """Refuse the folder of a run of several sizes, with their names."""
    rungs = read_rungs(path)
    if len(rungs) > 1:
        own = [rung.folder if rung.path == path else rung.path for rung in rungs if rung.state == "done"]
        done = " or ".join(map(str, own)) or "one of them once it is done"
        raise InputError(f"{path} holds a run of several sizes: name {done}")


def find_device(name: str | None) -> Any:
    """The device of that name; CUDA by default if there is any."""
    import torch

    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise InputError(f"--device must be cuda or cpu; found {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("there is no CUDA device here; pass --device cpu")
    return device


def random_model(options: argparse.Namespace) -> Any:
    """The dense model of --model and --img-size, with random weights."""
    from hiap.models.weights import create_model

    return create_model(options.model, False, {"img_size": options.img_size} if options.img_size else {}).eval()


def check_writable(path: str | None) -> None:
    """Raise before any work if the result could not be written after it."""
    if path is None:
        return
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"{path} cannot be written: there is no folder {Path(path).absolute().parent}")
    if Path(path).is_dir():
        raise InputError(f"{path} cannot be written: it is a folder")
