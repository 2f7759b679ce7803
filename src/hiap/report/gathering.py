"""Reads what is known of a run from its folder: finished, stopped, going on, or only the model that came of one."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from hiap.errors import InputError, TopologyError
from hiap.nn.compact import Widths
from hiap.nn.token_merging import BlockTokens
from hiap.pruning.count import block_macs, geometry
from hiap.pruning.topology import Topology
from hiap.training.run_folder import CONFIG, GATES_FILE, METRICS_FILE, MISTAKES, checkpoints, starts
from hiap.training.snapshots import unpack

__all__ = ["BlockView", "RunData", "gather", "gather_all"]

LADDER = "ladder.json"
STATES = {
    "finished": "finished",
    "running": "still running",
    "stopped": "stopped before the end",
    "waiting": "not begun",
    "model": "a saved model without its run",
}


@dataclass(frozen=True)
class BlockView:
    """One block as it is now, and as it was.

    Attributes:
        dense, now: its widths; `now` is padded as the network is built, where that is known.
        heads: which ones are kept.
        dense_macs, macs: None where the size of the input is not known.
    """

    dense: Widths
    now: Widths
    heads: tuple[int, ...]
    dense_macs: int | None = None
    macs: int | None = None


@dataclass
class RunData:
    """All that a folder says.

    Attributes:
        state: one of STATES.
        record: what report.json, or before the end the last checkpoint, says.
        metrics: one entry an epoch, with `at`: epochs since the run began.
        snapshots: of the gates, with `at` too.
        pictures: images that only the dense model gets right.
        blocks: the network as it is.
        missing: what the folder does not have, in words.
    """

    folder: Path
    name: str
    state: str
    record: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    starts: list[dict[str, Any]] = field(default_factory=list)
    pictures: list[dict[str, Any]] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    blocks: list[BlockView] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def metric(self) -> str:
        """The key of the figure the run is judged by."""
        return "error" if "error" in self.record or self.record.get("objective") == "features" else "top1"

    @property
    def dense(self) -> list[Widths]:
        return [block.dense for block in self.blocks]

    @property
    def searched(self) -> list[Widths]:
        """The widths of the network that the search began with; on a lower rung it is not the dense model."""
        known = self.record.get("search_widths") or []
        return [Widths(**widths) for widths in known] or self.dense

    def numbers(self) -> dict[str, Any]:
        """The headline as JSON values: dense against compact; what is not known is left out."""
        record, saved = self.record, self.saved
        found = {
            "name": self.name,
            "state": self.state,
            "model": self.config.get("model") or saved.get("architecture"),
            "data": self.config.get("data"),
            "target": self.config.get("target"),
            **{key: record.get(key) for key in ("dense_top1", "top1", "top5", "error", "cosine")},
            "dense_macs": record.get("dense_macs", saved.get("dense_macs")),
            "macs": record.get("macs", saved.get("macs")),
            "dense_params": record.get("dense_params"),
            "params": record.get("params", saved.get("params")),
            "speed": record.get("speed"),
            "logit_difference": saved.get("logit_difference"),
            "tolerance": saved.get("tolerance"),
        }
        found["blocks"] = [{**asdict(block.now), "dense": asdict(block.dense)} for block in self.blocks]
        return {key: value for key, value in found.items() if value is not None}


def gather_all(folder: Path) -> list[RunData]:
    """The run in a folder, or the rungs of the ladder in it, in its order: the largest model first.

    Raises:
        InputError: there is neither a run nor a model.
    """
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder")
    if not (folder / LADDER).is_file():
        return [gather(folder)]
    listed = _object(folder / LADDER).get("rungs")
    if not isinstance(listed, list):
        raise InputError(f"{folder / LADDER} is damaged: it must list the sizes of the run; put it back")
    found = []
    for one in listed:
        path = folder / str(one.get("folder", "")) if isinstance(one, dict) else folder / str(one)
        if not (path / CONFIG).is_file():
            continue
        run = gather(path)
        if isinstance(one, dict) and one.get("state") == "waiting":
            run.state, run.missing = "waiting", ["this size waits for the larger one before it"]
        found.append(run)
    if not found:
        raise InputError(f"{folder} holds a run of several sizes of which none has begun: wait for the first")
    return found


def gather(folder: Path) -> RunData:
    """What is known of one run, or of a saved model.

    Raises:
        InputError: there is neither.
    """
    compact = folder if (folder / "config.json").is_file() else folder / "compact"
    if compact == folder and (folder.parent / CONFIG).is_file() and folder.name == "compact":
        folder = folder.parent  # of the run
    begun = (folder / CONFIG).is_file()
    saved = _object(compact / "config.json")
    if not begun and "topology" not in saved:
        raise InputError(
            f"{folder} holds neither a run ({CONFIG}) nor a compact model (config.json): name the folder that "
            "`hiap prune --out` wrote, or one written by hiap.save"
        )
    run = RunData(folder, folder.resolve().name, "model", saved=saved)
    if begun:
        run.config = _yaml(folder / CONFIG)
        run.record = _object(folder / "report.json") or _last_record(folder)
        run.state = "running" if _in_use(folder) else "stopped"
        if (folder / "report.json").is_file() or saved:
            run.state = "finished"
        run.metrics = _lines(folder / METRICS_FILE)
        run.snapshots = _lines(folder / GATES_FILE)
        run.starts = starts(folder)
        pictures = _json(folder / MISTAKES)
        run.pictures = [one for one in pictures if isinstance(one, dict)] if isinstance(pictures, list) else []
    run.snapshots = [one for one in run.snapshots if _whole(one, run)]
    _place_in_time(run)
    run.blocks = _blocks(run, compact)
    damaged = [
        file for file in (folder / "report.json", compact / "config.json") if file.is_file() and not _object(file)
    ]
    run.missing = [f"{file} cannot be read: it is damaged" for file in damaged] + _missing(run, begun)
    return run


def _whole(line: dict[str, Any], run: RunData) -> bool:
    """Whether a snapshot can be read, and is of this model."""
    widths = [Widths(**one) for one in run.record.get("search_widths") or run.record.get("dense_widths") or []]
    if not widths and run.saved:
        widths = [Widths(**one) for one in run.saved.get("dense", [])]
    try:
        unpack(line["decisions"], widths)
        return all(len(line[kind]) == len(widths) for kind in ("heads", "value_dims", "qk_dims", "neurons"))
    except (KeyError, TypeError, ValueError):
        return False


def _place_in_time(run: RunData) -> None:
    """Give every entry the time it was made: epochs since the run began, dense ones included."""
    steps = run.record.get("steps_per_epoch") or (run.metrics[0]["step"] if run.metrics else 1)
    for line in (*run.metrics, *run.snapshots):
        line["at"] = line["step"] / steps


def _missing(run: RunData, begun: bool) -> list[str]:
    """What a reader would look for and not find."""
    if not begun:
        return ["the run that made this model is not in the folder: there are no curves and no accuracy"]
    missing = []
    if run.state != "finished":
        doing = "is still running" if run.state == "running" else "was stopped before its end"
        missing.append(f"the run {doing}: final accuracy, speed and verification are not known yet")
    if not run.metrics:
        missing.append("there is no record of an epoch")
    if not run.snapshots:
        dense = run.metrics and all(line.get("stage") == "dense" for line in run.metrics)
        why = "the search has not begun" if dense or not run.metrics else "an older version of hiap made this run"
        missing.append(f"there is no record of the gates: {why}")
    if run.state == "finished" and "speed" not in run.record:
        missing.append("the speed was not measured: the command `hiap prune` does it, hiap.prune in Python does not")
    return missing


def _blocks(run: RunData, compact: Path) -> list[BlockView]:
    """The network: as it is saved, else as the gates were last seen, else dense."""
    size = run.record.get("geometry")
    if "topology" in run.saved:
        try:
            topology = Topology.from_json(run.saved["topology"])
            now, dense = ([Widths(**widths) for widths in run.saved[key]] for key in ("blocks", "dense"))
        except (TopologyError, TypeError, LookupError) as error:
            raise InputError(f"{compact / 'config.json'} does not describe a compact model: {error}") from error
        if size is None:
            from hiap.pruning.saving import load

            size = geometry(load(compact))
        kept = [block.heads or () for block in topology.blocks]
        if list(topology.dense) != dense:  # heads are numbered in the larger compact model it was cut from
            kept = [tuple(range(len(heads))) for heads in kept]
        return [_view(i, *one, size) for i, one in enumerate(zip(dense, now, kept, strict=True))]
    dense = [Widths(**widths) for widths in run.record.get("dense_widths", [])]
    if not dense:
        return []
    if not run.snapshots:
        every = [tuple(range(w.heads or 0)) for w in dense]
        return [_view(i, w, w, heads, size) for i, (w, heads) in enumerate(zip(dense, every, strict=True))]
    return _seen(run.snapshots[-1], dense, run.searched or dense, size)


def _seen(
    last: dict[str, Any], dense: Sequence[Widths], searched: Sequence[Widths], size: dict[str, Any] | None
) -> list[BlockView]:
    """The network as the gates last were: open units, with the mean width of open heads, rounded up."""
    open_heads, start, views = np.flatnonzero(unpack(last["decisions"], searched)["heads"]), 0, []
    for i, (widths, before) in enumerate(zip(dense, searched, strict=True)):
        end = start + (before.heads or 0)
        heads = tuple(int(h) - start for h in open_heads if start <= h < end)
        heads = heads if before.heads == widths.heads else tuple(range(len(heads)))
        many = max(len(heads), 1)
        queries, values = (-(-last[kind][i] // many) for kind in ("qk_dims", "value_dims"))
        neurons = None if before.neurons is None else last["neurons"][i]
        now = Widths(None if before.heads is None else len(heads), queries, values, neurons)
        views.append(_view(i, widths, now, heads, size))
        start = end
    return views


def _view(i: int, dense: Widths, now: Widths, heads: Sequence[int], size: dict[str, Any] | None) -> BlockView:
    if size is None:
        return BlockView(dense, now, tuple(heads))
    tokens = size["tokens"], BlockTokens(*size["merged"][i]) if "merged" in size else size["tokens"]
    counted = [block_macs(n, size["dims"][i], w, size["glu"][i]) for n, w in zip(tokens, (dense, now), strict=True)]
    return BlockView(dense, now, tuple(heads), *counted)


def _in_use(folder: Path) -> bool:
    """Whether a process holds the lock of the run."""
    try:
        with (folder / ".lock").open("r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _last_record(folder: Path) -> dict[str, Any]:
    """What the last checkpoint says; nothing before the first, or where it is damaged."""
    found = checkpoints(folder)
    record = _object(found[-1] / "state.json").get("record") if found else None
    return record if isinstance(record, dict) else {}


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _object(file: Path) -> dict[str, Any]:
    found = _json(file)
    return found if isinstance(found, dict) else {}


def _yaml(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _lines(file: Path) -> list[dict[str, Any]]:
    """The entries of a file with one JSON object a line, the last of each step; a line cut off is left out."""
    found: dict[float, dict[str, Any]] = {}
    for line in file.read_text(errors="replace").splitlines() if file.is_file() else []:
        try:
            entry = json.loads(line)
            found[float(entry["step"])] = entry
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
    return [found[step] for step in sorted(found)]
