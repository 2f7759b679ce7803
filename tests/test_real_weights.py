"""A trained ViT-Ti on real images; skipped where the weights are not at hand."""

import sys
from pathlib import Path

import pytest
import torch

import hiap
from conftest import SHARED

sys.path.insert(0, str(Path(__file__).parents[1] / "research"))
from accuracy import accuracy, vit_tiny
from tiny_imagenet import read_tiles

WEIGHTS = SHARED / "models/vit_tiny_tin128.safetensors"
SHEET = SHARED / "data/tiny_imagenet/val.jpg"

pytestmark = pytest.mark.skipif(
    not (WEIGHTS.is_file() and SHEET.is_file()), reason="needs ViT-Ti weights and Tiny-ImageNet beside the checkout"
)


@pytest.mark.slow
def test_accuracy_of_the_dense_model_and_of_its_extraction() -> None:
    images, labels = read_tiles(SHEET, [0, 10, 20, 30, 40])
    dense = vit_tiny(WEIGHTS)
    compact = hiap.extract(dense, hiap.Topology.from_counts(dense))
    scores = [accuracy(model, images, labels) for model in (dense, compact)]
    assert scores == pytest.approx([80.0, 80.0], abs=0.2)
    assert hiap.macs(compact) == hiap.macs(dense)
    gated = hiap.attach(dense)
    x = torch.rand(2, 3, 128, 128)
    assert torch.equal(gated.eval()(x), vit_tiny(WEIGHTS)(x))
