"""Commands as a user types them, in a process of their own or through `main`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import save_file

import hiap
from conftest import SMALL, write_photos
from hiap.cli.main import main
from hiap.data.sources import digits
from hiap.speed.bench import Row, table
from hiap.training.config import ConfigError, read_config

DIGITS = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1, "num_classes": 10}
NAME = "vit_tiny_patch16_224"
OPTIONS = ["--model", NAME, "--model-args", json.dumps(DIGITS), "--mean", "0.5", "--std", "0.5", "--data", "digits"]


def hiap_command(*arguments: str) -> tuple[int, str, str]:
    """Status, output and errors of `python -m hiap`."""
    run = subprocess.run([sys.executable, "-m", "hiap", *arguments], capture_output=True, text=True, timeout=120)
    return run.returncode, run.stdout, run.stderr


def dense(**given: object) -> timm.models.VisionTransformer:
    torch.manual_seed(0)
    return timm.create_model(NAME, **{**DIGITS, **given}).eval()


@torch.no_grad()
def score_of(model: torch.nn.Module, mean: float = 0.5, std: float = 0.5) -> str:
    """What `evaluate` is to print, computed from the images."""
    images, labels = digits()[1]
    logits = model((images / 255 - mean) / std)
    best = logits.topk(5, dim=-1).indices == labels.unsqueeze(1)
    top1, top5 = (100 * found.float().mean().item() for found in (best[:, 0], best.any(dim=1)))
    return f"top-1 {top1:.2f} %  top-5 {top5:.2f} %  {len(labels)} images\n"


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run that has ended: its configuration, and the model."""
    model = dense()
    hiap.save(hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 2])), tmp_path / "run/compact")
    (tmp_path / "run/config.yaml").write_text("model: vit_tiny_patch16_224\n")
    return tmp_path / "run"


