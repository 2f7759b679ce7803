"""Small runs: their data, their configuration, and what the tests ask of them."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from driver import SMALL
from hiap.data.sources import Augmentation, ByteData
from hiap.training.config import Config, read_config
from hiap.training.loop import Result, Run

TINY = {**SMALL, "dense_epochs": 0, "ema": 0.0, "mixup": 0.0, "distill_features": 0.0, "eval_every": 1000}


def noise_data(images: int = 64, size: int = 16, channels: int = 1) -> ByteData:
    """Random pictures of 10 classes: enough for what does not depend on accuracy."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, channels, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.arange(images) % 10
    augmentation = Augmentation(crop=1.0, flip=0.0)
    return ByteData(
        (pixels, labels),
        (pixels[:16], labels[:16]),
        (size, size),
        ((0.5,) * channels,) * 2,
        augmentation,
        torch.device("cpu"),
    )


def tiny(**overrides: object) -> Config:
    return read_config("digits", {**TINY, **overrides})


def weights(folder: Path, classes: int = 10, **changes: Any) -> str:
    """A file with weights of the tiny model."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**TINY["model_args"], "num_classes": classes, **changes})
    save_file(model.state_dict(), folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


def same(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same weights and the same metrics, but for times."""
    one, two = (load_file(run / "compact/model.safetensors") for run in (first, second))
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (first, second)]
    for line in (*lines[0], *lines[1]):
        del line["seconds"], line["images_per_s"]
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one) and lines[0] == lines[1]


def pruned_twice(model: nn.Module, data: ByteData, folder: Path, stop: int = 3, **given: Any) -> tuple[Result, Result]:
    """Two runs, of two epochs unless said: one goes through, the other is stopped before a step of recovery."""

    def run(name: str, stop: int | None) -> Run:
        config = tiny(
            **{"epochs": 2, "dense_epochs": 1, "ema": 0.9, "distill_features": 1.0, "checkpoint_every": 3, **given}
        )
        run = Run(config, folder / name, (folder / name).exists(), data, model=model)
        step = run.train_step

        def until(*batch: torch.Tensor) -> dict[str, torch.Tensor]:
            if run.phase.name == "recover":
                signalled(run, stop)
            return step(*batch)

        run.train_step = until
        return run

    whole = run("whole", None).go()
    with pytest.raises(KeyboardInterrupt):
        run("stopped", stop).go()
    return whole, run("stopped", None).go()


def go(run: Run, stop: int | None = None) -> Run:
    """Train to the end, or to a step at which Ctrl-C is pressed."""
    step = run.train_step
    run.train_step = lambda *batch: (signalled(run, stop), step(*batch))[1]
    if stop is None:
        run.go()
    else:
        with pytest.raises(KeyboardInterrupt):
            run.go()
    return run


def signalled(run: Run, step: int | None) -> None:
    if step is not None and run.phase.step + 1 == step:
        run.signals.number = signal.SIGINT
