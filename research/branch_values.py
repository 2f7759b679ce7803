"""What whole branches are worth, by gradients and by leaving them out: the networks that either chooses for a time.

    python research/branch_values.py --data DIR --weights vit_tiny_tin128.safetensors --cost TABLE
        [--targets 0.768ms,0.614ms] [--start dinov2_small] [--limit 3]

DIR is made by `tiny_imagenet.py`, TABLE by `hiap measure`. Units are valued by the squared gradients of 26 batches,
with every gate open and aligned heads. Whole branches are valued in the same way, or by the loss without them on some
training images, about as many as those of the held-out tenth; and what goes of a branch with a part of its units is
taken to be 1 - (1 - s)^2 of it, or measured on the same images. Networks are cut at once and not trained. The script
prints their loss and top-1 on the held-out tenth.
"""

import argparse
import copy
import tempfile
from itertools import islice
from pathlib import Path

import torch

import hiap
from hiap.budget.controller import Controller
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.budget.target import Target
from hiap.pruning.topology import set_topology
from methods import BATCHES, FIVE, Peer, observed
from prune_tiny_imagenet import STARTS, configuration, tenths

KINDS = (*FIVE, "attention")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--weights", required=True, help="weights of the start (safetensors)")
    parser.add_argument("--cost", type=Path, required=True, help="a table of `hiap measure`")
    parser.add_argument("--targets", default="0.768ms,0.614ms")
    parser.add_argument("--limit", type=int, default=3, help="images of a class in each tenth")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {"precision": "fp32", "batch_size": 128, "distill_features": 0.0, "align_heads": True}
    config = configuration(options.start, options.weights, given)
    data, table = tenths(options.data, config, False, device, options.limit), LatencyTable.load(options.cost)
    with tempfile.TemporaryDirectory() as folder:
        run = Peer(config, Path(folder, "run"), data, lambda peer: peer.dense)
        run.network()
    squared = observed(run, KINDS).importance
    learned = list(islice(run.batches(), -(-data.val_size // config.batch_size)))

    def controller(target: float) -> Controller:
        gated = hiap.attach(copy.deepcopy(run.dense), KINDS, logit=8.0).eval()
        return Controller(gated, LatencyCost(gated, table), target)

    objective = run.objective
    with torch.no_grad():
        goals = [objective.goals(run.dense, x) for x, _ in learned]

    @torch.no_grad()
    def loss_of(model: torch.nn.Module) -> torch.Tensor:
        terms = [objective.terms(model, x, y, known) for (x, y), known in zip(learned, goals, strict=True)]
        return torch.stack([objective.weighted(one) for one in terms]).mean()

    cost = LatencyCost(run.dense, table)
    dense = cost.outside + cost.dense
    least = controller(dense * 0.999)
    least.restore(torch.where(least.by_measure, 0.0, squared), BATCHES)
    least.measure(lambda: loss_of(least.model))
    least.measure_curves(lambda: loss_of(least.model))
    names = [name for name, module in least.model.named_modules() if any(module is gate for gate in least.measured)]
    print("growth of the loss without a branch, squared gradient of its gate")
    for name, *values in zip(
        names, least.importance[least.by_measure].tolist(), squared[least.by_measure].tolist(), strict=True
    ):
        print(f"  {name:32} {values[0]:8.4f} {values[1]:.2e}", flush=True)
    print("target, branches by, loss, top-1, widths (heads, q/k dims, value dims, neurons)")
    for text in options.targets.split(","):
        for how, values, curves in (
            ("gradients", squared, None),
            ("leaving out", least.importance, None),
            ("leaving out, and parts", least.importance, least.curves),
        ):
            timed = controller(Target.parse(text).absolute(dense))
            timed.restore(values, BATCHES, curves)
            topology = timed.decide()
            set_topology(timed.model, topology)
            widths = [(w.heads, w.qk_dim, w.value_dim, w.neurons) for w in topology.widths(config.round_to)]
            with torch.no_grad():
                rows = [(run.loss(timed.model, x, y), timed.model(x).argmax(1) == y) for x, y in data.val(200)]
            top1 = 100 * torch.cat([right for _, right in rows]).float().mean()
            print(
                f"{text}, {how}, {torch.stack([lost for lost, _ in rows]).mean():.3f}, {top1:.2f}, {widths}", flush=True
            )


if __name__ == "__main__":
    main()
