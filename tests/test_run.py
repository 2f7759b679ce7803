"""A run as its user sees it: what it says, what it assumes by default, how it is interrupted and taken up again."""

import json
import math
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

import hiap
from conftest import write_photos
from hiap.cli.main import main
from hiap.training.config import ConfigError, read_config
from hiap.training.loop import Run, prune
from hiap.training.plan import plan
from hiap.training.progress import clock, epoch_line
from hiap.training.run_folder import RunError
from hiap.training.schedule import dense_rate, pruning_rate
from hiap.training.setup import Setup
from test_train import TINY, noise_data, tiny

CPU = torch.device("cpu")


def weights(folder: Path, classes: int = 10, **changes: Any) -> str:
    """A file with weights of the tiny model."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**TINY["model_args"], "num_classes": classes, **changes})
    save_file(model.state_dict(), folder / "weights.safetensors")
    return str(folder / "weights.safetensors")


def same(first: Path, second: Path) -> bool:
    """Whether two runs ended with the same weights and the same metrics, but for times."""
    one, two = (load_file(run / "compact/model.safetensors") for run in (first, second))
    lines = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (first, second)]
    for line in (*lines[0], *lines[1]):
        del line["seconds"], line["images_per_s"]
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one) and lines[0] == lines[1]


class TestDefaults:
    def test_the_learning_rate_follows_batch_and_length(self) -> None:
        assert pruning_rate(64, 50_000) == pytest.approx(2.5e-4)
        assert pruning_rate(256, 300_000) == pytest.approx(5e-4)
        assert pruning_rate(1024, 300_000) == pruning_rate(4096, 300_000) == pytest.approx(1e-3)
        assert pruning_rate(256, 2_400_000) == pytest.approx(2.5e-4)  # eight times as long: half
        assert pruning_rate(256, 300 * 1_281_167) == pytest.approx(5e-5, rel=0.1)  # the paper's run and its rate
        assert dense_rate(16, True) == dense_rate(256, True) == pytest.approx(1e-4)
        assert dense_rate(1024, False) == pytest.approx(2e-3)

    def test_a_run_uses_them(self, tmp_path: Path) -> None:
        run = Run(tiny(lr=None, batch_size=64, warmup_epochs=None), tmp_path / "run", data=noise_data(512, 8))
        run.resume_or_begin()
        assert run.parts.lr == pytest.approx(2.5e-4) == run.phase.optimizer.param_groups[0]["initial_lr"]
        assert run.phase.lr_scheduler.warmup_t == round(0.05 * 4 * 8)
        assert run.record["lr"] == run.parts.lr

    @pytest.mark.parametrize(("images", "epochs", "batch"), [(100_000, 15, 256), (1000, 15, 64), (96, 15, 16)])
    def test_batches_fit_small_sets(self, images: int, epochs: int, batch: int) -> None:
        parts = Setup(tiny(batch_size=0, epochs=epochs), CPU, data=noise_data(images, 8))
        assert parts.config.batch_size == batch
        assert parts.schedule.total >= 200 or batch == 16

    def test_weights_of_other_classes_are_fine_tuned_first(self, tmp_path: Path) -> None:
        own = {"weights": weights(tmp_path, classes=3), "pretrained": True, "dense_epochs": None, "dense_lr": None}
        run = Run(tiny(**own), tmp_path / "run", data=noise_data(512, 8))
        assert run.parts.dense_epochs == math.ceil(4 / 3) and run.parts.new_classifier
        assert (
            "dense    fine-tuned first for 2 epochs, learning rate 1.0e-04, with a new classifier" in run.parts.lines()
        )
        run.resume_or_begin()
        assert run.phase.name == "dense"
        head = set(map(id, run.phase.network.head.parameters()))
        rates = {id(p) in head: g["initial_lr"] for g in run.phase.optimizer.param_groups for p in g["params"]}
        assert rates == {True: pytest.approx(1e-3), False: pytest.approx(1e-4)}
        result = run.go()
        assert result.record["dense_top1"] >= 0 and hiap.load(tmp_path / "run/compact").num_classes == 10

    def test_a_model_object_with_a_new_classifier_does_not_teach_untrained(self) -> None:
        model = timm.create_model("vit_tiny_patch16_224", **{**TINY["model_args"], "num_classes": 7})
        with pytest.raises(ConfigError, match=r"weights of VisionTransformer are for 7 classes, the data has 10"):
            Setup(tiny(pretrained=False, dense_epochs=0), CPU, data=noise_data(512, 8), model=model)

    def test_weights_of_the_same_classes_are_pruned_at_once(self, tmp_path: Path) -> None:
        parts = Setup(tiny(weights=weights(tmp_path), dense_epochs=None), CPU, data=noise_data(512, 8))
        assert parts.dense_epochs == 0 and not parts.new_classifier


class TestWords:
    def test_few_steps_are_said_by_plan_and_prune(self, tmp_path: Path) -> None:
        text = (
            r"the run has only 8 steps \(4 epochs of 2\), too few to learn .*: pass --batch-size 8, for about 200 steps"
        )
        with pytest.warns(UserWarning, match=text):
            prune(tiny(), tmp_path / "run", data=noise_data(512, 8))
        text = r"only 10 steps \(2 epochs of 5\), .*: pass --batch-size 8,"
        with pytest.warns(UserWarning, match=text):
            plan(tiny(epochs=2))

    def test_a_random_network_does_not_teach_in_silence(self, recwarn: pytest.WarningsRecorder, tmp_path: Path) -> None:
        Setup(tiny(), CPU, data=noise_data(512, 8)).warn()
        assert any("has random weights and is its own teacher" in str(found.message) for found in recwarn)
        recwarn.clear()
        for given in ({"teacher": "none"}, {"dense_epochs": 1}, {"weights": weights(tmp_path)}):
            Setup(tiny(**given), CPU, data=noise_data(512, 8)).warn()
        assert not any("random weights" in str(found.message) for found in recwarn)

    def test_the_dense_model_is_scored_before_anything_is_trained(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Run, "train_step", interrupted)
        for epochs in (0, 1):  # of the dense model
            run = Run(
                tiny(weights=weights(tmp_path), dense_epochs=epochs), tmp_path / str(epochs), data=noise_data(512, 8)
            )
            with (
                pytest.warns(UserWarning, match=r"scores [\d.]+ %, near chance \(10\.00 %\): are --mean, --std"),
                pytest.raises(KeyboardInterrupt),
            ):
                run.go()
            assert re.search(
                r"^dense    top-1 [\d.]+ % on 16 validation images$", capsys.readouterr().out, re.MULTILINE
            )

    @pytest.mark.slow
    def test_lines_fit_80_columns(self) -> None:
        line = {"stage": "recover", "epoch": 300, "epochs": 300, "loss": 12.3456, "top1": 71.05, "seconds": 4330.0}
        assert len(epoch_line({**line, "hard_macs": 0.613}, "1.2M params")) <= 80
        assert epoch_line({**line, "cost": 1.2345}, "2.0x").endswith("cost 1.234 -> 2.0x  1:12:10")
        model = {"img_size": 224, "depth": 12, "num_classes": 10, "in_chans": 1}
        config = tiny(model="vit_base_patch16_clip_quickgelu_224", model_args=model, target="50%", dense_epochs=3)
        assert max(map(len, Setup(config, CPU, data=noise_data(512, 8)).lines())) <= 80
        assert [clock(seconds) for seconds in (0.2, 65, 3600)] == ["0:00", "1:05", "1:00:00"]

    def test_plan_predicts_the_time(self) -> None:
        lines = plan(tiny(target="40%"))
        assert re.fullmatch(r"time     about \d+:\d\d on this machine \(.+\)", lines[-1])
        assert "target   40% = 40.0%" in lines[-2]

    def test_the_end_says_what_to_do_next(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        out, photos = tmp_path / "my run", write_photos(tmp_path / "photos")
        model = json.dumps({"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2})
        options = ["--model-args", model, "--no-pretrained", "--teacher", "none", "--epochs", "1", "--batch-size", "4"]
        options += ["--data", photos, "--val-split", "0.25", "--target", "60%", "--workers", "0"]
        assert main(["prune", *options, "--out", str(out)]) == 0
        text = capsys.readouterr().out
        assert text.startswith("reading the model and the data\nmodel    vit_tiny_patch16_224: ")
        assert "kept the last epoch; --keep best keeps the best on the validation images\n" in text
        next_lines = text[text.index("saved in ") :].splitlines()
        assert next_lines == [
            f"saved in {out}/compact; next:",
            f"  hiap info '{out}'",
            f"  hiap evaluate '{out}' --data {photos} --val-split 0.25",
            f"  hiap bench '{out}'",
        ]
        assert max(map(len, text.split("saved in")[0].splitlines())) <= 80
        scores = json.loads((out / "report.json").read_text())
        for command in (["info", str(out)], ["evaluate", str(out), "--data", photos, "--val-split", "0.25"]):
            assert main(command) == 0
        assert f"top-1 {scores['top1']:.2f} %" in capsys.readouterr().out

    @pytest.mark.slow
    def test_warnings_of_the_command_are_one_line(self) -> None:
        options = ["--config", "digits", "--model-args", json.dumps(TINY["model_args"]), "--epochs", "1"]
        done = subprocess.run(
            [sys.executable, "-m", "hiap", "plan", *options, "--dense-epochs", "1"], capture_output=True, text=True
        )
        assert done.returncode == 0
        text = r"warning: the run has only 11 steps \(1 epochs of 11\), too few .* for about 200 steps\n"
        assert re.fullmatch(text, done.stderr)


class TestModelsAndDataOfOnesOwn:
    def test_a_model_object_is_pruned_and_left_alone(self, tmp_path: Path) -> None:
        torch.manual_seed(3)
        model = timm.create_model("vit_tiny_patch16_224", **{**TINY["model_args"], "num_classes": 10}).eval()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        result = prune(tiny(epochs=2), tmp_path / "run", data=noise_data(512, 8), model=model)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in result.dense.state_dict().items())
        assert hiap.macs(result.model) <= 0.6 * hiap.macs(model)

    @pytest.mark.slow
    def test_loaders_are_trained_on_and_resumed(self, tmp_path: Path) -> None:
        pictures = torch.randn(96, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        images = torch.utils.data.TensorDataset(pictures, torch.arange(96) % 10)

        def run(name: str, stop: int | None = None) -> None:
            loaders = [torch.utils.data.DataLoader(images, 16, shuffle=shuffle) for shuffle in (True, False)]
            data = hiap.LoaderData(*loaders, classes=10)
            run = Run(tiny(batch_size=0, epochs=2), tmp_path / name, (tmp_path / name).exists(), data=data)
            assert run.config.batch_size == 16 and run.parts.per_epoch == 6
            step = run.train_step
            run.train_step = lambda *batch: (_signalled(run, stop), step(*batch))[1]
            if stop is None:
                run.go()
            else:
                with pytest.raises(KeyboardInterrupt):
                    run.go()

        run("whole")
        run("stopped", stop=8)
        run("stopped")
        assert same(tmp_path / "whole", tmp_path / "stopped")
        with pytest.raises(TypeError, match="data must be a pair of loaders"):
            prune(tiny(), tmp_path / "other", data=7)

    def test_data_is_looked_for_before_weights_are_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fetched(*arguments: object, **options: object) -> None:
            raise AssertionError("weights were fetched")

        monkeypatch.setattr("timm.create_model", fetched)
        for data, text in (
            ("nowhere", "is no folder"),
            ("table.csv", "there is no such file"),
            (str(Path(__file__).parent), "must hold the folders train and val"),
        ):
            with pytest.raises(ValueError, match=text):
                plan(read_config(None, {"data": data, "target": "50%"}))

    def test_what_cannot_be_saved_is_refused_before_training(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = timm.create_model("vit_tiny_patch16_224", **{**TINY["model_args"], "num_classes": 10})
        model.head = torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Linear(8, 10))
        with pytest.raises(hiap.CheckpointError):
            prune(tiny(), tmp_path / "run", data=noise_data(512, 8), model=model)
        assert not (tmp_path / "run").exists()
        model = timm.create_model("vit_tiny_patch16_224", **{**TINY["model_args"], "num_classes": 10})
        model.blocks[1].mlp.fc1.weight.data[2, 3] = math.nan
        with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.fc1\.weight has 1 value"):
            prune(tiny(), tmp_path / "run", data=noise_data(512, 8), model=model)


def _signalled(run: Run, step: int | None) -> None:
    if step is not None and run.phase.step + 1 == step:
        run.signals.number = signal.SIGINT


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
        run.train_step = lambda *batch: (_signalled(run, 7), step(*batch))[1]
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
            _signalled(self, 8)
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
        run.train_step = lambda *batch: (_signalled(run, 3 if run.phase.name == "search" else None), step(*batch))[1]
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
            patch.setattr(Run, "train_step", lambda self, *batch: (_signalled(self, 3), train_step(self, *batch))[1])
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

        with pytest.warns(UserWarning, match=r"began with 2 processes and goes on with 1: .* not bit-identical"):
            self.resumed(stopped, tmp_path, change)

    def test_a_full_disk_at_the_end_names_the_trained_network(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("hiap.training.loop.save", full)
            with pytest.raises(
                RunError, match=r"cannot be saved: .*No space left.* is whole in .*checkpoint-0+8: mend"
            ):
                prune(tiny(), tmp_path / "run", data=noise_data(512, 8))
            patch.setattr("safetensors.torch.save_file", full)
            with pytest.raises(RunError, match=r"cannot be written .*No space left on device"):
                prune(tiny(dense_epochs=1), tmp_path / "dense", data=noise_data(512, 8))
        prune(tiny(), tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert hiap.macs(hiap.load(tmp_path / "run/compact")) > 0


def test_two_runs_in_one_process_may_differ_in_precision(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16", "fp32"):
        Run(tiny(precision=precision), tmp_path / "run", data=noise_data(512, 8))


def test_errors_name_every_wrong_option() -> None:
    with pytest.raises(ConfigError, match="keep must be last or best; found 'first'"):
        tiny(keep="first")
