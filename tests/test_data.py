import os
import random
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from timm.data.readers.img_extensions import is_img_extension

import hiap
from hiap.cli.main import main
from hiap.data.images import Loading
from hiap.data.memory import read_bytes
from hiap.data.sources import Augmentation, ByteData, Data, digits, mix_seed, open_data
from hiap.training.config import read_config
from hiap.training.setup import load_data, note_preprocessing

HALF = ((0.5,) * 3, (0.5,) * 3)
CPU = torch.device("cpu")
LIGHT = Augmentation(crop=0.5, flip=0.5, policy="rand-m5-mstd0.5", erase=0.5)


LOADING = Loading((16, 16), HALF, LIGHT, CPU, workers=0)


def opened(data: Path | str, hold: bool = False, classes: int | None = None, **options: Any) -> Data:
    return open_data(str(data), replace(LOADING, **options), hold, classes)


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


def test_broken_images_are_not_scored(photos: Path) -> None:
    (photos / "val/cat/1.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning, match="skipped"):
        assert labels(list(opened(photos).val(3))) == [0, 0, 0, 1, 1, 1, 1]


def test_a_batch_of_broken_images_is_not_scored_and_a_set_of_them_refused(photos: Path) -> None:
    (photos / "val/dog/3.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning, match="1 images were skipped"):
        assert labels(list(opened(photos).val(7))) == [0, 0, 0, 0, 1, 1, 1]  # the last batch had one image
    for file in (photos / "val").glob("*/*"):
        file.write_bytes(b"not an image")
    with pytest.raises(ValueError, match="no image can be read"), pytest.warns(UserWarning):
        list(opened(photos).val(7))
    with pytest.raises(ValueError, match="none of 8 images can be read"), pytest.warns(UserWarning):
        opened(photos, hold=True)


def test_images_of_16_bits_are_scaled(photos: Path) -> None:
    grey = np.linspace(0, 65535, 20 * 24).astype(np.uint16).reshape(20, 24)
    Image.fromarray(grey).save(photos / "val/cat/0.png")
    data = opened(photos, size=(20, 24), hold=True)
    held = next(data.val(1))[0] * 0.5 + 0.5
    torch.testing.assert_close(held[0, 0], torch.from_numpy(grey / 65535).float(), atol=2.5e-3, rtol=0)


@pytest.mark.parametrize("kind", ["webp", "bmp", "tiff"])
def test_other_kinds_of_images_are_read(photos: Path, kind: str) -> None:
    Image.open(photos / "val/cat/3.png").save(photos / f"val/cat/4.{kind}")
    assert opened(photos).val_size == 9
    assert not is_img_extension(f".{kind}")  # timm is as it was


def test_no_colours_are_changed_without_a_policy(photos: Path) -> None:
    plain = Augmentation(crop=1.0, flip=0.0, policy=None, erase=0.0)
    for file in (photos / "train").glob("*/*"):
        Image.new("RGB", (16, 16), (128, 64, 32)).save(file)
    for x, _ in opened(photos, augmentation=plain).train(0, 0, 8, 0, 1):
        torch.testing.assert_close((x * 0.5 + 0.5)[:, :, 8, 8] * 255, torch.tensor([[128.0, 64, 32]]).expand(8, -1))


def test_the_strongest_augmentation_works(photos: Path) -> None:
    strong = Augmentation(crop=1.0, flip=0.0, policy="rand-m10-n8-inc1", erase=0.0)
    data = opened(photos, augmentation=strong, strict=True)
    assert all(x.isfinite().all() for epoch in range(4) for x, _ in data.train(epoch, 0, 8, 0, 1))


def test_wrong_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    with pytest.raises(ValueError, match=r"must hold the folders train and val.*found \['images'\]"):
        opened(tmp_path)
    with pytest.raises(ValueError, match="is not a folder, a timm data set"):
        opened(tmp_path / "nowhere")
    for split in ("train/cat/images", "train/dog/images", "val/images"):
        (tmp_path / split).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(tmp_path / split / "0.png")
    with pytest.raises(ValueError, match=r"images directly in it; found \['images'\]"):
        opened(tmp_path)


def test_labels_that_differ_between_the_splits_are_refused(photos: Path) -> None:
    for name in ("ant", "bee"):
        (photos / "train" / name).mkdir()
        Image.new("RGB", (8, 8)).save(photos / f"train/{name}/0.png")
    (photos / "val").rename(photos / "validation")
    assert labels(list(opened(photos).val(8))) == [2] * 4 + [3] * 4
    with pytest.raises(ValueError, match=r"no validation images of \['ant', 'bee'\]"):
        opened(f"torch/image_folder:{photos}")


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


@pytest.mark.parametrize("hold", [False, True])
def test_validation_may_lack_a_class_but_not_have_one_more(photos: Path, hold: bool) -> None:
    for image in (photos / "val/cat").iterdir():
        image.unlink()
    (photos / "val/cat").rmdir()
    assert labels(list(opened(photos, hold=hold).val(2))) == [1, 1, 1, 1]
    (photos / "val/dog").rename(photos / "val/fox")
    with pytest.raises(ValueError, match=r"validation classes that are not in the training part: \['fox'\]"):
        opened(photos, hold=hold)


def test_validation_images_are_cropped_as_the_model_wants_it(photos: Path) -> None:
    def first(share: float) -> torch.Tensor:
        return next(iter(opened(photos, crop_pct=share).val(1)))[0]

    image = Image.open(photos / "val/cat/0.png").convert("RGB")
    plain = create_transform((3, 16, 16), mean=HALF[0], std=HALF[1], interpolation="bicubic", crop_pct=1.0)
    assert torch.equal(first(1.0)[0], plain(image)) and not torch.equal(first(0.5), first(1.0))
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=2)  # timm: bicubic, 0.9
    config = read_config(None, {"data": str(photos), "target": "50%", "workers": 0})
    assert torch.equal(next(iter(load_data(config, model, CPU).val(1)))[0], first(0.9))
    squashed = next(iter(opened(photos, crop_pct=1.0, crop_mode="squash").val(1)))[0][0]
    assert torch.equal(squashed, plain(image.resize((16, 16), Image.Resampling.BICUBIC)))


def test_a_folder_is_pruned_and_evaluated(photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {
        "model": "vit_tiny_patch16_224",
        "model_args": {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2},
        "pretrained": False,
        "data": str(photos),
        "mean": [0.4, 0.5, 0.6],
        "std": [0.2, 0.3, 0.4],
        "target": "70%",
        "epochs": 4,
        "batch_size": 8,
        "workers": 0,
        "mixup": 0.5,
    }
    from hiap.training.loop import prune

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = prune(read_config(None, options), tmp_path / "run")
    assert result.record["macs"] <= 0.7 * result.record["dense_macs"]
    loaded = hiap.load(tmp_path / "run/compact")
    assert loaded.class_names == ["cat", "dog"]
    preprocessing = resolve_data_config({}, model=loaded)
    assert preprocessing["input_size"] == (3, 16, 16) and loaded.pretrained_cfg["num_classes"] == 2
    assert (preprocessing["mean"], preprocessing["std"]) == ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run/compact"), "--data", str(photos), "--workers", "0"]) == 0
    assert capsys.readouterr().out.startswith(f"top-1 {result.record['top1']:.2f} %")


def test_what_was_held_in_memory_is_evaluated_alike(photos: Path) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=16, num_classes=2)
    config = read_config(None, {"data": str(photos), "data_device": "cpu", "target": "50%", "workers": 0})
    held = load_data(config, model, CPU)
    note_preprocessing(model, HALF, held)
    config.data_device = "loader"
    for one, two in zip(held.val(3), load_data(config, model, CPU).val(3), strict=True):
        torch.testing.assert_close(one[0], two[0], atol=1e-6, rtol=0)


def test_images_that_are_held_in_memory_keep_no_file_open() -> None:
    resource = pytest.importorskip("resource")
    red = Image.new("RGB", (4, 4), (200, 0, 0))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = max(map(int, os.listdir("/proc/self/fd"))) + 60 if Path("/proc/self/fd").is_dir() else limits[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (least, limits[1]))
    try:
        images, labels = read_bytes([(red, i % 3) for i in range(300)], replace(LOADING, workers=1))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert images.shape == (300, 3, 16, 16) and images[:, 0].eq(200).all() and not images[:, 1:].any()
    assert labels.tolist() == [i % 3 for i in range(300)]


def same(first: list[tuple[torch.Tensor, ...]], second: list[tuple[torch.Tensor, ...]]) -> bool:
    return len(first) == len(second) and all(
        torch.equal(a, b) for one, two in zip(first, second, strict=True) for a, b in zip(one, two, strict=True)
    )


def labels(batches: list[tuple[torch.Tensor, ...]]) -> list[int]:
    return torch.cat([y for _, y in batches]).tolist()


def test_a_tenth_is_held_out_of_the_training_images() -> None:
    images = torch.arange(50, dtype=torch.uint8).view(50, 1, 1, 1).expand(50, 1, 4, 4)
    rest = (Augmentation(), CPU, 0, list("abcde"))
    data = ByteData((images, torch.arange(50) % 5), (images[:3], torch.arange(3)), (4, 4), ((0.0,), (1 / 255,)), *rest)
    held = data.held_out()
    assert (held.train_size, held.val_size) == (45, 5) and (data.train_size, data.val_size) == (50, 3)
    seen = [part[0][:, 0, 0, 0] for part in (held._train, held._val)]
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(50, dtype=torch.uint8))
