"""Running out of memory, in words: what to change, and where the run goes on from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hiap.errors import RunError
from hiap.training.config import Config

__all__ = ["out_of_memory"]


@contextmanager
def out_of_memory(config: Config, where: Callable[[], str], last: Callable[[], str]) -> Iterator[None]:
    """Turn errors of full memory into a RunError; others pass.

    Args:
        where: says where the run is.
        last: names the last checkpoint.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        first, saved = next(iter(str(error).splitlines()), "MemoryError"), f"the last checkpoint is {last()}"
        if "shared memory" in str(error):
            raise RunError(
                f"loader workers ran out of shared memory: pass --workers 0, or enlarge /dev/shm; {saved} ({first})"
            ) from error
        full = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
        if not full:
            raise
        raise RunError(
            f"out of memory {where()}, with batches of {config.batch_size}: begin again with --accumulate "
            f"{2 * config.accumulate}, which computes each batch in parts, or with a smaller --batch-size; "
            f"{saved} ({first})"
        ) from error
