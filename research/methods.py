"""The methods that `compare.py` sets side by side. All share HiAP's loop, data, optimiser, schedule and distillation.

Peers make a small network from the dense one and train it for the whole run. `l1` and `paper` learn their gates for
twice as long as HiAP searches, and are cut to the same budget by the rank of their gates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn

import hiap
from hiap.budget.controller import BudgetError, Controller
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.budget.target import Target
from hiap.data.sources import Data
from hiap.models.family import Site
from hiap.models.registry import widths_of
from hiap.nn.compact import Widths
from hiap.nn.granularities import PAPER
from hiap.pruning.count import expected_counts, macs_of_widths
from hiap.training.config import Config
from hiap.training.context import Context
from hiap.training.decision import choose
from hiap.training.features import FeatureObjective
from hiap.training.loop import Run
from hiap.training.objective import cost_terms, feasibility_terms
from hiap.training.phases import Recover, Search
from hiap.training.probes import embed_images, knn_top1
from hiap.training.setup import model_arguments
from narrower import torch_pruning_aligned, torch_pruning_isomorphic, torch_pruning_taylor
from shared import SharedSearch, clock_error, compile_steps

BATCHES = 26  # that one-shot rankings are estimated on
HALVINGS = 10  # of the range of MACs, to meet a time
FIVE = (*PAPER, "qk_dim")


class Peer:
    """A run of one phase: a network made from the dense one is trained for the whole of it. No gates, no search.

    Attributes:
        dense: the dense model on the device; its heads are aligned where the configuration wants it.
        target: the MACs that are allowed; where the run has a target in time, those of the last try.
        seen: the squared gradients of open gates, by the kinds of gates.
        faster: its training steps are compiled.
        timed: with a target in time, its network is timed before it is trained.
    """

    def __init__(
        self,
        config: Config,
        out: Path,
        data: Data,
        make: Callable[[Peer], nn.Module],
        faster: bool = False,
        timed: bool = True,
    ) -> None:
        self.make, self.faster, self.timed = make, faster, timed
        self.run = Run(config, out, data=data, first=self._phase)
        self.context, self.config, self.data = self.run.context, self.run.config, self.run.parts.data
        self.dense, self.dense_macs = self.context.dense(), self.run.parts.dense_macs
        self.objective = self.context.objective(self.context.teacher(self.dense))
        self.target: float = self.dense_macs
        self.seen: dict[tuple[str, ...], Tensor] = {}

    def network(self) -> nn.Module:
        """What is to be trained."""
        if self.config.align_heads:
            self.context.align(self.dense)
        cost, wanted = self.run.parts.cost, Target.parse(self.config.target)
        if isinstance(cost, LatencyCost):
            return self._timed(cost, wanted.absolute(cost.outside + cost.dense)).to(self.context.device)
        self.target = wanted.absolute(self.dense_macs)
        return self.make(self).to(self.context.device)

    def _timed(self, cost: LatencyCost, most: float) -> nn.Module:
        """The network of the most MACs that takes no longer."""
        made = self._within(cost, most)
        if made is None:
            raise BudgetError(f"no network of this method takes {cost.say(most)} or less")
        network, error = choose(
            made,
            lambda allowed: self._within(cost, allowed),
            lambda made: cost.of_widths(self.dense, widths_of(made)),
            lambda made: clock_error(self.context, widths_of(made)) if self.timed else None,
            most,
            1.0,
            self.context.say,
        )
        self.record.update({"table_error": error} if error != 1 else {})
        return network

    def _within(self, cost: LatencyCost, most: float) -> nn.Module | None:
        """The network of the most MACs that takes no longer by the table, if there is one."""
        low, high, best = 0.0, 1.0, None
        for _ in range(HALVINGS):
            share = (low + high) / 2
            self.target = share * self.dense_macs
            try:
                network = self.make(self)
            except BudgetError:  # so few MACs cannot be had
                low = share
                continue
            if cost.of_widths(self.dense, widths_of(network)) <= most:
                low, best = share, network
            else:
                high = share
        return best

    def _phase(self, context: Context) -> Recover:
        phase = Recover(context, self.network(), self.objective.teacher, facts={})
        self.record["top1_before"] = accuracy(context, phase.network)
        return compile_steps(phase) if self.faster else phase

    def train(self) -> nn.Module:
        self.run.begin()
        self.run.fit()
        network = self.run.phase.result()
        self.record["top1"] = accuracy(self.context, network)
        return network

    @property
    def record(self) -> dict[str, Any]:
        return self.context.record

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What units are ranked by: what the run minimises or, where it learns features, its probe."""
        if isinstance(self.objective, FeatureObjective):
            return self.objective.terms_and_probe(model, x)[1]
        return self.objective.weighted(self.objective.terms(model, x, y))

    def batches(self) -> Any:
        return islice(self.data.train(0, 0, self.config.batch_size, 0, 1), BATCHES)


