"""Opens the data that `--data` names.

Whatever it is, its batches depend only on seed, epoch and position, so that a stopped run can resume. There are three
kinds: sets held in memory (`memory`), sets with an index such as folders (`indexed`), and streams (`streams`). Loaders
of one's own (`loaders`) are not opened here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from timm.data import create_dataset
from timm.utils.misc import natural_key
from torch.utils.data import Subset

from hiap.data.files import HINT, folder_parts, list_folder, list_images, read_table, split_off
from hiap.data.images import Augmentation, Loading, mix_seed
from hiap.data.indexed import IndexedData, labels_of
from hiap.data.interface import Data
from hiap.data.loaders import LoaderData
from hiap.data.memory import ByteData, digits, read_bytes
from hiap.data.streams import STREAMS, StreamData, check_columns, open_stream
from hiap.errors import InputError

__all__ = [
    "Augmentation",
    "ByteData",
    "Data",
    "IndexedData",
    "LoaderData",
    "check_source",
    "digits",
    "mix_seed",
    "open_data",
]

SPLITS = ("train", "validation")
KINDS = {"torch": "torchvision", "hfds": "datasets", "hfids": "datasets", "wds": "webdataset"}  # with their packages


def check_source(data: str, val_split: float | None = None, labels: bool = True) -> None:
    """Refuse a name that cannot be data. Nothing is read, so this comes before weights are fetched.

    Raises:
        ValueError: there is no such folder, file or kind of data set.
    """
    if data == "digits":
        return
    if os.path.isdir(data) and not data.startswith(STREAMS):
        if labels:
            folder_parts(data, val_split)
    elif Path(data).suffix.lower() == ".csv":
        if not os.path.isfile(data):
            raise InputError(f"--data {data!r}: there is no such file")
    else:
        _locate(data)


def open_data(
    data: str,
    loading: Loading,
    hold: bool = False,
    classes: int | None = None,
    *,
    val_split: float | None = None,
    input_key: str | None = None,
    target_key: str | None = None,
    download: bool = False,
    labels: bool = True,
) -> Data:
    """The data of a name: "digits", a folder, a CSV file, or a data set of timm such as "torch/cifar10:ROOT".

    Args:
        hold: keep the whole set in memory as bytes, on the device, and augment it there.
        classes: number of classes, for a stream that does not say it.
        val_split: share of the training images of each class to validate on, instead of the validation images that
            the data has.
        input_key, target_key: columns of a data set of the Hugging Face hub; `image` and `label` by default.
        download: fetch a data set of torchvision that is not there.
        labels: whether they are read; if not, a folder or a CSV file needs no classes and no validation part.
    """
    held = (loading.size, loading.normalisation, loading.augmentation, loading.device, loading.seed)
    if (input_key or target_key) and not data.startswith(("hfds/", "hfids/")):
        raise InputError(f"--input-key and --target-key are columns of hfds/... and hfids/...; found --data {data!r}")
    if data == "digits":
        if val_split is not None:
            raise InputError("digits has a validation part of its own: leave --val-split out")
        train, val = digits()
        names = [str(i) for i in range(10)]
        if loading.channels == 3:
            train, val = ((images.expand(-1, 3, -1, -1), labels) for images, labels in (train, val))
        return ByteData(train, val, *held, names)
    keys = (input_key or "image", target_key or "label")
    if data.startswith(STREAMS):
        return _open_stream(data, loading, hold, classes, val_split, keys)
    if os.path.isdir(data) or Path(data).suffix.lower() == ".csv":
        try:
            if not os.path.isdir(data):
                sets: Sequence[Any] = read_table(data, val_split, labels)
            else:
                sets = (list_folder if labels else list_images)(data, val_split)
        except OSError as error:
            raise InputError(f"--data {data!r} cannot be read: {error}") from error
        class_names: list[str] | None = sets[0].class_names
    else:
        sets, class_names = _open_named(data, val_split, keys, download)
    if hold:
        train, val = (read_bytes(one, loading) for one in sets)
        return ByteData(train, val, *held, class_names)
    return IndexedData(sets[0], sets[1], class_names, loading)


def _open_stream(
    data: str, loading: Loading, hold: bool, classes: int | None, val_split: float | None, keys: tuple[str, str]
) -> StreamData:
    name, root = _locate(data)
    if hold:
        raise InputError(f"{data} is a stream, which is not held in memory: use --data-device loader")
    if val_split is not None:
        raise InputError(f"{data} is a stream, which --val-split cannot split: give it a split called validation")
    first, second = (open_stream(name, root, split, *keys) for split in SPLITS)
    classes = len(first.class_names) if first.class_names else classes
    if classes is None:
        raise InputError(f"{data} does not say how many classes it has: pass --model-args '{{\"num_classes\": N}}'")
    return StreamData(first, second, classes, loading)


def _open_named(
    data: str, val_split: float | None, keys: tuple[str, str], download: bool
) -> tuple[Sequence[Any], list[str] | None]:
    """The training and validation parts of a data set that timm makes, and the names of its classes."""
    name, root = _locate(data)
    hub = name.startswith("hfds/")
    options: dict[str, Any] = {"input_key": keys[0], "target_key": keys[1]} if hub else {"download": download}

    def create(split: str, **more: Any) -> Any:
        try:
            return create_dataset(name, root=root, split=split, is_training=split == "train", **options, **more)
        except (AssertionError, KeyError, OSError, RuntimeError, ValueError) as error:
            if hub:
                _check_hub(name, root, split, keys)
            told = f"{root} does not hold it: pass --download" if "download=True" in str(error) else error
            hint = f"; {HINT}" if hub and split != "train" else ""
            raise InputError(f"--data {data!r} cannot be read: {told}{hint}") from error

    train = create("train")
    if hub:
        check_columns(name, train.reader.dataset.column_names, *keys)
    index = _class_index(train)
    if hub and not index and isinstance((labels := labels_of(train))[0], str):
        index = {label: i for i, label in enumerate(sorted(sorted(set(labels)), key=natural_key))}
        train = create("train", class_map=index)
    if val_split is not None:
        sets: Sequence[Any] = [Subset(train, chosen) for chosen in split_off(labels_of(train), val_split)]
    else:
        sets = [train, create("validation")]
        other = _class_index(sets[1])
        if index != other:  # validation has labels of its own: it gets those of training
            if more := sorted(set(other) - set(index)):
                raise InputError(f"{data} has validation classes that are not in the training part: {more}")
            if not hub:
                missing = sorted(set(index) - set(other))
                raise InputError(
                    f"{data} has no validation images of {missing}, and without them its labels differ: add some"
                )
            sets = [train, create("validation", class_map=index)]
    class_names = sorted(index, key=index.__getitem__) if index else None
    if class_names and len(class_names) < 2:
        raise InputError(f"{data} must have at least two classes; found {class_names}")
    return sets, class_names


def _class_index(dataset: Any) -> dict[str, int]:
    index: dict[str, int] = getattr(getattr(dataset, "reader", dataset), "class_to_idx", {})
    return index


def _check_hub(name: str, root: str, split: str, keys: tuple[str, str]) -> None:
    """Say so if what a data set of the Hugging Face hub lacks is a column."""
    import datasets

    try:
        columns = datasets.load_dataset(name.partition("/")[2], split=split, cache_dir=root).column_names
    except Exception:  # the first error says what else is missing
        return
    check_columns(name, columns, *keys)


def _locate(data: str) -> tuple[str, str]:
    """timm's name and root of a data set such as "torch/cifar10:ROOT"."""
    name, _, root = data.partition(":")
    kind, slash, _ = name.partition("/")
    if not slash or kind not in KINDS:
        known = ", ".join(f"{kind}/..." for kind in KINDS)
        raise InputError(
            f"--data {data!r} is not a folder, a timm data set that can be read ({known}), a CSV file or 'digits'"
        )
    if find_spec(KINDS[kind]) is None:
        raise InputError(f"--data {data!r} is read with {KINDS[kind]}, which is missing: pip install {KINDS[kind]}")
    return name, root or "data"
