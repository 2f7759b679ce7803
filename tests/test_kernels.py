"""The fused kernels, in Triton's interpreter on a CPU: each against PyTorch, and whole networks on them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import hiap
from hiap.speed import fused, steps
from hiap.speed.inference import LastBlock, optimize
from hiap.speed.tuned import keep_form, kept_forms

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the kernels are compiled: test_cuda.py")


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    import hiap.speed.kernels as module  # conftest.py has set the interpreter

    return module


def off(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    ("norm", "gelu", "residual"), [one for one in itertools.product([0, 1], repeat=3) if sum(one) < 3]
)
def test_a_product_with_norm_gelu_and_residual_is_what_pytorch_computes(
    kernels: ModuleType, norm: int, gelu: int, residual: int
) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(3, 13, 48), torch.randn(48, 40) / 7, torch.randn(40)
    r = torch.randn(3, 13, 40) if residual else None
    expected = (F.layer_norm(x, (48,), eps=1e-5) if norm else x) @ weight + bias
    expected = F.gelu(expected) if gelu else expected
    expected = expected if r is None else expected + r
    for tile in ([16, 16, 16, 2, 4], [32, 64, 32, 1, 4]):  # the second: 48 is no multiple of 32
        found = kernels.linear(
            x, weight, weight.sum(0) if norm else None, bias, r, kernels.GELUS["erf"] if gelu else [], 1e-5, tile
        )
        assert off(found, expected) < (3e-5 if gelu else 2e-6)


@pytest.mark.parametrize(("tokens", "first"), [(16, 16), (19, 19), (20, 1), (65, 65)])
def test_attention_of_narrow_heads_is_what_pytorch_computes(kernels: ModuleType, tokens: int, first: int) -> None:
    torch.manual_seed(0)
    heads, qk_dim, value_dim = 2, 8, 24
    sizes = [heads * qk_dim, heads * qk_dim, heads * value_dim]
    qkv = torch.randn(2, tokens, sum(sizes) + 5)  # the last columns are padding
    q, k, v = (part.view(2, tokens, heads, -1).transpose(1, 2) for part in qkv[..., :-5].split(sizes, dim=-1))
    expected = F.scaled_dot_product_attention(q, k, v, scale=0.3).transpose(1, 2).reshape(2, tokens, -1)[:, :first]
    assert off(kernels.attend(qkv, heads, qk_dim, value_dim, first, 0.3, [16, 2]), expected) < 1e-6


@pytest.mark.parametrize("stream", [32, 48])
def test_an_ffn_in_one_pass_is_what_pytorch_computes(kernels: ModuleType, stream: int) -> None:
    torch.manual_seed(0)
    x, w1, b1 = torch.randn(2, 9, stream), torch.randn(32, stream) / 6, torch.randn(32)
    w2, b2 = torch.randn(32, stream) / 6, torch.randn(stream)
    expected = x + F.gelu(F.layer_norm(x, (stream,), eps=1e-6) @ w1.t() + b1) @ w2 + b2
    assert off(kernels.ffn(x, w1, b1, w2, b2, kernels.GELUS["erf"], 1e-6, [16, 16, 2, 4]), expected) < 3e-5


def test_the_coefficients_of_each_gelu_are_off_by_no_more_than_half_precision_sees(kernels: ModuleType) -> None:
    x = torch.linspace(-40, 40, 80001, dtype=torch.float64)
    z = (x * x).clamp(max=36.0)
    exact: dict[str, tuple[Tensor, float]] = {
        "erf": (F.gelu(x), 2.6e-5),
        "tanh": (F.gelu(x, approximate="tanh"), 1e-6),
        "quick": (x * torch.sigmoid(1.702 * x), 1e-12),
    }
    for name, (expected, most) in exact.items():
        a, b, c = kernels.GELUS[name]
        assert float((x * torch.sigmoid(x * (a + z * (b + z * c))) - expected).abs().max()) < most


@pytest.mark.parametrize(("number", "found"), [(16, (16, 0)), (65, (64, 16)), (82, (64, 32)), (192, (128, 64))])
def test_a_size_is_held_by_two_powers_of_two(kernels: ModuleType, number: int, found: tuple[int, int]) -> None:
    assert kernels.two_powers(number) == found


def blocks_of(model: nn.Module) -> tuple[Any, list[Any]]:
    fast = optimize(model)
    return fast, [block.block if isinstance(block, LastBlock) else block for block in fast.blocks]


def small_vit(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 48, "num_heads": 3, "depth": 4, "num_classes": 5}
    model = timm.create_model("vit_tiny_patch16_224", **{**sizes, **given}).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.parametrize("tiled", [False, True], ids=["plain", "kernels"])
def test_steps_compute_what_ragged_blocks_compute(kernels: ModuleType, tiled: bool) -> None:
    model = small_vit(init_values=0.5)
    topology = hiap.Topology.from_counts(
        model, heads=[2, None, 0, 3], qk_dims=[8, 0, 0, 8], value_dims=[8, 0, 0, 10], neurons=[24, 0, 40, None]
    )
    compact = hiap.extract(model, topology)
    fast, blocks = blocks_of(compact)
    found = fused.fuse(blocks, torch.float32, 2, 17, last=1)
    # Constants are in the biases of the steps before them; nothing is left of branches that are gone.
    assert [type(step).__name__ for step in found] == ["Attend", "FeedForward", "FeedForward", "Attend"]
    if tiled:
        for step in found:
            if isinstance(step, steps.Attend):
                step.tile, step.qkv.tile, step.out.tile = (16, 2), (16, 32, 16, 1, 4), (16, 16, 16, 1, 4)
            else:
                step.tile = (16, 32, 1, 4)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        logits = fast.family.head(fast.model, found(fast.stem(x)))
        assert off(logits, compact(x)) < (2e-5 if tiled else 1e-6)


def test_what_the_kernels_do_not_know_stays_a_plain_step() -> None:
    fast, blocks = blocks_of(small_vit(act_layer=nn.SiLU, qk_norm=True))
    found = fused.fuse(blocks, torch.float32, 2, 17, last=1)
    assert [type(step).__name__ for step in found] == ["Plain", "Plain"] * 3 + ["Plain", "First", "Plain"]
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert off(fast.family.head(fast.model, found(fast.stem(x))), fast(x)) < 1e-6


@pytest.mark.parametrize(
    ("device", "dtype", "message"),
    [
        ("cpu", torch.bfloat16, "they need a CUDA device; found cpu"),
        ("cuda", torch.float32, "they need half precision; found torch.float32: pass dtype=torch.bfloat16"),
    ],
)
def test_kernels_are_refused_with_the_reason(device: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(hiap.InputError, match=f"the fused kernels cannot run here: {message}"):
        fused.check_available(small_vit(), torch.device(device), dtype)
    with pytest.raises(hiap.InputError, match="the fused kernels cannot run here: they need a CUDA device; found cpu"):
        optimize(small_vit(), kernels=True)


def test_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(hiap.InputError, match="Triton is not installed: pip install triton"):
        fused.check_available(small_vit(), torch.device("cuda"), torch.bfloat16)


def test_inputs_need_not_be_contiguous(kernels: ModuleType) -> None:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 32, 9).transpose(1, 2), torch.randn(32, 32) / 6, torch.randn(32)
    found = kernels.linear(x, weight, None, bias, x, [], 0.0, [16, 16, 16, 1, 4])
    assert off(found, x @ weight + bias + x) < 2e-6
    one_pass = kernels.ffn(x, weight, bias, weight, bias, kernels.GELUS["erf"], 1e-6, [16, 16, 1, 4])
    hidden = F.gelu(F.layer_norm(x, (32,), eps=1e-6) @ weight.t() + bias)
    assert off(one_pass, x + hidden @ weight + bias) < 3e-5


@pytest.mark.parametrize("stream", [40, 176])
def test_one_pass_is_for_streams_that_its_tiles_fill(kernels: ModuleType, stream: int) -> None:
    x, weight = torch.randn(1, 4, stream), torch.randn(16, stream)
    with pytest.raises(ValueError, match=f"two powers of two and neurons in 16s; found {stream}, 16"):
        kernels.ffn(x, weight, torch.zeros(16), weight, torch.zeros(stream), kernels.GELUS["erf"], 0.0, [16, 16, 1, 4])
    _, blocks = blocks_of(small_vit(embed_dim=40, num_heads=2, depth=1))
    found = fused.fuse(blocks, torch.float32, 1, 17)
    choices = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_settle", lambda some, say, alone: choices.append(list(some)))
        fused.tune(found, 1, 17)
    assert [len(some) for some in choices] == [5, 0]


def test_of_all_forms_the_fastest_right_one_is_kept(
    kernels: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HIAP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fused, "_FASTEST", {})
    monkeypatch.setattr(fused, "THREADS", 1)  # the interpreter knows one
    monkeypatch.setattr(fused, "LINEAR", ((16, 16, 16, 1, 4), (7, 16, 16, 1, 4)))  # no tile has 7 rows
    monkeypatch.setattr(fused, "ATTEND", ((16, 2),))
    monkeypatch.setattr(fused, "FFN", ((16, 32, 1, 4),))
    seen: list[int] = []

    held: list[bool] = []

    @contextmanager
    def alone() -> Iterator[None]:
        held.append(True)
        yield
        held.append(False)

    def timings(calls: list[Any], *options: Any) -> list[list[float]]:
        assert held[-1]
        seen.append(len(calls))
        return [[float(len(calls) - i)] for i in range(len(calls))]  # the last is the fastest

    monkeypatch.setattr(fused, "timings", timings)
    fast, blocks = blocks_of(small_vit(depth=1))
    found = fused.fuse(blocks, torch.float32, 2, 17, last=1)
    fused.tune(found, 2, 17, alone=alone)
    assert seen == [2] * 6  # plain PyTorch and one tile that runs
    assert held == [True, False] * 2
    attend, ffn = found
    assert (attend.tile, attend.qkv.tile, ffn.tile) == ((16, 2), (16, 16, 16, 1, 4), (16, 32, 1, 4))
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert off(fast.family.head(fast.model, found(fast.stem(x))), fast(x)) < 2e-5
    known = [step.tile for step in (attend, attend.qkv, attend.out, ffn, ffn.fc1, ffn.out)]
    monkeypatch.setattr(fused, "_FASTEST", {})  # as in another process
    fused.tune(found, 2, 17, alone=alone)
    assert len(seen) == 6 and len(held) == 4  # nothing is timed again
    assert [step.tile for step in (attend, attend.qkv, attend.out, ffn, ffn.fc1, ffn.out)] == known
    file = tmp_path / "cache" / "kernels.jsonl"
    text = file.read_text()
    assert text.count("[16, 2]") == 1
    file.write_text(text.replace("[16, 2]", "[7, 2]"))  # a form that does not run here
    monkeypatch.setattr(fused, "_FASTEST", {})
    fused.tune(found, 2, 17, alone=alone)
    assert len(seen) == 7 and attend.tile == (16, 2)  # it alone is timed again


def test_forms_are_kept_in_a_file_that_may_be_damaged_or_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HIAP_CACHE", str(tmp_path / "cache"))
    assert kept_forms() == {}
    keep_form("a", (16, 2))
    keep_form("b", None)
    file = tmp_path / "cache" / "kernels.jsonl"
    with file.open("a") as end:
        end.write('["c", [1\n7\n["d", "x"]\n["e", [4]]\n')
    assert kept_forms() == {"a": (16, 2), "b": None, "e": (4,)}
    monkeypatch.setenv("HIAP_CACHE", os.devnull)  # no folder
    keep_form("a", (1, 2))
    assert kept_forms() == {}


def test_forms_are_kept_where_caches_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HIAP_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_form("a", None)
    assert (tmp_path / "hiap" / "kernels.jsonl").exists()
    monkeypatch.delenv("XDG_CACHE_HOME")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    keep_form("a", None)
    assert kept_forms() == {}


def test_the_roofline_counts_the_operations_of_every_kernel() -> None:
    roofline = pytest.importorskip("roofline")
    model = small_vit()
    topology = hiap.Topology.from_counts(
        model, heads=[2, 1, 3, 3], qk_dims=[8] * 4, value_dims=[8, 16, 8, 8], neurons=[24, None, 40, 48]
    )
    fast, blocks = blocks_of(hiap.extract(model, topology))
    found = fused.fuse(blocks, torch.float32, 2, 17, last=1)
    fast.blocks = found
    x = fast.stem(torch.randn(2, 3, 16, 16))
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        found(x)
    with torch.no_grad():
        rows = list(roofline.kernels(fast, x))
    assert sum(operations for _, _, operations, _ in rows) == counter.get_total_flops()
    qkv = found[0].qkv.weight
    name, call, operations, moved = rows[0]
    assert (name, operations) == ("norm + qkv", 2 * 2 * 17 * qkv.numel())
    assert moved == 4 * (x.numel() + call().numel())
