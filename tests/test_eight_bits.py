"""8-bit products by torchao: what is rounded, how far that is off, and how it is scored and timed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hiap
import test_timm_variants as variants
import test_torchvision as torchvision_models
from conftest import make, write_photos
from exported import ragged
from hiap.cli.main import main
from hiap.models.registry import sites
from hiap.speed.bench import bench
from hiap.speed.eight_bits import EightBits, check_eight_bits

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def compact() -> nn.Module:
    pytest.importorskip("torchao")
    return ragged()


@torch.no_grad()
def test_the_layers_of_the_blocks_are_rounded_and_nothing_else_is(compact: nn.Module) -> None:
    rounded, images = EightBits(compact, "int8", CPU, torch.float32), torch.randn(5, 3, 32, 32)
    assert (rounded.rounded, rounded.left) == (6, 0)
    for name, layer in compact.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        found = rounded.network.get_submodule(name).weight
        if name.startswith("blocks."):
            step = layer.weight.abs().amax(1, keepdim=True) / 127
            error = (found.dequantize() - layer.weight).abs()
            assert float(error.max()) > 0 and bool((error <= 0.51 * step).all())
        else:
            assert torch.equal(found, layer.weight)
    expected = compact(images)
    difference = float((rounded(images) - expected).abs().max() / expected.abs().max())
    assert 1e-4 < difference < 0.05
    assert type(compact.blocks[0].mlp.fc1.weight) is nn.Parameter  # the model itself is as it was


@torch.no_grad()
@pytest.mark.parametrize(("source", "kind"), [(variants, "eva02"), (variants, "beit"), (torchvision_models, "plain")])
def test_dense_models_are_rounded_however_their_blocks_are_written(source: Any, kind: str) -> None:
    pytest.importorskip("torchao")
    model = source.make(kind).float()
    rounded, images = EightBits(model, "int8", CPU, torch.float32), torch.randn(3, 3, 16, 16)
    assert (rounded.rounded, rounded.left) == (4 * len(sites(model)), 0)
    expected = model(images)
    assert 1e-4 < float((rounded(images) - expected).abs().max() / expected.abs().max()) < 0.15


@torch.no_grad()
def test_widths_that_a_gpu_has_no_fast_product_for_stay_as_they_are(
    compact: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiap.speed.eight_bits._multiple", lambda kind, device: 8)
    rounded = EightBits(compact, "int8", CPU, torch.bfloat16)
    assert (rounded.rounded, rounded.left) == (4, 2)  # of the first block, 34 x 24 and 24 x 10 are left
    attention = rounded.network.blocks[0].attn
    assert type(attention.qkv.weight) is type(attention.proj.weight) is nn.Parameter
    assert rounded(torch.randn(2, 3, 32, 32)).dtype == torch.float32
    monkeypatch.setattr("hiap.speed.eight_bits._multiple", lambda kind, device: 16)
    with pytest.raises(
        hiap.InputError, match=r"none of the 6 layers of the blocks has widths that are multiples of 16"
    ):
        EightBits(compact, "int8", CPU, torch.float32)


def test_the_commands_score_and_time_it(
    compact: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    model = make("augreg", num_classes=2).float()
    hiap.save(hiap.extract(model, hiap.Topology.from_counts(model, neurons=[40, 0, None])), "model")
    score = ["evaluate", "model", "--data", "photos", "--workers", "0"]
    assert main([*score, "--quantize", "int8", "--out", "scores.json"]) == 0
    found = json.loads(Path("scores.json").read_text())
    assert (found["quantize"], found["rounded_layers"], found["other_layers"]) == ("int8", 8, 0)
    out = capsys.readouterr().out
    assert out == f"8 layers of the blocks in int8, 0 in fp32\ntop-1 {found['top1']:.2f} %  top-5 100.00 %  8 images\n"
    quick = ["--device", "cpu", "--batch-size", "1", "--runs", "2", "--warmup", "1", "--out", "speed.json"]
    assert main(["bench", "model", "--quantize", "int8", *quick]) == 0
    rows = {row["network"]: row for row in json.loads(Path("speed.json").read_text())["rows"]}
    assert rows["compact, int8"]["ms"] > 0 and rows["compact, int8"]["macs"] == rows["compact"]["macs"]
    assert {"dense, int8", "compact, optimised"} < rows.keys()
    assert "timing compact: 8 layers in int8, 0 in fp32" in capsys.readouterr().err
    Path("model.pt2").touch()
    fp8 = "fp8 needs a CUDA device of compute capability 8.9 or newer; found cpu: use int8"
    for wrong, message in (
        (["bench", "model", "--device", "cpu", "--quantize", "fp8"], fp8),
        (
            ["bench", "model", "--device", "cpu", "--quantize", "int4"],
            "quantize must be one of int8, fp8; found 'int4'",
        ),
        (
            ["bench", "model", "--runtime", "onnx", "--quantize", "int8"],
            "--quantize is for the runtime torch; hiap exp",
        ),
        (
            ["evaluate", "model.pt2", "--data", "photos", "--quantize", "int8"],
            "model.pt2 is an exported file: quantise it",
        ),
        ([*score, "--quantize", "int8", "--knn"], "--quantize is for the classifier: leave out --knn"),
    ):
        assert main(wrong) == 1
        assert message in capsys.readouterr().err


def test_what_8_bits_need_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    with pytest.raises(hiap.InputError, match=r"compute capability 8\.9 or newer; found 8\.6: use int8$"):
        check_eight_bits("fp8", cuda)
    monkeypatch.setattr("hiap.speed.bench.check_eight_bits", lambda kind, device: None)
    with pytest.raises(hiap.InputError, match=r"fp8 is timed beside bf16; found the precisions fp32: add bf16"):
        bench({"dense": make("augreg", depth=1).float()}, CPU, [1], ["fp32"], ["eager"], 1, 1, quantize="fp8")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        hiap.InputError, match=r'int8 in PyTorch needs the package torchao \(.*: pip install "hiap\[tor'
    ):
        check_eight_bits("int8", CPU)
