"""The fastest forms of the fused kernels, kept from one process to the next: to find them takes up to a minute."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from hiap.speed.steps import Tile

__all__ = ["keep_form", "kept_forms"]


def _file() -> Path:
    """In the folder `HIAP_CACHE`, by default `~/.cache/hiap`.

    Raises:
        RuntimeError: there is no home folder.
    """
    if own := os.environ.get("HIAP_CACHE"):
        return Path(own, "kernels.jsonl")
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hiap", "kernels.jsonl")


def kept_forms() -> dict[str, Tile]:
    """The fastest form of every kernel that was timed on this machine, by what it depends on; none if there is no file.

    Processes share the file.
    """
    found: dict[str, Tile] = {}
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        for line in _file().read_text().splitlines():
            with suppress(ValueError, TypeError):  # a line that was half written
                key, tile = json.loads(line)
                found[key] = None if tile is None else tuple(map(int, tile))
    return found


def keep_form(key: str, tile: Tile) -> None:
    """Add a form to the file, where it can be written."""
    with suppress(OSError, RuntimeError):
        file = _file()
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as end:
            end.write(json.dumps([key, tile]) + "\n")
