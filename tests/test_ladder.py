"""Several sizes from one run: each begins with the one above it, and the dense model teaches all of them."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

import hiap
from hiap.budget.target import Target, check_falling
from hiap.cli.main import main
from hiap.errors import BudgetError, ConfigError, RunError
from hiap.models.registry import widths_of
from hiap.pruning.digest import digest_tensors
from hiap.report.gathering import gather
from hiap.training.config import Config
from hiap.training.context import Context
from hiap.training.dense_models import dense_model
from hiap.training.loop import Result, Run, prune
from hiap.training.rungs import folder_name, read_rungs, rung_configs, rung_table
from runs import TINY, noise_data, same, tiny
from test_cost import counted_macs
from test_latency import synthetic

TARGETS = ("80%", "60%", "50%")
DATA = noise_data(512, 8)
SHAPE = {**TINY["model_args"], "img_size": 8}
OWN = ["--config", "digits", "--model-args", json.dumps(SHAPE), "--dense-epochs", "0", "--batch-size", "512"]


def sizes(**given: Any) -> Config:
    """Three sizes, an epoch each, after one of the dense model."""
    own = {"target": ",".join(TARGETS), "epochs": 3, "dense_epochs": 1, "ema": 0.9, "distill_features": 1.0}
    return tiny(**{**own, **given})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result, list[Result], list[str], list[list[int]]]:
    """A run of three sizes: folder, result, results as they came, models that taught, and the labels of all batches."""
    out, results, teachers, labels = tmp_path_factory.mktemp("whole") / "run", [], [], []
    teacher, train_step = Context.teacher, Run.train_step

    def noted(self: Context, dense: torch.nn.Module) -> Any:
        teachers.append(digest_tensors(dense.state_dict()))
        return teacher(self, dense)

    def step(self: Run, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        labels.append(y.tolist())
        return train_step(self, x, y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Context, "teacher", noted)
        patch.setattr(Run, "train_step", step)
        result = prune(sizes(), out, data=DATA, each=results.append)
    return out, result, results, teachers, labels


def stopped(patch: pytest.MonkeyPatch, target: str, stage: str, step: int, killed: bool = False) -> None:
    """Let runs stop before a step: as after Ctrl-C, or as if they were killed."""
    train_step = Run.train_step

    def until(self: Run, *batch: torch.Tensor) -> dict[str, torch.Tensor]:
        if (self.config.target, self.phase.name, self.phase.step) == (target, stage, step):
            if killed:
                raise KeyboardInterrupt
            self.signals.number = signal.SIGINT
        return train_step(self, *batch)

    patch.setattr(Run, "train_step", until)


def test_every_size_meets_its_target_and_is_cut_from_the_one_above(whole: Any) -> None:
    out, result, results, *_ = whole
    dense = hiap.macs(result.dense)
    above = widths_of(result.dense)
    for target, rung, done in zip(TARGETS, result.rungs, results, strict=True):
        model = hiap.load(out / target / "compact")
        allowed = float(target.rstrip("%")) / 100 * dense
        assert allowed - 0.1 * dense < hiap.macs(model) <= allowed
        assert hiap.macs(model) == counted_macs(model, torch.randn(1, 1, 8, 8)) == rung.record["macs"]
        assert list(model.hiap.dense) == widths_of(result.dense)  # of the dense model, however often it was pruned
        assert model.hiap.logit_difference <= model.hiap.tolerance
        for one, larger in zip(widths_of(model), above, strict=True):
            assert all((a or 0) <= (b or 0) for a, b in zip(vars(one).values(), vars(larger).values(), strict=True))
        above = widths_of(model)
        x = torch.randn(2, 1, 8, 8)
        assert done.folder == rung.folder and torch.equal(done.model.cpu()(x), model(x))


def test_reports_set_every_size_against_the_dense_model(whole: Any, capsys: pytest.CaptureFixture[str]) -> None:
    out, result, *_ = whole
    for target in TARGETS:
        found = gather(out / target)
        assert found.dense == widths_of(result.dense)
        assert [block.now for block in found.blocks] == widths_of(hiap.load(out / target / "compact"))
        assert all(len(block.heads) == (block.now.heads or 0) for block in found.blocks)
    for command in (
        ["inspect", str(out)],
        ["diff", str(out), str(out / "50%")],
        ["evaluate", str(out), "--data", "photos"],
    ):
        assert main(command) == 1
        assert f"{out} holds a run of several sizes: name {out / '80%'} or {out / '60%'}" in capsys.readouterr().err


def test_the_dense_model_teaches_every_size(whole: Any) -> None:
    out, result, _, teachers, _ = whole
    trained = digest_tensors(load_file(out / "80%/dense.safetensors"))
    assert teachers == [trained] * 3 and digest_tensors(result.dense.state_dict()) == trained
    assert len({rung.record["dense_top1"] for rung in result.rungs}) == 1
    assert not (out / "60%/dense.safetensors").exists()


def test_the_folder_of_every_size_is_that_of_a_run(whole: Any) -> None:
    out = whole[0]
    assert json.loads((out / "ladder.json").read_text()) == {
        "format": 1,
        "rungs": [{"target": one, "folder": one, "epochs": 1, "state": "done"} for one in TARGETS],
    }
    for target in TARGETS:
        found = {path.name for path in (out / target).iterdir()}
        assert found >= {"config.yaml", "metrics.jsonl", "report.json", "compact"}
        config = hiap.read_config(out / target / "config.yaml")
        assert (config.target, config.epochs, config.rung_epochs) == (target, 1, None)
        stages = [json.loads(line)["stage"] for line in (out / target / "metrics.jsonl").read_text().splitlines()]
        assert stages == (["dense", "recover"] if target == "80%" else ["recover"])


def test_no_size_sees_the_batches_of_another(whole: Any) -> None:
    expected = [y.tolist() for epoch in range(4) for _, y in DATA.train(epoch, 0, 256, 0, 1)]  # one of them dense
    assert whole[4] == expected


def test_a_run_that_is_stopped_in_every_size_ends_bit_identical(whole: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    for target, stage, step, killed in (
        ("80%", "dense", 1, False),
        ("60%", "search", 0, True),
        ("50%", "recover", 1, False),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            stopped(patch, target, stage, step, killed)
            prune(sizes(), out, data=DATA, resume=target != "80%")
        done = [rung.target for rung in read_rungs(out) if rung.state == "done"]
        assert done == list(TARGETS[: TARGETS.index(target)])
        assert all((out / one / "compact").is_dir() for one in done)  # usable while the others train
    with pytest.raises(RunError, match="run holds a run: pass --resume to go on with it, or another --out"):
        prune(sizes(), out, data=DATA)
    with pytest.raises(RunError, match=r"another configuration: seed: 7 \(was: seed: 0\)"):
        prune(sizes(seed=7), out, data=DATA, resume=True)
    prune(sizes(workers=3), out, data=DATA, resume=True)
    assert all(same(whole[0] / one, out / one) for one in TARGETS)


def test_a_size_that_is_added_is_that_of_a_run_with_all(whole: Any, tmp_path: Path) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole[0], out, ignore=shutil.ignore_patterns("50%", ".lock"))
    listed = json.loads((out / "ladder.json").read_text())
    (out / "ladder.json").write_text(json.dumps(listed | {"rungs": listed["rungs"][:2]}))
    config = hiap.read_config(out / "60%/config.yaml", {"target": "50%"})
    report = (out / "80%/report.json").rename(tmp_path / "report.json")
    with pytest.raises(RunError, match=r"80%/report.json is missing, and the run needs what it says; put it back"):
        prune(config, out, data=DATA, further=True)
    report.rename(out / "80%/report.json")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stopped(patch, "50%", "search", 0)
        prune(config, out, data=DATA, further=True)
    with pytest.raises(RunError, match="has not finished: go on with `hiap prune --resume --out"):
        prune(config, out, data=DATA, further=True)
    result = prune(hiap.read_config(out / "config.yaml"), out, data=DATA, resume=True)
    assert same(whole[0] / "50%", out / "50%") and [rung.target for rung in result.rungs] == list(TARGETS)


def test_a_run_of_one_target_goes_further(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(RunError, match="run holds no run: name the folder of a run that `hiap prune` has finished"):
        prune(tiny(), out, data=DATA, further=True)
    prune(tiny(epochs=1), out, data=DATA)
    before = (out / "compact/model.safetensors").read_bytes()
    with pytest.raises(
        BudgetError, match=r"a target of 60% \(20.102 k MACs\) is not below the last size: .*; name a smaller one$"
    ):
        prune(tiny(epochs=1), out, data=DATA, further=True)
    with pytest.raises(BudgetError, match=r"a target of '?40% params has another unit than 60%, which is in"):
        prune(tiny(epochs=1, target="40% params"), out, data=DATA, further=True)
    with pytest.raises(BudgetError, match=r"a target of 335 MACs \(1.0%\) is out of reach"):
        prune(tiny(epochs=1, target="1%"), out, data=DATA, further=True)
    other = timm.create_model("vit_tiny_patch16_224", **TINY["model_args"], num_classes=10)
    with pytest.raises(RunError, match=r"the dense model is not the one that .* began with; name the same --model"):
        prune(tiny(epochs=1, target="40%"), out, data=DATA, further=True, model=other)
    assert not (out / "ladder.json").exists() and not (out / "40%").exists()
    result = prune(tiny(epochs=1, target="40%"), out, data=DATA, further=True)
    assert [(rung.target, rung.path) for rung in result.rungs] == [("60%", out), ("40%", out / "40%")]
    assert hiap.macs(result.model) <= 0.4 * hiap.macs(result.dense)
    assert (out / "compact/model.safetensors").read_bytes() == before


def test_a_saved_model_is_pruned_by_its_folder(whole: Any, tmp_path: Path) -> None:
    folder = whole[0] / "80%"
    config = tiny(model=str(folder), model_args={}, pretrained=True, target="80%", epochs=1)
    result, large = prune(config, tmp_path / "run", data=DATA), hiap.load(folder / "compact")
    assert 0.6 * hiap.macs(large) < hiap.macs(result.model) <= 0.8 * hiap.macs(large)
    assert result.record["dense_macs"] == hiap.macs(large)
    same_model = dense_model(tiny(model=str(folder / "compact"), model_args={}))  # not of the run, of the model
    assert digest_tensors(same_model.state_dict()) == digest_tensors(large.state_dict())
    with pytest.raises(ConfigError, match=r"holds a pruned model, which is taken as it is: leave out --img-size$"):
        prune(tiny(model=str(folder), model_args={}, img_size=16), tmp_path / "other", data=DATA)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"target": "50%,70%"}, "several targets must decrease; found 70% after 50%: name the largest model first"),
        ({"target": "50%,50%"}, "several targets must decrease; found 50% after 50%"),
        ({"target": "70%,69.5%"}, "70% and 69.5% are too close: a model may end 1% below its target"),
        ({"target": "3x,2x"}, "several targets must decrease; found 2x after 3x"),
        ({"target": "70%,0.4G"}, "several targets must have one unit; found 70% and 0.4G: write 70%,50% or"),
        ({"target": "70%,"}, "target '' is not a budget"),
        ({"epochs": 2}, "epochs must be at least 3, one for each target; found 2"),
        ({"rung_epochs": [1, 2]}, r"rung_epochs must be 3 numbers, one for each target, at least 1; found \[1, 2\]"),
        ({"rung_epochs": [1, 0, 2]}, r"rung_epochs must be 3 numbers, .*; found \[1, 0, 2\]"),
        ({"target": "50%", "rung_epochs": [3]}, "rung_epochs needs several targets, such as 70%,50%"),
        ({"stop_after": 2}, "stop_after does not go with several targets"),
    ],
)
def test_targets_and_lengths_that_do_not_go_together_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        sizes(**given)


def test_every_target_is_checked_before_anything_is_written(whole: Any, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"a target of 335 MACs \(1.0%\) is out of reach"):
        prune(sizes(target="80%,1%"), tmp_path / "run", data=DATA)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match=r"60% is one of the sizes of the run in .*: go on with `hiap prune --resume"):
        prune(sizes(target="60%"), whole[0] / "60%", data=DATA, resume=True)
    prune(tiny(epochs=1), tmp_path / "one", data=DATA)
    with pytest.raises(RunError, match="one holds a run of one target: add smaller ones with `hiap prune --from"):
        prune(sizes(), tmp_path / "one", data=DATA, resume=True)
    with pytest.raises(RunError, match="one holds a run: pass --resume"):
        prune(sizes(), tmp_path / "one", data=DATA)


def test_epochs_are_shared_and_folders_are_named_for_any_file_system() -> None:
    assert [one.epochs for one in rung_configs(sizes(epochs=16))] == [5, 5, 6]
    assert [one.epochs for one in rung_configs(sizes(rung_epochs=[4, 2, 9]))] == [4, 2, 9]
    names = {"70%": "70%", " .6G ": "0.6G", "50% params": "50%-params", "1.2 M MACs": "1.2M-MACs", "2000.": "2000"}
    assert {text: folder_name(text) for text in names} == names
    check_falling(["0.6G", "400M"])
    assert [Target.parse(one).kind for one in ("50%", "1G", "50% params", "2x", "3ms", "5mJ")] == [
        *("macs", "macs", "params", "time", "time", "energy")
    ]


def test_floors_are_shares_of_the_dense_model(tmp_path: Path) -> None:
    given = {"min_neurons": 0.5, "min_value_dims": 0.9, "granularities": ["neuron", "value_dim"], "epochs": 2}
    result = prune(sizes(**given, target="90%,80%", dense_epochs=0, round_to=1), tmp_path / "run", data=DATA)
    dense, small = widths_of(result.dense), widths_of(result.model)
    assert all(one.neurons >= 0.5 * whole.neurons for one, whole in zip(small, dense, strict=True))
    assert sum(one.neurons for one in small) < 0.72 * sum(one.neurons for one in dense)  # of the first size: 0.5 * 0.85
    with pytest.raises(BudgetError, match="is out of reach"):
        prune(sizes(**given, target="90%,50%"), tmp_path / "other", data=DATA)


def test_the_table_shows_the_sizes(whole: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, result, *_ = whole
    records = [json.loads((out / target / "report.json").read_text()) for target in TARGETS]
    assert main(["info", str(out)]) == 0
    head, dense, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["target", "top-1", "MACs", "parameters"]
    first = records[0]
    assert dense.split()[:2] == ["dense", f"{first['dense_top1']:.2f}"] and dense.split()[5] == "100.0%"
    for target, record, line in zip(TARGETS, records, lines, strict=True):
        share = f"{record['macs'] / first['dense_macs']:.1%}"
        name, top1, sign, macs, prefix, found, params, of, folder = line.split()
        assert (name, top1, sign, found, folder) == (target, f"{record['top1']:.2f}", "%", share, str(out / target))
        assert (macs, prefix) == (f"{record['macs'] / 1000:.3f}", "k")
        assert (params, of) == (f"{record['params'] / 1000:.3f}", "k")
    assert main(["info", str(out / "60%")]) == 0
    assert f"{records[1]['macs'] / first['dense_macs']:.1%} of 33.504 k" in capsys.readouterr().out
    assert main(["bench", str(out)]) == 1
    text = f"hiap: {out} holds a run of several sizes: name {' or '.join(str(out / one) for one in TARGETS)}\n"
    assert capsys.readouterr().err == text
    shutil.copytree(out, tmp_path / "run")
    (tmp_path / "run/ladder.json").write_text("{}")
    with pytest.raises(RunError, match=r"ladder.json is damaged \(KeyError: 'rungs'\); put it back"):
        read_rungs(tmp_path / "run")
    waiting = [rung.__class__(rung.target, rung.path, 1) for rung in result.rungs]
    assert rung_table(waiting)[0].split() == ["80%", "waiting"]
    assert rung_table([result.rungs[0], waiting[1]])[-1].split() == ["60%", "-", "-", "-", "waiting"]


def test_sizes_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *OWN, "--target", "80%,60%", "--epochs", "2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    names = ["size", "model", "data", "gates", "run", "reach", "target", "size", "start", "gates", "run", "reach"]
    assert [name for name, *_ in lines] == [*names, "target", "time"]
    assert lines[6][:4] == ["target", "80%", "=", "80.0%"] and lines[12][:4] == ["target", "60%", "=", "60.0%"]
    assert lines[8][1:4] == [*lines[8][1:3], "MACs,"] and 70 < float(lines[8][4].rstrip("%")) <= 80


@pytest.mark.slow
def test_the_command_line_goes_further(whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    shutil.copytree(whole[0], out)
    for given, text in (
        (["--target", "70%"], "a target of 70% (23.453 k MACs) is not below the last size: the model in"),
        ([], f"--from {out} needs a --target below that run's, such as 25%"),
        (["--target", "40%", "--out", "x", "--model", "y"], "leave out --model, --out"),
        (["--target", "1ms", "--deploy", "batch=8"], "the table and the folder of that run: leave out --deploy"),
    ):
        assert main(["prune", "--from", out, *given]) == 1
        assert text in capsys.readouterr().err
    assert main(["prune", "--from", out, "--target", "40%"]) == 0
    printed = capsys.readouterr().out
    assert f"size 4 of 4: 40%, in {out}/40%" in printed and printed.count("realised: ") == 1
    assert printed.rpartition("all sizes:\n")[2].splitlines() == rung_table(read_rungs(Path(out)))
    assert [rung.state for rung in read_rungs(Path(out))] == ["done"] * 4
    assert hiap.macs(hiap.load(Path(out, "40%/compact"))) <= 0.4 * 33504
    assert "speed" in json.loads(Path(out, "40%/report.json").read_text())
    assert main(["evaluate", f"{out}/40%", "--data", "digits", "--knn", "--against", "dense"]) == 0


@pytest.mark.slow
def test_a_latency_target_falls_by_one_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "hiap.training.context.measure_error", lambda *_: 1.0
    )  # so small a network is no measure of a clock
    config = sizes(target="1.1x,2x", epochs=2, dense_epochs=0, deploy="fp32,1,eager")
    result = prune(config, tmp_path / "run", data=DATA)
    tables = [(tmp_path / "run" / name / "latency.json").read_bytes() for name in ("1.1x", "2x")]
    assert tables[0] == tables[1]
    first, second = (rung.record for rung in result.rungs)
    assert first["dense_predicted"] == second["dense_predicted"]
    for record, times in ((first, 1.1), (second, 2.0)):
        assert record["predicted"] <= record["dense_predicted"] / times


@pytest.mark.slow
def test_what_the_clock_says_of_one_size_is_known_to_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first network is cut down to 71 % of its target by a table that is 40 % too low; the second goes on there."""
    told = []
    monkeypatch.setattr("hiap.training.context.measure_error", lambda *_: told.append(1.4) or 1.4)
    ffn, attention = (lambda n: 1.0 + 0.01 * n), (lambda h, q, v: 1.0 + 0.01 * h * (q + v))
    synthetic(attention, ffn, dim=16, tokens=5, mode="eager", device="elsewhere").save(tmp_path / "t.json")
    config = sizes(target="1.5x,2x", epochs=2, dense_epochs=0, cost=str(tmp_path / "t.json"))
    first, second = (rung.record for rung in prune(config, tmp_path / "run", data=DATA).rungs)
    assert first["table_error"] == second["table_error"] == 1.4
    assert len(told) in (3, 4)  # two or three networks of the first size, and one of the second
    for record, times in ((first, 1.5), (second, 2.0)):
        assert 0.75 * record["dense_predicted"] / times < record["predicted"] <= record["dense_predicted"] / times
    lines = [json.loads(line) for line in (tmp_path / "run/2x/gates.jsonl").read_text().splitlines()]
    assert lines[-1]["target"] == pytest.approx(1 / 2) and lines[-1]["hard"] <= 1 / 2
    assert lines[0]["allowed"] == pytest.approx(first["predicted"] / first["dense_predicted"])
