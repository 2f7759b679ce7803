"""Prune ViT-Ti or DINOv2-S on Tiny-ImageNet with the whole set on the device: one run, one JSON record.

    python benchmarks/prune_tiny_imagenet.py --data DIR --weights vit_tiny_tin128.safetensors --out runs/x \
        [--start dinov2_small] [--set lr=5e-4 --set seed=1] [--final] [--limit 10 [--scored 50]] [--json FILE]

DIR holds the sheets `train_0.jpg` to `train_9.jpg` and `val.jpg`. Choices are made on sheet 9, trained on the others;
`--final` trains on all ten and scores on the validation sheet.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from tiny_imagenet import CLASSES, validation_images

from hiap.data.sources import Augmentation, ByteData
from hiap.training.config import Config, read_config
from hiap.training.loop import prune

HALF = (0.5, 0.5, 0.5)
STARTS = {  # model, input size, normalisation
    "vit_tiny": ("vit_tiny_patch16_224", 128, (HALF, HALF)),
    "dinov2_small": ("vit_small_patch14_dinov2", 126, (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)),
}
BASE = {
    "target": "50%",
    "epochs": 15,
    "batch_size": 1024,
    "lr": 5e-4,
    "precision": "bf16",
    "warmup_epochs": 1,
    "eval_every": 5,
    "clip_grad": 1.0,
}


def configuration(start: str, weights: str | None, given: dict[str, Any]) -> Config:
    """The base configuration of a start, with some options given."""
    model, size, (mean, std) = STARTS[start]
    own = {"model": model, "img_size": size, "mean": list(mean), "std": list(std), "weights": weights}
    return read_config(None, {**BASE, **own, **given})


def assignments(pairs: Iterable[str]) -> dict[str, Any]:
    """Options from `KEY=VALUE`, values as YAML."""
    return {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in pairs)}


def sheets(
    folder: Path, config: Config, final: bool, device: torch.device, limit: int = 50, scored: int | None = None
) -> ByteData:
    """Nine sheets and the tenth, or all ten and the validation sheet.

    Args:
        limit, scored: images a class of each sheet; of the one that is scored on, if it is another number.
    """
    names = [f"train_{i}" for i in range(10 if final else 9)]
    parts = [validation_images(folder / f"{name}.jpg", range(limit)) for name in names]
    train = (torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts]))
    val = validation_images(folder / ("val.jpg" if final else "train_9.jpg"), range(scored or limit))
    assert config.img_size and config.mean and config.std
    size, normalisation = (config.img_size, config.img_size), (config.mean, config.std)
    augmentation = Augmentation(config.crop, config.flip, None, 0.0)
    classes = [str(i) for i in range(CLASSES)]
    return ByteData(train, val, size, normalisation, augmentation, device, config.seed, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sheets")
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--weights", required=True, help="weights of the start (safetensors)")
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the run, as YAML")
    parser.add_argument("--final", action="store_true", help="train on all sheets, score on the validation sheet")
    parser.add_argument("--limit", type=int, default=50, help="images a class of each sheet; less for a quick try")
    parser.add_argument("--scored", type=int, help="the same of the sheet that is scored on")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    given = assignments(options.set)
    config = configuration(options.start, options.weights, given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = sheets(options.data, config, options.final, device, options.limit, options.scored)
    result = prune(config, options.out, data=data)
    print(json.dumps(result.record))
    if options.json:
        options.json.write_text(json.dumps({"options": given, **result.record}) + "\n")


if __name__ == "__main__":
    main()
