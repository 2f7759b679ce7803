"""The single phase: dense weights, data and a budget in, a verified compact network out (paper, section 3.4).

One visible loop. A run goes through up to three stages: `dense` (only where there are no weights to start from),
`search` (weights and gates together, the budget falling) and `recover` (the topology is final and the small network
trains on). A step is a function of the state before it, the seed and its number, so a run can be killed anywhere and
go on.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, PartialState
from timm.data import Mixup
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from hiap.budget.controller import Controller
from hiap.budget.cost import Cost, MacCost
from hiap.budget.latency import LatencyCost
from hiap.data.sources import Data, mix_seed
from hiap.errors import CheckpointError, HiapError
from hiap.models.registry import family_of, sites
from hiap.nn.compact import Widths
from hiap.pruning.align import align_heads
from hiap.pruning.attach import attach, gates, is_gated, parameter_groups, set_gates
from hiap.pruning.count import expected_counts, macs, macs_of_widths
from hiap.pruning.extract import extract, slices
from hiap.pruning.saving import check_target, digest_tensors, save
from hiap.pruning.topology import Topology, harden, set_topology
from hiap.speed.clock import device_name, precision
from hiap.speed.measure import network_cost
from hiap.training.config import Config
from hiap.training.evaluate import Interrupted, evaluate
from hiap.training.objective import (
    Teacher,
    cost_terms,
    distillation,
    feasibility_terms,
    feature_distance,
    task_loss,
    watch_blocks,
    watched_blocks,
)
from hiap.training.optimizer_state import (
    carry_optimizer,
    group_counters,
    pack_optimizer,
    set_group_counters,
    unpack_optimizer,
)
from hiap.training.progress import Progress, Stopwatch, epoch_line
from hiap.training.run_folder import RunError, RunFolder, checkpoints, load_checkpoint, load_dense, logged
from hiap.training.setup import Setup, make_teacher
from hiap.training.signals import Signals

__all__ = ["Result", "Run", "prune"]

PROJECTIONS = 100  # times the budget moves in a run
ALIGNING = 512  # images, at least, that the axes of heads are found on
FACTS = ("top1", "hard_macs", "cost", "open_heads", "open_blocks")  # that the live line shows
INPUTS = ("teacher_weights", "cost")  # files that must not change between two parts of a run
NEW = 10.0  # times faster a new classifier learns than the trained rest of a dense model
WARMUP = 0.05  # share of the epochs, by default


@dataclass(frozen=True)
class Result:
    """What a run gives back: the compact model, the dense one it began with, where it is saved, and the record."""

    model: nn.Module
    dense: nn.Module
    folder: Path
    record: dict[str, Any]
    main: bool


def prune(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    data: Data | tuple[Any, Any] | None = None,
    cost: Callable[[nn.Module], Cost] | None = None,
    model: nn.Module | None = None,
) -> Result:
    """Run the whole phase and save the compact model in `out/compact`.

    Args:
        data: batches of one's own, instead of what `config.data` names: a pair of loaders of torch (training,
            validation), or an object like `hiap.Data`.
        cost: makes a cost of one's own from the gated model; `config.target` is then a share of its dense value.
        model: a trained timm nn.Module of one's own, instead of what `config.model` and `config.weights` name. It is not
            changed.

    Raises:
        ConfigError, BudgetError, UnsupportedModelError: before any work.
        RunError: the folder is in use, holds another run or none to resume; the loss is not finite; memory or disk are
            full. The last checkpoint is whole.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, once a checkpoint is saved.
    """
    return Run(config, out, resume, data, cost, model).go()


def projection_interval(search: int) -> int:
    """Steps from one move of the budget to the next, in a search of so many."""
    return max(1, search // PROJECTIONS)


class Run:
    """One run: its parts, its state and the loop."""

    def __init__(
        self,
        config: Config,
        out: str | Path,
        resume: bool = False,
        data: Data | tuple[Any, Any] | None = None,
        cost: Callable[[nn.Module], Cost] | None = None,
        model: nn.Module | None = None,
    ) -> None:
        config.check()
        self.config, self.out = config, Path(out)
        handlers = [DistributedDataParallelKwargs(broadcast_buffers=False)]
        if PartialState._shared_state and PartialState().num_processes == 1:
            AcceleratorState._reset_state()  # the run before in this process may have had another precision
        self.accelerator = Accelerator(
            cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()),
            mixed_precision="no" if config.precision == "fp32" else config.precision,
            kwargs_handlers=handlers,
            log_with=config.trackers or None,
            project_dir=str(out) if config.trackers else None,
        )
        self.device, self.main = self.accelerator.device, self.accelerator.is_main_process
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed(mix_seed(config.seed))  # what is not loaded is drawn: a new classifier, or all of it
        if self.main:
            check_target(self.out / "compact")
            RunFolder.check(self.out, resume)
        with self.accelerator.local_main_process_first() if config.download else nullcontext():
            self.parts = parts = Setup(config, self.device, data, cost, model, self.world)
        self.given = [name for name, own in (("data", data), ("cost", cost), ("model", model)) if own is not None]
        self.config = parts.config  # with what was left open decided
        self.data, self.norm, self.dense_macs = parts.data, parts.norm, parts.dense_macs
        self.per_epoch, self.schedule, self.kinds = parts.per_epoch, parts.schedule, parts.kinds
        self.dense = parts.model.to(self.device)
        self.projected_every = projection_interval(self.schedule.freeze)
        self.stop = (config.stop_after or config.epochs) * self.per_epoch
        self.folder = RunFolder(out, config.to_yaml(), resume) if self.main else None
        self.accelerator.wait_for_everyone()
        self.record: dict[str, Any] = {
            "dense_macs": self.dense_macs,
            "dense_params": sum(p.numel() for p in self.dense.parameters()),
            "lr": parts.lr,
            "dense_digest": digest_tensors(self.dense.state_dict()),
        }
        for name in INPUTS:
            if file := getattr(config, name):
                self.record[f"{name}_digest"] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
        self.stage, self.step, self.seconds = "dense" if parts.dense_epochs else "search", 0, 0.0
        self.topology: Topology | None = None
        self.facts: dict[str, Any] = {}
        self.controller: Controller | None = None
        self.teacher: Teacher | None = None
        self.pending: dict[str, Any] | None = None  # what is known of an epoch that is not evaluated yet
        self.best: dict[str, Tensor] = {}  # weights of the best epoch, where it is kept
        self.signals = Signals(loud=self.main)
        self.progress = Progress(self.main, parts.dense_epochs * self.per_epoch + self.stop)

    # -- stages ---------------------------------------------------------------------------------------------------

    def begin(self, fresh: bool = True) -> None:
        """Build what the present stage trains: model, optimiser, schedule of the rate, average, teacher.

        Args:
            fresh: the weights are to be trained as they are, not replaced by those of a checkpoint.
        """
        config = self.config
        if self.stage == "dense":
            self.raw = self.dense
        elif self.stage == "search":
            self.start = copy.deepcopy(self.dense).cpu().eval()
            self.teacher = make_teacher(config, self.dense, self.norm, self.parts.other_teacher)
            if fresh and (config.align_heads if config.align_heads is not None else config.target):
                self._align()
            self.raw = attach(self.dense, self.kinds, config.keep_blocks, logit=config.start_logit, seed=config.seed)
            self.cost = self.parts.make_cost(self.raw)
            if config.target:
                self.controller = self.parts.control(self.raw)
                self.controller.project(self.controller.dense_cost, self.schedule.sharpness(0))
        self._prepare()

    def _align(self) -> None:
        """Turn the dims of heads to axes that can be cut, those of the kinds that have gates."""
        queries, values = "qk_dim" in self.kinds, "value_dim" in self.kinds
        batches = self.data.train(self.parts.dense_epochs, 0, self.config.batch_size, self.rank, self.world)
        images = (x.to(self.device) for x, _ in islice(batches, -(-ALIGNING // self.config.batch_size)))
        if queries or values:
            align_heads(self.dense, images, queries=queries, values=values, reduce=self._mean)

    def _prepare(self) -> None:
        config = self.config
        learned = self.stage == "search" and not (config.target and config.gate_mode == "importance")
        *groups, logits = parameter_groups(self.raw, config.weight_decay, config.gate_lr)
        groups = [group for group in (*groups, logits) if group["params"] and (learned or group is not logits)]
        dense = self.stage == "dense"
        peak = self.parts.dense_lr if dense else self.parts.lr
        if dense and self.parts.new_classifier:
            groups = _faster_classifier(self.raw, groups, peak * NEW)
        self.optimizer = create_optimizer_v2(groups, opt=config.opt, lr=peak, weight_decay=config.weight_decay)
        epochs = self.parts.dense_epochs if dense else config.epochs
        warmup = WARMUP * epochs if config.warmup_epochs is None else min(config.warmup_epochs, epochs)
        self.rate = CosineLRScheduler(
            self.optimizer,
            t_initial=epochs * self.per_epoch,
            lr_min=config.min_lr,
            warmup_t=round(warmup * self.per_epoch),
            warmup_lr_init=config.min_lr,
            t_in_epochs=False,
        )
        self.average = ModelEmaV3(self.raw, decay=config.ema) if config.ema and not dense else None
        self.accelerator.free_memory()
        self.model, self.stepper = self.accelerator.prepare(self.raw, self.optimizer)

    def freeze(self) -> None:
        """Decide the topology; with `shrink`, go on with the extracted network."""
        raw = self.raw = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        before = self._accuracy(soft=True)
        topology = self.controller.decide() if self.controller else harden(raw)
        self.record |= self._gate_record() | {"freeze_step": self.step, "soft_top1": before}
        for model in [raw, *([self.average.module] if self.average else [])]:
            for gate in gates(model):
                gate.gradient = None
            set_topology(model, topology)
        self.record["hard_top1"] = self._accuracy()
        self.topology, self.controller = topology, None
        self.record["shrunk"] = self.config.shrink and self.step < self.stop
        if self.record["shrunk"]:
            self._shrink(topology)
        else:
            set_gates(raw, temperature=self.schedule.tau_floor, noise_scale=0.0)
            for gate in gates(raw):
                gate.logit.requires_grad_(False)
            self.accelerator.free_memory()
            self.model, self.stepper = self.accelerator.prepare(raw, self.optimizer)
        self.stage = "recover"

    def _shrink(self, topology: Topology) -> None:
        big, old_optimizer = self.raw, self.optimizer
        average = extract(self.average.module, topology, self.config.round_to) if self.average else None
        self.raw = extract(big, topology, self.config.round_to)
        self.stage = "recover"
        self._prepare()
        names = [site.name for site in sites(big)]
        cuts = slices(names, topology, topology.widths(self.config.round_to))
        carry_optimizer(old_optimizer, big, self.optimizer, self.raw, cuts)
        if self.average is not None and average is not None:
            self.average.module.load_state_dict(average.state_dict())

    # -- the loop -------------------------------------------------------------------------------------------------

    def go(self) -> Result:
        """Train from wherever the run is to its end, and save the result."""
        try:
            with self.signals, self._explained():
                self.resume_or_begin()
                if self.config.trackers:
                    self._start_trackers()
                if self.stage == "dense":
                    self._stage_loop(self.parts.dense_epochs * self.per_epoch)
                    self._end_dense()
                self._stage_loop(self.stop)
                return self._finish()
        finally:
            self.progress.close()
            if self.folder is not None:
                self.folder.close()

    def _start_trackers(self) -> None:
        plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(self.config).items()}
        self.accelerator.init_trackers("hiap", config=plain, init_kwargs={"wandb": {"dir": str(self.out)}})

    def _stage_loop(self, end: int) -> None:
        epoch, position = divmod(self.step, self.per_epoch)
        watch, self.end, self.signals.patient = Stopwatch(), end, True
        if self.pending is not None:
            try:
                self._log()
            except Interrupted:
                self._leave()
        while self.step < end:
            spent, done = 0.0, self.per_epoch - position
            offset = 0 if self.stage == "dense" else self.parts.dense_epochs
            batches = self.data.train(epoch + offset, position, self.config.batch_size, self.rank, self.world)
            for x, y in batches:
                terms, stage = self.train_step(x, y), self.stage
                self.step += 1
                due = self.step % (self.config.checkpoint_every or self.per_epoch) == 0 or self.step == end
                if self.device.type == "cpu" or self.step % 10 == 0 or due or self.signals.number:
                    self._check_finite(terms)
                    now = {"stage": stage, "epoch": epoch + 1, "epochs": end // self.per_epoch, **self.facts}
                    now["loss"] = float(self._weighted(terms))
                    self.progress.show(now, self._global_step(), self.config.target)
                freezing = self.stage == "search" and self.step == min(self.schedule.freeze, end)
                ends, stopping = self.step % self.per_epoch == 0, self._stopping()
                if freezing or ends or due or stopping:
                    took = watch.lap()
                    self.seconds, spent = self.seconds + took, spent + took
                    if freezing:
                        self.freeze()
                    if ends:
                        self.pending = self._epoch(stage, terms, spent, done)
                    if due or stopping:  # before the evaluation, which may be long
                        self.save_checkpoint()
                    if ends and not stopping:
                        stopping = self._evaluated(due)
                    watch.lap()  # what is not training does not count
                if stopping:
                    self._leave()
                if self.step >= end:
                    break
            epoch, position = epoch + 1, 0
        self.signals.patient = False
        if self.world == 1 and self.signals.number is not None:  # it came after the last step
            self._leave()

    def _evaluated(self, saved: bool) -> bool:
        """Evaluate the epoch that ends; whether a signal came meanwhile."""
        try:
            self._log()
        except Interrupted:
            if not saved:
                self.save_checkpoint()
            return True
        return False

    def _stopping(self) -> bool:
        """Whether a signal came. Processes must agree on the step, so several ask each other at every tenth."""
        if self.world == 1:
            return self.signals.number is not None
        if self.step % 10:
            return False
        own = torch.tensor([self.signals.number or 0], device=self.device)
        self.signals.number = int(self.accelerator.gather(own).max()) or None
        return self.signals.number is not None

    def _leave(self) -> None:
        """End the run after a signal; it is saved."""
        if self.main:
            self.progress.say(f"saved at step {self._global_step()}; go on with {self._command()}")
        self.signals.leave()

    def _command(self) -> str:
        """How the run is taken up again."""
        own = "".join(f", {name}=..." for name in self.given)
        return f"hiap.prune(..., resume=True{own})" if own else f"`hiap prune --resume --out {self.out}`"

    def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """One optimiser step. Returns the named terms of the loss."""
        config, number = self.config, self.step + (0 if self.stage == "dense" else 2**32)
        torch.manual_seed(mix_seed(config.seed, number, self.rank))
        self.rate.step_update(self.step)
        if self.stage == "search":
            set_gates(
                self.raw,
                temperature=self.schedule.temperature(self.step),
                noise_scale=self.schedule.noise(self.step),
                draws=self.step * config.accumulate,
            )
        x, target = self._mix(x.to(self.device), y.to(self.device), number)
        self.model.train()
        total: dict[str, Tensor] = {}
        parts = zip(x.tensor_split(config.accumulate), target.tensor_split(config.accumulate), strict=True)
        for i, (xs, ys) in enumerate(parts):
            last, share = i == config.accumulate - 1, len(xs) / len(x)
            with nullcontext() if last else self.accelerator.no_sync(self.model):
                terms = self._terms(self.model, xs, ys)
                self.accelerator.backward(self._weighted(terms) * share)
            for name, value in terms.items():
                total[name] = total.get(name, torch.zeros((), device=self.device)) + value.detach() * share
        if config.clip_grad:
            learned = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.accelerator.clip_grad_norm_(learned, config.clip_grad)
        scale = self.accelerator.scaler.get_scale() if self.accelerator.scaler is not None else 1.0
        self.stepper.step()
        self.model.zero_grad()  # of the whole model: logits that a target sets are in no group
        if self.average is not None:
            self.average.update(self.raw, step=self.step)
        if self.controller is not None:
            self._control(self.controller, scale)
        return total

    def _control(self, controller: Controller, scale: float) -> None:
        if self.accelerator.optimizer_step_was_skipped:  # float16 overflowed: these gradients are not finite
            controller.gradient.zero_()
        else:
            controller.observe(self._mean, scale)
        after = self.step + 1
        if after % self.projected_every == 0 or after == self.schedule.freeze:
            allowed = self.schedule.budget(after, controller.dense_cost, controller.target)
            controller.project(allowed, self.schedule.sharpness(after))
            self.facts |= self._facts(controller.widths)

    def _facts(self, widths: Sequence[Widths]) -> dict[str, Any]:
        """What a network of these widths has and costs."""
        facts = {
            "hard_macs": macs_of_widths(self.raw, widths) / self.dense_macs,
            "open_heads": sum(one.heads or 0 for one in widths),
            "open_blocks": sum(one.neurons is not None for one in widths),
        }
        if self.config.cost and self.stage != "dense":
            facts["cost"] = self.cost.of_widths(self.raw, widths)
        return facts

    def _widths(self) -> list[Widths]:
        """The padded widths of the present network, gates hardened."""
        if not is_gated(self.raw):
            return [site.widths for site in sites(self.raw)]
        return harden(self.raw).widths(self.config.round_to)

    def _mean(self, tensor: Tensor) -> Tensor:
        mean: Tensor = self.accelerator.reduce(tensor, "mean")
        return mean

    def _mix(self, x: Tensor, y: Tensor, number: int) -> tuple[Tensor, Tensor]:
        config = self.config
        if not (config.mixup or config.cutmix):
            return x, y
        np.random.seed(mix_seed(config.seed, number) % 2**32)
        mixup = Mixup(config.mixup, config.cutmix, label_smoothing=config.smoothing, num_classes=self.data.classes)
        mixed: tuple[Tensor, Tensor] = mixup(x, y)
        return mixed

    def _terms(self, model: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        """The loss of a batch, term by term."""
        config, teacher = self.config, self.teacher if self.stage != "dense" else None
        blocks = watched_blocks(len(self.parts.sites)) if teacher and config.features_weight else ()
        with self.accelerator.autocast(), watch_blocks(self._blocks(self.accelerator.unwrap_model(model), blocks)) as features:
            logits = model(x).float()
        terms = {"task": task_loss(logits, target, config.smoothing)}
        if teacher is not None:
            with self.accelerator.autocast(), watch_blocks([teacher.blocks[i] for i in blocks]) as goals:
                told = teacher(x)
            terms["distill"] = distillation(logits, told, config.distill_temperature)
            if blocks:
                terms["features"] = feature_distance(features, goals)
        if self.stage == "search" and config.target is None:
            terms |= cost_terms(self.raw, self.cost)
            terms |= feasibility_terms(self.raw, config.min_heads, config.min_value_dims, config.min_neurons)
        return terms

    def _weighted(self, terms: dict[str, Tensor]) -> Tensor:
        config = self.config
        share = config.distill_weight if "distill" in terms else 0.0
        weights = {
            "task": 1.0 - share,
            "distill": share,
            "features": config.features_weight,
            "macro": config.lambda_macro or 0.0,
            "micro": config.lambda_micro or 0.0,
            "feasible_head": config.beta_head,
            "feasible_dim": config.beta_dim,
            "feasible_ffn": config.beta_ffn,
        }
        return torch.stack([weights[name] * value for name, value in terms.items()]).sum()

    def _check_finite(self, terms: dict[str, Tensor]) -> dict[str, float]:
        values = {name: float(value) for name, value in terms.items()}
        if not all(np.isfinite(value) for value in values.values()):
            saved = checkpoints(self.out)
            text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            raise RunError(
                f"the loss is not finite at step {self.step} of the {self.stage} stage ({text}); "
                f"the last good checkpoint is {saved[-1] if saved else 'none'}"
            )
        return values

    # -- records --------------------------------------------------------------------------------------------------

    def _accuracy(self, soft: bool = False, stop: Callable[[], bool] = lambda: False) -> float:
        """Top-1 of the present network, gates hard or (soft) as they are in training."""
        model = self.average.module if self.average is not None and not soft else self.raw
        model.eval()
        if soft:
            for gate in gates(model):
                gate.train()
        try:
            scores = evaluate(model, self.data, self.config.batch_size, self.accelerator.autocast, stop)
        finally:
            model.train()
        self.scored = int(scores["images"])
        return scores["top1"]

    def _gate_record(self) -> dict[str, Any]:
        """How decided the gates are, and what they expect to cost against what they cost."""
        p = torch.cat([gate.probability().detach().flatten() for gate in gates(self.raw)])
        expected = MacCost(self.raw).total(expected_counts(self.raw)).item()
        return {
            "undecided": ((p > 0.05) & (p < 0.95)).float().mean().item(),
            "expected_macs": expected / self.dense_macs,
            **self._facts(self._widths()),
        }

    def _epoch(self, stage: str, terms: dict[str, Tensor], seconds: float, done: int) -> dict[str, Any]:
        """What an epoch did, of which `done` steps were since the run began or was taken up.

        It counts for the stage of its last step.
        """
        whole = seconds * self.per_epoch / done
        course = self.record.setdefault("course", {}).setdefault(stage, {"epochs": 0, "seconds": 0.0, "fastest": whole})
        course["epochs"] += 1
        course["seconds"] += seconds
        course["fastest"] = min(course["fastest"], whole)
        return {
            "stage": stage,
            "step": self._global_step(),
            "epoch": self.step // self.per_epoch,
            "seconds": round(seconds, 3),
            "images_per_s": round(done * self.config.batch_size / max(seconds, 1e-9), 1),
            **{name: float(self._mean(value)) for name, value in terms.items()},
            "loss": float(self._mean(self._weighted(terms))),
            "lr": self.optimizer.param_groups[0]["lr"],
        }

    def _log(self) -> None:
        """Evaluate the network of the pending epoch and write what is known of it.

        Raises:
            Interrupted: a signal came; the epoch is still pending.
        """
        assert self.pending is not None
        line = dict(self.pending)
        if "top1" not in line and (line["epoch"] % self.config.eval_every == 0 or self.step >= self.end):
            line["top1"] = self._accuracy(stop=lambda: self.world == 1 and self.signals.number is not None)
        self._keep(line)
        if is_gated(self.raw) and self.topology is None:
            line |= self._gate_record() | {"temperature": self.schedule.temperature(self.step)}
        else:
            line |= self._facts(self._widths())
        self.pending = None
        self.facts |= {name: line[name] for name in FACTS if name in line}
        if self.folder is not None:
            self.folder.log(line)
            if "top1" in line:
                epochs = self.parts.dense_epochs if line["stage"] == "dense" else self.config.epochs
                self.progress.say(epoch_line({**line, "epochs": epochs}, self.config.target))
        if self.config.trackers:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            self.accelerator.log(numbers, step=self._global_step())

    def _keep(self, line: dict[str, Any]) -> None:
        """Remember the weights of the best epoch since the topology is final, if the best is to be the result."""
        if self.config.keep == "last" or self.topology is None or "top1" not in line:
            return
        if line["top1"] > self.record.get("best", {"top1": -1.0})["top1"]:
            self.record["best"] = {"epoch": line["epoch"], "top1": line["top1"]}
            kept = self.average.module if self.average is not None else self.raw
            self.best = {name: tensor.detach().cpu().clone() for name, tensor in kept.state_dict().items()}

    def _global_step(self) -> int:
        return self.step + (0 if self.stage == "dense" else self.parts.dense_epochs * self.per_epoch)

    # -- state ----------------------------------------------------------------------------------------------------

    def _end_dense(self) -> None:
        self.raw = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        self._score_dense()
        if self.folder is not None:
            self.folder.save_dense(self.raw.state_dict())
        self.dense, self.stage, self.step = self.raw, "search", 0
        self._begin_search()

    def _begin_search(self) -> None:
        if "dense_top1" not in self.record:
            self._score_dense()
        self.begin()
        set_gates(self.raw, temperature=self.schedule.temperature(0), noise_scale=self.schedule.noise(0), draws=0)
        self.record["soft_top1_start"] = self._accuracy(soft=True)
        self.save_checkpoint()

    def _score_dense(self) -> None:
        """The accuracy of the dense model, with a warning where it seems to know nothing."""
        self.raw, self.average = self.dense, None
        top1 = self.record["dense_top1"] = self._accuracy()
        images, chance = self.scored, 100 / self.data.classes
        if self.main:
            self.progress.say(f"dense    top-1 {top1:.2f} % on {images} validation images")
        spread = (chance * (100 - chance) / images) ** 0.5
        if top1 <= chance + 3 * spread and (self.parts.trained or self.parts.dense_epochs):
            warnings.warn(
                f"the dense model scores {top1:.2f} %, near chance ({chance:.2f} %): are --mean, --std and --img-size "
                "those it was trained with, and do the classes have the order of its labels?",
                stacklevel=2,
            )

    def save_checkpoint(self) -> None:
        self.accelerator.wait_for_everyone()
        if self.folder is None:
            return
        tensors = {f"model.{name}": tensor for name, tensor in self.raw.state_dict().items()}
        if self.average is not None:
            tensors |= {f"average.{name}": tensor for name, tensor in self.average.module.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        moments, scalars = pack_optimizer(self.optimizer, self.raw)
        tensors |= {f"optimizer.{name}": tensor for name, tensor in moments.items()}
        if self.controller is not None:
            tensors["controller.importance"] = self.controller.importance
        state = {
            "stage": self.stage,
            "step": self.step,
            "processes": self.world,
            "seconds": self.seconds,
            "record": self.record,
            "pending": self.pending,
            "course": self._course(),
            "scalars": scalars,
            "given": self.given,
            "groups": group_counters(self.optimizer),
            "observations": self.controller.observations if self.controller else 0,
            "scaler": self.accelerator.scaler.state_dict() if self.accelerator.scaler else None,
            "topology": self.topology.to_json() if self.topology else None,
            "shrunk": self.raw.hiap.logit_difference if self.topology and not is_gated(self.raw) else None,
        }
        self.folder.save(self._global_step(), tensors, state)

    def resume_or_begin(self) -> None:
        """Take up the last checkpoint, or begin."""
        saved = load_checkpoint(self.out)
        if saved is None:
            if self.folder is not None:
                self.folder.rewind(0)
                for line in self.parts.lines():
                    self.progress.say(line)
                self.parts.warn()
            if self.stage == "search":
                self._begin_search()
                return
            if self.parts.trained and not self.parts.new_classifier:
                self._score_dense()
            self.begin()
            return
        tensors, state = saved
        try:
            self._take_up(tensors, state)
        except HiapError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise RunError(
                f"checkpoint {checkpoints(self.out)[-1]} is damaged ({type(error).__name__}: {error}); remove it to "
                "start again"
            ) from error
        if self.folder is not None:
            self.folder.rewind(self._global_step() + (0 if self.pending else 1))
            self.progress.say(f"resumed at step {self._global_step()}, in the {self.stage} stage")

    def _course(self) -> dict[str, Any]:
        """What the steps of a run depend on besides its configuration: it must be the same when it goes on."""
        parts, names = self.parts, ("dense_epochs", "per_epoch", "lr", "dense_lr")
        data = {"training images": self.data.train_size, "classes": self.data.classes}
        return {**data, "batch_size": self.config.batch_size, **{name: getattr(parts, name) for name in names}}

    def _check_inputs(self, state: dict[str, Any]) -> None:
        """Refuse to go on with other data, another model or other files than the run began with."""
        began = f"since the run in {self.out} began"
        if state["given"] != self.given:
            names = ", ".join(state["given"]) or "none of data, cost and model"
            raise RunError(f"{self.out} holds a run that was given {names} in Python: pass the same, resume=True")
        if changed := [name for name, value in self._course().items() if state["course"][name] != value]:
            found = "; ".join(f"{name} {self._course()[name]} (was {state['course'][name]})" for name in changed)
            raise RunError(f"the data has changed {began}: {found}; put it back, or begin again with another --out")
        for name in INPUTS:
            if state["record"].get(f"{name}_digest") != self.record.get(f"{name}_digest"):
                file = getattr(self.config, name)
                raise RunError(f"{file} has changed {began}; put the old one back")
        if state["record"]["dense_digest"] != self.record["dense_digest"]:
            what = self.config.weights if "model" not in self.given and self.config.weights else "the dense model"
            raise RunError(f"{what} has changed {began}; put the old weights back")

    def _take_up(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        self._check_inputs(state)
        if state["processes"] != self.world:
            warnings.warn(
                f"the run began with {state['processes']} processes and goes on with {self.world}: that is sound, but "
                "its result is not bit-identical to that of a run left alone",
                stacklevel=2,
            )
        self.stage, self.step, self.seconds, self.record = (state[k] for k in ("stage", "step", "seconds", "record"))
        self.pending = state["pending"]
        if self.pending is not None and (line := logged(self.out, self.pending["step"])) is not None:
            self.pending = line  # it was evaluated before the run ended
        if self.stage != "dense" and self.parts.dense_epochs:
            self.dense.load_state_dict(load_dense(self.out))
        stage = self.stage
        if stage == "recover":
            self.stage = "search"
        self.begin(fresh=False)
        self.stage = stage
        if state["topology"] is not None:
            self.topology, self.controller = Topology.from_json(state["topology"]), None
            self.raw = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
            if state["shrunk"] is not None:
                self.raw = extract(self.raw, self.topology, self.config.round_to)
                self.raw.hiap = replace(self.raw.hiap, logit_difference=state["shrunk"])  # as it was at the freeze
            else:
                set_gates(self.raw, temperature=self.schedule.tau_floor, noise_scale=0.0)
                for gate in gates(self.raw):
                    gate.gradient = None
                    gate.logit.requires_grad_(False)
            self._prepare()
        self._restore(tensors, state)

    def _restore(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        def part(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}

        self.raw.load_state_dict(part("model."))
        if self.average is not None:
            self.average.module.load_state_dict(part("average."))
        self.best = part("best.")
        unpack_optimizer(self.optimizer, self.raw, part("optimizer."), state["scalars"])
        set_group_counters(self.optimizer, state["groups"])
        if self.controller is not None:
            self.controller.restore(tensors["controller.importance"], state["observations"])
        if state["scaler"] and self.accelerator.scaler:
            self.accelerator.scaler.load_state_dict(state["scaler"])

    def _finish(self) -> Result:
        raw = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        model = self.average.module if self.average is not None else raw
        if self.best:
            model.load_state_dict(self.best)
        if is_gated(model):
            topology = self.topology or harden(model)
            model = extract(model, topology, self.config.round_to)
        model.eval()
        scores = evaluate(model, self.data, self.config.batch_size, self.accelerator.autocast)
        self.record |= {
            "top1": scores["top1"],
            "top5": scores["top5"],
            "macs": macs(model),
            "params": sum(p.numel() for p in model.parameters()),
            "seconds": self.seconds,
        }
        if self.folder is not None:
            try:
                save(model, self.out / "compact", self.data.class_names)
            except (CheckpointError, OSError) as error:
                raise RunError(
                    f"the compact model cannot be saved: {error}. The trained network is whole in "
                    f"{checkpoints(self.out)[-1]}: mend this, then {self._command()}"
                ) from error
        if isinstance(self.cost, LatencyCost):
            self.record |= self._timed(model, self.cost)
        if self.folder is not None:
            self.folder.report(self.record)
        self.accelerator.wait_for_everyone()
        if self.config.trackers:
            self.accelerator.end_training()
        return Result(model, self.start.to(self.device), self.out / "compact", self.record, self.main)

    def _timed(self, model: nn.Module, cost: LatencyCost) -> dict[str, Any]:
        """What the table predicts, and what the clock says where this is the device of the table."""
        table = cost.table
        found: dict[str, Any] = {
            "unit": table.unit,
            "dense_predicted": cost.outside + cost.dense,
            "predicted": cost.of_widths(model, [site.widths for site in sites(model)]),
        }
        if self.main and table.device == device_name(self.device):
            try:
                with precision(table.precision) as dtype:
                    like = (self.device, dtype, table.batch, table.mode, table.unit)
                    found["dense_measured"], found["measured"] = (network_cost(n, *like) for n in (self.start, model))
            except (RuntimeError, ValueError) as error:
                warnings.warn(f"the result is saved, but its time cannot be measured here: {error}", stacklevel=2)
        return found

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Running out of memory, in words."""
        try:
            yield
        except (MemoryError, RuntimeError) as error:
            first, saved = next(iter(str(error).splitlines()), "MemoryError"), checkpoints(self.out)
            last = f"the last checkpoint is {saved[-1] if saved else 'none'}"
            if "shared memory" in str(error):
                raise RunError(
                    f"loader workers ran out of shared memory: pass --workers 0, or enlarge /dev/shm; {last} ({first})"
                ) from error
            full = isinstance(error, MemoryError | torch.cuda.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not full:
                raise
            raise RunError(
                f"out of memory at step {self.step} of the {self.stage} stage, with batches of {self.config.batch_size}"
                f": begin again with --accumulate {2 * self.config.accumulate}, which computes each batch in parts, or "
                f"with a smaller --batch-size; {last} ({first})"
            ) from error


def _faster_classifier(model: nn.Module, groups: list[dict[str, Any]], lr: float) -> list[dict[str, Any]]:
    """Groups of parameters in which those of the classifier have a learning rate of their own."""
    found = model.get_classifier()
    own = {id(p) for one in (found if isinstance(found, tuple) else (found,)) for p in one.parameters()}
    result = []
    for group in groups:
        for mine, rate in ((False, {}), (True, {"lr": lr})):
            params = [p for p in group["params"] if (id(p) in own) is mine]
            result += [{**group, "params": params, **rate}] if params else []
    return result
