"""The batches of a run: how large they are, how many an epoch has, and whether processes can share them."""

from __future__ import annotations

from hiap.data.sources import Data, LoaderData
from hiap.training.config import Config, ConfigError
from hiap.training.schedule import BATCH

__all__ = ["ENOUGH", "check_parts", "default_batch", "steps_per_epoch"]

ENOUGH = 200  # steps that gates and weights need to learn anything
LEAST = 16  # images of a batch, by default


def steps_per_epoch(config: Config, data: Data) -> int:
    """Whole batches of the training images.

    Raises:
        ConfigError: there is none.
    """
    steps = data.train_size // config.batch_size
    if steps == 0:
        raise ConfigError(f"batch_size {config.batch_size} is more than the {data.train_size} training images")
    return steps


def default_batch(config: Config, data: Data) -> int:
    """The batch size where none is given: a loader's own, else 256, or less so that a short run has enough steps."""
    if isinstance(data, LoaderData) and data.batch:
        return data.batch
    batch = BATCH
    while batch > LEAST and config.epochs * (data.train_size // batch) < ENOUGH:
        batch //= 2
    return batch


def check_parts(config: Config, processes: int = 1) -> None:
    """Refuse batches that processes cannot take apart as the configuration wants it."""
    size = config.batch_size
    shares = [(rank + 1) * size // processes - rank * size // processes for rank in range(processes)]
    if min(shares) < config.accumulate:
        raise ConfigError(f"accumulate {config.accumulate} is more than the {min(shares)} images of a process")
    odd = [share for share in shares if share % 2]
    if odd and (config.mixup or config.cutmix):
        raise ConfigError(
            f"mixup and cutmix pair images, and a process has {odd[0]}: choose a batch_size that gives each an even "
            "number"
        )
