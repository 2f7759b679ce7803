"""What a model of any family must do, however it is written: each function asserts one thing."""

import copy
import random
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hiap
from hiap.models.registry import sites, widths_of
from hiap.nn.rotary import pair_of
from hiap.speed.bench import bench, dense_like
from hiap.speed.measure import measure

CPU = torch.device("cpu")


def close(first: Tensor, second: Tensor, allowed: float = 1e-12) -> bool:
    return bool((first - second).abs().max() <= allowed * first.abs().max())


def ragged(model: nn.Module, seed: int, queries: bool = True) -> hiap.Topology:
    """A random choice of units of every granularity; whole branches go as well, and q/k dims in pairs if they must."""
    chance, columns = random.Random(seed), {"heads": [], "value_dims": [], "qk_dims": [], "neurons": []}

    def some(size: int) -> list[int]:
        return sorted(chance.sample(range(size), chance.randint(1, size)))

    def some_queries(site: hiap.Site) -> list[int] | int:
        size, pairs = site.widths.qk_dim, site.pairs
        if not queries or pairs is None:
            return some(size) if queries else size
        kept = some(size // 2)
        return [dim for dim in range(size) if pair_of(dim, size, pairs) in (*kept, size // 2)]

    for site in sites(model):
        w = site.widths
        heads = chance.choice([None, 0, *[some(w.heads)] * 4])
        count = len(heads) if heads else 0
        columns["heads"].append(heads)
        columns["value_dims"].append([some(w.value_dim) for _ in range(count)])
        columns["qk_dims"].append([some_queries(site) for _ in range(count)])
        columns["neurons"].append(chance.choice([None, 0, *[some(w.neurons)] * 4]))
    return hiap.Topology.from_counts(model, **columns)


def counted(model: nn.Module, x: Tensor) -> int:
    """MACs of one image, as torch counts them."""
    model = copy.deepcopy(model).requires_grad_(False)
    torch.backends.mha.set_fastpath_enabled(False)  # which is not counted
    try:
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            model(x[:1])
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    return counter.get_total_flops() // 2


def gates_come_and_go(model: nn.Module, x: Tensor, kinds: tuple[str, ...] = hiap.GRANULARITIES) -> None:
    before, state = model(x), copy.deepcopy(model.state_dict())
    types = [type(module) for module in model.modules()]
    hiap.attach(model, kinds)
    assert close(before, model(x))
    hiap.detach(model)
    assert [type(module) for module in model.modules()] == types
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(model(x), before)


def extraction_is_exact(
    model: nn.Module, x: Tensor, kinds: tuple[str, ...] = hiap.GRANULARITIES, cases: int = 3
) -> None:
    for seed in range(cases):
        topology = ragged(model, seed, "qk_dim" in kinds)
        gated = hiap.attach(copy.deepcopy(model), kinds)
        hiap.set_topology(gated, topology)
        for round_to in (1, 4):
            compact = hiap.extract(gated, round_to=round_to)
            assert type(compact) is type(model) and close(gated(x), compact(x))
            assert hiap.macs(compact) == hiap.macs(gated, round_to=round_to) == counted(compact, x)
    assert hiap.macs(model) == counted(model, x)


def a_folder_holds_it(model: nn.Module, x: Tensor, folder: Path, queries: bool = True) -> nn.Module:
    for seed in range(2):
        compact = hiap.extract(model, ragged(model, seed, queries), round_to=1)
        hiap.save(compact, folder)
        loaded = hiap.load(folder)
        assert type(loaded) is type(model) and torch.equal(loaded(x), compact(x))
        assert hiap.macs(dense_like(loaded)) == hiap.macs(model)
    return loaded


def alignment_changes_nothing(model: nn.Module, x: Tensor) -> None:
    before, weights = model(x), copy.deepcopy(model.state_dict())
    types = [type(module) for module in model.modules()]
    hiap.align_heads(model, [x])
    assert [type(module) for module in model.modules()] == types
    assert any(not torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert close(before, model(x), 1e-9)


def optimising_changes_nothing(model: nn.Module, x: Tensor, queries: bool = True) -> None:
    types = [type(module) for module in model.modules()]
    for one in (model, *(hiap.extract(model, ragged(model, seed, queries), round_to=1) for seed in range(2))):
        for pad in (False, True):
            assert close(one(x), hiap.optimize(one, pad=pad)(x))
    assert [type(module) for module in model.modules()] == types


def it_can_be_timed(model: nn.Module, added: int = 0) -> None:
    """`added`: parameters that the converted blocks have and the model's own have not."""
    model = copy.deepcopy(model).float()
    most = widths_of(model)[0]
    grid = {
        "heads": [1, most.heads],
        "qk_dim": [most.qk_dim],
        "value_dim": [most.value_dim],
        "neurons": [8, most.neurons],
    }
    table = measure(model, CPU, "fp32", 2, grid=grid)
    cost = hiap.LatencyCost(hiap.attach(copy.deepcopy(model)), table)
    assert 0 < cost.outside < cost.outside + cost.dense
    rows = bench({"dense": model}, CPU, [2], ["fp32"], ["eager"], 1, 2)
    assert [row.macs for row in rows] == [hiap.macs(model)] * 2
    gated = hiap.attach(copy.deepcopy(model))
    own = sum(p.numel() for p in model.parameters())
    assert hiap.ParamCost(gated).total(hiap.hard_counts(hiap.harden(gated))) == own + added
