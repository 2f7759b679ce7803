"""Batches of images that are a function of seed, epoch and position alone, so that a run can go on where it stopped.

Three kinds of data: bytes held in memory (small sets, augmented a batch at a time on the device that holds them), data
sets of timm with an index (an image folder or a name its factory reads), and streams. The images of the last two are
augmented one at a time by loader workers.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from timm.data import create_dataset
from timm.data.readers.img_extensions import add_img_extensions, del_img_extensions, is_img_extension
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from hiap.images import Augmentation, Batch, Loading, collate, converted, deliver, mix_seed, outlive_signals, transform
from hiap.streams import StreamData, open_stream

__all__ = ["Augmentation", "ByteData", "Data", "FolderData", "digits", "mix_seed", "open_data"]

SPLITS = ("train", "validation")
EXTENSIONS = (".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")  # of images, besides timm's own
KINDS = {"torch": "torchvision", "hfds": "datasets", "hfids": "datasets", "wds": "webdataset"}  # and what reads them


class Data(Protocol):
    """Training and validation batches of one data set, normalised and on the device."""

    classes: int
    class_names: list[str] | None

    @property
    def train_size(self) -> int: ...

    @property
    def val_size(self) -> int: ...

    def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """Batches of this rank from position `start` of an epoch on; `batch` is over all ranks."""

    def val(self, batch: int) -> Iterator[Batch]:
        """The validation set, in order."""


def order(seed: int, epoch: int, size: int) -> Tensor:
    """The order of the images in an epoch."""
    return torch.randperm(size, generator=torch.Generator("cpu").manual_seed(mix_seed(seed, epoch)), device="cpu")


class ByteData:
    """Images held as bytes on a device and augmented there.

    Args:
        train, val: images (N, C, H, W) uint8 and labels (N).
        size: height and width the model sees.
        normalisation: mean and std of each channel.
    """

    def __init__(
        self,
        train: Batch,
        val: Batch,
        size: tuple[int, int],
        normalisation: tuple[Sequence[float], Sequence[float]],
        augmentation: Augmentation,
        device: torch.device,
        seed: int = 0,
        class_names: list[str] | None = None,
    ) -> None:
        self._train = (train[0].to(device), train[1].to(device))
        self._val = (val[0].to(device), val[1].to(device))
        self.size, self.augmentation, self.device, self.seed = size, augmentation, device, seed
        mean, std = (torch.tensor(list(values), device=device).view(1, -1, 1, 1) for values in normalisation)
        self._mean, self._std = mean * 255, std * 255
        self.classes = int(train[1].max()) + 1 if class_names is None else len(class_names)
        self.class_names = class_names

    @property
    def train_size(self) -> int:
        return len(self._train[1])

    @property
    def val_size(self) -> int:
        return len(self._val[1])

    def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Iterator[Batch]:
        indices = order(self.seed, epoch, self.train_size).to(self.device)
        for position in range(start, self.train_size // batch):
            chosen = indices[position * batch : (position + 1) * batch]
            generator = torch.Generator("cpu").manual_seed(mix_seed(self.seed, epoch, position))
            draws = torch.rand(len(chosen), 4, generator=generator, device="cpu")
            mine = slice(rank * batch // world, (rank + 1) * batch // world)
            images = self._normalise(self._train[0][chosen[mine]])
            yield self._vary(images, draws[mine].to(self.device)), self._train[1][chosen[mine]]

    def val(self, batch: int) -> Iterator[Batch]:
        for images, labels in zip(torch.split(self._val[0], batch), torch.split(self._val[1], batch), strict=True):
            yield self._resize(self._normalise(images)), labels

    def held_out(self) -> ByteData:
        """The same without its validation images: a tenth of the training images, drawn at random, stands for them."""
        other = copy.copy(self)
        generator = torch.Generator("cpu").manual_seed(0)
        mixed = torch.randperm(self.train_size, generator=generator, device="cpu").to(self.device)
        tenth = self.train_size // 10
        other._val = (self._train[0][mixed[:tenth]], self._train[1][mixed[:tenth]])
        other._train = (self._train[0][mixed[tenth:]], self._train[1][mixed[tenth:]])
        return other

    def first(self, count: int) -> ByteData:
        """The same with the first `count` of its training images."""
        other = copy.copy(self)
        other._train = (self._train[0][:count], self._train[1][:count])
        return other

    def _normalise(self, images: Tensor) -> Tensor:
        return (images.float() - self._mean) / self._std

    def _resize(self, images: Tensor) -> Tensor:
        if images.shape[-2:] == self.size:
            return images
        return F.interpolate(images, self.size, mode="bicubic", align_corners=False)

    def _vary(self, images: Tensor, draws: Tensor) -> Tensor:
        """A random crop and flip of each image, resampled straight to the size of the model."""
        side = (self.augmentation.crop + (1 - self.augmentation.crop) * draws[:, 0]).sqrt()
        flip = 1 - 2 * (draws[:, 1] < self.augmentation.flip).float()
        theta = torch.zeros(len(images), 2, 3, device=images.device)
        theta[:, 0, 0], theta[:, 1, 1] = side * flip, side
        theta[:, :, 2] = (1 - side).unsqueeze(1) * (2 * draws[:, 2:] - 1)
        grid = F.affine_grid(theta, [len(images), images.shape[1], *self.size], align_corners=False)
        return F.grid_sample(images, grid, mode="bicubic", padding_mode="reflection", align_corners=False)


def digits() -> tuple[Batch, Batch]:
    """The handwritten digits of scikit-learn (8 x 8, 10 classes): every fifth image is for validation."""
    with as_file(files("hiap") / "digits.safetensors") as path:
        data = load_file(path)
    images, labels = data["images"].unsqueeze(1), data["labels"].long()
    val = torch.arange(len(labels)) % 5 == 0
    return (images[~val], labels[~val]), (images[val], labels[val])


class FolderData:
    """Data sets of timm with random access, read by loader workers.

    Args:
        train, val: the data sets, as `timm.data.create_dataset` makes them.
    """

    def __init__(self, train: Any, val: Any, class_names: list[str] | None, loading: Loading) -> None:
        self.loading, self.class_names = loading, class_names
        vary, plain = loading.transforms()
        self._train, self._val = _Varied(train, vary, loading), _Varied(val, plain, loading)
        self.classes = len(class_names) if class_names else int(max(train[i][1] for i in range(len(train)))) + 1

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

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int] | None:
        epoch, index = key
        try:
            image, label = _read(self.dataset, index, self.loading.mode)
        except Exception as error:
            if self.loading.strict:
                raise ValueError(f"image {index} of the data set cannot be read: {error}") from error
            return None
        return transform(self.change, image, mix_seed(self.loading.seed, epoch, index)), label


def _read(dataset: Any, index: int, mode: str) -> tuple[Image.Image, int]:
    """An image and its label. timm's data set puts a neighbour for what it cannot read; its reader does not."""
    if not hasattr(dataset, "reader"):
        image, label = dataset[index]
        return converted(image, mode), int(label)
    source, label = dataset.reader[index]
    with source, Image.open(source) as image:
        return converted(image, mode), int(label)


