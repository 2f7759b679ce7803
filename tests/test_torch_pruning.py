"""The networks of Torch-Pruning in the comparisons: within their target, and as fast as ours can be made."""

from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F

import hiap
from narrower import counted_macs, torch_pruning


@pytest.mark.filterwarnings("ignore:.*unwrapped parameters:UserWarning")
@pytest.mark.parametrize("isomorphic", [False, True])
def test_networks_meet_their_target_and_can_be_optimised(isomorphic: bool) -> None:
    torch.manual_seed(0)
    dense = timm.create_model("test_vit", img_size=32, num_classes=5)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    run = SimpleNamespace(
        dense=dense,
        batches=lambda: [(x, y)],
        loss=lambda model, images, labels: F.cross_entropy(model(images), labels),
        data=SimpleNamespace(val=lambda size: iter([(x[:size], y[:size])])),
    )
    run.target = 0.6 * counted_macs(dense, run)
    network = torch_pruning(run, isomorphic).eval()  # type: ignore[arg-type]
    assert 0.9 * run.target < counted_macs(network, run) <= run.target
    assert network.embed_dim == network.norm.weight.numel() < dense.embed_dim
    network.double()
    expected = network(x.double())
    assert expected.shape == (4, 5)
    assert (hiap.optimize(network)(x.double()) - expected).abs().max() < 1e-10 * expected.abs().max()
    aligned = torch_pruning(run, isomorphic, round_to=8)  # type: ignore[arg-type]
    assert counted_macs(aligned, run) <= run.target
    layers = [layer for layer in aligned.modules() if isinstance(layer, torch.nn.Linear) and layer is not aligned.head]
    assert not any(layer.out_features % 8 or layer.in_features % 8 for layer in layers)
