"""The loop of a run: dense weights, data and a budget in, a verified compact network out (paper, section 3.4).

A run goes through up to three phases (phases.py): dense, search and recover. A step is a function of the state before
it, the seed and its number, so a run can be killed anywhere and go on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hiap.budget.cost import Cost
from hiap.data.sources import Data
from hiap.errors import HiapError, RunError
from hiap.pruning.saving import check_target
from hiap.training.config import Config
from hiap.training.context import Context
from hiap.training.descent import Descent
from hiap.training.evaluate import Interrupted
from hiap.training.inputs import FORMAT, TABLE, check_inputs, course, environment, inputs_record, kept_table
from hiap.training.ladder import Ladder
from hiap.training.metrics import METRICS
from hiap.training.out_of_memory import out_of_memory
from hiap.training.phase import Phase
from hiap.training.phases import Dense, Recover, Search
from hiap.training.progress import Progress, Stopwatch, epoch_line
from hiap.training.restoring import restore
from hiap.training.result import Result, finish
from hiap.training.run_folder import RunFolder, checkpoints, load_checkpoint, load_dense, logged
from hiap.training.rungs import LADDER, check_not_rung
from hiap.training.signals import Signals

__all__ = ["Result", "Run", "prune"]

FACTS = (*(metric.key for metric in METRICS), "hard_macs", "cost", "open_heads", "open_ffns")  # in the live line


def prune(
    config: Config,
    out: str | Path,
    *,
    resume: bool = False,
    data: Data | tuple[Any, Any] | None = None,
    cost: Callable[[nn.Module], Cost] | None = None,
    model: nn.Module | None = None,
    further: bool = False,
    each: Callable[[Result], None] = lambda result: None,
) -> Result:
    """Prune a model and save the small one in `out/compact`.

    Several targets, such as "70%,50%,35%", give several sizes in one run, each saved in a folder of its own, such as
    `out/50%/compact`. The result is then the smallest one; its `rungs` tell of all.

    Args:
        config: what to do; `target` and `epochs` are what most people set.
        out: the folder of the run.
        resume: go on with the run that is there.
        data: instead of `config.data`, a pair of loaders of torch (training, validation) or an object like `hiap.Data`.
        cost: makes a cost of one's own from the gated model; `config.target` is then a share of its dense value.
        model: a trained ViT of one's own, instead of what `config.model` and `config.weights` name. It is not changed.
        further: add the targets to the finished run in `out`: prune its smallest model further.
        each: is called with the result of every target as soon as it is saved.

    Raises:
        ConfigError, BudgetError, UnsupportedModelError: before any work.
        RunError: the folder is in use, holds another run or none to resume; the loss is not finite; memory or disk are
            full. The last checkpoint is whole.
        KeyboardInterrupt, SystemExit: after SIGINT or SIGTERM, once a checkpoint is saved.
    """

    def run(config: Config, folder: Path, resume: bool, descent: Descent | None = None) -> Run:
        return Run(config, folder, resume, data, cost, model, descent=descent)

    check_not_rung(out := Path(out))
    if further or len(config.targets) > 1 or (out / LADDER).is_file():
        return Ladder(config, out, resume, further).descend(run, each)
    each(result := run(config, out, resume).go())
    return result


class Run:
    """One run: its phase, its folder and the loop.

    Args:
        first: makes the phase that the run begins with, where it is not the dense model or the search.
        descent: the place of the run among those of several targets.

    Attributes:
        context: what the phases share.
        phase: that is being trained.
        pending: what is known of an epoch that is not evaluated yet.
    """

    phase: Phase

    def __init__(
        self,
        config: Config,
        out: str | Path,
        resume: bool = False,
        data: Data | tuple[Any, Any] | None = None,
        cost: Callable[[nn.Module], Cost] | None = None,
        model: nn.Module | None = None,
        first: Callable[[Context], Phase] | None = None,
        descent: Descent | None = None,
    ) -> None:
        config.check()
        self.out, self.first = Path(out), first
        check_target(self.out / "compact")
        RunFolder.check(self.out, resume)
        self.context = context = Context(config, str(out), data, cost, model, kept_table(self.out), descent)
        self.given = [name for name, own in (("data", data), ("cost", cost), ("model", model)) if own is not None]
        self.config, self.parts = context.config, context.parts
        self.folder = context.folder = RunFolder(out, config.to_yaml(), resume) if context.main else None
        if self.folder is not None and self.parts.table is not None:
            self.parts.table.save(self.out / TABLE)
        if self.folder is not None:
            self.folder.note_start(environment(context))
        context.accelerator.wait_for_everyone()
        context.record |= inputs_record(context)
        self.seconds = 0.0
        self.pending: dict[str, Any] | None = None
        self.signals = Signals(context.main, alone=context.world == 1)
        self.progress = Progress(context.main, context.first + context.stop)
        context.say = self.progress.say if context.main else lambda text: None

    @property
    def record(self) -> dict[str, Any]:
        return self.context.record

    # -- the loop -------------------------------------------------------------------------------------------------

    def go(self) -> Result:
        """Train from wherever the run is to its end, and save the result."""
        try:
            with self.signals, out_of_memory(self.config, self._where, self._last):
                self.resume_or_begin()
                self._start_trackers()
                self.fit()
                while self._enter_next():
                    self.fit()
                return self._finish()
        finally:
            self.progress.close()
            if self.folder is not None:
                self.folder.close()

    def _enter_next(self) -> bool:
        """Go on with the phase that follows; whether there is one. Nothing here holds on to the one before."""
        following = self.phase.next()
        if following is None:
            return False
        self.phase = following
        self.save_checkpoint()
        return True

    def fit(self) -> None:
        """Train the present phase, and what follows it within an epoch, to the end."""
        per_epoch, every = self.context.per_epoch, self.config.checkpoint_every or self.context.per_epoch
        watch, self.signals.patient = Stopwatch(), True
        if self.pending is not None and not self._logged():
            self._leave()
        while self.phase.step < self.phase.course_end:
            spent, done, before = 0.0, per_epoch - self.phase.step % per_epoch, self.phase.step
            for x, y in self._batches():
                phase = self.phase
                terms = self.train_step(x, y)
                phase.step += 1
                over, ends = phase.step == phase.end, phase.step % per_epoch == 0
                due = phase.step % every == 0 or phase.step == phase.course_end
                if self.context.device.type == "cpu" or phase.step % 10 == 0 or due or self.signals.number:
                    self._show(terms)
                stopping = self._stopping()
                if over or ends or due or stopping:
                    took = watch.lap()
                    self.seconds, spent = self.seconds + took, spent + took
                    if over and phase.mid_epoch:
                        self.phase = phase.next() or phase
                    if ends:
                        self.pending = self._epoch(phase, terms, spent, done)
                    if due or stopping:  # before the evaluation, which may be long
                        self.save_checkpoint()
                    if ends and not stopping and not self._logged():
                        stopping = True
                        if not due:
                            self.save_checkpoint()
                    watch.lap()  # what is not training does not count
                if stopping:
                    self._leave()
                if self.phase.step >= self.phase.course_end:
                    break
            if self.phase.step == before:
                raise RunError(
                    f"the training data ended after {before % per_epoch} of the {per_epoch} batches of an epoch: "
                    f"it must give train_size // batch_size of them; the last checkpoint is {self._last()}"
                )
        self.signals.patient = False
        if self.context.world == 1 and self.signals.number is not None:  # it came after the last step
            self._leave()

    def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        """One optimiser step of the present phase. Returns the named terms of the loss."""
        return self.phase.train_step(x, y)

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """What is left of the present epoch."""
        context = self.context
        epoch, position = divmod(self._global_step(), context.per_epoch)
        epoch += context.seen - self.parts.dense_epochs
        return context.data.train(epoch, position, self.config.batch_size, context.rank, context.world)

    def _global_step(self) -> int:
        """Steps of all phases."""
        return self.phase.step + (0 if isinstance(self.phase, Dense) else self.context.first)

    def _show(self, terms: dict[str, Tensor]) -> None:
        """Move the progress bar.

        Raises:
            RunError: the loss is not finite.
        """
        phase, values = self.phase, {name: float(value) for name, value in terms.items()}
        if not all(np.isfinite(value) for value in values.values()):
            text = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            raise RunError(
                f"the loss is not finite {self._where()} ({text}); the last good checkpoint is {self._last()}"
            )
        epoch, epochs = -(-phase.step // self.context.per_epoch), phase.course_end // self.context.per_epoch
        now = {"stage": phase.name, "epoch": epoch, "epochs": epochs, **phase.facts}
        self.progress.show({**now, "loss": float(phase.weighted(terms))}, self._global_step(), self.config.target)

    def _stopping(self) -> bool:
        """Whether a signal came. Processes must agree on the step, so several ask each other at every tenth."""
        if self.context.world == 1:
            return self.signals.number is not None
        if self.phase.step % 10:
            return False
        own = torch.tensor([self.signals.number or 0], device=self.context.device)
        self.signals.number = int(self.context.accelerator.gather(own).max()) or None
        return self.signals.number is not None

    def _leave(self) -> None:
        """End the run after a signal; it is saved."""
        self.context.say(f"saved at step {self._global_step()}; go on with {self._command()}")
        self.signals.leave()

    def _command(self) -> str:
        """How the run is taken up again."""
        home = self.out if self.parts.descent is None else self.parts.descent.home
        own = "".join(f", {name}=..." for name in self.given)
        return f"hiap.prune(..., resume=True{own})" if own else f"`hiap prune --resume --out {home}`"

    # -- records --------------------------------------------------------------------------------------------------

    def _start_trackers(self) -> None:
        if self.config.trackers:
            plain = {k: v if isinstance(v, int | float | str) else str(v) for k, v in vars(self.config).items()}
            wandb = {"wandb": {"dir": str(self.out)}}
            self.context.accelerator.init_trackers("hiap", config=plain, init_kwargs=wandb)

    def _epoch(self, phase: Phase, terms: dict[str, Tensor], seconds: float, done: int) -> dict[str, Any]:
        """What an epoch did, of which `done` steps were since the run began or was taken up.

        It counts for the phase of its last step.
        """
        per_epoch, mean = self.context.per_epoch, self.context.mean
        whole = seconds * per_epoch / done
        course = self.record.setdefault("course", {})
        course = course.setdefault(phase.name, {"epochs": 0, "seconds": 0.0, "fastest": whole})
        course["epochs"] += 1
        course["seconds"] += seconds
        course["fastest"] = min(course["fastest"], whole)
        return {
            "stage": phase.name,
            "step": self._global_step(),
            "epoch": phase.step // per_epoch,
            "seconds": round(seconds, 3),
            "images_per_s": round(done * self.config.batch_size / max(seconds, 1e-9), 1),
            **{name: float(mean(value)) for name, value in terms.items()},
            "loss": float(mean(phase.weighted(terms))),
            "lr": phase.optimizer.param_groups[0]["lr"],
        }

    def _logged(self) -> bool:
        """Evaluate the pending epoch and write what is known of it; False if a signal came, and it is still pending."""
        assert self.pending is not None
        line, phase = dict(self.pending), self.phase
        key = self.config.metric.key
        if key not in line and (line["epoch"] % self.config.eval_every == 0 or phase.step >= phase.course_end):
            try:
                line[key] = self._score()
                line |= phase.soft_scores(line["epoch"], self.signals.asked)
            except Interrupted:
                return False
        phase.keep(line)
        line |= phase.measured()
        self.pending = None
        phase.facts |= {name: line[name] for name in FACTS if name in line}
        if self.folder is not None:
            self.folder.log(line)
            if key in line:
                epochs = self.parts.dense_epochs if line["stage"] == Dense.name else self.config.epochs
                self.progress.say(epoch_line({**line, "epochs": epochs}, self.config.target))
        if self.config.trackers:
            numbers = {name: value for name, value in line.items() if isinstance(value, int | float)}
            self.context.accelerator.log(numbers, step=self._global_step())
        return True

    def _score(self) -> float:
        """Top-1 or feature error of the network as the pending epoch has left it.

        Raises:
            Interrupted: a signal came. Several processes do not stop here: they could not agree where.
        """
        return self.phase.scores(stop=self.signals.asked)[self.config.metric.key]

    # -- state ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        self.context.accelerator.wait_for_everyone()
        if self.folder is None:
            return
        tensors, values = self.phase.state_dict()
        values |= {
            "format": FORMAT,
            "processes": self.context.world,
            "seconds": self.seconds,
            "record": self.record,
            "pending": self.pending,
            "course": course(self.context),
            "given": self.given,
        }
        self.folder.save(self._global_step(), tensors, values)

    def resume_or_begin(self) -> None:
        """Take up the last checkpoint, or begin."""
        saved = load_checkpoint(self.out)
        if saved is None:
            self.begin()
            return
        try:
            self._take_up(*saved)
        except HiapError:
            raise
        except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise RunError(
                f"checkpoint {self._last()} is damaged ({type(error).__name__}: {error}); remove it to start again"
            ) from error
        if self.folder is not None:
            self.folder.rewind(self._global_step(), self.pending is not None)
        self.context.say(f"resumed at step {self._global_step()}, in the {self.phase.name} stage")

    def begin(self) -> None:
        """Enter the first phase."""
        parts = self.parts
        if self.folder is not None:
            self.folder.rewind(-1)
            for line in parts.lines():
                self.progress.say(line)
            parts.warn()
        if self.first is not None:
            self.phase = self.first(self.context)
        elif not parts.dense_epochs:
            self.phase = Search(self.context)
            self.save_checkpoint()
        else:
            if parts.trained and not parts.new_classifier:
                self.context.score_dense(self.context.dense())
            self.phase = Dense(self.context)

    def _take_up(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        if self.first is not None:
            raise RunError("a run that begins with a phase of its own cannot be resumed")
        check_inputs(self.context, self.out, self.given, state)
        self.seconds, self.pending, self.context.record = (state[k] for k in ("seconds", "pending", "record"))
        if self.pending is not None and (line := logged(self.out, self.pending["step"])) is not None:
            self.pending = line  # it was evaluated before the run ended
        if state["stage"] != Dense.name and self.parts.dense_epochs:
            self.parts.model.load_state_dict(load_dense(self.out))
        self.phase = restore(self.context, tensors, state)

    def _where(self) -> str:
        """Where the run is, in words."""
        phase: Phase | None = getattr(self, "phase", None)
        return "before the first step" if phase is None else f"at step {phase.step} of the {phase.name} stage"

    def _last(self) -> str:
        """The last checkpoint, in words."""
        saved = checkpoints(self.out)
        return str(saved[-1]) if saved else "none"

    def _finish(self) -> Result:
        assert isinstance(self.phase, Recover)
        self.record["seconds"] = self.seconds
        return finish(self.context, self.phase, self.out, f"{self._last()}: mend this, then {self._command()}")