def accuracy(context: Context, model: nn.Module) -> float:
    """Top-1 in percent; where features are learned, that of their nearest neighbours among the training images."""
    training = model.training
    model.eval()
    if context.config.labelled:
        top1 = context.scores(model, None)["top1"]
    else:
        batch, autocast = context.config.batch_size, context.accelerator.autocast
        parts = (context.data.bank(batch), context.data.val(batch))
        top1 = knn_top1(*(embed_images(model, part, autocast) for part in parts))
    model.train(training)
    return top1


# -- penalties: gates are learned under them until they meet the target, then cut to it by their rank -----------------


def missed(search: Search) -> Tensor:
    """1 as long as the expected cost is above the target, then 0."""
    assert search.controller is not None
    expected = search.context.parts.cost.total(expected_counts(search.network)).detach()
    return (expected > search.controller.target).float()


def l1(search: Search) -> dict[str, Tensor]:
    """ViT-Slim's way: soft masks, without noise, under an l1 penalty; then a threshold."""
    masks = torch.cat([gate.probability().flatten() for gate in hiap.gates(search.network)])
    weight = 0.05  # at the start as strong as the task's gradient in a median mask
    return {"l1": weight * missed(search) * masks.sum()}


def paper(search: Search) -> dict[str, Tensor]:
    """The paper's penalties (its ratio 2:1), noise and temperature; as much stronger as the search is shorter."""
    config, schedule = search.context.config, search.context.schedule
    terms = cost_terms(search.network, search.context.parts.cost)
    terms |= feasibility_terms(search.network, config.min_heads, config.min_value_dims, config.min_neurons)
    times = missed(search) * 300 * search.context.per_epoch / schedule.freeze
    weights = {"macro": 0.9 * times, "micro": 0.45 * times}
    return {name: weights.get(name, 1.0) * value for name, value in terms.items()}


class MacRanked(LatencyCost):
    """Time by a table, but units give way by their MACs."""

    proportional = True

    def __init__(self, model: nn.Module, table: LatencyTable) -> None:
        super().__init__(model, table)
        self.macs = hiap.MacCost(model)

    def price(self, site: Site, widths: Widths) -> float:
        return self.macs.block(site, widths)


def gated_run(
    method: str,
    config: Config,
    out: Path,
    data: Data,
    every: int | None = None,
    faster: bool = False,
    timed: bool = True,
    **more: Any,
) -> Run:
    """A run of HiAP, or of gates under a penalty, which no projection moves.

    With a target in time, `hiap` is HiAP by MACs, of so many that it takes the time. No network is timed when its run
    ends: `speed` times them all.

    Args:
        every: steps from one move of HiAP's budget to the next, if not the usual ones.
        faster: the training steps of the small network are compiled.
        timed: with a target in time, the network is timed before it is cut out.
        more: arguments of a run.
    """
    penalty = LEARNED.get(method)

    def search(context: Context) -> Search:
        own: dict[str, Any] = {"every": every if penalty is None else 0, "penalty": penalty}
        return SharedSearch(context, faster=faster, timed=timed, **own)

    if config.cost is None:
        return Run(config, out, data=data, first=search, **more)
    elsewhere = replace(
        LatencyTable.load(config.cost), device="shared"
    )  # a run times its network on the table's device
    kind = LatencyCost if method == TIMED else MacRanked
    return Run(config, out, data=data, first=search, cost=lambda model: kind(model, elsewhere), **more)


