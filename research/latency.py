"""How well a latency table predicts whole networks: random topologies, predicted against measured.

    python research/latency.py [--model deit_base_patch16_224] [--dtype bf16] [--batch 256] [--mode compile]
        [--topologies 20] [--table FILE] [--json FILE]

Measures a table first, unless one is given that was measured on this device. Heads, q/k dims, value dims and neurons
are drawn at random for every block, in multiples of 8; one branch in ten is gone. Networks run in the table's mode.
"""

import argparse
import json
import random
import time
from pathlib import Path

import timm
import torch

import hiap
from hiap.budget.deploy import MODES
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.models.registry import widths_of
from hiap.speed.clock import device_name, precision
from hiap.speed.measure import measure, network_cost


def random_topology(model: torch.nn.Module, chance: random.Random) -> hiap.Topology:
    def gone() -> bool:
        return chance.random() < 0.1

    dense = widths_of(model)
    return hiap.Topology.from_counts(
        model,
        heads=[None if gone() else chance.randint(1, w.heads) for w in dense],
        qk_dims=[8 * chance.randint(1, w.qk_dim // 8) for w in dense],
        value_dims=[8 * chance.randint(1, w.value_dim // 8) for w in dense],
        neurons=[None if gone() else 8 * chance.randint(1, w.neurons // 8) for w in dense],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_base_patch16_224")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--mode", choices=sorted(MODES), help="graph by default with CUDA, else eager")
    parser.add_argument("--topologies", type=int, default=20)
    parser.add_argument("--table", type=Path, help="a table to judge, instead of a new one")
    parser.add_argument("--save-table", type=Path, help="keep the new table here")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = timm.create_model(options.model, **({"img_size": options.img_size} if options.img_size else {}))
    model = model.to(device).eval()
    start = time.perf_counter()
    if options.table:
        table = LatencyTable.load(options.table)
    else:
        table = measure(model, device, options.dtype, options.batch, mode=options.mode, name=options.model)
    seconds = time.perf_counter() - start
    if options.save_table:
        table.save(options.save_table)
    cost = LatencyCost(model, table, device_name(device), options.dtype)
    print(
        f"{table.device}, {options.model}, {options.dtype}, batch {options.batch}, {table.mode}; took {seconds:.0f} s"
    )
    rows = [("dense", cost.outside + cost.dense, table.dense)]
    chance = random.Random(0)
    for i in range(options.topologies):
        compact = hiap.extract(model, random_topology(model, chance))
        predicted = cost.of_widths(compact, widths_of(compact))
        with precision(options.dtype) as dtype:
            how = (device, dtype, options.batch, table.mode, "ms", None, table.kernels)
            rows.append((str(i), predicted, network_cost(compact, *how)))
    print("topology  predicted  measured   error")
    for name, predicted, measured in rows:
        print(f"{name:8} {predicted:10.3f} {measured:9.3f} {predicted / measured - 1:+7.1%}")
    worst = max(abs(predicted / measured - 1) for _, predicted, measured in rows[1:])
    print(f"largest error {worst:.1%}")
    if options.json:
        record = {"device": table.device, "torch": torch.__version__, "seconds": seconds, "rows": rows, "worst": worst}
        options.json.write_text(json.dumps(record | {"options": {k: str(v) for k, v in vars(options).items()}}) + "\n")


if __name__ == "__main__":
    main()
