"""Images without labels: which folders and tables are read, what is held out, and how they are scored afterwards."""

from pathlib import Path
from typing import Any

import pytest

from conftest import pictures
from hiap.cli.report import evaluation_options
from hiap.data.files import list_folder, list_images, read_table
from hiap.errors import InputError
from hiap.training.config import read_config


def test_any_folder_of_images_will_do(tmp_path: Path) -> None:
    pictures(tmp_path / "flat", 30)
    pictures(tmp_path / "flat/deeper/still", 10)
    train, val = list_images(str(tmp_path / "flat"), None)
    assert (len(train), len(val)) == (36, 4) and not set(train.paths) & set(val.paths)
    assert [len(part) for part in list_images(str(tmp_path / "flat"), 0.5)] == [20, 20]
    pictures(tmp_path / "split/train", 7)
    assert [len(part) for part in list_images(str(tmp_path / "split"), 0.3)] == [5, 2]
    pictures(tmp_path / "split/val/cat", 3)
    assert [len(part) for part in list_images(str(tmp_path / "split"), None)] == [7, 3]
    pictures(tmp_path / "one", 1)
    with pytest.raises(InputError, match="must hold at least two images, to train and to validate on; found 1"):
        list_images(str(tmp_path / "one"), None)


def test_a_folder_called_train_among_classes_is_one_of_them(tmp_path: Path) -> None:
    for name in ("train", "car", "bus"):
        pictures(tmp_path / name, 10)
    assert [len(part) for part in list_images(str(tmp_path), None)] == [27, 3]
    pictures(tmp_path / "val", 5)
    with pytest.warns(UserWarning, match="has the folders train and val; left out: bus, car"):
        assert [len(part) for part in list_images(str(tmp_path), None)] == [10, 5]


def test_images_are_held_out_as_with_labels(tmp_path: Path) -> None:
    """So that `hiap evaluate` scores features on images that they were not learned from."""
    for name, count in (("Zebra", 30), ("ant", 20), ("bee", 1)):
        pictures(tmp_path / name, count)
    _, labelled = list_folder(str(tmp_path), 0.1)
    pictures(tmp_path, 10)  # in no class
    train, val = list_images(str(tmp_path), None)
    inside = [path for path in val.paths if Path(path).parent != tmp_path]
    assert inside == labelled.paths and len(inside) == 5 and len(val) == 6 and len(train) == 55
    assert train.class_names == val.class_names == ["unlabelled"] and set(train.labels + val.labels) == {0}
    for i in range(20):
        pictures(tmp_path / "deep" / str(i), 1)
    assert [len(part) for part in list_images(str(tmp_path / "deep"), None)] == [18, 2]  # no folder has two


@pytest.mark.parametrize(
    "lines, sizes",
    [
        (["path"] + [f"{i}.png" for i in range(20)], [18, 2]),
        ([f"{i}.png" for i in range(20)], [18, 2]),
        (["path,label"] + [f"{i}.png," for i in range(20)], [18, 2]),
        ([f"{i}.png,{'ab'[i % 2]}" for i in range(20)], [18, 2]),
        ([f"{i}.png,,{'val' if i < 5 else 'train'}" for i in range(20)], [15, 5]),
    ],
)
def test_a_table_of_images_needs_no_labels(lines: list[str], sizes: list[int], tmp_path: Path) -> None:
    pictures(tmp_path, 20)
    table = tmp_path / "images.csv"
    table.write_text("\n".join(lines))
    parts = read_table(str(table), None, labels=False)
    assert [len(part) for part in parts] == sizes and not set(parts[0].paths) & set(parts[1].paths)
    assert parts[0].class_names == ["unlabelled"]
    with pytest.raises(InputError):
        read_table(str(table), None)


@pytest.mark.parametrize(
    "folders, given, words",
    [
        ([], {"weights": __file__}, "--data LABELLED --knn --against dense"),
        (["cat", "dog"], {"weights": __file__}, "--data {data} --val-split 0.1 --knn --against dense"),
        (["cat", "dog"], {"val_split": 0.3, "pretrained": False}, "--data {data} --val-split 0.3 --knn"),
        (["train/cat", "train/dog", "val/cat"], {"pretrained": False}, "--data {data} --knn"),
        ([], {"objective": "labels", "val_split": 0.3}, "--data {data} --val-split 0.3"),
    ],
)
def test_the_next_command_fits_the_images(
    folders: list[str], given: dict[str, Any], words: str, tmp_path: Path
) -> None:
    for name in folders or ["."]:
        pictures(tmp_path / name, 3)
    config = read_config(None, {"objective": "features", "target": "60%", "data": str(tmp_path), **given})
    assert evaluation_options(config) == words.format(data=tmp_path)
