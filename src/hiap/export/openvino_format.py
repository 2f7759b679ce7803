"""OpenVINO: an .xml file with the graph, and a .bin file with the weights beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hiap.errors import InputError
from hiap.export.formats import INPUT, KEY, OUTPUT, ExportFormat, Opened

__all__ = ["FORMAT"]


class _OpenVino(ExportFormat):
    name, runtime, suffix = "openvino", "OpenVINO", ".xml"
    packages, extra, casts = ("openvino",), "openvino", False

    def files(self, target: Path) -> list[Path]:
        return [target, target.with_suffix(".bin")]

    def write(self, program: Any, file: Path, about: str, precision: str) -> None:
        import openvino

        model = openvino.convert_model(program)
        name = program.graph_signature.user_inputs[0]
        shape = next(node for node in program.graph.nodes if node.name == name).meta["val"].shape
        # The converter leaves every size open: images of another size would run, to no good, and all would be slow.
        model.reshape(openvino.PartialShape([size if isinstance(size, int) else -1 for size in shape]))
        model.inputs[0].set_names({INPUT})
        model.outputs[0].set_names({OUTPUT})
        model.set_rt_info(about, KEY)
        openvino.save_model(model, file, compress_to_fp16=precision == "fp16")

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
