"""What the phases of a run share: its configuration and parts, its processes and its record."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, TypeVar

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from hiap.budget.cost import Cost
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.data.images import mix_seed
from hiap.data.sources import Data
from hiap.nn.compact import Widths
from hiap.pruning.align import align_heads
from hiap.pruning.count import macs_of_widths
from hiap.pruning.merging import Merged
from hiap.training.config import Config
from hiap.training.costs import measure_error
from hiap.training.descent import Descent
from hiap.training.evaluate import evaluate
from hiap.training.features import FeatureObjective, feature_scores
from hiap.training.objective import Objective, Teacher
from hiap.training.run_folder import RunFolder
from hiap.training.setup import Setup, make_teacher

__all__ = ["Context"]

ALIGNING = 512  # images, at least, that the basis of heads is found on

Found = TypeVar("Found")


class Context:
    """The parts of a run on the processes it runs on.

    Args:
        data, cost, model: of one's own, instead of what the configuration names.
        table: latencies that an earlier part of the run has measured.
        descent: the place of the run among those of several targets.

    Attributes:
        config: with what was left open decided.
        parts: what the run is made of; `parts.model` is the dense model, on the CPU.
        first: steps of the dense phase, before those of search and recovery.
        stop: steps of search and recovery together.
        seen: epochs of data before those of search and recovery.
        record: what is to be reported.
        folder: that the run writes to, on the main process.
        say: prints a line, on the main process.
    """

    def __init__(
        self,
        config: Config,
        out: str,
        data: Data | tuple[Any, Any] | None = None,
        cost: Callable[[nn.Module], Cost] | None = None,
        model: nn.Module | None = None,
        table: LatencyTable | None = None,
        descent: Descent | None = None,
    ) -> None:
        if PartialState._shared_state and PartialState().num_processes == 1:
            AcceleratorState._reset_state()  # the run before in this process may have had another precision
        self.accelerator = Accelerator(
            cpu=not (torch.cuda.is_available() or torch.backends.mps.is_available()),
            mixed_precision="no" if config.precision == "fp32" else config.precision,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False)],
            log_with=config.trackers or None,
            project_dir=out if config.trackers else None,
        )
        self.device, self.main = self.accelerator.device, self.accelerator.is_main_process
        self.rank, self.world = self.accelerator.process_index, self.accelerator.num_processes
        torch.manual_seed(mix_seed(config.seed))  # what is not loaded is drawn: a new classifier, or all of it
        with self.accelerator.local_main_process_first() if config.download else nullcontext():
            say: Callable[[str], None] = print if self.main else lambda text: None
            table = table or (descent.table if descent is not None else None)
            self.parts = Setup(config, self.device, data, cost, model, self.world, self._table(table), say, descent)
        self.config, self.data, self.schedule = self.parts.config, self.parts.data, self.parts.schedule
        self.per_epoch = self.parts.per_epoch
        self.first = self.parts.dense_epochs * self.per_epoch
        self.stop = (config.stop_after or config.epochs) * self.per_epoch
        self.seen = self.parts.dense_epochs if descent is None else descent.epochs + self.parts.dense_epochs
        self.record: dict[str, Any] = {}
        self.folder: RunFolder | None = None
        self.say: Callable[[str], None] = lambda text: None

    def _table(self, kept: LatencyTable | None) -> Callable[[Callable[[], LatencyTable]], LatencyTable]:
        """The latency table that was kept, else one that the main process measures for all."""

        def table(measured: Callable[[], LatencyTable]) -> LatencyTable:
            if kept is not None:
                return kept
            found = self._by_main(measured)
            assert found is not None
            return found

        return table

    def _by_main(self, measured: Callable[[], Found | None]) -> Found | None:
        """What the main process has measured, in all of them."""
        found = [measured() if self.main else None]
        if self.world > 1:
            broadcast_object_list(found)
        return found[0]

    def measure_error(self, widths: Sequence[Widths]) -> float | None:
        """How much slower a network of these widths is than the latency table says; None where that cannot be known."""
        cost, dense = self.parts.cost, self.parts.model
        if not isinstance(cost, LatencyCost):
            return None
        return self._by_main(lambda: measure_error(cost, dense, widths, self.device))

    def dense(self) -> nn.Module:
        """A copy of the dense model on the device."""
        return copy.deepcopy(self.parts.model).to(self.device)

    def start(self, dense: nn.Module) -> nn.Module:
        """What the search begins with, on the device: the dense model itself, or a copy of a smaller network."""
        return dense if self.parts.start is None else copy.deepcopy(self.parts.start).to(self.device)

    def align(self, network: nn.Module) -> None:
        """Concentrate the heads of a network in few dims, of the kinds that have gates."""
        queries, values = "qk_dim" in self.parts.kinds, "value_dim" in self.parts.kinds
        batch = self.config.batch_size
        batches = self.data.train(self.seen, 0, batch, self.rank, self.world)
        images = (x.to(self.device) for x, _ in islice(batches, -(-ALIGNING // batch)))
        if queries or values:
            align_heads(network, images, queries=queries, values=values, reduce=self.mean)

    def merging(self, network: nn.Module) -> nn.Module:
        """A compact network as it is trained after the search: as it is, or merging tokens, on the same parameters."""
        most = self.config.merge_tokens
        return Merged(network, most).train(network.training) if most else network

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean over processes."""
        mean: Tensor = self.accelerator.reduce(tensor, "mean")
        return mean

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over processes."""
        total: Tensor = self.accelerator.reduce(tensor, "sum")
        return total

    def objective(self, teacher: Teacher | None) -> Objective:
        """The loss of a batch, with a teacher or without."""
        kind = Objective if self.config.labelled else FeatureObjective
        return kind(self.config, teacher, self.accelerator.autocast, self.accelerator.unwrap_model)

    def teacher(self, dense: nn.Module) -> Teacher | None:
        """The teacher of the run, if it has one; `dense` is the dense model on the device, as it is now."""
        return make_teacher(self.config, dense, self.parts.mean_std, self.parts.other_teacher)

    def scores(
        self, model: nn.Module, teacher: Teacher | None, stop: Callable[[], bool] = lambda: False
    ) -> dict[str, float]:
        """Top-1 and top-5 of a model, in the mode it is in, and how many images were seen. Processes share the images.

        Where features are learned: how far its pooled output is from the teacher's.

        Raises:
            Interrupted: `stop` said so.
        """
        how = (self.data, self.config.batch_size, self.accelerator.autocast, stop, self.sum, self.rank, self.world)
        if self.config.labelled:
            return evaluate(model, *how)
        assert teacher is not None
        return feature_scores(model, teacher, *how)

    def score_dense(self, dense: nn.Module) -> None:
        """Record the accuracy of the dense model, and warn where it seems to know nothing."""
        scores = self.scores(dense.eval(), None)
        dense.train()
        top1, images, chance = scores["top1"], int(scores["images"]), 100 / self.data.classes
        self.record["dense_top1"] = top1
        self.say(f"dense    top-1 {top1:.2f} % on {images} validation images")
        spread = (chance * (100 - chance) / images) ** 0.5
        if top1 <= chance + 3 * spread and (self.parts.trained or self.parts.dense_epochs):
            warnings.warn(
                f"the dense model scores {top1:.2f} %, near chance ({chance:.2f} %): are --mean, --std and --img-size "
                "those it was trained with, and are the classes in the order of its labels?",
                stacklevel=2,
            )

    def facts(self, widths: Sequence[Widths]) -> dict[str, Any]:
        """What a network of these widths has and costs."""
        dense = self.parts.model
        facts = {
            "hard_macs": macs_of_widths(dense, widths, None, self.config.merge_tokens) / self.parts.dense_macs,
            "open_heads": sum(one.heads or 0 for one in widths),
            "open_ffns": sum(one.neurons is not None for one in widths),
        }
        return facts | (
            {"cost": self.corrected(self.parts.cost.of_widths(dense, widths))}
            if isinstance(self.parts.cost, LatencyCost)
            else {}
        )

    def corrected(self, cost: float) -> float:
        """A cost by the table, as the clock has corrected it at the freeze of this run or of the one before."""
        return cost * float(self.record.get("table_error", self.parts.table_error))
