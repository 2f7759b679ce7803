"""Heads in other axes: the same function, uncorrelated dims, and what has low rank can be cut for nothing."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hiap
from conftest import KINDS, images, make
from hiap.pruning.attach import check_finite
from hiap.pruning.extract import difference, probe
from hiap.training.loop import Run
from runs import noise_data, tiny


def batches(model: nn.Module, count: int = 3) -> list[Tensor]:
    return [images(model, 4, seed) for seed in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_the_function_stays(kind: str) -> None:
    model = make(kind).train()
    weights = [block.attn.qkv.weight.clone() for block in model.blocks]
    before = probe(model, torch.float64)
    assert hiap.align_heads(model, batches(model)) is model
    assert difference(before, probe(model, torch.float64)) < 1e-12
    assert all(not torch.allclose(block.attn.qkv.weight, w) for block, w in zip(model.blocks, weights, strict=True))
    assert model.training and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_compact_model_stays_itself() -> None:
    model = make()
    topology = hiap.Topology.from_counts(model, heads=[2, None, []], qk_dims=[3, 8, 8], value_dims=[5, 8, 8])
    compact = hiap.extract(model, topology, round_to=1)
    before = probe(compact, torch.float64)
    hiap.align_heads(compact, batches(compact))
    assert difference(before, probe(compact, torch.float64)) < 1e-12


def seen(model: nn.Module, x: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the last block: second moments of queries, of keys within an image and of outputs, and the projection's."""
    attn, found = model.blocks[-1].attn, {}
    hooks = [
        attn.qkv.register_forward_hook(lambda m, args, out: found.setdefault("qkv", []).append(out)),
        attn.proj.register_forward_pre_hook(lambda m, args: found.setdefault("y", []).append(args[0])),
    ]
    with torch.no_grad():
        for batch in x:
            model(batch)
    for hook in hooks:
        hook.remove()
    q, k, _ = torch.cat(found["qkv"]).unflatten(-1, (3, attn.num_heads, -1)).unbind(2)
    y = torch.cat(found["y"]).unflatten(-1, (attn.num_heads, -1))
    k = k - k.mean(1, keepdim=True)
    columns = attn.proj.weight.detach().unflatten(1, (attn.num_heads, -1))
    moments = [torch.einsum("bnhi,bnhj->hij", one, one) for one in (q, k, y)]
    return *moments, torch.einsum("dhi,dhj->hij", columns, columns)


def test_dims_do_not_correlate_and_fall_in_strength() -> None:
    model = make(embed_dim=48, num_heads=3)
    x = batches(model)
    hiap.align_heads(model, x)
    queries, keys, outputs, columns = seen(model, x)
    for first, second in ((queries, keys), (outputs, columns)):
        for moment in (first, second):
            sizes = moment.diagonal(dim1=1, dim2=2)
            correlation = moment / (sizes.unsqueeze(1) * sizes.unsqueeze(2)).sqrt()
            assert (correlation - torch.eye(sizes.shape[1])).abs().max() < 1e-2
        strength = (first * second).diagonal(dim1=1, dim2=2)
        assert (strength[:, :-1] >= strength[:, 1:] * (1 - 1e-3)).all() and (strength[:, 0] > 2 * strength[:, -1]).all()


def test_what_has_low_rank_is_cut_for_nothing() -> None:
    model = make(qkv_bias=False)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():  # queries and values of rank 2, spread over all 8 dims
        for block in model.blocks:
            rows = block.attn.qkv.weight.view(3, 3, 8, -1)
            for part in (rows[0], rows[2]):
                mix = torch.randn(3, 8, 2, generator=generator, dtype=torch.float64)
                part.copy_(mix @ torch.randn(3, 2, rows.shape[-1], generator=generator, dtype=torch.float64) * 0.3)
    two = hiap.Topology.from_counts(model, qk_dims=[2] * 3, value_dims=[2] * 3)
    before = probe(model, torch.float64)
    assert difference(before, probe(hiap.extract(model, two, round_to=1), torch.float64)) > 0.05
    hiap.align_heads(model, batches(model))
    assert difference(before, probe(hiap.extract(model, two, round_to=1), torch.float64)) < 1e-4


