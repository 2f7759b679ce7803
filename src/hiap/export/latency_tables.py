"""Latency tables of other runtimes: the parts of a model are exported one by one, and timed where they will run.

An export takes a second or more, however small it is, so the grid of widths is coarse by default. ONNX takes longest:
there all widths are exported as one network, which is cut into its parts again.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.export.flat_blocks import flattened
from hiap.export.formats import ExportFormat
from hiap.export.network import Deployable
from hiap.export.onnx_chains import onnx_chains
from hiap.export.runtimes import find_runtimes, open_in
from hiap.speed.clock import DTYPES, Call
from hiap.speed.measure import OtherRuntime

__all__ = ["other_runtime"]


class Cast(nn.Module):
    """A network that computes in a dtype, from float32 tensors to float32 tensors."""

    def __init__(self, network: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.network, self.dtype = copy.deepcopy(network).to(dtype).requires_grad_(False), dtype

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.network(x.to(self.dtype))
        return result.float()


def other_runtime(name: str, device: torch.device, precision: str, unit: str = "ms") -> OtherRuntime | None:
    """How networks run in a runtime, for `hiap.measure`; None for torch, which needs no help.

    Raises:
        InputError: the runtime is not to be had on this device or in this precision.
    """
    if name == "torch":
        return None
    if unit != "ms":
        raise InputError(f"{name} is measured in ms only; found {unit!r}")
    (kind,) = find_runtimes([name], device, [precision])
    return OtherRuntime(name, functools.partial(_parts, kind, precision), functools.partial(_network, kind, precision))


def _parts(kind: ExportFormat, precision: str, blocks: Sequence[nn.Module], x: Tensor, copies: int) -> Iterator[Call]:
    if kind.name == "onnx" and precision == "fp32":
        yield from onnx_chains(blocks, x, copies)
        return
    for block in blocks:
        copied = [copy.deepcopy(block) for _ in range(copies)]
        chain = nn.Sequential(*(flattened(copied) if kind.flat else copied))
        yield _call(kind, precision, Cast(chain, DTYPES[precision] if kind.casts else torch.float32), x)


def _network(kind: ExportFormat, precision: str, model: nn.Module, x: Tensor) -> Call:
    dtype = DTYPES[precision] if kind.casts else torch.float32
    return _call(kind, precision, Deployable(model, dtype, last_block=False, flat=kind.flat), x)


def _call(kind: ExportFormat, precision: str, network: nn.Module, x: Tensor) -> Call:
    opened = open_in(kind, network.eval(), x.shape[1:], precision, len(x))
    return functools.partial(opened.run, x.float().numpy())
