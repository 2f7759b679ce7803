"""Classes of pruned models for Transformers, so that its auto classes load what `save_pretrained` or `hiap.save` wrote.

Each is the class of the dense model, of the same name, whose constructor cuts the blocks to the widths that the
configuration has. No code comes from the folder.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from hiap.models.transformers_configs import pruned_configs, record_of, register_pending
from hiap.models.transformers_parts import CLASSES, WHOLE_MODELS, library
from hiap.nn.compact import Constant

__all__ = ["pruned_class", "register_models"]

_AUTO = ("AutoModel", "AutoModelForImageClassification", "AutoBackbone", "AutoModelForZeroShotImageClassification")
_restore: Callable[[nn.Module, Mapping[str, Any]], None]  # of a room above, which registers it


class _Pruned:
    """What the class of a pruned model adds to that of a dense one."""

    def __init__(self, config: Any, *inputs: Any, **options: Any) -> None:
        record = record_of(config)
        made_with = record.get("skeleton")
        if isinstance(made_with, dict) and made_with.get("class") == type(self).__name__:
            options = {**{name: made_with[name] for name in _OPTIONS if name in made_with}, **options}
        super().__init__(config, *inputs, **options)  # type: ignore[call-arg]
        model: Any = self
        _restore(model.vision_model if type(self).__name__ in WHOLE_MODELS else model, record)
        _begin(model)

    def save_pretrained(self, *args: Any, **options: Any) -> None:
        """As Transformers does, but with the present names of tensors: those of older versions do not fit."""
        super().save_pretrained(*args, **{"save_original_format": False, **options})  # type: ignore[misc]


_OPTIONS = ("add_pooling_layer", "use_mask_token")


def _begin(model: Any) -> None:
    """Give new layers random weights, unless the whole model has none."""
    if torch.empty(0).is_meta:
        return
    for module in model.modules():
        if any(parameter.is_meta for parameter in module.parameters(recurse=False)):
            module.to_empty(device=torch.empty(0).device, recurse=False)
            model._init_weights(module)
            if isinstance(module, Constant):
                nn.init.zeros_(module.bias)


@functools.cache
def pruned_class(base: Any, config: Any) -> type[Any]:
    """The class of pruned models of a class of dense ones."""
    splits = [*(base._no_split_modules or ()), "EncoderBlock"]
    fields = {"config_class": config, "_no_split_modules": splits, "__module__": __name__}
    made = type(base.__name__, (_Pruned, base), fields)
    globals()[base.__name__] = made  # where pickle looks for it
    return made


def __getattr__(name: str) -> Any:
    """Make the class that a pickle of another process names."""
    if name in CLASSES or name in WHOLE_MODELS:
        importlib.import_module(
            "transformers.models.auto.configuration_auto"
        )  # after which models wait to be registered
        register_pending()
        if name in globals():
            return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register_models(restore: Callable[[nn.Module, Mapping[str, Any]], None]) -> None:
    """Let the auto classes of Transformers know pruned models.

    Args:
        restore: what turns a dense model into the pruned one of a record, in place.
    """
    global _restore
    _restore, hf = restore, library()
    for config in pruned_configs():
        parent = config.__mro__[2]
        for name in _AUTO:
            auto = getattr(hf, name)
            found = auto._model_mapping.get(parent, ())
            classes = list(found) if isinstance(found, tuple) else [found]
            if name == "AutoModel":  # which gives what was saved, where that is a bare model
                more = (getattr(hf, one) for one, own in CLASSES.items() if own[1] == parent.__name__)
                classes += [one for one in more if "Classification" not in one.__name__ and one not in classes]
            ours = tuple(pruned_class(one, config) for one in classes)
            if ours:
                auto.register(config, ours if len(ours) > 1 else ours[0], exist_ok=True)
