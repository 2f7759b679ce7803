"""Folders of runs made by hand: of any length and state, without training."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch

import hiap
from hiap.nn.compact import Widths
from hiap.pruning.count import geometry
from hiap.pruning.topology import Topology, set_topology
from hiap.training.schedule import Schedule
from hiap.training.snapshots import snapshot

STEPS = 100  # of an epoch
SEARCH = 0.6  # of the epochs


def made_run(
    folder: Path,
    epochs: int = 20,
    *,
    depth: int = 4,
    heads: int = 3,
    dim: int = 24,
    share: float = 0.5,
    taught: bool = True,
    done: float = 1.0,
    target: str = "50%",
) -> Path:
    """A run of so many epochs, of which a share is done; one that is whole has its report and its compact model."""
    torch.manual_seed(0)
    options = {"img_size": 16, "patch_size": 4, "embed_dim": dim, "depth": depth, "num_heads": heads, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **options).eval()
    dense = list(Topology.from_counts(model).dense)
    dense_macs, params = hiap.macs(model), sum(p.numel() for p in model.parameters())
    record: dict[str, Any] = {
        "dense_macs": dense_macs,
        "dense_params": params,
        "objective": "labels",
        "dense_top1": 80.0,
        "dense_widths": [asdict(widths) for widths in dense],
        "geometry": geometry(model),
        "steps_per_epoch": STEPS,
        "dense_epochs": 0,
    }
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(
        f"model: vit_tiny_patch16_224\ndata: photos/\ntarget: {target}\nepochs: {epochs}\n"
    )
    start = {"command": "hiap prune --data photos/ --out <run>", "started": "2026-01-02T03:04:05+00:00", "processes": 1}
    start |= {
        "device": "a device",
        "system": "Linux",
        "python": "3.11",
        "versions": {"hiap": "0.1.0", "torch": "2.8.0"},
    }
    (folder / "environment.json").write_text(json.dumps([start]))
    gated, worth = hiap.attach(model), np.random.default_rng(0).uniform(size=(depth, 4 * dim))
    freeze, schedule = SEARCH * epochs, Schedule(epochs * STEPS, int(SEARCH * epochs * STEPS))
    topology, lines = None, []
    for i in range(61):
        at = freeze * i / 60
        if at > done * epochs:
            break
        noisy = worth + 0.05 * np.random.default_rng(i).normal(size=worth.shape) * (i < 60)
        topology = kept(gated, dense, noisy, 1 - (1 - share) * min(i / 50, 1.0))
        set_topology(gated, topology, 0.2 + i / 15)
        line = {"step": int(at * STEPS), "epoch": at, "temperature": schedule.temperature(int(at * STEPS))}
        cost = hiap.macs(gated) / dense_macs
        line |= {"hard": cost, "expected": 0.95 * cost + 0.03, "allowed": cost + 0.01, "target": share}
        lines.append(line | snapshot(gated, topology))
    write_lines(folder / "gates.jsonl", lines)
    write_lines(folder / "metrics.jsonl", metrics(epochs, done, taught))
    if done < 1:
        saved = folder / f"checkpoint-{int(done * epochs * STEPS):09}"
        saved.mkdir()
        (saved / "state.json").write_text(json.dumps({"record": record}))
        return folder
    assert topology is not None
    compact = hiap.extract(gated, topology)
    hiap.save(compact, folder / "compact", [f"class {i}" for i in range(5)])
    speed = {"batch": 1, "precision": "fp32", "dense_ms": 4.0, "dense_form": "eager", "compact_ms": 3.1}
    record |= {"macs": hiap.macs(compact), "params": sum(p.numel() for p in compact.parameters()), "top1": 79.2}
    record |= {"top5": 95.0, "freeze_step": int(freeze * STEPS), "seconds": 61.0, "shrunk": True}
    record["answers"] = {"neither": 15, "compact_only": 4, "dense_only": 5, "both": 76}
    record["speed"] = [{**speed, "compact_form": "eager, optimised"}, {**speed, "batch": 8, "compact_form": "eager"}]
    (folder / "report.json").write_text(json.dumps(record))
    return folder


def kept(model: Any, dense: list[Widths], worth: Any, share: float) -> Topology:
    """The units of greatest worth, more of them in later blocks."""
    depth, rows = len(dense), {"heads": [], "value_dims": [], "neurons": []}
    for i, widths in enumerate(dense):
        keep = min(1.0, share * (0.6 + 0.9 * i / depth))
        open_heads = np.sort(np.argsort(-worth[i, : widths.heads])[: max(1, math.ceil(keep * (widths.heads or 0)))])
        order = np.argsort(-worth[i, : widths.neurons])
        rows["heads"].append(open_heads.tolist())
        rows["value_dims"].append([max(1, round(keep * widths.value_dim))] * len(open_heads))
        rows["neurons"].append(sorted(order[: max(1, round(keep * (widths.neurons or 0)))].tolist()))
    return Topology.from_counts(model, heads=rows["heads"], value_dims=rows["value_dims"], neurons=rows["neurons"])


def metrics(epochs: int, done: float, taught: bool) -> list[dict[str, Any]]:
    lines = []
    for epoch in range(1, int(done * epochs) + 1):
        x, searching = epoch / epochs, epoch / epochs < SEARCH
        line: dict[str, Any] = {"stage": "search" if searching else "recover", "step": epoch * STEPS, "epoch": epoch}
        line |= {"seconds": 1.0, "images_per_s": 100.0, "task": 1.2 - 0.4 * x}
        line |= {"distill": 0.5 - 0.3 * x} if taught else {}
        line |= {"loss": 1.0 - 0.4 * x, "lr": 1e-3 * (1 - 0.9 * x), "top1": 80 - 14 * math.sin(math.pi * min(x, 0.93))}
        line |= {"soft_top1": 80 - 10 * x} if searching and epoch % max(1, epochs // 8) == 0 else {}
        lines.append({**line, "hard_macs": 1 - 0.5 * min(x / SEARCH, 1), "open_heads": 9, "open_ffns": 4})
    return lines


def write_lines(file: Path, lines: list[dict[str, Any]]) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
