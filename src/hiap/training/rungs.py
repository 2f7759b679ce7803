"""The sizes of a run with several targets: a folder each, listed in `ladder.json` from the largest to the smallest.

Each of these folders is that of an ordinary run. Nothing here needs torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hiap.atomic import write_text
from hiap.errors import RunError
from hiap.training.config import Config, read_config

__all__ = [
    "LADDER",
    "Rung",
    "check_not_rung",
    "finished_run",
    "first_folder",
    "folder_name",
    "further_config",
    "read_rungs",
    "rung_configs",
    "rung_table",
    "write_rungs",
]

LADDER, CONFIG = "ladder.json", "config.yaml"
FORMAT = 1
STATES = ("waiting", "running", "done")


@dataclass(frozen=True)
class Rung:
    """One size of a run with several targets.

    Attributes:
        target: as it was written.
        path: its folder, which is that of an ordinary run.
        epochs: its length.
        state: "waiting", "running" or "done".
    """

    target: str
    path: Path
    epochs: int
    state: Literal["waiting", "running", "done"] = "waiting"

    @property
    def folder(self) -> Path:
        """Where its compact model is saved."""
        return self.path / "compact"

    @property
    def record(self) -> dict[str, Any]:
        """What its report.json says; empty before it is done."""
        file = self.path / "report.json"
        if self.state != "done" or not file.is_file():
            return {}
        try:
            return dict(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, RecursionError) as error:
            raise RunError(f"{file} is damaged ({error}); put it back") from error


def folder_name(target: str) -> str:
    """The folder of a target, such as "50%", "0.6G" or "50%-params": no spaces, and no point at either end."""
    name = re.sub(r"\s*(macs|params)\s*$", r"-\1", target.strip(), flags=re.IGNORECASE)
    name = re.sub(r"\s+", "", name).rstrip(".")
    return f"0{name}" if name.startswith(".") else name


def rung_configs(config: Config) -> list[Config]:
    """The configuration of each target: an equal share of the epochs, and the last ones get what is left over."""
    epochs, count = config.epochs, len(config.targets)
    lengths = config.rung_epochs or [epochs * (i + 1) // count - epochs * i // count for i in range(count)]
    return [
        replace(config, target=target, epochs=length, rung_epochs=None)
        for target, length in zip(config.targets, lengths, strict=True)
    ]


def read_rungs(out: Path) -> list[Rung]:
    """The sizes of the run in a folder, the largest first; none where it has one target only.

    Raises:
        RunError: ladder.json is damaged.
    """
    file = out / LADDER
    if not file.is_file():
        return []
    try:
        saved = json.loads(file.read_text(encoding="utf-8"))
        rungs = [Rung(one["target"], out / one["folder"], one["epochs"], one["state"]) for one in saved["rungs"]]
        if saved["format"] != FORMAT or not rungs or any(rung.state not in STATES for rung in rungs):
            raise ValueError("it has another format")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise RunError(f"{file} is damaged ({type(error).__name__}: {error}); put it back") from error
    return rungs


def write_rungs(out: Path, rungs: Sequence[Rung]) -> None:
    """Write ladder.json."""
    listed = [
        {"target": rung.target, "folder": str(rung.path.relative_to(out)), "epochs": rung.epochs, "state": rung.state}
        for rung in rungs
    ]
    write_text(out / LADDER, json.dumps({"format": FORMAT, "rungs": listed}, indent=1) + "\n")


def _siblings(out: Path) -> list[Rung]:
    """All sizes of the run that a folder is one of; none if it is not."""
    home, name = out.resolve().parent, out.resolve().name
    rungs = read_rungs(home)
    return rungs if any(rung.path == home / name for rung in rungs) else []


def first_folder(out: Path) -> Path:
    """The folder that knows the dense model of a run: of several sizes, that of the largest."""
    return next((rung.path for rung in _siblings(out)), out)


def check_not_rung(out: Path) -> None:
    """Refuse a folder that is one size of a run with several: only the whole can go on.

    Raises:
        RunError: with the folder of the whole.
    """
    if _siblings(out):
        raise RunError(
            f"{out} is one of the sizes of the run in {out.parent}: go on with `hiap prune --resume --out "
            f"{out.parent}`, or add a size with `hiap prune --from {out.parent} --target ...`"
        )


def rung_table(rungs: Sequence[Rung]) -> list[str]:
    """A line for each size: target, score, MACs, parameters and folder; before them the dense model."""
    from hiap.budget.cost import in_words  # which needs torch

    of_rungs = [(rung, rung.record) for rung in rungs]
    known = next((record for _, record in of_rungs if record), None)
    if known is None:
        return [f"{rung.target:<14} {rung.state}" for rung in rungs]
    score = "top-1" if "top1" in known else "feature error"
    rows = [("target", score, "MACs", "", "parameters", "")]
    dense = {
        "top1": known.get("dense_top1"),
        "error": 0.0,
        "macs": known["dense_macs"],
        "params": known["dense_params"],
    }
    for name, record, where in (
        ("dense", dense, ""),
        *((rung.target, record, str(rung.path) if record else rung.state) for rung, record in of_rungs),
    ):
        if not record:
            rows.append((name, "-", "-", "", "-", where))
            continue
        value = record["top1" if score == "top-1" else "error"]
        share = f"{record['macs'] / known['dense_macs']:.1%}"
        rows.append((name, f"{value:.2f} %", in_words(record["macs"]), share, in_words(record["params"]), where))
    return [f"{a:<14} {b:>13} {c:>11} {d:>7} {e:>11}  {f}".rstrip() for a, b, c, d, e, f in rows]


def finished_run(out: Path) -> list[Rung]:
    """The run of one target in a folder, as the first of several sizes.

    Raises:
        RunError: there is none, or it has not finished.
    """
    if not (out / CONFIG).is_file():
        raise RunError(f"{out} holds no run: name the folder of a run that `hiap prune` has finished")
    if not (out / "compact").is_dir() or not (out / "report.json").is_file():
        raise RunError(f"the run in {out} has not finished: go on with `hiap prune --resume --out {out}`")
    config = read_config(out / CONFIG)
    if config.target is None:
        raise RunError(f"the run in {out} has no target; only a run with a target can be pruned further")
    return [Rung(config.target, out, config.epochs, "done")]


def further_config(out: Path, given: dict[str, Any]) -> Config:
    """The configuration with which a finished run goes further: that of its last target, with other options.

    Raises:
        RunError: there is no finished run in the folder.
        ConfigError: the options are wrong.
    """
    last = (read_rungs(out) or finished_run(out))[-1]
    return read_config(last.path / CONFIG, {"stop_after": None, **given})
