"""Runs that share a device: compiled training steps, and networks that are timed while the other runs stand still."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.nn.compact import Widths
from hiap.training.context import Context
from hiap.training.costs import measure_error
from hiap.training.phase import Phase
from hiap.training.phases import Recover, Search
from turns import alone


def compile_steps(phase: Recover) -> Recover:
    """The phase with compiled training steps: the same up to rounding, and less work for a device that runs share."""
    network, teacher, objective = phase.network, phase.teacher, phase.objective
    own, goals = objective.watched(network)
    torch.compiler.reset()  # for a process that runs several methods
    objective.unwrap = lambda _forward: network
    plain = type(network).forward  # without the autocast around it, which the loss has too
    phase.forward = _compiled(partial(plain, network), own)
    if teacher is not None and teacher.fast is not None:
        teacher.fast.forward = _compiled(teacher.fast.forward, goals)
    return phase


def _compiled(forward: Callable[[Tensor], Tensor], blocks: Sequence[nn.Module]) -> Any:
    """A compiled forward pass. The hooks of these blocks are called when it is over: they change with every step."""
    compiled, sent = torch.compile(forward, dynamic=False), []
    within = OrderedDict({0: lambda _block, _args, output: sent.append(output)})

    def call(x: Tensor) -> Tensor:
        hooks = [block._forward_hooks for block in blocks]
        try:
            for block in blocks:
                block._forward_hooks = within
            output: Tensor = compiled(x)
        finally:
            for block, kept in zip(blocks, hooks, strict=True):
                block._forward_hooks = kept
        found, sent[:] = list(sent), []  # nothing of a step is kept
        for block, kept, features in zip(blocks, hooks, found, strict=True):
            for hook in kept.values():
                hook(block, (x,), features)
        return output

    return call


def clock_error(context: Context, widths: Sequence[Widths]) -> float | None:
    """How wrong a latency table is about a network, which is timed while the other runs of a batch stand still."""
    config, dense = context.config, context.parts.model
    if config.cost is None:
        return None
    return measure_error(LatencyCost(dense, LatencyTable.load(config.cost)), dense, widths, context.device, alone)


class SharedSearch(Search):
    """HiAP's search on a device that runs share.

    Args:
        faster: the training steps of the small network are compiled.
        timed: with a target in time, the network is timed before it is cut out.
    """

    def __init__(self, context: Context, *, faster: bool, timed: bool, **more: Any) -> None:
        self.faster, self.timed = faster, timed
        super().__init__(context, **more)

    def measure_error(self, widths: Sequence[Widths]) -> float | None:
        return clock_error(self.context, widths) if self.timed else None

    def next(self) -> Phase:
        following = super().next()
        assert isinstance(following, Recover)
        return compile_steps(following) if self.faster else following
