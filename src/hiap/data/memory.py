"""Data sets held in memory as bytes, and augmented a batch at a time on the device that holds them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hiap.data.images import Augmentation, Batch, Loading, Lost, Sample, mix_seed, named, order, outlive_signals
from hiap.data.indexed import lost, read_image
from hiap.errors import InputError

__all__ = ["ByteData", "digits", "read_bytes"]


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
        return self.val_part(batch, 0, 1)

    def val_part(self, batch: int, rank: int, world: int) -> Iterator[Batch]:
        """Every `world`-th batch of `val`, beginning with number `rank`."""
        images, labels = (torch.split(one, batch)[rank::world] for one in self._val)
        for some, their in zip(images, labels, strict=True):
            yield self._resize(self._normalise(some)), their

    def bank(self, batch: int) -> Iterator[Batch]:
        """The training images once, in their order, prepared as those of validation are."""
        for some, their in zip(*(torch.split(one, batch) for one in self._train), strict=True):
            yield self._resize(self._normalise(some)), their

    def held_out(self) -> ByteData:
        """The same data, with a random tenth of the training images held out for validation instead of its own."""
        other = copy.copy(self)
        generator = torch.Generator("cpu").manual_seed(0)
        mixed = torch.randperm(self.train_size, generator=generator, device="cpu").to(self.device)
        tenth = self.train_size // 10
        other._val = (self._train[0][mixed[:tenth]], self._train[1][mixed[:tenth]])
        other._train = (self._train[0][mixed[tenth:]], self._train[1][mixed[tenth:]])
        return other

    def first(self, count: int) -> ByteData:
        """The same data with only its first `count` training images."""
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


class _Bytes(Dataset[Any]):
    """Images of a data set as bytes of one size."""

    def __init__(self, dataset: Any, loading: Loading) -> None:
        self.dataset, self.loading = dataset, loading

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Sample:
        try:
            image, label = read_image(self.dataset, index, self.loading.mode)
            pixels = np.array(image.resize(self.loading.size[::-1], Image.Resampling.BICUBIC))
        except Exception as error:
            return lost(self.dataset, index, error, self.loading.strict)
        pixels = pixels[..., None] if pixels.ndim == 2 else pixels
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), int(label)


def read_bytes(dataset: Any, loading: Loading) -> Batch:
    """A whole data set as bytes of the size the model sees (N, C, H, W), and its labels (N)."""
    loader = DataLoader(
        _Bytes(dataset, loading),
        batch_size=256,
        num_workers=loading.workers,
        collate_fn=_parted,
        worker_init_fn=outlive_signals,
    )
    images, labels = torch.empty(0, dtype=torch.uint8), torch.empty(len(dataset), dtype=torch.long)
    count, skipped = 0, []
    for pixels, own, missing in loader:
        for one in missing:
            if one.fatal is not None:
                raise InputError(one.fatal)
            skipped.append(one.name)
        if len(own):  # copied at once: what a worker sends holds an open file for as long as it lives
            images = images if count else pixels.new_empty(len(dataset), *pixels.shape[1:])
            images[count : count + len(own)], labels[count : count + len(own)] = pixels, own
            count += len(own)
    if skipped:
        told = f"{len(skipped)} images cannot be read and are skipped: {named(skipped)}"
        warnings.warn(f"{told}; --strict-data makes this an error", stacklevel=2)
    if not count:
        raise InputError(f"none of {len(skipped)} images can be read; is this an image data set?")
    return images[:count], labels[:count]


def _parted(samples: list[Sample]) -> tuple[Tensor, Tensor, list[Lost]]:
    """Images and labels of a batch, and what could not be read of it."""
    missing = [sample for sample in samples if isinstance(sample, Lost)]
    kept = [sample for sample in samples if not isinstance(sample, Lost)]
    images = torch.stack([image for image, _ in kept]) if kept else torch.empty(0)
    return images, torch.tensor([label for _, label in kept], dtype=torch.long), missing
