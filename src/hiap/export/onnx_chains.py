"""Blocks of many widths in onnxruntime: exported together, since most of an export does not depend on its size."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hiap.export.flat_blocks import flattened
from hiap.export.formats import INPUT
from hiap.export.network import traced
from hiap.export.onnx_format import converted_program, open_session
from hiap.speed.clock import Call

__all__ = ["grouped", "onnx_chains"]

TOGETHER = 1 << 28  # bytes of weights in one export


class SideBySide(nn.Module):
    """Networks that get the same input."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(network(x) for network in self.networks)


def onnx_chains(blocks: Sequence[nn.Module], x: Tensor, copies: int) -> Iterator[Call]:
    """A call for each block, which runs so many copies of it in a row. One session is open at a time.

    Args:
        blocks: from tokens to tokens of the same shape, float32.
        x: their input (B, N, D).
    """
    import onnx

    array = x.float().numpy()
    for group in grouped(blocks):
        names = [f"part_{i}" for i in range(len(group))]
        program = traced(SideBySide([one for block in group for one in flattened([block])]).eval(), x.shape[1:], len(x))
        extractor = onnx.utils.Extractor(converted_program(program, names).model_proto)
        for name in names:
            chain = _repeated(extractor.extract_model([INPUT], [name]), copies)
            yield functools.partial(open_session(chain, torch.get_num_threads()).run, array)


def grouped(blocks: Sequence[nn.Module]) -> Iterator[list[nn.Module]]:
    """Blocks in their order, in groups that one export can hold."""
    group: list[nn.Module] = []
    size = 0
    for block in blocks:
        own = sum(weight.nbytes for weight in block.parameters())
        if group and size + own > TOGETHER:
            yield group
            group, size = [], 0
        group.append(block)
        size += own
    if group:
        yield group


def _repeated(model: Any, copies: int) -> bytes:
    """Copies of a network one after the other, each with weights of its own, as the bytes of a file."""
    import onnx

    whole = onnx.compose.add_prefix(model, "0.")
    for i in range(1, copies):
        link = (whole.graph.output[0].name, f"{i}.{model.graph.input[0].name}")
        whole = onnx.compose.merge_models(whole, onnx.compose.add_prefix(model, f"{i}."), io_map=[link])
    return bytes(whole.SerializeToString())
