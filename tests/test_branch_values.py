"""Whole branches, valued by the loss without them where a target is in time."""

import math
from pathlib import Path

import pytest
import torch

import hiap
from conftest import make
from hiap.budget.branches import _on_curve
from hiap.budget.controller import Controller
from hiap.budget.latency import LatencyCost
from hiap.models.registry import sites
from hiap.nn.compact import Widths
from hiap.pruning.attach import gates_by_block
from hiap.training import branch_losses
from hiap.training.config import read_config
from hiap.training.loop import Run
from hiap.training.objective import Teacher
from runs import go, same
from test_budget import observed
from test_gates import ALL
from test_latency import MODEL, SHAPE, hard, synthetic


def test_whole_branches_are_valued_by_the_loss_without_them() -> None:
    model = hiap.attach(make(**MODEL), ALL)
    cost = LatencyCost(model, synthetic())
    dense = cost.of_widths(model, [site.widths for site in sites(model)])
    controller = observed(Controller(model, cost, dense - hard(cost, None, 0, 0, 128)))  # room for all but one FFN
    whole = [kinds[kind] for kinds in gates_by_block(model) for kind in ("attention", "ffn")]
    assert {id(gate) for gate in controller.measured} == {id(gate) for gate in whole}
    useless, closed = gates_by_block(model)[1]["ffn"], gates_by_block(model)[3]["attention"]
    worth = {id(gate): 0.5 + 0.1 * i for i, gate in enumerate(whole)} | {id(useless): -0.2}
    with torch.no_grad():
        closed.logit.fill_(-3.0)
    before = [gate.logit.clone() for gate in controller.all_gates]

    def values() -> list[float]:
        parts = dict(zip(map(id, controller.all_gates), controller._split(controller.importance), strict=True))
        return [float(parts[id(gate)]) for gate in whole]

    def loss(scale: float = 1.0) -> torch.Tensor:
        return torch.tensor(1.0 + scale * sum(worth[id(gate)] for gate in whole if not gate.hard()))

    assert values() == [0.0] * len(whole)  # gradients do not tell it
    controller.measure(loss)
    expected = [max(0.0, worth[id(gate)]) for gate in whole]
    assert values() == pytest.approx(expected, abs=1e-6)
    assert all(torch.equal(gate.logit, logit) for gate, logit in zip(controller.all_gates, before, strict=True))
    controller.measure(lambda: loss(2.0))
    expected = [1.5 * one for one in expected]  # the mean of both
    assert values() == pytest.approx(expected, abs=1e-6)
    controller.measure(lambda: loss(math.nan))
    assert values() == pytest.approx(expected, abs=1e-6)
    observed(controller, seed=1)
    assert values() == pytest.approx(expected, abs=1e-6)
    kept = controller.decide().widths(8)
    assert kept[1].neurons is None and all(one.neurons and one.heads for i, one in enumerate(kept) if i != 1)


