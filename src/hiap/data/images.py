"""From images to batches: augmentation, random numbers, and what happens when an image cannot be read."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from timm.data import create_transform
from torch import Tensor

from hiap.errors import InputError

__all__ = [
    *("MODES", "Augmentation", "Batch", "Loaded", "Loading", "Lost", "Sample"),
    *("collate", "converted", "deliver", "mix_seed", "named", "order", "outlive_signals", "transform"),
]

Batch = tuple[Tensor, Tensor]
NAMED = 3  # of many, in a message
MODES = {1: "L", 3: "RGB"}  # of Pillow, by the channels of the model


@dataclass(frozen=True)
class Augmentation:
    """How training images are varied.

    Attributes:
        crop: the least share of the area that a random crop keeps; 1 is none.
        flip: probability of a horizontal flip.
        policy: RandAugment string of timm, for data that is read by a loader.
        erase: probability of random erasing, for data that is read by a loader.
    """

    crop: float = 0.35
    flip: float = 0.5
    policy: str | None = "rand-m9-mstd0.5-inc1"
    erase: float = 0.25


@dataclass(frozen=True)
class Loading:
    """How images are read and where batches go.

    Attributes:
        size: height and width the model sees.
        normalisation: mean and std of each channel.
        device: of the batches.
        workers: loader processes.
        strict: raise an error for an image that cannot be read, instead of using another of its batch.
        interpolation, crop_pct, crop_mode: how a loader resizes images and crops those of validation, in timm's words.
    """

    size: tuple[int, int]
    normalisation: tuple[Sequence[float], Sequence[float]]
    augmentation: Augmentation
    device: torch.device
    seed: int = 0
    workers: int = 4
    strict: bool = False
    channels: int = 3
    interpolation: str = "bicubic"
    crop_pct: float | None = None
    crop_mode: str | None = None

    @property
    def mode(self) -> str:
        """Pillow's name for images of these channels."""
        return MODES[self.channels]

    def transforms(self) -> tuple[Any, Any]:
        """What is done to an image for training, and for validation."""
        mean, std = self.normalisation
        augmentation = self.augmentation
        common: dict[str, Any] = {
            "mean": mean,
            "std": std,
            "input_size": (self.channels, *self.size),
            "interpolation": self.interpolation,
        }
        vary = create_transform(
            **common,
            is_training=True,
            scale=(augmentation.crop, 1.0),
            hflip=augmentation.flip,
            auto_augment=augmentation.policy,
            re_prob=augmentation.erase,
            **({} if augmentation.policy else {"color_jitter": None}),  # timm has one of its own otherwise
        )
        for op in (op for step in vary.transforms for op in getattr(step, "ops", ())):
            if op.name.startswith("Posterize"):
                op.aug_fn = _posterize
        return vary, create_transform(**common, crop_pct=self.crop_pct, crop_mode=self.crop_mode)


def mix_seed(*parts: int) -> int:
    """One seed from several numbers; other numbers give an unrelated seed."""
    return int(np.random.SeedSequence(parts).generate_state(1, np.uint64)[0] >> np.uint64(1))


def order(seed: int, epoch: int, size: int) -> Tensor:
    """The order of the images in an epoch."""
    return torch.randperm(size, generator=torch.Generator("cpu").manual_seed(mix_seed(seed, epoch)), device="cpu")


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """timm's strongest posterizing keeps no bit, which is black; Pillow 13 refuses it."""
    return ImageOps.posterize(image, bits) if bits > 0 else image.point(lambda _: 0)


def converted(image: Image.Image, mode: str) -> Image.Image:
    """An image in a mode of Pillow. Images of 16 bits are scaled; Pillow itself would cut them off at 255."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        pixels = np.asarray(image).astype(np.float32) / 257
        image = Image.fromarray(pixels.round().clip(0, 255).astype(np.uint8))
    return image.convert(mode)


def outlive_signals(worker: int) -> None:
    """Keep a loader worker alive when SIGTERM or SIGINT comes to the whole process group: the run saves, then ends it.

    A SIGTERM from the process that started the worker is obeyed, since torch and `multiprocessing` end workers with it.
    Where the sender is not known (macOS has no `sigwaitinfo`), every SIGTERM is obeyed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    owner = multiprocessing.parent_process()  # not always the parent in the system: a fork server may be
    if hasattr(signal, "sigwaitinfo") and owner is not None and owner.pid is not None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_owner, args=(owner.pid,), daemon=True).start()


def _await_owner(pid: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != pid:
        pass
    os._exit(0)


def transform(change: Any, image: Image.Image, seed: int) -> Tensor:
    """Apply a transform with random numbers of its own; the random state of the process is left as it was."""
    state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)
        try:
            changed: Tensor = change(image)
            return changed
        finally:
            random.setstate(state[0])
            np.random.set_state(state[1])


@dataclass(frozen=True)
class Lost:
    """What a loader worker returns in place of an image it cannot read.

    An error raised in a worker shows the traceback of two processes; a value can be reported in one line.

    Attributes:
        name: of the image.
        fatal: what to raise; None skips the image.
    """

    name: str
    fatal: str | None = None


Sample = tuple[Tensor, int] | Lost
Loaded = tuple[Tensor, Tensor, list[str], str | None]


def named(names: Sequence[str]) -> str:
    """The first few of many names."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def deliver(loaded: Iterable[Loaded], device: torch.device, filled: bool = True, part: bool = False) -> Iterator[Batch]:
    """Batches on the device. Images that cannot be read are warned of at the first, and counted at the end.

    Args:
        filled: keep the images that `collate` put in the place of those that cannot be read.
        part: these are the images of one process of several, of which none needs to be readable.

    Raises:
        ValueError: no image of a batch can be read; or none at all, if batches are not filled; or a worker cannot go
            on.
    """
    skipped: list[str] = []
    any_read = False
    for images, labels, lost, fatal in loaded:
        if fatal is not None:
            raise InputError(fatal)
        if filled and not len(labels):
            raise InputError(
                f"no image of a batch, or of this process's part of it, can be read ({named(lost)}); is this an image "
                "data set?"
            )
        if lost and not skipped:
            warnings.warn(
                f"some images cannot be read and are skipped: {named(lost)}; --strict-data makes this an error",
                stacklevel=2,
            )
        skipped += lost
        if lost and not filled:
            images, labels = images[: -len(lost)], labels[: -len(lost)]
        if not len(labels):
            continue
        any_read = True
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    if skipped and not any_read and not part:
        raise InputError(f"no image can be read ({named(skipped)}); is this an image data set?")
    if skipped:
        warnings.warn(f"{len(skipped)} images were skipped in this pass: {named(skipped)}", stacklevel=2)


def collate(samples: list[Sample]) -> Loaded:
    """Stack the images of a batch. Those that could not be read are replaced by others of it, put at the end.

    If none could be read, the batch is empty.
    """
    read = [sample for sample in samples if not isinstance(sample, Lost)]
    lost = [sample for sample in samples if isinstance(sample, Lost)]
    names, fatal = [one.name for one in lost], next((one.fatal for one in lost if one.fatal is not None), None)
    if not read:
        return torch.empty(0), torch.empty(0, dtype=torch.long), names, fatal
    filled = read + [read[i % len(read)] for i in range(len(lost))]
    images, labels = zip(*filled, strict=True)
    return torch.stack(images), torch.tensor(labels), names, fatal
