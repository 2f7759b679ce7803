"""The speed that a user gets: each network in its fastest form, with one image and with many."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hiap.speed.bench import bench
from hiap.speed.clock import DTYPES
from hiap.speed.fused import hindrance

__all__ = ["Speed", "read_speeds", "speeds"]

NOISE = 1.02  # a smaller ratio is not told from 1


@dataclass(frozen=True)
class Speed:
    """Two networks side by side at one batch size, each in the form that is fastest for it."""

    batch: int
    precision: str
    dense_ms: float
    dense_form: str
    compact_ms: float
    compact_form: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def faster(self) -> bool:
        """Whether the compact network is faster by more than the noise of a measurement."""
        return self.dense_ms / self.compact_ms >= NOISE

    def comparison(self) -> str:
        """How they compare, in words."""
        times = self.dense_ms / self.compact_ms
        return f"{times:.2f}x faster" if self.faster else f"not faster ({times:.2f}x)"


def speeds(
    dense: nn.Module, compact: nn.Module, device: torch.device, say: Callable[[str], None] = lambda text: None
) -> list[Speed]:
    """Time both networks as they are and optimised, in every mode of the device; the fastest counts.

    On CUDA: bf16, 1 and 256 images, with and without CUDA graphs, compiling and, where they are available, fused
    kernels. On a CPU: fp32, 1 and 8 images.
    """
    gpu = device.type == "cuda"
    precision, batches = ("bf16", (1, 256)) if gpu else ("fp32", (1, 8))
    modes, often = (("eager", "graph", "compile+graph"), (3, 15)) if gpu else (("eager",), (1, 7))
    networks = {"dense": dense, "compact": compact}
    kernels = all(hindrance(model, device, DTYPES[precision]) is None for model in networks.values())
    try:
        rows = bench(networks, device, batches, [precision], modes, *often, say, kernels)
    except RuntimeError as error:  # compiling needs a working toolchain
        if not gpu:
            raise
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        told = f"compiled networks could not be timed here ({first}); the speed is that of uncompiled ones"
        warnings.warn(told, stacklevel=2)
        rows = bench(networks, device, batches, [precision], modes[:2], *often, say, kernels)
    found = []
    for batch in batches:
        best: dict[str, tuple[float, str]] = {}
        for row in rows:
            name, _, how = row.network.partition(", ")  # as `bench` names the forms of a network
            form = f"{row.mode}, {how}" if how else row.mode
            if row.batch == batch and (name not in best or row.ms < best[name][0]):
                best[name] = (row.ms, form)
        found.append(Speed(batch, precision, *best["dense"], *best["compact"]))
    return found


def read_speeds(report: Path) -> list[Speed]:
    """What the report of a run says of the speed; nothing where there is none."""
    try:
        return [Speed(**one) for one in json.loads(report.read_text())["speed"]]
    except (OSError, ValueError, LookupError, TypeError):
        return []
