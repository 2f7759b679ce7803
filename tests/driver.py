"""A small run in a process of its own that can be killed at a moment: driver.py OUT [--resume] [key=value ...]."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from hiap.training.config import read_config
from hiap.training.loop import Run
from hiap.training.run_folder import RunFolder

SMALL = {
    "model_args": {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1},
    "dense_epochs": 1,
    "epochs": 4,
    "batch_size": 256,
    "target": "60%",
    "freeze_at": 0.5,
    "ema": 0.9,
    "mixup": 0.2,
    "distill_features": 1.0,
    "checkpoint_every": 3,
    "warmup_epochs": 0,
}


def kill_at_step(stage: str, step: int, how: str, rank: int | None) -> None:
    train_step, number = Run.train_step, signal.Signals[how.removesuffix("+")]

    def step_and_kill(self: Run, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if (self.phase.name, self.phase.step) == (stage, step) and rank in (None, self.context.rank):
            if how.endswith("+"):  # the whole group, loader workers too, by another process
                subprocess.run(["kill", f"-{number}", "--", f"-{os.getpgid(0)}"])
            else:
                os.kill(os.getpid(), number)
        return train_step(self, *batch)

    Run.train_step = step_and_kill


def kill_in_save(number: int) -> None:
    save, write_text, calls = RunFolder.save, Path.write_text, [0]

    def counted(self: RunFolder, *arguments: object) -> Path:
        calls[0] += 1
        return save(self, *arguments)

    def torn(self: Path, text: str, *rest: object, **options: object) -> int:
        if self.name == "state.json" and calls[0] == number:
            write_text(self, text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return write_text(self, text, *rest, **options)

    RunFolder.save, Path.write_text = counted, torn


def main() -> None:
    torch.set_num_threads(1)
    out, *rest = sys.argv[1:]
    overrides = dict(SMALL)
    for pair in rest:
        key, _, value = pair.partition("=")
        if key == "--kill-step":
            stage, step, how, *rank = value.split(":")
            kill_at_step(stage, int(step), how, int(rank[0]) if rank else None)
        elif key == "--kill-save":
            kill_in_save(int(value))
        elif key != "--resume":
            overrides[key] = eval(value)
    Run(read_config("digits", overrides), out, "--resume" in rest).go()


if __name__ == "__main__":
    main()
