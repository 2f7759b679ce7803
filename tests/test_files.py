"""Folders and tables of images as people have them."""

import os
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from conftest import write_shards
from hiap.data.files import split_off
from hiap.data.images import Loading
from hiap.data.sources import Augmentation, IndexedData, check_source, open_data
from hiap.training.config import ConfigError, read_config

PLAIN = Loading((16, 16), ((0.5,) * 3, (0.5,) * 3), Augmentation(policy=None), torch.device("cpu"), workers=0)


def opened(data: Path | str, hold: bool = False, seed: int = 0, strict: bool = False, **options: Any) -> Any:
    return open_data(str(data), replace(PLAIN, seed=seed, strict=strict), hold, **options)


def names(data: IndexedData) -> tuple[list[str], list[str]]:
    train, val = data._train.dataset, data._val.dataset
    return [train.name(i) for i in range(len(train))], [val.name(i) for i in range(len(val))]


def draw(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), 99, dtype=np.uint8)).save(file)


@pytest.mark.parametrize("part", ["val", "validation", "valid", "test"])
def test_the_validation_folder_may_have_any_usual_name(photos: Path, part: str) -> None:
    (photos / "val").rename(photos / part)
    data = opened(photos)
    assert (data.train_size, data.val_size) == (24, 8) and names(data)[1][0] == f"{part}/cat/0.png"


def test_val_is_taken_before_test_and_two_validation_folders_are_said(photos: Path) -> None:
    shutil.copytree(photos / "val", photos / "test")
    assert names(opened(photos))[1][0] == "val/cat/0.png"
    shutil.copytree(photos / "val", photos / "valid")
    with pytest.warns(UserWarning, match=r"has the folders val, valid, test: val is used for validation"):
        assert names(opened(photos))[1][0] == "val/cat/0.png"


@pytest.mark.parametrize("flat", [False, True])
def test_a_share_of_every_class_is_taken_for_validation(photos: Path, flat: bool) -> None:
    shutil.rmtree(photos / "val")
    found = ["train"]
    if flat:
        for folder in (photos / "train").iterdir():
            folder.rename(photos / folder.name)
        (photos / "train").rmdir()
        found = ["cat", "dog"]
    with pytest.raises(ValueError) as caught:
        opened(photos)
    assert str(caught.value) == (
        f"{photos} must hold the folders train and val, each with one folder for every class; found {found}; without a "
        "validation part, pass --val-split 0.1 to take a tenth of the training images"
    )
    data = opened(photos, val_split=0.25)
    train, val = names(data)
    assert (data.train_size, data.val_size, data.class_names) == (18, 6, ["cat", "dog"])
    assert not set(train) & set(val) and len(set(train) | set(val)) == 24
    assert data._val.dataset.labels == [0, 0, 0, 1, 1, 1]
    assert names(opened(photos, val_split=0.25)) == (train, val) == names(opened(photos, val_split=0.25, seed=1))
    held = opened(photos, hold=True, val_split=0.25)
    assert (held.train_size, held.val_size) == (18, 6)


def test_a_share_leaves_the_validation_folder_alone(photos: Path) -> None:
    assert all(name.startswith("train/") for part in names(opened(photos, val_split=0.5)) for name in part)


def test_every_class_of_two_images_is_in_both_parts() -> None:
    train, val = split_off([0] * 2 + [1] * 100 + [2], 0.01)
    labels = [0, 0, *[1] * 100, 2]
    assert [labels[i] for i in val] == [0, 1] and sorted(train + val) == list(range(103))
    assert len(split_off([0] * 4 + [1] * 4, 0.99)[0]) == 2
    with pytest.raises(ValueError, match="no class has two images"):
        split_off([0, 1, 2], 0.5)


@pytest.mark.parametrize("share", [0.0, 1.0, -0.1, 2.0])
def test_a_share_is_above_0_and_below_1(share: float) -> None:
    with pytest.raises(ConfigError, match="val_split must be a share above 0 and below 1; found"):
        read_config(None, {"target": "50%", "val_split": share})


