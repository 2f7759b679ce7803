"""Kill a run at random moments, resume it each time, and compare its result with that of a run left alone.

    python research/kills.py [--kills 50]

Runs on the CPU on digits. Each kill is a SIGKILL after a random time; the run then goes on from its last checkpoint.
Prints one line a kill and ends with the verdict: bit-identical or not.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

OPTIONS = ["--dense-epochs", "1", "--epochs", "6", "--checkpoint-every", "7", "--ema", "0.99", "--mixup", "0.2"]


def start(out: Path, resume: bool) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hiap", "prune", "--config", "digits", *OPTIONS, "--out", str(out)]
    return subprocess.Popen([*command, *(["--resume"] if resume else [])], stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        whole, killed = Path(folder, "whole"), Path(folder, "killed")
        began = time.perf_counter()
        assert start(whole, resume=False).wait() == 0
        length = time.perf_counter() - began
        print(f"left alone: {length:.0f} s")
        kills = finished = 0
        while kills < options.kills:
            run = start(killed, resume=(killed / "config.yaml").exists())
            try:
                run.wait(timeout=chance.uniform(0.2, 0.8) * length)
            except subprocess.TimeoutExpired:
                run.kill()
                run.wait()
                kills += 1
                found = sorted(path.name for path in killed.glob("checkpoint-*"))
                print(f"kill {kills}: {found[-1] if found else 'before the first checkpoint'}", flush=True)
                continue
            finished += 1
            same(whole, killed)
            subprocess.run(["rm", "-rf", str(killed)], check=True)  # it ended; begin another to kill
        if (killed / "config.yaml").exists():
            assert start(killed, resume=True).wait() == 0
            finished += 1
            same(whole, killed)
        print(f"{kills} kills, {finished} runs ended, all bit-identical to the run left alone")


def same(first: Path, second: Path) -> None:
    a, b = (load_file(folder / "compact/model.safetensors") for folder in (first, second))
    if a.keys() != b.keys() or not all(torch.equal(tensor, b[name]) for name, tensor in a.items()):
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
