"""What the gates look like in the course of the search: one line of gates.jsonl each, for the report of the run.

A snapshot is taken of the gates as they are, so training is the same with and without it.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn

from hiap.budget.controller import Controller
from hiap.nn.compact import Widths
from hiap.pruning.attach import gates_by_block
from hiap.pruning.count import Counts, expected_counts, hard_counts
from hiap.pruning.topology import Topology
from hiap.training.context import Context
from hiap.training.run_folder import GATES_FILE

__all__ = ["BINS", "SNAPSHOTS", "UNITS", "log_snapshot", "snapshot", "unpack", "whole_cost"]

SNAPSHOTS = 60  # in a search, about
BINS = 20  # of a histogram of probabilities, of equal width
UNITS = ("heads", "value_dims", "qk_dims", "ffns", "neurons")  # in the order in which decisions are packed

Masks = dict[str, "np.ndarray[Any, np.dtype[np.bool_]]"]


def whole_cost(context: Context) -> float:
    """Cost of the dense model, in the unit of the run."""
    return context.parts.dense_cost


@torch.no_grad()
def log_snapshot(
    context: Context, network: nn.Module, step: int, topology: Topology, controller: Controller | None
) -> None:
    """Add a snapshot to gates.jsonl, with the costs as shares of the dense one; on the main process alone.

    Args:
        step: steps of the search that are done.
    """
    if context.folder is None:
        return
    cost, model, schedule = context.parts.cost, context.parts.model, context.schedule
    dense = whole_cost(context)
    if step == 0:
        context.record["search_widths"] = [asdict(one) for one in topology.dense]
    line: dict[str, Any] = {
        "step": context.first + step,
        "epoch": round(step / context.per_epoch, 4),
        "temperature": schedule.temperature(step),
        "hard": context.corrected(cost.of_widths(model, topology.widths(context.config.round_to))) / dense,
    }
    with suppress(NotImplementedError):  # a cost of one's own need not be differentiable
        line["expected"] = float(cost.total(Counts(**{k: c.cpu() for k, c in vars(expected_counts(network)).items()})))
        line["expected"] = context.corrected(line["expected"]) / dense
    if controller is not None:
        known = context.parts.table_error
        line["allowed"] = known * schedule.budget(step, controller.dense_cost, controller.target) / dense
        line["target"] = known * controller.target / dense
    context.folder.log(line | snapshot(network, topology), GATES_FILE)


@torch.no_grad()
def snapshot(network: nn.Module, topology: Topology) -> dict[str, Any]:
    """The open units of every block, the probabilities of the gates, and every decision in packed form.

    Args:
        network: with its gates.
        topology: what the gates decide, or have decided.
    """
    counts = {kind: column.int().tolist() for kind, column in vars(hard_counts(topology)).items()}
    return {**counts, "histograms": _histograms(network), "decisions": _pack(topology)}


def _histograms(network: nn.Module) -> dict[str, list[int]]:
    """How many gates of each kind have a probability in each of the bins from 0 to 1."""
    found: dict[str, list[torch.Tensor]] = {}
    for kinds in gates_by_block(network):
        for kind, gate in kinds.items():
            found.setdefault(kind, []).append(gate.probability().flatten())
    return {
        kind: torch.bincount((torch.cat(parts) * BINS).long().clamp(0, BINS - 1), minlength=BINS).tolist()
        for kind, parts in found.items()
    }


def _sizes(dense: Sequence[Widths]) -> dict[str, list[int]]:
    """How many units of each kind every block of the dense model has."""
    return {
        "heads": [w.heads or 0 for w in dense],
        "value_dims": [(w.heads or 0) * w.value_dim for w in dense],
        "qk_dims": [(w.heads or 0) * w.qk_dim for w in dense],
        "ffns": [int(bool(w.neurons)) for w in dense],
        "neurons": [w.neurons or 0 for w in dense],
    }


def _pack(topology: Topology) -> str:
    """One bit for each unit, open or not, block by block within a kind; dims of a closed head are closed."""
    masks = {kind: np.zeros(sum(sizes), dtype=bool) for kind, sizes in _sizes(topology.dense).items()}
    starts = dict.fromkeys(masks, 0)
    for block, dense in zip(topology.blocks, topology.dense, strict=True):
        for head, values, queries in zip(block.heads or (), block.value_dims, block.qk_dims, strict=True):
            masks["heads"][starts["heads"] + head] = True
            masks["value_dims"][[starts["value_dims"] + head * dense.value_dim + i for i in values]] = True
            masks["qk_dims"][[starts["qk_dims"] + head * dense.qk_dim + i for i in queries]] = True
        masks["ffns"][starts["ffns"] : starts["ffns"] + 1] = block.neurons is not None and bool(dense.neurons)
        masks["neurons"][[starts["neurons"] + i for i in block.neurons or ()]] = True
        starts = {kind: start + _sizes([dense])[kind][0] for kind, start in starts.items()}
    bits = np.packbits(np.concatenate([masks[kind] for kind in UNITS]))
    return base64.b64encode(zlib.compress(bits.tobytes(), 9)).decode()


def unpack(decisions: str, dense: Sequence[Widths]) -> Masks:
    """The decisions of a snapshot by kind of unit, all blocks in a row.

    Raises:
        ValueError: they are damaged, or of a model of other widths.
    """
    sizes = {kind: sum(of_blocks) for kind, of_blocks in _sizes(dense).items()}
    total = sum(sizes.values())
    try:
        raw = zlib.decompress(base64.b64decode(decisions, validate=True))
    except zlib.error as error:
        raise ValueError(f"packed decisions are damaged: {error}") from error
    if len(raw) != -(-total // 8):
        raise ValueError(f"packed decisions have {len(raw)} bytes, the dense model has {total} units")
    bits = np.unpackbits(np.frombuffer(raw, dtype=np.uint8), count=total).astype(bool)
    ends = np.cumsum([0, *(sizes[kind] for kind in UNITS)])
    return {kind: bits[start:end] for kind, (start, end) in zip(UNITS, pairwise(ends.tolist()), strict=True)}
