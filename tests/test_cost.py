import itertools

import numpy as np
import pytest
import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hiap
from conftest import images, make
from hiap.models.registry import sites
from hiap.pruning.attach import gates_by_block, noise_source
from test_gates import ALL, PAPER, granularities, scatter_logits

PAPER_TOPOLOGIES = {  # the paper's layer table for DeiT-Base, with the MACs it follows from
    10.08: (
        [2, 1, 1, 3, 3, 5, 5, 6, 5, 4, 6, 8],
        [1221, 770, 1417, 1968, 2240, 2230, 2476, 2798, 2947, 3007, 2784, 1991],
    ),
    7.43: (
        [1, 1, 1, 2, 3, 2, 2, 3, 1, 2, 3, 5],
        [1105, 770, 1134, 1511, 1769, 1756, 1973, 2357, 2543, 2416, 1799, 1298],
    ),
}
SAMPLES = 2000


def counted_macs(model: torch.nn.Module, x: torch.Tensor) -> int:
    """torch's own count, with attention in its plain form."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(x[:1])
    flops = counter.get_total_flops()
    assert flops % 2 == 0
    return flops // 2


def giga(macs: float) -> float:
    return round(macs / 1e9, 2)


@pytest.fixture(scope="module")
def deit_base() -> torch.nn.Module:
    with torch.device("meta"):
        return timm.create_model("deit_base_patch16_224")


def test_golden_macs_of_dense_models(deit_base: torch.nn.Module) -> None:
    with torch.device("meta"):
        small = timm.create_model("deit_small_patch16_224")
    assert giga(hiap.macs(deit_base)) == 17.56 and giga(hiap.macs(small)) == 4.60


@pytest.mark.slow
@pytest.mark.parametrize("expected", PAPER_TOPOLOGIES)
def test_golden_macs_of_the_papers_topologies(deit_base: torch.nn.Module, expected: float) -> None:
    heads, neurons = PAPER_TOPOLOGIES[expected]
    topology = hiap.Topology.from_counts(deit_base, heads=heads, neurons=neurons)
    counts = hiap.hard_counts(topology)
    assert giga(hiap.MacCost(deit_base).total(counts).item()) == expected
    model = timm.create_model("deit_base_patch16_224")
    compact = hiap.extract(model, topology, round_to=1)
    assert giga(hiap.macs(compact)) == expected
    assert hiap.macs(compact) == counted_macs(compact, torch.zeros(1, 3, 224, 224))


def test_golden_share_of_a_head_that_is_fixed(deit_base: torch.nn.Module) -> None:
    one = torch.zeros(12, dtype=torch.float64)
    one[0] = 1
    head = hiap.Counts(one, 64 * one, 64 * one, 0 * one)
    for accounting, share in (("paper", 0.72), ("exact", 0.50)):
        cost = hiap.MacCost(deit_base, accounting=accounting)
        fixed, values = cost.macro(head).item(), cost.micro(head).item()
        assert round(fixed / (fixed + values), 2) == share


def test_paper_and_exact_accounting_agree_on_the_whole(deit_base: torch.nn.Module) -> None:
    exact, paper = hiap.MacCost(deit_base), hiap.MacCost(deit_base, "paper")
    assert exact.fixed + exact.dense == hiap.macs(deit_base)
    assert paper.fixed + paper.dense == 2 * hiap.macs(deit_base)
    with pytest.raises(ValueError, match="'exact' or 'paper'; found 'flops'"):
        hiap.MacCost(deit_base, "flops")


def test_macs_are_what_torch_counts(kind: str) -> None:
    model = make(kind)
    x = images(model)
    assert hiap.macs(model) == counted_macs(model, x)
    gated = hiap.attach(model, granularities(kind))
    scatter_logits(gated)
    for round_to in (1, 3):
        compact = hiap.extract(gated, round_to=round_to)
        assert hiap.macs(compact) == hiap.macs(gated, round_to=round_to) == counted_macs(compact, x)


def test_macs_at_another_image_size() -> None:
    model = make("augreg")
    other = make("augreg", img_size=(48, 40))
    assert hiap.macs(model, img_size=(48, 40)) == hiap.macs(other) == counted_macs(other, images(other))
    padded = make("dynamic_size")
    assert hiap.macs(padded, img_size=33) == hiap.macs(padded, img_size=40)
    with pytest.raises(ValueError, match="img_size 36x36 is not a multiple of the 8x8 patch"):
        hiap.macs(model, img_size=36)
    with pytest.raises(ValueError, match="img_size 4x4 is smaller than one 8x8 patch"):
        hiap.macs(make("dynamic_size"), img_size=4)


def test_a_classifier_of_unknown_cost_is_refused() -> None:
    model = make()
    model.head = torch.nn.Bilinear(24, 24, 7)
    with pytest.raises(hiap.UnsupportedModelError, match="head is a Bilinear"):
        hiap.macs(model)


@pytest.mark.parametrize(
    ("accounting", "chosen"),
    [
        ("exact", ALL),
        ("paper", PAPER),
        *(
            pytest.param(accounting, chosen, marks=pytest.mark.slow)
            for accounting in ("exact", "paper")  # the paper's accounting has no q/k dims
            for chosen in (PAPER, ("head",), ("neuron", "qk_dim"), ("value_dim", "attention"))
            if accounting == "exact" or chosen not in (PAPER, ("neuron", "qk_dim"))
        ),
    ],
)
def test_expected_cost_is_the_mean_cost_of_sampled_gates(chosen: tuple[str, ...], accounting: str) -> None:
    model = hiap.attach(make(), chosen, keep_blocks=(1,))
    scatter_logits(model)
    cost = hiap.MacCost(model, accounting)
    source = noise_source(model)
    samples = torch.zeros(SAMPLES, dtype=torch.float64)
    for i in range(SAMPLES):
        source.draw()
        samples[i] = naive_cost(model, accounting)
    expected = cost.total(hiap.expected_counts(model)).item()
    assert abs(samples.mean().item() - expected) < 3 * samples.std().item() / SAMPLES**0.5


def naive_cost(model: torch.nn.Module, accounting: str) -> float:
    """Equation 4 for one sample of hard gates, gate by gate."""
    N, D, H, Dh, F = 17, 24, 3, 8, 96
    exact = {"C1": 2 * N * D * Dh + N * N * Dh, "C2": 2 * N * D + N * N, "C3": 2 * N * D}
    paper = {"C1": 2 * N * D * 3 * Dh + 2 * N * N * Dh, "C2": 2 * N * D + 2 * N * N, "C3": 4 * N * D}
    C = exact if accounting == "exact" else paper
    total = (1 if accounting == "exact" else 2) * (16 * D * 3 * 8 * 8 + D * 7)
    for kinds in gates_by_block(model):
        z = {k: (gate.logit.detach() + gate.noise > 0).view(gate.shape).numpy() for k, gate in kinds.items()}
        a = z["attention"].item() if "attention" in z else 1.0
        g = z["head"].flatten() if "head" in z else np.ones(H)
        d = z.get("value_dim", np.ones((H, Dh)))
        e = z.get("qk_dim", np.ones((H, Dh)))
        b = z["ffn"].item() if "ffn" in z else 1.0
        c = z.get("neuron", np.ones(F))
        for h in range(H):
            total += a * g[h].item() * (C["C1"] * e[h].mean().item() + C["C2"] * d[h].sum().item())
        total += b * c.sum().item() * C["C3"]
    return total


def test_expected_cost_is_linear_in_the_joint_expectations() -> None:
    cost = hiap.MacCost(hiap.attach(make(), ALL))
    generator = torch.Generator().manual_seed(0)
    first, second = (hiap.Counts(*torch.rand(4, 3, generator=generator, dtype=torch.float64)) for _ in range(2))
    fields = ("heads", "value_dims", "qk_dims", "neurons")
    mix = hiap.Counts(*(0.3 * getattr(first, f) + 0.7 * getattr(second, f) for f in fields))
    for term in (cost.macro, cost.micro, cost.total):
        torch.testing.assert_close(term(mix), 0.3 * term(first) + 0.7 * term(second), rtol=1e-12, atol=0)


@pytest.mark.parametrize("chosen", [PAPER, ALL])
def test_gradient_of_the_expected_cost(chosen: tuple[str, ...]) -> None:
    model = hiap.attach(make(depth=1, embed_dim=6, mlp_ratio=1), chosen).double()
    scatter_logits(model)
    cost = hiap.MacCost(model)
    logits = [gate.logit for gate in hiap.gates(model)]

    def total(*values: torch.Tensor) -> torch.Tensor:
        for gate, value in zip(hiap.gates(model), values, strict=True):
            del gate.logit
            gate.logit = value
        return cost.total(hiap.expected_counts(model)) / cost.dense

    assert torch.autograd.gradcheck(total, [p.detach().requires_grad_() for p in logits])


def test_qk_dim_gates_empty_the_macro_term() -> None:
    model = hiap.attach(make(), ALL)
    counts = hiap.expected_counts(model)
    assert hiap.MacCost(model).macro(counts).item() == 0
    with pytest.raises(ValueError, match="paper's accounting has no q/k dims"):
        hiap.MacCost(model, "paper")


def test_only_what_a_gate_can_remove_is_prunable() -> None:
    model = make()
    whole = hiap.macs(model)
    for chosen in itertools.chain([(name,) for name in ALL], [PAPER]):
        gated = hiap.attach(make(), chosen)
        cost = hiap.MacCost(gated)
        assert cost.fixed + cost.dense == whole
        for gate in hiap.gates(gated):
            gate.logit.data.fill_(-100.0)
        left = cost.total(hiap.expected_counts(gated)).item()
        assert left == pytest.approx(cost.fixed, rel=1e-12)
    protected = hiap.MacCost(hiap.attach(make(), PAPER, keep_blocks=(0,)))
    assert protected.dense == pytest.approx(2 / 3 * hiap.MacCost(hiap.attach(make())).dense)


def test_parameters_are_counted_exactly(kind: str) -> None:
    model = make(kind)
    cost = hiap.ParamCost(hiap.attach(make(kind), granularities(kind)))
    assert cost.fixed + cost.dense == sum(p.numel() for p in model.parameters())
    for heads, neurons in (([1, 2, 3], [1, 9, 96]), ([0, None, 3], [0, None, 7])):
        topology = hiap.Topology.from_counts(model, heads=heads, neurons=neurons, value_dims=[3, 8, 5])
        compact = hiap.extract(model, topology, round_to=1)
        widths = [b.widths(w) for b, w in zip(topology.blocks, topology.dense, strict=True)]
        total = cost.outside + sum(cost.block(s, w) for s, w in zip(sites(model), widths, strict=True))
        assert total == sum(p.numel() for p in compact.parameters())
