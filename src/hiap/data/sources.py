"""Batches of images that are a function of seed, epoch and position alone, so that a run can go on where it stopped.

Three kinds of data: bytes held in memory (small sets, augmented a batch at a time on the device that holds them), data
sets with an index (a folder, a CSV table or a name timm's factory reads), and streams. The images of the last two are
augmented one at a time by loader workers. Loaders of one's own are a fourth kind, with a promise of their own.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset
from timm.utils.misc import natural_key
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from hiap.data.files import HINT, Files, folder_parts, list_folder, read_table, split_off
from hiap.data.images import (
    Augmentation,
    Batch,
    Loading,
    Lost,
    Sample,
    collate,
    converted,
    deliver,
    mix_seed,
    named,
    order,
    outlive_signals,
    transform,
)
from hiap.data.loaders import LoaderData
from hiap.data.memory import ByteData, digits
from hiap.data.streams import STREAMS, StreamData, check_columns, open_stream
from hiap.errors import InputError

__all__ = [
    "Augmentation",
    "ByteData",
    "Data",
    "FolderData",
    "LoaderData",
    "check_source",
    "digits",
    "mix_seed",
    "open_data",
]

SPLITS = ("train", "validation")
KINDS = {"torch": "torchvision", "hfds": "datasets", "hfids": "datasets", "wds": "webdataset"}  # and what reads them


@runtime_checkable
class Data(Protocol):
    """Training and validation batches of one data set; `hiap.prune(config, out, data=...)` takes any object like this.

    A batch is (images, labels): float images (B, C, H, W), normalised, of the size the model sees; whole labels (B)
    below `classes`; both on the device of the run.

    A run that was stopped goes on bit by bit as if it had not been if the batches are a function of epoch and position
    (and a seed of one's own) alone. For ordinary loaders of torch there is `LoaderData`.

    Attributes:
        classes: number of classes.
        class_names: in the order of the labels, or None; they are saved with the model.
    """

    classes: int
    class_names: list[str] | None

    @property
    def train_size(self) -> int:
        """Training images. An epoch has `train_size // batch` steps: a rest that fills no batch is left out."""

    @property
    def val_size(self) -> int:
        """Validation images."""

    def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """The batches `start`, `start + 1`, ... `train_size // batch - 1` of an epoch.

        Args:
            batch: images of a batch over all processes; this one has those from `rank * batch // world` to
                `(rank + 1) * batch // world` of them.
        """

    def val(self, batch: int) -> Iterator[Batch]:
        """The whole validation set once, in order, in batches of at most so many; every process sees all of it."""


class FolderData:
    """Data sets with random access, read by loader workers.

    Args:
        train, val: files, data sets as `timm.data.create_dataset` makes them, or subsets of these.
    """

    def __init__(self, train: Any, val: Any, class_names: list[str] | None, loading: Loading) -> None:
        self.loading, self.class_names = loading, class_names
        vary, plain = loading.transforms()
        self._train, self._val = _Varied(train, vary, loading), _Varied(val, plain, loading)
        self.classes = len(class_names) if class_names else max(_labels(train)) + 1

    @property
    def train_size(self) -> int:
        return len(self._train)

    @property
    def val_size(self) -> int:
        return len(self._val)

    def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Iterator[Batch]:
        indices = order(self.loading.seed, epoch, self.train_size).tolist()
        batches = [
            [(epoch, i) for i in indices[p * batch + rank * batch // world : p * batch + (rank + 1) * batch // world]]
            for p in range(start, self.train_size // batch)
        ]
        yield from deliver(self._load(self._train, batches), self.loading.device)

    def val(self, batch: int) -> Iterator[Batch]:
        keys = [(0, i) for i in range(self.val_size)]
        loader = self._load(self._val, [keys[i : i + batch] for i in range(0, len(keys), batch)])
        yield from deliver(loader, self.loading.device, filled=False)

    def _load(self, dataset: _Varied, batches: list[list[tuple[int, int]]]) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=_Listed(batches),
            num_workers=self.loading.workers,
            collate_fn=collate,
            pin_memory=self.loading.device.type == "cuda",
            worker_init_fn=outlive_signals,
        )


class _Listed(Sampler[list[tuple[int, int]]]):
    def __init__(self, batches: list[list[tuple[int, int]]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Varied(Dataset[Any]):
    """Images by (epoch, index), each transformed with random numbers of its own."""

    def __init__(self, dataset: Any, change: Any, loading: Loading) -> None:
        self.dataset, self.change, self.loading = dataset, change, loading

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        try:
            image, label = _read(self.dataset, index, self.loading.mode)
        except Exception as error:
            return _lost(self.dataset, index, error, self.loading.strict)
        return transform(self.change, image, mix_seed(self.loading.seed, epoch, index)), label


def _read(dataset: Any, index: int, mode: str) -> tuple[Image.Image, int]:
    """An image and its label. timm's data set puts a neighbour for what it cannot read; its reader does not."""
    if isinstance(dataset, Subset):
        return _read(dataset.dataset, dataset.indices[index], mode)
    if isinstance(dataset, Files):
        with Image.open(dataset.paths[index]) as image:
            return converted(image, mode), dataset.labels[index]
    if not hasattr(dataset, "reader"):
        image, label = dataset[index]
        return converted(image, mode), int(label)
    source, label = dataset.reader[index]
    with source, Image.open(source) as image:
        return converted(image, mode), int(label)


def _lost(dataset: Any, index: int, error: Exception, strict: bool) -> Lost:
    if isinstance(dataset, Subset):
        return _lost(dataset.dataset, dataset.indices[index], error, strict)
    name = dataset.name(index) if isinstance(dataset, Files) else f"image {index}"
    own = f" ({name})" if isinstance(dataset, Files) else ""
    return Lost(name, f"image {index} of the data set cannot be read{own}: {error}" if strict else None)


def _labels(dataset: Any) -> list[Any]:
    """The labels of a data set as it keeps them, without reading the images where they are kept beside these."""
    if isinstance(dataset, Subset):
        every = _labels(dataset.dataset)
        return [every[i] for i in dataset.indices]
    if hasattr(dataset, "reader"):  # of the Hugging Face hub
        return list(dataset.reader.dataset[dataset.reader.label_key])
    kept = getattr(dataset, "targets", None)
    return [int(label) for label in ((dataset[i][1] for i in range(len(dataset))) if kept is None else kept)]


class _Bytes(Dataset[Any]):
    """Images of a data set as bytes of one size."""

    def __init__(self, dataset: Any, loading: Loading) -> None:
        self.dataset, self.loading = dataset, loading

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        try:
            image, label = _read(self.dataset, index, self.loading.mode)
            pixels = np.array(image.resize(self.loading.size[::-1], Image.Resampling.BICUBIC))
        except Exception as error:
            return _lost(self.dataset, index, error, self.loading.strict)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), int(label)


