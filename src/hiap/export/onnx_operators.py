"""GELU and attention in ONNX, written so that onnxruntime finds its fast forms of them.

The exporter's own graphs compute the same. But onnxruntime does not recognise their GELU, which then takes five passes
over the neurons, and they copy the keys of every block twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["translations"]


def translations(program: Any) -> dict[Any, Callable[..., Any]]:
    """What `torch.onnx.export` is to write for some operators of a `torch.export.ExportedProgram`."""
    import torch

    gelu, attention = torch.ops.aten.gelu.default, torch.ops.aten.scaled_dot_product_attention.default
    calls = [node for node in program.graph.nodes if node.op == "call_function" and node.target is attention]
    return {gelu: _gelu} | ({attention: _attention} if all(map(_is_plain, calls)) else {})


def _is_plain(call: Any) -> bool:
    """Whether attention has no option but a scale and a mask that is added."""
    given = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), call.args, strict=False))
    given |= call.kwargs
    mask = given.get("attn_mask")
    added = mask is None or mask.meta["val"].is_floating_point()
    return added and not any(given.get(name) for name in ("dropout_p", "is_causal", "enable_gqa"))


def _opset() -> Any:
    """The operators of the opset that files are written in."""
    import onnxscript

    return onnxscript.opset18


def _gelu(self: Any, approximate: str = "none") -> Any:
    op = _opset()

    def number(value: float) -> Any:
        return op.CastLike(op.Constant(value_float=value), self)

    if approximate == "tanh":
        inner = op.Mul(
            number(math.sqrt(2 / math.pi)), op.Add(self, op.Mul(number(0.044715), op.Pow(self, number(3.0))))
        )
        return op.Mul(op.Mul(number(0.5), self), op.Add(number(1.0), op.Tanh(inner)))
    return op.Mul(op.Mul(self, op.Add(op.Erf(op.Div(self, number(math.sqrt(2)))), number(1.0))), number(0.5))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    op = _opset()
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scaled = op.Mul(query, op.CastLike(op.Constant(value_float=factor), query))
    scores = op.MatMul(scaled, op.Transpose(key, perm=[0, 1, 3, 2]))  # (B, H, N, N)
    if attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    return op.MatMul(op.Softmax(scores, axis=-1), value)
