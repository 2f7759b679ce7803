"""Prune ViT-Ti or DINOv2-S on Tiny-ImageNet with the whole set on the device: one run, one JSON record.

    python research/prune_tiny_imagenet.py --data DIR --weights vit_tiny_tin128.safetensors --out runs/x \
        [--start dinov2_small] [--set lr=5e-4 --set seed=1] [--final] [--limit 10 [--scored 50]] [--json FILE]

DIR is made by `tiny_imagenet.py`. A run is trained on nine tenths of the training images and scored on the held-out
tenth (`train_9.jpg`); `--final` trains on all of them and scores on the validation set.
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from hiap.data.sources import Augmentation, ByteData
from hiap.training.config import Config, read_config
from hiap.training.loop import prune
from tiny_imagenet import TENTHS, read_tiles

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


def tenths(
    folder: Path, config: Config, final: bool, device: torch.device, limit: int = 50, scored: int | None = None
) -> ByteData:
    """Nine tenths of the training images and the held-out tenth; if final, all of them and the validation set.

    Args:
        limit, scored: images of a class in each tenth; in the part that is scored on, if it is another number.
    """
    names = [f"train_{i}" for i in range(TENTHS if final else TENTHS - 1)]
    parts = [read_tiles(folder / f"{name}.jpg", range(limit)) for name in names]
    train = (torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts]))
    val = read_tiles(folder / ("val.jpg" if final else "train_9.jpg"), range(scored or limit))
    assert config.img_size and config.mean and config.std
    size, normalisation = (config.img_size, config.img_size), (config.mean, config.std)
    augmentation = Augmentation(config.crop, config.flip, None, 0.0)
    classes = [str(i) for i in range(int(val[1].max()) + 1)]
    return ByteData(train, val, size, normalisation, augmentation, device, config.seed, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--weights", required=True, help="weights of the start (safetensors)")
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the run, as YAML")
    parser.add_argument("--final", action="store_true", help="train on all images, score on the validation set")
    parser.add_argument("--limit", type=int, default=50, help="images of a class in each tenth; fewer for a quick try")
    parser.add_argument("--scored", type=int, help="the same for the part that is scored on")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    given = assignments(options.set)
    config = configuration(options.start, options.weights, given)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = tenths(options.data, config, options.final, device, options.limit, options.scored)
    result = prune(config, options.out, data=data)
    print(json.dumps(result.record))
    if options.json:
        options.json.write_text(json.dumps({"options": given, **result.record}) + "\n")


if __name__ == "__main__":
    main()
