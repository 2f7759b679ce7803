"""The first hour of a new user, on real images and weights: other classes, no validation folder, Ctrl-C, resume."""

import json
import re
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from conftest import SHARED
from forking import run_forked

pytestmark = pytest.mark.slow

SHEET, WEIGHTS = SHARED / "data/tiny_imagenet/train_0.jpg", SHARED / "models/vit_tiny_tin128.safetensors"
TILE, CLASSES, IMAGES = 64, 4, 10
STOPS = (r"^dense +3/5 ", r"^recover +6/15 ")  # lines of output after which Ctrl-C is pressed


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Every 50th class of a sheet of tiles, a row a class, under another name."""
    sheet = Image.open(SHEET)
    for label in range(CLASSES):
        folder = tmp_path / f"photos/thing_{label}"
        folder.mkdir(parents=True)
        for i in range(IMAGES):
            left, top = i * TILE, 50 * label * TILE
            sheet.crop((left, top, left + TILE, top + TILE)).save(folder / f"{i}.png")
    return tmp_path / "photos"


def hiap(folder: Path, *arguments: str, stop: str = "") -> tuple[int, str]:
    """The command in a process of its own, interrupted after a line of its output."""
    done = run_forked("interrupted.py", stop, "prune", *arguments, folder=folder, seconds=900)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.skipif(not (SHEET.exists() and WEIGHTS.exists()), reason="no Tiny-ImageNet and no trained ViT-Ti here")
def test_other_classes_interrupted_twice_and_resumed(photos: Path) -> None:
    home = photos.parent
    options = ["--model", "vit_tiny_patch16_224", "--weights", str(WEIGHTS), "--img-size", "128", "--data", "photos"]
    options += ["--mean", "0.5,0.5,0.5", "--std", "0.5,0.5,0.5", "--target", "50%", "--val-split", "0.2"]
    status, text = hiap(home, *options, "--out", "whole", "--workers", "0")  # which changes nothing but the time
    assert status == 0, text
    assert "dense    fine-tuned first for 5 epochs, learning rate 1.0e-04, with a new classifier" in text

    status, text = hiap(home, *options, "--out", "run", stop=STOPS[0])
    for stop in (STOPS[1], ""):
        assert status == 130 and "Traceback" not in text, text
        assert re.search(r"^saved at step \d+; go on with `hiap prune --resume --out run`$", text, re.MULTILINE)
        status, text = hiap(home, "--resume", "--out", "run", stop=stop)
    assert status == 0, text

    first, second = (load_file(home / name / "compact/model.safetensors") for name in ("whole", "run"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    report = json.loads((home / "run/report.json").read_text())
    assert report["top1"] > 0.75 * report["dense_top1"] and report["dense_top1"] > 50
    assert 0.99 * 0.5 < report["macs"] / report["dense_macs"] <= 0.5
