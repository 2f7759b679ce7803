"""The folder of a run: its lock, its configuration, its checkpoints and its metrics. Nothing in it is pickled.

A checkpoint is a folder with `state.safetensors` and `state.json` that appears by a rename, so whatever kills a run
leaves the last one whole. Everything random in a run is a function of its seed and the step, so no generator is stored.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import yaml
from safetensors import SafetensorError
from torch import Tensor

from hiap.atomic import write_text
from hiap.data.streams import STREAMS
from hiap.errors import InputError, RunError
from hiap.training.folder_lock import hold

__all__ = [
    "CONFIG",
    "DENSE",
    "FREE",
    "GATES_FILE",
    "METRICS_FILE",
    "MISTAKES",
    "RunError",
    "RunFolder",
    "checkpoints",
    "compare_configs",
    "load_checkpoint",
    "load_dense",
    "logged",
    "starts",
]

CONFIG, DENSE = "config.yaml", "dense.safetensors"
METRICS_FILE, GATES_FILE, MISTAKES, ENVIRONMENT = "metrics.jsonl", "gates.jsonl", "mistakes.json", "environment.json"
FREE = (
    "workers",
    "trackers",
    "strict_data",
    "download",
    "checkpoint_every",
)  # may change from one part of a run to the next
PATHS = ("data", "weights", "teacher_weights", "cost")


class RunFolder:
    """The folder a run writes to; held by a lock until the process ends. Without a checkpoint it holds no run yet.

    Raises:
        RunError: the folder is in use, holds another run, holds a run and `resume` was not asked for, or holds none and
            it was.
    """

    def __init__(self, path: str | os.PathLike[str], config: str, resume: bool) -> None:
        self.path = Path(path)
        self.check(self.path, resume)
        lock = hold(self.path)
        if lock is None:
            raise RunError(f"{self.path} is in use by another run")
        self._lock = lock
        for left in self.path.glob(".checkpoint.*"):  # by a run that was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        file = self.path / CONFIG
        if checkpoints(self.path):
            compare_configs(self.path, file.read_text(), config)
        else:
            write_text(file, config)

    @staticmethod
    def check(path: Path, resume: bool) -> None:
        """Refuse a folder that a run cannot begin in, or go on in."""
        begun = (path / CONFIG).is_file()
        if checkpoints(path):
            if not begun:
                raise RunError(f"{path} holds checkpoints but no {CONFIG}: put it back, or pass another --out")
            if not resume:
                raise RunError(f"{path} holds a run: pass --resume to go on with it, or another --out")
        elif resume and not begun:
            raise RunError(f"{path} holds no run to resume: leave out --resume to begin one there")

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
                shutil.copymode(new / "state.json", new / "state.safetensors")  # which nobody else could read
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

    def log(self, record: dict[str, Any], name: str = METRICS_FILE) -> None:
        """Append one line to metrics.jsonl, or to another file of its kind.

        Raises:
            RunError: it cannot be written.
        """
        try:
            with (self.path / name).open("a") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise RunError(f"{self.path / name} cannot be written: {error}") from error

    def rewind(self, done: int, pending: bool = False) -> None:
        """Drop what is said of later steps than so many: they will be done again.

        Args:
            pending: the epoch that ended with the last of them is still to be evaluated, so its metrics go too.
        """
        for name, last in ((METRICS_FILE, done - pending), (GATES_FILE, done)):
            file = self.path / name
            if file.exists():
                kept = [line for line in file.read_text(errors="replace").splitlines() if _step_of(line) <= last]
                write_text(file, "".join(line + "\n" for line in kept))

    def save_dense(self, tensors: dict[str, Tensor]) -> None:
        """Write the weights of the dense model, which the search begins with.

        Raises:
            RunError: they cannot be written; the last checkpoint is whole.
        """
        partial = self.path / "dense.partial"
        try:
            safetensors.torch.save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial)
            shutil.copymode(self.path / CONFIG, partial)
            partial.replace(self.path / DENSE)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            kept = next(reversed(checkpoints(self.path)), None)
            raise RunError(
                f"{self.path / DENSE} cannot be written ({error}); the last good checkpoint is {kept}"
            ) from error

    def report(self, record: dict[str, Any]) -> None:
        """Write what came of the run to report.json."""
        write_text(self.path / "report.json", json.dumps(record, indent=1) + "\n")

    def note_start(self, command: dict[str, Any]) -> None:
        """Add to environment.json how the run was started, or taken up again, and on what."""
        earlier = starts(self.path) if checkpoints(self.path) else []
        write_text(self.path / ENVIRONMENT, json.dumps([*earlier, command], indent=1) + "\n")

    def close(self) -> None:
        self._lock.close()


def starts(folder: Path) -> list[dict[str, Any]]:
    """How the run in a folder was started, and taken up again; nothing where it does not say."""
    try:
        found = json.loads((folder / ENVIRONMENT).read_text())
    except (OSError, ValueError, RecursionError):
        return []
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def load_dense(folder: Path) -> dict[str, Tensor]:
    """The weights that `save_dense` wrote.

    Raises:
        RunError: they are missing or damaged.
    """
    try:
        return safetensors.torch.load_file(folder / DENSE)
    except (OSError, SafetensorError) as error:
        raise RunError(
            f"{folder / DENSE} is missing or damaged ({error}), and the run needs it: begin again with another --out"
        ) from error


def compare_configs(folder: Path, found: str, wanted: str) -> None:
    """Refuse to go on with another configuration, but for what does not change the result."""
    try:
        old, new = (yaml.safe_load(text) or {} for text in (found, wanted))
    except yaml.YAMLError as error:
        raise RunError(f"{folder / CONFIG} is damaged ({str(error).splitlines()[0]}); put it back") from error
    if not isinstance(old, dict):
        raise RunError(f"{folder / CONFIG} is damaged: it must hold options and values; put it back")
    free = {*FREE, *(() if new.get("keep") == "best" else ("eval_every",))}
    if str(new.get("data")).startswith(STREAMS):
        free.remove("workers")  # which the order of the images depends on
    changed = [key for key in new if key not in free and not _same(key, old.get(key, new[key]), new[key])]
    if not changed:
        return
    if changed == ["epochs"] and new["epochs"] > old["epochs"]:
        raise RunError(
            f"{folder} holds a run of {old['epochs']} epochs: its learning rate and its budget follow that length, so "
            f"it cannot be made longer. A longer one is a new run: leave out --resume, and pass --epochs "
            f"{new['epochs']} and another --out"
        )
    text = "; ".join(f"{key}: {new[key]} (was: {key}: {old.get(key)})" for key in changed[:5])
    raise RunError(f"{folder} holds a run of another configuration: {text}")


def _same(key: str, old: Any, new: Any) -> bool:
    """Whether two values of an option mean the same: paths may be spelt differently."""
    if key in PATHS and isinstance(old, str) and isinstance(new, str):
        return os.path.realpath(old) == os.path.realpath(new)
    return bool(old == new)


def logged(folder: Path, step: int) -> dict[str, Any] | None:
    """What metrics.jsonl says of the epoch that ended with this step, if it does."""
    file = folder / METRICS_FILE
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    return next((dict(json.loads(line)) for line in lines if _step_of(line) == step), None)


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
        if not isinstance(state, dict):
            raise InputError("state.json is not an object")
    except (OSError, ValueError, RecursionError, SafetensorError) as error:
        raise RunError(f"checkpoint {found[-1]} is damaged ({error}); remove it to start again") from error
    return tensors, state


def _step_of(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")  # a line that was cut off
