"""What a run asks of its data, and how processes share its validation images."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Protocol, runtime_checkable

from hiap.data.images import Batch

__all__ = ["Data", "val_part"]


@runtime_checkable
class Data(Protocol):
    """Training and validation batches of one data set; `hiap.prune(config, out, data=...)` takes any object like this.

    A batch is (images, labels): float images (B, C, H, W), normalised, of the size the model sees; integer labels (B)
    below `classes`; both on the device of the run.

    A stopped run resumes bit by bit if its batches depend only on epoch and position (and on a seed of your own). For
    ordinary loaders of torch there is `LoaderData`.

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
        """The whole validation set once, in batches of at most `batch` images, in the same order in every process."""


@runtime_checkable
class _Parts(Protocol):
    """Data that can give a process its validation batches without reading those of the others."""

    def val_part(self, batch: int, rank: int, world: int) -> Iterator[Batch]: ...


def val_part(data: Data, batch: int, rank: int, world: int) -> Iterator[Batch]:
    """The validation batches of process `rank` of `world`; there may be none.

    Every image is in the part of exactly one process. Data with a method `val_part(batch, rank, world)` is asked for
    the part; of other data, each process goes through `val(batch)` and takes every `world`-th batch.
    """
    if world == 1:
        return data.val(batch)
    if isinstance(data, _Parts):
        return data.val_part(batch, rank, world)
    return islice(data.val(batch), rank, None, world)
