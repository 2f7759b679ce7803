"""What a file format must offer, and the formats by name. Nothing here needs torch, so that help comes at once."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiap.errors import InputError

__all__ = ["FORMATS", "INPUT", "KEY", "OUTPUT", "PRECISIONS_OUT", "ExportFormat", "Opened", "find_format", "format_of"]

FORMATS = {  # name -> the module that holds its FORMAT
    "onnx": "hiap.export.onnx_format",
    "openvino": "hiap.export.openvino_format",
    "pt2": "hiap.export.pt2_format",
}
SUFFIXES = {".onnx": "onnx", ".xml": "openvino", ".pt2": "pt2"}
PRECISIONS_OUT = ("fp32", "fp16")  # that a file can be written in
INPUT, OUTPUT = "images", "logits"  # names in the file
KEY = "hiap"  # of the description that a file carries


@dataclass(frozen=True)
class Opened:
    """A file that is ready to run.

    Attributes:
        run: normalised float32 images (B, C, H, W) to float32 logits, both arrays of numpy.
        about: the description that the file carries, as JSON text; None for a file that was not written by HiAP.
    """

    run: Callable[[Any], Any]
    about: str | None


class ExportFormat(ABC):
    """A kind of file, and the runtime that reads it."""

    name: str
    runtime: str  # in words
    suffix: str
    casts = True  # in half precision the network is cast; if not, only its weights are stored so
    packages: tuple[str, ...] = ()  # to import, beside torch
    extra = ""  # of pip that installs them

    @abstractmethod
    def write(self, program: Any, file: Path, about: str, precision: str) -> None:
        """Write a `torch.export.ExportedProgram` from float32 images to float32 logits.

        Args:
            file: with the suffix of the format. Companions go beside it, under names that begin with its stem.
            about: JSON text that the file must carry under `KEY`.
        """

    @abstractmethod
    def open(self, file: Path, threads: int) -> Opened:
        """Load a file on the CPU.

        Args:
            threads: that the runtime may use.
        """

    def files(self, target: Path) -> list[Path]:
        """All files that may make up an exported model, the one that is named first."""
        return [target]

    def check(self) -> None:
        """Raise an InputError with the line that installs a package that is missing."""
        for package in self.packages:
            try:
                importlib.import_module(package)
            except ImportError as error:
                raise InputError(
                    f'{self.name} needs the package {package} ({error}): pip install "hiap[{self.extra}]"'
                ) from error


def find_format(name: str) -> ExportFormat:
    """The format of that name.

    Raises:
        InputError: there is none.
    """
    if name not in FORMATS:
        raise InputError(f"format must be one of {', '.join(FORMATS)}; found {name!r}")
    found: ExportFormat = importlib.import_module(FORMATS[name]).FORMAT
    return found


def format_of(file: str | Path) -> ExportFormat | None:
    """The format that the suffix of a file says; None for any other file, and for a folder."""
    name = SUFFIXES.get(Path(file).suffix.lower())
    return find_format(name) if name and not Path(file).is_dir() else None
