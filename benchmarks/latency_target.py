"""A measured cost against MACs at equal speed: which prunes to the better network?

    python benchmarks/latency_target.py --data DIR --weights vit_tiny_tin128.safetensors --json FILE \\
        [--start dinov2_small] [--speedup 2.0] [--mode compile] [--arms latency,macs] [--seeds 0,1] [--epochs 15]

DIR holds the sheets of Tiny-ImageNet. A table is measured on this device first (bf16, batch 256). Both arms have the
same gates and the same target: by the table, so many times the speed of timm's dense model in that mode, compiled or
in a CUDA graph. `latency` weighs units by the time they save, `macs` by their MACs. After each run the network is timed
as the table is, and optimised and compiled. One JSON record a run is appended to FILE, scored on the validation sheet.
"""

import argparse
import json
import tempfile
from pathlib import Path

import timm
import torch
from prune_tiny_imagenet import STARTS, configuration, sheets
from tiny_imagenet import CLASSES

import hiap
from hiap.bench import bench
from hiap.families.timm import Site, ViT
from hiap.latency import MODES, LatencyCost, LatencyTable
from hiap.measuring import measure
from hiap.train import prune


class MacRanked(LatencyCost):
    """Time by the table, but units give way by their MACs."""

    def __init__(self, model: ViT, table: LatencyTable) -> None:
        super().__init__(model, table)
        self.macs = hiap.MacCost(model)

    def prices(self, site: Site, p: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return self.macs.prices(site, p)


ARMS = {"latency": LatencyCost, "macs": MacRanked}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with the sheets")
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--weights", required=True, help="weights of the start (safetensors)")
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--mode", choices=sorted(MODES), default="graph", help="that networks will run in")
    parser.add_argument("--arms", default="latency,macs")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=256, help="images a forward, for the table and the clock")
    parser.add_argument("--limit", type=int, default=50, help="images a class of each sheet; less for a quick try")
    parser.add_argument("--json", type=Path, required=True, help="append one record a run here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, size, _ = STARTS[options.start]
    dense = timm.create_model(name, img_size=size, num_classes=CLASSES).to(device).eval()
    table = measure(dense, device, "bf16", options.batch, mode=options.mode, name=name)
    stock = {"compile": "compile+graph"}.get(options.mode, options.mode)
    row = bench({"dense": dense}, device, [options.batch], ["bf16"], [stock], 10, 50)[0]
    target = f"{row.ms / options.speedup:.4f}ms"
    print(f"dense {row.ms:.3f} ms ({stock}), by the table {table.dense:.3f} ms; target {target}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "table.json")
        table.save(file)
        for seed in map(int, options.seeds.split(",")):
            data = sheets(options.data, options.start, True, device, seed, options.limit)
            for arm in options.arms.split(","):
                given = {"target": target, "cost": str(file), "epochs": options.epochs, "lr": options.lr}
                config = configuration(options.start, options.weights, given | {"seed": seed})
                if options.limit < 50:
                    config.batch_size = 200
                out = Path(folder, f"{arm}{seed}")
                result = prune(config, out, data=data, cost=lambda model, arm=arm: ARMS[arm](model, table))
                modes = ["graph", "compile+graph"] if device.type == "cuda" else ["eager"]
                networks = {"dense": dense, "compact": result.model}
                rows = bench(networks, device, [options.batch], ["bf16"], modes, 10, 50)
                record = {
                    "start": options.start,
                    "arm": arm,
                    "seed": seed,
                    "target": target,
                    "mode": options.mode,
                    "epochs": options.epochs,
                    "lr": options.lr,
                    "device": table.device,
                    "torch": torch.__version__,
                    "ms": {f"{row.network} {row.mode}": row.ms for row in rows},
                    "topology": [vars(site.widths) for site in hiap.families.timm.sites(result.model)],
                    **result.record,
                }
                with options.json.open("a") as lines:
                    lines.write(json.dumps(record) + "\n")
                print(
                    f"{options.start} {arm} seed {seed}: top-1 {record['top1']:.2f} %, "
                    f"{record['macs'] / record['dense_macs']:.1%} MACs, "
                    f"predicted {record['dense_predicted'] / record['predicted']:.2f}x; "
                    + ", ".join(f"{key} {ms:.3f} ms" for key, ms in record["ms"].items()),
                    flush=True,
                )


if __name__ == "__main__":
    main()
