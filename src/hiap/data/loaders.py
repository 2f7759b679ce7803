"""Your own loaders: any pair of torch loaders as the data of a run."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from hiap.data.images import Batch, mix_seed
from hiap.errors import InputError, KindError

__all__ = ["LoaderData"]


class LoaderData:
    """Two loaders, such as `torch.utils.data.DataLoader`, that yield (images, labels), as the data of a run.

    Images are float (B, C, H, W), normalised and of the size the model sees; labels are whole numbers (B). The batches
    of training are those of its loader, so `batch_size` of the configuration must be the same; a short last batch is
    left out. Loaders are for runs of one process.

    Before each pass, the random generators of Python, NumPy and torch, and that of the loader if it has one, are seeded
    with the run's seed and the epoch; afterwards they are put back. So an epoch always has the same order with
    `shuffle=True`, and ordinary loader workers draw the same numbers. A resumed run skips the batches it has seen. It
    repeats the uninterrupted run bit by bit if a pass depends on these generators alone; with `persistent_workers`, or
    a sampler that keeps a state, it does not.

    Args:
        train, val: the loaders; the one for training must have a length.
        classes: their number; by default that of the data set's `classes`, `class_to_idx` or labels.
        class_names: in the order of the labels; by default the data set's `classes`.
        labels: whether they are read. Without, loaders may yield images alone.

    Raises:
        TypeError: these are no loaders.
        ValueError: the number of classes is not known.
    """

    def __init__(
        self,
        train: Any,
        val: Any,
        classes: int | None = None,
        class_names: list[str] | None = None,
        labels: bool = True,
    ) -> None:
        for name, loader in (("training", train), ("validation", val)):
            if not hasattr(loader, "__iter__") or isinstance(loader, Tensor | str | dict):
                kind = type(loader).__name__
                raise KindError(f"the {name} loader must yield (images, labels), as a DataLoader does; found {kind}")
        if not _sized(train):
            raise KindError("the training loader must have a length, which is that of an epoch; give its data set one")
        self._train, self._val, self._labels = train, val, labels
        found, names = _classes(getattr(train, "dataset", None)) if labels else (1, None)
        self.class_names = class_names or (names if classes in (None, found) else None)
        known = len(self.class_names) if self.class_names else classes or found
        if known is None or classes not in (None, known):
            told = f"found {known} names for {classes}" if known else "the data set does not say it"
            raise InputError(f"the number of classes is not known ({told}): pass LoaderData(train, val, classes=N)")
        self.classes: int = known
        self._batch, self._device, self._seed = _batch_size(train), torch.device("cpu"), 0

    def bound(self, batch: int, device: torch.device, seed: int, world: int = 1) -> LoaderData:
        """The same data for a run: its batch size (0: that of the loader), device, seed and number of processes.

        Raises:
            ValueError: the loader has batches of another size; there is more than one process.
        """
        if world > 1:
            raise InputError(
                f"a pair of loaders is for one process, found {world}: pass an object like hiap.Data, which knows the "
                "images of each process"
            )
        own = _batch_size(self._train)
        batch = batch or own or 0
        if not batch:
            raise InputError("the training loader has no batch_size: pass it in the configuration")
        if own not in (None, batch):
            raise InputError(f"the training loader has batches of {own}, the configuration {batch}: make them equal")
        other = copy.copy(self)
        other._batch, other._device, other._seed = batch, device, seed
        return other

    @property
    def batch(self) -> int | None:
        """Images of a training batch."""
        return self._batch

    @property
    def steps(self) -> int:
        """Whole batches of an epoch."""
        sampler = getattr(self._train, "sampler", None)
        if _batch_size(self._train) and _sized(sampler) and self._batch:
            return len(sampler) // self._batch  # type: ignore[arg-type]
        return len(self._train)

    @property
    def train_size(self) -> int:
        """Training images of an epoch: those in whole batches."""
        return self.steps * (self._batch or 1)

    @property
    def val_size(self) -> int:
        """Images of the validation loader; 0 if it does not say."""
        for thing in (getattr(self._val, "sampler", None), getattr(self._val, "dataset", None)):
            if _sized(thing):
                return len(thing)  # type: ignore[arg-type]
        return 0

    def train(self, epoch: int, start: int, batch: int, rank: int, world: int) -> Iterator[Batch]:
        bound = self if self._batch == batch and world == 1 else self.bound(batch, self._device, self._seed, world)
        position = start
        for images, labels in islice(bound._pass(self._train, epoch), start, bound.steps):
            if len(labels) != batch:
                raise InputError(
                    f"batch {position} of the training loader has {len(labels)} images, not {batch}: make all equal, "
                    "with drop_last=True"
                )
            yield images.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)
            position += 1
        if position < bound.steps:
            raise InputError(f"the training loader ended after {position} batches; its length says {bound.steps}")

    def val(self, batch: int) -> Iterator[Batch]:
        images = None
        for images, labels in self._pass(self._val, 0):
            yield images.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)
        if images is None:
            raise InputError("the validation loader is empty: give it images")

    def _pass(self, loader: Any, epoch: int) -> Iterator[Batch]:
        """One pass, with random numbers of its own; the random state of the process is left as it was."""
        seed = mix_seed(self._seed, epoch)
        if hasattr(getattr(loader, "sampler", None), "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for owner in (loader, getattr(loader, "sampler", None)):
            if isinstance(generator := getattr(owner, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        before = _random_state()
        random.seed(seed), np.random.seed(seed % 2**32), torch.default_generator.manual_seed(seed)
        batches = None
        while True:
            try:
                batches = iter(loader) if batches is None else batches
                found = next(batches, None)
            finally:
                own = _random_state()
                _set_random_state(before)
            if found is None:
                return
            yield self._checked(found)
            before = _random_state()
            _set_random_state(own)

    def _checked(self, found: Any) -> Batch:
        if not self._labels:
            images = found[0] if isinstance(found, tuple | list) and found else found
            count = len(images) if isinstance(images, Tensor) and images.ndim else 0
            found = images, torch.zeros(count, dtype=torch.long)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise InputError(f"a loader must yield (images, labels); found {type(found).__name__}")
        images, labels = found
        if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
            raise InputError(f"images must be normalised float tensors (B, C, H, W); found {_say(images)}")
        if not isinstance(labels, Tensor) or labels.shape != images.shape[:1] or labels.dtype.is_floating_point:
            raise InputError(f"labels must be whole numbers, one per image; found {_say(labels)} for {len(images)}")
        if labels.device.type == "cpu" and len(labels):
            wrong = labels[(labels < 0) | (labels >= self.classes)]
            if len(wrong):
                allowed = f"from 0 to {self.classes - 1}, by the number of classes"
                raise InputError(f"a label must be {allowed}; found {int(wrong[0])}")
        return images, labels.long()


def _classes(dataset: Any) -> tuple[int | None, list[str] | None]:
    """Number and names of the classes, as far as a data set says them."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    index = getattr(getattr(dataset, "reader", dataset), "class_to_idx", None)
    names = getattr(dataset, "classes", None) or (sorted(index, key=index.__getitem__) if index else None)
    if isinstance(names, list | tuple):
        return len(names), [", ".join(map(str, name)) if isinstance(name, tuple) else str(name) for name in names]
    tensors = getattr(dataset, "tensors", None)  # of a TensorDataset
    labels = tensors[1] if tensors and len(tensors) == 2 else getattr(dataset, "targets", None)
    if labels is None or not len(labels):
        return None, None
    return int(torch.as_tensor(labels).max()) + 1, None


def _batch_size(loader: Any) -> int | None:
    size: int | None = getattr(loader, "batch_size", None)
    return size


def _sized(thing: object) -> bool:
    if not isinstance(thing, Sized):
        return False
    try:
        len(thing)
    except TypeError:  # a loader of a data set without a length
        return False
    return True


def _random_state() -> tuple[Any, Any, Tensor]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_random_state(state: tuple[Any, Any, Tensor]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])


def _say(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
