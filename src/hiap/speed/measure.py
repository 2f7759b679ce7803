"""Measuring a latency table: the parts of a model over a grid of widths, each on the clock of a mode and a unit.

The attention branch of a block is timed over heads x q/k dims x value dims, the FFN branch over neurons, each with its
norm and residual and several in a row as in a network; and what is outside the blocks. Some whole networks then show
what the sum of the parts leaves out.
"""

from __future__ import annotations

import copy
import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hiap.budget.deploy import MODES, PRECISIONS
from hiap.budget.latency import AXES, UNITS, LatencyCost, LatencyError, LatencyTable
from hiap.models.registry import family_of, widths_of
from hiap.nn.compact import Widths, is_glu, shrink_block
from hiap.nn.rotary import Rotary
from hiap.pruning.attach import is_gated
from hiap.pruning.extract import shrink
from hiap.speed.clock import DTYPES, Alone, Call, device_name, graphed, materialise, precision, timings
from hiap.speed.fitting import calibrate
from hiap.speed.fused import fuse, hindrance
from hiap.speed.inference import compiled, optimize
from hiap.speed.steps import NEURONS

__all__ = ["OtherRuntime", "measure", "measured", "network_costs", "predicted"]

SECONDS = 0.3  # that a call is timed for where its pace is held, or longer where it takes long
CHAIN = 4  # copies of a part in one timed call, one after the other as in a network


@dataclass(frozen=True)
class OtherRuntime:
    """How a runtime other than torch runs what is measured, on the CPU.

    Attributes:
        parts: gets blocks of several widths, their input, and how many copies of each are to run in a row, from tokens
            to tokens. It gives a call for each of them in turn.
        network: gets a whole model, from images to logits, and its input.
    """

    name: str
    parts: Callable[[Sequence[nn.Module], Tensor, int], Iterable[Call]]
    network: Callable[[nn.Module, Tensor], Call]


