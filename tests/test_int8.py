"""INT8 files: how far they are from the model is measured, and the numbers in the report are compared with our own."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import nn

import hiap
from conftest import make
from exported import file_of, open_again, ragged
from hiap.cli.calibration import calibration_images
from hiap.cli.main import main
from hiap.export.exporting import export_model
from hiap.export.formats import find_format
from hiap.export.onnx_int8 import quantize_onnx

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def compact() -> nn.Module:
    return ragged()


@pytest.fixture(scope="module")
def tiny() -> nn.Module:
    return make("augreg", depth=1).float()


@pytest.fixture(scope="module")
def pixels() -> torch.Tensor:
    return torch.randn(20, 3, 32, 32, generator=torch.Generator().manual_seed(3))


@torch.no_grad()
@pytest.mark.parametrize("method", ["dynamic", "static"])
def test_int8_rounds_the_weights_and_reports_what_that_changes(
    compact: nn.Module, pixels: torch.Tensor, tmp_path: Path, method: str
) -> None:
    file = file_of("onnx", tmp_path)
    report = export_model(compact, file, quantize="int8", calibration=pixels if method == "static" else None)
    opened, told = open_again(file), report["agreement"]
    assert report["precision"] == "int8" and report["quantization"]["method"] == method
    assert 1e-3 < told["difference"] < 0.3 and report["tolerance"] is None and told["top1_agreement"] >= 0.8
    assert report["bytes"] == file.stat().st_size < report["bytes_fp32"]
    assert report["ms"].keys() == {"onnxruntime", "onnxruntime fp32", "torch"}
    if method == "static":
        assert (told["kind"], told["images"]) == ("calibration", 20)
        found, expected = torch.from_numpy(opened.run(pixels.numpy())), compact(pixels)
        assert told["difference"] == pytest.approx(float((found - expected).abs().max() / expected.abs().max()))
        one_by_one = np.concatenate([opened.run(image[None].numpy()) for image in pixels])
        assert np.abs(one_by_one - found.numpy()).max() <= 1e-5 * float(expected.abs().max())
    graph = pytest.importorskip("onnx").load(file).graph
    kinds = [node.op_type for node in graph.node]
    weights = [tensor for tensor in graph.initializer if tensor.data_type == 3 and len(tensor.dims) == 2]  # of int8
    linears = sum(isinstance(module, nn.Linear) for module in compact.modules())
    assert len(weights) == linears + 2  # the patches, and the last block takes queries apart from keys and values
    assert kinds.count("Softmax") == 2 and kinds.count("MatMul") == (4 if method == "dynamic" else 4 + linears)


@pytest.mark.parametrize(("count", "batch"), [(16, 4), (80, 80)])
def test_a_product_whose_input_has_huge_peaks_stays_float(tmp_path: Path, count: int, batch: int) -> None:
    onnx = pytest.importorskip("onnx")
    chance, node = np.random.default_rng(0), onnx.helper.make_node
    outlier = np.zeros(400, np.float32)
    outlier[7] = 1e4
    last = chance.normal(size=(400, 5)).astype(np.float32)
    last[7] *= 1e-4
    weights = {"first": chance.normal(size=(48, 400)).astype(np.float32) / 7, "outlier": outlier, "last": last}
    nodes = [
        node("Flatten", ["images"], ["flat"]),
        node("MatMul", ["flat", "first"], ["hidden"], "one"),
        node("Add", ["hidden", "outlier"], ["peaked"]),
        node("MatMul", ["peaked", "last"], ["logits"], "two"),
    ]
    shapes = [("images", ["batch", 3, 4, 4]), ("logits", ["batch", 5])]
    ends = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes]
    held = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = onnx.helper.make_graph(nodes, "peaks", ends[:1], ends[1:], held)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    onnx.save(made, tmp_path / "plain.onnx")
    images = chance.normal(size=(count, 3, 4, 4)).astype(np.float32)
    notes = quantize_onnx(tmp_path / "plain.onnx", tmp_path / "small.onnx", "{}", images, batch, large=False)
    assert notes == {"float_products": 1}
    found = find_format("onnx").open(tmp_path / "small.onnx", 1).run(images)
    expected = (images.reshape(count, 48) @ weights["first"] + outlier) @ last
    assert 1e-4 < np.abs(found - expected).max() / np.abs(expected).max() < 0.03


def test_int8_is_refused_where_it_cannot_be_had(
    tiny: nn.Module, pixels: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nncf", None)
    onnx, xml = {"out": tmp_path / "a.onnx", "quantize": "int8"}, {"out": tmp_path / "a.xml", "quantize": "int8"}
    for kind in ("onnx", "openvino"):
        monkeypatch.setattr(find_format(kind), "packages", ())
    for given, message in (
        ({"out": tmp_path / "a.pt2", "quantize": "int8"}, "pt2 has no INT8: export to onnx or openvino"),
        (onnx | {"precision": "fp16"}, "int8 is made from fp32; found the precision 'fp16'"),
        (onnx | {"quantize": "int4"}, "quantize must be one of int8; found 'int4'"),
        (
            onnx | {"calibration": pixels[:, :, :16]},
            r"one or more images \(N, 3, 32, 32\); found the shape \(20, 3, 16, 32\)",
        ),
        (onnx | {"calibration": pixels, "batch": 21}, "must be 21 or more images"),
        (onnx | {"calibration": pixels / 0}, "some calibration images have values that are not finite"),
        ({"out": tmp_path / "a.onnx", "calibration": pixels}, "calibration images need --quantize int8"),
        (xml, "openvino needs images for INT8: pass --calibration-data FOLDER, or export to onnx"),
        (xml | {"calibration": pixels}, r'INT8 for openvino needs the package nncf .*pip install "hiap\[nncf\]"'),
    ):
        with pytest.raises(hiap.InputError, match=message):
            export_model(tiny, **given)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_int8_for_openvino(tiny: nn.Module, pixels: torch.Tensor, tmp_path: Path) -> None:
    pytest.importorskip("nncf", reason="INT8 for openvino is made by nncf")
    file = file_of("openvino", tmp_path)
    report = export_model(tiny, file, quantize="int8", calibration=pixels, batch=2)
    assert report["agreement"]["images"] == 20 and 1e-3 < report["agreement"]["difference"] < 0.3
    assert json.loads(open_again(file).about or "")["precision"] == "int8"
    assert file.with_suffix(".bin").stat().st_size < 2 * sum(weight.numel() for weight in tiny.parameters())


@pytest.mark.parametrize("kind", ["onnx", "openvino"])
def test_a_few_calibration_images_are_enough(tiny: nn.Module, pixels: torch.Tensor, tmp_path: Path, kind: str) -> None:
    if kind == "openvino":
        pytest.importorskip("nncf", reason="INT8 for openvino is made by nncf")
    report = export_model(tiny, file_of(kind, tmp_path), quantize="int8", calibration=pixels[:3])
    assert report["quantization"]["calibration_images"] == report["agreement"]["images"] == 3
    assert 1e-3 < report["agreement"]["difference"] < 0.3


def test_the_command_calibrates_with_the_preprocessing_of_the_model(
    tiny: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file_of("onnx", tmp_path)
    monkeypatch.chdir(tmp_path)
    chance = np.random.default_rng(0)
    for number in range(14):
        place = Path("photos", "train" if number < 12 else "val")
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 255, (32, 32, 3), dtype=np.uint8)).save(place / f"{number}.png")
    compact = hiap.extract(tiny, hiap.Topology.from_counts(tiny, heads=[1]))
    hiap.save(compact, "folder")
    asked = ["export", "folder", "-o", "model.onnx", "--quantize", "int8", "--calibration-data", "photos"]
    assert main([*asked, "--calibration-images", "8"]) == 0
    report, out = json.loads(Path("model.onnx.json").read_text()), capsys.readouterr().out
    assert report["quantization"] == {"method": "static", "calibration_images": 8, "float_products": 0}
    assert "on 8 calibration images" in out and f"{report['agreement']['top1_agreement']:.1%}" in out
    own = timm.data.resolve_model_data_config(tiny) | {"input_size": (3, 32, 32)}
    change = timm.data.create_transform(**own)
    expected = [change(Image.open(f"photos/train/{number}.png")) for number in range(12)]
    assert torch.equal(calibration_images("photos", compact, 100), torch.stack(expected))
    for wrong, message in (
        (["--calibration-data", "photos"], "--calibration-data goes with --quantize int8"),
        (["--calibration-images", "8"], "--calibration-images goes with --calibration-data FOLDER"),
        (["--quantize", "int8", "--calibration-data", "none"], "'none' is neither a folder nor a CSV file"),
    ):
        assert main(["export", "folder", "-o", "other.onnx", *wrong]) == 1
        assert message in capsys.readouterr().err

    def read(*words: object) -> None:
        raise AssertionError("the images are read before the file is checked")

    monkeypatch.setattr("hiap.cli.calibration.calibration_images", read)
    assert main(asked) == 1 and "model.onnx exists already: name another file" in capsys.readouterr().err
