"""A budget in milliseconds (or millijoules): a table of what the parts of a network cost, and a cost made of it.

A table is JSON, measured on one machine and used on another (`hiap.speed.measure` makes one). `LatencyCost`
interpolates it and adds up blocks.
"""

from __future__ import annotations

import itertools
import json
import os
import reprlib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from hiap.atomic import write_text
from hiap.budget.cost import Cost
from hiap.budget.deploy import MODES, PRECISIONS, RUNTIMES
from hiap.errors import LatencyError
from hiap.models.family import Site
from hiap.models.registry import family_of, sites
from hiap.nn.compact import Widths
from hiap.pruning.count import Counts

__all__ = ["AXES", "UNITS", "LatencyCost", "LatencyError", "LatencyTable"]

FORMAT = 1
UNITS = ("ms", "mJ")
LARGEST = 2**26  # bytes of a file
LONGEST = 4096  # widths of an axis
WIDEST = 10**9  # of them, and of a batch
MOST = 1e12  # ms or mJ
SHOWN = 10  # wrong fields in a message
AXES = ("heads", "qk_dim", "value_dim", "neurons")


@dataclass(frozen=True)
class LatencyTable:
    """What the parts of a network cost on a device.

    Attributes:
        unit: "ms" or "mJ", of one forward of a batch.
        device, precision, batch, mode: what it was measured on; `mode` is one of MODES.
        dim, tokens: of the network.
        heads, qk_dim, value_dim, neurons: the grid.
        attention: cost of a branch by heads, q/k dims and value dims; `ffn` by neurons; `outside` of all else.
        dense: the whole dense network, measured.
        last_attention, last_ffn: the same of the last block, where it computes only the tokens that the head reads.
        neuron_step: neurons run in multiples of it.
        kernels: networks run on fused kernels.
    """

    unit: str
    device: str
    precision: str
    batch: int
    mode: str
    model: str
    dim: int
    tokens: int
    heads: list[int]
    qk_dim: list[int]
    value_dim: list[int]
    neurons: list[int]
    attention: list[list[list[float]]]
    ffn: list[float]
    outside: float
    dense: float
    torch_version: str = ""
    runtime: str = "torch"  # one of RUNTIMES
    last_attention: list[list[list[float]]] | None = None
    last_ffn: list[float] | None = None
    neuron_step: int = 1
    kernels: bool = False

    def check(self) -> None:
        """Raise a LatencyError with everything that is wrong with the table itself."""
        wrong = []
        for name, known in (("unit", UNITS), ("precision", PRECISIONS), ("mode", tuple(MODES)), ("runtime", RUNTIMES)):
            if getattr(self, name) not in known:
                wrong.append(f"{name} must be one of {', '.join(known)}; found {self._shown(name)}")
        for name in ("device", "model", "torch_version"):
            if not isinstance(getattr(self, name), str):
                wrong.append(f"{name} must be text; found {self._shown(name)}")
        if self.device == "":
            wrong.append("device must be named")
        if type(self.kernels) is not bool:
            wrong.append(f"kernels must be true or false; found {self._shown('kernels')}")
        if (self.last_attention is None) != (self.last_ffn is None):
            wrong.append("last_attention and last_ffn must be given together")
        for name in ("batch", "dim", "tokens", "neuron_step"):
            if type(getattr(self, name)) is not int:
                wrong.append(f"{name} must be a whole number; found {self._shown(name)}")
            elif not 1 <= getattr(self, name) <= WIDEST:
                wrong.append(f"{name} must be at least 1 and at most {WIDEST}; found {self._shown(name)}")
        axes = [name for name in AXES if not _rises(getattr(self, name))]
        wrong += [f"{name} must be rising widths from 1; found {self._shown(name)}" for name in axes]
        if not axes:
            shape = (len(self.heads), len(self.qk_dim), len(self.value_dim))
            for last in ("", "last_") if self.last_attention is not None and self.last_ffn is not None else ("",):
                wrong += self._wrong_costs(f"{last}attention", shape, f"{list(shape)} numbers")
                wrong += self._wrong_costs(f"{last}ffn", (len(self.neurons),), f"{len(self.neurons)} numbers")
        wrong += [one for name in ("outside", "dense") for one in self._wrong_costs(name, (), "one number")]
        if wrong:
            raise LatencyError("the table is wrong:\n  " + "\n  ".join(wrong))

    def _wrong_costs(self, name: str, shape: tuple[int, ...], said: str) -> list[str]:
        """What is wrong with a field of costs, in a line; nothing if it is right."""
        costs = getattr(self, name)
        found = _shape(costs, len(AXES))
        if found is None:
            return [f"{name}: costs must be numbers, in rows of one length; found {self._shown(name)}"]
        if found != shape:
            return [f"{name} must be {said}; found {list(found)}"]
        odd = next((one for one in _flat(costs) if not 0 < one < MOST), None)
        return [] if odd is None else [f"{name} must be positive and finite, below {MOST:g}; found {reprlib.repr(odd)}"]

    def _shown(self, name: str) -> str:
        return reprlib.repr(getattr(self, name))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; the file appears whole or not at all."""
        write_text(path, json.dumps({"format": FORMAT, **asdict(self)}) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyTable:
        """Read what `save` wrote.

        Raises:
            LatencyError: what is wrong with it.
        """
        name = os.fspath(path)
        try:
            with open(path, "rb") as file:
                content = file.read(LARGEST + 1)
            data = json.loads(content) if len(content) <= LARGEST else None
        except (ValueError, OSError, RecursionError) as error:
            raise LatencyError(f"{name} is not a table of `hiap measure`: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != FORMAT:
            raise LatencyError(f"{name} is not a table of `hiap measure` in format {FORMAT}")
        own = {field.name: field.default is MISSING for field in fields(cls)}
        wrong = [f"{one} is missing" for one, needed in own.items() if needed and one not in data]
        wrong += [f"{reprlib.repr(one)} is not a field of a table" for one in data if one not in own]
        if wrong:
            raise LatencyError(f"{name}: the table is wrong:\n  " + "\n  ".join(wrong[:SHOWN]))
        table = cls(**data)
        try:
            table.check()
        except LatencyError as error:
            raise LatencyError(f"{name}: {error}") from error
        return table


def _rises(axis: Any) -> bool:
    """Whether it is a list of whole numbers, each greater than the one before."""
    return (
        isinstance(axis, list)
        and 0 < len(axis) <= LONGEST
        and all(type(width) is int for width in axis)
        and axis[0] >= 1
        and axis[-1] <= WIDEST
        and all(a < b for a, b in itertools.pairwise(axis))
    )


def _shape(costs: Any, depth: int) -> tuple[int, ...] | None:
    """Of numbers in lists of one length, so many deep at most; None of anything else."""
    if type(costs) in (int, float):
        return ()
    if not isinstance(costs, list) or depth == 0:
        return None
    shapes = {_shape(one, depth - 1) for one in costs} or {()}
    inner = shapes.pop()
    return None if inner is None or shapes else (len(costs), *inner)


def _flat(costs: Any) -> Iterator[float]:
    """The numbers in lists of lists."""
    if isinstance(costs, list):
        for one in costs:
            yield from _flat(one)
    else:
        yield costs


class LatencyCost(Cost):
    """Cost of a network by a table: interpolated between its grid points, additive over blocks, never falling.

    All of the blocks counts as prunable, gated or not. A narrow branch costs nearly what a wide one does.

    Args:
        model: a gated or ungated model of the table's width and number of tokens.
        device, precision: refuse a table of another device or precision; by default any is taken.

    Raises:
        LatencyError: the table does not fit the model, the device or the precision.
    """

    proportional = False

    def __init__(
        self, model: nn.Module, table: LatencyTable, device: str | None = None, precision: str | None = None
    ) -> None:
        table.check()
        _check_fit(model, table, device, precision)
        self.table, self.unit = table, table.unit
        self.outside = self.fixed = table.outside
        self._inner = (_from_zero(table.attention), _from_zero(table.ffn))
        self._last = self._inner
        if table.last_attention is not None and table.last_ffn is not None:
            self._last = (_from_zero(table.last_attention), _from_zero(table.last_ffn))
        self._axes = [_axis([0, *table.heads]), _axis(table.qk_dim), _axis(table.value_dim)]
        self._neurons = [_axis([0, *table.neurons])]
        self._known: dict[tuple[bool | int, ...], float] = {}
        found = sites(model)
        self._last_name = found[-1].name
        self.dense = sum(self.block(site, site.widths) for site in found)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        model: nn.Module,
        device: str | None = None,
        precision: str | None = None,
    ) -> LatencyCost:
        """The cost of a model by the table in a file."""
        return cls(model, LatencyTable.load(path), device, precision)

    def block(self, site: Site, widths: Widths) -> float:
        """Cost of a block; below the grid a branch costs what it does at its edge."""
        last, table, total = site.name == self._last_name, self.table, 0.0
        if widths.heads:
            total += self._at(last, max(widths.heads, table.heads[0]), widths.qk_dim, widths.value_dim)
        if widths.neurons:
            run = -(-widths.neurons // table.neuron_step) * table.neuron_step
            total += self._at(last, max(run, table.neurons[0]))
        return total

    def _at(self, last: bool, *widths: int) -> float:
        key = (last, *widths)
        if key not in self._known:
            attention, ffn = self._last if last else self._inner
            values, axes = (ffn, self._neurons) if len(widths) == 1 else (attention, self._axes)
            self._known[key] = float(interpolate(values, axes, torch.tensor(widths, dtype=torch.float64).unbind()))
        return self._known[key]

    def macro(self, counts: Counts) -> Tensor:
        """Cost of the open heads were their value dims as few as the grid has."""
        rows = self._blocks(counts)
        return torch.stack([self._heads(costs, h, v, q, least=True) for (costs, _), h, v, q, _ in rows]).sum()

    def micro(self, counts: Counts) -> Tensor:
        """Cost of their value dims beyond that, and of neurons."""
        found = []
        for (attention, ffn), h, v, q, n in self._blocks(counts):
            found.append(self._heads(attention, h, v, q) - self._heads(attention, h, v, q, least=True))
            found.append(interpolate(ffn.to(n), [axis.to(n) for axis in self._neurons], [n]))
        return torch.stack(found).sum()

    def _blocks(self, counts: Counts) -> Iterator[tuple[tuple[Tensor, Tensor], Tensor, Tensor, Tensor, Tensor]]:
        """For each block its costs (attention and FFN), heads, value dims, q/k dims and neurons."""
        costs = [self._inner] * (len(counts.heads) - 1) + [self._last]
        return zip(costs, counts.heads, counts.value_dims, counts.qk_dims, counts.neurons, strict=True)

    def _heads(self, costs: Tensor, heads: Tensor, values: Tensor, queries: Tensor, least: bool = False) -> Tensor:
        """Cost of a branch with these expected heads and dims in all."""
        axes = [axis.to(heads) for axis in self._axes]
        several = heads.clamp(min=torch.finfo(heads.dtype).tiny)
        value_dim = axes[2][0] if least else values / several
        return interpolate(costs.to(heads), axes, [heads, queries / several, value_dim])


def _check_fit(model: nn.Module, table: LatencyTable, device: str | None, precision: str | None) -> None:
    wrong = [
        f"it is for {name} {found!r}; needed is {wanted!r}"
        for name, found, wanted in (("device", table.device, device), ("precision", table.precision, precision))
        if wanted is not None and found != wanted
    ]
    family = family_of(model)
    found, tokens = family.sites(model), family.tokens(model)
    if (table.dim, table.tokens) != (found[0].dim, tokens):
        wrong.append(
            f"it is for width {table.dim} and {table.tokens} tokens; the model has {found[0].dim} and {tokens}"
        )
    for name in AXES:
        most, most_found = max(getattr(site.widths, name) or 0 for site in found), getattr(table, name)[-1]
        if most_found < most:
            wrong.append(f"its grid of {name} ends at {most_found}; the model has {most}")
    if wrong:
        raise LatencyError(
            "the table does not fit:\n  " + "\n  ".join(wrong) + "\nMeasure one for this model with `hiap measure`"
        )


def interpolate(values: Tensor, axes: Sequence[Tensor], at: Sequence[Tensor]) -> Tensor:
    """Multilinear interpolation at one point; outside the grid its edge counts."""
    for axis, x in zip(axes, at, strict=True):
        if len(axis) == 1:
            values = values[0]
            continue
        x = x.clamp(float(axis[0]), float(axis[-1]))
        high = int(torch.searchsorted(axis, x.detach()).clamp(1, len(axis) - 1))
        share = (x - axis[high - 1]) / (axis[high] - axis[high - 1])
        values = values[high - 1] * (1 - share) + values[high] * share
    return values


def _axis(widths: Sequence[int]) -> Tensor:
    return torch.tensor([float(width) for width in widths], dtype=torch.float64)


def _from_zero(costs: Any) -> Tensor:
    """Costs, made to rise along every axis, and 0 before the first: a width costs no more than a greater one."""
    values = torch.tensor(costs, dtype=torch.float64)
    for dim in range(values.ndim):
        values = values.flip(dim).cummin(dim).values.flip(dim)
    return torch.cat([torch.zeros_like(values[:1]), values])
