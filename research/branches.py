"""What goes with the units of a branch: the loss measured, against the values that the search gives them.

    python research/branches.py --data DIR --weights vit_tiny_tin128.safetensors [--start dinov2_small] [--limit 3]

DIR is made by `tiny_imagenet.py`. Values are the squared gate gradients of 26 batches with every gate open and
aligned heads. Then, in one branch at a time, the least valuable neurons or dims are closed, or the whole branch. The
script prints the growth of the loss on the held-out tenth of the training images, as a share of what closing the whole
branch costs, and beside it the share of the value of all units that was closed.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from methods import FIVE, Peer, observed
from prune_tiny_imagenet import STARTS, configuration, tenths

SHARES = {"neurons": (0.25, 0.5, 0.75, 0.9), "dims": (0.5, 0.75, 0.875)}


def least(values: torch.Tensor, share: float) -> torch.Tensor:
    """Which units are among so many of the least of their row."""
    closed = torch.zeros_like(values, dtype=torch.bool)
    return closed.scatter(-1, values.argsort(dim=-1)[..., : int(share * values.shape[-1])], True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--weights", required=True, help="weights of the start (safetensors)")
    parser.add_argument("--limit", type=int, default=3, help="images of a class in each tenth")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {"precision": "fp32", "batch_size": 128, "distill_features": 0.0, "align_heads": True}
    config = configuration(options.start, options.weights, given)
    data = tenths(options.data, config, False, device, options.limit)
    with tempfile.TemporaryDirectory() as folder:
        run = Peer(config, Path(folder, "run"), data, lambda peer: peer.dense)
        run.network()
    controller = observed(run, (*FIVE, "attention"))
    gated = controller.model.eval()

    @torch.no_grad()
    def loss(closed: dict[Any, torch.Tensor]) -> float:
        """The loss with these units closed."""
        for gate, units in closed.items():
            gate.logit[units.flatten().to(gate.logit.device)] = -8.0
        total = sum(float(run.loss(gated, x, y)) * len(x) for x, y in data.val(200))
        for gate in closed:
            gate.logit.fill_(8.0)
        return total / data.val_size

    dense, found = loss({}), defaultdict(list)
    for i, (value, gates) in enumerate(zip(controller.values(), controller.kinds, strict=True)):
        for branch, units, kinds in (("ffn", "neurons", ("neuron",)), ("attention", "dims", ("qk_dim", "value_dim"))):
            whole = loss({gates[branch]: torch.ones(1, dtype=torch.bool)}) - dense
            print(f"block {i}: {branch} {whole:.4f}", flush=True)
            for share in SHARES[units]:
                closed = {kind: least(value[kind], share) for kind in kinds}
                lost = loss({gates[kind]: which for kind, which in closed.items()}) - dense
                worth = sum((value[kind] * which).sum(-1) for kind, which in closed.items())
                if branch == "ffn":
                    of_all = worth.sum() / value["neuron"].sum()
                else:  # as in the search: a head loses no more than itself
                    of_all = worth.minimum(value["head"].flatten()).sum() / value["head"].sum()
                found[f"{share:.1%} of the {units}"].append((float(of_all), lost / whole))
                print(f"  {share:.1%} of the {units}: {of_all:.2f} of the value, {lost / whole:.2f} of the loss")
    print("medians: of the value, of the loss, by 1 - (1 - s)^2")
    for name, rows in found.items():
        s, lost = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"  {name}: {s:.2f}, {lost:.2f}, {1 - (1 - s) ** 2:.2f}")


if __name__ == "__main__":
    main()