class _Bytes(Dataset[Any]):
    """Images of a data set as bytes of one size; None where one cannot be read."""

    def __init__(self, dataset: Any, loading: Loading) -> None:
        self.dataset, self.loading = dataset, loading

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | None:
        try:
            image, label = _read(self.dataset, index, self.loading.mode)
            pixels = np.array(image.resize(self.loading.size[::-1], Image.Resampling.BICUBIC))
        except Exception as error:
            if self.loading.strict:
                raise ValueError(f"image {index} of the data set cannot be read: {error}") from error
            return None
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), int(label)


def _hold(dataset: Any, loading: Loading) -> Batch:
    """A whole data set in memory."""
    loader = DataLoader(_Bytes(dataset, loading), batch_size=256, num_workers=loading.workers, collate_fn=list)
    read = [sample for batch in loader for sample in batch]
    kept = [sample for sample in read if sample is not None]
    if len(kept) < len(read):
        warnings.warn(f"{len(read) - len(kept)} images cannot be read and are skipped", stacklevel=2)
    if not kept:
        raise ValueError(f"none of {len(read)} images can be read; is this an image data set?")
    images, labels = zip(*kept, strict=True)
    return torch.stack(images), torch.tensor(labels)


def open_data(data: str, loading: Loading, hold: bool = False, classes: int | None = None) -> Data:
    """The data a user names: "digits", a folder with `train` and `val`, or a name of timm's factory.

    Args:
        hold: keep the whole set on the device as bytes and augment there.
        classes: their number, for a stream that does not say it.
    """
    held = (loading.size, loading.normalisation, loading.augmentation, loading.device, loading.seed)
    if data == "digits":
        train, val = digits()
        names = [str(i) for i in range(10)]
        if loading.channels == 3:
            train, val = ((images.expand(-1, 3, -1, -1), labels) for images, labels in (train, val))
        return ByteData(train, val, *held, names)
    name, root = _locate(data)
    if name.startswith(("wds/", "hfids/")):
        if hold:
            raise ValueError(f"{data} is a stream, which is not held in memory: use --data-device loader")
        first, second = (open_stream(name, root, split) for split in SPLITS)
        classes = len(first.class_names) if first.class_names else classes
        if classes is None:
            raise ValueError(f"{data} does not say how many classes it has: pass --model-args '{{\"num_classes\": N}}'")
        return StreamData(first, second, classes, loading)
    try:
        sets = [_create(name, root, split) for split in SPLITS]
    except RuntimeError as error:
        raise ValueError(f"--data {data!r} cannot be read: {error}") from error
    index, other = (getattr(getattr(one, "reader", one), "class_to_idx", {}) for one in sets)
    if index != other:  # validation has labels of its own: it gets those of training
        if more := sorted(set(other) - set(index)):
            raise ValueError(f"{data} has classes for validation that are not trained: {more}")
        if not hasattr(sets[1], "reader"):
            missing = sorted(set(index) - set(other))
            raise ValueError(f"{data} has no validation images of {missing}, and its labels differ without: add some")
        sets[1] = _create(name, root, SPLITS[1], class_map=index)
    class_names = sorted(index, key=index.__getitem__) if index else None
    if class_names and len(class_names) < 2:
        raise ValueError(f"{data} must hold a folder a class in train and val, images right in it; found {class_names}")
    if hold:
        train, val = (_hold(one, loading) for one in sets)
        return ByteData(train, val, *held, class_names)
    return FolderData(sets[0], sets[1], class_names, loading)


