"""Prune ViT-Ti on Tiny-ImageNet with the whole set on the device: one run, one JSON record.

    python benchmarks/prune_tiny_imagenet.py --data DIR --weights vit_tiny_tin128.safetensors --out runs/x \
        [--set lr=5e-4 --set seed=1] [--final] [--json FILE]

DIR holds the sheets `train_0.jpg` to `train_9.jpg` and `val.jpg`. Choices are made on sheet 9, trained on the others;
`--final` trains on all ten and scores on the validation sheet.
"""

import argparse
import json
from pathlib import Path

import torch
import yaml
from tiny_imagenet import CLASSES, SIZE, validation_images

from hiap.config import read_config
from hiap.data import Augmentation, ByteData
from hiap.train import prune

BASE = {
    "model": "vit_tiny_patch16_224",
    "img_size": SIZE,
    "target": "50%",
    "epochs": 15,
    "batch_size": 1024,
    "lr": 5e-4,
    "precision": "bf16",
    "warmup_epochs": 1,
    "eval_every": 5,
    "clip_grad": 1.0,
}


def sheets(folder: Path, final: bool, device: torch.device, seed: int) -> ByteData:
    names = [f"train_{i}" for i in range(10 if final else 9)]
    parts = [validation_images(folder / f"{name}.jpg", range(50)) for name in names]
    train = (torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts]))
    val = validation_images(folder / ("val.jpg" if final else "train_9.jpg"), range(50))
    half = ((0.5,) * 3, (0.5,) * 3)
    classes = [str(i) for i in range(CLASSES)]
    return ByteData(train, val, (SIZE, SIZE), half, Augmentation(0.35, 0.5, None, 0.0), device, seed, classes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sheets")
    parser.add_argument("--weights", required=True, help="ViT-Ti weights (safetensors)")
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the run, as YAML")
    parser.add_argument("--final", action="store_true", help="train on all sheets, score on the validation sheet")
    parser.add_argument("--json", type=Path, help="write the record here")
    options = parser.parse_args()
    given = {key: yaml.safe_load(value) for key, _, value in (pair.partition("=") for pair in options.set)}
    config = read_config(None, {**BASE, "weights": options.weights, **given})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result = prune(config, options.out, data=sheets(options.data, options.final, device, config.seed))
    print(json.dumps(result.record))
    if options.json:
        options.json.write_text(json.dumps({"options": given, **result.record}) + "\n")


if __name__ == "__main__":
    main()
