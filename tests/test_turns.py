"""A run of a comparison has the device to itself while it reads a clock."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import turns

READER = """
import os, psutil, turns
me, batch = psutil.Process(), psutil.Process(os.getppid())

def states():
    return " ".join(str(run.status() == "stopped") for run in batch.children() if run != me)

print(states(), end=", ")
try:
    with turns.alone():
        print(states(), end=", ")
        raise ValueError
except ValueError:
    print(states(), batch.status() == "stopped")
"""
BATCH = f"""
import os, pathlib, subprocess, sys
pathlib.Path(sys.argv[1]).write_text(str(os.getpid() if sys.argv[2] == "own" else 1))
others = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) for _ in range(2)]
subprocess.run([sys.executable, "-c", {READER!r}])
for other in others:
    other.kill()
"""


@pytest.mark.parametrize(
    ("batch", "still"), [("own", "True True"), ("of another process", "False False"), (None, "False False")]
)
def test_other_runs_of_a_batch_stand_still_while_one_reads_a_clock(
    batch: str | None, still: str, tmp_path: Path
) -> None:
    variables = {"PYTHONPATH": str(Path(turns.__file__).parent)}
    variables |= {turns.LOCK: str(tmp_path / "lock")} if batch else {}
    command = [sys.executable, "-c", BATCH, str(tmp_path / "lock"), str(batch)]
    found = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert found.stdout == f"False False, {still}, False False False\n", found.stderr
