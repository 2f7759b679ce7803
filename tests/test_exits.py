"""Every way out of a run ends its process within seconds, with one clear message and no traceback."""

import os
import re
import time
from pathlib import Path

import pytest

from conftest import write_photos
from forking import run_forked

pytestmark = pytest.mark.slow

SECONDS = 10  # from the fault to the end of the last process
MODEL = '{"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}'
RESUME = r"saved at step 3; go on with `hiap prune --resume --out run`"
WAYS = {  # what happens: exit status and what is said
    "worker": (1, r"^hiap: image \d+ of the data set cannot be read \(train/cat/broken\.png\): "),
    "memory": (
        1,
        r"^hiap: out of memory at step 2 of the search stage, with batches of 4: begin again with --accumulate 2, ",
    ),
    "nan": (
        1,
        r"^hiap: the loss is not finite at step 3 of the search stage \(task nan\); the last good checkpoint is ",
    ),
    "disk": (
        1,
        r"^hiap: checkpoint run/checkpoint-0+12 cannot be written \(.*No space left on device\); the last good ",
    ),
    "interrupt": (130, RESUME),
    "interrupt twice": (130, r"^hiap: stopped$"),
    "terminate": (143, RESUME),
}


def ended(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.parametrize("workers", [0, 1, 4])
@pytest.mark.parametrize("way", WAYS)
def test_the_process_is_gone_within_seconds(way: str, workers: int, tmp_path: Path) -> None:
    photos = write_photos(tmp_path / "photos")
    if way == "worker":
        (tmp_path / "photos/train/cat/broken.png").write_bytes(b"no picture")
    command = [way, "prune", "--out", "run"]
    command += ["--data", photos, "--workers", str(workers), "--strict-data", "--model-args", MODEL, "--no-pretrained"]
    command += ["--teacher", "none", "--epochs", "4", "--batch-size", "4", "--target", "60%", "--checkpoint-every", "6"]
    done = run_forked("exits.py", *command, folder=tmp_path, seconds=120)
    now = time.monotonic()
    while not ended(done.process) and time.monotonic() - now < SECONDS:
        time.sleep(0.1)
    (status, said), err = WAYS[way], done.stderr
    assert done.returncode == status, err[-3000:]
    assert re.search(said, done.stdout + err, re.MULTILINE) and "Traceback" not in err, err[-3000:]
    assert ended(done.process)
    if when := re.search(r"fault at ([\d.]+)", err):
        assert now - float(when[1]) < SECONDS
    assert [path.name for path in (tmp_path / "run").glob(".checkpoint.*")] == []