def test_a_share_of_the_digits_or_of_a_stream_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="digits has a validation part of its own: leave --val-split out"):
        opened("digits", val_split=0.1)
    shards = write_shards(tmp_path / "shards", {"train": [4], "validation": [2]})
    with pytest.raises(
        ValueError, match="is a stream, which --val-split cannot split: give it a split called validation"
    ):
        opened(shards, classes=10, val_split=0.1)


def test_a_class_without_images_is_named(photos: Path) -> None:
    (photos / "train/fox").mkdir()
    (photos / "train/fox/notes.txt").touch()
    with pytest.warns(UserWarning, match=r"there is no image in train/fox: it does not count as a class"):
        assert opened(photos).class_names == ["cat", "dog"]
    shutil.rmtree(photos / "val/cat"), shutil.rmtree(photos / "val/dog")
    with pytest.raises(
        ValueError, match=r"cannot be read: Found 0 images in the class folders of .*/val; the kinds are \.png, \.jpg"
    ):
        opened(photos)


def test_hidden_folders_are_no_classes(photos: Path) -> None:
    draw(photos / "train/.ipynb_checkpoints/0.png")
    draw(photos / "train/cat/._0.png")
    assert (opened(photos).class_names, opened(photos).train_size) == (["cat", "dog"], 24)


def test_links_in_circles_are_read_once(photos: Path) -> None:
    for name in ("a", "b", "c"):
        for folder in (photos / "train/cat", photos / "train/dog"):
            (folder / name).symlink_to(photos / "train")
            (folder / f"{name}{name}").symlink_to(folder / f"{name}{name}")
    data = opened(photos)
    assert (data.train_size, data.class_names) == (24, ["cat", "dog"])


def test_linked_folders_and_files_are_read(photos: Path, tmp_path: Path) -> None:
    (photos / "train").rename(tmp_path / "elsewhere")
    (photos / "train").symlink_to(tmp_path / "elsewhere")
    draw(tmp_path / "store/0.png")
    (photos / "train/fox").symlink_to(tmp_path / "store")
    (photos / "train/dog/new.png").symlink_to(tmp_path / "store/0.png")
    (photos / "train/dog/gone.png").symlink_to(tmp_path / "store/gone.png")
    data = opened(photos)
    assert (data.train_size, data.class_names) == (26, ["cat", "dog", "fox"])


def test_only_regular_files_are_read(photos: Path) -> None:
    os.mkfifo(photos / "train/cat/pipe.png")
    data: list[Any] = []
    reading = threading.Thread(target=lambda: data.append(len(list(opened(photos).train(0, 0, 24, 0, 1)))), daemon=True)
    reading.start()
    reading.join(20)
    assert data == [1]


@pytest.mark.parametrize("hold", [False, True])
def test_images_that_cannot_be_read_are_named(photos: Path, hold: bool) -> None:
    for name in ("cat/1", "cat/10", "dog/2", "dog/3"):
        (photos / f"train/{name}.png").write_bytes(b"not an image")
    with pytest.warns(UserWarning) as caught:
        list(opened(photos, hold).train(0, 0, 20, 0, 1))
    first, *last = [str(warning.message) for warning in caught]
    if hold:
        assert not last and first == (
            "4 images cannot be read and are skipped: train/cat/1.png, train/cat/10.png, train/dog/2.png and 1 more; "
            "--strict-data makes this an error"
        )
    else:
        assert first.startswith("some images cannot be read and are skipped: train/")
        assert first.endswith("; --strict-data makes this an error")
        assert last[0].split(" images were skipped in this pass: train/")[0] in ("3", "4")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("hold", [False, True])