def test_a_head_without_weights_is_left_alone() -> None:
    model = make("layer_scale")
    with torch.no_grad():
        model.blocks[0].attn.qkv.weight.view(3, 3, 8, -1)[0, 1] = 0
        model.blocks[0].attn.qkv.bias.view(3, 3, 8)[0, 1] = 0
        model.blocks[1].attn.proj.weight.zero_()
    before = probe(model, torch.float64)
    hiap.align_heads(model, batches(model))
    assert all(p.isfinite().all() for p in model.parameters())
    assert difference(before, probe(model, torch.float64)) < 1e-12


def test_padded_heads_are_turned_too() -> None:
    model = make()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, qk_dims=[5] * 3, value_dims=[5] * 3), round_to=8)
    before, weight = probe(compact, torch.float64), compact.blocks[0].attn.qkv.weight.clone()
    hiap.align_heads(compact, batches(compact))
    assert difference(before, probe(compact, torch.float64)) < 1e-12
    changed = (compact.blocks[0].attn.qkv.weight != weight).view(9, 8, -1).any(2).any(1)
    assert changed.all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_blur_the_axes(dtype: torch.dtype) -> None:
    model = make(embed_dim=48, num_heads=3).float()
    with torch.no_grad():
        for block in model.blocks:  # outputs so large that their squares do not fit into float16
            block.attn.qkv.weight[96:] *= 100
    x = batches(model)
    with torch.autocast("cpu", dtype=dtype):
        hiap.align_heads(model, x)
    for moment in seen(model, x):  # as uncorrelated as autocast leaves the activations themselves
        sizes = moment.diagonal(dim1=1, dim2=2)
        correlation = moment / (sizes.unsqueeze(1) * sizes.unsqueeze(2)).sqrt()
        assert (correlation - torch.eye(sizes.shape[1])).abs().max() < 0.1


def test_no_images_are_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        hiap.align_heads(make(), [])


def test_normalised_queries_and_keys_are_not_turned() -> None:
    model = make("qk_norm")
    before = [block.attn.qkv.weight.clone() for block in model.blocks]
    hiap.align_heads(model, batches(model))
    for block, old in zip(model.blocks, before, strict=True):
        assert torch.equal(block.attn.qkv.weight[:48], old[:48]) and not torch.equal(block.attn.qkv.weight, old)


def test_gated_models_are_refused() -> None:
    with pytest.raises(ValueError, match="before gates"):
        hiap.align_heads(hiap.attach(make()), [])


@pytest.mark.parametrize(
    ("given", "turned"),
    [
        ({}, "qkv"),
        ({"align_heads": False}, ""),
        ({"granularities": ["head", "neuron"]}, ""),
        ({"granularities": ["qk_dim", "neuron"]}, "qk"),
        ({"granularities": ["value_dim", "neuron"]}, "v"),
        ({"target": None, "lambda_macro": 1.0, "lambda_micro": 0.5}, ""),
        ({"target": None, "lambda_macro": 1.0, "lambda_micro": 0.5, "align_heads": True}, "v"),
    ],
)
def test_a_run_turns_what_has_gates(given: dict[str, object], turned: str, tmp_path: Path) -> None:
    run = Run(tiny(batch_size=16, **given), tmp_path, data=noise_data(size=8))
    before = run.parts.model.blocks[0].attn.qkv.weight.clone().chunk(3)
    run.begin()
    after = run.phase.network.blocks[0].attn.qkv.weight.chunk(3)
    assert "".join(n for n, a, b in zip("qkv", before, after, strict=True) if not torch.equal(a, b)) == turned
    run.folder.close()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(value: float) -> None:
    model = make()
    model.blocks[1].attn.qkv.weight.data[0, :2] = value
    message = r"^blocks\.1\.attn\.qkv\.weight has 2 values that are not finite\. The checkpoint is damaged"
    with pytest.raises(ValueError, match=message):
        hiap.align_heads(model, batches(model))
    with pytest.raises(ValueError, match=message):
        check_finite(model)


def test_huge_weights_are_refused_and_nothing_is_changed() -> None:
    model = make().float()
    for p in model.parameters():
        p.data.mul_(1e10)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"the activations in blocks\.\d\.attn are not finite, or too large to square"):
        hiap.align_heads(model, batches(model))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_images_that_are_not_finite_are_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match=r"in blocks\.0\.attn are not finite, .* Are the images finite"):
        hiap.align_heads(model, [images(model) * float("nan")])
