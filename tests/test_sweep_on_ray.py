"""Sweeps on a Ray cluster: runs on its workers, and what happens when they are cancelled."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from hiap.sweep.starting import OUTPUT, OnRay, _run_there
from test_sweep import TARGETS, stand_in, swept, until


@pytest.mark.parametrize("before", [signal.default_int_handler, signal.SIG_IGN])
def test_a_run_saves_however_often_it_is_cancelled(
    before: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where interrupts were ignored before, as in a job that a shell has sent to the background."""
    monkeypatch.setenv("STAND_IN_SAVING", "1")
    (tmp_path / "wait").touch()
    (folder := tmp_path / "target=60%").mkdir()

    def cancel() -> None:
        until(lambda: (folder / "waiting").exists())
        for _ in range(3):  # the second and the third come while it saves
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            time.sleep(0.25)

    canceller = threading.Thread(target=cancel)
    handler = signal.signal(signal.SIGINT, before)
    canceller.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            _run_there(stand_in(str(folder)), str(folder), str(tmp_path))
    finally:
        canceller.join()
        signal.signal(signal.SIGINT, handler)
    assert (folder / OUTPUT).read_text() == "begun\nsaved\n"


@pytest.mark.slow
def test_the_workers_of_a_ray_cluster_share_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason='pip install "hiap[sweep]"')
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    for name in ("together", "broken target=70%"):
        (tmp_path / name).touch()
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        starter = OnRay(command=stand_in)
        assert (starter.jobs, starter.crowded) == (2, True)
        folder, _ = swept(tmp_path, starter)
        assert [one.state for one in folder.members] == ["finished", "finished", "failed"]
        assert folder.members[2].message == "the loss is not finite\n  at step 3"
        parents = [json.loads((tmp_path / f"target={one}/times.json").read_text())[2] for one in TARGETS[:2]]
        assert len({*parents, os.getpid()}) == 3  # two at a time, each by a worker of its own
        (tmp_path / "wait").touch()
        (last := tmp_path / "target=60%").mkdir()
        going = threading.Thread(target=starter.run, args=(last,))
        going.start()
        until(lambda: (last / "waiting").exists())
        starter.stop()
        going.join()
        assert (last / OUTPUT).read_text() == "begun\nsaved\n"
        assert starter.run(tmp_path / "elsewhere").message.endswith(
            f" does not see {tmp_path / 'elsewhere'}: all machines must share the folder of the sweep"
        )
    finally:
        ray.shutdown()
