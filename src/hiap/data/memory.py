"""Small data sets as bytes in memory, augmented a batch at a time on the device that holds them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from importlib.resources import as_file, files

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hiap.data.images import Augmentation, Batch, mix_seed, order

__all__ = ["ByteData", "digits"]


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
