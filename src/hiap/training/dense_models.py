"""The dense model of a configuration: of a library, or a pruned model that is to become smaller still."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import timm
from torch import nn

from hiap.models.weights import trained_model
from hiap.pruning.saving import load
from hiap.training.config import Config, ConfigError
from hiap.training.rungs import read_rungs

__all__ = ["dense_model", "model_arguments"]


def dense_model(config: Config) -> nn.Module:
    """The model of a configuration with its weights; its own number of classes, 0 where they hold no classifier.

    Raises:
        ConfigError: the library cannot make it, or the weights cannot be had or do not fit.
        CheckpointError: it is a folder, and holds no pruned model.
    """
    arguments = model_arguments(config)
    folder = Path(config.model)
    if folder.is_dir() and not timm.is_model(config.model):
        sizes = [str(rung.path) for rung in read_rungs(folder)]
        if len(sizes) > 1:
            raise ConfigError(f"{folder} holds a run of several sizes: name one of {', '.join(sizes)}")
        given = [
            f"--{name.replace('_', '-')}" for name in ("weights", "img_size", "model_args") if getattr(config, name)
        ]
        if given:
            raise ConfigError(f"{folder} holds a pruned model, which is taken as it is: leave out {', '.join(given)}")
        inside = folder / "compact"
        return load(inside if inside.is_dir() and not (folder / "config.json").is_file() else folder)
    return trained_model(config.model, config.weights, config.pretrained, arguments, features=not config.labelled)


def model_arguments(config: Config) -> dict[str, Any]:
    """What `timm.create_model` is given besides the name."""
    return config.model_args | ({} if config.img_size is None else {"img_size": config.img_size})
