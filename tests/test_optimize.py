import copy
import sys

import pytest
import torch

import hiap
from conftest import images, make
from hiap.export.flat_blocks import flattened
from hiap.nn.stem import Stem
from hiap.speed.inference import Optimized
from test_extract import close


def ragged(model: torch.nn.Module) -> torch.nn.Module:
    """A compact model with unequal widths, a constant branch and missing ones."""
    topology = hiap.Topology.from_counts(
        model, heads=[2, None, 3], neurons=[40, 0, None], value_dims=[[3, 5], [], 8], qk_dims=[8, [], 8]
    )
    return hiap.extract(model, topology, round_to=1)


@pytest.mark.parametrize("pad", [True, False])
def test_logits_stay(kind: str, pad: bool) -> None:
    model = make(kind)
    x = images(model)
    for one in (model, ragged(model)):
        before = copy.deepcopy(one.state_dict())
        fast = hiap.optimize(one, pad=pad)
        assert close(fast(x), one(x))
        assert all(torch.equal(tensor, before[name]) for name, tensor in one.state_dict().items())
        assert type(one.blocks[-1]).__name__ == "Block" and one.patch_embed.proj.weight is not None


def test_what_is_optimised() -> None:
    fast = hiap.optimize(make("deit_distilled"))
    assert isinstance(fast.stem, Stem) and fast.blocks[-1].tokens == 2
    assert hiap.optimize(make("dynamic_size")).stem is None  # positions depend on the input
    assert hiap.optimize(make("siglip_gap")).blocks[-1].__class__.__name__ == "Block"  # all tokens are read
    plain = hiap.optimize(make(), last_block=False)
    assert plain.blocks[-1].__class__.__name__ == "Block"


def test_heads_are_padded_on_request() -> None:
    model = make()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, value_dims=[3, 8, 5], qk_dims=[6, 2, 5]), round_to=1)
    widths = [
        [
            (block.attn.qk_dim, block.attn.value_dim)
            for block in hiap.optimize(compact, pad=pad, last_block=False).blocks
        ]
        for pad in (True, False)
    ]
    assert widths == [[(6, 6), (8, 8), (5, 5)], [(6, 3), (2, 8), (5, 5)]]


def test_the_faster_form_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, value_dims=[4] * 3), round_to=1)
    for second, width in ((0.5, 8), (2.0, 4)):
        monkeypatch.setattr(
            sys.modules["hiap.speed.inference"], "timings", lambda runs, *rest, second=second: [[1.0], [second]]
        )
        assert hiap.optimize(compact, last_block=False).blocks[0].attn.value_dim == width
    monkeypatch.undo()
    assert close(hiap.optimize(compact)(images(model)), compact(images(model)))


def test_dtype_of_the_result() -> None:
    fast = hiap.optimize(make(), torch.bfloat16)
    assert {p.dtype for p in fast.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_of_few_bits_are_folded_in_float32(dtype: torch.dtype) -> None:
    model = make().to(dtype)
    fast = hiap.optimize(model)
    assert {p.dtype for p in fast.parameters()} == {dtype}
    x = images(make())
    reference = copy.deepcopy(model).double()(x)
    assert (fast.double()(x) - reference).abs().max() < 0.02 * reference.abs().max()


def test_pixels_that_fill_no_patch() -> None:
    model = make(img_size=36)
    assert close(hiap.optimize(model)(images(model)), model(images(model)))


def test_gates_are_refused_and_a_wrong_result_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="extract it first"):
        hiap.optimize(hiap.attach(make()))
    forward = Optimized.forward
    monkeypatch.setattr(Optimized, "forward", lambda self, x: forward(self, x) * (1 + 1e-4))
    with pytest.raises(hiap.ExtractionError, match=r"differ by 0\.0001"):
        hiap.optimize(make())


def test_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="32x32"):
        hiap.optimize(make())(torch.zeros(1, 3, 64, 64).double())


@torch.no_grad()
@pytest.mark.parametrize("name", ["layer_scale", "qk_norm", "deit_distilled"])
def test_blocks_with_tokens_as_rows_of_one_matrix_compute_the_same(name: str) -> None:
    model = make(name)
    topology = hiap.Topology.from_counts(model, heads=[2, 0, None], neurons=[40, None, 0])
    for one in (model, hiap.extract(model, topology, round_to=1)):
        blocks = list(hiap.optimize(one, pad=False, last_block=False).blocks)
        (flat,), x = flattened(blocks), torch.randn(2, 5, 24, dtype=torch.float64)
        expected = x
        for block in blocks:
            expected = block(expected)
        assert torch.allclose(flat(x), expected, rtol=0, atol=1e-12 * float(expected.abs().max()))
