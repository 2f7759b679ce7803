"""Sweeps: failures, signals, going on, several runs at a time, and the page that compares the results.

Most runs here are stand-ins: a process of a moment that writes the report of a run, or fails.
"""

import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from browser import Browser, find_browser
from hiap.cli.main import main
from hiap.cli.sweep_command import planned_runs
from hiap.errors import InputError, RunError
from hiap.sweep import starting
from hiap.sweep.grid import run_name
from hiap.sweep.starting import OUTPUT, Here, OnRay, Starter
from hiap.sweep.summary import front
from hiap.sweep.sweep_folder import SweepFolder
from hiap.sweep.sweeping import run_sweep, time_again, write_summary
from hiap.training.config import read_config
from hiap.training.loop import Run
from made_runs import made_run
from runs import TINY
from test_grid import parsed

TARGETS = ("35%", "50%", "70%")
STAND_IN = """
import json, os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
share = int(folder.name.removeprefix("target=").removesuffix("%")) / 100
print("begun", flush=True)
if (folder.parent / "wait").exists():
    saving = float(os.environ.get("STAND_IN_SAVING", "0"))
    signal.signal(signal.SIGTERM, lambda *rest: (time.sleep(saving), sys.exit("saved")))
    (folder / "waiting").touch()
    time.sleep(60)
if (folder.parent / f"broken {folder.name}").exists():
    sys.exit("warning: a word\\nhiap: the loss is not finite\\n  at step 3")
if (folder.parent / f"killed {folder.name}").exists():
    os.kill(os.getpid(), signal.SIGKILL)
speed = {"batch": 1, "precision": "fp32", "dense_ms": 4.0, "dense_form": "eager", "compact_form": "eager"}
record = {"dense_top1": 80.0, "top1": 80 - 10 * (1 - share), "dense_macs": 2000, "macs": int(2000 * share)}
record |= {"dense_params": 300, "params": int(300 * share), "speed": [{**speed, "compact_ms": 4 * share}]}
if (folder.parent / "together").exists():
    (folder / "here").touch()
    while len(list(folder.parent.glob("*/here"))) < 2 and time.time() < folder.stat().st_mtime + 60:
        time.sleep(0.02)
began = time.time()
time.sleep(float(os.environ.get("STAND_IN_SECONDS", "0")))
seen = [began, time.time(), os.getppid(), os.environ.get("CUDA_VISIBLE_DEVICES")]
(folder / "times.json").write_text(json.dumps(seen))
(folder / "report.json").write_text(json.dumps(record))
"""


def stand_in(folder: str) -> list[str]:
    return [sys.executable, "-S", "-c", STAND_IN, folder]


def opened(out: Path, targets: tuple[str, ...] = TARGETS, **given: Any) -> SweepFolder:
    """The folder of a sweep over targets."""
    planned = []
    for target in targets:
        options = {"target": target}
        planned.append((options, run_name(options), read_config("digits", {**options, **given})))
    return SweepFolder(out, planned)


def swept(out: Path, starter: Starter | None = None, **given: Any) -> tuple[SweepFolder, list[str]]:
    """A sweep of stand-ins, and what it said."""
    said: list[str] = []
    folder = opened(out, **given)
    try:
        run_sweep(folder, starter or Here(command=stand_in), said.append)
    finally:
        folder.close()
    return folder, said


