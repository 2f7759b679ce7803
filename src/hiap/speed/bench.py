"""How fast networks are, side by side in one run: precisions, batches and modes; speed-ups against the MACs saved.

Times are those of one forward of a batch that is already on the device. All networks of a comparison take turns within
a run, so a slow moment of the machine meets all alike; what counts is their ratio.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hiap.budget.deploy import PRECISIONS
from hiap.errors import InputError
from hiap.models.registry import family_of, widths_of
from hiap.pruning.count import macs
from hiap.pruning.extract import provenance_of, shrink
from hiap.pruning.merging import unmerged
from hiap.pruning.topology import Topology
from hiap.speed.clock import DTYPES, Call, device_name, graphed, materialise, precision, timings
from hiap.speed.eight_bits import EightBits, check_eight_bits
from hiap.speed.fused import check_available
from hiap.speed.inference import compiled, optimize

__all__ = [
    "WAYS",
    "Row",
    "attention_backend",
    "bench",
    "dense_like",
    "find_topology",
    "record",
    "runner",
    "spread",
    "table",
]

WAYS = ("eager", "compile", "graph", "compile+graph")
FOOTNOTE = (
    "share = speed-up / MAC ratio, the part of the cut in MACs that is realised as speed",
    "gain  = (speed-up - 1) / (MAC ratio - 1), the same, with 0 % for a network that is no faster",
    "MAC ratio = MACs of the first network / MACs of the row",
    "spread = ms between the quartiles of the rounds",
)


@dataclass(frozen=True)
class Row:
    """One network in one setting."""

    network: str
    precision: str
    batch: int
    mode: str
    ms: float
    spread_ms: float  # between the quartiles of the rounds
    images_per_s: float
    macs: int
    attention: str


def runner(model: nn.Module, x: Tensor, mode: str) -> Call:
    """A call that runs the model on these images once.

    Args:
        mode: "eager", "compile" (torch.compile), "graph" (a CUDA graph of the eager kernels) or "compile+graph".
    """
    if mode not in WAYS:
        raise InputError(f"mode must be one of {', '.join(WAYS)}; found {mode!r}")
    model = compiled(model) if "compile" in mode else model
    if "graph" not in mode:
        return lambda: model(x)
    return graphed(lambda: model(x), x.device)


def bench(
    networks: Mapping[str, nn.Module],
    device: torch.device,
    batches: Sequence[int] = (1, 256),
    precisions: Sequence[str] = ("fp32", "bf16"),
    modes: Sequence[str] = ("eager", "compile"),
    warmup: int = 10,
    repeat: int = 50,
    say: Callable[[str], None] = lambda text: None,
    kernels: bool = False,
    quantize: str | None = None,
) -> list[Row]:
    """Time networks of one input size in every setting. The networks are not changed.

    Args:
        kernels: time each network on fused kernels too (`optimize`); half precision only.
        quantize: time each network with 8-bit weights too, "int8" or "fp8" (bf16 only), by torchao.

    Raises:
        ValueError: an unknown precision or mode, one the device does not have, or networks of different inputs.
    """
    for given, known, what in ((precisions, PRECISIONS, "precision"), (modes, WAYS, "mode")):
        wrong = [name for name in given if name not in known]
        if wrong:
            raise InputError(f"unknown {what} {wrong[0]!r}; known: {', '.join(known)}")
    if not batches or min(*batches, warmup + 1, repeat) < 1:
        raise InputError(f"batches and runs must be at least 1; found {list(batches)} and {repeat}")
    inputs = {key: family_of(model).input_shape(model) for key, model in networks.items()}
    if len(set(inputs.values())) > 1:
        raise InputError(f"networks of different inputs cannot be compared; found {inputs}")
    if device.type != "cuda" and any("graph" in mode for mode in modes):
        raise InputError(f"CUDA graphs need a CUDA device; found {device}")
    halves = [name for name in precisions if DTYPES[name].itemsize == 2]
    for model in networks.values() if kernels else ():
        check_available(model, device, DTYPES[halves[0] if halves else precisions[0]])
    if quantize:
        check_eight_bits(quantize, device)
        if quantize == "fp8" and "bf16" not in precisions:
            raise InputError(f"fp8 is timed beside bf16; found the precisions {', '.join(precisions)}: add bf16")
    rows = []
    costs = {name: macs(model) for name, model in networks.items()}
    for name in precisions:
        with precision(name) as dtype, torch.no_grad():
            cast: dict[str, nn.Module] = {}
            cost_of: dict[str, int] = {}
            for key, model in networks.items():
                own = copy.deepcopy(model).to(device).eval()
                forms = {key: own, f"{key}, optimised": optimize(own, dtype, max(batches))}
                if kernels and name in halves:
                    forms[f"{key}, fused"] = optimize(own, dtype, max(batches), kernels=True, say=say)
                if quantize and (quantize == "int8" or name == "bf16"):
                    rounded = forms[f"{key}, {quantize}"] = EightBits(own, quantize, device, dtype)
                    say(f"{key}: {rounded.rounded} layers in {quantize}, {rounded.left} in {name}")
                own.to(dtype)  # last: weights are folded before they are cast
                cast |= forms
                cost_of |= dict.fromkeys(forms, costs[key])
            for batch in batches:
                x = torch.randn((batch, *next(iter(inputs.values()))), device=device, dtype=dtype)
                backends = {key: attention_backend(model, x) for key, model in cast.items()}
                for mode in modes:
                    say(f"{name}, batch {batch}, {mode}")
                    torch.compiler.reset()
                    with torch.inference_mode():
                        runs = [runner(model, x, mode) for model in cast.values()]
                        times = timings(runs, device, warmup, repeat)
                    for key, found in zip(cast, times, strict=True):
                        ms = statistics.median(found)
                        cost, speed = cost_of[key], 1e3 * batch / ms
                        rows.append(Row(key, name, batch, mode, ms, spread(found), speed, cost, backends[key]))
                    del runs
    return rows


def spread(found: Sequence[float]) -> float:
    """Milliseconds between the quartiles of rounds."""
    if len(found) < 2:
        return 0.0
    quartiles = statistics.quantiles(found, n=4)
    return quartiles[2] - quartiles[0]


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.name())
        return func(*args, **(kwargs or {}))


def attention_backend(model: nn.Module, x: Tensor) -> str:
    """The kernels of scaled dot-product attention that an eager forward really uses, by the operators that run."""
    with _Operators() as operators:
        model(x)
    used = [name for name in operators.names if "scaled_dot_product" in name]
    found = [kind for kind in ("cudnn", "flash", "efficient") if any(kind in name for name in used)]
    found += ["fused"] * ("hiap::attend" in operators.names)
    return "+".join(found) or "math"


def table(rows: Sequence[Row], base: str) -> str:
    """The rows as text, each against the base network in the same setting; of several modes also the fastest."""
    width = max(len(row.network) for row in rows)
    lines = [f"{'':{width}} type batch mode                ms spread  images/s  speed-up share gain attention"]
    settings = {(row.precision, row.batch): None for row in rows}
    for setting in settings:
        own = [row for row in rows if (row.precision, row.batch) == setting]
        for row in own:
            reference = next(r for r in own if r.network == base and r.mode == row.mode)
            lines.append(_line(row, reference, width))
        if len({row.mode for row in own}) > 1:
            best = {name: min((r for r in own if r.network == name), key=lambda r: r.ms) for name in _names(own)}
            lines.append("each in its fastest mode:")
            lines += [_line(row, best[base], width) for row in best.values()]
        lines.append("")
    return "\n".join([*lines, *FOOTNOTE] if len({row.macs for row in rows}) > 1 else lines[:-1])


def _names(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row.network for row in rows))


def _line(row: Row, reference: Row, width: int) -> str:
    speed, cut = reference.ms / row.ms, reference.macs / row.macs
    realised = f"{speed / cut:5.0%}" + (f" {(speed - 1) / (cut - 1):4.0%}" if cut > 1 else "     ")
    return (
        f"{row.network:{width}} {row.precision:4} {row.batch:5} {row.mode:13} {row.ms:8.3f} {row.spread_ms:6.3f} "
        f"{row.images_per_s:9,.0f} {speed:8.2f}x {realised} {row.attention}"
    )


def record(rows: Sequence[Row], device: torch.device, options: Mapping[str, Any]) -> dict[str, Any]:
    """Everything about a measurement, as JSON values."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "options": dict(options),
        "rows": [asdict(row) for row in rows],
    }


def dense_like(model: nn.Module) -> nn.Module:
    """The dense network a compact one came from, with random weights (speed ignores them)."""
    provenance = provenance_of(model)
    if provenance is None:
        raise InputError("the model is not a compact one, so there is no dense model to compare it with")
    model = unmerged(model)
    family, dense = family_of(model), provenance.dense
    result = family.build_dense(family.describe(model, provenance.recipe), dense)
    whole = tuple(widths_of(result)) == dense
    return materialise(result if whole else shrink(result, dense), torch.device("cpu")).eval()


def find_topology(name: str) -> Topology:
    """A topology from a file, or one that comes with the package by its name."""
    shipped = {entry.name.removesuffix(".json"): entry for entry in (files("hiap") / "topologies").iterdir()}
    if name in shipped:
        return Topology.loads(shipped[name].read_text(encoding="utf-8"), name)
    if not Path(name).is_file():
        raise InputError(f"no topology and no file {name!r}; included topologies: {', '.join(sorted(shipped))}")
    return Topology.load(name)
