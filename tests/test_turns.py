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
import subprocess, sys
others = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) for _ in range(2)]
subprocess.run([sys.executable, "-c", {READER!r}])
for other in others:
    other.kill()
"""


@pytest.mark.parametrize(("in_a_batch", "still"), [(True, "True True"), (False, "False False")])
def test_other_runs_of_a_batch_stand_still_while_one_reads_a_clock(
    in_a_batch: bool, still: str, tmp_path: Path
) -> None:
    (tmp_path / "lock").touch()
    variables = {"PYTHONPATH": str(Path(turns.__file__).parent)}
    if in_a_batch:
        variables[turns.LOCK] = str(tmp_path / "lock")
    found = subprocess.run([sys.executable, "-c", BATCH], env=os.environ | variables, capture_output=True, text=True)
    assert found.stdout == f"False False, {still}, False False False\n", found.stderr
