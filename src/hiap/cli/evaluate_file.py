"""`hiap evaluate FILE`: an exported file is scored by its own runtime, with the preprocessing that it carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hiap.errors import InputError

if TYPE_CHECKING:
    from hiap.training.config import Config

__all__ = ["evaluate_file"]


def evaluate_file(file: str, config: Config, batch: int = 64) -> dict[str, float]:
    """Top-1, top-5 and the number of images of an exported file on the data of a configuration.

    Raises:
        InputError: the file cannot be scored on this data.
    """
    import torch

    from hiap.data.images import Augmentation, Loading
    from hiap.data.sources import open_data
    from hiap.export.running import ExportedModel
    from hiap.training.evaluate import evaluate

    assert config.data is not None
    model = ExportedModel(file)
    about = model.about
    classes, names = about["classes"], about["class_names"]
    if not classes:
        raise InputError(f"{file} has no classifier, so there is nothing to score")
    loading = Loading(
        size=(about["size"][0], about["size"][1]),
        normalisation=(config.mean or about["mean"], config.std or about["std"]),
        augmentation=Augmentation(config.crop, config.flip, config.policy, config.erase),
        device=torch.device("cpu"),
        workers=config.workers,
        strict=config.strict_data,
        **{name: about[name] for name in ("channels", "interpolation", "crop_pct", "crop_mode")},
    )
    keys = {name: getattr(config, name) for name in ("val_split", "input_key", "target_key", "download")}
    data = open_data(config.data, loading, config.data_device != "loader", classes, **keys)
    if data.classes != classes:
        raise InputError(f"the model has {classes} classes, the data {data.classes}")
    if names and data.class_names and names != data.class_names:
        first = next((a, b) for a, b in zip(names, data.class_names, strict=True) if a != b)
        raise InputError(f"the model was trained on other classes: {first[0]!r} stands where the data has {first[1]!r}")
    return evaluate(model, data, batch)
