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
    print(states(), batch.status() == "stopped", flush=True)
"""
KILLED = """
import os, signal, turns
with turns.alone():
    os.kill(os.getpid(), signal.SIGKILL)
"""
BATCH = """
import os, psutil, subprocess, sys, turns
others = [psutil.Popen([sys.executable, "-c", "import time; time.sleep(100)"]) for _ in range(2)]
with turns.lock_of_batch() as lock:
    if sys.argv[2] == "another":
        lock.seek(0)
        print(1, file=lock, flush=True)
    variables = {} if sys.argv[2] == "none" else {turns.LOCK: lock.name}
    subprocess.run([sys.executable, "-c", sys.argv[1]], env=os.environ | variables)
print(*(other.status() == "stopped" for other in others), end=", ", flush=True)
turns.resume_all()
print(*(other.status() == "stopped" for other in others))
for other in others:
    other.kill()
"""


def output(run: str, batch: str) -> str:
    """What a run prints beside two others of its batch, and then whether these stand still before and after the batch
    lets all go on.
    """
    variables = {"PYTHONPATH": str(Path(turns.__file__).parent)}
    command = [sys.executable, "-c", BATCH, run, batch]
    found = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert not found.returncode, found.stderr
    return found.stdout


@pytest.mark.parametrize(
    ("batch", "still"), [("own", "True True"), ("another", "False False"), ("none", "False False")]
)
def test_other_runs_of_a_batch_stand_still_while_one_reads_a_clock(batch: str, still: str) -> None:
    assert output(READER, batch) == f"False False, {still}, False False False\nFalse False, False False\n"


def test_a_run_that_is_killed_at_its_clock_does_not_stop_the_others_for_good() -> None:
    assert output(KILLED, "own") == "True True, False False\n"
