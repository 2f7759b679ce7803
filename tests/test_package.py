import re
import subprocess
import sys
from pathlib import Path

import pytest
import timm
from safetensors.torch import save_file

import hiap
from conftest import make
from hiap.cli.main import _parser, main
from hiap.training.config import read_config
from hiap.training.options import FIRST, GROUPS, help_of

OPTIONAL = [
    "accelerate",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "pytest",
    "rich",
    "sklearn",
    "tensorboard",
    "transformers",
]


@pytest.mark.slow
def test_import_is_light() -> None:
    code = (
        "import sys, hiap, torch\n"
        "assert not torch.cuda.is_initialized()\n"
        f"print([name for name in {OPTIONAL} if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names() -> None:
    promised = {"attach", "macs", "MacCost", "harden", "Topology", "extract", "save", "load", "Gate"}
    assert promised <= set(hiap.__all__) and all(hasattr(hiap, name) for name in hiap.__all__)


def test_cli_shows_a_saved_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make()
    topology = hiap.Topology.from_counts(model, heads=[1, 0, None], neurons=[9, 0, None])
    hiap.save(hiap.extract(model, topology), tmp_path / "model")
    assert main(["info", str(tmp_path / "model")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["0", "1", "8", "8", "16"],
        ["1", "0", "0", "0", "0"],
        ["2", "-", "0", "0", "-"],
    ]


def test_cli_errors_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(tmp_path / "nowhere")]) == 1
    captured = capsys.readouterr()
    assert captured.err == f"hiap: {tmp_path / 'nowhere'}: no such folder\n" and not captured.out


def test_cli_without_a_command_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "example: hiap prune --help" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"hiap {hiap.__version__}\n"


@pytest.mark.parametrize("command", ["prune", "demo", "plan", "evaluate", "info", "bench", "measure"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    assert re.search(rf"examples?:\n  hiap {command}", capsys.readouterr().out)


@pytest.mark.slow
def test_cli_plans_prints_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", "digits", "--target", "40%"]) == 0
    assert "target   40% = 40.0%" in capsys.readouterr().out
    assert (
        main(
            [
                "prune",
                "--config",
                "digits",
                "--print-config",
                "--target",
                "30%",
                "--ratio",
                "2:1",
                "--keep-blocks",
                "0,1",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "target: 30%" in text and "ratio:\n- 2.0\n- 1.0" in text and "keep_blocks:\n- 0\n- 1" in text
    assert main(["plan", "--config", "digits", "--target", "1%"]) == 1
    assert re.search(
        r"target of [\d.]+ k MACs \(1.0%\) is out of reach: .* up to [\d.]+ M MACs", capsys.readouterr().err
    )
    assert main(["plan", "--config", "digits", "--target", "100K params"]) == 0
    assert "(100.000 k parameters)" in capsys.readouterr().out
    assert main(["prune", "--config", "digits", "--epochs", "0", "--lr", "-1"]) == 1
    assert "epochs must be at least 1; found 0\n  lr must be positive" in capsys.readouterr().err
    assert (
        main(
            ["plan", "--data", str(tmp_path), "--target", "50%", "--no-pretrained", "--model", "deit_tiny_patch16_224"]
        )
        == 1
    )
    assert "must hold the folders train and val" in capsys.readouterr().err
    for command in (["plan"], ["prune", "--out", str(tmp_path / "run")]):
        assert main([*command, "--config", "digits", "--batch-size", "9999"]) == 1
        assert "batch_size 9999 is more than the 1437 training images" in capsys.readouterr().err
        assert main([*command, "--data", "digits", "--model", "resnet18", "--no-pretrained", "--target", "50%"]) == 1
        assert "it is not a timm VisionTransformer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nope", "--no-pretrained"], "timm cannot make the model nope: Unknown model"),
        (["--model", "resnet18", "--img-size", "64"], r"timm cannot make the model resnet18 with \{'img_size': 64\}"),
        (["--weights", "README.md", "--model", "test_vit"], "README.md does not hold weights"),
        (["--weights", "other.safetensors", "--model", "test_vit"], r"does not fit the model test_vit: size .*more\)"),
        (["--data", "empty", "--model", "test_vit", "--no-pretrained"], "'empty' cannot be read: Found 0 images"),
    ],
)
def test_what_cannot_be_opened_is_said_in_one_line(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "val"):
        (tmp_path / "empty" / split / "cat").mkdir(parents=True)
    (tmp_path / "README.md").write_text("no weights")
    save_file(timm.create_model("test_vit", embed_dim=32, num_heads=2).state_dict(), tmp_path / "other.safetensors")
    assert main(["plan", "--data", "digits", "--target", "50%", *arguments]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error) and error.count("\n") == 1


def test_evaluation_refuses_other_classes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make("one_channel", num_classes=10).float()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 2, 3]))
    hiap.save(compact, tmp_path / "compact", class_names=["zero", *"123456789"])
    assert main(["evaluate", str(tmp_path / "compact"), "--data", "digits"]) == 1
    assert "other classes: 'zero' stands where the data has '0'" in capsys.readouterr().err


