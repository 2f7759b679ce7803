"""The phases of a run (paper, section 3.4): dense, search, recover.

`Dense` trains a model that is not ready to be pruned; `Search` trains weights and gates while the budget falls;
`Recover` trains the network that is left. The loop that steps through them (loop.py) knows none of this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hiap.budget.controller import Controller
from hiap.budget.cost import MacCost
from hiap.models.registry import family_of, sites
from hiap.nn.compact import Widths
from hiap.pruning.attach import attach, gates, is_gated, parameter_groups, set_gates
from hiap.pruning.count import expected_counts
from hiap.pruning.extract import extract, provenance_of, slices
from hiap.pruning.merging import unmerged
from hiap.pruning.topology import Topology, harden, set_topology
from hiap.training.branch_losses import loss_of_images, measure_branches
from hiap.training.context import Context
from hiap.training.decision import decide
from hiap.training.features import FeatureObjective
from hiap.training.objective import Teacher, cost_terms, feasibility_terms
from hiap.training.optimizer_state import carry_optimizer
from hiap.training.phase import Phase, Tensors, Values, part
from hiap.training.schedule import projection_interval
from hiap.training.snapshots import SNAPSHOTS, log_snapshot, whole_cost

__all__ = ["SOFT_SCORES", "Dense", "Recover", "Search", "fixed"]

MEASURED = 10  # moves of the budget from one measurement of whole branches to the next
SOFT_SCORES = 8  # evaluations of a search, at most, that are made with gates as in training as well
NEW = 10.0  # times faster a new classifier learns than the trained rest of a dense model


class Dense(Phase):
    """Trains or fine-tunes the dense model, where it is not ready to be pruned."""

    name = "dense"
    averaged = False
    seed_offset = 0

    def __init__(self, context: Context) -> None:
        super().__init__(context, context.dense(), None, 0, context.first)

    @property
    def lr(self) -> float:
        return self.context.parts.dense_lr

    @property
    def epochs(self) -> int:
        return self.context.parts.dense_epochs

    @property
    def course_end(self) -> int:
        return self.context.first

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        if not self.context.parts.new_classifier:
            return groups
        new = {id(p) for layer in family_of(self.network).classifier(self.network) for p in layer.parameters()}
        split = []
        for group in groups:
            for mine, own in ((False, {}), (True, {"lr": self.lr * NEW})):
                split.append({**group, "params": [p for p in group["params"] if (id(p) in new) is mine], **own})
        return split

    def measured(self) -> dict[str, Any]:
        parts = self.context.parts
        facts = self.context.facts([site.widths for site in parts.sites])
        return {name: value for name, value in facts.items() if name != "cost"}

    def next(self) -> Phase:
        network, context = self.unwrapped(), self.context
        context.score_dense(network)
        trained = {name: tensor.detach().cpu() for name, tensor in network.state_dict().items()}
        context.parts.model.load_state_dict(trained)
        if context.folder is not None:
            context.folder.save_dense(trained)
        del network, self.network, self.model, self.forward, self.optimizer, self.prepared_optimizer, self.lr_scheduler
        return Search(context)


class Search(Phase):
    """Trains weights and gates while the budget falls, then decides what is kept.

    Args:
        every: steps from one move of the budget to the next; 0 never moves it, and gates are only ranked at the end.
        penalty: terms of the loss that push gates to close, already weighted; by default the paper's without a target,
            and none with one.
        fresh: the phase begins, and does not go on from a checkpoint.
    """

    name = "search"
    mid_epoch = True

    def __init__(
        self,
        context: Context,
        *,
        every: int | None = None,
        penalty: Callable[[Search], dict[str, Tensor]] | None = None,
        fresh: bool = True,
    ) -> None:
        config, parts, schedule = context.config, context.parts, context.schedule
        dense = context.dense()
        if fresh and config.labelled and "dense_top1" not in context.record:
            context.score_dense(dense)
        teacher = context.teacher(dense)
        network = context.start(dense)
        if fresh and (config.align_heads if config.align_heads is not None else config.target):
            context.align(network)
        network = attach(network, parts.kinds, config.keep_blocks, logit=config.start_logit, seed=config.seed)
        self.controller: Controller | None = parts.control(network) if config.target else None
        self.every = projection_interval(schedule.freeze) if every is None else every
        self.penalty = penalty
        if self.controller is not None:
            self.controller.project(self.controller.dense_cost, schedule.sharpness(0))
            self.controller.listen(config.labelled)
        super().__init__(context, network, teacher, 0, min(schedule.freeze, context.stop))
        if fresh:
            log_snapshot(context, network, 0, harden(network), self.controller)
            if self.measuring is not None:
                measure_branches(self, self.measuring)
            self.before_step()
            key = config.metric.key
            context.record[f"soft_{key}_start"] = self.scores(soft=True)[key]

    def parameter_groups(self) -> list[dict[str, Any]]:
        config = self.context.config
        *weights, logits = parameter_groups(self.network, config.weight_decay, config.gate_lr)
        learned = not (config.target and config.gate_mode == "importance")
        return [*weights, logits] if learned else weights

    @property
    def measuring(self) -> Controller | None:
        """The controller, where branches are valued by the loss without them."""
        return self.controller if self.controller is not None and self.controller.measured and self.every else None

    def before_step(self) -> None:
        schedule, draws = self.context.schedule, self.step * self.context.config.accumulate
        set_gates(
            self.network,
            temperature=schedule.temperature(self.step),
            noise_scale=schedule.noise(self.step),
            draws=draws,
        )

    def train_step(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.measuring is not None and self.step and self.step % (MEASURED * self.every) == 0:
            self.network.eval()
            self.measuring.measure(loss_of_images(self, x, y))
        return super().train_step(x, y)

    def terms(self, model: nn.Module, x: Tensor, target: Tensor, share: float = 1.0) -> dict[str, Tensor]:
        objective, controller = self.objective, self.controller
        if not isinstance(objective, FeatureObjective) or controller is None or controller.mode != "importance":
            return super().terms(model, x, target, share)
        terms, probe = objective.terms_and_probe(model, x)
        scaler, logits = self.context.accelerator.scaler, [gate.logit for gate in controller.all_gates]
        scale = scaler.get_scale() if scaler is not None else 1.0
        controller.listen(True)
        torch.autograd.grad(probe * (scale * share**0.5), logits, retain_graph=True, allow_unused=True)
        controller.listen(False)
        return terms | self.penalties()

    def penalties(self) -> dict[str, Tensor]:
        config = self.context.config
        if self.penalty is not None:
            return self.penalty(self)
        if config.target is not None:
            return {}
        floors = config.min_heads, config.min_value_dims, config.min_neurons
        return cost_terms(self.network, self.context.parts.cost) | feasibility_terms(self.network, *floors)

    @property
    def penalty_weights(self) -> dict[str, float]:
        config = self.context.config
        if self.penalty is not None:
            return {}
        return {
            "macro": config.lambda_macro or 0.0,
            "micro": config.lambda_micro or 0.0,
            "feasible_head": config.beta_head,
            "feasible_dim": config.beta_dim,
            "feasible_ffn": config.beta_ffn,
        }

    def after_step(self, scale: float) -> None:
        self._control(scale)
        after = self.step + 1
        if self.context.folder is not None and after % max(1, self.end // SNAPSHOTS) == 0 and after < self.end:
            log_snapshot(self.context, self.network, after, harden(self.network), self.controller)

    def _control(self, scale: float) -> None:
        """Let the controller see the gradients and, when it is time, hold the gates on the budget."""
        controller, schedule, after = self.controller, self.context.schedule, self.step + 1
        if controller is None or not self.every:
            return
        if self.context.accelerator.optimizer_step_was_skipped:  # float16 overflowed: these gradients are not finite
            controller.gradient.zero_()
        else:
            controller.observe(self.context.mean, scale)
        if after % self.every == 0 or after == schedule.freeze:
            allowed = schedule.budget(after, controller.dense_cost, controller.target)
            controller.project(allowed, schedule.sharpness(after))
            self.facts |= self.context.facts(controller.widths)

    def soft_scores(self, epoch: int, stop: Callable[[], bool]) -> dict[str, float]:
        """A few times in the search, evenly spread: it is a whole evaluation."""
        every, key = self.context.config.eval_every, self.context.config.metric.key
        evaluated = self.end // (every * self.context.per_epoch)
        if not evaluated or epoch // every % -(-evaluated // SOFT_SCORES):
            return {}
        self.before_step()  # temperature and noise are those of the step, in a run that was taken up too
        return {f"soft_{key}": self.scores(soft=True, stop=stop)[key]}

    def widths(self) -> list[Widths]:
        """The padded widths of the network, gates hardened."""
        return harden(self.network).widths(self.context.config.round_to)

    def measured(self) -> dict[str, Any]:
        """How decided the gates are, and what they expect to cost against what they cost."""
        p = torch.cat([gate.probability().detach().flatten() for gate in gates(self.network)])
        counted = MacCost(self.network, merge_tokens=self.context.config.merge_tokens)
        expected = counted.total(expected_counts(self.network)).item()
        return {
            "undecided": ((p > 0.05) & (p < 0.95)).float().mean().item(),
            "expected_macs": expected / self.context.parts.dense_macs,
            **self.context.facts(self.widths()),
            "temperature": self.context.schedule.temperature(self.step),
        }

    def next(self) -> Phase:
        """Decide what is kept; with `shrink`, recovery goes on with the extracted network."""
        context, config = self.context, self.context.config
        network = self.network = self.unwrapped()
        key = config.metric.key
        found: Values = {"freeze_step": self.step, f"soft_{key}": self.scores(soft=True)[key]}
        topology, allowed, error = harden(network), 0.0, 1.0
        if self.controller is not None:
            known = context.parts.table_error
            topology, allowed, error = decide(self.controller, config.round_to, self.measure_error, known, context.say)
        context.record |= {"table_error": error} if error != 1 else {}
        log_snapshot(context, network, self.step, topology, self.controller)
        found["neighbours"] = (
            self.controller.neighbours(0.01 * whole_cost(context), allowed) if self.controller is not None else []
        )
        measured = {name: value for name, value in self.measured().items() if name != "temperature"}
        measured |= context.facts(topology.widths(config.round_to))
        for model in [network, *([self.ema.module] if self.ema is not None else [])]:
            for gate in gates(model):
                gate.gradient = None
            set_topology(model, topology)
        shrunk = config.shrink and self.step < context.stop
        context.record |= measured | found | {f"hard_{key}": self.scores()[key], "shrunk": shrunk}
        small = extract(network, topology, config.round_to) if shrunk else fixed(context, network)
        phase = Recover(context, context.merging(small) if shrunk else small, self.teacher, self.step, topology)
        cuts = {}
        if shrunk:
            cuts = slices(sites(network), topology, topology.widths(config.round_to))
        carry_optimizer(self.optimizer, network, phase.optimizer, small, cuts)
        if self.ema is not None and phase.ema is not None:
            average = self.ema.module
            average = extract(average, topology, config.round_to) if shrunk else average
            unmerged(phase.ema.module).load_state_dict(average.state_dict())
        return phase

    def measure_error(self, widths: Sequence[Widths]) -> float | None:
        """How much slower a network is than the latency table says; None where that cannot be known."""
        return self.context.measure_error(widths)

    def state_dict(self) -> tuple[Tensors, Values]:
        tensors, values = super().state_dict()
        if self.controller is not None:
            tensors["controller.importance"] = self.controller.importance
            tensors["controller.curves"] = self.controller.curves
            values["observations"] = self.controller.observations
        return tensors, values

    def load_state_dict(self, tensors: Tensors, values: Values) -> None:
        super().load_state_dict(tensors, values)
        if self.controller is not None:
            known = (tensors["controller.importance"], values["observations"], tensors.get("controller.curves"))
            self.controller.restore(*known)


class Recover(Phase):
    """Trains a network whose topology is final.

    Args:
        topology: what the network is in terms of the dense model; None for one that was made otherwise.
        facts: what the metrics say of it; by default what a network of these widths has and costs.
    """

    name = "recover"

    def __init__(
        self,
        context: Context,
        network: nn.Module,
        teacher: Teacher | None,
        step: int = 0,
        topology: Topology | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        self.topology = topology
        self.best: Tensors = {}  # weights of the best epoch, where it is kept
        super().__init__(context, network, teacher, step, context.stop)
        if facts is None:
            assert topology is not None
            facts = context.facts(topology.widths(context.config.round_to))
        self.described, self.facts = facts, dict(facts)

    def measured(self) -> dict[str, Any]:
        return dict(self.described)

    def keep(self, line: dict[str, Any]) -> None:
        record, metric = self.context.record, self.context.config.metric
        key = metric.key
        if self.context.config.keep == "last" or key not in line:
            return
        if "best" not in record or metric.better(line[key], record["best"][key]):
            record["best"] = {"epoch": line["epoch"], key: line[key]}
            self.best = {n: t.detach().cpu().clone() for n, t in self.averaged_network.state_dict().items()}

    def result(self) -> nn.Module:
        """The compact network, in eval mode."""
        self.network = self.unwrapped()
        model = self.averaged_network
        if self.best:
            model.load_state_dict(self.best)
        if is_gated(model):
            model = self.context.merging(extract(model, self.topology, self.context.config.round_to))
        return model.eval()

    def state_dict(self) -> tuple[Tensors, Values]:
        tensors, values = super().state_dict()
        tensors |= {f"best.{name}": tensor for name, tensor in self.best.items()}
        found = None if is_gated(self.network) else provenance_of(self.network)
        return tensors, values | {
            "topology": self.topology.to_json() if self.topology is not None else None,
            "verified": None if found is None else [found.logit_difference, found.tolerance],
        }

    def load_state_dict(self, tensors: Tensors, values: Values) -> None:
        super().load_state_dict(tensors, values)
        self.best = part(tensors, "best.")


def fixed(context: Context, network: nn.Module) -> nn.Module:
    """A gated network whose gates have the last word, and learn no more."""
    set_gates(network, temperature=context.schedule.tau_floor, noise_scale=0.0)
    for gate in gates(network):
        gate.gradient = None
        gate.logit.requires_grad_(False)
    return network
