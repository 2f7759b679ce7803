"""A phase of a run: a network, its optimiser, the terms of its loss, and a `state_dict` pair.

What differs between phases (phases.py) is in the methods that do nothing here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, ClassVar

import numpy as np
import torch
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from hiap.data.images import mix_seed
from hiap.pruning.attach import gates, parameter_groups
from hiap.training.context import Context
from hiap.training.objective import Teacher
from hiap.training.optimizer_state import group_counters, pack_optimizer, set_group_counters, unpack_optimizer

__all__ = ["Phase", "Tensors", "Values", "part"]

WARMUP = 0.05  # share of the epochs, by default

Tensors = dict[str, Tensor]
Values = dict[str, Any]  # as JSON


class Phase:
    """A part of a run.

    Args:
        network: what is trained, on the device.
        teacher: what it learns from beside labels.
        step: how many steps of the phase's course are done. Search and recovery are one course.

    Attributes:
        model: the network as the processes share it.
        forward: what a training step calls for its outputs: `model`, or a compiled form of it.
        ema: the running average of its weights, if there is one.
        facts: what is known of the network, for the progress bar and the metrics.
        end: the step the phase ends with.
        mid_epoch: whether the next phase begins at once, within an epoch.
        course_end: the step that the course of the phase ends with.
    """

    name: ClassVar[str]
    mid_epoch: ClassVar[bool] = False
    averaged: ClassVar[bool] = True
    seed_offset: ClassVar[int] = 2**32  # added to the step, so that no two courses draw the same

    def __init__(self, context: Context, network: nn.Module, teacher: Teacher | None, step: int, end: int) -> None:
        config = context.config
        self.context, self.network, self.teacher, self.step, self.end = context, network, teacher, step, end
        self.facts: dict[str, Any] = {}
        self.objective = context.objective(teacher)
        groups = [group for group in self.parameter_groups() if group["params"]]
        self.optimizer = create_optimizer_v2(groups, opt=config.opt, lr=self.lr, weight_decay=config.weight_decay)
        warmup = WARMUP * self.epochs if config.warmup_epochs is None else min(config.warmup_epochs, self.epochs)
        self.lr_scheduler = CosineLRScheduler(
            self.optimizer,
            t_initial=self.epochs * context.per_epoch,
            lr_min=config.min_lr,
            warmup_t=round(warmup * context.per_epoch),
            warmup_lr_init=config.min_lr,
            t_in_epochs=False,
        )
        self.ema = ModelEmaV3(network, decay=config.ema) if config.ema and self.averaged else None
        context.accelerator.free_memory()
        self.model, self.prepared_optimizer = context.accelerator.prepare(network, self.optimizer)
        self.forward: nn.Module = self.model

    # -- what a phase may have of its own ---------------------------------------------------------------------------

    @property
    def lr(self) -> float:
        """The peak learning rate."""
        return self.context.parts.lr

    @property
    def epochs(self) -> int:
        """Epochs of the course the phase belongs to."""
        return self.context.config.epochs

    @property
    def course_end(self) -> int:
        return self.context.stop

    def parameter_groups(self) -> list[dict[str, Any]]:
        """What the optimiser gets: the weights, by default."""
        return parameter_groups(self.network, self.context.config.weight_decay)[:-1]

    def before_step(self) -> None:
        """What changes with the step."""

    def after_step(self, scale: float) -> None:
        """What is done after the optimiser; gradients were `scale` times as large as they should be."""

    def penalties(self) -> dict[str, Tensor]:
        """Terms of the loss that are not about the batch."""
        return {}

    @property
    def penalty_weights(self) -> dict[str, float]:
        """Their weights, where they are not 1."""
        return {}

    def measured(self) -> dict[str, Any]:
        """What the metrics say of the network at the end of an epoch."""
        return {}

    def soft_scores(self, epoch: int, stop: Callable[[], bool]) -> dict[str, float]:
        """What the metrics of an epoch that is evaluated say of the network with gates as they are in training."""
        return {}

    def keep(self, line: dict[str, Any]) -> None:
        """Remember the present weights if the best epoch is to be the result, and this is the best so far."""

    def next(self) -> Phase | None:
        """The phase that follows this one, which is over."""
        return None

    # -- a step -----------------------------------------------------------------------------------------------------

    def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """One optimiser step; the loop counts it. Returns the named terms of the loss."""
        context, config, accelerator = self.context, self.context.config, self.context.accelerator
        number = self.step + self.seed_offset
        torch.manual_seed(mix_seed(config.seed, number, context.rank))
        self.lr_scheduler.step_update(self.step)
        self.before_step()
        x, target = self._mix(x.to(context.device), y.to(context.device), number)
        self.model.train()
        total: dict[str, Tensor] = {}
        parts = zip(x.tensor_split(config.accumulate), target.tensor_split(config.accumulate), strict=True)
        for i, (xs, ys) in enumerate(parts):
            last, share = i == config.accumulate - 1, len(xs) / len(x)
            with nullcontext() if last else accelerator.no_sync(self.model):
                terms = self.terms(self.forward, xs, ys, share)
                accelerator.backward(self.weighted(terms) * share)
            for name, value in terms.items():
                total[name] = total.get(name, torch.zeros((), device=context.device)) + value.detach() * share
        if config.clip_grad:
            learned = [p for group in self.optimizer.param_groups for p in group["params"]]
            accelerator.clip_grad_norm_(learned, config.clip_grad)
        scale = accelerator.scaler.get_scale() if accelerator.scaler is not None else 1.0
        self.prepared_optimizer.step()
        self.model.zero_grad()  # of the whole model: logits that a target sets are in no group
        if self.ema is not None:
            self.ema.update(self.network, step=self.step)
        self.after_step(scale)
        return total

    def _mix(self, x: Tensor, y: Tensor, number: int) -> tuple[Tensor, Tensor]:
        config = self.context.config
        if not (config.mixup or config.cutmix):
            return x, y
        np.random.seed(mix_seed(config.seed, number) % 2**32)
        classes = self.context.data.classes
        mixup = Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=classes)
        mixed: tuple[Tensor, Tensor] = mixup(x, y)
        return mixed

    def terms(self, model: nn.Module, x: Tensor, target: Tensor, share: float = 1.0) -> dict[str, Tensor]:
        """The loss of a batch, term by term; of a part of it, which has this share of the images."""
        return self.objective.terms(model, x, target) | self.penalties()

    def weighted(self, terms: dict[str, Tensor]) -> Tensor:
        """The loss: the sum of its terms, each with its weight."""
        return self.objective.weighted(terms, self.penalty_weights)

    # -- the network ------------------------------------------------------------------------------------------------

    @property
    def averaged_network(self) -> nn.Module:
        """What is evaluated and saved: the average of the weights, where there is one."""
        return self.ema.module if self.ema is not None else self.network

    def scores(self, soft: bool = False, stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """What `Context.scores` gives; gates hard, or (soft, and without averaging) as they are in training."""
        model = self.network if soft else self.averaged_network
        model.eval()
        if soft:
            for gate in gates(model):
                gate.train()
        try:
            return self.context.scores(model, self.teacher, stop)
        finally:
            model.train()

    def unwrapped(self) -> nn.Module:
        """The network, free of what precision and processes have added to it."""
        network: nn.Module = self.context.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        if getattr(vars(network).get("forward"), "__func__", None) is type(network).forward:
            del network.forward  # a bound method that is left behind would keep the network alive
        return network

    # -- state ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> tuple[Tensors, Values]:
        """All that the phase needs to go on: tensors, and values for JSON."""
        tensors = {f"model.{name}": tensor for name, tensor in self.network.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.ema.module.state_dict().items()}
        moments, scalars = pack_optimizer(self.optimizer, self.network)
        tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
        scaler = self.context.accelerator.scaler
        return tensors, {
            "stage": self.name,
            "step": self.step,
            "scalars": scalars,
            "groups": group_counters(self.optimizer),
            "scaler": scaler.state_dict() if scaler else None,
        }

    def load_state_dict(self, tensors: Tensors, values: Values) -> None:
        """Take up what `state_dict` gave."""
        self.step = values["step"]
        self.network.load_state_dict(part(tensors, "model."))
        if self.ema is not None:
            self.ema.module.load_state_dict(part(tensors, "average."))
        unpack_optimizer(self.optimizer, self.network, part(tensors, "optimizer."), values["scalars"])
        set_group_counters(self.optimizer, values["groups"])
        if values["scaler"] and self.context.accelerator.scaler:
            self.context.accelerator.scaler.load_state_dict(values["scaler"])


def part(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors whose names begin so, without the prefix."""
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
