"""HiAP's several sizes from one run: every size leaves a record, like a run of its own."""

import argparse
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import hiap
from bookkeeping import setting, write
from hiap.data.sources import Data
from hiap.training.config import Config
from hiap.training.descent import Descent
from hiap.training.ladder import Ladder
from hiap.training.loop import Result, Run
from hiap.training.rungs import rung_configs
from methods import gated_run
from outcome import outcome
from record import KEY, read


def places(options: argparse.Namespace, method: str, config: Config, final: bool) -> dict[str, tuple[Any, ...]]:
    """The key of the record of each target.

    The sizes before it are among the options that differ, as in `after=70%:5,50%:5` (targets and epochs). Its epochs
    are those of all the training up to it.
    """
    found, before, epochs = {}, [], 0
    for one in rung_configs(config):
        epochs += one.epochs
        own = copy.copy(options)
        own.target = one.target
        start, weights, given, target = setting(own)
        given = " ".join([*([given] if given else []), *([f"after={','.join(before)}"] if before else [])])
        found[str(one.target)] = (start, weights, given, target, epochs, None, method, config.lr, config.seed, final)
        before.append(f"{one.target}:{one.epochs}")
    return found


def take_ladder(
    options: argparse.Namespace,
    method: str,
    config: Config,
    final: bool,
    data: Callable[[], Data],
    device: torch.device,
) -> None:
    """Run all sizes, and record each as soon as it is done; unless all of them are there."""
    known = {record.key for record in read(options.records)}
    keys = places(options, method, config, final)
    if known.issuperset(keys.values()):
        print(f"{method} {options.target} lr {config.lr:g} seed {config.seed}: recorded already", flush=True)
        return
    images, runs = data(), []

    def run(config: Config, folder: Path, resume: bool, descent: Descent | None) -> Run:
        runs[:] = [gated_run(method, config, folder, images, faster=options.compile, resume=resume, descent=descent)]
        return runs[0]

    def each(result: Result) -> None:
        target = result.rungs[sum(rung.state == "done" for rung in result.rungs) - 1].target
        if keys[target] in known:
            return
        found = outcome(runs[0], result.model, result.record, result.folder.parent)
        write(options, dict(zip(KEY, keys[target], strict=True)) | found, device)
        share = hiap.macs(result.model) / found["dense_macs"]
        print(f"{method} {target} lr {config.lr:g} seed {config.seed}: {found['top1']:.2f} %, {share:.1%}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        Ladder(config, Path(folder, "run"), resume=False, further=False).descend(run, each)