def _create(name: str, root: str, split: str, **options: Any) -> Any:
    """A data set of timm, which reads PNG and JPEG alone unless told otherwise."""
    more = [extension for extension in EXTENSIONS if not is_img_extension(extension)]
    add_img_extensions(more)
    try:
        return create_dataset(name, root=root, split=split, is_training=split == "train", **options)
    finally:
        del_img_extensions(more)


def _locate(data: str) -> tuple[str, str]:
    """timm's name and root of a data set: no name for a folder, "torch/cifar10:ROOT" for a named one."""
    if Path(data).is_dir():
        found = sorted(entry.name for entry in Path(data).iterdir() if entry.is_dir())
        if "train" not in found or not {"val", "validation"} & set(found):
            raise ValueError(f"{data} must hold the folders train and val, a folder a class in each; found {found}")
        return "", data
    name, _, root = data.partition(":")
    kind, slash, _ = name.partition("/")
    if not slash or kind not in KINDS:
        known = ", ".join(f"{kind}/..." for kind in KINDS)
        raise ValueError(f"--data {data!r} is no folder, no timm data set that can be read ({known}), and not 'digits'")
    if find_spec(KINDS[kind]) is None:
        raise ValueError(f"--data {data!r} is read with {KINDS[kind]}, which is missing: pip install {KINDS[kind]}")
    return name, root or "data"
