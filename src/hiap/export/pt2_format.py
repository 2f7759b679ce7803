"""The format of `torch.export`, run by PyTorch without the code of the model. It needs no further package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hiap.errors import InputError
from hiap.export.formats import KEY, ExportFormat, Opened

__all__ = ["FORMAT"]


class _Pt2(ExportFormat):
    name, runtime, suffix = "pt2", "torch.export", ".pt2"

    def write(self, program: Any, file: Path, about: str, precision: str) -> None:
        import torch

        torch.export.save(program, file, extra_files={f"{KEY}.json": about})

    def open(self, file: Path, threads: int) -> Opened:
        import torch

        carried = {f"{KEY}.json": ""}
        try:
            network = torch.export.load(file, extra_files=carried).module()
        except Exception as error:  # whatever a damaged archive leads to
            raise InputError(f"{file} cannot be read by torch.export: {error}") from error

        def run(images: Any) -> Any:
            with torch.inference_mode():
                return network(torch.from_numpy(images)).numpy()

        return Opened(run, carried[f"{KEY}.json"] or None)


FORMAT = _Pt2()