def test_what_goes_of_a_branch_with_a_part_of_its_units_is_measured() -> None:
    model = hiap.attach(make(**{**MODEL, "num_heads": 2}), ALL)  # heads of 16
    cost = LatencyCost(model, synthetic(qk_dim=[2, 16], value_dim=[2, 4, 16]))
    dense = cost.of_widths(model, [site.widths for site in sites(model)])
    controller = observed(Controller(model, cost, 0.7 * dense))
    blocks = gates_by_block(model)
    inside = {"attention": {"head": 1.0, "qk_dim": 0.1, "value_dim": 0.6}, "ffn": {"neuron": 0.8}}

    def loss() -> torch.Tensor:
        """A branch is worth 2; of it goes a part of the closed share of a kind of units, squared."""
        lost = 0.0
        for kinds in blocks:
            for whole, parts in inside.items():
                closed = {kind: 1 - float(kinds[kind].hard().float().mean()) for kind in parts}
                part = sum(scale * closed[kind] ** 2 for kind, scale in parts.items())
                lost += 2.0 * (1.0 if not kinds[whole].hard() else min(1.0, part))
        return torch.tensor(lost)

    controller.measure(loss)
    controller.measure_curves(loss)
    assert all(gate.hard().all() for gate in controller.all_gates)
    assert controller.curves.shape == (4 * len(blocks), 2, 2)  # for each kind of unit: a half is kept, and an eighth
    parts = controller.curves[:4, :, 1]
    heads = len(blocks[0]["head"].logit)
    assert parts[0].tolist() == pytest.approx([0.25, (1 - 1 / heads) ** 2])  # one head at least
    assert parts[3].tolist() == pytest.approx([0.8 * 0.25, 0.8 * (7 / 8) ** 2])
    values = controller.values()
    neurons = values[0]["neuron"].sort().values
    assert controller.curves[3, 0, 0].item() == pytest.approx(float(neurons[: len(neurons) // 2].sum() / neurons.sum()))
    for (i, branch), lost in zip(controller.allocation.branches, controller._losses(values), strict=True):
        whole = float(values[i][branch.gate])
        found = dict(zip(branch.choices, lost.tolist(), strict=False))
        if branch.gate == "ffn":
            assert found[Widths(None, 0, 0, len(neurons) // 2)] == pytest.approx(0.8 * 0.25 * whole)
        else:
            narrower = Widths(heads, branch.qk_dims[0] // 2, branch.value_dims[0], None)
            assert found[narrower] == pytest.approx(0.1 * 0.25 * whole)
        assert lost[0] == 0 and found[branch.choices[-1]] == pytest.approx(whole)
        assert max(found.values()) <= whole * (1 + 1e-12)
    assert controller.cost.of_widths(model, controller.decide().widths(8)) <= controller.target


def test_a_curve_never_falls_and_ends_in_its_corners() -> None:
    curve = torch.tensor([[0.5, 0.1], [0.2, 0.3]], dtype=torch.float64)  # noise: more units were missed less
    shares = torch.tensor([0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0], dtype=torch.float64)
    assert _on_curve(shares, curve).tolist() == pytest.approx([0.0, 0.15, 0.3, 0.3, 0.3, 0.65, 1.0])
    steep = torch.tensor([[0.0, 0.4], [1.0, 2.0]], dtype=torch.float64)  # units without any value are missed
    found = _on_curve(torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64), steep)
    assert found.tolist() == pytest.approx([0.0, 0.7, 1.0])


@pytest.mark.parametrize(
    ("cost", "kinds", "mode"),
    [
        (hiap.MacCost, ALL, "importance"),
        (lambda model: LatencyCost(model, synthetic()), ("head", "ffn", "value_dim", "neuron"), "importance"),
        (lambda model: LatencyCost(model, synthetic()), ALL, "gradient"),
    ],
    ids=["MACs", "attention cannot be left out", "learned gates"],
)
def test_elsewhere_units_are_valued_by_their_gradients_alone(cost, kinds: tuple[str, ...], mode: str) -> None:
    model = hiap.attach(make(**MODEL), kinds)
    made = cost(model)
    dense = made.of_widths(model, [site.widths for site in sites(model)])
    assert not Controller(model, made, 0.9 * dense, mode=mode).measured


def test_a_protected_block_does_not_hinder_the_measurement() -> None:
    model = hiap.attach(make(**MODEL), ALL, keep_blocks=[0])
    cost = LatencyCost(model, synthetic())
    dense = cost.of_widths(model, [site.widths for site in sites(model)])
    assert len(Controller(model, cost, 0.9 * dense).measured) == 2 * 3


@pytest.mark.parametrize("objective", ["labels", "features"])
def test_a_search_by_time_goes_on_where_it_was_interrupted(objective: str, tmp_path: Path) -> None:
    synthetic(dim=16, tokens=5, mode="eager", device="elsewhere").save(tmp_path / "t.json")
    given = {"model_args": SHAPE, "dense_epochs": 0, "epochs": 1, "freeze_at": 0.9, "batch_size": 64, "accumulate": 2}
    given |= {"target": "1.4x", "cost": str(tmp_path / "t.json"), "checkpoint_every": 5, "objective": objective}

    def run(name: str, stop: int | None = None) -> Run:
        return go(Run(read_config("digits", given), tmp_path / name, (tmp_path / name).exists()), stop)

    run("whole")
    measured = run("stopped", stop=13).phase.controller
    assert measured.importance[measured.by_measure].any() and len(measured.curves)
    run("stopped")
    assert same(tmp_path / "whole", tmp_path / "stopped")


@pytest.mark.parametrize(("most", "valued", "asked_for"), [(1024, [8] * 8, [32, 32]), (48, [8] * 6, [24, 24])])
def test_the_teacher_is_asked_once_for_all_branches(
    most: int, valued: list[int], asked_for: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients come from eighths of a batch, losses from the parts of a step; of a large batch a part is enough."""
    synthetic(dim=16, tokens=5, mode="eager", device="elsewhere").save(tmp_path / "t.json")
    given = {"model_args": SHAPE, "dense_epochs": 0, "epochs": 1, "freeze_at": 0.9, "batch_size": 64, "accumulate": 2}
    given |= {"target": "1.4x", "cost": str(tmp_path / "t.json"), "distill_features": 10.0}
    asked: list[int] = []
    usual = Teacher.__call__

    def counted(teacher: Teacher, x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return usual(teacher, x)

    monkeypatch.setattr(Teacher, "__call__", counted)
    monkeypatch.setattr(branch_losses, "IMAGES", most)
    run = Run(read_config("digits", given), tmp_path / "run")
    run.begin()
    assert asked == valued + asked_for
    run.phase.step = 10 * run.phase.every
    x, y = next(iter(run.parts.data.train(0, 0, 64, 0, 1)))
    run.phase.train_step(x, y)
    assert asked == valued + asked_for * 2 + [32] * 2  # to measure, and to train
    assert run.phase.controller.importance[run.phase.controller.by_measure].any()
