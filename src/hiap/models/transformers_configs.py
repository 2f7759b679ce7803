"""Configurations of pruned models for Transformers, by which `from_pretrained` knows them.

A pruned model has a `model_type` of its own, such as "hiap_vit". Its configuration is that of its dense model plus the
fields of docs/format.md that say how wide the blocks are and where they come from. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "RECORD",
    "dense_config",
    "is_pruned",
    "note_in_config",
    "pruned_config",
    "pruned_configs",
    "record_of",
    "register_configs",
    "register_pending",
]

# What a pruned model is rebuilt from, beside the configuration of its dense model.
RECORD = ("blocks", "dense", "topology", "round_to", "logit_difference", "tolerance", "skeleton", "preprocessing")
# Further fields that hiap.save writes, which are no part of a configuration.
_SAVED = (
    *("format", "architecture", "family", "versions", "num_classes", "macs", "dense_macs", "params"),
    *("class_names", "per_layer_config"),
)
_PARENTS = (
    "ViTConfig",
    "DeiTConfig",
    "Dinov2Config",
    "Dinov2WithRegistersConfig",
    "DINOv3ViTConfig",
    "CLIPVisionConfig",
    "CLIPConfig",
    "SiglipVisionConfig",
    "SiglipConfig",
)
_before_use: list[Callable[[], None]] = []


class _Pruned:
    """What the configuration of a pruned model adds to that of a dense one."""

    def __post_init__(self, **kwargs: Any) -> None:
        register_pending()
        saved = {name: kwargs.pop(name, None) for name in _SAVED}
        before = kwargs.pop("pretrained_cfg", None)  # as folders of earlier versions call it
        if before:
            kwargs.setdefault("preprocessing", before)
        super().__post_init__(**kwargs)  # type: ignore[misc]
        config: Any = self
        names = saved["class_names"]
        if names and len(names) == config.num_labels:
            config.id2label, config.label2id = dict(enumerate(names)), {name: i for i, name in enumerate(names)}

    def save_pretrained(self, save_directory: Any, *args: Any, **options: Any) -> None:
        """As Transformers does, and the image processor with it, where it is known and none is there."""
        from hiap.models.transformers_processor import PROCESSOR, processor_of  # needs torch, as whoever saves

        super().save_pretrained(save_directory, *args, **options)  # type: ignore[misc]
        processor, file = processor_of(self.to_dict()), Path(save_directory, PROCESSOR)
        if processor is not None and not file.exists():
            file.write_text(json.dumps(processor, indent=1) + "\n")

    def to_dict(self) -> dict[str, Any]:
        """Every field, and the widths of the layers in the words of Transformers as well."""
        found: dict[str, Any] = super().to_dict()  # type: ignore[misc]
        blocks = found.get("blocks")
        if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
            return found  # a file that was edited, which is refused once a model is made of it
        return {**found, "per_layer_config": {str(i): _in_words(block) for i, block in enumerate(blocks)}}


def register_pending() -> None:
    """Do what has to be done before the first configuration is made; what failed is tried again next time."""
    while _before_use:
        _before_use[-1]()
        _before_use.pop()


def __getattr__(name: str) -> Any:
    """Make the class that a pickle of another process names."""
    parent = name.removeprefix("Pruned")
    if name == parent or parent not in _PARENTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return pruned_config(getattr(importlib.import_module("transformers"), parent))


def _in_words(block: Mapping[str, Any]) -> dict[str, Any]:
    """The widths of a block by the names that they have in configurations of Transformers."""
    skipped = [name for name, units in (("attention", "heads"), ("mlp", "neurons")) if block.get(units) is None]
    words: dict[str, Any] = {"skip": skipped} if skipped else {}
    if "attention" not in skipped:
        names = {"num_attention_heads": "heads", "head_dim": "qk_dim", "v_head_dim": "value_dim"}
        words |= {name: block.get(width) for name, width in names.items()}
    if "mlp" not in skipped:
        words["intermediate_size"] = block["neurons"]
    return words


@functools.cache
def pruned_config(parent: Any) -> Any:
    """The class of configurations of pruned models, for a class of those of dense ones."""
    if issubclass(parent, _Pruned):
        return parent
    name = f"Pruned{parent.__name__}"
    made = type(name, (_Pruned, parent), {"model_type": f"hiap_{parent.model_type}", "__module__": __name__})
    globals()[name] = made  # where pickle looks for it
    return made


def pruned_configs() -> list[Any]:
    """All such classes of the Transformers that is installed; an old one lacks some."""
    library = importlib.import_module("transformers")
    return [pruned_config(getattr(library, name)) for name in _PARENTS if hasattr(library, name)]


def register_configs(before_use: Callable[[], None]) -> None:
    """Let AutoConfig know pruned models.

    Args:
        before_use: what to do before the first of these configurations is made. Their models are registered then, not
            now: that takes the rest of Transformers, which whoever has no pruned model need not wait for.
    """
    auto = importlib.import_module("transformers.models.auto.configuration_auto").AutoConfig
    for config in pruned_configs():
        auto.register(config.model_type, config, exist_ok=True)
    _before_use.append(before_use)


def is_pruned(config: Any) -> bool:
    """Whether a configuration is that of a pruned model."""
    return isinstance(config, _Pruned)


def dense_config(config: Any) -> Any:
    """The configuration of the dense model that a pruned one came from; any other is returned as it is."""
    if not is_pruned(config):
        return config
    kind = config.__class__.__mro__[2]
    dense = object.__new__(kind)
    vars(dense).update({name: value for name, value in vars(config).items() if name not in RECORD})
    return dense


def record_of(config: Any) -> dict[str, Any]:
    """What a pruned model is rebuilt from, as its configuration has it."""
    return {name: getattr(config, name) for name in RECORD if getattr(config, name, None) is not None}


def note_in_config(model: Any, record: Mapping[str, Any]) -> None:
    """Give a model the configuration of a pruned one with this record, which `save_pretrained` then writes."""
    old: Any = model.config
    kind: Any = pruned_config(old.__class__)
    new = old
    if not isinstance(old, kind):
        new = object.__new__(kind)
        vars(new).update(vars(old))
        for module in model.modules():
            if vars(module).get("config") is old:
                module.config = new
    new.architectures = [model.__class__.__name__]  # by which an auto class chooses among several
    for name, value in record.items():
        setattr(new, name, value)
    model._weight_conversions = []  # names of older versions of Transformers do not fit blocks of ours