class TestEvaluate:
    @pytest.mark.slow
    def test_a_dense_model_by_its_name_and_weights(self, tmp_path: Path) -> None:
        model = dense()
        save_file(model.state_dict(), tmp_path / "file.safetensors")
        status, out, err = hiap_command("evaluate", *OPTIONS, "--weights", str(tmp_path / "file.safetensors"))
        assert (status, out, err) == (0, score_of(model), "")

    def test_its_size_and_normalisation_are_taken(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        model = dense()
        save_file(model.state_dict(), tmp_path / "file.safetensors")
        arguments = {name: value for name, value in DIGITS.items() if name not in ("img_size", "num_classes")}
        own = ["--img-size", "8", "--model-args", json.dumps(arguments), "--mean", "0.1", "--std", "0.3"]
        given = ["--model", NAME, "--weights", str(tmp_path / "file.safetensors"), "--data", "digits", *own]
        assert main(["evaluate", *given]) == 0
        assert capsys.readouterr().out == score_of(model, 0.1, 0.3)

    def test_the_folder_of_a_run_stands_for_its_model(
        self, run_folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        normalised = ["--mean", "0.5", "--std", "0.5", "--data", "digits"]
        expected = score_of(hiap.load(run_folder / "compact"))
        for folder in (run_folder, run_folder / "compact"):
            assert main(["evaluate", str(folder), *normalised]) == 0
            assert capsys.readouterr().out == expected

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "give either a folder, or --model NAME"),
            (["run", "--model", NAME], "give either a folder, or --model NAME"),
            (["run", "--weights", "a.pth"], "--weights goes with --model; a folder is scored as it is"),
            (["run", "--img-size", "8"], "--img-size goes with --model; a folder is scored as it is"),
            (["run", "--no-pretrained"], "--pretrained goes with --model; a folder is scored as it is"),
            (["nowhere"], "nowhere: no such folder"),
            (["unfinished"], "unfinished holds a run that has not finished: there is no unfinished/compact yet"),
            (["run", "--mean", "0.5,0.5"], "mean and std must have 1 values, one per channel"),
            (["run", "--std", "0"], "std must be positive; found [0.0]"),
            (["run", "--workers", "5000"], "workers must be at most 1024; found 5000"),
            (["--model", "nonsense", "--no-pretrained"], "timm cannot make the model nonsense: Unknown model"),
            (["--model", "resnet18", "--no-pretrained"], "the model is a ResNet: it is not a timm VisionTransformer"),
            (["--model", NAME, "--no-pretrained"], "the model has 1000 classes, the data 10"),
            (["--model", NAME, "--weights", "nowhere.pth"], "weights must be a file that exists; found 'nowhere.pth'"),
            (["--model", NAME, "--weights", "bare.pth"], "bare.pth has no classifier, so only its features can be"),
        ],
    )
    def test_what_cannot_be_scored(
        self,
        arguments: list[str],
        message: str,
        run_folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.chdir(run_folder.parent)
        Path("unfinished").mkdir()
        Path("unfinished/config.yaml").write_text("model: vit_tiny_patch16_224\n")
        if "bare.pth" in arguments:
            torch.save(dense(num_classes=0).state_dict(), "bare.pth")
            arguments = [*arguments, "--model-args", json.dumps(DIGITS)]
        assert main(["evaluate", *arguments, "--data", "digits"]) == 1
        captured = capsys.readouterr()
        assert captured.err.startswith("hiap: ") and message in captured.err and not captured.out
        assert captured.err.count("\n") <= 3

    def test_data_must_be_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["evaluate", "--model", NAME])
        assert "the following arguments are required: --data" in capsys.readouterr().err

    def test_a_folder_of_photos(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        photos = write_photos(tmp_path / "photos")
        arguments = ["--model-args", json.dumps({**SMALL, "num_classes": 2}), "--workers", "0"]
        assert main(["evaluate", "--model", NAME, "--no-pretrained", *arguments, "--data", photos]) == 0
        assert capsys.readouterr().out.endswith("top-5 100.00 %  8 images\n")

    @pytest.mark.parametrize(("given", "batch"), [([], 64), (["--batch-size", "7"], 7)])
    @pytest.mark.skipif(torch.cuda.is_available(), reason="the default on a CPU")
    def test_batches_fit_a_cpu(
        self, given: list[str], batch: int, run_folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []
        monkeypatch.setattr("hiap.data.sources.ByteData.val", lambda self, size: seen.append(size) or iter([]))
        monkeypatch.setattr(
            "hiap.training.evaluate.evaluate", lambda model, data, size: list(data.val(size)) or FIGURES
        )
        assert main(["evaluate", str(run_folder), "--data", "digits", *given]) == 0
        assert seen == [batch]


FIGURES = {"top1": 1.0, "top5": 2.0, "images": 3}


class TestInfoAndBench:
    def test_info_of_a_run_fits_80_columns(self, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["info", str(run_folder)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[-2].split() == ["0", "1", "8", "8", "64"] and max(map(len, lines)) <= 80

    def test_a_run_that_has_not_finished(self, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (run_folder / "compact").rename(run_folder.parent / "elsewhere")
        for command in ("info", "bench"):
            assert main([command, str(run_folder)]) == 1
            expected = f"{run_folder} holds a run that has not finished: there is no {run_folder}/compact yet"
            assert capsys.readouterr() == ("", f"hiap: {expected}\n")

    @pytest.mark.skipif(torch.cuda.is_available(), reason="the defaults on a CPU")
    def test_bench_of_a_run_on_a_cpu(self, run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        file = run_folder / "speed.json"
        quick = ["--warmup", "1", "--runs", "1", "--json", str(file)]
        assert main(["bench", str(run_folder), *quick]) == 0
        out = capsys.readouterr().out
        assert json.loads(file.read_text())["options"]["batches"] == [1, 8]
        assert max(map(len, out.splitlines()[1:])) <= 100
        assert main(["bench", str(run_folder), "--against", str(run_folder), *quick]) == 0
        assert "other, optimised" in capsys.readouterr().out

    def test_the_table_explains_its_columns_within_100_of_them(self) -> None:
        rows = [
            Row(f"{name}{more}", "bf16", 1024, mode, ms, 0.1234, 1024e3 / ms, macs, "efficient")
            for mode in ("eager", "compile+graph")
            for name, ms, macs in (("dense", 1000.0, 1760), ("compact", 450.0, 740))
            for more in ("", ", optimised")
        ]
        lines = table(rows, "dense").splitlines()
        assert max(map(len, lines)) <= 100
        assert " ".join(lines[0].split()) == "type batch mode ms spread images/s speed-up share gain attention"
        for head in ("share", "gain"):
            end = lines[0].index(head) + len(head)
            assert lines[3][:end].endswith({"share": " 93%", "gain": " 89%"}[head])
        assert lines[-4:] == [
            "share = speed-up / MAC ratio, the part of the cut in MACs that is realised as speed",
            "gain  = (speed-up - 1) / (MAC ratio - 1), the same, with 0 % for a network that is no faster",
            "MAC ratio = MACs of the first network / MACs of the row",
            "spread = ms between the quartiles of the rounds",
        ]
        alone = table(rows[:1], "dense")
        assert "share =" not in alone and len(alone.splitlines()) == 2

    def test_a_model_that_timm_refuses_to_be_timed(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        output = ["-o", str(tmp_path / "table.json")]
        assert main(["measure", "--model", NAME, "--img-size", "999999999", *output]) == 1
        assert "timm cannot make the model vit_tiny_patch16_224 with {'img_size': 999999999}" in capsys.readouterr().err
        assert main(["bench", "--model", "nonsense", "--topology", "deit_base_7.4g"]) == 1
        assert "timm cannot make the model nonsense: Unknown model" in capsys.readouterr().err


BOMB = "a: &a [1, 1]\n" + "".join(f"{b}: &{b} [*{a}, *{a}]\n" for a, b in zip("abcdef", "bcdefg", strict=True))


class TestConfigurationFiles:
    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (BOMB, "FILE is not valid YAML: anchors and aliases (& and *) are not read in line 1"),
            ("epochs: 3\nmodel_args: " + "[" * 50000, "values are nested more than 20 deep in line 2"),
            ("epochs: 3\nepochs: 4", "FILE is not valid YAML: 'epochs' is given twice in line 2"),
            ("a: 1\n" * 30000, "FILE has more than 100000 bytes: it is not a configuration"),
            (b"\x80\x81\xff", "FILE is not text in UTF-8: it is not a configuration"),
            ("a\0b", "FILE cannot be read: unacceptable character #x0000"),
            ("epochs: " + "9" * 5000, "is too long for a number in line 1"),
            ("epochs: !!int ''", "FILE is not valid YAML: '' is not a valid int (string index out of range) in line 1"),
            ("data: 2026-13-45", "'2026-13-45' is not a valid timestamp (month must be in 1..12) in line 1"),
            ("a: [", "FILE is not valid YAML: expected the node content, but found '<stream end>' in line 1"),
            ("", "FILE must hold options and values, one per line"),
            ("- a", "FILE must hold options and values, one per line"),
            ("lr: .inf", "the configuration is wrong:\n  lr must be finite; found inf"),
            ("lr: nan\ntarget: 50%", "the configuration is wrong:\n  lr must be finite; found nan"),
            ("mean: [0.5, .nan]\ntarget: 50%", "\n  mean must be finite; found [0.5, nan]"),
            ("lr: 1e999999999\ntarget: 50%", "\n  lr must be finite; found inf"),
            ("epochs: 10000000\ntarget: 50%", "\n  epochs must be at most 1000000; found 10000000"),
            ("seed: 9223372036854775808\ntarget: 50%", "\n  seed must be at most 9223372036854775807; found"),
            ("keep_blocks: [9999999999]\ntarget: 50%", "keep_blocks must be at most 2147483647; found [9999999999]"),
            ("model_args: {1: 2}", "\n  model_args must be dict[str, any]; found {1: 2}"),
            ("".join(f"a{i}: 1\n" for i in range(30)), "unknown option 'a19'\n  and 10 more"),
        ],
    )  # fmt: skip
    def test_what_is_no_configuration_is_refused(self, content: str | bytes, message: str, tmp_path: Path) -> None:
        file = tmp_path / "config.yaml"
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ConfigError) as caught:
            read_config(file)
        assert message in str(caught.value).replace(str(file), "FILE")

    def test_what_is_no_file_is_refused(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path, tmp_path / "pipe"):
            with pytest.raises(ConfigError, match="is not a file; --config takes a YAML file or a recipe: ablation"):
                read_config(path)
        for text in ("a\0b", "a" * 5000):
            with pytest.raises(ConfigError, match="no recipe and no file 'a"):
                read_config(text)
            with pytest.raises(ConfigError, match="weights must be a file that exists"):
                read_config("digits", {"weights": text})

    def test_numbers_without_a_point_are_numbers(self, tmp_path: Path) -> None:
        (tmp_path / "config.yaml").write_text("target: 50%\nlr: 1e-3\nmean: [5e-1, 0.5, 1]\nclip_grad: 1E2\n")
        config = read_config(tmp_path / "config.yaml")
        assert (config.lr, config.mean, config.clip_grad) == (1e-3, [0.5, 0.5, 1], 100.0)

    @pytest.mark.parametrize("option", ["--warmup-epochs", "--lr", "--clip-grad", "--min-neurons", "--lambda-macro"])
    @pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
    def test_a_number_on_the_command_line_must_be_finite(
        self, option: str, value: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["prune", "--config", "digits", "--print-config", f"{option}={value}"]) == 1
        name = option[2:].replace("-", "_")
        assert f"\n  {name} must be finite; found {value}\n" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("option", "value", "message"),
        [
            ("--model-args", "x", """must be a JSON object such as '{"depth": 6}'; found 'x' (Expecting value"""),
            ("--model-args", "[1]", """must be a JSON object such as '{"depth": 6}'; found '[1]'"""),
            ("--model-args", '{"drop_rate": NaN}', "(NaN is not JSON)"),
            ("--model-args", "[" * 100000, "must be a JSON object; found values nested too deeply"),
            ("--model-args", '{"depth": ' + "9" * 5000 + "}", "must be a JSON object such as"),
            ("--ratio", "2:x", "argument --ratio: must be two numbers such as 2:1; found '2:x'"),
        ],
    )
    def test_a_value_that_cannot_be_read(
        self, option: str, value: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as stopped:
            main(["plan", option, value])
        error = capsys.readouterr().err
        assert stopped.value.code == 2 and message in error and len(error.splitlines()[-1]) < 400

    def test_arguments_of_the_model_that_timm_refuses(self, capsys: pytest.CaptureFixture[str]) -> None:
        given = json.dumps({**DIGITS, "num_heads": 3})
        assert main(["plan", "--config", "digits", "--model-args", given]) == 1
        error = capsys.readouterr().err
        assert error.startswith("hiap: timm cannot make the model vit_tiny_patch16_224 with {'depth': 2, 'embed_dim'")
        assert "divisible by" in error and error.count("\n") == 1
