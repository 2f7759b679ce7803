"""What is recorded of a run that has ended."""

import json
from pathlib import Path
from typing import Any

from torch import nn

import hiap
from bookkeeping import epoch_seconds
from hiap.models.registry import sites
from hiap.training.loop import Run
from methods import Peer, accuracy
from narrower import counted_macs

KEPT = (
    *("top1", "top1_before", "dense_top1", "error", "dense_macs", "expected_macs", "undecided", "soft_top1"),
    "hard_top1",
    "table_error",
)


def outcome(
    run: Run | Peer,
    network: nn.Module,
    record: dict[str, Any],
    out: Path,
    longer: float = 1.0,
    scored: bool = True,
    widths: bool = True,
) -> dict[str, Any]:
    """Accuracy, cost and time of a run, and the widths of its network.

    Args:
        network: the result.
        record: of the run.
        out: its folder.
        longer: times that an epoch is longer than it was in the run.
        scored: the result is worth a score.
        widths: widths of blocks tell what the network is; some methods change other shapes.
    """
    context, phase = run.context, run.run.phase if isinstance(run, Peer) else run.phase
    if scored and not context.config.labelled:
        scores = {"top1": network, "dense_top1": context.dense()}
        record |= {name: accuracy(context, model) for name, model in scores.items()}
        record["error"] = context.scores(network.eval(), phase.teacher)["error"]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = {key: record[key] for key in KEPT if key in record} | {"epoch_s": epoch_seconds(lines, longer)}
    if isinstance(run, Peer):
        found |= {"macs": counted_macs(phase.network, run), "search": 0.0}
    else:
        found |= {"macs": hiap.macs(network), "search": context.schedule.freeze / context.schedule.total}
    return found | {"widths": [vars(site.widths) for site in sites(network)] if widths else None}
