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
    from hiap.budget.controller import Controller, Floors
    from hiap.budget.cost import MacCost, ParamCost
    from hiap.budget.latency import LatencyCost, LatencyTable
    from hiap.data.loaders import LoaderData
    from hiap.data.sources import Data
    from hiap.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        ExportError,
        ExtractionError,
        HiapError,
        InputError,
        KindError,
        LatencyError,
        RunError,
        TopologyError,
        UnsupportedModelError,
    )
    from hiap.export.exporting import export_model
    from hiap.models.described import DescribedFamily
    from hiap.models.family import Family, Site
    from hiap.models.registry import register_family
    from hiap.models.transformers_towers import set_tower
    from hiap.nn.gates import Gate
    from hiap.nn.granularities import GRANULARITIES
    from hiap.pruning.align import align_heads
    from hiap.pruning.attach import attach, detach, gates, parameter_groups, set_gates, weight_groups
    from hiap.pruning.count import Counts, expected_counts, hard_counts, macs
    from hiap.pruning.extract import Provenance, extract
    from hiap.pruning.merging import merge_tokens
    from hiap.pruning.saving import load, save
    from hiap.pruning.topology import BlockTopology, Topology, harden, set_topology
    from hiap.speed.inference import compiled, optimize
    from hiap.speed.measure import measure
    from hiap.training.config import Config, read_config
    from hiap.training.loop import prune
    from hiap.training.result import Result
    from hiap.training.schedule import Schedule

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
    "DescribedFamily",
    "ExportError",
    "ExtractionError",
    "Family",
    "Floors",
    "Gate",
    "HiapError",
    "InputError",
    "KindError",
    "LatencyCost",
    "LatencyError",
    "LatencyTable",
    "LoaderData",
    "MacCost",
    "ParamCost",
    "Provenance",
    "Result",
    "RunError",
    "Schedule",
    "Site",
    "Topology",
    "TopologyError",
    "UnsupportedModelError",
    "align_heads",
    "attach",
    "compiled",
    "detach",
    "expected_counts",
    "export_model",
    "extract",
    "gates",
    "hard_counts",
    "harden",
    "load",
    "macs",
    "measure",
    "merge_tokens",
    "optimize",
    "parameter_groups",
    "prune",
    "read_config",
    "register_family",
    "save",
    "set_gates",
    "set_topology",
    "set_tower",
    "weight_groups",
]

_MODULES = {  # and the names each of them gives to the package
    "budget.controller": "Controller Floors",
    "budget.cost": "MacCost ParamCost",
    "budget.latency": "LatencyCost LatencyTable",
    "data.loaders": "LoaderData",
    "data.sources": "Data",
    "errors": "BudgetError CheckpointError ConfigError ExportError ExtractionError HiapError InputError KindError "
    "LatencyError RunError TopologyError UnsupportedModelError",
    "export.exporting": "export_model",
    "models.described": "DescribedFamily",
    "models.family": "Family Site",
    "models.registry": "register_family",
    "models.transformers_towers": "set_tower",
    "nn.gates": "Gate",
    "nn.granularities": "GRANULARITIES",
    "pruning.align": "align_heads",
    "pruning.attach": "attach detach gates parameter_groups set_gates weight_groups",
    "pruning.count": "Counts expected_counts hard_counts macs",
    "pruning.extract": "Provenance extract",
    "pruning.merging": "merge_tokens",
    "pruning.saving": "load save",
    "pruning.topology": "BlockTopology Topology harden set_topology",
    "speed.inference": "compiled optimize",
    "speed.measure": "measure",
    "training.config": "Config read_config",
    "training.loop": "prune",
    "training.result": "Result",
    "training.schedule": "Schedule",
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
