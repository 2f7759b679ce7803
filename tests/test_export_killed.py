"""An export that is killed, or meets a full disk: nothing half-written appears, and what was there is not lost."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from conftest import make
from exported import file_of
from forking import run_forked
from hiap.atomic import scratch_beside
from hiap.export.exporting import export_model
from hiap.export.formats import find_format

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    return make("augreg", depth=1).float()


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder by their names; hidden ones are not looked at."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    named = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    return {name: content for name, content in named.items() if not name.startswith(".")}


def full(*arguments: Any, **options: Any) -> None:
    for one in arguments:
        if isinstance(one, Path) and one.suffix:
            one.write_bytes(b"half of a file")
    raise OSError(28, "No space left on device")


def test_a_folder_that_is_killed_while_it_is_written_leaves_the_old_one(tiny: nn.Module, tmp_path: Path) -> None:
    export_model(make("deit", depth=1).float(), tmp_path / "plain", "timm")
    before = contents(tmp_path)
    assert run_forked("killed_export.py", "comparing", "timm", str(tmp_path / "plain")).returncode == -9
    assert contents(tmp_path) == before and len(list(tmp_path.iterdir())) == 3
    export_model(tiny, tmp_path / "plain", "timm", overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"plain", "plain.json"}
    assert b"vit_tiny_patch16_224" in contents(tmp_path)["plain/config.json"]


def test_a_folder_that_is_killed_while_it_is_replaced_comes_back(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_model(make("deit", depth=1).float(), tmp_path / "plain", "timm")
    before = contents(tmp_path / "plain")
    assert run_forked("killed_export.py", "2", "timm", str(tmp_path / "plain")).returncode == -9
    assert not contents(tmp_path)
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr("hiap.export.folders.write_timm", full)
        export_model(tiny, tmp_path / "plain", "timm")
    assert contents(tmp_path / "plain") == before and len(list(tmp_path.iterdir())) == 1
    export_model(tiny, tmp_path / "plain", "timm", overwrite=True)
    assert {file.name for file in tmp_path.iterdir()} == {"plain", "plain.json"}


@pytest.mark.parametrize("number", range(1, 8))
def test_of_two_files_that_are_replaced_the_old_pair_or_the_new_one_is_left(number: int, tmp_path: Path) -> None:
    names = ["model.bin", "model.xml", "model.xml.json"]
    for name in names:
        (tmp_path / name).write_text("old")
    killed = run_forked("killed_export.py", str(number), "two files", str(tmp_path / "model.xml")).returncode
    assert killed == (-9 if number <= 6 else 0)
    if "model.xml" in (now := contents(tmp_path)):
        assert now["model.xml"] == now["model.bin"]  # at every moment
    with scratch_beside(tmp_path / "model.xml"):  # as the next export begins
        now = contents(tmp_path)
    expected = b"old" if number <= 5 else b"new"
    assert now.keys() == set(names) - ({"model.xml.json"} if number == 6 else set())
    assert set(now.values()) == {expected}


def test_an_int8_file_that_is_killed_half_way_leaves_the_old_one(tmp_path: Path) -> None:
    file = file_of("onnx", tmp_path)
    file.write_text("old")
    assert run_forked("killed_export.py", "quantize", "onnx", str(file)).returncode == -9
    assert contents(tmp_path) == {file.name: b"old"}
    with scratch_beside(file):  # as the next export begins
        assert len(list(tmp_path.iterdir())) == 2
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("form", ["timm", "transformers", "onnx"])
def test_a_full_disk_leaves_folders_and_int8_files_as_they_were(
    form: str, tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, out, options = tiny, tmp_path / "plain", {}
    if form == "onnx":
        out, options = file_of("onnx", tmp_path), {"quantize": "int8"}
        monkeypatch.setattr(find_format("onnx"), "write", lambda program, file, *rest: file.write_bytes(b"fp32"))
        monkeypatch.setattr(find_format("onnx"), "quantize", full)
        out.write_text("old")
    else:
        if form == "transformers":
            library = pytest.importorskip("transformers")
            size = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 48}
            model = library.ViTForImageClassification(library.ViTConfig(**size, image_size=32, patch_size=8)).eval()
        export_model(model, out, form)
        saves = {"timm": "safetensors.torch.save_file", "transformers": "transformers.modeling_utils.safe_save_file"}
        monkeypatch.setattr(saves[form], full)
    before = contents(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        export_model(model, out, form, overwrite=True, **options)
    assert contents(tmp_path) == before and not [file for file in tmp_path.iterdir() if file.name[0] == "."]
