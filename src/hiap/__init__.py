"""HiAP: smaller, faster Vision Transformers by learned gates and exact extraction.

attach -> train -> extract -> save:

    hiap.attach(model)              # gates, in place
    ...                             # train weights and gates
    compact = hiap.extract(model)   # an ordinary, smaller, dense ViT, verified
    hiap.save(compact, "compact")
"""

from importlib.metadata import version
from typing import Any

from hiap.attach import attach, detach, gates, parameter_groups, set_gates
from hiap.axes import align_heads
from hiap.budget import BudgetError, Controller, Floors
from hiap.checkpoint import load, save
from hiap.cost import Counts, MacCost, ParamCost, expected_counts, hard_counts, macs
from hiap.errors import CheckpointError, ExtractionError, TopologyError, UnsupportedModelError
from hiap.extract import Provenance, extract
from hiap.gates import GRANULARITIES, Gate
from hiap.latency import LatencyCost, LatencyError, LatencyTable
from hiap.measuring import measure
from hiap.optimize import compiled, optimize
from hiap.schedule import Schedule
from hiap.topology import BlockTopology, Topology, harden, set_topology

__version__ = version("hiap")

__all__ = [
    "GRANULARITIES",
    "BlockTopology",
    "BudgetError",
    "CheckpointError",
    "Config",
    "Controller",
    "Counts",
    "Data",
    "ExtractionError",
    "Floors",
    "Gate",
    "LatencyCost",
    "LatencyError",
    "LatencyTable",
    "LoaderData",
    "MacCost",
    "ParamCost",
    "Provenance",
    "Schedule",
    "Topology",
    "TopologyError",
    "UnsupportedModelError",
    "align_heads",
    "attach",
    "compiled",
    "detach",
    "expected_counts",
    "extract",
    "gates",
    "hard_counts",
    "harden",
    "load",
    "macs",
    "measure",
    "optimize",
    "parameter_groups",
    "prune",
    "read_config",
    "save",
    "set_gates",
    "set_topology",
]


def __getattr__(name: str) -> Any:
    """The training phase, imported when it is asked for: it needs the extra `train`."""
    if name == "prune":
        from hiap.train import prune

        return prune
    if name in ("Data", "LoaderData"):
        import hiap.data

        return getattr(hiap.data, name)
    if name in ("Config", "read_config"):
        import hiap.config

        return getattr(hiap.config, name)
    raise AttributeError(f"module 'hiap' has no attribute {name!r}")
