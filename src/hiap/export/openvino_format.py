"""OpenVINO: an .xml file with the graph, and a .bin file with the weights beside it."""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path
from typing import Any

from hiap.errors import ExportError, InputError
from hiap.export.formats import INPUT, KEY, OUTPUT, ExportFormat, Opened, need

__all__ = ["FORMAT"]


class _OpenVino(ExportFormat):
    name, runtime, suffix = "openvino", "OpenVINO", ".xml"
    packages, extra, casts = ("openvino",), "openvino", False

    def files(self, target: Path) -> list[Path]:
        return [target, target.with_suffix(".bin")]

    def write(self, program: Any, file: Path, about: str, precision: str) -> None:
        import openvino

        try:
            model = openvino.convert_model(program)
        except Exception as error:  # of its own classes
            raise ExportError(f"OpenVINO cannot convert this network: {error}; export it to onnx") from error
        name = program.graph_signature.user_inputs[0]
        shape = next(node for node in program.graph.nodes if node.name == name).meta["val"].shape
        # The converter leaves every size open: images of another size would run, to no good, and all would be slow.
        model.reshape(openvino.PartialShape([size if isinstance(size, int) else -1 for size in shape]))
        model.inputs[0].set_names({INPUT})
        model.outputs[0].set_names({OUTPUT})
        model.set_rt_info(about, KEY)
        openvino.save_model(model, file, compress_to_fp16=precision == "fp16")

    def check_int8(self, calibrated: bool) -> None:
        if not calibrated:
            raise InputError("openvino needs images for INT8: pass --calibration-data FOLDER, or export to onnx")
        need("INT8 for openvino", "nncf", "nncf")

    def quantize(self, file: Path, out: Path, about: str, images: Any | None, batch: int) -> dict[str, Any]:
        import nncf
        import openvino

        assert images is not None
        nncf.set_log_level(logging.ERROR)
        parts = [images[start : start + batch] for start in range(0, len(images) - batch + 1, batch)]
        with contextlib.redirect_stdout(sys.stderr):  # where progress belongs
            made = nncf.quantize(
                openvino.Core().read_model(file),
                nncf.Dataset(parts),
                subset_size=len(parts),
                model_type=nncf.ModelType.TRANSFORMER,
            )
        made.set_rt_info(about, KEY)
        openvino.save_model(made, out, compress_to_fp16=False)
        return {}

    def open(self, file: Path, threads: int) -> Opened:
        import openvino

        # On some processors OpenVINO computes in bf16 unless it is told otherwise.
        settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        try:
            model = openvino.Core().read_model(file)
            compiled = openvino.compile_model(model, "CPU", settings)
        except RuntimeError as error:
            raise InputError(f"{file} cannot be read by OpenVINO: {error}") from error
        about = model.get_rt_info(KEY).value if model.has_rt_info(KEY) else None
        return Opened(lambda images: compiled(images)[0], about)


FORMAT = _OpenVino()
