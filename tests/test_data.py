import random
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import hiap
from hiap.cli import main
from hiap.config import read_config
from hiap.data import Augmentation, digits, mix_seed, open_data

HALF = ((0.5,) * 3, (0.5,) * 3)
CPU = torch.device("cpu")
LIGHT = Augmentation(crop=0.5, flip=0.5, policy="rand-m5-mstd0.5", erase=0.5)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """An image folder with grey, palette, transparent and broken pictures among ordinary ones."""
    chance = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 4)):
        for name in ("cat", "dog"):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(chance.integers(0, 255, (20, 24, 3), dtype=np.uint8))
                mode = {0: "L", 1: "P", 2: "RGBA"}.get(i, "RGB")
                image.convert(mode).save(folder / f"{i}.png")
    return tmp_path


def opened(folder: Path, **options: object):
    arguments = {"seed": 0, "workers": 0, "strict": False, "channels": 3, **options}
    return open_data(str(folder), (16, 16), HALF, LIGHT, CPU, **arguments)


@pytest.mark.parametrize("hold", [False, True])
def test_batches_depend_on_seed_epoch_and_position_alone(photos: Path, hold: bool) -> None:
    data = opened(photos, hold=hold)
    assert data.class_names == ["cat", "dog"] and data.classes == 2
    assert (data.train_size, data.val_size) == (24, 8)
    first = list(data.train(3, 0, 8, 0, 1))
    random.seed(99), torch.manual_seed(99), np.random.seed(99)
    again = list(opened(photos, hold=hold).train(3, 1, 8, 0, 1))
    assert len(first) == 3 and len(again) == 2
    for (x, y), (x2, y2) in zip(first[1:], again, strict=True):
        assert torch.equal(x, x2) and torch.equal(y, y2) and x.shape == (8, 3, 16, 16)
    assert not torch.equal(first[0][0], next(iter(data.train(4, 0, 8, 0, 1)))[0])
    shards = [list(data.train(3, 0, 8, rank, 2)) for rank in (0, 1)]
    for whole, *parts in zip(first, *shards, strict=True):
        torch.testing.assert_close(whole[0], torch.cat([part[0] for part in parts]))


def test_workers_read_what_the_main_process_reads(photos: Path) -> None:
    one, two = (list(opened(photos, workers=workers).train(0, 0, 8, 0, 1)) for workers in (0, 2))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("hold", [False, True])
def test_broken_images_are_skipped_with_a_count_or_refused(photos: Path, hold: bool) -> None:
    (photos / "train/cat/5.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning, match=r"images (were skipped|cannot be read)|some images cannot be read"):
        batches = list(opened(photos, hold=hold).train(0, 0, 8 if not hold else 4, 0, 1))
    assert all(len(y) == (8 if not hold else 4) for _, y in batches)
    with pytest.raises(ValueError, match=r"image \d+ of the data set cannot be read"):
        list(opened(photos, hold=hold, strict=True).train(0, 0, 24, 0, 1))


def test_wrong_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"must hold the folders train and val.*found \['images'\]"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="is no folder, no timm data set"):
        opened(tmp_path / "nowhere")


def test_digits_are_those_of_scikit_learn() -> None:
    (train, train_labels), (val, val_labels) = digits()
    assert (len(train), len(val)) == (1437, 360) and train.shape[1:] == (1, 8, 8)
    assert torch.bincount(torch.cat([train_labels, val_labels])).tolist() == [
        178,
        182,
        177,
        183,
        181,
        182,
        181,
        179,
        174,
        180,
    ]
    assert mix_seed(1, 2) != mix_seed(2, 1)


def test_a_folder_is_pruned_and_evaluated(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "model": "vit_tiny_patch16_224",
        "model_args": {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "pretrained": False,
        "data": str(photos),
        "target": "70%",
        "epochs": 4,
        "batch_size": 8,
        "workers": 0,
        "mixup": 0.5,
    }
    from hiap.train import prune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = prune(read_config(None, options), tmp_path / "run")
    assert result.record["macs"] <= 0.7 * result.record["dense_macs"]
    assert hiap.load(tmp_path / "run/compact").class_names == ["cat", "dog"]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run/compact"), "--data", str(photos), "--workers", "0"]) == 0
    assert capsys.readouterr().out.startswith(f"top-1 {result.record['top1']:.2f} %")
