"""Which learning rate suits which run: ViT-Ti pruned to half of its MACs in runs of several sizes.

    python research/learning_rates.py --data DIR --weights FILE --records FILE [--start vit_tiny]
    python research/learning_rates.py --data DIR --weights FILE --records FILE --dense
    python research/learning_rates.py --records FILE --table

DIR is made by `tiny_imagenet.py`. A run is scored on 4,000 of the validation images (20 of each class). `--dense`
fine-tunes the dense model on 20 of the classes with a new classifier instead, at several learning rates of the body and
of the classifier. Each run leaves one JSON line; a run that is recorded is not repeated.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from dense_starts import finetune
from hiap.data.sources import Augmentation, ByteData
from hiap.models.weights import dense_model
from hiap.training.loop import prune
from prune_tiny_imagenet import configuration
from tiny_imagenet import CLASSES, read_tiles

RATES = (5e-4, 2e-4, 1e-3, 1e-4, 5e-5, 2e-3)
RUNS = {  # images a class, batch size, epochs
    "vit_tiny": [
        *((50, 1024, 5), (50, 256, 5), (50, 64, 5), (500, 1024, 3), (500, 256, 3), (50, 256, 30)),
        *((500, 64, 3), (500, 1024, 15), (500, 256, 15)),
    ],
    "dinov2_small": [(500, 1024, 3), (50, 64, 5), (50, 256, 5)],
}
SUBSET, SUBSET_RUNS = 20, [(256, 2), (256, 10), (64, 2)]
DENSE_RATES, FASTER = (1e-4, 2e-4, 5e-5, 5e-4, 1e-3), (10, 1)


def images(folder: Path, per_class: int, classes: int = CLASSES) -> tuple[Any, Any]:
    """Training images, so many of each class, and 20 validation images of each."""
    cache = folder / f"images_{per_class}_{classes}.pt"
    if not cache.exists():
        every = CLASSES // classes
        parts = [read_tiles(folder / f"train_{i}.jpg", range(per_class // 10)) for i in range(10)]
        train = (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        val = read_tiles(folder / "val.jpg", range(50 if classes < CLASSES else 20))
        train, val = (tuple(t[y % every == 0] for t in (x, y // every)) for x, y in (train, val))
        torch.save((train, val), cache)
    return torch.load(cache)


def data_of(config: Any, found: tuple[Any, Any], device: torch.device, classes: int = CLASSES) -> ByteData:
    size, normalisation = (config.img_size, config.img_size), (config.mean, config.std)
    augmentation = Augmentation(config.crop, config.flip, None, 0.0)
    names = [str(i) for i in range(classes)]
    return ByteData(*found, size, normalisation, augmentation, device, config.seed, names)


def run(options: argparse.Namespace, per_class: int, batch: int, epochs: int, lr: float) -> dict[str, Any]:
    """One run of `hiap prune` with the defaults of a target."""
    given = {"batch_size": batch, "epochs": epochs, "lr": lr, "warmup_epochs": options.warmup * epochs}
    config = configuration(options.start, str(options.weights), {**given, "eval_every": 1000})
    data = data_of(config, images(options.data, per_class), torch.device("cuda"))
    with tempfile.TemporaryDirectory() as folder:
        record = prune(config, Path(folder, "run"), data=data).record
    return {"top1": record["top1"], "seconds": record["seconds"]}


def tuned(options: argparse.Namespace, batch: int, epochs: int, lr: float, faster: int) -> dict[str, Any]:
    """Train the dense model with a new classifier, whose learning rate is a multiple of that of the body."""
    config, device = configuration(options.start, str(options.weights), {}), torch.device("cuda")
    torch.manual_seed(0)
    model = dense_model(config)
    model.reset_classifier(SUBSET)
    data = data_of(config, images(options.data, 500, SUBSET), device, SUBSET)
    return {"top1": finetune(model.to(device), data, epochs, batch, lr, faster)}


def jobs(options: argparse.Namespace) -> list[dict[str, Any]]:
    if options.dense:
        return [
            {"start": options.start, "dense": True, "batch": batch, "epochs": epochs, "lr": lr, "faster": faster}
            for batch, epochs in SUBSET_RUNS
            for lr in DENSE_RATES
            for faster in FASTER
        ]
    return [
        {"start": options.start, "per_class": n, "batch": batch, "epochs": epochs, "lr": lr, "warmup": options.warmup}
        for n, batch, epochs in RUNS[options.start]
        for lr in RATES
        if not (lr < 2e-4 and epochs == 15) and not (lr > 1e-3 and batch < 1024)
    ]


def key(record: dict[str, Any]) -> str:
    return json.dumps({k: v for k, v in record.items() if k not in ("top1", "seconds", "torch", "device")})


def table(records: list[dict[str, Any]]) -> None:
    rows: dict[Any, dict[str, float]] = defaultdict(dict)
    for r in records:
        row = (r["start"], r.get("per_class", "subset"), r["batch"], r["epochs"], r.get("faster", ""))
        rows[row][f"{r['lr']:g}"] = r["top1"]
    for row, found in rows.items():
        print(*row, {lr: round(found[lr], 2) for lr in sorted(found, key=float)}, sep="  ")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder made by tiny_imagenet.py")
    parser.add_argument("--weights", type=Path, help="weights of the start (safetensors)")
    parser.add_argument("--start", choices=sorted(RUNS), default="vit_tiny")
    parser.add_argument("--records", type=Path, required=True, help="JSON lines, one a run")
    parser.add_argument("--warmup", type=float, default=0.05, help="share of a run for the warm-up")
    parser.add_argument("--minutes", type=float, default=60.0, help="begin no run after so many")
    parser.add_argument("--dense", action="store_true", help="fine-tune the dense model with a new classifier")
    parser.add_argument("--table", action="store_true", help="print what is recorded")
    options = parser.parse_args()
    known = [json.loads(line) for line in options.records.read_text().splitlines()] if options.records.exists() else []
    start, done = time.monotonic(), {key(record) for record in known}
    for job in [] if options.table else [job for job in jobs(options) if key(job) not in done]:
        if time.monotonic() - start > 60 * options.minutes:
            break
        given = {name: value for name, value in job.items() if name not in ("start", "dense", "warmup")}
        found = tuned(options, **given) if options.dense else run(options, **given)
        known.append({**job, **found, "torch": torch.__version__, "device": torch.cuda.get_device_name()})
        with options.records.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
    table(known)


if __name__ == "__main__":
    main()
