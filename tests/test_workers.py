"""However a process that reads data ends, it and its loader workers are gone within seconds."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import write_photos, write_shards

pytestmark = pytest.mark.slow

SECONDS = 10

# Imports once, then ends a process of its own in every way it is told: one a line, as data, workers, way and folder.
SCRIPT = """
import gc, json, os, signal, sys, time
from pathlib import Path
import torch, webdataset.filters, webdataset.tariterators
from hiap.data.sources import open_data
from hiap.data.images import Augmentation, Loading

gc.freeze()  # what is imported is not looked through again at every end
for line in sys.stdin:
    data, workers, way, folder = json.loads(line)
    process = os.fork()
    if not process:
        break
    Path(folder, "process").write_text(f"{process}\\n")
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    Path(folder, "code").write_text(f"{code}\\n")
else:
    sys.exit()
os.setsid()
for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT), number)
signal.signal(signal.SIGINT, signal.default_int_handler)
loading = Loading((16, 16), ((0.5,) * 3, (0.5,) * 3), Augmentation(policy=None), torch.device("cpu"), workers=workers,
                  strict=way == "strict")
batches = open_data(data, loading, classes=10 if way == "label" else 1000).train(0, 0, 4, 0, 1)
if way in ("strict", "shard", "label"):
    list(batches)
next(batches)
if way == "error":
    raise RuntimeError("out of memory")
if way == "exit":
    raise SystemExit(143)
stopped = []
if way == "term":
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
print("reading", flush=True)
while not stopped:
    time.sleep(0.01)
print("then", sum(1 for _ in batches), flush=True)
raise SystemExit(143)
"""
ERRORS = {
    "strict": "InputError: image 5 of the data set cannot be read (train/cat/5.png)",
    "shard": "cannot be read: unexpected end of data",
    "label": "InputError: a label must be from 0 to 9, by the number of classes; found",
    "error": "RuntimeError: out of memory",
    "interrupt": "KeyboardInterrupt",
}
CODES = {"exit": 143, "term": 143, "interrupt": -signal.SIGINT, "kill": -signal.SIGKILL}


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdin=-1, text=True) as process:
        yield process


def awaited(seconds: float, found: Callable[[], bool]) -> bool:
    end = time.monotonic() + seconds
    while not found():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def text(file: Path) -> str:
    return file.read_text() if file.exists() else ""


def gone(group: int) -> bool:
    """Whether no process of a group runs any more."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found, *_ = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(found) == group and state != "Z":
            return False
    return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("way", ["strict", "shard", "label", "error", "exit", "interrupt", "term", "kill"])
def test_nothing_is_left_running(server: subprocess.Popen[str], tmp_path: Path, way: str, workers: int) -> None:
    if way in ("shard", "label"):
        data = write_shards(tmp_path / "data", {"train": [16, 16], "validation": [4]})
        if way == "shard":
            for shard in (tmp_path / "data").glob("train-*.tar"):
                shard.write_bytes(shard.read_bytes()[:20000])
    else:
        data = write_photos(tmp_path / "data")
        if way == "strict":
            (tmp_path / "data/train/cat/5.png").write_bytes(b"not an image")
    assert server.stdin is not None
    server.stdin.write(json.dumps([data, workers, way, str(tmp_path)]) + "\n")
    server.stdin.flush()
    assert awaited(60, lambda: text(tmp_path / "process").endswith("\n"))
    group = int(text(tmp_path / "process"))
    try:
        if way in ("interrupt", "term", "kill"):
            assert awaited(SECONDS, lambda: text(tmp_path / "out") == "reading\n")
            if way == "kill":
                os.kill(group, signal.SIGKILL)
            else:
                os.killpg(group, signal.SIGINT if way == "interrupt" else signal.SIGTERM)
        assert awaited(SECONDS, lambda: text(tmp_path / "code").endswith("\n") and gone(group))
        assert int(text(tmp_path / "code")) == CODES.get(way, 1)
        error = text(tmp_path / "err")
        assert ERRORS.get(way, "") in error and error.count("Traceback") == (way in ERRORS)
        assert "DataLoader worker" not in error
        if way == "term":
            assert text(tmp_path / "out").endswith("then 5\n")  # the workers went on when SIGTERM came to all
    finally:
        if not gone(group):
            os.killpg(group, signal.SIGKILL)
