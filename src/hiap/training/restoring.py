"""The phase of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from hiap.pruning.attach import attach
from hiap.pruning.extract import Provenance, note_provenance, origin_of, rebuild
from hiap.pruning.topology import Topology
from hiap.training.context import Context
from hiap.training.phase import Phase, Tensors, Values
from hiap.training.phases import Dense, Recover, Search, fixed

__all__ = ["restore"]


def restore(context: Context, tensors: Tensors, values: Values) -> Phase:
    """The phase of a checkpoint: it builds what the phase itself needs, and nothing of those before it."""
    phase: Phase
    if values["stage"] == Dense.name:
        phase = Dense(context)
    elif values["stage"] == Search.name:
        phase = Search(context, fresh=False)
    else:
        phase = _recover(context, Topology.from_json(values["topology"]), values["verified"])
    phase.load_state_dict(tensors, values)
    return phase


def _recover(context: Context, topology: Topology, verified: Sequence[float] | None) -> Recover:
    """The phase with a network of the topology, whose weights are still to come."""
    config, parts, dense = context.config, context.parts, context.dense()
    teacher = context.teacher(dense)
    source = context.start(dense)
    if verified is None:
        network = fixed(context, attach(source, parts.kinds, config.keep_blocks, seed=config.seed))
    else:
        origin, recipe = origin_of(source, topology)
        network = rebuild(source, topology, topology.widths(config.round_to))
        difference, tolerance = verified
        note_provenance(network, Provenance(topology, origin, config.round_to, difference, tolerance, recipe))
        network = context.merging(network)
    return Recover(context, network, teacher, topology=topology)
