"""Which learning rate suits which run: ViT-Ti pruned to half of its MACs in runs of several sizes, at several rates.

    python benchmarks/learning_rates.py --data DIR --weights FILE --records FILE [--start vit_tiny]
    python benchmarks/learning_rates.py --data DIR --weights FILE --records FILE --dense
    python benchmarks/learning_rates.py --records FILE --table

DIR holds the sheets of Tiny-ImageNet. A run is scored on 4,000 of the validation images (columns 0 to 19). `--dense`
fine-tunes the dense model on 20 of the classes with a new classifier instead: rate of the body, and how many times
faster the classifier learns. One JSON line a run; what is recorded already is not run again.
"""

import argparse
import json
import math
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from prune_tiny_imagenet import configuration
from tiny_imagenet import CLASSES, validation_images

from hiap.data.sources import Augmentation, ByteData
from hiap.models.weights import dense_model
from hiap.training.loop import prune

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
        parts = [validation_images(folder / f"train_{i}.jpg", range(per_class // 10)) for i in range(10)]
        train = (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))
        val = validation_images(folder / "val.jpg", range(50 if classes < CLASSES else 20))
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


def finetune(options: argparse.Namespace, batch: int, epochs: int, lr: float, faster: int) -> dict[str, Any]:
    """Train the dense model with a new classifier, whose rate is a multiple of that of the body."""
    config, device = configuration(options.start, str(options.weights), {}), torch.device("cuda")
    torch.manual_seed(0)
    model = dense_model(config)
    model.reset_classifier(SUBSET)
    model.to(device)
    data = data_of(config, images(options.data, 500, SUBSET), device, SUBSET)
    head = list(model.head.parameters())
    body = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    groups = [{"params": body, "lr": lr}, {"params": head, "lr": lr * faster}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    per_epoch = data.train_size // batch
    steps, warmup, step = epochs * per_epoch, max(1, epochs * per_epoch // 10), 0
    for epoch in range(epochs):
        for x, y in data.train(epoch, 0, batch, 0, 1):
            factor = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group, rate in zip(optimizer.param_groups, (lr, lr * faster), strict=True):
                group["lr"] = rate * factor
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(1) == y).sum().item() for x, y in data.val(250))
    return {"top1": 100 * right / data.val_size}


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
    parser.add_argument("--data", type=Path, help="folder with the sheets")
    parser.add_argument("--weights", type=Path, help="weights of the start (safetensors)")
    parser.add_argument("--start", choices=sorted(RUNS), default="vit_tiny")
    parser.add_argument("--records", type=Path, required=True, help="JSON lines, one a run")
    parser.add_argument("--warmup", type=float, default=0.05, help="share of a run that the rate rises")
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
        found = finetune(options, **given) if options.dense else run(options, **given)
        known.append({**job, **found, "torch": torch.__version__, "device": torch.cuda.get_device_name()})
        with options.records.open("a") as file:
            file.write(json.dumps(known[-1]) + "\n")
    table(known)


if __name__ == "__main__":
    main()
