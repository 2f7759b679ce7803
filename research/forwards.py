"""The time of a forward of many networks, side by side, run as a latency table says that they will run."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from hiap.budget.latency import LatencyTable
from hiap.export.latency_tables import other_runtime
from hiap.models.registry import family_of
from hiap.speed.bench import runner
from hiap.speed.clock import Call, device_name, precision, timings
from hiap.speed.fused import hindrance
from hiap.speed.inference import optimize
from turns import alone

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Forward:
    """How networks run.

    Attributes:
        mode: how torch runs them (`eager`, `graph` or `compile+graph`), or another runtime.
        kernels: on fused kernels.
    """

    device: torch.device
    precision: str
    batch: int
    mode: str
    kernels: bool

    @classmethod
    def usual(cls, dense: nn.Module, device: torch.device) -> Forward:
        """The usual way on the device of a dense model."""
        if device.type != "cuda":
            return cls(device, "fp32", 8, "eager", False)
        return cls(device, "bf16", 256, "compile+graph", hindrance(dense, device, torch.bfloat16) is None)

    @classmethod
    def of(cls, table: LatencyTable) -> Forward:
        """The way of a table.

        Raises:
            ValueError: this is not the device of the table.
        """
        here = [torch.device(kind) for kind in ("cuda", "cpu") if kind == "cpu" or torch.cuda.is_available()]
        names = [device_name(device) for device in here]
        if table.device not in names:
            raise ValueError(
                f"networks are timed on the device of the table, {table.device}; found {' and '.join(names)}"
            )
        device = here[names.index(table.device)]
        mode = "compile+graph" if (device.type, table.mode) == ("cuda", "compile") else table.mode
        if table.runtime != "torch":
            mode = table.runtime
        return cls(device, table.precision, table.batch, mode, table.kernels)

    @property
    def by_torch(self) -> bool:
        return self.mode not in ("onnx", "openvino")

    def times(self, plain: Mapping[Key, nn.Module], optimised: Mapping[Key, nn.Module]) -> dict[Key, float]:
        """Milliseconds of a forward of each network; they take turns.

        Args:
            plain: networks that run as they are.
            optimised: networks that `hiap.optimize` makes faster first, where torch runs them. The faster form of one
                that is among both counts.
        """
        some = next(iter(plain.values()))
        keys = [*plain, *optimised]
        with precision(self.precision) as dtype:
            x = torch.randn(self.batch, *family_of(some).input_shape(some), device=self.device, dtype=dtype)
            with torch.no_grad():
                made = [self._made(one, dtype, False) for one in plain.values()]
                made += [self._made(one, dtype, True) for one in optimised.values()]
            rounds = 10 if self.device.type == "cuda" else 50  # the speed of a CPU changes: each call takes its turn
            with torch.inference_mode():
                calls = [self._call(one, x) for one in made]
                with alone():
                    found = map(statistics.median, timings(calls, self.device, 10, 50, rounds))
        forms = list(zip(keys, found, strict=True))
        return {key: min(ms for other, ms in forms if other == key) for key in keys}

    def _made(self, network: nn.Module, dtype: torch.dtype, faster: bool) -> nn.Module:
        network = copy.deepcopy(network).to(self.device).eval()
        if not self.by_torch:
            return network
        return optimize(network, dtype, self.batch, kernels=self.kernels, alone=alone) if faster else network.to(dtype)

    def _call(self, network: nn.Module, x: Tensor) -> Call:
        other = None if self.by_torch else other_runtime(self.mode, self.device, self.precision)
        if other is not None:
            return other.network(network, x)
        torch.compiler.reset()  # some versions hold few networks; their graphs stay
        return runner(network, x, self.mode)
