"""Weights that are scaled ahead, all layers of a shape at once: the results of one by one, with fewer operations."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import hiap
from hiap.nn.gated_linear import GatedLinear, NoiseSource
from hiap.nn.scaling import ScaledWeights
from hiap.pruning.attach import noise_source

ALL = hiap.GRANULARITIES


def small(depth: int = 4, **given: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "num_heads": 3, "num_classes": 5, **given}
    return timm.create_model("vit_tiny_patch16_224", depth=depth, **sizes)


def gated(granularities: tuple[str, ...] = ALL, **given: object) -> nn.Module:
    model = hiap.attach(small(**given), granularities).train()
    chance = torch.Generator().manual_seed(1)
    for gate in hiap.gates(model):
        gate.logit.data.uniform_(-3, 3, generator=chance)
        gate.gradient = torch.zeros_like(gate.logit)
    return model


def layers(model: nn.Module) -> list[GatedLinear]:
    return [module for module in model.modules() if isinstance(module, GatedLinear)]


def images(model: nn.Module, count: int = 2) -> Tensor:
    chance = torch.Generator().manual_seed(2)
    return torch.randn(count, 3, 16, 16, generator=chance).to(next(model.parameters()).dtype)


def outcome(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Logits, gradients of all parameters, and gradients of the gate values."""
    model.zero_grad()
    hiap.set_gates(model, draws=0)
    for gate in hiap.gates(model):
        gate.gradient.zero_()
    logits = model(x)
    logits.float().square().sum().backward()
    return [logits, *(p.grad for p in model.parameters()), *(gate.gradient.clone() for gate in hiap.gates(model))]


