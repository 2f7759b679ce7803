"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["SET_ASIDE", "put_back", "replace_folder", "scratch_beside", "write_text"]

SET_ASIDE = "old"  # folder in a scratch folder, for what is being replaced


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file, replacing what is there in one step. A kill leaves the old file, or the new one."""
    partial = Path(f"{os.fspath(path)}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def replace_folder(target: Path, new: Path, old: Path) -> None:
    """Put a finished folder in its place. What was there is moved to `old`, and comes back if this is interrupted.

    Args:
        old: a path that is free, on the same file system.
    """
    try:
        if target.exists():
            target.rename(old)
        new.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise


def put_back(aside: Path, folder: Path) -> None:
    """Move all that was set aside to the folder it came from, over whatever is there."""
    for kept in list(aside.iterdir()):
        kept.replace(folder / kept.name)


@contextmanager
def scratch_beside(target: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder beside a file, to prepare it in: what is finished there is moved by a rename, and the rest vanishes.

    Folders that a killed process has left for the same file are removed. If it was killed while it replaced the file,
    what it had moved to `SET_ASIDE` comes back first.
    """
    path = Path(target).absolute()
    prefix = f".{path.name}.writing-"
    for entry in list(path.parent.iterdir()):
        if entry.name.startswith(prefix):
            if not path.exists() and (entry / SET_ASIDE).is_dir():
                put_back(entry / SET_ASIDE, path.parent)
            shutil.rmtree(entry, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=path.parent, ignore_cleanup_errors=True) as folder:
        yield Path(folder)
