"""The device to itself, for a run of a batch that reads a clock."""

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

import psutil
import torch

LOCK = "COMPARE_BATCH_LOCK"  # the variable with the file that runs of one batch lock; the file has the batch's process
SETTLE = 0.2  # seconds, at least, until the device has done what it was given
PATIENCE = 5.0  # seconds in which a run must stand still, and the device too
QUIET = 1.2  # times as long as its fastest a product takes, at most, on a device that has nothing else to do


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
            if torch.cuda.is_available():
                _until_quiet(time.monotonic() + PATIENCE)
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


def _until_quiet(deadline: float) -> None:
    """Wait until the device has done what stopped runs have given it: ten products take equally long."""
    x, took = torch.ones(2048, 2048, device="cuda"), []
    torch.cuda.synchronize()
    while time.monotonic() < deadline and (len(took) < 20 or max(took[-10:]) > QUIET * min(took)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        x @ x
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
        time.sleep(0.005)


def _running(run: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(run.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    return False
