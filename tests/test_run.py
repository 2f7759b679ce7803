"""A run as its user sees it: what it says, what it assumes by default, how it is interrupted and taken up again."""

import json
import math
import re
from pathlib import Path

import pytest
import timm
import torch

import hiap
from conftest import write_photos
from forking import run_forked
from hiap.cli.main import main
from hiap.training.config import ConfigError, read_config
from hiap.training.loop import Run, prune
from hiap.training.plan import plan
from hiap.training.progress import clock, epoch_line
from hiap.training.schedule import dense_rate, pruning_rate
from hiap.training.setup import Setup
from runs import TINY, go, noise_data, same, tiny, weights

CPU = torch.device("cpu")


def test_metrics_have_the_accuracy_of_the_epochs_that_were_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = []
    score = Run._score
    monkeypatch.setattr(Run, "_score", lambda self: scores.append(score(self) + len(scores)) or scores[-1])
    result = prune(tiny(eval_every=3, epochs=8), tmp_path / "run", data=noise_data(512, 8))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in lines if "top1" in line] == [3, 6, 8]
    assert [line["top1"] for line in lines if "top1" in line] == scores
    assert result.record["top1"] == scores[-1] - 2


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
            f"report: {out}/report.html",
        ]
        assert "Decisions that are final" in (out / "report.html").read_text()
        assert max(map(len, text.split("saved in")[0].splitlines())) <= 80
        scores = json.loads((out / "report.json").read_text())
        for command in (["info", str(out)], ["evaluate", str(out), "--data", photos, "--val-split", "0.25"]):
            assert main(command) == 0
        assert f"top-1 {scores['top1']:.2f} %" in capsys.readouterr().out

    @pytest.mark.slow
    def test_warnings_of_the_command_are_one_line(self) -> None:
        options = ["--config", "digits", "--model-args", json.dumps(TINY["model_args"]), "--epochs", "1"]
        done = run_forked("interrupted.py", "", "plan", *options, "--dense-epochs", "1")
        assert done.returncode == 0
        text = r"warning: the run has only 11 steps \(1 epochs of 11\), too few .* for about 200 steps\n"
        assert re.fullmatch(text, done.stderr.split("nanobind:")[0])  # which finds objects left in a forked process


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
            go(run, stop)

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
            ("nowhere", "is not a folder"),
            ("table.csv", "there is no such file"),
            (str(Path(__file__).parent), "must hold the folders train and val"),
        ):
            with pytest.raises(ValueError, match=text):
                plan(read_config(None, {"data": data, "target": "50%"}))

    def test_a_model_without_images_is_refused(self, tmp_path: Path) -> None:
        model = timm.create_model("vit_tiny_patch16_224", **TINY["model_args"])
        with pytest.raises(ConfigError, match=r"there are no images: set data .* data=\(train_loader, val_loader\)"):
            prune(hiap.Config(target="50%"), tmp_path / "run", model=model)
        assert not (tmp_path / "run").exists()

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


def test_two_runs_in_one_process_may_differ_in_precision(tmp_path: Path) -> None:
    for precision in ("fp32", "bf16", "fp32"):
        Run(tiny(precision=precision), tmp_path / "run", data=noise_data(512, 8))


def test_errors_name_every_wrong_option() -> None:
    with pytest.raises(ConfigError, match="keep must be last or best; found 'first'"):
        tiny(keep="first")
