"""Processes of their own that need not import anything: they are forked from one that has."""

import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parent

# Imports once, then runs a script in a process of its own for every line it is given.
SERVER = """
import gc, json, os, runpy, signal, sys
from pathlib import Path
import matplotlib.figure, torch
import hiap.cli.main, hiap.cli.prune_command, hiap.report.writing, hiap.training.loop

gc.freeze()  # what is imported is not looked through again at every end
for line in sys.stdin:
    script, arguments, folder, log = json.loads(line)
    process = os.fork()
    if not process:
        break
    Path(log, "process").write_text(str(process))
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    Path(log, "code.part").write_text(str(code))
    os.rename(f"{log}/code.part", f"{log}/code")
else:
    sys.exit()
os.setsid()
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{log}/{name}", os.O_WRONLY | os.O_CREAT), number)
signal.signal(signal.SIGINT, signal.default_int_handler)
os.chdir(folder)
sys.argv[:], sys.path[0] = [script, *arguments], os.path.dirname(script)
runpy.run_path(script, run_name="__main__")
"""


@dataclass(frozen=True)
class Ended:
    """A process that has ended, and what it printed. It led a group of its own."""

    process: int
    returncode: int
    stdout: str
    stderr: str


@functools.cache
def server() -> subprocess.Popen[str]:
    """The process that others are forked from. It ends when its input does, with this one."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, text=True, env=environment)


def run_forked(script: str, *arguments: str, folder: Path | str = ".", seconds: float = 300) -> Ended:
    """Run a script of the tests in a process of its own, and wait for its end."""
    given = server().stdin
    assert given is not None
    with tempfile.TemporaryDirectory() as log:
        line = [str(TESTS / script), list(arguments), os.path.abspath(folder), log]
        given.write(json.dumps(line) + "\n")
        given.flush()
        end = time.monotonic() + seconds
        while not Path(log, "code").exists():
            assert server().poll() is None and time.monotonic() < end, "the process does not end"
            time.sleep(0.02)
        process, code, out, err = (Path(log, name).read_text() for name in ("process", "code", "out", "err"))
    return Ended(int(process), int(code), out, err)