def until(true: Callable[[], bool]) -> None:
    """Wait for something that comes within a minute."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


# -- the runs ---------------------------------------------------------------------------------------------------------


def test_a_failed_run_loses_no_other_and_the_same_command_tries_it_again(tmp_path: Path) -> None:
    (tmp_path / "broken target=35%").touch()
    (tmp_path / "killed target=50%").touch()
    folder, said = swept(tmp_path)
    assert [one.state for one in folder.members] == ["failed", "failed", "finished"]
    assert folder.members[0].message == "the loss is not finite\n  at step 3"
    assert folder.members[1].message == "ended by SIGKILL; perhaps it ran out of memory"
    assert [one for one in said if not one.startswith("started")] == [
        "1/3 target=35% failed: the loss is not finite",
        "2/3 target=50% failed: ended by SIGKILL; perhaps it ran out of memory",
        "3/3 target=70% finished",
    ]
    kept = json.loads((tmp_path / "sweep.json").read_text())["runs"]
    assert [one["state"] for one in kept] == ["failed", "failed", "finished"]
    assert kept[0]["message"] == "the loss is not finite\n  at step 3"
    assert "target=35% failed: the loss is not finite at step 3" in (tmp_path / "sweep.md").read_text()
    (tmp_path / "broken target=35%").unlink()
    (tmp_path / "killed target=50%").unlink()
    folder, said = swept(tmp_path)
    assert [one.state for one in folder.members] == ["finished"] * 3
    assert [one for one in said if one.startswith("started")] == ["started target=35%", "started target=50%"]
    begun = [(tmp_path / f"target={target}" / OUTPUT).read_text().count("begun") for target in TARGETS]
    assert begun == [2, 2, 1]
    assert "message" not in json.loads((tmp_path / "sweep.json").read_text())["runs"][0]


def test_values_can_be_added_later(tmp_path: Path) -> None:
    swept(tmp_path, targets=("50%",))
    folder, said = swept(tmp_path, targets=("50%", "70%"))
    assert [one.name for one in folder.members] == ["target=50%", "target=70%"]
    assert [one for one in said if one.startswith("started")] == ["started target=70%"]
    again = SweepFolder(tmp_path, [])  # as with --resume
    again.close()
    assert [(one.name, one.options, one.state) for one in again.members] == [
        ("target=50%", {"target": "50%"}, "finished"),
        ("target=70%", {"target": "70%"}, "finished"),
    ]


def test_a_folder_that_is_no_such_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="holds no sweep to resume: leave out --resume and pass --grid"):
        SweepFolder(tmp_path / "none", [])
    swept(tmp_path / "sweep", targets=("50%",))
    with pytest.raises(RunError, match=r"holds a run of another configuration: epochs: 7 \(was: epochs: 30\)"):
        opened(tmp_path / "sweep", ("50%",), epochs=7)
    with pytest.raises(RunError, match="target=50% holds a run, not a sweep: pass another --out"):
        opened(tmp_path / "sweep/target=50%")
    held = opened(tmp_path / "sweep", ("50%",))
    with pytest.raises(RunError, match="is in use by another sweep"):
        opened(tmp_path / "sweep", ("50%",))
    held.close()
    (tmp_path / "sweep/target=50%/config.yaml").unlink()
    with pytest.raises(RunError, match=r"target=50%/config\.yaml is missing: put it back, or run the same command"):
        SweepFolder(tmp_path / "sweep", [])
    (tmp_path / "sweep/sweep.json").write_text('{"format": 1, "runs": [')
    with pytest.raises(RunError, match=r"sweep\.json is damaged"):
        opened(tmp_path / "sweep")


def overlap(out: Path) -> int:
    """How many of the stand-ins ran at a time."""
    times = [json.loads((out / f"target={target}/times.json").read_text()) for target in TARGETS]
    return max(sum(start <= moment < end for start, end, *_ in times) for moment, *_ in times)


@pytest.mark.parametrize("jobs", [1, 2])
def test_as_many_runs_go_on_at_a_time_as_asked_for(jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_SECONDS", "0.3")
    folder, _ = swept(tmp_path, Here(jobs, stand_in))
    assert overlap(tmp_path) == jobs
    assert [one.shared for one in folder.members] == [jobs > 1] * 3


def test_runs_on_a_machine_with_several_gpus_have_one_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    monkeypatch.setenv("STAND_IN_SECONDS", "0.2")
    assert (Here(2).crowded, Here(3).crowded) == (False, True)
    swept(tmp_path, Here(2, stand_in), targets=("35%", "50%"))
    seen = [json.loads((tmp_path / f"target={target}/times.json").read_text())[3] for target in ("35%", "50%")]
    assert sorted(seen) == ["4", "7"]


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)])
def test_a_signal_lets_every_run_save_and_the_sweep_goes_on_later(
    number: int, raised: type[BaseException], tmp_path: Path
) -> None:
    (tmp_path / "wait").touch()
    first = [tmp_path / f"target={target}/waiting" for target in TARGETS[:2]]

    def interrupt() -> None:
        until(lambda: all(file.exists() for file in first))
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(raised):
        swept(tmp_path, Here(2, stand_in))
    thread.join()
    assert [(tmp_path / f"target={target}" / OUTPUT).read_text() for target in TARGETS[:2]] == ["begun\nsaved\n"] * 2
    assert not (tmp_path / "target=70%" / OUTPUT).exists()
    (tmp_path / "wait").unlink()
    folder, _ = swept(tmp_path)
    assert [one.state for one in folder.members] == ["finished"] * 3


def test_a_missing_ray_is_said_with_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    out = tmp_path / "out"
    assert main(["sweep", "--config", "digits", "--grid", "target=50%", "--ray", "--out", str(out)]) == 1
    assert capsys.readouterr().err == "hiap: --ray needs Ray: pip install 'hiap[sweep]'\n"
    assert not out.exists()


def test_the_command_ends_with_a_table_and_with_status_1_if_a_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class StandIns(Here):
        def __init__(self, jobs: int) -> None:
            super().__init__(jobs, stand_in)

    monkeypatch.setattr(starting, "Here", StandIns)
    command = ["sweep", "--config", "digits", "--grid", "target=35%,50%", "--out", str(tmp_path)]
    (tmp_path / "broken target=50%").touch()
    assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"runs in {tmp_path}: 2, of which 2 to do, 1 at a time"
    assert lines[-7:] == [
        "run           top-1     MACs  parameters  latency, batch 1  Pareto front",
        "dense       80.00 %  2.000 k         300           4.00 ms",
        "target=35%  73.50 %      700         105           1.40 ms  MACs, batch 1",
        "target=50%        -        -           -                 -  failed",
        "target=50% failed: the loss is not finite at step 3",
        "1 of 2 runs failed; the same command tries them again",
        f"report: {tmp_path / 'sweep.html'}",
    ]
    (tmp_path / "broken target=50%").unlink()
    assert main(["sweep", "--resume", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"runs in {tmp_path}: 2, of which 1 to do, 1 at a time\nstarted target=50%\n")
    assert "failed" not in printed


def test_an_address_without_a_cluster_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(InputError, match=r"^--ray ray://127\.0\.0\.1:1: no cluster answers \(.*Connection refused\)"):
        OnRay("ray://127.0.0.1:1")


@pytest.mark.slow
def test_an_interrupted_run_is_taken_up_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, out = tmp_path / "tiny.yaml", tmp_path / "out"
    made = {**TINY, "epochs": 2, "checkpoint_every": 1, "data": "digits", "data_device": "cpu", "pretrained": False}
    recipe.write_text(json.dumps({**made, "mean": [0.5], "std": [0.5]}))
    words = ["--config", str(recipe), "--grid", "target=60%", "--out", str(out)]
    planned = planned_runs(parsed(*words))
    SweepFolder(out, planned).close()
    train_step = Run.train_step

    def step(self: Run, *batch: Any) -> Any:
        if self.phase.step == 3:
            raise KeyboardInterrupt
        return train_step(self, *batch)

    with monkeypatch.context() as patched:
        patched.setattr(Run, "train_step", step)
        with pytest.raises(KeyboardInterrupt):
            Run(planned[0][2], out / "target=60%", True).go()
    assert main(["sweep", *words]) == 0
    assert "resumed at step 3, in the " in (out / "target=60%" / OUTPUT).read_text()
    (found,) = json.loads((out / "sweep.json").read_text())["runs"]
    (model,) = found["models"]
    assert found["state"] == "finished" and model["pareto"] == ["MACs", "batch 1", "batch 8"]
    assert 0.9 < model["macs"] / (0.6 * model["dense_macs"]) <= 1


# -- the comparison ---------------------------------------------------------------------------------------------------


def test_the_front_is_what_no_other_model_beats() -> None:
    assert front([(1.0, 1.0), (2.0, 3.0), (2.0, 2.0), (3.0, 3.0), (4.0, 4.0), (4.0, 4.0)]) == [0, 1, 4, 5]
    chance = random.Random(0)
    points = [(float(chance.randint(0, 20)), float(chance.randint(0, 20))) for _ in range(60)]
    best, reference = -1.0, set()
    for cost, score in sorted(points, key=lambda one: (one[0], -one[1])):  # by a scan from the cheapest
        if score > best:
            best = score
            reference.add((cost, score))
    assert {points[i] for i in front(points)} == reference


def test_the_table_has_every_number_of_the_reports(tmp_path: Path) -> None:
    (tmp_path / "broken target=50%").touch()
    swept(tmp_path)
    assert (tmp_path / "sweep.md").read_text() == (
        f"# {tmp_path.name}\n\n"
        "| run | top-1 | MACs | parameters | latency, batch 1 | Pareto front |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| dense | 80.00 % | 2.000 k | 300 | 4.00 ms |  |\n"
        "| target=35% | 73.50 % | 700 | 105 | 1.40 ms | MACs, batch 1 |\n"
        "| target=50% | - | - | - | - | failed |\n"
        "| target=70% | 77.00 % | 1.400 k | 210 | 2.80 ms | MACs, batch 1 |\n\n"
        "- target=50% failed: the loss is not finite at step 3\n"
    )


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of two whole runs, that have never shared a machine."""
    out = tmp_path_factory.mktemp("compared")
    for target in ("35%", "50%"):
        folder = made_run(out / f"target={target}", 3, depth=1, dim=12, share=float(target[:-1]) / 100)
        (folder / "report.html").write_text("<!doctype html>")
    members = [{"name": f"target={t}", "folder": f"target={t}", "options": {"target": t}} for t in ("35%", "50%")]
    runs = [{**one, "state": "finished", "shared": True} for one in members]
    (out / "sweep.json").write_text(json.dumps({"format": 1, "runs": runs}))
    folder = SweepFolder(out, [])
    write_summary(folder)
    folder.close()
    return out


