"""One line of a records file: what was run, on what, and what came out.

Records are JSON lines. `read` checks the names and types of every field, so that a typing error in a file is found
where it is, not in a table made from it.
"""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import nn

from hiap.nn.compact import Widths
from hiap.pruning.extract import shrink
from hiap.speed.clock import materialise

CLOCK: Literal["clock"] = "clock"
SPEED: Literal["speed"] = "speed"
OLD_NAMES = {"arm": "method"}  # records written before the fields got their present names


@dataclass(frozen=True)
class Record:
    """A run, or a measurement of its speed. What was not measured is None.

    Attributes:
        start: the dense model: `vit_tiny`, `dinov2_small`, or a timm name with input size and data.
        weights: file of the dense weights and the first digits of its SHA-256, or `pretrained`.
        set: options that differ from the usual ones, as given to `--set`; empty for none. One of several sizes of a run
            names those before it, with their epochs: `after=70%:5,50%:5`.
        target: the budget: a share of the MACs, or a time and the latency table it is read from.
        epochs: length of the whole training; for one of several sizes, of those before it as well.
        like: the method and epochs whose training time this run was given; None for equal epochs.
        method: the pruning method, a name of `methods.METHODS`.
        lr: peak learning rate.
        seed: seed of the run.
        final: True if trained on all training images and scored on the validation set; False if scored on the held-out
            tenth of the training images and trained on the rest; `clock` if training steps were timed alone on the
            device; `speed` if a forward was.
        device: name of the GPU or CPU.
        torch: version of PyTorch.
        commit: commit of the code that ran.
        top1: top-1 accuracy after training (%); of nearest neighbours where features are learned (objective=features).
        top1_before: top-1 of a network that is pruned first and trained then, before the training (%).
        dense_top1: top-1 of the dense model, measured in the same way (%).
        error: squared distance of the pooled output from the dense model's, in percent of its variance, on the images
            that are scored on; where features are learned.
        soft_top1: top-1 at the freeze with the gates as they are (%).
        hard_top1: top-1 at the freeze with every gate open or closed (%).
        undecided: share of gates with a probability between 0.05 and 0.95 at the freeze.
        expected_macs: MACs that the gates expect at the freeze, as a share of the dense model's.
        macs: MACs of the pruned network for one image.
        dense_macs: MACs of the dense model for one image.
        table_error: how many times the time by the latency table the network took when it was chosen, if that was more
            than one percent off.
        search: share of the steps before the freeze; 0 where nothing is searched.
        epoch_s: seconds of the fastest epoch of each stage.
        trial_epochs: length of the runs that chose the learning rate, if it is not `epochs`.
        widths: heads, q/k dims, value dims and neurons of every block; None where a method changes other shapes.
        ms: milliseconds of a forward of `batch` images.
        dense_ms: the same of timm's dense model, timed beside it.
        dense_optimised_ms: the same of the dense model after `hiap.optimize`.
        batch: images of the timed forward.
        precision: precision of the timed forward.
        mode: how the timed forward runs: `eager`, `graph` or `compile+graph`; or in which other runtime.
    """

    start: str
    weights: str
    set: str
    target: str
    epochs: int
    like: str | None
    method: str
    lr: float
    seed: int
    final: bool | Literal["clock", "speed"]
    device: str
    torch: str | None = None
    commit: str | None = None
    top1: float | None = None
    top1_before: float | None = None
    dense_top1: float | None = None
    error: float | None = None
    soft_top1: float | None = None
    hard_top1: float | None = None
    undecided: float | None = None
    expected_macs: float | None = None
    macs: int | None = None
    dense_macs: int | None = None
    table_error: float | None = None
    search: float | None = None
    epoch_s: dict[str, float] | None = None
    trial_epochs: int | None = None
    widths: list[dict[str, int | None]] | None = None
    ms: float | None = None
    dense_ms: float | None = None
    dense_optimised_ms: float | None = None
    batch: int | None = None
    precision: str | None = None
    mode: str | None = None

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Record:
        """A record from the fields of a JSON line, old names included.

        Raises:
            ValueError: a field is unknown, missing, given twice or of the wrong type.
        """
        known, values = _types(), {}
        for name, value in given.items():
            new = OLD_NAMES.get(name, name)
            if new not in known:
                raise ValueError(f"unknown field {name!r}; known: {', '.join(known)}")
            if new in values:
                raise ValueError(f"{new!r} is given twice, once under its old name")
            if not _fits(value, known[new]):
                raise ValueError(f"{name!r} must be {_WRITTEN[new]}; found {value!r}")
            values[new] = value
        if missing := [one.name for one in fields(cls) if _required(one) and one.name not in values]:
            raise ValueError(f"missing fields: {', '.join(missing)}")
        return cls(**values)

    def to_json(self) -> str:
        """One line: the required fields, and of the others those that were measured."""
        kept = (one for one in fields(self) if _required(one) or getattr(self, one.name) is not None)
        return json.dumps({one.name: getattr(self, one.name) for one in kept})

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells runs apart: two records with one key are of the same run."""
        return tuple(getattr(self, name) for name in KEY)


KEY = ("start", "weights", "set", "target", "epochs", "like", "method", "lr", "seed", "final")


_WRITTEN = {one.name: str(one.type) for one in fields(Record)}  # types as they stand above


def read(path: Path) -> list[Record]:
    """All records of a file; none if there is no such file.

    Raises:
        ValueError: a line is no record; the message has the file and the line.
    """
    records = []
    for number, line in enumerate(path.read_text().splitlines() if path.exists() else [], 1):
        try:
            given = json.loads(line)
            if not isinstance(given, dict):
                raise ValueError(f"a record is a JSON object; found {line[:40]}")
            records.append(Record.from_dict(given))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return records


def append(path: Path, record: Record) -> None:
    """Add a record to a file, in one write: several processes may share it."""
    with path.open("a") as file:
        file.write(record.to_json() + "\n")


def network_of(widths: Sequence[Mapping[str, Any]], dense: nn.Module) -> nn.Module:
    """A network of recorded widths, with random weights: speed ignores them."""
    network = shrink(copy.deepcopy(dense), [Widths(**one) for one in widths])
    return materialise(network, next(dense.parameters()).device).eval()


@cache
def _types() -> dict[str, Any]:
    hints = get_type_hints(Record)
    return {one.name: hints[one.name] for one in fields(Record)}


def _required(one: Any) -> bool:
    return one.default is not None


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value has this type. A whole number is a float; True is no number."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
