"""Networks timed in other runtimes, side by side, with rows like those of `hiap.speed.bench`. On the CPU."""

from __future__ import annotations

import functools
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from hiap.errors import InputError
from hiap.export.formats import FORMATS, PRECISIONS_OUT, ExportFormat, Opened, find_format
from hiap.export.network import Deployable, traced
from hiap.pruning.count import macs
from hiap.speed.bench import Row, spread
from hiap.speed.clock import DTYPES, timings

__all__ = ["bench_runtimes", "find_runtimes", "open_in"]


def find_runtimes(names: Sequence[str], device: torch.device, precisions: Sequence[str]) -> list[ExportFormat]:
    """The runtimes of these names, on this device and in these precisions.

    Raises:
        InputError: one of them cannot be had, with the line that installs it where that would help.
    """
    if strange := [name for name in names if name not in FORMATS]:
        raise InputError(f"runtime must be one of torch, {', '.join(FORMATS)}; found {strange[0]!r}")
    if names and device.type != "cpu":
        raise InputError(f"{', '.join(names)}: timed on the CPU only, found {device}: pass --device cpu")
    wrong = [name for name in precisions if name not in PRECISIONS_OUT]
    if names and wrong:
        raise InputError(f"{names[0]} has the precisions {', '.join(PRECISIONS_OUT)}; found {wrong[0]!r}")
    found = [find_format(name) for name in names]
    for kind in found:
        kind.check()
    return found


def open_in(
    kind: ExportFormat, network: nn.Module, shape: Sequence[int], precision: str, batch: int | None = None
) -> Opened:
    """A network, ready to run in a runtime.

    Args:
        network: float32 tensors to float32 tensors, whatever it computes in between.
        shape: of one input, without the batch.
        batch: inputs at a time; None for any number.
    """
    program = traced(network, shape, batch)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder, f"network{kind.suffix}")
        kind.write(program, file, "{}", precision)
        return kind.open(file, torch.get_num_threads())


def bench_runtimes(
    networks: Mapping[str, nn.Module],
    runtimes: Sequence[ExportFormat],
    batches: Sequence[int],
    precisions: Sequence[str],
    warmup: int,
    repeat: int,
    say: Callable[[str], None] = lambda text: None,
) -> list[Row]:
    """Time networks of one input size, each exported as `export_model` does it, in turns. The networks are not changed.

    The mode of a row is the runtime.
    """
    rows, cpu = [], torch.device("cpu")
    costs = {name: macs(model) for name, model in networks.items()}
    for precision in precisions:
        opened: dict[tuple[str, str], Opened] = {}
        for name, model in networks.items():
            for kind in runtimes:
                say(f"{precision}, {kind.name}: exporting the {name} network first")
                network = Deployable(model, DTYPES[precision] if kind.casts else torch.float32, flat=kind.flat)
                opened[name, kind.name] = open_in(kind, network, network.shape, precision)
        for batch in batches if opened else ():
            say(f"{precision}, batch {batch}, {', '.join(kind.name for kind in runtimes)}")
            images = torch.randn(batch, *network.shape).numpy()
            times = timings([functools.partial(one.run, images) for one in opened.values()], cpu, warmup, repeat)
            for (name, runtime), found in zip(opened, times, strict=True):
                ms = statistics.median(found)
                speed = 1e3 * batch / ms
                rows.append(Row(name, precision, batch, runtime, ms, spread(found), speed, costs[name], "-"))
    return rows
