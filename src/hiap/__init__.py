"""HiAP: smaller, faster Vision Transformers by learned gates and exact extraction.

attach -> train -> extract -> save:

    hiap.attach(model)              # gates, in place
    ...                             # train weights and gates
    compact = hiap.extract(model)   # an ordinary, smaller, dense ViT, verified
    hiap.save(compact, "compact")
"""

from importlib.metadata import version

from hiap.attach import attach, detach, gates, parameter_groups, set_gates
from hiap.checkpoint import load, save
from hiap.cost import Counts, MacCost, ParamCost, expected_counts, hard_counts, macs
from hiap.errors import CheckpointError, ExtractionError, TopologyError, UnsupportedModelError
from hiap.extract import Provenance, extract
from hiap.gates import GRANULARITIES, Gate
from hiap.topology import BlockTopology, Topology, harden, set_topology

__version__ = version("hiap")

__all__ = [
    "GRANULARITIES",
    "BlockTopology",
    "CheckpointError",
    "Counts",
    "ExtractionError",
    "Gate",
    "MacCost",
    "ParamCost",
    "Provenance",
    "Topology",
    "TopologyError",
    "UnsupportedModelError",
    "attach",
    "detach",
    "expected_counts",
    "extract",
    "gates",
    "hard_counts",
    "harden",
    "load",
    "macs",
    "parameter_groups",
    "save",
    "set_gates",
    "set_topology",
]
