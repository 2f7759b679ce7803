"""Files for other runtimes: each is compared with the model's own forward, read by its own runtime."""

import functools
import http.client
import io
import json
import os
import re
import runpy
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hiap
from conftest import make
from exported import NAMES, file_of, open_again, ragged
from hiap.cli.main import main
from hiap.export.exporting import export_model, publish
from hiap.export.formats import FORMATS, Opened, find_format, format_of
from hiap.export.latency_tables import other_runtime
from hiap.export.network import traced
from hiap.export.onnx_chains import grouped, onnx_chains
from hiap.export.running import ExportedModel

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compact() -> nn.Module:
    return ragged()


@pytest.fixture(scope="module")
def export_as(compact: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The model as a file of a format, written once."""

    @functools.cache
    def written(name: str) -> Path:
        file = file_of(name, tmp_path_factory.mktemp(name))
        export_model(compact, file)
        return file

    return written


@pytest.fixture(params=[name for name in FORMATS if name != "aoti"])  # which takes long to compile
def exported(request: pytest.FixtureRequest, export_as: Callable[[str], Path]) -> Path:
    """The model as a file of each format."""
    return export_as(request.param)


@torch.no_grad()
def agree(model: nn.Module, opened: Opened, count: int, allowed: float = 1e-4) -> bool:
    images = torch.randn(count, *hiap.models.registry.family_of(model).input_shape(model))
    expected = hiap.models.family.logits_of(model(images)).numpy()
    found = opened.run(images.numpy())
    return found.shape == expected.shape and np.abs(found - expected).max() <= allowed * np.abs(expected).max()


def test_a_file_computes_what_the_model_does_for_any_number_of_images(compact: nn.Module, exported: Path) -> None:
    opened = open_again(exported)
    assert all(agree(compact, opened, count) for count in (1, 3, 8))


def test_a_file_carries_its_preprocessing_and_class_names(exported: Path) -> None:
    about = json.loads(open_again(exported).about or "")
    assert (
        about["size"] == [32, 32] and about["mean"] == [0.485, 0.456, 0.406] and about["std"] == [0.229, 0.224, 0.225]
    )
    assert (about["interpolation"], about["crop_pct"], about["crop_mode"]) == ("bicubic", 0.9, "center")
    assert about["class_names"] == NAMES and about["classes"] == 7 and about["batch"] == "dynamic"


def test_the_report_beside_a_file_has_its_difference_size_and_times(exported: Path) -> None:
    report, about = json.loads(Path(f"{exported}.json").read_text()), json.loads(open_again(exported).about or "")
    assert {name: report[name] for name in about} == about
    assert report["difference"].keys() == {"1", "2", "7"} and report["tolerance"] == 1e-4
    assert max(report["difference"].values()) <= 1e-5
    files = [file for file in exported.parent.iterdir() if file.suffix != ".json"]
    assert report["bytes"] == sum(file.stat().st_size for file in files)
    assert report["ms"].keys() == {find_format(about["format"]).runtime, "torch"} and min(report["ms"].values()) > 0


def test_images_of_another_size_are_refused_by_the_runtime(exported: Path) -> None:
    opened = open_again(exported)
    with pytest.raises(Exception, match=r"(?s)48.*32|32.*48|== 32"):
        opened.run(np.zeros((1, 3, 48, 48), np.float32))


@pytest.mark.parametrize("name", ["onnx", "openvino", "pt2"])
def test_images_have_the_same_logits_however_many_come_at_once(name: str, export_as: Callable[[str], Path]) -> None:
    model, images = ExportedModel(export_as(name)), torch.randn(7, 3, 32, 32)
    expected = model(images)
    for count in (1, 2):
        found = torch.cat([model(part.contiguous()) for part in images.split(count)])
        assert torch.allclose(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    with pytest.raises(hiap.InputError, match=r"^the file takes images of 3x32x32, found 3x48x32: export the model ag"):
        model(torch.zeros(1, 3, 48, 32))


def test_a_damaged_file_is_refused_in_one_line(exported: Path, tmp_path: Path) -> None:
    cut = tmp_path / exported.name
    cut.write_bytes(exported.read_bytes()[:1000])
    with pytest.raises(hiap.InputError, match="cannot be read by"):
        open_again(cut)


def test_a_file_is_scored_like_the_folder_it_came_from(
    exported: Path, compact: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = np.random.default_rng(0)
    for number in range(56):
        place = tmp_path / "photos" / ("train", "val")[number % 2] / NAMES[number % 7]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(place / f"{number}.png")
    hiap.save(compact, tmp_path / "folder")
    scores = []
    for name in (tmp_path / "folder", exported):
        assert (
            main(["evaluate", str(name), "--data", str(tmp_path / "photos"), "--workers", "0", "--batch-size", "5"])
            == 0
        )
        scores.append(capsys.readouterr().out)
    assert scores[0] == scores[1] and scores[0].endswith("28 images\n")


@torch.no_grad()
def test_the_script_of_the_docs_needs_neither_hiap_nor_torch(
    export_as: Callable[[str], Path], compact: nn.Module, tmp_path: Path
) -> None:
    pixels = np.random.default_rng(1).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    page = (Path(__file__).resolve().parents[1] / "docs/export.md").read_text()
    (script,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "onnxruntime" in text]
    script = script.replace("mine.onnx", str(export_as("onnx"))).replace("photos/val/cat/3.png", "image.png")
    blocked = "import sys\nsys.modules['hiap'] = sys.modules['torch'] = None\n"
    run = subprocess.run([sys.executable, "-c", blocked + script], cwd=tmp_path, capture_output=True, text=True)
    inner = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC, box=(2, 2, 38, 38))
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    images = torch.from_numpy((np.asarray(inner) / 255 - mean) / std).float().permute(2, 0, 1)[None]
    assert (run.stdout, run.stderr) == (f"{NAMES[int(compact(images).argmax())]}\n", "")


@torch.no_grad()
def test_the_server_of_the_examples_answers_with_the_classes_of_the_model(
    export_as: Callable[[str], Path], compact: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = export_as("onnx")
    serve = runpy.run_path(str(Path(__file__).resolve().parents[1] / "examples/serve.py"))
    server = serve["make_server"](str(file), 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def ask(body: bytes, **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
        connection.request("POST", "/", body, {name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    picture = io.BytesIO()
    pixels = np.random.default_rng(1).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(picture, "PNG")
    inner = Image.fromarray(pixels).resize((32, 32), Image.Resampling.BICUBIC, box=(2, 2, 38, 38))
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    images = torch.from_numpy((np.asarray(inner) / 255 - mean) / std).float().permute(2, 0, 1)[None]
    shares = compact(images)[0].softmax(0)
    status, found = ask(picture.getvalue())
    assert status == 200 and [one["class"] for one in found] == [NAMES[i] for i in shares.argsort(descending=True)[:5]]
    assert found[0]["probability"] == pytest.approx(float(shares.max()), abs=1e-5)
    assert ask(b"no image")[0] == 400 and "cannot identify image" in ask(b"no image")[1]["error"]
    status, found = ask(b"", Content_Length="many")
    assert status == 400 and found["error"].endswith("of at most 20000000 bytes; found many")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # Pillow refuses images of more than twice as many
    status, found = ask(picture.getvalue())
    assert status == 400 and "could be decompression bomb" in found["error"]
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    """One block, for tests of everything but the network."""
    return make("augreg", depth=1).float()


def test_a_fixed_batch_and_half_precision(tiny: nn.Module, tmp_path: Path) -> None:
    report = export_model(tiny, tmp_path / "model.pt2", precision="fp16", batch=4)
    assert report["difference"].keys() == {"4"} and report["tolerance"] == 2e-2
    assert 1e-5 < report["difference"]["4"] < 1e-2
    model = ExportedModel(tmp_path / "model.pt2")
    images = torch.randn(6, 3, 32, 32)
    with torch.no_grad():
        expected = tiny(images)
    assert model(images).shape == (6, 7)
    assert float((model(images) - expected).abs().max()) <= 2e-2 * float(expected.abs().max())


def test_a_file_that_computes_something_else_is_not_written(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, usual = find_format("pt2"), find_format("pt2").open

    def off(file: Path, threads: int) -> Opened:
        opened = usual(file, threads)
        return Opened(lambda images: opened.run(images) + 0.1, opened.about)

    monkeypatch.setattr(kind, "open", off)
    with pytest.raises(
        hiap.ExportError, match=r"with 1 images its logits differ by .* of the largest, allowed 0\.0001"
    ):
        export_model(tiny, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.pt2").write_text("old")
    (tmp_path / ".model.pt2.writing-killed").mkdir()  # of a process that was killed

    def full(program: Any, file: Path, *rest: Any) -> None:
        file.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(find_format("pt2"), "write", full)
    with pytest.raises(OSError, match="No space left"):
        export_model(tiny, tmp_path / "model.pt2", overwrite=True)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("model.pt2", "old")]


def test_a_failure_between_two_renames_leaves_no_file_beside_parts_of_another(tmp_path: Path) -> None:
    old, new = tmp_path, tmp_path / "new"
    new.mkdir()
    for folder in (old, new):
        for name in ("model.xml", "model.bin", "model.xml.json"):
            (folder / name).write_text(folder.name)
    (new / "model.xml").unlink()  # so that the move of it fails
    with pytest.raises(FileNotFoundError):
        publish(new / "model.xml", [new / "model.bin"], new / "model.xml.json", old / "model.xml")
    kept = {file.name: file.read_text() for file in old.iterdir() if file.is_file()}
    assert kept == dict.fromkeys(("model.xml", "model.bin", "model.xml.json"), tmp_path.name)


def test_onnxruntime_fuses_gelu_and_biases_and_copies_keys_once(
    export_as: Callable[[str], Path], tmp_path: Path
) -> None:
    file, options = export_as("onnx"), pytest.importorskip("onnxruntime").SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    pytest.importorskip("onnxruntime").InferenceSession(file, options, providers=["CPUExecutionProvider"])
    nodes = pytest.importorskip("onnx").load(tmp_path / "optimised.onnx").graph.node
    kinds = [node.op_type for node in nodes]
    assert kinds.count("Gelu") == 1 and "Erf" not in kinds  # there is one FFN
    assert kinds.count("Gemm") == 6  # with their biases: four layers of the first block, and both classifiers
    assert kinds.count("Softmax") == 2 and kinds.count("Transpose") == 1 + 2 * 4  # pixels; q, k, v and values of heads


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "taken.pt2"], "taken.pt2 exists already: name another file, or pass --overwrite to replace it"),
        (["-o", "taken.xml"], "taken.bin exists already: name another file, or pass --overwrite to replace it"),
        (["-o", "model.tflite"], "model.tflite has no known extension: name it FILE.onnx, FILE.xml, FILE.pt2"),
        (["-o", "model.onnx", "--format", "pt2"], "a file of pt2 ends in .pt2; found model.onnx"),
        (["-o", "nowhere/model.pt2"], "nowhere/model.pt2 cannot be written: there is no folder"),
        (["-o", "folder.pt2"], "folder.pt2 cannot be written: it is a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_first(
    tiny: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    hiap.save(hiap.extract(tiny, hiap.Topology.from_counts(tiny, heads=[1])), "model")
    for name in ("taken.pt2", "taken.bin"):
        Path(name).touch()
    Path("folder.pt2").mkdir()
    assert main(["export", "model", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"model", "taken.pt2", "taken.bin", "folder.pt2"}


def test_a_missing_package_gives_the_line_that_installs_it(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package, file, extra in (("onnxruntime", "a.onnx", "onnx"), ("openvino", "a.xml", "openvino")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setattr(find_format(extra), "packages", (package,))
        with pytest.raises(hiap.InputError, match=rf'{extra} needs the package {package} .*"hiap\[{extra}\]"'):
            export_model(tiny, tmp_path / file)


class Sums(nn.Module):
    """As little as can be compiled."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.sum((2, 3))


@pytest.mark.skipif("HIAP_COMPILE" not in os.environ, reason="compiling takes most of a minute: set HIAP_COMPILE=1")
def test_a_compiled_package_computes_what_the_network_does_and_checks_its_images(tmp_path: Path) -> None:
    file, kind = file_of("aoti", tmp_path), find_format("aoti")
    about = json.dumps({"size": [4, 4], "channels": 3, "batch": "dynamic", "class_names": ['a "b" ü']})
    kind.write(traced(Sums(), (3, 4, 4), None), file, about, "fp32")
    model, images = ExportedModel(file), torch.randn(7, 3, 4, 4)
    assert model.about == json.loads(about)
    assert all(torch.allclose(model(images[:n]), images[:n].sum((2, 3)), atol=1e-5) for n in (1, 2, 7))
    with pytest.raises(hiap.InputError, match=r"takes images of 4x4; found the shape \(7, 3, 4, 5\)"):
        model.run(np.zeros((7, 3, 4, 5), np.float32))


def test_a_compiled_package_is_told_from_a_traced_one_and_needs_a_compiler(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "damaged.pt2", "w") as archive:
        archive.writestr("damaged/data/aotinductor/model/kernel.cpp", "")
    kind = format_of(tmp_path / "damaged.pt2")
    assert kind is find_format("aoti") and format_of(tmp_path / "new.pt2") is find_format("pt2")
    with pytest.raises(hiap.InputError, match="cannot be read by AOTInductor"):
        kind.open(tmp_path / "damaged.pt2", 1)
    assert export_model(tiny, tmp_path / "damaged.pt2", overwrite=True)["format"] == "pt2"  # as for a new file
    assert format_of(tmp_path / "damaged.pt2") is find_format("pt2")

    def missing() -> str:
        raise RuntimeError("No working C++ compiler found")

    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", missing)
    with pytest.raises(hiap.InputError, match=r"found none .*: install g\+\+, or name one in the variable CXX"):
        export_model(tiny, tmp_path / "new.pt2", "aoti")


def test_a_file_of_somebody_else_is_not_scored(tmp_path: Path) -> None:
    program = torch.export.export(nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(program, tmp_path / "other.pt2")
    with pytest.raises(hiap.InputError, match="does not say how to prepare its images: write it with hiap export"):
        ExportedModel(tmp_path / "other.pt2")
    with pytest.raises(hiap.InputError, match="no such file"):
        ExportedModel(tmp_path / "none.onnx")


def test_runtimes_are_timed_side_by_side(tiny: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compact = hiap.extract(tiny, hiap.Topology.from_counts(tiny, heads=[1]))
    hiap.save(compact, tmp_path / "compact")
    quick = ["--device", "cpu", "--batch-size", "1,3", "--runs", "2", "--warmup", "1"]
    file = tmp_path / "speed.json"
    assert main(["bench", str(tmp_path / "compact"), "--runtime", "torch,pt2", "--out", str(file), *quick]) == 0
    rows = [row for row in json.loads(file.read_text())["rows"] if row["mode"] == "pt2"]
    assert [(row["network"], row["batch"]) for row in rows] == [(n, b) for b in (1, 3) for n in ("dense", "compact")]
    assert [row["macs"] for row in rows[:2]] == [hiap.macs(tiny), hiap.macs(compact)]
    assert all(row["ms"] > 0 for row in rows) and "each in its fastest mode:" in capsys.readouterr().out
    for wrong, message in (
        (["--runtime", "tensorrt"], "runtime must be one of torch, onnx, openvino, pt2, aoti; found 'tensorrt'"),
        (["--runtime", "pt2", "--precision", "bf16"], "pt2 has the precisions fp32, fp16; found 'bf16'"),
    ):
        assert main(["bench", str(tmp_path / "compact"), *quick, *wrong]) == 1
        assert message in capsys.readouterr().err


@torch.no_grad()
def test_blocks_of_many_widths_are_exported_at_once_and_run_in_chains(
    compact: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in find_format("onnx").packages:
        pytest.importorskip(package)
    blocks, x = [compact.blocks[i] for i in (0, 2)], torch.randn(2, 18, 24)
    for block, call in zip(blocks, onnx_chains(blocks, x, 3), strict=True):
        expected = block(block(block(x))).numpy()
        assert np.abs(call() - expected).max() <= 1e-5 * np.abs(expected).max()
    layers = [nn.Linear(size, 1, bias=False) for size in (10, 10, 30, 10)]
    monkeypatch.setattr("hiap.export.onnx_chains.TOGETHER", 4 * 20)  # bytes of 20 weights
    assert [len(group) for group in grouped(layers)] == [2, 1, 1]


def test_a_latency_table_is_measured_in_another_runtime(tiny: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hiap.speed.measure.CHAIN", 1)
    cpu = torch.device("cpu")
    grid = {"heads": [3], "qk_dim": [8], "value_dim": [8], "neurons": [96]}
    other = other_runtime("pt2", cpu, "fp32")
    assert other is not None and other_runtime("torch", cpu, "bf16") is None
    table = hiap.measure(tiny, cpu, "fp32", 2, grid=grid, other=replace(other, name="openvino"))
    assert (table.runtime, table.mode, table.batch, table.heads) == ("openvino", "eager", 2, [3])
    assert min(table.attention[0][0][0], table.ffn[0], table.outside, table.dense) > 0
    with pytest.raises(hiap.InputError, match=r"^onnx is measured in ms only; found 'mJ'$"):
        other_runtime("onnx", cpu, "fp32", "mJ")
    with pytest.raises(hiap.InputError, match="timed on the CPU only, found cuda: pass --device cpu"):
        other_runtime("onnx", torch.device("cuda"), "fp32")