# -- one-shot rankings ------------------------------------------------------------------------------------------------


def controller_of(run: Peer, kinds: tuple[str, ...], mode: str = "importance") -> tuple[nn.Module, Controller]:
    """A gated copy of the dense model, all open, and the controller of the run's target."""
    gated = hiap.attach(copy.deepcopy(run.dense), kinds, run.config.keep_blocks, logit=8.0)
    hiap.set_gates(gated, temperature=1.0, noise_scale=0.0)
    return gated, Controller(gated, hiap.MacCost(gated), run.target, round_to=run.config.round_to, mode=mode)


def observed(run: Peer, kinds: tuple[str, ...]) -> Controller:
    """A controller that has seen the squared gradients of the open gates."""
    gated, controller = controller_of(run, kinds)
    if kinds not in run.seen:
        gated.train()
        for x, y in run.batches():
            run.loss(gated, x, y).backward()
            controller.observe()
        run.seen[kinds] = controller.importance.clone()
    controller.restore(run.seen[kinds], BATCHES)
    return controller


def by_gate(controller: Controller, flat: Tensor) -> dict[int, Tensor]:
    """The parts of a flat tensor by the id of their gate."""
    parts = torch.split(flat.cpu(), [gate.logit.numel() for gate in controller.all_gates])
    return dict(zip(map(id, controller.all_gates), parts, strict=True))


def taylor(run: Peer, kinds: tuple[str, ...] = ("head", "neuron")) -> nn.Module:
    """Squared gradient of the open gates per MAC, ranked once."""
    return hiap.extract(run.dense, observed(run, kinds).decide(), run.config.round_to)


def taylor_five(run: Peer) -> nn.Module:
    return taylor(run, FIVE)


def magnitudes(controller: Controller) -> Tensor:
    """Squared norm of the weights of every head and neuron, in the order of the gates."""
    scores = {}
    for site, kinds in zip(controller.sites, controller.kinds, strict=True):
        w, block = site.widths, site.block
        rows = block.attn.qkv.weight.view(3, w.heads, w.qk_dim, -1).square().sum((0, 2, 3))
        columns = block.attn.proj.weight.view(-1, w.heads, w.value_dim).square().sum((0, 2))
        scores[id(kinds["head"])] = rows + columns
        scores[id(kinds["neuron"])] = block.mlp.fc1.weight.square().sum(1).view(-1, w.neurons).sum(
            0
        ) + block.mlp.fc2.weight.square().sum(0)
    return torch.cat([scores[id(gate)] for gate in controller.all_gates]).detach()


def magnitude_global(run: Peer) -> nn.Module:
    _, controller = controller_of(run, ("head", "neuron"))
    controller.importance.copy_(magnitudes(controller))
    return hiap.extract(run.dense, controller.decide(), run.config.round_to)


def magnitude_uniform(run: Peer) -> nn.Module:
    """The same share of heads and neurons in every block, the greatest of each."""
    _, controller = controller_of(run, ("head", "neuron"))
    scores = by_gate(controller, magnitudes(controller))
    share = controller.target / run.dense_macs
    dense = controller.sites[0].widths
    heads = max(1, round(share * dense.heads))

    def topology(neurons: list[int]) -> hiap.Topology:
        def best(kinds: dict[str, Any], kind: str, count: int) -> list[int]:
            return scores[id(kinds[kind])].argsort(descending=True)[:count].tolist()

        return hiap.Topology.from_counts(
            run.dense,
            heads=[best(kinds, "head", heads) for kinds in controller.kinds],
            neurons=[best(kinds, "neuron", count) for kinds, count in zip(controller.kinds, neurons, strict=True)],
        )

    blocks, step = len(controller.kinds), run.config.round_to
    neurons = [step] * blocks
    for i in cycle(range(blocks)):  # a step in every block in turn, as long as it fits
        wider = [*neurons[:i], neurons[i] + step, *neurons[i + 1 :]]
        if wider[i] > dense.neurons or cost_of(run, topology(wider)) > controller.target:
            return hiap.extract(run.dense, topology(neurons), step)
        neurons = wider
    raise AssertionError("no block")


