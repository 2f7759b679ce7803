"""Pruning alone, token merging alone, and both: accuracy and time on one device.

    python research/merging.py --compact RUN --weights dense.safetensors --data FOLDER --merge-tokens 0,4,8 --out FILE

RUN is the folder of a run, or one that hiap.save wrote. The dense model is --model (timm's ViT-Ti by default) with
--model-args and --weights, as `hiap evaluate` takes them. FOLDER is whatever `hiap evaluate --data` takes; both models
see images prepared as the compact one wants them. Accuracy is measured in fp32, time in --precision, --mode and
--batch-size, for the optimised networks, all of them in turns. Let nothing else run meanwhile.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hiap
from hiap.cli.arguments import listed
from hiap.cli.lookup import compact_folder
from hiap.speed.bench import bench
from hiap.speed.clock import device_name
from hiap.training.evaluate import evaluate
from hiap.training.setup import dense_model, load_data

SCORED = 64  # images at a time for the accuracy
HEAD = "| network | tokens merged in a block | MACs | top-1 | ms | speed-up |\n|---|---|---|---|---|---|"


def compare(
    networks: dict[str, nn.Module], data: Any, counts: Sequence[int], device: torch.device, settings: dict[str, Any]
) -> list[dict[str, Any]]:
    """A row for each network and number of merged tokens.

    Args:
        settings: batch, precision, mode, warmup and repeat of the measurement.
    """
    forms = {
        f"{name} {r}": model if r == 0 else hiap.merge_tokens(model, r)
        for name, model in networks.items()
        for r in counts
    }
    how = [[settings["batch"]], [settings["precision"]], [settings["mode"]], settings["warmup"], settings["repeat"]]
    times = {row.network: row for row in bench(forms, device, *how, say=lambda text: print(text, flush=True))}
    rows = []
    for name, model in forms.items():
        network, r = name.split()
        scores, row = evaluate(model, data, SCORED), times[f"{name}, optimised"]
        print(f"{name}: {scores['top1']:.2f} %", flush=True)
        own = {"macs": row.macs, "ms": row.ms, "spread_ms": row.spread_ms, "attention": row.attention}
        rows.append({"network": network, "merge_tokens": int(r), "top1": scores["top1"], **own})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [HEAD]
    for row in rows:
        cells = [row["network"], str(row["merge_tokens"]), f"{row['macs'] / 1e9:.3g} G", f"{row['top1']:.2f} %"]
        lines.append(f"| {' | '.join(cells)} | {row['ms']:.2f} | {rows[0]['ms'] / row['ms']:.2f}x |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--compact", required=True, help="folder of a run, or that hiap.save wrote")
    add("--model", default="vit_tiny_patch16_224", help="name of the dense model")
    add("--model-args", type=json.loads, default={}, help="JSON arguments of its constructor")
    add("--weights", help="of the dense model; by default those that come with its name")
    add("--data", required=True, help="what hiap evaluate takes")
    add(
        "--merge-tokens",
        type=listed(int),
        default=[0, 4, 8, 12, 16],
        metavar="A,B",
        help="tokens to merge in each block",
    )
    gpu = torch.cuda.is_available()
    add("--device", default="cuda" if gpu else "cpu")
    add("--precision", default="bf16" if gpu else "fp32")
    add("--mode", default="compile+graph" if gpu else "eager")
    add("--batch-size", type=int, default=256 if gpu else 8)
    add("--runs", type=int, default=50, help="timed runs of each network")
    add("--out", help="JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    given = {name: getattr(options, name) for name in ("model", "model_args", "weights", "data")}
    config = hiap.read_config(None, {"lambda_macro": 0.0, **{k: v for k, v in given.items() if v is not None}})
    compact = hiap.load(compact_folder(options.compact), device)
    networks = {"dense": dense_model(config).to(device).eval(), "compact": compact}
    data = load_data(config, compact, device)
    settings = {"batch": options.batch_size, "precision": options.precision, "mode": options.mode, "warmup": 10}
    settings["repeat"] = options.runs
    rows = compare(networks, data, options.merge_tokens, device, settings)
    print(table(rows))
    if options.out:
        found = {"device": device_name(device), "torch": torch.__version__, **settings, "rows": rows}
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
