"""What a file format must offer, and the formats by name. Nothing here needs torch, so that help comes at once."""

from __future__ import annotations

import contextlib
import importlib
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hiap.errors import InputError

__all__ = [
    *("FOLDERS", "FORMATS", "INPUT", "KEY", "OUTPUT", "PRECISIONS_OUT", "QUANTIZATIONS", "SUFFIXES"),
    *("ExportFormat", "Opened", "find_format", "format_of", "need"),
]

FORMATS = {  # name -> the module that holds its FORMAT
    "onnx": "hiap.export.onnx_format",
    "openvino": "hiap.export.openvino_format",
    "pt2": "hiap.export.pt2_format",
    "aoti": "hiap.export.aoti_format",
}
FOLDERS = ("transformers", "timm")  # that are a folder for another library, not a file
SUFFIXES = {".onnx": "onnx", ".xml": "openvino", ".pt2": "pt2"}
PRECISIONS_OUT = ("fp32", "fp16")  # that a file can be written in
QUANTIZATIONS = ("int8",)  # that it can be rounded to after that
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
    flat = False  # the runtime is faster with all tokens as the rows of one matrix (flat_blocks.py)
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

    def check_int8(self, calibrated: bool) -> None:
        """Raise an InputError if the format has no INT8, or lacks what it takes.

        Args:
            calibrated: whether there are calibration images.
        """
        raise InputError(f"{self.name} has no INT8: export to onnx or openvino")

    def quantize(self, file: Path, out: Path, about: str, images: Any | None, batch: int) -> dict[str, Any]:
        """Write a file of this format again with INT8 weights; `check_int8` has passed.

        Args:
            images: for calibration (N, C, H, W), an array of numpy.
            batch: images at a time.

        Returns:
            What the report should say of it.
        """
        raise NotImplementedError

    def files(self, target: Path) -> list[Path]:
        """All files that may make up an exported model, the one that is named first."""
        return [target]

    def check(self) -> None:
        """Raise an InputError with the line that installs a package that is missing."""
        for package in self.packages:
            need(self.name, package, self.extra)


def need(what: str, package: str, extra: str) -> None:
    """Raise an InputError with the line that installs a package, if it is missing."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise InputError(f'{what} needs the package {package} ({error}): pip install "hiap[{extra}]"') from error


def find_format(name: str) -> ExportFormat:
    """The format of that name.

    Raises:
        InputError: there is none.
    """
    if name not in FORMATS:
        raise InputError(f"format must be one of {', '.join((*FORMATS, *FOLDERS))}; found {name!r}")
    found: ExportFormat = importlib.import_module(FORMATS[name]).FORMAT
    return found


def format_of(file: str | Path) -> ExportFormat | None:
    """The format of a file, by its suffix and, for .pt2, by what is inside; None for other files, and for a folder."""
    name = SUFFIXES.get(Path(file).suffix.lower())
    if name == "pt2" and Path(file).is_file():
        with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(file) as archive:
            name = "aoti" if any("/aotinductor/" in one for one in archive.namelist()) else name
    return find_format(name) if name and not Path(file).is_dir() else None