def cost_of(run: Peer, topology: hiap.Topology) -> int:
    widths = topology.widths(run.config.round_to)
    return macs_of_widths(run.dense, widths)


def depth(run: Peer) -> nn.Module:
    """Whole blocks dropped by Taylor importance; of the last one as much is kept as fits."""
    controller = observed(run, ("attention", "ffn"))
    worth = by_gate(controller, controller.importance)
    order = sorted(
        range(len(controller.kinds)), key=lambda i: sum(float(worth[id(g)]) for g in controller.kinds[i].values())
    )
    dense = [site.widths for site in controller.sites]
    heads: list[int | None] = [w.heads for w in dense]
    neurons: list[int | None] = [w.neurons for w in dense]

    def topology() -> hiap.Topology:
        return hiap.Topology.from_counts(run.dense, heads=heads, neurons=neurons)

    for i in order:
        heads[i] = neurons[i] = None
        if cost_of(run, topology()) <= controller.target:
            break
    step, fitting = run.config.round_to, {}
    some_heads, some_neurons = range(1, dense[i].heads + 1), range(step, dense[i].neurons + 1, step)
    for kept in product((None, *some_heads), (None, *some_neurons)):
        heads[i], neurons[i] = kept
        if (cost := cost_of(run, topology())) <= controller.target:
            fitting[cost] = kept
    heads[i], neurons[i] = fitting[max(fitting)]
    return hiap.extract(run.dense, topology(), step)


def random_topology(run: Peer) -> nn.Module:
    """Units at random: what a unit is worth is drawn per MAC, so that no kind is favoured."""
    _, controller = controller_of(run, FIVE, mode="gradient")
    generator = torch.Generator().manual_seed(run.config.seed)
    for gate in controller.all_gates:
        gate.logit.data.copy_(torch.rand(gate.logit.shape, generator=generator).log())
    return hiap.extract(run.dense, controller.decide(), run.config.round_to)


def from_scratch(run: Peer, widths: Sequence[Widths]) -> nn.Module:
    """A network of these widths with random weights."""
    torch.manual_seed(run.config.seed)
    arguments = model_arguments(run.config) | {"num_classes": run.data.classes}
    fresh = timm.create_model(run.config.model, **arguments).to(run.context.device)
    counts = {
        "heads": [one.heads for one in widths],
        "qk_dims": [one.qk_dim for one in widths],
        "value_dims": [one.value_dim for one in widths],
        "neurons": [one.neurons for one in widths],
    }
    return hiap.extract(fresh, hiap.Topology.from_counts(fresh, **counts), run.config.round_to)


PEERS: dict[str, Callable[[Peer], nn.Module]] = {
    "taylor": taylor,
    "taylor_five": taylor_five,
    "magnitude_uniform": magnitude_uniform,
    "magnitude_global": magnitude_global,
    "torch_pruning_taylor": torch_pruning_taylor,
    "torch_pruning_isomorphic": torch_pruning_isomorphic,
    "torch_pruning_aligned": torch_pruning_aligned,
    "depth": depth,
    "random": random_topology,
}
LEARNED: dict[str, Callable[[Search], dict[str, Tensor]]] = {"l1": l1, "paper": paper}
OPTIONS: dict[str, dict[str, Any]] = {
    "l1": {"noise_start": 0.0, "noise_end": 0.0, "tau_start": 1.0, "tau_floor": 1.0},
    "paper": {"noise_end": 1.0},
}
TIMED = "hiap_time"  # HiAP with a target in time
GATED = ("hiap", TIMED, *LEARNED)
SCRATCH = "hiap_scratch"
ALIGNED = "torch_pruning_aligned"  # for comparisons of time alone
METHODS = ("hiap", *PEERS, *LEARNED, SCRATCH, TIMED)
