"""Data sets with an index: folders, CSV tables, and those of torchvision and of the Hugging Face hub.

Loader workers read and augment their images one at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from hiap.data.files import Files
from hiap.data.images import (
    Batch,
    Loading,
    Lost,
    Sample,
    collate,
    converted,
    deliver,
    mix_seed,
    order,
    outlive_signals,
    transform,
)

__all__ = ["IndexedData", "labels_of", "lost", "read_image"]


class IndexedData:
    """Images that can be read in any order.

    Args:
        train, val: files, data sets as `timm.data.create_dataset` makes them, or subsets of these.
    """

    def __init__(self, train: Any, val: Any, class_names: list[str] | None, loading: Loading) -> None:
        self.loading, self.class_names = loading, class_names
        vary, plain = loading.transforms()
        self._train, self._val = _Images(train, vary, loading), _Images(val, plain, loading)
        self.classes = len(class_names) if class_names else max(labels_of(train)) + 1

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
        return self.val_part(batch, 0, 1)

    def val_part(self, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """Every `world`-th batch of `val`, beginning with number `rank`."""
        keys = [(0, i) for i in range(self.val_size)]
        if batches := [keys[i : i + batch] for i in range(0, len(keys), batch)][rank::world]:
            loader = self._load(self._val, batches)
            yield from deliver(loader, self.loading.device, filled=False, part=world > 1)

    def bank(self, batch: int) -> Iterator[Batch]:
        """The training images once, in their order, prepared as those of validation are."""
        plain = _Images(self._train.dataset, self._val.change, self.loading)
        keys = [(0, i) for i in range(self.train_size)]
        batches = [keys[i : i + batch] for i in range(0, len(keys), batch)]
        yield from deliver(self._load(plain, batches), self.loading.device, filled=False)

    def _load(self, dataset: _Images, batches: list[list[tuple[int, int]]]) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            batch_sampler=_Batches(batches),
            num_workers=min(self.loading.workers, len(batches)),
            collate_fn=collate,
            pin_memory=self.loading.device.type == "cuda",
            worker_init_fn=outlive_signals,
        )


class _Batches(Sampler[list[tuple[int, int]]]):
    def __init__(self, batches: list[list[tuple[int, int]]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class _Images(Dataset[Any]):
    """Images by (epoch, index), each augmented with random numbers of its own."""

    def __init__(self, dataset: Any, change: Any, loading: Loading) -> None:
        self.dataset, self.change, self.loading = dataset, change, loading

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        epoch, index = key
        try:
            image, label = read_image(self.dataset, index, self.loading.mode)
        except Exception as error:
            return lost(self.dataset, index, error, self.loading.strict)
        return transform(self.change, image, mix_seed(self.loading.seed, epoch, index)), label


def read_image(dataset: Any, index: int, mode: str) -> tuple[Image.Image, int]:
    """An image and its label. timm's data set returns another image if it cannot read one; its reader raises."""
    if isinstance(dataset, Subset):
        return read_image(dataset.dataset, dataset.indices[index], mode)
    if isinstance(dataset, Files):
        with Image.open(dataset.paths[index]) as image:
            return converted(image, mode), dataset.labels[index]
    if not hasattr(dataset, "reader"):
        image, label = dataset[index]
        return converted(image, mode), int(label)
    source, label = dataset.reader[index]
    with source, Image.open(source) as image:
        return converted(image, mode), int(label)


def lost(dataset: Any, index: int, error: Exception, strict: bool) -> Lost:
    if isinstance(dataset, Subset):
        return lost(dataset.dataset, dataset.indices[index], error, strict)
    name = dataset.name(index) if isinstance(dataset, Files) else f"image {index}"
    own = f" ({name})" if isinstance(dataset, Files) else ""
    return Lost(name, f"image {index} of the data set cannot be read{own}: {error}" if strict else None)


def labels_of(dataset: Any) -> list[Any]:
    """The labels of a data set as they are stored; images are read only if labels are not stored apart."""
    if isinstance(dataset, Subset):
        every = labels_of(dataset.dataset)
        return [every[i] for i in dataset.indices]
    if hasattr(dataset, "reader"):  # of the Hugging Face hub
        return list(dataset.reader.dataset[dataset.reader.label_key])
    kept = getattr(dataset, "targets", None)
    return [int(label) for label in ((dataset[i][1] for i in range(len(dataset))) if kept is None else kept)]
