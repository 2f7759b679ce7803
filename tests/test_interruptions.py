"""What is kept of a run that is interrupted, stopped, killed or out of memory."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import hiap
from hiap.cli.main import main
from hiap.training.loop import Run, prune
from hiap.training.run_folder import RunError
from runs import TINY, noise_data, same, signalled, tiny, weights


class TestKeep:
    @pytest.mark.slow
    @pytest.mark.parametrize("ema", [0.0, 0.9])
    def test_the_best_epoch_is_the_result(self, ema: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Scores are set by hand, so that the third of four epochs is the best; the run is stopped in the fourth."""
        kept = {}

        def scored(self: Run) -> float:
            epoch, network = self.pending["epoch"], self.phase.averaged_network
            kept[epoch] = {name: tensor.clone() for name, tensor in network.state_dict().items()}
            return {1: 99.0, 2: 40.0, 3: 50.0, 4: 45.0}[epoch]  # the first still has gates

        monkeypatch.setattr(Run, "_score", scored)
        config = tiny(keep="best", ema=ema, eval_every=1)
        run = Run(config, tmp_path / "run", data=noise_data(512, 8))
        step = run.train_step
        run.train_step = lambda *batch: (signalled(run, 7), step(*batch))[1]
        with pytest.raises(KeyboardInterrupt):
            run.go()
        result = prune(config, tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert result.record["best"] == {"epoch": 3, "top1": 50.0}
        saved = load_file(tmp_path / "run/compact/model.safetensors")
        assert all(torch.equal(tensor, kept[3][name]) for name, tensor in saved.items())
        assert any(not torch.equal(tensor, kept[4][name]) for name, tensor in saved.items())


@pytest.mark.slow
class TestInterruptions:
    def test_a_signal_during_an_evaluation_saves_and_the_evaluation_is_made_up_for(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        config = tiny(eval_every=1, checkpoint_every=1000)

        def run(name: str, interrupted: bool) -> None:
            run = Run(config, tmp_path / name, (tmp_path / name).exists(), data=noise_data(512, 8))
            val = run.parts.data.val

            def watched(batch: int) -> Any:
                if interrupted and run.pending is not None and run.pending["epoch"] == 3:
                    run.signals.number = signal.SIGINT
                return val(batch)

            run.parts.data.val = watched
            run.go()

        run("whole", False)
        with pytest.raises(KeyboardInterrupt):
            run("stopped", True)
        assert "saved at step 6; go on with hiap.prune(..., resume=True, data=...)" in capsys.readouterr().out
        assert len((tmp_path / "stopped/metrics.jsonl").read_text().splitlines()) == 2
        run("stopped", False)
        assert same(tmp_path / "whole", tmp_path / "stopped")

    def test_out_is_enough_to_resume(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        small = ["--model-args", json.dumps(TINY["model_args"]), "--dense-epochs", "0", "--epochs", "2"]
        options = ["prune", "--config", "digits", *small, "--seed", "5", "--target", "60%", "--checkpoint-every", "3"]
        assert main([*options, "--out", "whole"]) == 0
        train_step = Run.train_step

        def step(self: Run, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
            signalled(self, 8)
            return train_step(self, *batch)

        with monkeypatch.context() as patch:
            patch.setattr(Run, "train_step", step)
            assert main([*options, "--out", "stopped"]) == 130
        assert main(["prune", "--resume", "--out", "stopped", "--workers", "0", "--checkpoint-every", "4"]) == 0
        assert same(tmp_path / "whole", tmp_path / "stopped")

    @pytest.fixture(scope="class")
    @classmethod
    def stopped(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """A run with a dense stage and weights from a file, stopped in its search; to be copied."""
        root = tmp_path_factory.mktemp("stopped")
        run = Run(cls.config(root), root / "run", data=noise_data(512, 8))
        step = run.train_step
        run.train_step = lambda *batch: (signalled(run, 3 if run.phase.name == "search" else None), step(*batch))[1]
        with pytest.raises(KeyboardInterrupt):
            run.go()
        return root

    @staticmethod
    def config(root: Path, **given: Any) -> Any:
        file = root / "weights.safetensors"
        return tiny(weights=str(file) if file.exists() else weights(root), dense_epochs=1, **given)

    def resumed(self, stopped: Path, tmp_path: Path, change: Any = None, **given: Any) -> None:
        run = tmp_path / "run"
        shutil.copytree(stopped / "run", run)
        if change is not None:
            change(run)
        prune(self.config(stopped, **given), run, resume=True, data=noise_data(512, 8))

    def test_what_does_not_change_the_result_may_differ(self, stopped: Path, tmp_path: Path) -> None:
        given = {"workers": 2, "checkpoint_every": 2, "eval_every": 1, "strict_data": True}
        spelt = f"{stopped}/../{stopped.name}/weights.safetensors"
        shutil.copytree(stopped / "run", tmp_path / "run")
        config = tiny(weights=spelt, dense_epochs=1, **given)
        prune(config, tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert (tmp_path / "run/compact").is_dir()

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"seed": 1, "lr": 0.1}, r"another configuration: lr: 0\.1 \(was: lr: 0\.001\); seed: 1 \(was: seed: 0\)$"),
            ({"keep": "best", "eval_every": 2}, r"eval_every: 2 \(was: eval_every: 1000\)"),
            (
                {"epochs": 9},
                r"holds a run of 4 epochs: its learning rate and its budget follow that length, so it cannot be made "
                r"longer. A longer one is a new run: leave out --resume, and pass --epochs 9 and another --out",
            ),
        ],
    )
    def test_what_does_is_shown_by_key(self, given: dict, text: str, stopped: Path, tmp_path: Path) -> None:
        with pytest.raises(RunError, match=text):
            self.resumed(stopped, tmp_path, **given)

    @pytest.mark.parametrize(("targets", "name"), [("50%", "mine"), ("60%,40%", "mine/60%")])
    def test_a_file_in_the_place_of_the_folder_is_named(
        self, targets: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "mine").write_text("kept")
        out = str(tmp_path / "mine")
        assert main(["prune", "--config", "digits", "--target", targets, "--out", out]) == 1
        assert f"hiap: {tmp_path / name} cannot be created as a folder: [Errno " in capsys.readouterr().err
        assert (tmp_path / "mine").read_text() == "kept"

    def test_nothing_to_resume_is_said(
        self, stopped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert main(["prune", "--resume", "--out", "nothing"]) == 1
        text = "hiap: nothing holds no run to resume: leave out --resume to begin one there\n"
        assert capsys.readouterr().err == text and not (tmp_path / "nothing").exists()
        with pytest.raises(
            RunError, match=r"holds checkpoints but no config\.yaml: put it back, or pass another --out"
        ):
            self.resumed(stopped, tmp_path, lambda run: (run / "config.yaml").unlink())

    @pytest.mark.parametrize(
        ("file", "content", "text"),
        [
            ("dense.safetensors", b"x", r"dense\.safetensors is missing or damaged .*begin again with another --out"),
            ("config.yaml", b"epochs: [", r"config\.yaml is damaged"),
            ("config.yaml", b"- 3", r"config\.yaml is damaged: it must hold options"),
            (
                "state.json",
                b"[1]",
                r"checkpoint .* is damaged \(state\.json is not an object\); remove it to start again",
            ),
            ("state.json", b"{}", r"checkpoint .* is damaged \(KeyError: .*\); remove it to start again"),
            ("state.safetensors", b"x", r"checkpoint .* is damaged"),
        ],
    )
    def test_damaged_files_are_named(self, file: str, content: bytes, text: str, stopped: Path, tmp_path: Path) -> None:
        def damage(run: Path) -> None:
            next(run.rglob(file)).write_bytes(content)

        with pytest.raises(RunError, match=text):
            self.resumed(stopped, tmp_path, damage)

    def test_damaged_metrics_lose_their_lines_alone(self, stopped: Path, tmp_path: Path) -> None:
        def damage(run: Path) -> None:
            with (run / "metrics.jsonl").open("ab") as file:
                file.write(b'[1]\n{"step": "x"}\n\xff\xfe\n3\n{"ste')

        self.resumed(stopped, tmp_path, damage)
        lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [2, 4, 6, 8, 10]

    def test_exchanged_weights_are_noticed(self, stopped: Path, tmp_path: Path) -> None:
        shutil.copytree(stopped, tmp_path / "copy")
        state = {name: tensor + 1 for name, tensor in load_file(tmp_path / "copy/weights.safetensors").items()}
        config = (tmp_path / "copy/run/config.yaml").read_text()
        (tmp_path / "copy/run/config.yaml").write_text(config.replace(str(stopped), str(tmp_path / "copy")))
        save_file(state, tmp_path / "copy/weights.safetensors")
        with pytest.raises(RunError, match=r"weights\.safetensors has changed since the run in .* put the old weights"):
            prune(self.config(tmp_path / "copy"), tmp_path / "copy/run", resume=True, data=noise_data(512, 8))

    def test_changed_data_is_noticed(self, stopped: Path, tmp_path: Path) -> None:
        shutil.copytree(stopped / "run", tmp_path / "run")
        text = r"the data has changed since .*: training images 1024 \(was 512\); per_epoch 4 \(was 2\); put it back"
        with pytest.raises(RunError, match=text):
            prune(self.config(stopped), tmp_path / "run", resume=True, data=noise_data(1024, 8))

    def test_what_was_given_in_python_must_be_given_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train_step = Run.train_step
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Run, "train_step", lambda self, *batch: (signalled(self, 3), train_step(self, *batch))[1])
            prune(tiny(), tmp_path / "run", data=noise_data(1437, 8))
        assert "saved at step 3; go on with hiap.prune(..., resume=True, data=...)\n" in capsys.readouterr().out
        assert main(["prune", "--resume", "--out", str(tmp_path / "run")]) == 1
        text = f"hiap: {tmp_path}/run holds a run that was given data in Python: pass the same, resume=True\n"
        assert capsys.readouterr().err == text

    def test_a_checkpoint_of_another_network_is_refused(self, stopped: Path, tmp_path: Path) -> None:
        def change(run: Path) -> None:
            file = next(run.rglob("state.safetensors"))
            save_file({name: t.flatten()[:1].clone() for name, t in load_file(file).items()}, file)

        with pytest.raises(RunError, match=r"checkpoint .* is damaged \(RuntimeError: "):
            self.resumed(stopped, tmp_path, change)

    def test_what_ends_an_evaluation_loses_no_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A second signal, or a kill: the epoch was saved before; and one that was evaluated is not evaluated again."""
        config, calls = tiny(eval_every=1), []
        score = Run._score

        def watched(self: Run) -> float:
            calls.append(self.pending["epoch"])
            if calls == [1, 2, 3]:
                raise KeyboardInterrupt
            return score(self)

        monkeypatch.setattr(Run, "_score", watched)
        with pytest.raises(KeyboardInterrupt):
            prune(config, tmp_path / "run", data=noise_data(512, 8))
        assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-000000006"]
        prune(config, tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert calls == [1, 2, 3, 3, 4]
        prune(config, tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert calls == [1, 2, 3, 3, 4]
        prune(config, tmp_path / "whole", data=noise_data(512, 8))
        assert same(tmp_path / "whole", tmp_path / "run")

    def test_a_signal_in_an_evaluation_that_is_made_up_for_ends_the_run_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from hiap.training.evaluate import Interrupted

        def interrupted(self: Run) -> float:
            self.signals.number = signal.SIGTERM
            raise Interrupted

        monkeypatch.setattr(Run, "_score", interrupted)
        for resume in (False, True):
            with pytest.raises(SystemExit) as left:
                prune(tiny(eval_every=1), tmp_path / "run", resume=resume, data=noise_data(512, 8))
            assert left.value.code == 143

    def test_a_signal_after_the_last_step_is_heard(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save = Run.save_checkpoint

        def saved(self: Run) -> None:
            save(self)
            self.signals.number = signal.SIGINT if self.phase.step == 8 else None

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Run, "save_checkpoint", saved)
            prune(tiny(), tmp_path / "run", data=noise_data(512, 8))
        assert not (tmp_path / "run/compact").exists()
        prune(tiny(), tmp_path / "run", resume=True, data=noise_data(512, 8))

    @pytest.mark.parametrize(
        ("error", "text"),
        [
            (
                MemoryError(),
                r"out of memory at step 2 of the search stage, with batches of 256: begin again with --acc",
            ),
            (
                RuntimeError("Bus error: out of shared memory"),
                r"loader workers ran out of shared memory: pass --workers 0",
            ),
        ],
    )
    def test_memory_that_runs_out_is_told_apart(
        self, error: Exception, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        train_step = Run.train_step

        def step(self: Run, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
            if self.phase.step == 2:
                raise error
            return train_step(self, *batch)

        monkeypatch.setattr(Run, "train_step", step)
        with pytest.raises(RunError, match=text):
            prune(tiny(), tmp_path / "run", data=noise_data(512, 8))

    def test_another_number_of_processes_is_said(self, stopped: Path, tmp_path: Path) -> None:
        def change(run: Path) -> None:
            file = next(run.rglob("state.json"))
            file.write_text(json.dumps(json.loads(file.read_text()) | {"processes": 2}))

        with pytest.warns(UserWarning, match=r"began with 2 processes and continues with 1: .* not bit-identical"):
            self.resumed(stopped, tmp_path, change)

    def test_a_full_disk_at_the_end_names_the_trained_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("hiap.training.result.save", full)
            with pytest.raises(
                RunError, match=r"cannot be saved: .*No space left.* is whole in .*checkpoint-0+8: mend"
            ):
                prune(tiny(), tmp_path / "run", data=noise_data(512, 8))
            patch.setattr("safetensors.torch.save_file", full)
            with pytest.raises(RunError, match=r"cannot be written .*No space left on device"):
                prune(tiny(dense_epochs=1), tmp_path / "dense", data=noise_data(512, 8))
        prune(tiny(), tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert hiap.macs(hiap.load(tmp_path / "run/compact")) > 0
