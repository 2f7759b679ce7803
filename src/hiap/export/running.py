"""An exported file as a module of torch, so that what scores and times models does so with files too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.export.formats import SUFFIXES, format_of

__all__ = ["ExportedModel"]


class ExportedModel(nn.Module):
    """A file of `export_model`, run by its own runtime on the CPU.

    Attributes:
        about: what the file says of its images and classes.

    Raises:
        InputError: the file cannot be read, or was not written by HiAP.
    """

    def __init__(self, file: str | Path) -> None:
        super().__init__()
        path = Path(file)
        kind = format_of(path)
        if kind is None:
            raise InputError(f"{file} is not an exported model: those end in {', '.join(SUFFIXES)}")
        if not path.is_file():
            raise InputError(f"{file}: no such file")
        kind.check()
        opened = kind.open(path, torch.get_num_threads())
        try:
            about = json.loads(opened.about or "")
            self.fixed = None if about["batch"] == "dynamic" else int(about["batch"])
            self.shape = (int(about["channels"]), *map(int, about["size"]))
        except (ValueError, LookupError, TypeError) as error:
            raise InputError(f"{file} does not say how to prepare its images: write it with hiap export") from error
        self.run, self.about = opened.run, dict[str, Any](about)
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)  # tells others that this is on the CPU

    def forward(self, images: Tensor) -> Tensor:
        """Logits of any number of images. A file for a fixed number is run on so many at a time, filled with zeros."""
        if tuple(images.shape[1:]) != self.shape:  # each runtime has an error of its own, and few say what to do
            wanted, given = ("x".join(map(str, shape)) for shape in (self.shape, images.shape[1:]))
            raise InputError(f"the file takes images of {wanted}, found {given}: export the model again for that size")
        if self.fixed is None:
            return torch.from_numpy(self.run(images.numpy()))
        found = []
        for part in images.split(self.fixed):  # type: ignore[no-untyped-call]
            filled = torch.cat([part, part.new_zeros(self.fixed - len(part), *part.shape[1:])])
            found.append(torch.from_numpy(self.run(filled.numpy()))[: len(part)])
        return torch.cat(found)
