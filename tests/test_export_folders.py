"""Folders for timm and Transformers, read by these libraries and compared with the model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import hiap
from conftest import make
from hiap.atomic import replace_folder
from hiap.cli.main import main
from hiap.export.exporting import export_model

NAMES = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]


def cut(model: nn.Module, **counts: Any) -> nn.Module:
    compact = hiap.extract(model, hiap.Topology.from_counts(model, **counts), 1)
    compact.class_names = NAMES
    return compact


@pytest.fixture(scope="module")
def vit() -> nn.Module:
    return make("deit3").float()  # with layer scale, and class tokens apart from positions


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_timm_reads_a_network_of_equal_blocks_as_one_of_its_own(
    vit: nn.Module, pixels: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compact = cut(vit, neurons=[40, None, 40], heads=[3, None, 3])  # the second block is gone
    hiap.save(compact, tmp_path / "folder")
    assert main(["export", str(tmp_path / "folder"), "--format", "timm", "-o", str(tmp_path / "plain")]) == 0
    out = capsys.readouterr().out
    assert "checked     logits within" in out
    assert f"load with   timm.create_model('local-dir:{tmp_path / 'plain'}', pretrained=True)\n" in out
    config = json.loads((tmp_path / "plain/config.json").read_text())
    assert config["architecture"] == "deit3_small_patch16_224" and config["label_names"] == NAMES
    found = timm.create_model(f"local-dir:{tmp_path / 'plain'}", pretrained=True).eval()
    assert type(found.blocks[0]).__module__.startswith("timm.") and len(found.blocks) == 2
    assert found.blocks[0].mlp.fc1.out_features == 40 and hiap.macs(found) == hiap.macs(compact)
    assert torch.allclose(found(pixels), compact(pixels), rtol=0, atol=1e-5 * float(compact(pixels).abs().max()))
    before = (tmp_path / "folder/config.json").read_bytes()
    itself = str(tmp_path / "folder")
    assert main(["export", itself, "--format", "timm", "-o", itself, "--overwrite"]) == 1
    assert "folder is a compact model of HiAP, which would be lost: name another folder" in capsys.readouterr().err
    assert (tmp_path / "folder/config.json").read_bytes() == before
    report = json.loads((tmp_path / "plain.json").read_text())
    assert max(report["difference"].values()) <= 1e-5 and report["format"] == "timm"
    assert report["bytes"] == sum(file.stat().st_size for file in (tmp_path / "plain").iterdir())


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"heads": [3, 2, 3]}, r"timm cannot make block 1 .*heads=2.*: it has whole branches of 3 heads only"),
        ({"value_dims": [8, 8, [4, 4, 4]]}, r"timm cannot make block 2 "),
        ({"neurons": [40, 0, 40]}, r"timm cannot make block 1 .*neurons=0"),
        ({"neurons": [40, 48, 40]}, "different widths: block 0 has 40 neurons, block 1 48"),
    ],
)
def test_what_timm_cannot_make_is_refused_with_what_to_use_instead(
    vit: nn.Module, tmp_path: Path, counts: dict[str, Any], message: str
) -> None:
    with pytest.raises(hiap.InputError, match=f"{message}.*create_model\\('local-dir:FOLDER'\\) after `import hiap`"):
        export_model(cut(vit, **counts), tmp_path / "plain", "timm")
    assert not list(tmp_path.iterdir())


@torch.no_grad()
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_transformers_reads_a_ragged_network(precision: str, pixels: torch.Tensor, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    size = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.ViTConfig(**size, image_size=32, patch_size=8, num_labels=7)
    compact = cut(transformers.ViTForImageClassification(config).eval(), heads=[1, None, 2], neurons=[40, 0, 24])
    report = export_model(compact, tmp_path / "hf", "transformers", precision)
    found = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "hf").eval().float()
    allowed = {"fp32": 1e-6, "fp16": 1e-2}[precision] * float(compact(pixels).logits.abs().max())
    assert torch.allclose(found(pixels).logits, compact(pixels).logits, rtol=0, atol=allowed)
    assert report["tolerance"] == {"fp32": 1e-4, "fp16": 2e-2}[precision]
    assert {file.name for file in tmp_path.iterdir()} == {"hf", "hf.json"}


def test_folders_that_cannot_be_written_are_refused_first(vit: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, inside in (("mine", "notes.txt"), ("taken", "config.json")):
        (tmp_path / name).mkdir()
        (tmp_path / name / inside).touch()
    export: Callable[..., Any] = export_model
    for name, form, more, message in (
        ("new", "transformers", {}, "transformers is for models of Transformers; found a VisionTransformer"),
        ("new", "timm", {"batch": 1}, "timm is a folder of weights: it takes any batch, and has no INT8"),
        ("new", "timm", {"quantize": "int8"}, "timm is a folder of weights"),
        ("new", "timm", {"precision": "bf16"}, "precision must be one of fp32, fp16; found 'bf16'"),
        ("file", "timm", {}, "is a file; timm is written as a folder"),
        ("none/new", "timm", {}, "there is no folder"),
        ("mine", "timm", {"overwrite": True}, "holds 'notes.txt', which would be lost: name another folder"),
        ("taken", "timm", {}, "exists already: name another folder, or pass --overwrite"),
    ):
        with pytest.raises(hiap.InputError, match=message):
            export(vit, tmp_path / name, form, **more)
    assert {file.name for file in tmp_path.iterdir()} == {"file", "mine", "taken"}
    export(vit, tmp_path / "taken", "timm", overwrite=True)
    assert {file.name for file in (tmp_path / "taken").iterdir()} == {"config.json", "model.safetensors"}


@pytest.mark.parametrize("when", ["before the old folder is moved", "after it is moved"])
def test_a_folder_that_is_replaced_comes_back_when_ctrl_c_is_pressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    for name in ("target", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    usual = Path.rename

    def interrupted(self: Path, target: Path) -> None:
        if self.name == "target":
            if when.startswith("after"):
                usual(self, target)
            raise KeyboardInterrupt
        usual(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(tmp_path / "target", tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "target/file").read_text() == "target" and not (tmp_path / "old").exists()
    monkeypatch.undo()
    replace_folder(tmp_path / "target", tmp_path / "new", tmp_path / "old")
    assert [(tmp_path / name / "file").read_text() for name in ("target", "old")] == ["new", "target"]