def test_evaluation_needs_no_training_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("one_channel", num_classes=10).float()
    hiap.save(hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 2, 3])), tmp_path / "compact")
    monkeypatch.setitem(sys.modules, "accelerate", None)
    for name in ("loop", "context"):  # which other tests may have imported
        monkeypatch.delitem(sys.modules, f"hiap.training.{name}", raising=False)
    assert main(["evaluate", str(tmp_path / "compact"), "--data", "digits"]) == 0
    assert main(["demo", "--out", str(tmp_path / "run")]) == 1


def test_prune_without_data_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("prune", "plan"):
        assert main([command, "--target", "50%"]) == 1
        assert f"hiap: hiap {command} needs images: --data FOLDER with train/ and val/" in capsys.readouterr().err


def test_help_shows_the_usual_options_and_help_all_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for option in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as stopped:
            main(["prune", option])
        assert stopped.value.code == 0
        shown.append(capsys.readouterr().out)
    short, long = shown
    assert all(f"\n  --{name.replace('_', '-')}" in short for name in FIRST) and "--tau-decay" not in short
    assert all(f"  --{name.replace('_', '-')}" in long for name, _, _ in help_of())
    assert all(f"\n{title}:\n" in long for title in GROUPS.values())
    assert "--precision {fp32,bf16,fp16}" in short and "likewise" not in long
    assert max(map(len, short.split("examples:")[0].splitlines())) <= 80
    assert len(FIRST) == 14 and "for ablations:" not in short


def test_options_for_ablations_come_last(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["prune", "--help-all"])
    _, _, last = capsys.readouterr().out.rpartition("\nfor ablations:\n")
    names = [name for name, _, _ in help_of()]
    ablations = names[names.index("gate_mode") :]
    assert [f"--{name.replace('_', '-')}" for name in ablations] == re.findall(r"\n  (--[a-z-]+)", last)
    assert not {*FIRST} & {*ablations}
    paper = {"lambda_macro", "accounting", "gate_lr", "tau_decay", "noise_end", "beta_ffn"}
    assert paper <= {*ablations} and read_config("deit_base_imagenet").lambda_macro == 0.9


def test_old_spellings_are_understood(tmp_path: Path) -> None:
    base = ["measure", "--model", "test_vit", "--img-size", "32"]
    new = _parser().parse_args([*base, "--precision", "fp32", "--batch-size", "2", "--out", "x"])
    old = _parser().parse_args([*base, "--dtype", "fp32", "--batch", "2", "--output", "x"])
    assert vars(new) == vars(old)
    new, old = (
        _parser().parse_args(["bench", "x", *rest.split()])
        for rest in ("--batch-size 1,2 --out y", "--batch 1,2 --json y")
    )
    assert vars(new) == vars(old)


def test_bugs_keep_their_traceback_and_errors_of_users_do_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: object) -> None:
        raise ValueError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr("hiap.training.plan.plan", broken)
        with pytest.raises(ValueError, match="a bug"):
            main(["plan", "--config", "digits"])
    assert main(["plan", "--config", "digits", "--batch-size", "9999"]) == 1
    assert capsys.readouterr().err.startswith("hiap: batch_size 9999")


def test_every_error_is_ours_and_what_it_was() -> None:
    import hiap.errors as errors

    kinds = [getattr(errors, name) for name in errors.__all__ if name != "HiapError"]
    assert len(kinds) == 11
    usual = (ValueError, RuntimeError, TypeError)
    assert all(issubclass(kind, hiap.HiapError) and issubclass(kind, usual) for kind in kinds)
    assert errors.ConfigError is hiap.ConfigError and errors.RunError is hiap.RunError


def test_neither_hiap_nor_its_help_imports_torch() -> None:
    code = "import sys, hiap; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    for arguments in (["--version"], ["--help"], ["prune", "--help"], ["bench", "--help"]):
        code = f"import sys; from hiap.cli.main import main\ntry: main({arguments})\nexcept SystemExit: pass\n"
        subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True)


@pytest.mark.slow
def test_importing_hiap_needs_no_torch_and_tells_timm_when_it_comes() -> None:
    code = """
import sys, importlib.util
import hiap
assert "torch" not in sys.modules
importlib.util.find_spec("timm")  # others may look for it first
import timm
assert timm.is_model("hiap_vit") and "hiap.checkpoint" not in sys.modules
for name in hiap.__all__:
    getattr(hiap, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    subprocess.run([sys.executable, "-c", "import timm, hiap; assert timm.is_model('hiap_vit')"], check=True)
