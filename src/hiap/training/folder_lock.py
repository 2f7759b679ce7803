"""A lock on a folder: other processes see it, and it ends with the process that holds it."""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path
from typing import TextIO

from hiap.errors import RunError

__all__ = ["hold"]

_held: weakref.WeakSet[TextIO] = weakref.WeakSet()


def hold(folder: Path) -> TextIO | None:
    """Lock a folder, which is created if need be, until the file that is returned is closed; None if it is locked.

    Raises:
        RunError: the folder cannot be created, for instance because a file has its name.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder} cannot be created as a folder: {error}") from error
    file = (folder / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    _held.add(file)
    return file


def _let_go() -> None:
    """A forked process, such as a loader worker, shares the lock; it must not keep it when its parent is killed."""
    for file in _held:
        file.close()


os.register_at_fork(after_in_child=_let_go)
