"""A measured cost against MACs at equal speed: which prunes to the better network?

    python research/latency_target.py --data DIR --weights vit_tiny_tin128.safetensors --runs runs/equal_speed \\
        [--start dinov2_small] [--speedup 2.0] [--mode compile] [--methods latency,macs] [--seeds 0,1] [--epochs 15] \\
        [--set KEY=VALUE] [--json FILE]

DIR is made by `tiny_imagenet.py`. A table is measured on this device first (bf16, batch 256). Both methods have the
same gates and the same target: by the table, so many times the speed of timm's dense model in that mode, compiled or
in a CUDA graph. `latency` weighs units by the time they save, `macs` by their MACs. Networks are scored on the
validation set. What is done is kept under `--runs` and not done again; with `--json` all networks found there are
timed in the end, side by side, and the records written.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import timm
import torch
from torch import nn

import hiap
from hiap.budget.deploy import MODES
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.models.family import Site
from hiap.models.registry import sites
from hiap.nn.compact import Widths
from hiap.speed.bench import bench
from hiap.speed.measure import measure
from hiap.training.loop import prune
from prune_tiny_imagenet import STARTS, assignments, configuration, tenths
from record import network_of
from tiny_imagenet import CLASSES

RECORD = "record.json"


class MacRanked(LatencyCost):
    """Time by the table, but units give way by their MACs."""

    def __init__(self, model: nn.Module, table: LatencyTable) -> None:
        super().__init__(model, table)
        self.macs = hiap.MacCost(model)

    def price(self, site: Site, widths: Widths) -> float:
        return self.macs.block(site, widths)


METHODS = {"latency": LatencyCost, "macs": MacRanked}


def dense_model(options: argparse.Namespace, device: torch.device) -> nn.Module:
    name, size, _ = STARTS[options.start]
    return timm.create_model(name, img_size=size, num_classes=CLASSES).to(device).eval()


def clock(networks: dict[str, nn.Module], options: argparse.Namespace, device: torch.device) -> dict[str, float]:
    """Milliseconds of networks, and of each optimised, in the mode they will run in."""
    mode = {"compile": "compile+graph"}.get(options.mode, options.mode)
    return {row.network: row.ms for row in bench(networks, device, [options.batch], ["bf16"], [mode], 10, 50)}


def prepare(options: argparse.Namespace, device: torch.device) -> tuple[LatencyTable, str]:
    """The table and the target of all runs; measured once."""
    file, goal = options.runs / "table.json", options.runs / "setting.json"
    names = ("start", "speedup", "mode", "batch", "epochs", "lr", "limit", "set")
    setting = {"weights": Path(options.weights).name} | {name: getattr(options, name) for name in names}
    if not goal.exists():
        dense = dense_model(options, device)
        options.runs.mkdir(parents=True, exist_ok=True)
        measure(dense, device, "bf16", options.batch, mode=options.mode, name=STARTS[options.start][0]).save(file)
        times = clock({"dense": dense}, options, device)
        print(", ".join(f"{name} {ms:.3f} ms" for name, ms in times.items()), flush=True)
        goal.write_text(json.dumps(setting | {"target": f"{times['dense'] / options.speedup:.4f}ms"}))
    table, found = LatencyTable.load(file), json.loads(goal.read_text())
    target: str = found.pop("target")
    if found != setting:
        raise SystemExit(f"{options.runs} holds runs of another setting: {found}; take another folder for {setting}")
    print(f"{options.mode}: dense by the table {table.dense:.3f} ms; target {target}", flush=True)
    return table, target


def train(
    options: argparse.Namespace, table: LatencyTable, target: str, method: str, seed: int, device: torch.device
) -> None:
    out = options.runs / f"{method}_{seed}"
    if (out / RECORD).exists():
        return
    given: dict[str, Any] = {"target": target, "cost": str(options.runs / "table.json"), "seed": seed}
    given |= {"epochs": options.epochs, "lr": options.lr, "eval_every": 1000}
    if options.limit < 50:
        given["batch_size"] = 200
    given |= assignments(options.set)
    config = configuration(options.start, options.weights, given)
    data = tenths(options.data, config, True, device, options.limit)
    result = prune(config, out, resume=out.exists(), data=data, cost=lambda model: METHODS[method](model, table))
    record = result.record | {"topology": [vars(site.widths) for site in sites(result.model)]}
    own = {"start": options.start, "method": method, "target": target, "mode": options.mode, "device": table.device}
    (out / RECORD).write_text(json.dumps(own | given | {"torch": torch.__version__} | record) + "\n")
    share = record["macs"] / record["dense_macs"]
    print(f"{options.start} {method} seed {seed}: top-1 {record['top1']:.2f} %, {share:.1%} of the MACs", flush=True)


def report(options: argparse.Namespace, device: torch.device) -> None:
    """Time all networks side by side (with random weights: speed ignores them) and write the records."""
    records = {file.parent.name: json.loads(file.read_text()) for file in sorted(options.runs.glob(f"*/{RECORD}"))}
    networks = {"dense": dense_model(options, device)}
    for name, record in records.items():
        networks[name] = network_of(record["topology"], networks["dense"])
    times = clock(networks, options, device)
    lines = []
    for folder, record in records.items():
        keys = {"dense": "dense", "dense, optimised": "dense, optimised", folder: "compact"}
        keys[f"{folder}, optimised"] = "compact, optimised"
        record["ms"] = {name: times[key] for key, name in keys.items()}
        lines.append(json.dumps(record) + "\n")
        method = record.get("method") or record["arm"]  # the old name
        print(
            f"{options.start} {method} seed {record['seed']}: top-1 {record['top1']:.2f} %, "
            f"{record['macs'] / record['dense_macs']:.1%} of the MACs, predicted {record['predicted']:.3f} ms; "
            + ", ".join(f"{name} {ms:.3f} ms" for name, ms in record["ms"].items())
        )
    options.json.write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--start", choices=sorted(STARTS), default="vit_tiny")
    parser.add_argument("--weights", required=True, help="weights of the start (safetensors)")
    parser.add_argument("--runs", type=Path, required=True, help="folder for the table and the runs")
    parser.add_argument("--speedup", type=float, default=2.0)
    parser.add_argument("--mode", choices=sorted(MODES), default="compile", help="that networks will run in")
    parser.add_argument("--methods", "--arms", default="latency,macs", help="--arms is the old spelling")
    parser.add_argument("--seeds", default="0,1", help="may be empty: only the table, only the times")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--batch", type=int, default=256, help="images a forward, for the table and the clock")
    parser.add_argument("--limit", type=int, default=50, help="images of a class in each tenth; fewer for a quick try")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="an option of the runs, as YAML"
    )
    parser.add_argument("--json", type=Path, help="time all networks and write the records here")
    options = parser.parse_args()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    table, target = prepare(options, device)
    for seed in [int(seed) for seed in options.seeds.split(",") if seed]:
        for method in options.methods.split(","):
            train(options, table, target, method, seed, device)
    if options.json:
        report(options, device)


if __name__ == "__main__":
    main()
