"""Images to calibrate INT8 with: a few hundred of a folder or a CSV file, with the preprocessing of the model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hiap.errors import InputError

__all__ = ["calibration_images"]


def calibration_images(source: str, model: Any, count: int) -> Any:
    """Normalised images (N, C, H, W), chosen at random but the same every time. Labels are not read.

    Where the source has a training and a validation part, they are of the first.

    Raises:
        InputError: the source cannot be read, or holds no images.
    """
    import torch
    from torch.utils.data import Subset

    from hiap.data.files import list_images, read_table
    from hiap.data.images import Augmentation, Loading, order
    from hiap.data.indexed import IndexedData
    from hiap.export.network import description

    about = description(model, "", "", None)
    loading = Loading(
        size=(about["size"][0], about["size"][1]),
        normalisation=(about["mean"], about["std"]),
        augmentation=Augmentation(policy=None),
        device=torch.device("cpu"),
        workers=0,
        **{name: about[name] for name in ("channels", "interpolation", "crop_pct", "crop_mode")},
    )
    try:
        if os.path.isdir(source):
            train, val = list_images(source, None)
        elif Path(source).suffix.lower() == ".csv":
            train, val = read_table(source, None, labels=False)
        else:
            raise InputError(f"--calibration-data {source!r} is neither a folder nor a CSV file")
    except OSError as error:
        raise InputError(f"--calibration-data {source!r} cannot be read: {error}") from error
    chosen = Subset(train, sorted(order(0, 0, len(train))[:count].tolist()))  # type: ignore[arg-type, var-annotated]
    data = IndexedData(chosen, val, train.class_names, loading)
    return torch.cat([images for images, _ in data.bank(32)])