def test_the_page_links_to_the_reports_and_loads_nothing(compared: Path) -> None:
    page = (compared / "sweep.html").read_text()
    assert '<a href="target%3D35%25/report.html">target=35%</a>' in page
    assert re.findall(r'aria-label="(\w[^"]*)"', page) == [
        "Accuracy over MACs",
        "Accuracy over latency, batch 1",
        "Accuracy over latency, batch 8",
    ]
    assert "2 of 2 runs finished" in page and "target 35%, 50%" in page
    assert "The times of 2 of 2 runs were measured while other runs used the same machine" in page
    assert not re.search(r"(src|href)=\"(https?:)?//", page)


@pytest.mark.skipif(find_browser() is None, reason="needs a browser: apt-get install chromium")
def test_the_page_shows_names_and_numbers_where_the_pointer_is(compared: Path, tmp_path: Path) -> None:
    browser = Browser(tmp_path)
    try:
        browser.open(compared / "sweep.html", 1440)
        assert browser.requests() == [] and browser.complaints() == []
        x, y = browser.ask(
            "(() => { const b = document.querySelector('.chart svg').getBoundingClientRect();"
            " return [b.x + b.width * 0.97, b.y + b.height / 2]; })()"
        )
        browser.point_at(x, y)
        assert "dense 80.00 %" in browser.ask("document.getElementById('tip').innerText")
        browser.open(compared / "sweep.html", 375)
        assert browser.ask("document.documentElement.scrollWidth") == 375
    finally:
        browser.close()


def test_models_that_shared_a_machine_are_timed_again_alone(compared: Path, tmp_path: Path) -> None:
    said: list[str] = []
    compared = Path(shutil.copytree(compared, tmp_path / "copy"))
    folder = SweepFolder(compared, [])
    folder.note("target=50%", shared=False)
    time_again(folder, said.append)
    folder.close()
    assert said == ["timing target=35% again, alone"]
    record = json.loads((compared / "target=35%/report.json").read_text())
    assert [one["batch"] for one in record["speed"]] == [1, 8] and record["speed"][0]["compact_ms"] != 3.1
    assert "were measured while" not in (compared / "sweep.html").read_text()
