"""`hiap bench`: a compact model timed against its dense one."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from hiap.atomic import write_text
from hiap.cli.arguments import listed, positive
from hiap.cli.lookup import check_writable, compact_folder, find_device, random_model
from hiap.errors import InputError

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Time a compact model against its dense one, side by side."
EXAMPLES = """examples:
  hiap bench runs/deit_s
  hiap bench runs/mine --precision bf16 --batch-size 1,64 --mode compile+graph --out speed.json
  hiap bench runs/mine --device cpu --runtime torch,onnx,openvino
  hiap bench runs/mine --merge-tokens 8
  hiap bench runs/mine --precision bf16 --mode compile --quantize fp8
  hiap bench --model deit_base_patch16_224 --topology deit_base_7.4g --paper
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    add = command.add_argument
    add("folder", nargs="?", help="a folder written by hiap.save, or that of a run; or give --model and --topology")
    add("--against", help="what to time a folder against: 'dense' (default), 'none', or the folder of another model")
    add("--model", help="timm name of a dense model, with random weights")
    add("--topology", help="what to keep of --model: a JSON file, deit_base_10.1g or deit_base_7.4g")
    add("--img-size", type=positive, help="input size of --model")
    add("--round-to", type=positive, help="multiple that the widths of --model are rounded to (default 8)")
    add("--device", help="cuda or cpu; CUDA by default if there is any")
    add(
        *("--batch-size", "--batch"),
        dest="batch",
        type=listed(positive),
        metavar="A,B",
        help="images at a time (default 1,256; CPU: 1,8)",
    )
    precisions = "one or more of fp32, tf32, bf16, fp16 (default fp32,bf16; CPU: fp32)"
    add("--precision", type=listed(str), metavar="A,B", help=precisions)
    modes = "one or more of eager, compile, graph, compile+graph (default eager,compile; CPU: eager)"
    add("--mode", type=listed(str), metavar="A,B", help=modes)
    runtimes = "one or more of torch, onnx, openvino, pt2, aoti (default torch)"
    add("--runtime", type=listed(str), metavar="A,B", help=runtimes)
    add("--kernels", action="store_true", help="also time fused kernels (CUDA with Triton, bf16 or fp16)")
    add("--merge-tokens", type=positive, metavar="R", help="also time with R tokens merged in each block")
    add("--quantize", metavar="KIND", help="also time 8-bit weights with torchao: int8, or fp8 (CUDA, beside bf16)")
    add("--warmup", type=positive, help="untimed runs (default 10)")
    add("--runs", type=positive, help="timed runs of each network (default 50)")
    add(
        "--paper", action="store_true", help="defaults by the paper's protocol: fp32, batch 1,256, eager, 50 + 100 runs"
    )
    add("--out", "--json", dest="json", metavar="FILE", help="write all figures here, as JSON")


def run(options: argparse.Namespace) -> int:
    import hiap
    from hiap.export.runtimes import bench_runtimes, find_runtimes
    from hiap.speed.bench import bench, record, table

    device = find_device(options.device)
    check_writable(options.json)
    on_gpu, paper = device.type == "cuda" and not options.paper, options.paper
    runtimes = options.runtime or ["torch"]
    if options.merge_tokens and options.kernels:
        raise InputError("--kernels and --merge-tokens do not go together: the fused kernels do not merge tokens")
    if options.quantize and "torch" not in runtimes:
        raise InputError("--quantize is for the runtime torch; hiap export --quantize int8 writes an 8-bit file")
    networks = _networks(options)
    if options.merge_tokens:
        networks |= {f"{name} merged": hiap.merge_tokens(one, options.merge_tokens) for name, one in networks.items()}
    settings: dict[str, Any] = {
        "batches": options.batch or ([1, 256] if device.type == "cuda" or paper else [1, 8]),
        "precisions": options.precision or (["fp32", "bf16"] if on_gpu else ["fp32"]),
        "modes": options.mode or (["eager", "compile"] if on_gpu else ["eager"]),
        "warmup": options.warmup or (50 if paper else 10),
        "repeat": options.runs or (100 if paper else 50),
        "kernels": options.kernels,
        "quantize": options.quantize,
    }
    others = find_runtimes([name for name in runtimes if name != "torch"], device, settings["precisions"])

    def say(text: str) -> None:
        print(f"timing {text}", file=sys.stderr)

    rows = bench(networks, device, say=say, **settings) if "torch" in runtimes else []
    same = {name: settings[name] for name in ("batches", "precisions", "warmup", "repeat")}
    rows += bench_runtimes(networks, others, say=say, **same)
    found = record(rows, device, settings | {"runtimes": runtimes, "merge_tokens": options.merge_tokens or 0})
    print(f"{found['device']}, torch {found['torch']}")
    print(table(rows, next(iter(networks))))
    if options.json:
        write_text(options.json, json.dumps(found, indent=1) + "\n")
    return 0


def _networks(options: argparse.Namespace) -> dict[str, Any]:
    """The networks to compare by name; the first is the one that others are compared with."""
    import hiap
    from hiap.speed.bench import dense_like, find_topology

    if (options.folder is None) == (options.model is None) or (options.model is None) != (options.topology is None):
        raise InputError("give either a folder, or both --model and --topology")
    if options.model and options.against:
        raise InputError("--against goes with a folder; --model is timed against itself")
    if options.folder and (options.img_size or options.round_to):
        raise InputError("--img-size and --round-to go with --model; a folder is timed as it is")
    if options.model:
        dense = random_model(options)
        topology = find_topology(options.topology)
        return {"dense": dense, "compact": hiap.extract(dense, topology, options.round_to or 8)}
    compact = hiap.load(compact_folder(options.folder))
    if options.against == "none":
        return {"compact": compact}
    if options.against in (None, "dense"):
        return {"dense": dense_like(compact), "compact": compact}
    return {"other": hiap.load(compact_folder(options.against)), "compact": compact}
