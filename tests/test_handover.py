"""Closed units hand over what they carried: by least squares, for as long as they are closed."""

import copy
from pathlib import Path

import pytest
import timm
import torch

import hiap
from hiap.gates import Gate, GatedLinear
from hiap.handover import RIDGE, Handover, guesses
from hiap.train import Run
from test_train import noise_data, tiny

SHAPE = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "num_classes": 5}


def make(**more):
    torch.manual_seed(3)
    return timm.create_model("vit_tiny_patch16_224", **SHAPE, **more).eval()


def images(count: int = 48) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def inputs_of(model, layer) -> torch.Tensor:
    found = []
    hook = layer.register_forward_pre_hook(lambda _, args: found.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        model(images())
    hook.remove()
    return found[0]


def half(model) -> hiap.Topology:
    return hiap.Topology.from_counts(model, heads=[2, 1, 2], value_dims=[8, 16, 8], neurons=[40, 128, 64])


def test_the_guess_is_ridge_regression() -> None:
    model = make()
    h = inputs_of(model, model.blocks[0].mlp.fc2).double()  # attention before it stays whole
    topology = hiap.Topology.from_counts(model, neurons=[40, 128, 128])
    kept = list(topology.blocks[0].neurons)
    gone = [j for j in range(128) if j not in kept]
    known = torch.cat([h[:, kept], torch.ones(len(h), 1)], dim=1)
    penalty = (RIDGE * h.square().mean() * len(h)).sqrt() * torch.eye(len(kept) + 1)[:-1]
    rows, wanted = torch.cat([known, penalty]), torch.cat([h[:, gone], torch.zeros(len(kept), len(gone))])
    guess = torch.linalg.lstsq(rows, wanted).solution
    fc2 = copy.deepcopy(model.blocks[0].mlp.fc2).double()
    hiap.hand_over(model, topology, images())
    added = fc2.weight[:, gone] @ guess.T
    now = model.blocks[0].mlp.fc2
    torch.testing.assert_close(now.weight[:, kept].double(), fc2.weight[:, kept] + added[:, :-1], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(now.bias.double(), fc2.bias + added[:, -1], atol=1e-5, rtol=1e-4)
    assert torch.equal(now.weight[:, gone].double(), fc2.weight[:, gone])


@pytest.mark.parametrize("more", [{}, {"proj_bias": False}, {"qk_norm": True}, {"init_values": 0.5}])
def test_the_network_comes_closer_to_the_dense_one(more: dict) -> None:
    model = make(**more)
    topology, x = half(model), images()
    with torch.no_grad():
        dense = model(x)
        without = hiap.extract(model, topology)(x)
        assert hiap.hand_over(model, topology, x) is model
        handed = hiap.extract(model, topology)(x)
    assert not any(isinstance(module, GatedLinear) for module in model.modules())
    assert (handed - dense).square().mean() < 0.7 * (without - dense).square().mean()


def test_a_unit_that_another_one_repeats_is_not_missed() -> None:
    model = make()
    fc1 = model.blocks[1].mlp.fc1
    fc1.weight.data[64:], fc1.bias.data[64:] = fc1.weight[:64].clone(), fc1.bias[:64].clone()
    topology, x = hiap.Topology.from_counts(model, neurons=[128, list(range(64)), 128]), images()
    with torch.no_grad():
        dense = model(x)
        without = hiap.extract(model, topology)(x)
        handed = hiap.extract(hiap.hand_over(model, topology, x), topology)(x)
    assert (handed - dense).norm() < 0.1 * (without - dense).norm()


def test_what_opens_again_needs_no_stand_in() -> None:
    model = make()
    topology, x = half(model), images()
    with torch.no_grad():
        dense = model(x)
    gated = hiap.attach(model, ("head", "block", "value_dim", "neuron")).eval()
    handover = Handover(gated, [twin := copy.deepcopy(gated)])
    hiap.set_topology(gated, topology)
    handover.update(x)
    with torch.no_grad():
        handed = gated(x)
        hiap.set_topology(gated, hiap.Topology.from_counts(model))
        torch.testing.assert_close(gated(x), dense)
        hiap.set_topology(gated, topology)
        hiap.set_topology(twin, topology)
        handover.settle()
        for one in (gated, twin):
            torch.testing.assert_close(one(x), handed)
            torch.testing.assert_close(hiap.extract(one)(x), handed)


def test_gradients_under_guesses_are_those_of_the_equation() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(6, 4).double()
    gates = {"neuron": Gate((6,), 0.3), "block": Gate((1,), 0.5)}
    layer = GatedLinear(linear, (6,), gates).train()
    for gate in gates.values():
        gate.logit.data = (gate.logit + torch.randn(gate.logit.shape)).double()
        gate.gradient = torch.zeros_like(gate.logit)
    layer.told = torch.randn(6, 7).double()
    x = torch.randn(5, 6).double()
    weight, bias, told = linear.weight.detach().requires_grad_(), linear.bias.detach().requires_grad_(), layer.told
    z, o = (gate().detach().double().requires_grad_() for gate in gates.values())
    guess = x @ told[:, :-1].T + told[:, -1]
    wanted = o * ((z * x + (1 - z) * guess) @ weight.T + bias)
    found = layer(x)
    torch.testing.assert_close(found, wanted)
    pull = torch.randn(5, 4).double()
    (wanted * pull).sum().backward()
    (found * pull).sum().backward()
    for mine, theirs in ((layer.weight, weight), (layer.bias, bias)):
        torch.testing.assert_close(mine.grad, theirs.grad)
    for gate, theirs in zip(gates.values(), (z, o), strict=True):
        torch.testing.assert_close(gate.gradient, theirs.grad.view(-1))


def test_a_unit_that_others_tell_hangs_on_them() -> None:
    """Of two units that say the same, neither is dear as long as the other one is open."""
    h = torch.randn(200, 3, generator=torch.Generator().manual_seed(0)).double()
    h = torch.cat([h, h[:, :1] + 1.0, torch.ones(200, 1)], dim=1)  # the fourth tells the first
    moment = h.T @ h / 200
    both = guesses(moment, torch.tensor([True, True, True, True]))
    torch.testing.assert_close((h @ both.T)[:, 0], h[:, 0], atol=0.1, rtol=0.0)
    torch.testing.assert_close((h @ both.T)[:, 3], h[:, 3], atol=0.1, rtol=0.0)
    assert both.diagonal().eq(0).all()
    alone = guesses(moment, torch.tensor([True, True, True, False]))
    assert (h @ alone.T - h[:, :-1])[:, 0].norm() > 0.8 * h[:, 0].norm() and not alone[:, 3].any()


def test_the_state_tells_the_same_again() -> None:
    model = hiap.attach(make(), ("head", "value_dim", "neuron"))
    hiap.set_topology(model, half(make()))
    first = Handover(model)
    first.restore(first.state(), first.updates)  # nothing has been told yet
    assert all(layer.told is None for layers in first.layers.values() for layer in layers)
    for seed in range(3):
        first.update(torch.randn(8, 3, 16, 16, generator=torch.Generator().manual_seed(seed)))
    told = {name: layer.told for name, (layer,) in first.layers.items()}
    second = Handover(copy.deepcopy(model))
    second.restore(first.state(), first.updates)
    assert all(torch.equal(layer.told, told[name]) for name, (layer,) in second.layers.items())
    for handover in (first, second):
        handover.update(images())
    for name, (layer,) in second.layers.items():
        assert not torch.equal(layer.told, told[name]) and torch.equal(layer.told, first.layers[name][0].told)


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, True),
        ({"hand_over": False}, False),
        ({"target": None, "lambda_macro": 1.0, "lambda_micro": 0.5}, False),
        ({"target": None, "lambda_macro": 1.0, "lambda_micro": 0.5, "hand_over": True}, True),
    ],
)
def test_a_run_with_a_target_hands_over(given: dict, used: bool, tmp_path: Path) -> None:
    told = []

    class Watched(Run):
        def freeze(self) -> None:
            told.extend(module.told is not None for module in self.raw.modules() if isinstance(module, GatedLinear))
            super().freeze()
            assert self.handover is None

    result = Watched(tiny(batch_size=16, epochs=2, **given), tmp_path, data=noise_data(size=8)).go()
    assert any(told) == (used and "target" not in given)  # else only at the freeze
    assert not any(isinstance(module, GatedLinear) for module in result.model.modules())


def test_inputs_that_are_nothing_are_no_trouble() -> None:
    model = make()
    torch.nn.init.zeros_(model.blocks[0].mlp.fc1.weight)
    torch.nn.init.zeros_(model.blocks[0].mlp.fc1.bias)
    hiap.hand_over(model, half(model), images())
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


def test_gated_models_are_refused() -> None:
    model = make()
    topology = half(model)
    with pytest.raises(ValueError, match=r"without gates.*hiap\.detach"):
        hiap.hand_over(hiap.attach(model), topology, images())


def test_no_images_are_refused() -> None:
    model = make()
    with pytest.raises(ValueError, match="no images"):
        hiap.hand_over(model, half(model), images(0))
    assert not any(isinstance(module, GatedLinear) for module in model.modules())


def test_a_topology_of_another_model_changes_nothing() -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(hiap.TopologyError):
        hiap.hand_over(model, hiap.Topology.from_counts(make(mlp_ratio=2), neurons=[8, 8, 8]), images())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
