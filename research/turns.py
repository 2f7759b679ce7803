"""The device to itself, for a run of a batch that reads a clock."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

LOCK = "COMPARE_BATCH_LOCK"  # the variable with the file that runs of one batch lock
SETTLE = 0.5  # seconds until the device has done what it was given


@contextmanager
def alone() -> Iterator[None]:
    """The other runs of the batch stand still. Outside of a batch there are none."""
    lock = os.environ.get(LOCK)
    if lock is None:
        yield
        return
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        others = [run for run in psutil.Process(os.getppid()).children() if run.pid != os.getpid()]
        try:
            for run in others:
                with suppress(psutil.NoSuchProcess):
                    run.suspend()
            time.sleep(SETTLE)
            yield
        finally:
            for run in others:
                with suppress(psutil.NoSuchProcess):
                    run.resume()