def measure(
    model: nn.Module,
    device: torch.device,
    precision_name: str = "bf16",
    batch: int = 256,
    unit: str = "ms",
    mode: str | None = None,
    name: str = "",
    grid: dict[str, list[int]] | None = None,
    say: Callable[[str], None] = lambda text: None,
    other: OtherRuntime | None = None,
) -> LatencyTable:
    """Time the parts of a model without gates, dense or compact, over a grid of widths. The model is not changed.

    Compiling every point would take too long. What a compiler fuses does not depend on the widths (residual and norm),
    so for the mode "compile" parts are timed uncompiled, and what compiling gains at the whole width is taken off all.
    In that mode parts and networks run on fused kernels where these are available, and the last block is timed apart:
    it computes only the tokens that the head reads.

    Args:
        unit: "ms", or "mJ" on GPUs that report energy (NVML).
        mode: one of MODES; by default "graph" with CUDA, else "eager".
        name: of the model, for the record.
        grid: widths of the axes heads, qk_dim, value_dim and neurons; a default for what is not given.
        other: the runtime to measure in, if it is not torch (`hiap.export.latency_tables.other_runtime`).

    Raises:
        LatencyError: a setting is unknown, or cannot be had on the device.
    """
    mode = mode or ("graph" if device.type == "cuda" else "eager")
    if precision_name not in PRECISIONS:
        raise LatencyError(f"precision must be one of {', '.join(PRECISIONS)}; found {precision_name!r}")
    if batch < 1:
        raise LatencyError(f"batch must be at least 1; found {batch}")
    _check_clock(unit, device, mode)
    family = family_of(model)
    found = family.sites(model)
    if is_gated(model):
        raise LatencyError("the model has gates: measure it without (hiap.detach, or a new model)")
    most = {axis: max(getattr(site.widths, axis) or 0 for site in found) for axis in AXES}
    if not all(most.values()):
        raise LatencyError("the model has no attention or no FFN left; measure the dense one")
    whole, dim, tokens = Widths(**most), found[0].dim, family.tokens(model)
    turned = next(site for site in found if site.widths.heads)
    template, rope = copy.deepcopy(turned.block), family.ropes(model)[found.index(turned)]
    ffn_of = copy.deepcopy(next(site.block for site in found if site.widths.neurons))
    template.norm2, template.mlp, template.ls2, template.glu = ffn_of.norm2, ffn_of.mlp, ffn_of.ls2, is_glu(ffn_of)
    kernels = mode == "compile" and other is None and hindrance(model, device, DTYPES[precision_name]) is None
    last = family.tokens_read(model) if kernels else None
    axes = (_steep_grid(whole) if kernels else _grid(whole, unit == "mJ" or other is not None)) | (grid or {})
    if any(site.qk_norm for site in found):  # which ties the q/k dims of a head together
        axes["qk_dim"] = [whole.qk_dim]
    with precision(precision_name) as dtype, torch.no_grad() if other else torch.inference_mode():
        x = torch.randn(batch, tokens, dim, device=device, dtype=dtype)

        def chain(widths: Widths, length: int, last: int | None = None) -> nn.Module:
            blocks = [shrink_block(copy.deepcopy(template), dim, widths) for _ in range(length)]
            made = materialise(nn.Sequential(*blocks), device).eval()
            for module in made.modules():
                if isinstance(module, Rotary) and rope is not None:
                    module.bake((rope[0].to(device), rope[1].to(device)))
            return fuse(blocks, dtype, batch, tokens, last) if kernels else made.to(dtype)

        def calls(every: Sequence[Widths]) -> Iterable[Call]:
            if other:  # which may export all of them at once
                return other.parts([chain(widths, 1) for widths in every], x, CHAIN)
            return (functools.partial(chain(widths, CHAIN), x) for widths in every)

        def branches(every: Sequence[Widths]) -> Iterator[float]:
            return (clock(call) / CHAIN for call in calls(every))

        def last_branch(widths: Widths) -> float:
            part = chain(widths, 1, last)
            return clock(lambda: [part(x) for _ in range(CHAIN)]) / CHAIN

        def gain(widths: Widths) -> float:
            """What compiling saves of a branch that has others before and after it."""
            if mode != "compile":
                return 0.0
            torch.compiler.reset()
            short, long = (clock(functools.partial(compiled(chain(widths, n)), x)) for n in (CHAIN, 2 * CHAIN))
            return next(branches([widths])) - (long - short) / CHAIN

        every = iter(calls([whole]))  # a runtime may keep a part open as long as it has more to come
        pace = torch.inference_mode()(next(every))
        clock = _clock(unit, device, mode, pace)
        if device.type == "cuda":
            clock(pace)  # warms the device up

        def whole_cost(network: nn.Module) -> float:
            return clock(_network_call(network, device, dtype, batch, mode, other, kernels))

        points = itertools.product(*(axes[axis] for axis in AXES[:3]))
        attentions = [Widths(heads, queries, values, None) for heads, queries, values in points]
        ffns = [Widths(None, 0, 0, neurons) for neurons in axes["neurons"]]
        off = gain(replace(whole, neurons=None))
        attention = [_less(cost, off) for cost in _told(branches(attentions), len(attentions), "attention", say)]
        off = gain(Widths(None, 0, 0, whole.neurons))
        ffn = [_less(cost, off) for cost in _told(branches(ffns), len(ffns), "FFN", say)]
        last_attention = last_ffn = None
        if last is not None:
            last_attention = list(_told(map(last_branch, attentions), len(attentions), "attention, last block", say))
            last_ffn = list(_told(map(last_branch, ffns), len(ffns), "FFN, last block", say))
        networks = (_hollow(model), copy.deepcopy(model))
        if other:  # which may leave out the zeros that new weights begin with
            networks = (materialise(networks[0], device), materialise(networks[1], device))
        outside, dense = map(whole_cost, networks)

    def by_axis(costs: list[float]) -> list[list[list[float]]]:
        found: list[list[list[float]]] = torch.tensor(costs, dtype=torch.float64).view(shape).tolist()
        return found

    shape = [len(axes[axis]) for axis in AXES[:3]]
    table = LatencyTable(
        unit=unit,
        device=device_name(device),
        precision=precision_name,
        batch=batch,
        mode=mode,
        model=name,
        dim=dim,
        tokens=tokens,
        heads=axes["heads"],
        qk_dim=axes["qk_dim"],
        value_dim=axes["value_dim"],
        neurons=axes["neurons"],
        attention=by_axis(attention),
        ffn=ffn,
        outside=outside,
        dense=dense,
        torch_version=torch.__version__,
        runtime=other.name if other else "torch",
        last_attention=None if last_attention is None else by_axis(last_attention),
        last_ffn=last_ffn,
        neuron_step=NEURONS if kernels else 1,
        kernels=kernels,
    )
    with precision(precision_name):
        return calibrate(table, model, whole_cost, say)


