"""How well a latency table predicts whole networks: random and chosen topologies, predicted against measured.

    python research/latency.py [--model deit_base_patch16_224] [--dtype bf16] [--batch 256] [--mode compile]
        [--runtime onnx] [--topologies 20] [--table FILE] [--json FILE]
    python research/latency.py --start vit_tiny --records FILE [--chosen 10] ... (the same options)

Measures a table first, unless one is given that was measured on this device. Heads, q/k dims, value dims and neurons
are drawn at random for every block, in multiples of 8; one branch in ten is gone. With `--records`, files of
`compare.py`, the last networks that HiAP chose for this start are judged too. Networks run as the table says. On a CPU
each takes turns with the dense one, and what is judged is their ratio, because the speed of such a machine changes.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import timm
import torch

import hiap
from hiap.budget.deploy import MODES, RUNTIMES
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.export.latency_tables import other_runtime
from hiap.models.registry import widths_of
from hiap.speed.clock import device_name, materialise
from hiap.speed.measure import measure, network_costs
from methods import TIMED
from prune_tiny_imagenet import STARTS
from record import network_of, read


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


def networks(model: torch.nn.Module, options: argparse.Namespace) -> Iterator[tuple[str, torch.nn.Module]]:
    """Random networks, then the last ones that HiAP chose."""
    chance = random.Random(0)
    for i in range(options.topologies):
        yield f"random {i}", hiap.extract(model, random_topology(model, chance))
    chosen = {}
    for record in (record for file in options.records for record in read(file)):
        if (
            record.start == options.start
            and record.method in ("hiap", TIMED)
            and record.final is True
            and record.widths
        ):
            target = record.target.split()[0]
            chosen[f"{record.method} {target}, {record.epochs} epochs, seed {record.seed}"] = record.widths
    for name, widths in list(chosen.items())[-options.chosen :]:
        yield name, network_of(widths, model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="deit_base_patch16_224")
    parser.add_argument("--start", choices=sorted(STARTS), help="a dense model of compare.py, instead of --model")
    parser.add_argument("--records", type=Path, nargs="+", default=[], help="judge networks that searches chose, too")
    parser.add_argument("--chosen", type=int, default=10, help="how many of those at most")
    parser.add_argument("--img-size", type=int)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--mode", choices=sorted(MODES), help="graph by default with CUDA, else eager")
    parser.add_argument("--runtime", choices=RUNTIMES, default="torch", help="that networks run in, on the CPU")
    parser.add_argument("--topologies", type=int, default=20)
    parser.add_argument("--table", type=Path, help="a table to judge, instead of a new one")
    parser.add_argument("--save-table", type=Path, help="keep the new table here")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() and options.runtime == "torch" else "cpu")
    other = other_runtime(options.runtime, device, options.dtype)
    torch.manual_seed(0)
    if options.start:
        options.model, options.img_size, _ = STARTS[options.start]
    model = timm.create_model(options.model, **({"img_size": options.img_size} if options.img_size else {}))
    model = materialise(model, device).eval()  # some runtimes leave out the zeros that new weights begin with
    start = time.perf_counter()
    if options.table:
        table = LatencyTable.load(options.table)
    else:
        how = (options.dtype, options.batch, "ms", options.mode, options.model)
        table = measure(model, device, *how, other=other)
    seconds = time.perf_counter() - start
    if options.save_table:
        table.save(options.save_table)
    cost = LatencyCost(model, table, device_name(device))
    where = f"{table.device}, {options.model}, {table.precision}, batch {table.batch}"
    print(f"{where}, {table.mode if other is None else other.name}; took {seconds:.0f} s")
    named = [("dense", model), *networks(model, options)]
    costs = list(network_costs((network for _, network in named), device, table, other))
    scale = table.dense / costs[0] if device.type == "cpu" else 1.0
    rows = [
        (name, cost.of_widths(network, widths_of(network)), scale * measured)
        for (name, network), measured in zip(named, costs, strict=True)
    ]
    print(f"{'topology':40} predicted  measured   error")
    for name, predicted, measured in rows:
        print(f"{name:40} {predicted:9.3f} {measured:9.3f} {predicted / measured - 1:+7.1%}")
    worst = {}
    for kind in ("random", "hiap"):
        errors = [abs(predicted / measured - 1) for name, predicted, measured in rows if name.startswith(kind)]
        if errors:
            worst[kind] = max(errors)
            what = "random topologies" if kind == "random" else "topologies that HiAP chose"
            print(f"{len(errors)} {what}: largest error {worst[kind]:.1%}")
    if options.json:
        record = {"device": table.device, "torch": torch.__version__, "seconds": seconds, "rows": rows, "worst": worst}
        options.json.write_text(json.dumps(record | {"options": {k: str(v) for k, v in vars(options).items()}}) + "\n")


if __name__ == "__main__":
    main()
