"""Accuracy of a Tiny-ImageNet checkpoint, before and after an extraction with nothing closed.

    python research/accuracy.py --data DIR --weights vit_tiny_tin128.safetensors

DIR is made by `tiny_imagenet.py`. Preprocessing: bytes / 255, normalise with mean = std = 0.5, bicubic interpolation to
128 pixels without a crop. One line for each model; --json writes JSON.
"""

import argparse
import json
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import hiap
from tiny_imagenet import CLASSES, read_tiles

SIZE = 128


def vit_tiny(weights: Path) -> torch.nn.Module:
    """ViT-Ti at 128 pixels with 200 classes."""
    model = timm.create_model("vit_tiny_patch16_224", img_size=SIZE, num_classes=CLASSES)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(weights).items()})
    return model.eval()


@torch.inference_mode()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, batch: int = 100) -> float:
    """Top-1 in percent."""
    right = 0
    for x, y in zip(images.split(batch), labels.split(batch), strict=True):
        x = (x.float() / 255 - 0.5) / 0.5
        x = F.interpolate(x, SIZE, mode="bicubic", align_corners=False)
        right += (model(x).argmax(1) == y).sum().item()
    return 100 * right / len(labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with val.jpg")
    parser.add_argument("--weights", type=Path, required=True, help="ViT-Ti weights (safetensors)")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    images, labels = read_tiles(options.data / "val.jpg", range(50))
    dense = vit_tiny(options.weights)
    compact = hiap.extract(dense, hiap.Topology.from_counts(dense))
    result = {}
    for name, model in (("dense", dense), ("extracted", compact)):
        start = time.perf_counter()
        result[name] = accuracy(model, images, labels)
        print(f"{name:10} {result[name]:.2f} %  {len(labels)} images  {time.perf_counter() - start:.0f} s", flush=True)
    if options.json:
        options.json.write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