def test_a_strict_run_names_the_file_in_one_line(photos: Path, hold: bool, workers: int) -> None:
    (photos / "train/cat/5.png").write_bytes(b"not an image")
    with pytest.raises(ValueError) as caught:
        data = open_data(str(photos), replace(PLAIN, workers=workers, strict=True), hold)
        list(data.train(0, 0, 24, 0, 1))
    assert str(caught.value).startswith("image 5 of the data set cannot be read (train/cat/5.png): cannot identify")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_shard_and_a_wrong_label_are_told_in_one_line(tmp_path: Path, workers: int) -> None:
    loading = replace(PLAIN, workers=workers)
    shards = write_shards(tmp_path, {"train": [8, 8], "validation": [4, 4]}, broken=3)
    with pytest.raises(ValueError) as caught:
        list(open_data(shards, loading, classes=20).val(4))
    assert str(caught.value) == (
        "a label must be from 0 to 19, by the number of classes; found 20 (000020 of validation-0001.tar)"
    )
    with pytest.raises(ValueError, match=r"^image \d+ of worker \d cannot be read \(000003 of train-0000\.tar\): .*$"):
        list(open_data(shards, replace(loading, strict=True), classes=100).train(0, 0, 16, 0, 1))
    damaged = tmp_path / "train-0001.tar"
    damaged.write_bytes(damaged.read_bytes()[:2000])
    with pytest.raises(ValueError) as caught:
        list(open_data(shards, loading, classes=100).train(0, 0, 8, 0, 1))
    assert str(caught.value).startswith(f"shard {damaged} cannot be read: ") and "\n" not in str(caught.value)


def test_a_set_of_torchvision_is_downloaded_only_if_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError) as caught:
        opened(f"torch/cifar10:{tmp_path}")
    told = f"--data 'torch/cifar10:{tmp_path}' cannot be read: {tmp_path} does not hold it: pass --download"
    assert str(caught.value) == told
    asked: list[bool] = []

    class Cifar:
        def __init__(self, root: str, train: bool, download: bool) -> None:
            asked.append(download)
            self.targets, self.class_to_idx = [0, 1] * 4, {"cat": 0, "dog": 1}

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[Image.Image, int]:
            return Image.new("RGB", (8, 8)), self.targets[index]

    monkeypatch.setitem(sys.modules["timm.data.dataset_factory"]._TORCH_BASIC_DS, "cifar10", Cifar)
    assert opened(f"torch/cifar10:{tmp_path}", download=True).train_size == 8 and asked == [True, True]
    data = opened(f"torch/cifar10:{tmp_path}", val_split=0.25)
    assert (data.train_size, data.val_size, len(list(data.train(0, 0, 3, 0, 1)))) == (6, 2, 2)
    assert sorted(torch.cat([y for _, y in data.val(2)]).tolist()) == [0, 1]
    with pytest.raises(ValueError, match="cannot be read: Unknown torchvision dataset nothing"):
        opened(f"torch/nothing:{tmp_path}")


@pytest.mark.parametrize("kind", ["webp", "gif", "tiff", "bmp", "ppm", "jpg"])
def test_every_kind_of_image_is_read(photos: Path, kind: str) -> None:
    for file in (photos / "val").glob("*/*.png"):
        Image.open(file).convert("RGB").save(file.with_suffix(f".{kind}"), save_all=kind in ("gif", "tiff"))
        file.unlink()
    assert sum(len(y) for _, y in opened(photos, strict=True).val(3)) == 8


@pytest.mark.slow
def test_names_that_sort_alike_have_one_order(tmp_path: Path) -> None:
    """timm takes 01 for 1 and A for a; the order must not depend on a process."""
    for name in ("A", "a", "B", "b", "01", "1"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(2):
            Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name / f"{i}.png")
    code = "import sys; from hiap.data.files import list_folder; print(list_folder(sys.argv[1], 0.5)[0].class_names)"
    orders = [
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "photos")],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert set(orders) == {"['01', '1', 'A', 'a', 'B', 'b']\n"}


def test_images_beside_the_class_folders_are_left_out(photos: Path) -> None:
    Image.new("RGB", (4, 4)).save(photos / "train/thumb.png")
    with pytest.warns(UserWarning, match=r"images outside the class folders are left out: train/thumb\.png"):
        assert opened(photos).class_names == ["cat", "dog"]


def test_a_folder_called_digits_does_not_hide_the_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    check_source("digits")
    with pytest.raises(ValueError, match="must hold the folders train and val"):
        check_source("./digits")
