"""The folder of a sweep: one ordinary run folder for each combination, and `sweep.json` that lists them.

A run folder begins with nothing but its config.yaml, so that `hiap prune --resume --out FOLDER` both begins a run and
goes on with one.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hiap.atomic import write_text
from hiap.errors import RunError
from hiap.training.config import Config
from hiap.training.folder_lock import hold
from hiap.training.run_folder import CONFIG, checkpoints, compare_configs
from hiap.training.rungs import read_rungs

__all__ = ["SWEEP", "Member", "SweepFolder", "SweptModel", "read_members"]

SWEEP = "sweep.json"
FORMAT = 1
STATES = ("waiting", "finished", "failed")


@dataclass(frozen=True)
class SweptModel:
    """One model that came of a sweep.

    Attributes:
        name: of its run, and of its size where the run has several targets.
        run: the name of its run.
        record: what its report.json says.
    """

    name: str
    run: str
    folder: Path
    record: dict[str, Any]


@dataclass(frozen=True)
class Member:
    """One run of a sweep.

    Attributes:
        options: those of the grid, as they were written.
        state: "waiting", "finished" or "failed". A run that was interrupted waits to go on.
        message: why it failed.
        shared: whether other runs used the machine when its times were measured.
    """

    name: str
    folder: Path
    options: dict[str, str]
    state: str = "waiting"
    message: str = ""
    shared: bool = False

    def models(self) -> list[SweptModel]:
        """What the run has made, with all that is measured; nothing before its end."""
        rungs = read_rungs(self.folder)
        places = [(f"{self.name}/{rung.path.name}", rung.path) for rung in rungs] or [(self.name, self.folder)]
        models = [
            SweptModel(name, self.name, path, record) for name, path in places if "speed" in (record := _record(path))
        ]
        return models if len(models) == len(places) else []


class SweepFolder:
    """A sweep on disk, held by a lock until it is closed.

    Attributes:
        members: its runs, in order.

    Raises:
        RunError: the folder holds something else, or another configuration of one of the runs, or is in use.
    """

    def __init__(self, path: Path, planned: Sequence[tuple[dict[str, str], str, Config]]) -> None:
        """
        Args:
            planned: for each run the options of the grid, its name and its configuration; they are added to those that
                the folder lists.
        """
        self.path = path
        if (path / CONFIG).is_file():
            raise RunError(f"{path} holds a run, not a sweep: pass another --out")
        self.members = read_members(path)
        known = {member.name: i for i, member in enumerate(self.members)}
        for options, name, config in planned:
            if name not in known:
                self.members.append(Member(name, path / name, options))
            _check_same(path / name, config)
        if not self.members:
            raise RunError(f"{path} holds no sweep to resume: leave out --resume and pass --grid to begin one there")
        lost = [member.folder for member in self.members if not (member.folder / CONFIG).is_file()]
        lost = [folder for folder in lost if folder not in [path / name for _, name, _ in planned]]
        if lost:
            raise RunError(f"{lost[0] / CONFIG} is missing: put it back, or run the same command with its --grid again")
        lock = hold(path)
        if lock is None:
            raise RunError(f"{path} is in use by another sweep")
        self._lock = lock
        for _, name, config in planned:
            (path / name).mkdir(exist_ok=True)
            write_text(path / name / CONFIG, config.to_yaml())
        self.members = [replace(one, state="finished" if one.models() else "waiting") for one in self.members]

    def note(self, name: str, **changes: Any) -> Member:
        """Change what is known of a run."""
        i = next(i for i, member in enumerate(self.members) if member.name == name)
        self.members[i] = replace(self.members[i], **changes)
        return self.members[i]

    def to_json(self) -> list[dict[str, Any]]:
        """The runs as JSON values."""
        return [
            {
                "name": one.name,
                "folder": str(one.folder.relative_to(self.path)),
                "options": one.options,
                "state": one.state,
                **({"message": one.message} if one.message else {}),
                **({"shared": True} if one.shared else {}),
            }
            for one in self.members
        ]

    def write(self, more: dict[str, dict[str, Any]]) -> None:
        """Write sweep.json.

        Args:
            more: what else to say of each run, by its name.
        """
        runs = [{**one, **more.get(one["name"], {})} for one in self.to_json()]
        write_text(self.path / SWEEP, json.dumps({"format": FORMAT, "runs": runs}, indent=1) + "\n")

    def close(self) -> None:
        self._lock.close()


def _check_same(folder: Path, config: Config) -> None:
    """Refuse to go on with a run of another configuration."""
    begun = (folder / CONFIG).is_file() and (checkpoints(folder) or read_rungs(folder) or _record(folder))
    if begun:
        compare_configs(folder, (folder / CONFIG).read_text(), config.to_yaml())


def read_members(path: Path) -> list[Member]:
    """The runs that sweep.json lists; none where there is no such file."""
    file = path / SWEEP
    if not file.is_file():
        return []
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved["format"] != FORMAT or any(one["state"] not in STATES for one in saved["runs"]):
            raise ValueError("it has another format")
        return [
            Member(one["name"], path / one["folder"], dict(one["options"]), shared=bool(one.get("shared")))
            for one in saved["runs"]
        ]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{file} is damaged ({type(error).__name__}: {error}); put it back") from error


def _record(folder: Path) -> dict[str, Any]:
    """What report.json says; nothing where there is none, or it is damaged."""
    try:
        found = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
