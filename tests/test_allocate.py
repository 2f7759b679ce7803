import itertools

import pytest
import torch

import hiap
from conftest import make
from hiap.budget.allocate import Allocation
from hiap.budget.branches import Floors, Values
from hiap.models.family import Site
from hiap.models.registry import sites
from hiap.nn.compact import Widths
from hiap.pruning.attach import gates_by_block
from test_gates import ALL, PAPER

MODEL = {"embed_dim": 32, "num_heads": 4, "depth": 2}


def drawn(model: torch.nn.Module, seed: int) -> list[Values]:
    """Values of very different sizes for every gate."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {kind: 10 ** (2 * torch.randn(gate.shape, generator=generator).double() - 3) for kind, gate in kinds.items()}
        for kinds in gates_by_block(model)
    ]


def allocation(kinds: tuple[str, ...], **options: object) -> tuple:
    model = hiap.attach(make(**MODEL), kinds)
    movable = [set(one) for one in gates_by_block(model)]
    return model, Allocation(sites(model), movable, hiap.MacCost(model), **options)


def total(chosen: torch.Tensor, table: torch.Tensor) -> float:
    return float(table.gather(1, chosen[:, None]).sum())


@pytest.mark.parametrize("kinds", [ALL, PAPER, ("head", "neuron")])
@pytest.mark.parametrize("seed", range(4))
def test_no_network_of_the_same_cost_loses_less(kinds: tuple[str, ...], seed: int) -> None:
    model, found = allocation(kinds)
    losses = found.losses(drawn(model, seed))
    every_loss, every_cost = (  # of all networks there are
        sum(row.view([-1 if i == j else 1 for j in range(len(table))]) for i, row in enumerate(table))
        for table in (losses, found.cost)
    )
    dense = hiap.macs(make(**MODEL))
    for share in (0.3, 0.5, 0.7, 0.9):
        chosen, rate = found.spend(losses, share * dense)
        cost, loss = total(chosen, found.cost), total(chosen, losses)
        assert found.outside + cost <= share * dense and rate > 0
        assert loss <= float(every_loss[every_cost <= cost].min()) * (1 + 1e-12)


@pytest.mark.parametrize("kinds", [ALL, PAPER, ("ffn", "neuron", "value_dim")])
def test_losses_are_those_of_the_units_that_go(kinds: tuple[str, ...]) -> None:
    model, found = allocation(kinds, floors=Floors(heads=0), multiple=4)
    values = drawn(model, 0)
    for (i, branch), losses in zip(found.branches, found.losses(values), strict=True):
        value = values[i]
        for widths, loss in zip(branch.choices, losses.tolist(), strict=False):
            if widths.heads is None and widths.neurons is None:
                expected = value[branch.gate].item()
            elif branch.gate == "ffn":
                gone = value["neuron"].sort(descending=True).values[widths.neurons :]
                expected = gone.sum().item()
            else:
                expected = naive(value, widths)
            whole = value[branch.gate].item() if branch.gate in value else float("inf")
            assert loss == pytest.approx(min(expected, whole))


class Dear(hiap.MacCost):
    """Most of a branch is paid for at any width."""

    proportional = False

    def block(self, site: Site, widths: Widths) -> float:
        fixed = 1e5 * (bool(widths.heads) + bool(widths.neurons))
        return super().block(site, widths) + fixed


@pytest.mark.parametrize("kinds", [ALL, PAPER, ("ffn", "neuron"), ("attention", "value_dim"), ("attention", "ffn")])
def test_a_branch_goes_with_its_units(kinds: tuple[str, ...]) -> None:
    """Where narrow branches are dear, those of its units that go first take the most of a branch with them."""
    model = hiap.attach(make(**MODEL), kinds)
    found = Allocation(sites(model), [set(kinds)] * 2, Dear(model), Floors(heads=0), 4)
    values = drawn(model, 0)
    for (i, branch), losses in zip(found.branches, found.losses(values), strict=True):
        value = values[i]
        if branch.gate not in value:
            continue
        units = {"ffn": ["neuron"], "attention": ["head"] if "head" in value else ["qk_dim", "value_dim"]}[branch.gate]
        whole, worth = value[branch.gate].item(), sum(value[kind].sum().item() for kind in units if kind in value)
        for widths, loss in zip(branch.choices, losses.tolist(), strict=False):
            if widths.heads is None and widths.neurons is None:
                assert loss == pytest.approx(whole)
            elif branch.gate == "ffn":
                gone = value["neuron"].sort(descending=True).values[widths.neurons :].sum().item() if worth else 0.0
                assert loss == pytest.approx(whole * (1 - (1 - gone / max(worth, 1e-9)) ** 2))
            else:
                gone = naive(value, widths) / max(worth, 1e-9)
                assert loss == pytest.approx(whole * (1 - (1 - gone) ** 2))


def test_what_is_closed_does_not_come_back_as_a_trace() -> None:
    """Units in a closed branch feel hardly any gradient. By sums of values its narrowest width would lose nothing."""
    model = hiap.attach(make(**MODEL), ALL)
    cost, whole = Dear(model), sites(model)[0].widths
    allowed = cost.outside + 1.6 * cost.block(sites(model)[0], whole)
    values = [
        {kind: torch.full(gate.shape, scale).double() for kind, gate in kinds.items()}
        for kinds, scale in zip(gates_by_block(model), (1.0, 1e-6), strict=True)
    ]
    for block, worth in zip(values, (1e3, 10.0), strict=True):
        block |= {kind: torch.tensor([worth]).double() for kind in ("attention", "ffn")}
    for proportional in (False, True):
        cost.proportional = proportional
        found = Allocation(sites(model), [set(ALL)] * 2, cost)
        first, second = found.widths(found.spend(found.losses(values), allowed)[0])
        assert first == whole
        if proportional:
            assert second.heads == 1 and second.neurons <= 16
        else:
            assert second in (Widths(4, 8, 8, None), Widths(None, 0, 0, 128))


def naive(value: Values, widths: Widths) -> float:
    """Head by head, dim by dim."""
    heads = range(MODEL["num_heads"])
    ranked = sorted(heads, key=lambda h: -value["head"][h].item()) if "head" in value else list(heads)
    lost = sum(value["head"][h].item() for h in ranked[widths.heads :])
    for h in ranked[: widths.heads]:
        dims = sum(
            sum(sorted(value[kind][h].tolist(), reverse=True)[kept:])
            for kind, kept in (("qk_dim", widths.qk_dim), ("value_dim", widths.value_dim))
            if kind in value
        )
        lost += min(dims, value["head"][h].item()) if "head" in value else dims
    return lost


@pytest.mark.parametrize("seed", range(5))
def test_nothing_fits_into_the_room_that_is_left(seed: int) -> None:
    model, found = allocation(PAPER)
    losses = found.losses(drawn(model, seed))
    dense = hiap.macs(make(**MODEL))
    for share in (0.35, 0.5, 0.65, 0.8, 0.95):
        chosen = found.settle(losses, share * dense)
        room = share * dense - found.outside - total(chosen, found.cost)
        assert 0 <= room <= 0.02 * dense
        for row, now in enumerate(chosen.tolist()):
            for cost, loss in zip(found.cost[row].tolist(), losses[row].tolist(), strict=True):
                fits = 0 < cost - found.cost[row, now] <= room
                assert not (fits and loss <= losses[row, now])


@pytest.mark.parametrize("kinds", [("head", "ffn"), ("attention", "ffn"), ("head",), PAPER])
def test_room_is_packed_at_the_least_loss(kinds: tuple[str, ...]) -> None:
    """Against all networks there are: none that comes as near to what is allowed loses less."""
    model, found = allocation(kinds)
    dense = hiap.macs(make(**MODEL))
    every = list(itertools.product(*(range(len(branch.choices)) for _, branch in found.branches)))
    costs = found.outside + sum(found.cost[i, torch.tensor(one)] for i, one in enumerate(zip(*every, strict=True)))
    for seed, share in itertools.product(range(3), (0.5, 0.61, 0.72, 0.83, 0.94)):
        allowed = share * dense
        if allowed < found.least:
            continue
        losses = found.losses(drawn(model, seed))
        every_loss = sum(losses[i, torch.tensor(one)] for i, one in enumerate(zip(*every, strict=True)))
        fit = costs[costs <= allowed]
        near = (costs <= allowed) & (costs >= min(0.99 * allowed, float(fit.max())))
        chosen = found._pack(losses, allowed)
        assert total(chosen, losses) == pytest.approx(float(every_loss[near].min()))
        settled = found.outside + total(found.settle(losses, allowed), found.cost)
        assert min(0.99 * allowed, float(fit.max())) <= settled <= allowed


def test_a_whole_cost_may_be_the_budget_itself() -> None:
    model, found = allocation(("head",))
    one_less = hiap.macs(hiap.extract(make(**MODEL), hiap.Topology.from_counts(make(**MODEL), heads=[3, 4])))
    chosen = found.settle(found.losses(drawn(model, 0)), one_less)
    assert found.outside + total(chosen, found.cost) == one_less


class Steps(hiap.MacCost):
    """Neurons are paid for by the 64."""

    def block(self, site: Site, widths: Widths) -> float:
        neurons = -(-(widths.neurons or 0) // 64) * 64
        return super().block(site, Widths(widths.heads, widths.qk_dim, widths.value_dim, neurons))


def test_steps_are_climbed_whole() -> None:
    model = hiap.attach(make(**MODEL), ("neuron",))
    found = Allocation(sites(model), [{"neuron"}] * 2, Steps(model), multiple=8)
    for seed in range(5):
        losses = found.losses(drawn(model, seed))
        widths = found.widths(found.settle(losses, 0.8 * hiap.macs(make(**MODEL))))
        assert {one.neurons for one in widths} <= {64, 128}


def test_what_is_charged_may_differ_from_what_is_counted() -> None:
    class Free(hiap.MacCost):
        def price(self, site: Site, widths: Widths) -> float:
            return self.block(site, widths) if not widths.neurons else 0.0

    model = hiap.attach(make(**MODEL), ("head", "neuron"))
    found = Allocation(sites(model), [{"head", "neuron"}] * 2, Free(model))
    chosen, _ = found.spend(found.losses(drawn(model, 0)), 0.85 * hiap.macs(make(**MODEL)))
    assert all(one.neurons == 128 for one in found.widths(chosen))  # neurons cost nothing: heads give way


def test_the_budget_holds_where_prices_say_nothing() -> None:
    class Free(hiap.MacCost):
        def price(self, site: Site, widths: Widths) -> float:
            return 0.0

    model = hiap.attach(make(**MODEL), ALL)
    found = Allocation(sites(model), [set(ALL)] * 2, Free(model))
    chosen = found.settle(found.losses(drawn(model, 0)), 0.3 * hiap.macs(make(**MODEL)))
    assert found.outside + total(chosen, found.cost) <= 0.3 * hiap.macs(make(**MODEL))


def test_what_costs_nothing_is_taken() -> None:
    class Charged(Steps):
        def price(self, site: Site, widths: Widths) -> float:
            return hiap.MacCost.block(self, site, widths)

    model = hiap.attach(make(**MODEL), ("neuron",))
    found = Allocation(sites(model), [{"neuron"}] * 2, Charged(model), multiple=8)
    values = drawn(model, 0)
    values[0]["neuron"] *= 1e-9
    widths = found.widths(found.settle(found.losses(values), 0.8 * hiap.macs(make(**MODEL))))
    assert widths[0].neurons == 64  # as dear as 8


@pytest.mark.slow
def test_the_dense_network_fits_its_own_cost() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        head, neuron, outside = torch.rand(3, generator=generator, dtype=torch.float64).tolist()

        class Odd(hiap.MacCost):
            def block(self, site: Site, widths: Widths, head: float = head, neuron: float = neuron) -> float:
                return head * (widths.heads or 0) * (widths.qk_dim + widths.value_dim) + neuron * (widths.neurons or 0)

        model = hiap.attach(make(**{**MODEL, "depth": 12}), ALL)
        cost = Odd(model)
        cost.outside = outside
        found = Allocation(sites(model), [set(ALL)] * 12, cost)
        dense = [site.widths for site in sites(model)]
        chosen, rate = found.spend(found.losses(drawn(model, seed)), cost.of_widths(model, dense))
        assert rate == 0.0 and found.widths(chosen) == dense


def test_constant_branches_are_counted() -> None:
    small = make(**{**MODEL, "depth": 4})
    topology = hiap.Topology.from_counts(small, heads=[0, 0, 0, 4], neurons=[0, 0, 128, 128])
    model = hiap.attach(hiap.extract(small, topology), PAPER)
    cost, found_sites = hiap.ParamCost(model), sites(model)
    found = Allocation(found_sites, [set(kinds) for kinds in gates_by_block(model)], cost)
    chosen = torch.zeros(len(found.branches), dtype=torch.long)
    dense = [site.widths for site in found_sites]
    assert found.widths(chosen) == dense
    assert found.outside + total(chosen, found.cost) == cost.of_widths(model, dense)
