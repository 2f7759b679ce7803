"""The same results on a GPU; skipped where there is none."""

import copy

import pytest
import torch

import hiap
from conftest import images, make
from hiap.attach import noise_source
from test_gates import ALL, scatter_logits

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extraction(dtype: torch.dtype, tmp_path) -> None:
    model = hiap.attach(make("layer_scale"), ALL).to("cuda", dtype)
    scatter_logits(model)
    compact = hiap.extract(model)
    assert {(p.device.type, p.dtype) for p in compact.parameters()} == {("cuda", dtype)}
    assert compact.hiap.logit_difference < 1e-12
    x = images(compact)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert (compact(x) - model(x)).abs().max() <= tolerance * model(x).abs().max()
    hiap.save(compact, tmp_path / "model")
    assert torch.equal(hiap.load(tmp_path / "model", "cuda")(x), compact(x))


def test_open_gates_are_bit_identical() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        dense = make("dinov2").to("cuda", dtype)
        assert torch.equal(hiap.attach(copy.deepcopy(dense), ALL)(images(dense)), dense(images(dense)))


def test_the_draw_depends_on_the_seed_alone() -> None:
    models = [hiap.attach(make().float(), seed=seed).cuda().train() for seed in (3, 3, 4)]
    torch.cuda.manual_seed(1)
    for model in models:
        noise_source(model).draw()
    first, second, third = (torch.cat([gate.noise for gate in hiap.gates(model)]) for model in models)
    assert torch.equal(first, second) and not torch.equal(first, third)
