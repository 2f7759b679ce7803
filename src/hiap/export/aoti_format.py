"""A network that torch's compiler has compiled ahead of time, for the CPU of the machine it is written on.

A package has the suffix of `torch.export`, and runs in Python and in C++ without the code of the model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hiap.errors import ExportError, InputError
from hiap.export.formats import KEY, ExportFormat, Opened

__all__ = ["FORMAT"]


class _Aoti(ExportFormat):
    name, runtime, suffix = "aoti", "AOTInductor", ".pt2"

    def check(self) -> None:
        from torch import _inductor
        from torch._inductor import cpp_builder

        if not hasattr(_inductor, "aoti_compile_and_package"):
            raise InputError('aoti needs torch 2.6 or newer: pip install "torch>=2.6"')
        try:
            cpp_builder.get_cpp_compiler()
        except Exception as error:  # of its own class, and of the system
            raise InputError(
                f"aoti needs a C++ compiler and found none ({error}): install g++, or name one in the variable CXX"
            ) from error

    def write(self, program: Any, file: Path, about: str, precision: str) -> None:
        from torch import _inductor

        try:
            _inductor.aoti_compile_and_package(
                program, package_path=str(file), inductor_configs={"aot_inductor.metadata": {KEY: about}}
            )
        except Exception as error:  # of many kinds: the compiler of torch, and that of the system
            raise ExportError(f"torch cannot compile this network: {error}") from error

    def open(self, file: Path, threads: int) -> Opened:
        import torch

        try:
            network: Any = torch._inductor.aoti_load_package(str(file))
            about = network.get_metadata().get(KEY)
        except Exception as error:  # whatever a damaged package leads to
            raise InputError(f"{file} cannot be read by AOTInductor: {error}") from error
        size = json.loads(about or "{}").get("size")

        def run(images: Any) -> Any:
            if size and list(images.shape[2:]) != size:  # the compiled code reads them without a look
                raise InputError(f"the file takes images of {size[0]}x{size[1]}; found the shape {images.shape}")
            with torch.inference_mode():
                return network(torch.from_numpy(images)).numpy()

        return Opened(run, about)


FORMAT = _Aoti()