def network_costs(
    networks: Iterable[nn.Module],
    device: torch.device,
    table: LatencyTable,
    other: OtherRuntime | None = None,
    alone: Alone = nullcontext,
) -> Iterator[float]:
    """A forward of each network, run and timed as the table says. Each takes turns with the first one.

    Args:
        alone: held while the clock runs, and not while a network is compiled.
    """
    clock: Callable[[Call], float] | None = None
    how = (table.batch, table.mode, other, table.kernels, alone)
    with precision(table.precision) as dtype:
        for network in networks:
            call = _network_call(network, device, dtype, *how)
            call()
            with alone():
                clock = clock or _clock(table.unit, device, table.mode, call, steady=True)
                cost = clock(call)
            yield cost


def _network_call(
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    batch: int,
    mode: str,
    other: OtherRuntime | None,
    kernels: bool,
    alone: Alone = nullcontext,
) -> Call:
    """A forward of a whole network."""
    net = copy.deepcopy(model).to(device).eval()
    shape = (batch, *family_of(net).input_shape(net))
    x = torch.randn(shape, device=device, dtype=dtype)
    if other is not None:
        return other.network(net, x)
    run: nn.Module = net
    if mode == "compile":
        torch.compiler.reset()
        run = compiled(optimize(net, dtype, batch, last_block=kernels, kernels=kernels, alone=alone))
    else:
        net.to(dtype)
    return torch.inference_mode()(lambda: run(x))


def predicted(cost: LatencyCost, model: nn.Module) -> dict[str, Any]:
    """What a table says of a compact model and of the dense one it came from."""
    widths = widths_of(model)
    return {
        "unit": cost.table.unit,
        "dense_predicted": cost.outside + cost.dense,
        "predicted": cost.of_widths(model, widths),
    }


def measured(
    cost: LatencyCost,
    networks: tuple[nn.Module, nn.Module] | None,
    device: torch.device,
    other: OtherRuntime | None = None,
    alone: Alone = nullcontext,
) -> dict[str, Any]:
    """What the clock says of the dense and the compact model, if this is the device of the table."""
    table = cost.table
    if networks is None or table.runtime != (other.name if other else "torch") or table.device != device_name(device):
        return {}
    try:
        dense, compact = network_costs(networks, device, table, other, alone)
    except Exception as error:  # a compiler or another runtime may raise anything, and training must not end for that
        warnings.warn(f"the network cannot be timed here: {error}", stacklevel=2)
        return {}
    return {"dense_measured": dense, "measured": compact}


