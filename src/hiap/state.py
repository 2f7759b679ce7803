"""The folder of a run: its lock, its configuration, its checkpoints and its metrics. Nothing in it is pickled.

A checkpoint is a folder with `state.safetensors` and `state.json` that appears by a rename, so whatever kills a run
leaves the last one whole. Everything random in a run is a function of its seed and the step, so no generator is stored.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any, TextIO

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

__all__ = ["RunError", "RunFolder", "checkpoints", "load_checkpoint"]


class RunError(RuntimeError):
    """A run that cannot start, go on or be saved."""


class RunFolder:
    """The folder a run writes to; held by a lock until the process ends. Without a checkpoint it holds no run yet.

    Raises:
        RunError: the folder is in use, holds another run, or holds a run and `resume` was not asked for.
    """

    def __init__(self, path: str | os.PathLike[str], config: str, resume: bool) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock: TextIO = (self.path / ".lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunError(f"{self.path} is in use by another run") from error
        for left in self.path.glob(".checkpoint.*"):  # by a run that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        file = self.path / "config.yaml"
        if file.exists() and checkpoints(self.path):
            if not resume:
                raise RunError(f"{self.path} holds a run: pass --resume to go on with it, or another --out")
            found = file.read_text()
            if found != config:
                changed = [
                    f"{b} (was: {a})" for a, b in zip(found.splitlines(), config.splitlines(), strict=False) if a != b
                ]
                raise RunError(f"{self.path} holds a run of another configuration: {'; '.join(changed[:5])}")
        else:
            partial = file.with_suffix(".partial")
            partial.write_text(config)
            partial.replace(file)

    def save(self, step: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Write a checkpoint and remove the ones before it.

        Raises:
            RunError: it cannot be written; the one before is whole.
        """
        target = self.path / f"checkpoint-{step:09}"
        if target.exists():  # dense training ends at the step the search begins at; this name comes after
            target = target.with_name(f"{target.name}.1")
        try:
            with tempfile.TemporaryDirectory(prefix=".checkpoint.", dir=self.path) as scratch:
                new = Path(scratch, "new")
                new.mkdir()
                flat = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
                safetensors.torch.save_file(flat, new / "state.safetensors")
                (new / "state.json").write_text(json.dumps(state))
                if target.exists():
                    shutil.rmtree(target)
                new.rename(target)
        except (OSError, SafetensorError) as error:
            last = checkpoints(self.path)
            kept = f"the last good one is {last[-1]}" if last else "there is none before it"
            raise RunError(f"checkpoint {target} cannot be written ({error}); {kept}") from error
        for old in checkpoints(self.path):
            if old != target:
                shutil.rmtree(old, ignore_errors=True)
        return target

    def log(self, record: dict[str, Any]) -> None:
        """Append one line to metrics.jsonl."""
        with (self.path / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def rewind(self, step: int) -> None:
        """Drop what metrics.jsonl says of the steps from this one on: they will be done again."""
        file = self.path / "metrics.jsonl"
        if file.exists():
            kept = [line for line in file.read_text().splitlines() if _step_of(line) < step]
            partial = file.with_suffix(".partial")
            partial.write_text("".join(line + "\n" for line in kept))
            partial.replace(file)

    def close(self) -> None:
        self._lock.close()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    return sorted(folder.glob("checkpoint-*"))


def load_checkpoint(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The last checkpoint of a run, or None before the first.

    Raises:
        RunError: it is damaged.
    """
    found = checkpoints(folder)
    if not found:
        return None
    try:
        tensors = safetensors.torch.load_file(found[-1] / "state.safetensors")
        state = json.loads((found[-1] / "state.json").read_text())
    except (OSError, ValueError, SafetensorError) as error:
        raise RunError(f"checkpoint {found[-1]} is damaged ({error}); remove it to start again") from error
    return tensors, state


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")  # a line that was cut off
