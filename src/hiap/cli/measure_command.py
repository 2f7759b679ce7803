"""`hiap measure`: the latency table of a model on a device."""

from __future__ import annotations

import argparse
import os
import sys
import time

from hiap.budget.deploy import RUNTIMES
from hiap.cli.arguments import positive
from hiap.cli.lookup import check_writable, find_device, random_model

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Time the parts of a model over a grid of widths."
EXAMPLES = """examples:
  hiap measure --model deit_base_patch16_224 --device cuda --precision bf16 --batch-size 256 --out h200.json
  hiap prune --model deit_base_patch16_224 --data imagenet/ --target 2.0x --cost h200.json
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    add = command.add_argument
    add("--model", required=True, help="timm name of the dense model; its weights do not matter")
    add("--img-size", type=positive, help="input size; the model's own by default")
    add("--device", help="cuda or cpu; CUDA by default if there is any")
    add("--precision", "--dtype", dest="dtype", help="fp32, tf32, bf16 or fp16 (default bf16; CPU: fp32)")
    add("--batch-size", "--batch", dest="batch", type=positive, help="images at a time (default 256; CPU: 1)")
    add("--runtime", default="torch", choices=RUNTIMES, help="runtime that networks will use (default torch)")
    add("--mode", help="how networks will run: eager, graph (default with CUDA) or compile (optimised and compiled)")
    add("--unit", default="ms", help="ms, or mJ if the GPU reports energy (default ms)")
    add("-o", "--out", "--output", dest="output", metavar="FILE", required=True, help="JSON file to write")


def run(options: argparse.Namespace) -> int:
    from hiap.budget.latency import LatencyCost
    from hiap.export.latency_tables import other_runtime
    from hiap.models.registry import sites
    from hiap.speed.measure import measure

    device, start = find_device(options.device), time.perf_counter()
    check_writable(options.output)
    if (
        device.type == "cpu"
        and hasattr(os, "getloadavg")
        and (load := os.getloadavg()[0]) > 0.5 * (os.cpu_count() or 1)
    ):
        busy = f"other programs use this CPU (load {load:.1f} on {os.cpu_count()} cores)"
        print(f"{busy}: networks will seem slower than their parts", file=sys.stderr)
    model = random_model(options).to(device)
    gpu = device.type == "cuda"
    dtype, batch = options.dtype or ("bf16" if gpu else "fp32"), options.batch or (256 if gpu else 1)
    other = other_runtime(options.runtime, device, dtype, options.unit)
    found = measure(model, device, dtype, batch, options.unit, options.mode, options.model, say=print, other=other)
    found.save(options.output)
    parts = LatencyCost(model, found).of_widths(model, [site.widths for site in sites(model)])
    where = found.device if other is None else f"{found.device}, {found.runtime}"
    print(
        f"{where}, {found.precision}, batch {found.batch}: dense {found.dense:.3f} {found.unit}, "
        f"{parts:.3f} {found.unit} by the table, which targets refer to"
    )
    if abs(parts / found.dense - 1) > 0.1:
        print("the two are more than 10 % apart: the device was busy, or its speed varies too much")
    print(f"saved in {options.output}, after {time.perf_counter() - start:.0f} s")
    return 0
