"""A run that was killed or stopped ends as if it had not been."""

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import hiap
from conftest import write_photos
from driver import SMALL
from forking import Ended, run_forked
from hiap.training.loop import Run, prune
from hiap.training.run_folder import RunError, RunFolder, load_checkpoint
from runs import noise_data, tiny


@pytest.mark.slow
class TestReliability:
    """Real processes, really killed."""

    @staticmethod
    def run(
        out: Path, *options: str, check: int | None = 0, launcher: str = ""
    ) -> subprocess.CompletedProcess[str] | Ended:
        done: subprocess.CompletedProcess[str] | Ended
        if launcher not in ("", "forks"):
            launch = {
                "torchrun": "-m torch.distributed.run --nproc_per_node 2 --master_port 29513",
                "accelerate": "-m accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 29514",
            }[launcher].split()
            command = [sys.executable, *launch, str(Path(__file__).parent / "driver.py"), str(out), *options]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, env=environment, start_new_session=True
            )
        elif launcher == "forks":
            done = run_forked("two_processes.py", "29515", "driver.py", str(out), *options)
        else:
            done = run_forked("driver.py", str(out), *options)
        assert check is None or done.returncode == check, done.stderr[-3000:]
        return done

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp("whole") / "run"
        cls.run(out)
        return out

    @pytest.mark.parametrize(
        "kill",
        [
            "--kill-step=dense:2:SIGKILL",
            "--kill-step=search:5:SIGKILL",
            "--kill-step=search:5:SIGTERM",
            "--kill-step=recover:15:SIGKILL",
            "--kill-save=4",
        ],
    )
    def test_a_killed_run_ends_bit_identical(self, kill: str, whole: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        self.run(out, kill, check=143 if "SIGTERM" in kill else -signal.SIGKILL)
        assert not (out / "compact").exists()
        self.run(out, "--resume")
        first, second = (load_file(folder / "compact/model.safetensors") for folder in (whole, out))
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
        assert (whole / "compact/config.json").read_bytes() == (out / "compact/config.json").read_bytes()
        lines = [
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (whole, out)
        ]
        for a, b in zip(*lines, strict=True):
            assert all(b[key] == value for key, value in a.items() if key not in ("seconds", "images_per_s"))

    def test_a_killed_run_without_shrink_ends_bit_identical(self, tmp_path: Path) -> None:
        self.run(tmp_path / "whole", "shrink=False")
        self.run(tmp_path / "killed", "shrink=False", "--kill-step=recover:15:SIGKILL", check=-signal.SIGKILL)
        self.run(tmp_path / "killed", "shrink=False", "--resume")
        first, second = (load_file(tmp_path / name / "compact/model.safetensors") for name in ("whole", "killed"))
        assert first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())

    def test_a_killed_run_on_a_stream_ends_bit_identical(self, tmp_path: Path) -> None:
        from conftest import write_shards

        data = write_shards(tmp_path / "shards", {"train": [40, 30, 30, 28], "validation": [10, 6]}, classes=10)
        model = {**SMALL["model_args"], "num_classes": 10}
        options = [f"data={data!r}", f"model_args={model}", "workers=2", "batch_size=16", "epochs=2", "dense_epochs=0"]
        options.append("data_device='loader'")
        self.run(tmp_path / "whole", *options)
        self.run(tmp_path / "killed", *options, "--kill-step=search:5:SIGKILL", check=-signal.SIGKILL)
        self.run(tmp_path / "killed", *options, "--resume")
        first, second = (load_file(tmp_path / name / "compact/model.safetensors") for name in ("whole", "killed"))
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())

    def test_sigterm_to_the_whole_group_saves_too(self, tmp_path: Path) -> None:
        data = {"data": write_photos(tmp_path / "photos"), "data_device": "loader", "workers": 2}
        options = [f"{key}={value!r}" for key, value in {**data, "batch_size": 2, "dense_epochs": 0}.items()]
        self.run(tmp_path / "run", *options, "--kill-step=search:2:SIGTERM+", check=143)
        assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-000000003"]

    def test_two_processes_follow_one(self, tmp_path: Path) -> None:
        options = ["mixup=0.0", "crop=1.0", "ema=0.0"]
        self.run(tmp_path / "one", *options)
        self.run(tmp_path / "two", *options, launcher="torchrun")
        one, two = (
            [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("one", "two")
        )
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert a["task"] == pytest.approx(b["task"], rel=2e-3)
        topologies = [hiap.load(tmp_path / name / "compact").hiap.topology for name in ("one", "two")]
        assert topologies[0] == topologies[1]

    def test_two_processes_learn_features(self, tmp_path: Path) -> None:
        """Of the tokens alone, so that the last norm has no gradient but 0."""
        options = ["objective='features'", "distill_features=None", "dense_epochs=0", "mixup=0.0", "pooled_weight=0.0"]
        self.run(tmp_path / "run", *options, launcher="forks")
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert [line["stage"] for line in lines] == ["search", "search", "recover", "recover"]
        assert all(line["loss"] == pytest.approx(line["tokens"]) for line in lines) and lines[-1]["error"] > 0
        compact = hiap.load(tmp_path / "run/compact")
        assert hiap.macs(compact) <= 0.6 * json.loads((tmp_path / "run/report.json").read_text())["dense_macs"]

    def test_a_signal_to_one_process_stops_both_and_the_run_goes_on(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        self.run(out, "dense_epochs=0", "--kill-step=search:4:SIGTERM:1", check=1, launcher="accelerate")
        assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-000000010"]
        self.run(out, "dense_epochs=0", "--resume", launcher="accelerate")
        assert hiap.macs(hiap.load(out / "compact")) > 0

    def test_folders_in_use_or_of_another_run_are_refused(self, tmp_path: Path) -> None:
        RunFolder(tmp_path / "run", "seed: 2\n", resume=False).close()  # without a checkpoint it holds no run
        first = RunFolder(tmp_path / "run", "seed: 0\n", resume=False)
        first.save(1, {"x": torch.ones(2)}, {"step": 1})
        with pytest.raises(RunError, match="is in use by another run"):
            RunFolder(tmp_path / "run", "seed: 0\n", resume=True)
        first.close()
        with pytest.raises(RunError, match="holds a run: pass --resume"):
            RunFolder(tmp_path / "run", "seed: 0\n", resume=False)
        with pytest.raises(RunError, match=r"another configuration: seed: 1 \(was: seed: 0\)"):
            RunFolder(tmp_path / "run", "seed: 1\n", resume=True)

    def test_a_loader_worker_that_outlives_its_run_does_not_hold_the_folder(self, tmp_path: Path) -> None:
        def sleep() -> None:
            begun.set()
            time.sleep(60)

        run = RunFolder(tmp_path / "run", "", resume=False)
        forking = multiprocessing.get_context("fork")
        begun = forking.Event()
        worker = forking.Process(target=sleep, daemon=True)
        worker.start()
        assert begun.wait(60)
        try:
            with pytest.raises(RunError, match="is in use by another run"):
                RunFolder(tmp_path / "run", "", resume=False)  # the worker has not freed the lock of its parent
            run.close()  # as a kill does
            RunFolder(tmp_path / "run", "", resume=False).close()
            assert worker.is_alive()
        finally:
            worker.kill()
            worker.join()

    def test_a_second_checkpoint_of_a_step_does_not_endanger_the_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = RunFolder(tmp_path / "run", "", resume=False)
        folder.save(3, {"x": torch.ones(2)}, {"stage": "dense"})

        def killed(*arguments: object, **options: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("hiap.training.run_folder.shutil.rmtree", killed)
            folder.save(3, {"x": torch.zeros(2)}, {"stage": "search"})
        saved = load_checkpoint(tmp_path / "run")
        assert saved is not None and saved[1] == {"stage": "search"} and not saved[0]["x"].any()
        folder.close()
        (tmp_path / "run/.checkpoint.left").mkdir()
        RunFolder(tmp_path / "run", "", resume=True).save(4, {"x": torch.ones(2)}, {})
        assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*")) == ["checkpoint-000000004"]

    def test_an_interrupted_run_lets_its_folder_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Run, "train_step", interrupted)
            run = Run(tiny(), tmp_path / "run", data=noise_data(512, 8))
            with pytest.raises(KeyboardInterrupt):
                run.go()
        prune(tiny(), tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert (tmp_path / "run/compact").is_dir()

    def test_a_full_disk_leaves_the_last_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = RunFolder(tmp_path / "run", "", resume=False)
        saved = folder.save(3, {"x": torch.ones(2)}, {"step": 3})

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(RunError, match=r"No space left on device\); the last good one is .*checkpoint-000000003"):
            folder.save(6, {"x": torch.zeros(2)}, {"step": 6})
        assert load_file(saved / "state.safetensors")["x"].tolist() == [1, 1]

    def test_a_loss_that_is_not_finite_stops_the_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(self: Run, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"task": torch.tensor(math.nan if self.phase.step == 4 else 1.0), "distill": torch.tensor(0.5)}

        monkeypatch.setattr(Run, "train_step", broken)
        with pytest.raises(
            RunError, match=r"not finite at step 5 of the search stage \(task nan, distill 0\.5\); .*checkpoint-"
        ):
            prune(tiny(), tmp_path / "run", data=noise_data(1024, 8))


@pytest.mark.parametrize(
    "given",
    [
        {"opt": "lamb"},
        *(
            pytest.param(given, marks=pytest.mark.slow)
            for given in ({"opt": "lookahead_adamw"}, {"opt": "adafactor"}, {"shrink": False, "ema": 0.9})
        ),
    ],
)
def test_a_stopped_run_ends_bit_identical(given: dict, tmp_path: Path) -> None:
    wide = {**SMALL["model_args"], "embed_dim": 32}  # so that moments are factored

    def run(name: str, stop: int | None = None) -> dict[str, torch.Tensor]:
        resume = (tmp_path / name).exists()
        run = Run(tiny(**given, epochs=2, model_args=wide), tmp_path / name, resume, data=noise_data(1024, 8))
        train_step = run.train_step

        def step(*batch: torch.Tensor) -> dict[str, torch.Tensor]:
            run.signals.number = signal.SIGTERM if run.phase.step + 1 == stop else None
            return train_step(*batch)

        run.train_step = step
        if stop is not None:
            with pytest.raises(SystemExit):
                run.go()
        else:
            run.go()
        return load_file(tmp_path / name / "compact/model.safetensors") if stop is None else {}

    whole = run("whole")
    for stop in (2, 6):  # before and after the freeze
        run(str(stop), stop)
        again = run(str(stop))
        assert whole.keys() == again.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
