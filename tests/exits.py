"""The `hiap` command with a fault at a moment: exits.py FAULT ARGUMENTS... Prints the time of the fault to stderr."""

import os
import signal
import subprocess
import sys
import time

import safetensors.torch
import torch

from hiap.cli.main import main
from hiap.training.loop import Run

STEP = 2  # of the search, at which it happens


def happen() -> None:
    print(f"fault at {time.monotonic()}", file=sys.stderr, flush=True)


def fault(name: str) -> None:
    train_step, save_file = Run.train_step, safetensors.torch.save_file

    def step(self: Run, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.phase.step != STEP or name in ("disk", "worker"):
            return train_step(self, *batch)
        happen()
        if name == "memory":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if name == "nan":
            return {"task": torch.tensor(float("nan"))}
        if name.startswith("interrupt"):
            os.kill(os.getpid(), signal.SIGINT)
        if name == "interrupt twice":
            os.kill(os.getpid(), signal.SIGINT)
        if name == "terminate":
            subprocess.run(["kill", "-TERM", "--", f"-{os.getpgid(0)}"])
        return train_step(self, *batch)

    def full(*arguments: object) -> None:
        happen()
        raise OSError(28, "No space left on device")

    Run.train_step = step
    if name == "disk":
        safetensors.torch.save_file = lambda *arguments: (
            save_file(*arguments) if not os.path.exists("run/metrics.jsonl") else full()
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    fault(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
