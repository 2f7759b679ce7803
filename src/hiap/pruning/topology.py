"""What is kept of a network, block by block: the result of hardening the gates, and the input of extraction.

In a block, `heads` and `neurons` are None where the whole branch is gone, and empty where the branch is open but has
no unit: its output is then the bias of `proj` or `fc2`. A head without value dims is a closed head and is never listed;
a head without q/k dims attends uniformly.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from hiap.atomic import write_text
from hiap.errors import InputError, TopologyError
from hiap.models.family import Site
from hiap.models.registry import sites, widths_of
from hiap.nn.compact import Widths
from hiap.nn.gates import START_LOGIT
from hiap.nn.rotary import by_dim, by_pair, pair_of
from hiap.pruning.attach import gates, gates_by_block, is_gated

__all__ = ["BlockTopology", "Topology", "harden", "set_topology"]

Units: TypeAlias = "int | Sequence[int]"  # a count (the first n units) or the indices themselves

FORMAT = 1
UNITS_LIMIT = 1 << 22  # heads, dims and neurons of a whole model; ViT-22B has 1.8 million


@dataclass(frozen=True)
class BlockTopology:
    """What one block keeps; `value_dims` and `qk_dims` hold one tuple of indices for each kept head."""

    heads: tuple[int, ...] | None
    value_dims: tuple[tuple[int, ...], ...]
    qk_dims: tuple[tuple[int, ...], ...]
    neurons: tuple[int, ...] | None

    def widths(self, dense: Widths, round_to: int = 1) -> Widths:
        """The widths of the extracted block: ragged dims padded to the widest head, then to a multiple.

        Padding never exceeds the dense width. Where no head has a q/k dim, one zero dim is left: its scores are
        all equal, which is uniform attention.
        """
        heads = None if self.heads is None else len(self.heads)
        neurons = None if self.neurons is None else _round_up(len(self.neurons), round_to, dense.neurons or 0)
        if not heads:
            return Widths(heads, 0, 0, neurons)
        value_dim = max(len(dims) for dims in self.value_dims)
        qk_dim = max(1, *(len(dims) for dims in self.qk_dims))
        return Widths(
            heads,
            _round_up(qk_dim, round_to, dense.qk_dim),
            _round_up(value_dim, round_to, dense.value_dim),
            neurons,
        )


def _round_up(count: int, multiple: int, limit: int) -> int:
    return min(-(-count // multiple) * multiple, limit)


@dataclass(frozen=True)
class Topology:
    """What is kept of every block of a model, with the dense widths it refers to."""

    blocks: tuple[BlockTopology, ...]
    dense: tuple[Widths, ...]

    @classmethod
    def from_counts(
        cls,
        model: nn.Module,
        heads: Sequence[Units | None] | None = None,
        neurons: Sequence[Units | None] | None = None,
        value_dims: Sequence[Units | Sequence[Units]] | None = None,
        qk_dims: Sequence[Units | Sequence[Units]] | None = None,
    ) -> Topology:
        """A topology from one entry a block; what is not given is kept whole.

        Args:
            heads: how many (the first ones) or which; 0 leaves the bias of `proj`, None removes the branch.
            neurons: likewise; 0 leaves the bias of `fc2`, None removes the branch.
            value_dims: how many in every kept head, or a list with one entry (count or indices) a kept head.
            qk_dims: likewise. Where rotary positions pair them, a count means the first pairs.

        Raises:
            TopologyError: naming block and entry.
        """
        dense = tuple(widths_of(model))
        columns = {"heads": heads, "neurons": neurons, "value_dims": value_dims, "qk_dims": qk_dims}
        for name, column in columns.items():
            if column is not None and len(column) != len(dense):
                raise TopologyError(f"{name} has {len(column)} entries; the model has {len(dense)} blocks")
        entries = [
            {name: column[i] for name, column in columns.items() if column is not None} for i in range(len(dense))
        ]
        for entry, site in zip(entries, sites(model), strict=True):
            if "qk_dims" in entry and site.pairs is not None:
                heads = _plain(entry.get("heads", site.widths.heads))
                entry["qk_dims"] = _first_pairs(_plain(entry["qk_dims"]), heads, site)
        return cls._parse(entries, dense)

    @classmethod
    def _parse(cls, entries: Sequence[dict[str, Any]], dense: tuple[Widths, ...]) -> Topology:
        blocks = tuple(
            _parse_block(i, entry, widths) for i, (entry, widths) in enumerate(zip(entries, dense, strict=True))
        )
        return cls(blocks, dense)

    def to_json(self) -> dict[str, Any]:
        """JSON values; a prefix of the units is written as its length."""
        return {
            "format": FORMAT,
            "dense": [vars(widths) for widths in self.dense],
            "blocks": [
                {
                    "heads": _pack(block.heads),
                    "value_dims": _pack_heads(block.value_dims),
                    "qk_dims": _pack_heads(block.qk_dims),
                    "neurons": _pack(block.neurons),
                }
                for block in self.blocks
            ],
        }

    @classmethod
    def from_json(cls, data: Any) -> Topology:
        """The inverse of `to_json`.

        Raises:
            TopologyError: what is missing or does not fit.
        """
        if not isinstance(data, dict) or "blocks" not in data or "dense" not in data:
            raise TopologyError("not a topology: expected an object with 'format', 'dense' and 'blocks'")
        if data.get("format") != FORMAT:
            raise TopologyError(f"topology format {data.get('format')!r} is unknown; this version reads {FORMAT}")
        try:
            dense = tuple(Widths(**widths) for widths in data["dense"])
            if not all(value is None or (_is_int(value) and value >= 0) for one in dense for value in astuple(one)):
                raise InputError("dense widths must be numbers")
            units = sum((w.heads or 0) * (1 + w.qk_dim + w.value_dim) + (w.neurons or 0) for w in dense)
            entries = [dict(entry) for entry in data["blocks"]]
        except (TypeError, ValueError) as error:
            raise TopologyError(f"a topology entry has the wrong shape: {error}") from error
        if units > UNITS_LIMIT:
            raise TopologyError(f"the dense widths have {units} units; at most {UNITS_LIMIT} are read")
        if len(entries) != len(dense):
            raise TopologyError(f"{len(entries)} blocks and {len(dense)} dense widths: the numbers must agree")
        return cls._parse(entries, dense)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON, one block a line; the file appears whole or not at all."""
        data = self.to_json()
        lines = ",\n".join("  " + json.dumps(block) for block in data.pop("blocks"))
        head = json.dumps(data, indent=None)[:-1]
        write_text(path, f'{head}, "blocks": [\n{lines}\n]}}\n')

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Topology:
        """Read what `save` wrote."""
        return cls.loads(Path(path).read_bytes(), os.fspath(path))

    @classmethod
    def loads(cls, text: str | bytes, source: str = "the text") -> Topology:
        """Read JSON; `source` names it in errors."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TopologyError(f"{source} is not valid JSON: {error}") from error
        return cls.from_json(data)

    def widths(self, round_to: int = 1) -> list[Widths]:
        """The widths of the extracted blocks."""
        return [block.widths(dense, round_to) for block, dense in zip(self.blocks, self.dense, strict=True)]

    def check(self, model: nn.Module) -> None:
        """Raise a TopologyError unless the topology was made for a model of these widths."""
        found = tuple(widths_of(model))
        if len(found) != len(self.dense):
            raise TopologyError(f"the topology has {len(self.dense)} blocks, the model {len(found)}")
        for i, (expected, widths) in enumerate(zip(self.dense, found, strict=True)):
            if expected != widths:
                raise TopologyError(f"block {i}: the topology is for {expected}, the model has {widths}")
        for i, (block, site) in enumerate(zip(self.blocks, sites(model), strict=True)):
            for head, kept in zip(block.heads or (), block.qk_dims, strict=True):
                _check_pairs(f"block {i}, head {head}", kept, site)


def _first_pairs(units: Any, heads: Any, site: Site) -> Any:
    """The q/k dims of a block as they are given, but for counts: those become the dims of the first pairs."""
    dims, pairs = site.widths.qk_dim, site.pairs

    def first(one: Any) -> Any:
        whole = pairs is None or not _is_int(one) or one % 2 or not 0 <= one < dims
        return one if whole else [dim for dim in range(dims) if pair_of(dim, dims, pairs or "") < one // 2]

    if _is_int(units):
        units = [units] * (heads if _is_int(heads) else len(heads or ()))
    return [first(_plain(one)) for one in units] if isinstance(units, Sequence) else units


def _check_pairs(where: str, kept: Sequence[int], site: Site) -> None:
    if site.pairs is None:
        return
    halves = Counter(pair_of(dim, site.widths.qk_dim, site.pairs) for dim in kept)
    broken = [pair for pair, dims in halves.items() if dims == 1 and pair < site.widths.qk_dim // 2]
    if broken:
        lone = next(dim for dim in kept if pair_of(dim, site.widths.qk_dim, site.pairs) == broken[0])
        other = "2i and 2i + 1" if site.pairs == "adjacent" else f"i and i + {site.widths.qk_dim // 2}"
        raise TopologyError(
            f"{where}: keeps the q/k dim {lone} without the one that rotary positions turn with it. Keep q/k dims in "
            f"pairs: {other}"
        )


def _parse_block(index: int, entry: dict[str, Any], dense: Widths) -> BlockTopology:
    unknown = sorted(set(entry) - {"heads", "neurons", "value_dims", "qk_dims"})
    if unknown:
        raise TopologyError(f"block {index}: unknown entry {unknown[0]!r}")
    entry = {name: _plain(units) for name, units in entry.items()}
    heads = _unpack(entry.get("heads", dense.heads), dense.heads, f"block {index}: heads")
    neurons = _unpack(entry.get("neurons", dense.neurons), dense.neurons, f"block {index}: neurons")
    dims = {}
    for name, size in (("value_dims", dense.value_dim), ("qk_dims", dense.qk_dim)):
        given = entry.get(name, size)
        listed = [_plain(one) for one in given] if isinstance(given, Sequence) else [given] * len(heads or ())
        if len(listed) != len(heads or ()):
            raise TopologyError(f"block {index}: {name} has {len(listed)} entries for {len(heads or ())} kept heads")
        if None in listed:
            raise TopologyError(f"block {index}: {name}: found None, expected a count or indices for every kept head")
        dims[name] = [_unpack(one, size, f"block {index}: {name}") or () for one in listed]
    order = entry.get("heads")
    if isinstance(order, Sequence):  # the dims were given in the order of the heads
        dims = {name: [kept for _, kept in sorted(zip(order, values, strict=True))] for name, values in dims.items()}
    # A head without value dims puts out nothing: it is closed.
    alive = [i for i, kept in enumerate(dims["value_dims"]) if kept]
    return BlockTopology(
        None if heads is None else tuple(heads[i] for i in alive),
        tuple(dims["value_dims"][i] for i in alive),
        tuple(dims["qk_dims"][i] for i in alive),
        neurons,
    )


def _plain(units: Any) -> Any:
    """A tensor or array as the list or number it holds."""
    return units.tolist() if hasattr(units, "tolist") else units


def _unpack(units: Any, size: int | None, where: str) -> tuple[int, ...] | None:
    """Indices from a count or from indices; None stays None."""
    if units is None:
        return None
    if size is None:
        raise TopologyError(f"{where}: found {units!r}, but the model has no such branch (expected None)")
    if _is_int(units):
        if not 0 <= units <= size:
            raise TopologyError(f"{where}: found {units}, expected 0 to {size}")
        return tuple(range(units))
    if not isinstance(units, Sequence) or isinstance(units, str) or not all(_is_int(unit) for unit in units):
        raise TopologyError(f"{where}: found {units!r}, expected a count or a list of indices")
    indices = tuple(sorted({int(unit) for unit in units}))
    if len(indices) != len(units) or (indices and not 0 <= indices[0] <= indices[-1] < size):
        raise TopologyError(f"{where}: indices must be distinct and in 0 to {size - 1}; found {list(units)}")
    return indices


def _is_int(value: Any) -> bool:
    """Whether a value is an integer of Python, numpy or torch, and not a truth value."""
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _pack(units: tuple[int, ...] | None) -> Any:
    if units is None:
        return None
    return len(units) if units == tuple(range(len(units))) else list(units)


def _pack_heads(dims: tuple[tuple[int, ...], ...]) -> Any:
    packed = [_pack(kept) for kept in dims]
    same = packed and type(packed[0]) is int and all(kept == packed[0] for kept in packed)
    return packed[0] if same else packed


def harden(model: nn.Module) -> Topology:
    """The decisions of a gated model: what has a logit above 0 is kept.

    Raises:
        ValueError: the model has no gates.
    """
    if not is_gated(model):
        raise InputError("the model has no gates; attach them with hiap.attach first")
    if not all(bool(gate.logit.isfinite().all()) for gate in gates(model)):
        raise InputError("some gate logits are not finite: the run that trained them has diverged")
    entries = []
    found = sites(model)
    dense = tuple(site.widths for site in found)
    for site, widths, kinds in zip(found, dense, gates_by_block(model), strict=True):
        open_ = {kind: gate.hard().cpu() for kind, gate in kinds.items()}
        entry: dict[str, Any] = {"heads": widths.heads, "neurons": widths.neurons}
        if widths.heads:
            heads = _indices(open_.get("head", torch.ones(widths.heads)).flatten())
            for kind, size in (("value_dim", widths.value_dim), ("qk_dim", widths.qk_dim)):
                dims = open_.get(kind, torch.ones(widths.heads, size))
                if kind == "qk_dim" and kind in open_:
                    dims = by_dim(dims, site.pairs, size)
                entry[f"{kind}s"] = [_indices(dims[h]) for h in heads]
            entry["heads"] = heads
            if "attention" in open_ and not open_["attention"]:
                entry = {"heads": None, "neurons": widths.neurons}
        if widths.neurons:
            entry["neurons"] = _indices(open_.get("neuron", torch.ones(widths.neurons)))
            if "ffn" in open_ and not open_["ffn"]:
                entry["neurons"] = None
        entries.append(entry)
    return Topology._parse(entries, dense)


def _indices(mask: Tensor) -> list[int]:
    indices: list[int] = mask.nonzero().flatten().tolist()
    return indices


@torch.no_grad()
def set_topology(model: nn.Module, topology: Topology, logit: float = START_LOGIT) -> None:
    """Set the gates of a gated model to a topology: `logit` for what is kept, `-logit` for what is not.

    Raises:
        TopologyError: the topology closes a unit that has no gate of its own; nothing has been changed.
    """
    topology.check(model)
    if not logit > 0:
        raise InputError(f"logit must be positive; found {logit}")
    plan = []
    for i, (block, site, kinds) in enumerate(zip(topology.blocks, sites(model), gates_by_block(model), strict=True)):
        masks = _masks(block, site.widths)
        if "value_dim" in kinds and "head" not in kinds:  # a head is closed by its value dims then
            masks["value_dim"] &= masks["head"]
            masks["head"] = torch.ones_like(masks["head"])
        for kind, mask in masks.items():
            if kind in kinds:
                mask = by_pair(mask.float(), site.pairs) > 0 if kind == "qk_dim" else mask
                plan.append((kinds[kind], mask))
            elif not mask.all():
                raise TopologyError(
                    f"block {i}: the topology closes units that have no {kind} gate"
                    + (
                        " (qk_norm ties the q/k dims of a head together)"
                        if kind == "qk_dim" and site.qk_norm
                        else f": attach the model with granularities that include {kind!r}"
                    )
                )
    for gate, mask in plan:
        signs = mask.to(gate.logit).view(-1) * 2 - 1
        gate.logit.copy_(signs * logit)


def _masks(block: BlockTopology, dense: Widths) -> dict[str, Tensor]:
    """Open units of each granularity; what lies under a closed parent counts as open."""
    masks = {}
    if dense.heads:
        masks["attention"] = torch.tensor([block.heads is not None])
        masks["head"] = torch.full((dense.heads, 1), block.heads is None)
        masks["value_dim"] = torch.ones(dense.heads, dense.value_dim, dtype=torch.bool)
        masks["qk_dim"] = torch.ones(dense.heads, dense.qk_dim, dtype=torch.bool)
        for head, values, queries in zip(block.heads or (), block.value_dims, block.qk_dims, strict=True):
            masks["head"][head] = True
            masks["value_dim"][head] = _mask(values, dense.value_dim)
            masks["qk_dim"][head] = _mask(queries, dense.qk_dim)
    if dense.neurons:
        masks["ffn"] = torch.tensor([block.neurons is not None])
        masks["neuron"] = _mask(range(dense.neurons) if block.neurons is None else block.neurons, dense.neurons)
    return masks


def _mask(kept: Sequence[int], size: int) -> Tensor:
    mask = torch.zeros(size, dtype=torch.bool)
    mask[list(kept)] = True
    return mask
