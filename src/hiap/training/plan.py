"""A dry run: what would be done, what is reachable, and how long it takes by a few measured steps."""

from __future__ import annotations

import copy
import sys
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from hiap.models.family import logits_of
from hiap.pruning.attach import attach
from hiap.pruning.extract import extract
from hiap.pruning.merging import Merged
from hiap.speed.clock import device_name
from hiap.training.config import Config
from hiap.training.descent import Descent
from hiap.training.objective import Teacher
from hiap.training.phases import SOFT_SCORES
from hiap.training.progress import clock
from hiap.training.rungs import rung_configs
from hiap.training.setup import Setup, make_teacher

__all__ = ["plan"]

FEW, QUICK = 8, 0.02  # images of a step that is measured on a CPU, where a forward of them takes more than so many s
BATCHES, PATIENCE = 9, 10.0  # that are read to see how fast the data comes, and seconds after which fewer do


def plan(config: Config) -> list[str]:
    """What a run would do, in lines; nothing is trained or written.

    Raises:
        ConfigError, BudgetError, UnsupportedModelError, CheckpointError: what the run itself would refuse.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(config.seed)
    config.check()
    first, *rest = rung_configs(config) if config.target else [config]
    later = tuple(one.target for one in rest if one.target)
    lines, seconds, descent = [], 0.0, Descent(Path(), later, total=sum(one.epochs for one in (first, *rest)))
    for one in (first, *rest):
        parts = Setup(one, device, say=lambda text: print(text, file=sys.stderr, flush=True), descent=descent)
        parts.warn()
        more, small = estimate(parts, device)
        seconds += more
        lines += [*([f"size     {one.target}"] if rest else []), *parts.lines()]
        descent = Descent(Path(), (), small.cpu(), Path(str(one.target)), data=parts.data, table=parts.table)
    return [*lines, f"time     about {clock(seconds)} on this machine ({device_name(device)})"]


def estimate(parts: Setup, device: torch.device) -> tuple[float, nn.Module]:
    """Seconds that a run takes, and a network like its result.

    They are of steps of the dense, the gated and the compact network, of data and of evaluations.
    """
    config, schedule = parts.config, parts.schedule
    begun = time.perf_counter()
    batches = []
    for batch in islice(parts.data.train(0, 0, config.batch_size, 0, 1), min(BATCHES, parts.per_epoch)):
        batches.append(batch)
        if time.perf_counter() - begun > PATIENCE:
            break
    reading = (time.perf_counter() - begun) / len(batches)
    dense = parts.model.to(device)
    x, y = (part[: -(-config.batch_size // config.accumulate)].to(device) for part in batches[0])
    if device.type == "cpu" and _timed(lambda: dense.eval()(x[:FEW]), device) > QUICK:
        x, y = x[:FEW], y[:FEW]
    scale = config.batch_size / len(x)
    start = copy.deepcopy(dense if parts.start is None else parts.start).to(device)
    gated = attach(start, parts.kinds, config.keep_blocks)
    controller = parts.control(gated) if config.target else None
    small = extract(gated, controller.decide(), config.round_to) if controller else gated
    small = Merged(small, config.merge_tokens) if config.merge_tokens else small
    teacher = make_teacher(config, dense, parts.mean_std, parts.other_teacher)

    def step(network: nn.Module, teacher: Teacher | None) -> float:
        return max(_step(network, teacher, x, y, config) * scale, reading)

    stop = (config.stop_after or config.epochs) * parts.per_epoch
    search = min(schedule.freeze, stop)
    training = parts.dense_epochs * parts.per_epoch * step(dense, None) if parts.dense_epochs else 0.0
    training += search * step(gated, teacher) + (stop - search) * step(small if config.shrink else gated, teacher)
    evaluations = stop / parts.per_epoch / config.eval_every
    evaluations += 6  # the dense model, the soft start, the freeze, the end, and both models side by side
    evaluations += min(SOFT_SCORES, search / parts.per_epoch / config.eval_every)
    seen = evaluations * parts.data.val_size / config.batch_size
    return training + seen * max(_timed(lambda: small.eval()(x), device) * scale, reading), small


def _step(network: nn.Module, teacher: Teacher | None, x: Tensor, y: Tensor, config: Config) -> float:
    """Seconds of a training step; the learning rate is 0."""
    network.train()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.0)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(config.precision)

    def run() -> None:
        with torch.autocast(x.device.type, dtype, enabled=dtype is not None):
            output = logits_of(network(x)).float()
            loss = nn.functional.cross_entropy(output, y) if config.labelled else output.square().mean()
            if teacher is not None:
                teacher(x)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return _timed(run, x.device)


def _timed(run: Callable[[], object], device: torch.device) -> float:
    """The least of three times, after one that does not count."""
    times = []
    for _ in range(4):
        begun = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times[1:])
