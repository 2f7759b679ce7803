"""A dense model becomes a compact one again: from the record of its widths and its origin that config.json holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any

import torch
from torch import nn

from hiap.errors import CheckpointError, ConfigError, UnsupportedModelError
from hiap.models.registry import family_of, sites
from hiap.nn.compact import Widths
from hiap.pruning.extract import Provenance, note_provenance, shrink
from hiap.pruning.topology import Topology

__all__ = ["MALFORMED", "narrow", "read_provenance", "restore", "usage_key", "with_fresh_tables"]

# What the values of a file that was edited may raise.
MALFORMED = (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)  # of odd values

NEEDED = ("blocks", "dense", "topology", "round_to", "logit_difference", "tolerance", "skeleton")


def restore(model: nn.Module, record: Mapping[str, Any]) -> None:
    """Give a dense model the blocks of a compact one, in place, for a library that loads the weights itself.

    Args:
        record: the fields of config.json that say how wide the blocks are and where they come from.

    Raises:
        CheckpointError: the record does not describe a compact form of the model.
        UnsupportedModelError: the model has an option that blocks cannot follow, such as `output_attentions`.
    """
    wrong = f"config.json does not describe a pruned {type(model).__name__}"
    missing = [repr(name) for name in NEEDED if name not in record]
    if missing:
        raise CheckpointError(f"{wrong}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    try:
        note_provenance(narrow(model, record), read_provenance(record))
    except (ConfigError, UnsupportedModelError):  # not the fault of the record
        raise
    except MALFORMED as error:
        raise CheckpointError(f"{wrong}: {error}") from error
    key = usage_key(record)
    if record.get(key):
        family = family_of(model)
        family.check_usage(f"config.json: {key}", record[key])
        family.set_usage(model, record[key])


def usage_key(record: Mapping[str, Any]) -> str:
    """What a record calls how the model is used: models of Transformers have had both names."""
    return "preprocessing" if "preprocessing" in record else "pretrained_cfg"


def read_provenance(record: Mapping[str, Any]) -> Provenance:
    """Where a compact model comes from, by its record."""
    numbers = (record["round_to"], record["logit_difference"], record["tolerance"])
    topology, dense = Topology.from_json(record["topology"]), read_widths(record["dense"])
    return Provenance(topology, dense, *numbers, record["skeleton"])


def narrow(model: nn.Module, record: Mapping[str, Any]) -> nn.Module:
    """Replace the blocks of a dense model by those that a record tells of; new Linears are on the meta device."""
    widths, dense = read_widths(record["blocks"]), read_widths(record["dense"])
    depth = len(sites(model))
    if not len(widths) == len(dense) == depth:
        raise CheckpointError(f"{len(widths)} blocks, {len(dense)} dense ones and a depth of {depth} do not agree")
    for i, (one, limit) in enumerate(zip(widths, dense, strict=True)):
        if any((small or 0) > (large or 0) for small, large in zip(astuple(one), astuple(limit), strict=True)):
            raise CheckpointError(f"block {i} has {one}, more than the dense {limit}")
    return shrink(model, widths)


def read_widths(entries: Any) -> tuple[Widths, ...]:
    """Widths of blocks that come from a file.

    Raises:
        CheckpointError: a value that no block has.
    """
    widths = tuple(Widths(**entry) for entry in entries)
    for one in widths:
        for name, value in asdict(one).items():
            if (type(value) is not int or value < 0) and not (value is None and name in ("heads", "neurons")):
                raise CheckpointError(f"{name} must be a count; found {str(value)[:40]!r}")
        if one.heads and not one.qk_dim * one.value_dim:
            raise CheckpointError(f"heads need q/k and value dims; found {one}")
    return widths


def with_fresh_tables(model: nn.Module, rebuilt: nn.Module) -> nn.Module:
    """Replace computed tables, which are in no file, that a lower precision has rounded: loading computes them anew."""
    modules, saved = dict(model.named_modules()), rebuilt.state_dict()
    for name, fresh in rebuilt.named_buffers():
        home, _, key = name.rpartition(".")
        table = modules[home]._buffers.get(key)
        if name in saved or table is None or table.shape != fresh.shape:
            continue
        if torch.allclose(table.cpu().double(), fresh.double(), rtol=2**-7, atol=1e-6):  # bfloat16 has 8 bits
            modules[home]._buffers[key] = fresh.to(table.device)
    return model
