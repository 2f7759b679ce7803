"""ONNX, run by onnxruntime. The weights are inside the file, unless it would be too large for that."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from hiap.errors import ExportError, InputError
from hiap.export.formats import INPUT, KEY, OUTPUT, ExportFormat, Opened
from hiap.export.onnx_int8 import quantize_onnx
from hiap.export.onnx_operators import translations

__all__ = ["FORMAT", "converted_program", "open_session"]

OPSET = 18  # old enough for most runtimes
LARGEST = 1 << 30  # bytes of weights inside a file; a message of protobuf has at most 2 GiB


class _Onnx(ExportFormat):
    name, runtime, suffix = "onnx", "onnxruntime", ".onnx"
    packages, extra = ("onnx", "onnxscript", "onnxruntime"), "onnx"
    flat = True

    def files(self, target: Path) -> list[Path]:
        return [target, Path(f"{target}.data")]  # the second for large models only

    def write(self, program: Any, file: Path, about: str, precision: str) -> None:
        made = converted_program(program, [OUTPUT])
        made.model.metadata_props[KEY] = about
        _name_batch(made.model.graph)
        weights = sum(tensor.nbytes for tensor in program.state_dict.values())
        made.save(file, external_data=weights > LARGEST)

    def check_int8(self, calibrated: bool) -> None:
        """Both ways are there: with calibration images, and without."""

    def quantize(self, file: Path, out: Path, about: str, images: Any | None, batch: int) -> dict[str, Any]:
        size = sum(one.stat().st_size for one in self.files(file) if one.exists())
        return quantize_onnx(file, out, about, images, batch, large=size > LARGEST)

    def open(self, file: Path, threads: int) -> Opened:
        return open_session(file, threads)


def converted_program(program: Any, outputs: list[str]) -> Any:
    """A `torch.export.ExportedProgram` as a `torch.onnx.ONNXProgram`."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter about itself
        try:
            return torch.onnx.export(
                program,
                dynamo=True,
                opset_version=OPSET,
                input_names=[INPUT],
                output_names=outputs,
                custom_translation_table=translations(program),
                verbose=False,
            )
        except Exception as error:  # of many kinds
            raise ExportError(f"torch cannot convert this network to ONNX: {error}; export it to pt2") from error


def open_session(model: Path | bytes, threads: int) -> Opened:
    """A file, or what one would hold, ready to run."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors only
    # Threads wait for the next run by spinning, and would take the cores from another network that is timed in turns.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of several classes, all of them its own
        name = "the network" if isinstance(model, bytes) else model
        raise InputError(f"{name} cannot be read by onnxruntime: {error}") from error
    name = session.get_inputs()[0].name
    about = session.get_modelmeta().custom_metadata_map.get(KEY)
    return Opened(lambda images: session.run(None, {name: images})[0], about)


def _name_batch(graph: Any) -> None:
    """Call the dynamic first dimension "batch" wherever it stands; the exporter numbers it."""
    symbol = graph.inputs[0].shape[0]
    if isinstance(symbol, int):
        return
    values = [*graph.inputs, *(value for node in graph for value in node.outputs)]
    for value in values:
        for axis, size in enumerate(value.shape or ()):
            if size == symbol:
                value.shape[axis] = "batch"


FORMAT = _Onnx()
