"""However a process that reads data ends, it and its loader workers are gone within seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from conftest import write_photos, write_shards

SCRIPT = """
import os, signal, sys, time, torch
from hiap.data import open_data
from hiap.images import Augmentation, Loading

data, workers, way = sys.argv[1], int(sys.argv[2]), sys.argv[3]
loading = Loading((16, 16), ((0.5,) * 3, (0.5,) * 3), Augmentation(policy=None), torch.device("cpu"), workers=workers,
                  strict=way in ("strict", "shard"))
source = open_data(data, loading, classes=10 if way == "label" else 1000)
batches = source.train(0, 0, 4, 0, 1)
if way not in ("strict", "shard", "label"):
    next(batches)
    print("reading", flush=True)
if way == "error":
    raise RuntimeError("out of memory")
if way == "exit":
    raise SystemExit(143)
if way in ("interrupt", "kill"):
    time.sleep(60)
if way == "term":
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    print("ready", flush=True)
    while not stopped:
        time.sleep(0.01)
    count = sum(1 for _ in batches)
    print("read", count, flush=True)
    raise SystemExit(143)
for _ in batches:
    pass
"""
ERRORS = {
    "strict": "ValueError: image 5 of the data set cannot be read (train/cat/5.png)",
    "shard": "cannot be read: unexpected end of data",
    "label": "ValueError: a label must be from 0 to 9, by the number of classes; found",
    "error": "RuntimeError: out of memory",
    "interrupt": "KeyboardInterrupt",
}


def alive(group: int) -> bool:
    """Whether a process of a group still runs."""
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, found, *_ = entry.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(found) == group and state != "Z":
            return True
    return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are looked up in /proc")
@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("way", ["strict", "shard", "label", "error", "exit", "interrupt", "term", "kill"])
def test_nothing_is_left_running(tmp_path: Path, way: str, workers: int) -> None:
    if way in ("shard", "label"):
        data = write_shards(tmp_path, {"train": [16, 16], "validation": [4]})
        if way == "shard":
            for shard in tmp_path.glob("train-*.tar"):
                shard.write_bytes(shard.read_bytes()[:20000])
    else:
        data = write_photos(tmp_path)
        if way == "strict":
            (tmp_path / "train/cat/5.png").write_bytes(b"not an image")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, data, str(workers), way],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        if way in ("interrupt", "kill", "term"):
            assert process.stdout.readline() == "reading\n"
        if way == "term":
            assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        if way in ("interrupt", "term"):
            os.killpg(process.pid, signal.SIGINT if way == "interrupt" else signal.SIGTERM)
        if way == "kill":
            process.kill()
        out, err = process.communicate(timeout=60 if way in ("strict", "shard", "label", "error", "exit") else 10)
        while alive(process.pid) and time.monotonic() < began + 60:
            time.sleep(0.05)
        if way in ("interrupt", "term", "kill"):
            assert time.monotonic() - began < 10
        assert not alive(process.pid)
        wanted = {"exit": 143, "term": 143, "interrupt": -signal.SIGINT, "kill": -signal.SIGKILL}.get(way, 1)
        assert process.returncode == wanted, err
        assert ERRORS.get(way, "") in err and "DataLoader worker" not in err
        if way in ERRORS:
            assert err.count("Traceback") == 1
        if way == "term":
            assert out == "read 5\n"  # the workers went on when SIGTERM came to all
    finally:
        if alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
