"""The methods that `compare.py` sets side by side. All share HiAP's loop, data, optimiser, schedule and distillation.

Peers make a small network from the dense one and train it for the whole run. `l1` and `paper` learn their gates for
twice as long as HiAP searches, and are cut to the same budget by the rank of their gates.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any, ClassVar

import timm
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hiap
from hiap.budget.controller import Controller
from hiap.budget.target import Target
from hiap.data.sources import Data
from hiap.nn.compact import Widths
from hiap.nn.granularities import PAPER
from hiap.pruning.count import expected_counts, macs_of_widths
from hiap.training.config import Config
from hiap.training.evaluate import evaluate
from hiap.training.loop import Run
from hiap.training.objective import cost_terms, feasibility_terms
from hiap.training.setup import make_teacher, model_arguments

BATCHES = 26  # that one-shot rankings are estimated on
FIVE = (*PAPER, "qk_dim")


class Peer(Run):
    """A run that trains a network made from the dense one: no gates, no search, nothing saved."""

    def __init__(self, config: Config, out: Path, data: Data, make: Callable[[Peer], nn.Module]) -> None:
        super().__init__(config, out, data=data)
        self.make = make

    def network(self) -> nn.Module:
        """What is to be trained."""
        self.teacher = make_teacher(self.config, self.dense, self.norm, self.parts.other_teacher)
        if self.config.align_heads:
            self._align()
        return self.make(self).to(self.device)

    def train(self) -> nn.Module:
        self.raw, self.stage, self.average = self.network(), "recover", None
        self._prepare()
        self.record["top1_before"] = self._accuracy()
        self._stage_loop(self.stop)
        trained = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        network: nn.Module = (self.average.module if self.average else trained).eval()
        self.record["top1"] = evaluate(network, self.data, self.config.batch_size, self.accelerator.autocast)["top1"]
        return network

    def save_checkpoint(self) -> None:
        pass

    def _facts(self, widths: Any) -> dict[str, Any]:
        return {}

    def _widths(self) -> list[Any]:
        return []

    def loss(self, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        """What the run minimises, for a ranking."""
        return self._weighted(self._terms(model, x, y))

    @property
    def target(self) -> float:
        """The MACs that are allowed."""
        return Target.parse(self.config.target).absolute(self.dense_macs)

    def batches(self) -> Any:
        return islice(self.data.train(0, 0, self.config.batch_size, 0, 1), BATCHES)


class Penalised(Run):
    """Gates learned under a penalty until they meet the target, then cut to it by their rank at the freeze."""

    options: ClassVar[dict[str, Any]]

    def penalty(self) -> dict[str, tuple[float | Tensor, Tensor]]:
        """Terms to add to the loss, each with its weight."""
        raise NotImplementedError

    def missed(self) -> Tensor:
        """1 as long as the expected cost is above the target, then 0."""
        assert self.config.target is not None
        target = Target.parse(self.config.target).absolute(self.dense_macs)
        return (self.cost.total(expected_counts(self.raw)).detach() > target).float()

    def _terms(self, model: nn.Module, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        terms = super()._terms(model, x, target)
        if self.stage == "search":
            penalty = self.penalty()
            self.weights = {name: weight for name, (weight, _) in penalty.items()}
            terms |= {name: value for name, (_, value) in penalty.items()}
        return terms

    def _weighted(self, terms: dict[str, Tensor]) -> Tensor:
        own = [weight * terms[name] for name, weight in getattr(self, "weights", {}).items() if name in terms]
        rest = {name: value for name, value in terms.items() if name not in getattr(self, "weights", {})}
        return super()._weighted(rest) + sum(own)

    def _control(self, controller: Controller, scale: float) -> None:
        pass  # nothing is projected: the penalty moves the gates, the rank decides


class L1(Penalised):
    """ViT-Slim's way: soft masks, without noise, under an l1 penalty; then a threshold."""

    options: ClassVar[dict[str, Any]] = {"noise_start": 0.0, "noise_end": 0.0, "tau_start": 1.0, "tau_floor": 1.0}

    def penalty(self) -> dict[str, tuple[float | Tensor, Tensor]]:
        masks = torch.cat([gate.probability().flatten() for gate in hiap.gates(self.raw)])
        weight = 0.05  # at the start as strong as the task's gradient in a median mask
        return {"l1": (weight * self.missed(), masks.sum())}


class Paper(Penalised):
    """The paper's penalties (its ratio 2:1), noise and temperature; as much stronger as the search is shorter."""

    options: ClassVar[dict[str, Any]] = {"noise_end": 1.0}

    def penalty(self) -> dict[str, tuple[float | Tensor, Tensor]]:
        config = self.config
        terms = cost_terms(self.raw, self.cost)
        terms |= feasibility_terms(self.raw, config.min_heads, config.min_value_dims, config.min_neurons)
        times = self.missed() * 300 * self.per_epoch / self.schedule.freeze
        weights = {"macro": 0.9 * times, "micro": 0.45 * times}
        return {name: (weights.get(name, 1.0), value) for name, value in terms.items()}


# -- one-shot rankings ------------------------------------------------------------------------------------------------


