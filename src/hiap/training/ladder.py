"""Several sizes from one run: each target is an ordinary run that begins with the compact network of the one before.

The dense model teaches all of them. A size is saved as soon as it is done, and the next one begins with what was saved,
so that a run that goes on after a kill sees the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from hiap.atomic import write_text
from hiap.budget.target import Target
from hiap.data.sources import Data
from hiap.errors import BudgetError, RunError
from hiap.pruning.saving import load
from hiap.training.config import Config, read_config
from hiap.training.context import Context
from hiap.training.descent import Descent
from hiap.training.inputs import kept_table
from hiap.training.result import Result
from hiap.training.run_folder import CONFIG, DENSE, FREE, RunFolder, checkpoints, compare_configs, load_dense
from hiap.training.rungs import Rung, finished_run, folder_name, read_rungs, rung_configs, write_rungs

__all__ = ["Ladder"]


class Running(Protocol):
    """What a ladder asks of a run."""

    context: Context

    def go(self) -> Result: ...


class Ladder:
    """The sizes of a run and what is still to be done.

    Args:
        config: with all targets; where a run is made to go further, with the new ones.
        resume: go on with what is in `out`.
        further: add the targets to the finished run in `out`.

    Raises:
        RunError: `out` holds another run, or none where there must be one.
        BudgetError: the new targets count something else than the old ones.
    """

    def __init__(self, config: Config, out: Path, resume: bool, further: bool) -> None:
        config.check()
        self.config, self.out = config, out
        self.rungs = read_rungs(out)
        self.configs: list[Config] = []
        if further:
            self._add(resume)
        elif self.rungs:
            self._take_up(resume)
        else:
            if resume and checkpoints(out):
                raise RunError(f"{out} holds a run of one target: add smaller ones with `hiap prune --from {out}`")
            RunFolder.check(out, resume)
            self._plan()

    def _plan(self) -> None:
        """List the targets of the configuration."""
        for config in rung_configs(self.config):
            assert config.target is not None
            self.rungs.append(Rung(config.target, self.out / folder_name(config.target), config.epochs))
            self.configs.append(config)

    def _take_up(self, resume: bool) -> None:
        if not resume:
            raise RunError(f"{self.out} holds a run: pass --resume to go on with it, or another --out")
        compare_configs(self.out, (self.out / CONFIG).read_text(), self.config.to_yaml())
        now = {name: getattr(self.config, name) for name in FREE}
        self.configs = [replace(read_config(rung.path / CONFIG), **now) for rung in self.rungs]

    def _add(self, resume: bool) -> None:
        """List the targets below those of a finished run."""
        if resume:
            raise RunError(f"go on with `hiap prune --resume --out {self.out}`, or begin new sizes with --from alone")
        self.rungs = self.rungs or finished_run(self.out)
        self.configs = [read_config(rung.path / CONFIG) for rung in self.rungs]
        last, new = self.rungs[-1], self.config.targets
        if any(rung.state != "done" for rung in self.rungs):
            raise RunError(f"the run in {self.out} has not finished: go on with `hiap prune --resume --out {self.out}`")
        if not new:
            raise BudgetError("pruning further needs a target, such as 25%")
        cost, kinds = self.config.cost, {Target.parse(one).kind for one in (new[0], last.target)}
        if cost != self.configs[-1].cost or (cost is None and len(kinds) > 1):  # a table has one unit for all targets
            raise BudgetError(f"a target of {new[0]} has another unit than {last.target}, which is in {last.path}")
        self._plan()

    def descend(
        self, run: Callable[[Config, Path, bool, Descent | None], Running], each: Callable[[Result], None]
    ) -> Result:
        """Make the sizes that are still to be made, from the largest to the smallest. Returns the last one.

        Args:
            run: makes the run of one target, in a folder; it checks everything before it writes.
            each: is called with every result.
        """
        first = next((i for i, rung in enumerate(self.rungs) if rung.state != "done"), len(self.rungs) - 1)
        data: Data | None = None
        for i in range(first, len(self.rungs)):
            rung, config = self.rungs[i], self.configs[i]
            begun = (rung.path / CONFIG).is_file()
            part = run(config, rung.path, begun, self._descent(i, data, check=i == first))
            if part.context.main:
                self._begin(i)
                part.context.say(f"size {i + 1} of {len(self.rungs)}: {rung.target}, in {rung.path}")
            result, data = part.go(), part.context.data
            self._note(i, "done", write=part.context.main)
            result = replace(result, rungs=tuple(self.rungs))
            each(result)
        return result

    def _begin(self, i: int) -> None:
        """Write what is planned, once the first run of it is known to be possible."""
        self.out.mkdir(parents=True, exist_ok=True)
        for rung, config in zip(self.rungs, self.configs, strict=True):
            if not (rung.path / CONFIG).is_file():
                rung.path.mkdir(exist_ok=True)
                write_text(rung.path / CONFIG, config.to_yaml())
        if not (self.out / CONFIG).is_file():
            write_text(self.out / CONFIG, self.config.to_yaml())
        self._note(i, "running", write=True)

    def _note(self, i: int, state: Any, write: bool) -> None:
        self.rungs[i] = replace(self.rungs[i], state=state)
        if write:
            write_rungs(self.out, self.rungs)

    def _descent(self, i: int, data: Data | None, check: bool) -> Descent:
        """What the run of a target is given by those before it."""
        later = tuple(rung.target for rung in self.rungs[i + 1 :]) if check else ()
        if i == 0:
            return Descent(self.out, later, total=sum(rung.epochs for rung in self.rungs))
        home, above = self.rungs[0].path, self.rungs[i - 1]
        record = self.rungs[0].record
        if not record:
            raise RunError(f"{home / 'report.json'} is missing, and the run needs what it says; put it back")
        trained = (home / DENSE).is_file()
        seen = record["course"].get("dense", {}).get("epochs", 0) + sum(rung.epochs for rung in self.rungs[:i])
        return Descent(
            self.out,
            later,
            load(above.folder),
            above.folder,
            load_dense(home) if trained else None,
            None if trained else record["dense_digest"],
            record.get("dense_top1"),
            data,
            kept_table(home),
            above.record.get("table_error", 1.0),
            seen,
        )