def _hold(dataset: Any, loading: Loading) -> Batch:
    """A whole data set in memory."""
    loader = DataLoader(
        _Bytes(dataset, loading),
        batch_size=256,
        num_workers=loading.workers,
        collate_fn=list,
        worker_init_fn=outlive_signals,
    )
    kept: list[tuple[Tensor, int]] = []
    lost: list[str] = []
    for sample in (sample for batch in loader for sample in batch):
        if not isinstance(sample, Lost):
            kept.append(sample)
        elif sample.fatal is not None:
            raise InputError(sample.fatal)
        else:
            lost.append(sample.name)
    if lost:
        told = f"{len(lost)} images cannot be read and are skipped: {named(lost)}"
        warnings.warn(f"{told}; --strict-data makes this an error", stacklevel=2)
    if not kept:
        raise InputError(f"none of {len(lost)} images can be read; is this an image data set?")
    images, labels = zip(*kept, strict=True)
    return torch.stack(images), torch.tensor(labels)


def check_source(data: str, val_split: float | None = None) -> None:
    """Refuse a name that cannot be data, without reading any: before weights are fetched for it.

    Raises:
        ValueError: there is no such folder, file or kind of data set.
    """
    if data == "digits":
        return
    if os.path.isdir(data) and not data.startswith(STREAMS):
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
) -> Data:
    """The data a user names: "digits", a folder, a CSV table, or a name of timm's factory.

    Args:
        hold: keep the whole set on the device as bytes and augment there.
        classes: their number, for a stream that does not say it.
        val_split: share of the training images of each class that is taken for validation, instead of what the data
            has for it.
        input_key, target_key: columns of a data set of the Hugging Face hub; `image` and `label` by default.
        download: fetch a data set of torchvision that is not there.
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
            read = list_folder if os.path.isdir(data) else read_table
            sets: Sequence[Any] = read(data, val_split)
        except OSError as error:
            raise InputError(f"--data {data!r} cannot be read: {error}") from error
        class_names: list[str] | None = sets[0].class_names
    else:
        sets, class_names = _open_named(data, val_split, keys, download)
    if hold:
        train, val = (_hold(one, loading) for one in sets)
        return ByteData(train, val, *held, class_names)
    return FolderData(sets[0], sets[1], class_names, loading)


def _open_stream(
    data: str, loading: Loading, hold: bool, classes: int | None, val_split: float | None, keys: tuple[str, str]
) -> StreamData:
    name, root = _locate(data)
    if hold:
        raise InputError(f"{data} is a stream, which is not held in memory: use --data-device loader")
    if val_split is not None:
        raise InputError(f"{data} is a stream, which --val-split cannot take apart: give it a split called validation")
    first, second = (open_stream(name, root, split, *keys) for split in SPLITS)
    classes = len(first.class_names) if first.class_names else classes
    if classes is None:
        raise InputError(f"{data} does not say how many classes it has: pass --model-args '{{\"num_classes\": N}}'")
    return StreamData(first, second, classes, loading)


def _open_named(
    data: str, val_split: float | None, keys: tuple[str, str], download: bool
) -> tuple[Sequence[Any], list[str] | None]:
    """A data set timm's factory makes, with random access, and the names of its classes."""
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
    if hub and not index and isinstance((labels := _labels(train))[0], str):
        index = {label: i for i, label in enumerate(sorted(sorted(set(labels)), key=natural_key))}
        train = create("train", class_map=index)
    if val_split is not None:
        sets: Sequence[Any] = [Subset(train, chosen) for chosen in split_off(_labels(train), val_split)]
    else:
        sets = [train, create("validation")]
        other = _class_index(sets[1])
        if index != other:  # validation has labels of its own: it gets those of training
            if more := sorted(set(other) - set(index)):
                raise InputError(f"{data} has classes for validation that are not trained: {more}")
            if not hub:
                missing = sorted(set(index) - set(other))
                raise InputError(
                    f"{data} has no validation images of {missing}, and its labels differ without: add some"
                )
            sets = [train, create("validation", class_map=index)]
    class_names = sorted(index, key=index.__getitem__) if index else None
    if class_names and len(class_names) < 2:
        raise InputError(f"{data} must have two classes or more; found {class_names}")
    return sets, class_names


def _class_index(dataset: Any) -> dict[str, int]:
    index: dict[str, int] = getattr(getattr(dataset, "reader", dataset), "class_to_idx", {})
    return index


def _check_hub(name: str, root: str, split: str, keys: tuple[str, str]) -> None:
    """Say it where a column is what is missing of a data set of the hub."""
    import datasets

    try:
        columns = datasets.load_dataset(name.partition("/")[2], split=split, cache_dir=root).column_names
    except Exception:  # something else is: the first error tells it
        return
    check_columns(name, columns, *keys)


def _locate(data: str) -> tuple[str, str]:
    """timm's name and root of a data set such as "torch/cifar10:ROOT"."""
    name, _, root = data.partition(":")
    kind, slash, _ = name.partition("/")
    if not slash or kind not in KINDS:
        known = ", ".join(f"{kind}/..." for kind in KINDS)
        raise InputError(
            f"--data {data!r} is no folder, no timm data set that can be read ({known}), no CSV file and not 'digits'"
        )
    if find_spec(KINDS[kind]) is None:
        raise InputError(f"--data {data!r} is read with {KINDS[kind]}, which is missing: pip install {KINDS[kind]}")
    return name, root or "data"
