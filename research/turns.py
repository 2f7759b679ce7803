"""The device to itself, for a run of a batch that reads a clock."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import psutil

LOCK = "COMPARE_BATCH_LOCK"  # the variable with the file that runs of one batch lock; the file has the batch's process
SETTLE = 0.5  # seconds until the device has done what it was given
PATIENCE = 5.0  # seconds in which a run must stand still


@contextmanager
def lock_of_batch() -> Iterator[IO[str]]:
    """The file that runs lock, for the batch that starts them."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(str(os.getpid()))
        file.flush()
        yield file


@contextmanager
def alone() -> Iterator[None]:
    """The other runs of the batch stand still. Outside of a batch there are none."""
    lock = os.environ.get(LOCK)
    if lock is None:
        yield
        return
    with open(lock) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if file.read() != str(os.getppid()):  # the batch has been killed, and this run belongs to another process
            yield
            return
        others = [run for run in psutil.Process(os.getppid()).children() if run.pid != os.getpid()]
        try:
            for run in others:
                with suppress(psutil.NoSuchProcess):
                    run.suspend()
            deadline = time.monotonic() + PATIENCE
            while any(map(_running, others)) and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(SETTLE)
            yield
        finally:
            for run in others:
                with suppress(psutil.NoSuchProcess):
                    run.resume()


def resume_all() -> None:
    """Let all runs of this batch go on."""
    for run in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            run.resume()


def _running(run: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(run.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    return False