def controller_of(run: Peer, kinds: tuple[str, ...], mode: str = "importance") -> tuple[nn.Module, Controller]:
    """A gated copy of the dense model, all open, and the controller of the run's target."""
    gated = hiap.attach(copy.deepcopy(run.dense), kinds, run.config.keep_blocks, logit=8.0)
    hiap.set_gates(gated, temperature=1.0, noise_scale=0.0)
    return gated, Controller(gated, hiap.MacCost(gated), run.target, round_to=run.config.round_to, mode=mode)


def observed(run: Peer, kinds: tuple[str, ...]) -> Controller:
    """A controller that has seen the squared gradients of the open gates."""
    gated, controller = controller_of(run, kinds)
    gated.train()
    for x, y in run.batches():
        run.loss(gated, x, y).backward()
        controller.observe()
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
        scores[id(kinds["neuron"])] = block.mlp.fc1.weight.square().sum(1) + block.mlp.fc2.weight.square().sum(0)
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
    controller = observed(run, ("attention", "block"))
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
    fresh = timm.create_model(run.config.model, **arguments).to(run.device)
    counts = {
        "heads": [one.heads for one in widths],
        "qk_dims": [one.qk_dim for one in widths],
        "value_dims": [one.value_dim for one in widths],
        "neurons": [one.neurons for one in widths],
    }
    return hiap.extract(fresh, hiap.Topology.from_counts(fresh, **counts), run.config.round_to)


# -- Torch-Pruning ----------------------------------------------------------------------------------------------------


def torch_pruning(run: Peer, isomorphic: bool) -> nn.Module:
    """The package's Taylor ranking with head pruning; the ratio is the least that meets the target.

    Whole heads go: where that leaves more than 1 % of the target, their ratio stays, and that of dims is the least.
    Widths are not rounded: in multiples of 8 the width of the network alone moves its MACs by several per cent.
    """
    import torch_pruning as tp

    dense = copy.deepcopy(run.dense).train()
    for x, y in run.batches():
        run.loss(dense, x, y).backward()
    gradients = {name: p.grad for name, p in dense.named_parameters()}

    def least(high: float, best: nn.Module | None, heads: float | None = None) -> tuple[float, nn.Module]:
        low = 0.0
        for _ in range(10):
            ratio = (low + high) / 2
            model = _torch_pruned(tp, run, gradients, (ratio, heads or ratio), isomorphic)
            if counted_macs(model, run) <= run.target:
                high, best = ratio, model
            else:
                low = ratio
        assert best is not None
        return high, best

    ratio, model = least(0.9, None)
    return model if counted_macs(model, run) >= 0.99 * run.target else least(ratio, model, heads=ratio)[1]


def _torch_pruned(
    tp: Any, run: Peer, gradients: dict[str, Tensor | None], ratios: tuple[float, float], isomorphic: bool
) -> nn.Module:
    """With these shares of dims and of heads gone."""
    model: Any = copy.deepcopy(run.dense).train()
    for name, p in model.named_parameters():
        p.grad = gradients[name]
    for block in model.blocks:
        block.attn.attn_dim = -1  # follow the width of the input instead of remembering it
    pruner = tp.pruner.BasePruner(
        model,
        next(iter(run.data.val(1)))[0],
        importance=tp.importance.GroupTaylorImportance(),
        global_pruning=True,
        isomorphic=isomorphic,
        pruning_ratio=ratios[0],
        max_pruning_ratio=0.9,
        num_heads={block.attn.qkv: block.attn.num_heads for block in model.blocks},
        prune_num_heads=True,
        prune_head_dims=True,
        head_pruning_ratio=ratios[1],
        ignored_layers=[model.head],
    )
    pruner.step()
    for block in model.blocks:
        attn = block.attn
        attn.num_heads = pruner.num_heads[attn.qkv]
        width, attn.head_dim = attn.head_dim, attn.qkv.out_features // (3 * attn.num_heads)
        queries = attn.qkv.out_features // 3
        with torch.no_grad():  # fused attention scales by the new width; the scores were scaled by the old
            for tensor in (attn.qkv.weight, attn.qkv.bias):
                if tensor is not None:
                    tensor[:queries] *= (attn.head_dim / width) ** 0.5
    model.zero_grad()
    return model


def counted_macs(model: nn.Module, run: Peer) -> int:
    """torch's own count of one image, with attention in its plain form."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
        copy.deepcopy(model).eval()(next(iter(run.data.val(1)))[0])
    return counter.get_total_flops() // 2


def torch_pruning_taylor(run: Peer) -> nn.Module:
    return torch_pruning(run, isomorphic=False)


def torch_pruning_isomorphic(run: Peer) -> nn.Module:
    return torch_pruning(run, isomorphic=True)


PEERS: dict[str, Callable[[Peer], nn.Module]] = {
    "taylor": taylor,
    "taylor_five": taylor_five,
    "magnitude_uniform": magnitude_uniform,
    "magnitude_global": magnitude_global,
    "torch_pruning_taylor": torch_pruning_taylor,
    "torch_pruning_isomorphic": torch_pruning_isomorphic,
    "depth": depth,
    "random": random_topology,
}
LEARNED = {"l1": L1, "paper": Paper}
TIMED = "hiap_time"  # HiAP with a target in time
GATED = {"hiap": Run, TIMED: Run, **LEARNED}
SCRATCH = "hiap_scratch"
METHODS = ("hiap", *PEERS, *LEARNED, SCRATCH, TIMED)