def one_by_one(monkeypatch: pytest.MonkeyPatch, call: Callable[[], list[Tensor | None]]) -> list[Tensor | None]:
    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "scale_ahead", lambda self: [layer.ahead.clear() for layer in self.layers])
        return call()


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many layers each call has scaled."""
    seen: list[int] = []
    forward = ScaledWeights.forward

    def counted(ctx, layout, gates, *rest):  # type: ignore[no-untyped-def]
        seen.append(len(gates))
        return forward(ctx, layout, gates, *rest)

    monkeypatch.setattr(ScaledWeights, "forward", staticmethod(counted))
    return seen


@pytest.mark.parametrize("chosen", [ALL, ("head", "value_dim", "neuron"), ("qk_dim", "ffn"), ("attention",)])
@pytest.mark.parametrize("bias", [True, False])
def test_together_and_one_by_one_are_the_same(
    chosen: tuple[str, ...], bias: bool, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    model = gated(chosen, qkv_bias=bias, proj_bias=bias).double()
    for gate in hiap.gates(model):
        gate.gradient = gate.gradient.double()
    found = outcome(model, images(model))
    shapes = len({layer.layout for layer in layers(model)})
    assert groups == [4] * shapes
    groups.clear()
    expected = one_by_one(monkeypatch, lambda: outcome(model, images(model)))
    assert groups == [1] * len(layers(model))
    for a, b in zip(found, expected, strict=True):
        assert (a is None) == (b is None) and (a is None or (a - b).abs().max() <= 1e-13 * b.abs().max())


def test_under_autocast_the_weights_are_those_of_autocast(monkeypatch: pytest.MonkeyPatch, groups: list[int]) -> None:
    model = gated()

    def call() -> list[Tensor | None]:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return outcome(model, images(model))

    found = call()
    assert set(groups) == {4}
    assert layers(model)[0].ahead.weight.dtype == torch.bfloat16
    for a, b in zip(found, one_by_one(monkeypatch, call), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.patch_embed(images(model))  # scales ahead for autocast
    outside = layers(model)[0](torch.randn(2, 24))
    assert outside.dtype == torch.float32


def test_a_layer_that_is_called_later_has_the_weight_of_that_time(groups: list[int]) -> None:
    model = gated()
    model(images(model)).sum().backward()
    tokens = torch.randn(2, 17, 24)
    model.blocks[0](tokens).sum().backward()  # the graph of the first is gone
    with torch.no_grad():
        before = model.blocks[0](tokens)
        for layer in layers(model):
            layer.weight.mul_(2.0)
        assert not torch.equal(model.blocks[0](tokens), before)
    model(images(model))  # no backward pass
    with torch.no_grad():
        for gate in hiap.gates(model):
            gate.logit.add_(1.0)
    fresh = layers(model)[0](tokens)
    groups.clear()
    layers(model)[0].ahead.clear()
    assert torch.equal(layers(model)[0](tokens), fresh) and groups == [1]


def test_what_was_scaled_is_forgotten_when_the_model_or_the_draw_changes() -> None:
    model = gated()
    tokens = torch.randn(2, 17, 24)
    model(images(model))
    before = model.blocks[0](tokens)
    noise_source(model).draw()
    assert not torch.equal(model.blocks[0](tokens), before)
    model(images(model))
    assert model.double().blocks[0](tokens.double()).dtype == torch.float64
    model(images(model))
    layers(model)[0].weight.data = 2 * layers(model)[0].weight.data
    weight = layers(model)[0].weight.detach()
    identity = torch.eye(24, dtype=torch.float64)
    scale = (layers(model)[0](identity) - layers(model)[0](0 * identity)).T / weight
    assert (scale[24:] - 1).abs().max() < 1e-9  # keys and values have no gates
    model(images(model))
    model.eval()
    assert all(layer.ahead.weight is None for layer in layers(model))


def test_frozen_blocks_are_left_out_of_the_backward_pass() -> None:
    model = gated()
    frozen, rest = layers(model.blocks[:2]), layers(model.blocks[2:])
    for part in (model.patch_embed, model.blocks[0], model.blocks[1], model.cls_token, model.pos_embed):
        part.requires_grad_(False)
    seen = []
    model.blocks[1].register_forward_hook(lambda module, args, out: seen.append(out.requires_grad))
    model(images(model)).square().sum().backward()
    assert seen == [False]
    assert all(layer.weight.grad is None for layer in frozen) and all(layer.weight.grad is not None for layer in rest)


def test_gradients_flow_where_the_stem_runs_without_them() -> None:
    model = gated()
    with torch.no_grad():
        tokens = model.patch_embed(images(model))
    model.blocks(tokens).square().sum().backward()
    assert all(layer.weight.grad.abs().sum() > 0 for layer in layers(model))


def test_a_block_that_is_left_out_gets_no_gradient() -> None:
    model = gated()
    model.blocks[2].forward = lambda x, **rest: x
    model(images(model)).square().sum().backward()
    for i, block in enumerate(model.blocks):
        own = [layer.weight.grad for layer in layers(block)]
        assert all((grad is None) == (i == 2) for grad in own)
        assert all(grad is None or grad.abs().sum() > 0 for grad in own)
        for gate in hiap.gates(block):
            assert (gate.logit.grad is None) == (i == 2) and (gate.gradient.abs().sum() == 0) == (i == 2)


def test_frozen_weights_and_logits_stay_without_gradients() -> None:
    model = gated()
    frozen = layers(model)[1]
    frozen.weight.requires_grad_(False)
    for gate in hiap.gates(model):
        gate.logit.requires_grad_(False)
    model(images(model)).square().sum().backward()
    assert frozen.weight.grad is None and layers(model)[2].weight.grad is not None
    assert all(gate.logit.grad is None and gate.gradient.abs().sum() > 0 for gate in hiap.gates(model))


def test_logits_that_a_controller_sets_get_no_gradient() -> None:
    model = gated()
    expected = outcome(model, images(model))
    for gate in hiap.gates(model):
        gate.learned = False
    logits = {id(gate.logit) for gate in hiap.gates(model)}
    found = outcome(model, images(model))
    parameters = [None, *model.parameters(), *(None for _ in logits)]
    for tensor, a, b in zip(parameters, found, expected, strict=True):
        assert a is None if id(tensor) in logits else torch.equal(a, b)


def test_weights_changed_before_the_backward_pass_are_noticed() -> None:
    model = gated()
    loss = model(images(model)).sum()
    with torch.no_grad():
        layers(model)[0].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified in place between the forward and the backward pass"):
        loss.backward()


def test_a_model_is_copied_and_pickled_between_forward_and_backward() -> None:
    model = gated()
    loss = model(images(model)).square().sum()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for one in (model, other):
            hiap.set_gates(one, draws=5)
        assert torch.equal(other(images(model)), model(images(model)))
    loss.backward()


def test_a_model_that_saw_no_backward_pass_is_freed() -> None:
    model = gated()
    model(images(model))
    gone = weakref.ref(model)
    kept = weakref.ref(layers(model)[0].ahead)
    del model
    gc.collect()
    assert gone() is None and kept() is None


def test_scaling_ahead_stops_where_nothing_uses_it(groups: list[int]) -> None:
    model = gated()
    model.patch_embed(images(model))
    assert groups == [4] * 3
    model.patch_embed(images(model))
    assert groups == [4] * 3
    model(images(model)).sum().backward()
    assert groups[3:] == [1] * 12
    model(images(model)).sum().backward()
    assert groups[15:] == [4] * 3


class Operations(TorchDispatchMode):
    """Counts operations that compute something: views start nothing on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        views = ("empty", "detach", "lift_fresh")
        self.count += not func.is_view and func.overloadpacket.__name__ not in views
        return func(*args, **(kwargs or {}))


def operations_of_a_step(model: nn.Module) -> int:
    x = images(model)
    with Operations() as counter, torch.autocast("cpu", dtype=torch.bfloat16):
        model(x).float().square().sum().backward()
    return counter.count


def test_a_gated_step_starts_few_operations_more_than_a_dense_one() -> None:
    dense = small(depth=12).train()
    model = gated(("head", "ffn", "value_dim", "neuron"), depth=12)
    plain, with_gates = operations_of_a_step(dense), operations_of_a_step(model)
    assert with_gates < 1.1 * plain
