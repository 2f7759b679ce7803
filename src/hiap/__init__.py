"""HiAP: smaller, faster Vision Transformers by learned gates and exact extraction.

attach -> train -> extract -> save:

    hiap.attach(model)              # gates, in place
    ...                             # train weights and gates
    compact = hiap.extract(model)   # an ordinary, smaller, dense ViT, verified
    hiap.save(compact, "compact")

Names are imported when they are first used, so that `hiap --help` need not wait for torch.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hiap.registration import register

if TYPE_CHECKING:
    from hiap.axes import align_heads
    from hiap.budget import Controller, Floors
    from hiap.checkpoint import load, save
    from hiap.config import Config, read_config
    from hiap.cost import Counts, MacCost, ParamCost, expected_counts, hard_counts, macs
    from hiap.data import Data, LoaderData
    from hiap.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        ExtractionError,
        HiapError,
        InputError,
        LatencyError,
        RunError,
        TopologyError,
        UnsupportedModelError,
    )
    from hiap.extraction import Provenance, extract
    from hiap.gate import Gate
    from hiap.gating import attach, detach, gates, parameter_groups, set_gates, weight_groups
    from hiap.granularities import GRANULARITIES
    from hiap.inference import compiled, optimize
    from hiap.latency import LatencyCost, LatencyTable
    from hiap.measuring import measure
    from hiap.schedule import Schedule
    from hiap.topology import BlockTopology, Topology, harden, set_topology
    from hiap.train import prune

__version__ = version("hiap")

__all__ = [
    "GRANULARITIES",
    "BlockTopology",
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Controller",
    "Counts",
    "Data",
    "ExtractionError",
    "Floors",
    "Gate",
    "HiapError",
    "InputError",
    "LatencyCost",
    "LatencyError",
    "LatencyTable",
    "LoaderData",
    "MacCost",
    "ParamCost",
    "Provenance",
    "RunError",
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
    "weight_groups",
]

_MODULES = {  # and the names each of them gives to the package
    "axes": "align_heads",
    "budget": "Controller Floors",
    "checkpoint": "load save",
    "config": "Config read_config",
    "cost": "Counts MacCost ParamCost expected_counts hard_counts macs",
    "data": "Data LoaderData",
    "errors": "BudgetError CheckpointError ConfigError ExtractionError HiapError InputError LatencyError RunError "
    "TopologyError UnsupportedModelError",
    "extraction": "Provenance extract",
    "gate": "Gate",
    "gating": "attach detach gates parameter_groups set_gates weight_groups",
    "granularities": "GRANULARITIES",
    "inference": "compiled optimize",
    "latency": "LatencyCost LatencyTable",
    "measuring": "measure",
    "schedule": "Schedule",
    "topology": "BlockTopology Topology harden set_topology",
    "train": "prune",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}

register()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'hiap' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"hiap.{_HOMES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
