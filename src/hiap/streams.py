"""Data without an index: tar shards as webdataset writes them, and data sets of the Hugging Face hub.

A stream hands its samples on as they are stored, so that passing over one costs little.
"""

from __future__ import annotations

import io
import json
import os
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, Protocol

from PIL import Image
from timm.data import create_dataset

__all__ = ["Stream", "open_stream"]


class Stream(Protocol):
    """One split of a stream."""

    size: int
    class_names: list[str] | None

    def workers(self, wanted: int, world: int) -> int:
        """How many loader workers a rank can have."""

    def samples(self, seed: int | None, rank: int, world: int, worker: int, workers: int) -> Iterator[Any]:
        """One pass over the samples of a worker, shuffled by a seed or in order."""

    def read(self, sample: Any) -> tuple[Image.Image, int]:
        """The image and the label of a sample."""


def open_stream(name: str, root: str, split: str) -> Stream:
    """A split of "wds/NAME" under a root, or of "hfids/NAME".

    Raises:
        ValueError: it does not say how many images it has.
    """
    kind, _, rest = name.partition("/")
    return Shards(name, root, split) if kind == "wds" else Hub(rest, root, split)


class Shards:
    """Tar shards, listed and counted by the `_info.json` beside them, which timm reads."""

    def __init__(self, name: str, root: str, split: str) -> None:
        try:
            reader = create_dataset(name, root=root, split=split, is_training=True).reader
        except (KeyError, RuntimeError) as error:
            raise ValueError(
                f"{root} must hold _info.json with the splits train and validation, each with name, num_samples, "
                f"filenames and shard_lengths; for {split}: {error}"
            ) from error
        self.size = int(reader.num_samples)
        self.class_names: list[str] | None = None
        self._shards = [os.path.join(root, file) for file in reader.split_info.filenames]
        self._image_keys, self._label_key = reader.input_key.split(";"), reader.target_key
        self._other_label = reader.split_info.alt_label
        self._buffer = {"bufsize": reader.sample_shuffle_size, "initial": reader.sample_initial_size}

    def workers(self, wanted: int, world: int) -> int:
        return wanted

    def samples(self, seed: int | None, rank: int, world: int, worker: int, workers: int) -> Iterator[Any]:
        """Whole shards where each worker can have one, else each takes its part of the samples of all."""
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
                raise ValueError(f"shard {shard} cannot be read: {error}") from error

    def _label(self, sample: Any) -> int:
        return int(json.loads(sample["json"])[self._other_label] if self._other_label else sample[self._label_key])

    def read(self, sample: Any) -> tuple[Image.Image, int]:
        key = next((key for key in self._image_keys if key in sample), None)
        if key is None:
            raise ValueError(f"sample {sample['__key__']} has none of {', '.join(self._image_keys)}")
        image = Image.open(io.BytesIO(sample[key]))
        image.load()
        return image, self._label(sample)


class Hub:
    """A data set of the Hugging Face hub, or a folder of its form, read without downloading the whole first."""

    def __init__(self, name: str, root: str, split: str) -> None:
        import datasets

        builder = datasets.load_dataset_builder(name, cache_dir=root)
        splits, features = builder.info.splits or {}, builder.info.features or {}
        if split not in splits or not splits[split].num_examples:
            raise ValueError(
                f"hfids/{name} does not say how many images its split {split} has; it tells of {list(splits)}. They "
                f"must be in the dataset_info of its README.md; hfds/{name} counts them itself"
            )
        self.size = int(splits[split].num_examples)
        names = getattr(features.get("label"), "names", None)
        self.class_names = list(names) if names else None
        self._decoder = datasets.Image()
        self._stream = builder.as_streaming_dataset(split=split).cast_column("image", datasets.Image(decode=False))

    def workers(self, wanted: int, world: int) -> int:
        shards: int = self._split(self._stream, 0, world).num_shards
        return min(wanted, shards)

    def samples(self, seed: int | None, rank: int, world: int, worker: int, workers: int) -> Iterator[Any]:
        """The data set itself finds its loader worker and gives it its shards."""
        stream = self._stream if seed is None else self._stream.shuffle(seed=seed, buffer_size=4096)
        yield from self._split(stream, rank, world)

    @staticmethod
    def _split(stream: Any, rank: int, world: int) -> Any:
        from datasets.distributed import split_dataset_by_node

        return split_dataset_by_node(stream, rank=rank, world_size=world)

    def read(self, sample: Any) -> tuple[Image.Image, int]:
        return self._decoder.decode_example(sample["image"]), int(sample["label"])
