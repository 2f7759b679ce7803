"""Data without an index: tar shards as webdataset writes them, and data sets of the Hugging Face hub.

A stream yields its samples as they are stored, without decoding the images, so that skipping one costs little.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Protocol

import torch
from PIL import Image
from timm.data import create_dataset
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from hiap.data.images import (
    Batch,
    Loading,
    Lost,
    Sample,
    collate,
    converted,
    deliver,
    mix_seed,
    outlive_signals,
    transform,
)
from hiap.errors import InputError

__all__ = ["STREAMS", "Stream", "StreamData", "check_columns", "open_stream"]

STREAMS = ("wds/", "hfids/")  # how their names begin


class Stream(Protocol):
    """One split of a stream."""

    size: int
    class_names: list[str] | None

    def workers(self, wanted: int, world: int) -> int:
        """How many loader workers a rank can have."""

    def samples(self, seed: int | None, rank: int, world: int, worker: int, workers: int) -> Iterator[Any]:
        """One pass over the samples of a worker, shuffled by a seed or in order."""

    def name(self, sample: Any) -> str | None:
        """What a sample is called, where it says so."""

    def read(self, sample: Any) -> tuple[Image.Image, int]:
        """The image and the label of a sample."""


def open_stream(name: str, root: str, split: str, image: str = "image", label: str = "label") -> Stream:
    """A split of "wds/NAME" under a root, or of "hfids/NAME" with the columns of its images and labels.

    Raises:
        ValueError: it does not say how many images it has; it does not have these columns.
    """
    kind, _, rest = name.partition("/")
    return Shards(name, root, split) if kind == "wds" else Hub(rest, root, split, image, label)


class Shards:
    """Tar shards, listed and counted by the `_info.json` beside them, which timm reads."""

    def __init__(self, name: str, root: str, split: str) -> None:
        try:
            reader = create_dataset(name, root=root, split=split, is_training=True).reader
        except (KeyError, RuntimeError) as error:
            raise InputError(
                f"{root} must hold _info.json with the splits train and validation, each with name, num_samples, "
                f"filenames and shard_lengths; for {split}: {error}"
            ) from error
        self.size = int(reader.num_samples)
        self.class_names: list[str] | None = None
        self._shards = [os.path.join(root, file) for file in reader.split_info.filenames]
        self._image_keys, self._label_key = reader.input_key.split(";"), reader.target_key or "cls"
        self._other_label = reader.split_info.alt_label
        self._buffer = {"bufsize": reader.sample_shuffle_size, "initial": reader.sample_initial_size}

    def workers(self, wanted: int, world: int) -> int:
        return wanted

    def samples(self, seed: int | None, rank: int, world: int, worker: int, workers: int) -> Iterator[Any]:
        """Whole shards if there is one for each worker, else every n-th sample of all of them, for n workers."""
        from webdataset.filters import shuffle

        part, parts = rank * workers + worker, world * workers
        shards = list(self._shards)
        if seed is not None:
            random.Random(seed).shuffle(shards)
        whole = len(shards) >= parts
        found = self._walk(shards[part::parts]) if whole else islice(self._walk(shards), part, None, parts)
        if seed is not None:
            found = shuffle(**self._buffer, rng=random.Random(seed + 1 + part))(found)
        yield from found

    def _walk(self, shards: list[str]) -> Iterator[Any]:
        from webdataset.tariterators import tarfile_samples

        for shard in shards:
            try:
                for sample in tarfile_samples([{"url": shard}]):
                    if not self._other_label or self._label(sample) >= 0:  # timm marks what has no label with -1
                        yield sample
            except Exception as error:  # many images at once: never skipped
                reason = getattr(error, "strerror", None) or (error.args[0] if error.args else error)
                raise InputError(f"shard {shard} cannot be read: {reason}") from error

    def _label(self, sample: Any) -> int:
        return int(json.loads(sample["json"])[self._other_label] if self._other_label else sample[self._label_key])

    def name(self, sample: Any) -> str | None:
        return f"{sample['__key__']} of {os.path.basename(sample['__url__'])}"

    def read(self, sample: Any) -> tuple[Image.Image, int]:
        key = next((key for key in self._image_keys if key in sample), None)
        if key is None:
            raise InputError(f"sample {sample['__key__']} has none of {', '.join(self._image_keys)}")
        image = Image.open(io.BytesIO(sample[key]))
        image.load()
        return image, self._label(sample)


def check_columns(data: str, columns: list[str], image: str, label: str) -> None:
    """Refuse a data set of the Hugging Face hub without these columns."""
    for option, key in (("input", image), ("target", label)):
        if key not in columns:
            raise InputError(f"{data} has no column {key!r}: pass --{option}-key NAME, one of {', '.join(columns)}")


class Hub:
    """A data set of the Hugging Face hub, or a folder of its form, read without downloading the whole first."""

    def __init__(self, name: str, root: str, split: str, image: str, label: str) -> None:
        import datasets

        builder = datasets.load_dataset_builder(name, cache_dir=root)
        splits, features = builder.info.splits or {}, builder.info.features or {}
        if split not in splits or not splits[split].num_examples:
            raise InputError(
                f"hfids/{name} does not say how many images its split {split} has; it lists {list(splits)}. The "
                f"numbers must be in the dataset_info of its README.md; hfds/{name} counts them itself"
            )
        if features:
            check_columns(f"hfids/{name}", list(features), image, label)
        self.size = int(splits[split].num_examples)
        self._image, self._label = image, label
        names = getattr(features.get(label), "names", None)
        self.class_names = list(names) if names else None
        self._decoder = datasets.Image()
        self._stream = builder.as_streaming_dataset(split=split).cast_column(image, datasets.Image(decode=False))

    def workers(self, wanted: int, world: int) -> int:
        shards: int = self._split(self._stream, 0, world).num_shards
        return min(wanted, shards)

    def samples(self, seed: int | None, rank: int, world: int, worker: int, workers: int) -> Iterator[Any]:
        """The data set itself gives each loader worker its shards."""
        stream = self._stream if seed is None else self._stream.shuffle(seed=seed, buffer_size=4096)
        yield from self._split(stream, rank, world)

    @staticmethod
    def _split(stream: Any, rank: int, world: int) -> Any:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(stream, rank=rank, world_size=world)

    def name(self, sample: Any) -> str | None:
        path: str | None = sample[self._image].get("path")
        return path

    def read(self, sample: Any) -> tuple[Image.Image, int]:
        return self._decoder.decode_example(sample[self._image]), int(sample[self._label])


class StreamData:
    """Data without an index, read from the beginning of its shards by loader workers.

    The order depends on seed, epoch, number of workers and number of processes. Each worker of each process has shards
    of its own; one that comes to the end of them before the epoch does starts over.

    Args:
        train, val: the two splits.
        classes: number of classes; labels must be below it.
    """

    def __init__(self, train: Stream, val: Stream, classes: int, loading: Loading) -> None:
        self._train, self._val, self.loading = train, val, loading
        self.classes, self.class_names = classes, train.class_names
        self._vary, self._plain = loading.transforms()

    @property
    def train_size(self) -> int:
        return self._train.size

    @property
    def val_size(self) -> int:
        return self._val.size

    def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Iterator[Batch]:
        mine = (rank + 1) * batch // world - rank * batch // world
        workers = self._train.workers(self.loading.workers, world)
        rounds, rest = divmod(start, max(1, workers))  # the loader takes a batch of each worker in turn
        share = _Share(self._train, self._vary, self.classes, self.loading, epoch, rank, world, rounds * mine)
        loader = self._loader(share, mine, workers, mix_seed(self.loading.seed, epoch, rank))
        yield from deliver(islice(loader, rest, rest + self.train_size // batch - start), self.loading.device)

    def val(self, batch: int) -> Iterator[Batch]:
        return self.val_part(batch, 0, 1)

    def val_part(self, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """The validation images in the shards of a process; its batches are not those of `val`, but its images are."""
        share = _Share(self._val, self._plain, self.classes, self.loading, rank=rank, world=world)
        loader = self._loader(share, batch, self._val.workers(self.loading.workers, world), self.loading.seed)
        yield from deliver(loader, self.loading.device, filled=False, part=world > 1)

    def bank(self, batch: int) -> Iterator[Batch]:
        """The training images once, prepared as those of validation are."""
        share = _Share(self._train, self._plain, self.classes, self.loading)
        loader = self._loader(share, batch, self._train.workers(self.loading.workers, 1), self.loading.seed)
        yield from deliver(loader, self.loading.device, filled=False)

    def _loader(self, share: _Share, batch: int, workers: int, seed: int) -> DataLoader[Any]:
        return DataLoader(
            share,
            batch_size=batch,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=self.loading.device.type == "cuda",
            generator=torch.Generator("cpu").manual_seed(seed),
            worker_init_fn=outlive_signals,
        )


@dataclass(eq=False)
class _Share(IterableDataset[Any]):
    """What a loader worker reads of a stream: without end in an epoch of training, once if no epoch is given."""

    stream: Stream
    transform: Any
    classes: int
    loading: Loading
    epoch: int | None = None
    rank: int = 0
    world: int = 1
    skip: int = 0

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        try:
            for number, sample in islice(enumerate(self._samples(worker, workers)), self.skip, None):
                yield self._read(sample, worker, number)
        except ValueError as error:  # the stream itself ends here
            yield Lost("", fatal=str(error))

    def _samples(self, worker: int, workers: int) -> Iterator[Any]:
        place = (self.rank, self.world, worker, workers)
        if self.epoch is None:
            yield from self.stream.samples(None, *place)
            return
        for turn in count():
            sample = None
            for sample in self.stream.samples(mix_seed(self.loading.seed, self.epoch, turn), *place):
                yield sample
            if sample is None:
                raise InputError(f"there is no image for worker {worker} of rank {self.rank}: are the shards empty?")

    def _read(self, sample: Any, worker: int, number: int) -> Sample:
        name = self.stream.name(sample) or f"image {number} of worker {worker}"
        try:
            image, label = self.stream.read(sample)
            image = converted(image, self.loading.mode)
        except Exception as error:
            told = f"image {number} of worker {worker} cannot be read ({name}): {error}"
            return Lost(name, told if self.loading.strict else None)
        if not 0 <= label < self.classes:
            allowed = f"from 0 to {self.classes - 1}, by the number of classes"
            raise InputError(f"a label must be {allowed}; found {label} ({name})")
        seed = mix_seed(self.loading.seed, self.epoch or 0, self.rank, worker, number)
        return transform(self.transform, image, seed), label
