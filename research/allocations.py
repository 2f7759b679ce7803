"""Several networks from one search, from many narrow branches to few wide ones, each trained to the end.

    python research/allocations.py --data DIR --weights vit_tiny_tin128.safetensors --cost TABLE --target 0.614ms
        [--start dinov2_small] [--powers 1,1.5,2,3,5] [--seed 0] [--epochs 8] [--limit 3] [--set KEY=VALUE]

With a target in time, closing a share s of the value of a branch's units is taken to lose 1 - (1 - s)^p of the branch.
The greater p, the sooner whole branches go. All searches are the same; the power differs from the freeze on. The script
prints the widths of each network and its top-1 on validation images after every epoch.
"""

import argparse
import json
import tempfile
from pathlib import Path

import torch

from hiap.budget import allocate
from hiap.models.registry import widths_of
from hiap.training.loop import Run
from hiap.training.phase import Phase
from hiap.training.phases import Search
from prune_tiny_imagenet import STARTS, assignments, configuration, tenths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--weights", required=True, help="weights of the start (safetensors)")
    parser.add_argument("--cost", required=True, help="a table of `hiap measure`")
    parser.add_argument("--target", required=True)
    parser.add_argument("--powers", default="1,1.5,2,3,5")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--limit", type=int, default=3, help="training images of a class in each tenth")
    parser.add_argument("--scored", type=int, default=10, help="validation images of a class")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of all runs, as YAML"
    )
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    given = {"cost": options.cost, "target": options.target, "seed": options.seed, "epochs": options.epochs}
    given |= {"eval_every": 1, "distill_features": 0.0} | assignments(options.set)
    config = configuration(options.start, options.weights, given)
    data = tenths(options.data, config, True, device, options.limit, options.scored)
    for power in map(float, options.powers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            result = Run(config, Path(folder, "run"), data=data, first=forked(power)).go()
            lines = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        record, scores = result.record, [f"{line['top1']:.2f}" for line in lines if "top1" in line]
        share = record["macs"] / record["dense_macs"]
        print(f"power {power:g}, {record['predicted']:.3f} {record['unit']}, {share:.1%} of the MACs")
        print([(one.heads, one.qk_dim, one.value_dim, one.neurons) for one in widths_of(result.model)])
        print(f"{record['hard_top1']:.2f} at the freeze, then", *scores, flush=True)


def forked(power: float) -> type[Search]:
    """The usual search; its decision is made with another power."""

    class Forked(Search):
        def next(self) -> Phase:
            usual, allocate.SHARING = allocate.SHARING, power
            try:
                return super().next()
            finally:
                allocate.SHARING = usual

    return Forked


if __name__ == "__main__":
    main()
