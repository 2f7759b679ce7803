"""The end of a run: the compact network is scored, saved and, where there is a table, timed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from hiap.atomic import write_text
from hiap.budget.latency import LatencyCost
from hiap.errors import CheckpointError, RunError
from hiap.pruning.count import macs
from hiap.pruning.saving import save
from hiap.speed.measure import predicted
from hiap.training.config import Config
from hiap.training.context import Context
from hiap.training.costs import measured_there
from hiap.training.mistakes import compare_answers
from hiap.training.phases import Recover
from hiap.training.run_folder import MISTAKES
from hiap.training.rungs import Rung

__all__ = ["Result", "finish"]


@dataclass(frozen=True)
class Result:
    """What a run gives back.

    Attributes:
        model: the compact model, in eval mode.
        dense: the dense model it began with.
        folder: where the compact model is saved.
        record: what report.json says.
        main: whether this is the main process.
        config: of the run; with several targets, of the smallest one.
        rungs: with several targets, what there is of each, the largest model first.
    """

    model: nn.Module
    dense: nn.Module
    folder: Path
    record: dict[str, Any]
    main: bool
    config: Config
    rungs: tuple[Rung, ...] = ()


def finish(context: Context, phase: Recover, out: Path, rescue: str) -> Result:
    """Save what the last phase has trained, and report it.

    Args:
        rescue: where the trained network is, and how to go on, if it cannot be saved.

    Raises:
        RunError: it cannot be saved.
    """
    model, record = phase.result(), context.record
    scores = context.scores(model, phase.teacher)
    record.update({name: value for name, value in scores.items() if name != "images"})
    record.update(macs=macs(model), params=sum(p.numel() for p in model.parameters()))
    if context.folder is not None:
        try:
            save(model, out / "compact", context.data.class_names if context.config.labelled else None)
        except (CheckpointError, OSError) as error:
            raise RunError(
                f"the compact model cannot be saved: {error}. The trained network is whole in {rescue}"
            ) from error
    dense = context.dense().eval()
    if context.config.labelled:
        record["answers"], pictures = compare_answers(context, dense, model)
        if context.folder is not None:
            write_text(out / MISTAKES, json.dumps(pictures) + "\n")
    cost = context.parts.cost
    if isinstance(cost, LatencyCost):
        networks = (context.parts.model, model) if context.main else None
        said = predicted(cost, model)
        record.update(
            said | {"predicted": context.corrected(said["predicted"]), "dense_predicted": context.parts.dense_cost}
        )
        record.update(measured_there(cost, networks, context.device))
    if context.folder is not None:
        context.folder.report(record)
    context.accelerator.wait_for_everyone()
    if context.config.trackers:
        context.accelerator.end_training()
    return Result(model, dense, out / "compact", record, context.main, context.config)