def _told(costs: Iterable[float], count: int, what: str, say: Callable[[str], None]) -> Iterator[float]:
    """The costs of so many points, as they are measured; says how many are done, about ten times."""
    for number, cost in enumerate(costs, 1):
        yield cost
        if number == count or number % -(-count // 10) == 0:
            say(f"{what}: {number} of {count} points")


def _less(cost: float, gain: float) -> float:
    return max(cost - gain, 0.1 * cost)


def _grid(widths: Widths, coarse: bool) -> dict[str, list[int]]:
    """Widths to measure at. Energy takes half a second a point, and an export longer: their grids are coarse."""
    heads, neurons = widths.heads or 1, widths.neurons or 1
    return {
        "heads": _steps(heads, 3 if coarse else 8, 1),
        "qk_dim": _steps(widths.qk_dim or 1, 2 if coarse else 4, 8),
        "value_dim": _steps(widths.value_dim or 1, 2 if coarse else 4, 8),
        "neurons": _steps(neurons, 8 if coarse else 32, 8),
    }


def _steep_grid(widths: Widths) -> dict[str, list[int]]:
    """Widths to measure fused kernels at, on either side of their steps: they run dims in powers of two from 16."""
    heads, neurons = widths.heads or 1, widths.neurons or 1
    return {
        "heads": _steps(heads, 4, 1),
        "qk_dim": _powers(widths.qk_dim),
        "value_dim": _powers(widths.value_dim),
        "neurons": [*range(NEURONS, neurons, NEURONS), -(-neurons // NEURONS) * NEURONS],
    }


def _powers(most: int) -> list[int]:
    """8, powers of two and what comes after them, up to the most."""
    powers = [2**i for i in range(4, most.bit_length())]
    return sorted({min(8, most), most, *(n for p in powers for n in (p, p + 8) if n < most)})


def _steps(most: int, parts: int, multiple: int) -> list[int]:
    """About so many widths up to the whole one, in multiples, and the least."""
    every = {-(-most * i // parts // multiple) * multiple for i in range(1, parts + 1)}
    return sorted({min(multiple, most), most, *(n for n in every if 0 < n < most)})


def _hollow(model: nn.Module) -> nn.Module:
    """The model with blocks that do nothing."""
    return shrink(copy.deepcopy(model), [Widths(None, 0, 0, None)] * len(family_of(model).sites(model)))


def _check_clock(unit: str, device: torch.device, mode: str) -> None:
    if unit not in UNITS:
        raise LatencyError(f"unit must be one of {', '.join(UNITS)}; found {unit!r}")
    if mode not in MODES:
        raise LatencyError(f"mode must be one of {', '.join(MODES)}; found {mode!r}")
    if mode != "eager" and device.type != "cuda":
        raise LatencyError(f"mode {mode!r} needs a CUDA device; found {device}: measure with mode 'eager'")


def _clock(unit: str, device: torch.device, mode: str, pace: Call, steady: bool = False) -> Callable[[Call], float]:
    """What one call costs, in the unit, on the device. A CPU is held to its pace, other devices where that is asked."""
    _check_clock(unit, device, mode)
    prepare: Callable[[Call], Call] = (lambda run: graphed(run, device)) if mode != "eager" else (lambda run: run)
    if unit == "mJ":
        return _energy_clock(device, prepare)
    if device.type == "cpu" or steady:
        return _SteadyClock(device, prepare, pace)
    return lambda run: min(timings([prepare(run)], device, 2, 20)[0])  # what disturbs a clock makes it slow, never fast


class _SteadyClock:
    """Milliseconds of calls on a device whose speed changes: that of a CPU from second to second with what else its
    machine does, that of a GPU with its load.

    A call takes turns with another one that sets the pace, and its time is scaled to the pace at the start. So costs on
    one clock have the right ratios to each other, whatever the machine does between them.

    Args:
        prepare: makes of a call what is timed.
        pace: a call of the kind that is to be timed: what slows one down must slow the other.
    """

    def __init__(self, device: torch.device, prepare: Callable[[Call], Call], pace: Call) -> None:
        self.device, self.prepare, self.pace = device, prepare, prepare(pace)
        self.start = self._fastest(self.pace)[1]

    def __call__(self, run: Call) -> float:
        took, pace = self._fastest(self.prepare(run))
        return took * self.start / pace

    def _fastest(self, run: Call) -> tuple[float, float]:
        """The fastest of some calls, and of the pace beside them: a disturbance makes a call slow, never fast."""
        once = sum(ms for (ms,) in timings([run, self.pace], self.device, 2, 1))
        turns = max(20, min(round(SECONDS * 1e3 / once), 100))
        took, pace = (min(found) for found in timings([run, self.pace], self.device, 0, turns, turns))
        return took, pace


def _energy_clock(
    device: torch.device, prepare: Callable[[Call], Call], seconds: float = 0.5
) -> Callable[[Call], float]:
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode())
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception as error:
        raise LatencyError(f"{device} reports no energy ({error}); it takes an NVIDIA GPU and nvidia-ml-py") from error

    def clock(run: Call) -> float:
        call, calls = prepare(run), 0
        torch.cuda.synchronize(device)
        before, start = pynvml.nvmlDeviceGetTotalEnergyConsumption(handle), time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(10):
                call()
            calls += 10
            torch.cuda.synchronize(device)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) - before) / calls

    return clock
