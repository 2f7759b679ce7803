"""INT8 for ONNX: onnxruntime's own quantisation, of the matrix products with weights.

Those products are nearly all of the work and of the file. The rest stays float: LayerNorm, GELU, softmax, and the
products of attention, whose two factors are both computed. Weights get a scale for each output, activations one for
each tensor. Some ViTs have a few huge activations in front of one FFN product: a scale that spans them rounds all the
rest to nothing. Calibration finds such products, and leaves them float as well.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hiap.export.formats import INPUT, KEY

__all__ = ["quantize_onnx"]

PRODUCTS = ["MatMul", "Gemm"]
PEAK = 64  # times what 99 of 100 values stay below: with 256 steps up to the peak, those have four
LOOKED_AT = 64  # images, to find peaks


def quantize_onnx(file: Path, out: Path, about: str, images: Any | None, batch: int, large: bool) -> dict[str, Any]:
    """Write an ONNX file with INT8 weights.

    Args:
        images: to find the ranges of activations (N, C, H, W), as an array of numpy; without, every run finds its own.
        batch: images at a time.
        large: whether weights go to a file of their own.

    Returns:
        For the report: how many products with weights stay float.
    """
    import onnx
    from onnxruntime import quantization

    prepared = file.with_suffix(".prepared.onnx")
    with _quiet():
        quantization.quant_pre_process(file, prepared, skip_symbolic_shape=True, save_as_external_data=large)
        model = onnx.load(prepared, load_external_data=False)
        del model.graph.value_info[:]  # shapes are inferred again: those of weights that are transposed would be wrong
        onnx.save(model, prepared)
        common: dict[str, Any] = {
            "op_types_to_quantize": PRODUCTS,
            "per_channel": True,
            "weight_type": quantization.QuantType.QInt8,
            "use_external_data_format": large,
        }
        if images is None:
            kept: list[str] = []
            quantization.quantize_dynamic(prepared, out, **common)
        else:
            weights = {tensor.name for tensor in model.graph.initializer}
            products = [node for node in model.graph.node if node.op_type in PRODUCTS and node.input[1] in weights]
            some = images[: max(LOOKED_AT, batch)]
            kept = _with_peaks(model, products, prepared.with_suffix(".watched.onnx"), some, batch)
            quantization.quantize_static(
                prepared,
                out,
                _reader(quantization, images, batch),
                activation_type=quantization.QuantType.QUInt8,
                nodes_to_quantize=[node.name for node in products if node.name not in kept],
                extra_options={"OpTypesToExcludeOutputQuantization": PRODUCTS},
                **common,
            )
    model = onnx.load(out, load_external_data=False)
    onnx.helper.set_model_props(model, {KEY: about})
    onnx.save(model, out)
    return {"float_products": len(kept)}


def _with_peaks(model: Any, products: list[Any], file: Path, images: Any, batch: int) -> list[str]:
    """The names of products whose input has peaks far above nearly all of its values.

    Args:
        file: to write, beside the model.
    """
    import numpy as np
    import onnx
    import onnxruntime

    watched = sorted({node.input[0] for node in products} - {INPUT})
    copied = onnx.ModelProto()
    copied.CopyFrom(model)
    copied.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in watched)
    onnx.save(copied, file)
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    peaks, usual = dict.fromkeys(watched, 0.0), dict.fromkeys(watched, 0.0)
    runs = range(0, len(images) - batch + 1, batch)
    for start in runs:
        for name, value in zip(watched, session.run(watched, {INPUT: images[start : start + batch]}), strict=True):
            sizes = np.abs(value)
            peaks[name] = max(peaks[name], float(sizes.max()))
            usual[name] += float(np.quantile(sizes, 0.99)) / len(runs)
    high = {name for name in watched if peaks[name] > PEAK * usual[name]}
    return [node.name for node in products if node.input[0] in high]


def _reader(quantization: Any, images: Any, batch: int) -> Any:
    """Batches of calibration images; a rest that fills no batch is left out."""
    starts = iter(range(0, len(images) - batch + 1, batch))

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> dict[str, Any] | None:
            start = next(starts, None)
            return None if start is None else {INPUT: images[start : start + batch]}

    return Reader()


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the advice that onnxruntime logs on what has been done already."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
