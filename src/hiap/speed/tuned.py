"""The fastest forms of the fused kernels, kept from one process to the next: to find them takes up to a minute."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

from hiap.speed.steps import Tile

__all__ = ["Fastest", "cache_file"]


def cache_file() -> Path:
    """Where the forms are kept: a file in the folder `HIAP_CACHE`, by default `~/.cache/hiap`. It may be deleted."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "hiap")
    return Path(os.environ.get("HIAP_CACHE") or usual, "kernels.jsonl")


class Fastest:
    """The fastest form of every kernel that was timed on this machine, by what that depends on.

    Processes share the file. Where it cannot be read or written, each finds its forms itself.
    """

    def __init__(self, file: Path) -> None:
        self.file, self.forms = file, dict[str, Tile]()

    def __contains__(self, key: str) -> bool:
        return key in self.forms

    def __getitem__(self, key: str) -> Tile:
        return self.forms[key]

    def read(self) -> None:
        """Take in what other processes have found. What this one knows stays."""
        text = ""
        with suppress(OSError, UnicodeDecodeError):
            text = self.file.read_text()
        for line in text.splitlines():
            with suppress(ValueError, TypeError):  # a line that was half written
                key, tile = json.loads(line)
                self.forms.setdefault(key, None if tile is None else tuple(map(int, tile)))

    def add(self, key: str, tile: Tile) -> None:
        """Keep a form, here and in the file."""
        self.forms[key] = tile
        with suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps([key, tile]) + "\n")
