"""What is recorded of a comparison: records are found by their setting, and written once."""

import argparse
import functools
import hashlib
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch

from hiap.nn.compact import Widths
from hiap.speed.clock import device_name
from prune_tiny_imagenet import assignments
from record import Record, append, read
from report import timed


def setting(options: argparse.Namespace) -> tuple[str, str, str, str]:
    """What all runs of a comparison share: start, weights, options and target."""
    given = sorted(options.set) + ([f"limit={options.limit}"] if options.limit != 50 else [])
    own = [str(part) for part in (options.model, options.img_size, fingerprint(options.data)) if part]
    start = " ".join(own) if options.model else options.start
    weights = fingerprint(Path(options.weights)) if options.weights else "pretrained"
    target = f"{options.target} by {fingerprint(options.cost)}" if options.cost else options.target
    return start, weights, " ".join(given), target


@functools.cache
def fingerprint(path: Path) -> str:
    """The name of a file or folder, and digits that tell what is in it (of a folder: names and sizes) from others."""
    if path.is_dir():
        found = sorted((str(one.relative_to(path)), one.stat().st_size) for one in path.rglob("*") if one.is_file())
        content = json.dumps(found).encode()
    else:
        content = path.read_bytes()
    return f"{path.name} {hashlib.sha256(content).hexdigest()[:8]}"


def records_of(options: argparse.Namespace, method: str, final: bool) -> list[Record]:
    """The records of a method in this setting at equal epochs."""
    place = (*setting(options), options.epochs if final else options.trial_epochs or options.epochs, None, method)
    return [record for record in read(options.records) if record.key[:7] == place and record.final == final]


def finished_records(options: argparse.Namespace, method: str) -> list[Record]:
    """The last finished run of each seed."""
    seeds = {int(seed) for seed in options.seeds.split(",")}
    finished = {record.seed: record for record in records_of(options, method, True) if record.seed in seeds}
    if not finished:
        raise SystemExit(f"{method} has no finished runs in {options.records} whose network could be timed")
    return list(finished.values())


def write(options: argparse.Namespace, record: dict[str, Any], device: torch.device) -> None:
    where = {"device": device_name(device), "torch": torch.__version__, "commit": options.commit or commit()}
    append(options.records, Record.from_dict(record | where))


def commit() -> str | None:
    """What the checkout stands at, if it is one."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=7"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def best_rate(options: argparse.Namespace, method: str, rates: list[float]) -> float:
    if len(rates) == 1:
        return rates[0]
    scores = {record.lr: record.top1 for record in records_of(options, method, False) if record.lr in rates}
    return max(scores, key=lambda lr: scores[lr])


def like(options: argparse.Namespace) -> str | None:
    """Whose training time is given to all, and how many epochs that method has."""
    return f"{options.like} {options.epochs}" if options.like else None


def epochs_of(options: argparse.Namespace, method: str) -> int:
    """As many epochs as fit into the training time of the method `--like` names; the same for all seeds."""
    records, place = read(options.records), (*setting(options), like(options), method)
    for record in records:
        if (*record.key[:4], record.like, record.method) == place:
            return record.epochs
    took = []
    for name in (method, options.like):
        seconds = [timed(record, records, strict=True).seconds for record in records_of(options, name, True)]
        if None in seconds or not seconds:
            raise SystemExit(f"--like {options.like} needs finished runs of {name} at equal epochs, and their `clock`")
        took.append(statistics.mean(seconds))
    return max(1, round(options.epochs * took[1] / took[0]))


def epoch_seconds(lines: list[dict[str, Any]], longer: float) -> dict[str, float]:
    """Of each stage its fastest epoch, `longer` times as long as it was."""
    stages = dict.fromkeys(line["stage"] for line in lines)
    return {stage: longer * min(line["seconds"] for line in lines if line["stage"] == stage) for stage in stages}


def label_free(options: argparse.Namespace) -> bool:
    """Whether the runs learn features, and are scored by nearest neighbours."""
    return bool(assignments(options.set).get("objective") == "features")


def hiap_widths(options: argparse.Namespace, seed: int, final: bool | str) -> list[Widths]:
    """What HiAP found in the run that is recorded with the same seed, at its best learning rate."""
    tried = sorted(records_of(options, "hiap", False), key=lambda record: -record.top1)
    best = [record.lr for record in tried]
    for record in sorted(records_of(options, "hiap", final is not False), key=lambda record: record.lr not in best[:1]):
        if record.seed == seed:
            return [Widths(**one) for one in record.widths]
    raise SystemExit(f"hiap_scratch trains HiAP's topology: run the method hiap with seed {seed} first")
