"""What `hiap prune` prints at the end: the dense model beside the compact one, and what to do next."""

from __future__ import annotations

import functools
import json
import shlex
import statistics
from typing import Any

import torch

from hiap.atomic import write_text
from hiap.budget.cost import in_words
from hiap.models.registry import family_of
from hiap.speed.clock import timings
from hiap.training.config import Config

__all__ = ["report"]

BATCH = 32  # images of the forwards that are timed


def report(result: Any, config: Config) -> None:
    """Print the table and the course of a finished run, and write them to `report.json` in its folder."""
    record = result.record
    record |= dict(zip(("dense_ms", "compact_ms"), _latency(result.dense, result.model), strict=True))
    for row in _rows(record):
        print(f"{row[0]:18} {row[1]:>12} {row[2]:>12}  {row[3]}")
    search, recover = (record["course"].get(stage) for stage in ("search", "recover"))
    saved = recover["epochs"] * (search["fastest"] - recover["fastest"]) if search and recover else 0.0
    more = f"; without the shrink about {saved:.0f} s more" if saved >= 0.5 and record["shrunk"] else ""
    print(f"training took {record['seconds']:.0f} s{more}")
    cut, speed = record["dense_macs"] / record["macs"], record["dense_ms"] / record["compact_ms"]
    print(f"realised: {speed / cut:.0%} of the MAC cut of {cut:.2f}x")
    print(f"gates: soft top-1 {record['soft_top1_start']:.2f} % at step 0; at the freeze:")
    print(
        f"  {record['undecided']:.0%} undecided; MACs soft {record['expected_macs']:.1%}, hard "
        f"{record['hard_macs']:.1%}; top-1 soft {record['soft_top1']:.2f} %, hard {record['hard_top1']:.2f} %"
    )
    write_text(result.folder.parent / "report.json", json.dumps(record, indent=1) + "\n")
    if best := record.get("best"):
        print(f"kept the best epoch on the validation images, {best['epoch']} of {config.epochs}")
    else:
        print("kept the last epoch; --keep best keeps the best on the validation images")
    run, source = shlex.quote(str(result.folder.parent)), shlex.quote(config.data or "")
    given = [(name, getattr(config, name)) for name in ("val_split", "input_key", "target_key")]
    split = "".join(f" --{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given if value)
    print(f"saved in {result.folder}; next:")
    print(f"  hiap info {run}")
    print(f"  hiap evaluate {run} --data {source}{split}")
    print(f"  hiap bench {run}")


def _rows(record: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """The table: name, dense, compact, and how they compare."""
    change = f"{record['top1'] - record['dense_top1']:+.2f} points"
    rows = [("", "dense", "compact", "")]
    rows.append(("top-1", f"{record['dense_top1']:.2f} %", f"{record['top1']:.2f} %", change))
    for name, key in (("MACs", "macs"), ("parameters", "params")):
        dense, compact = record[f"dense_{key}"], record[key]
        rows.append((name, in_words(dense), in_words(compact), f"{compact / dense:.1%}"))
    dense, compact = record["dense_ms"], record["compact_ms"]
    rows.append((f"latency, batch {BATCH}", f"{dense:.2f} ms", f"{compact:.2f} ms", f"{dense / compact:.2f}x faster"))
    if "predicted" in record:
        for name, key in (("by the table", "predicted"), ("measured like it", "measured")):
            if key in record:
                dense, compact, unit = record[f"dense_{key}"], record[key], record["unit"]
                rows.append((name, f"{dense:.3f} {unit}", f"{compact:.3f} {unit}", f"{dense / compact:.2f}x"))
    return rows


def _latency(*models: Any) -> list[float]:
    """Median milliseconds of a forward of each model, in turns."""
    like = next(models[0].parameters())
    x = torch.randn((BATCH, *family_of(models[0]).input_shape(models[0])), device=like.device)
    with torch.inference_mode():
        runs = [functools.partial(model.eval(), x) for model in models]
        return [statistics.median(times) for times in timings(runs, like.device, 3, 15, rounds=15)]
