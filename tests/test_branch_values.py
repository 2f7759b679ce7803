"""Whole branches, valued by the loss without them where a target is in time."""

import math
from pathlib import Path

import pytest
import torch

import hiap
from conftest import make
from hiap.budget.controller import Controller
from hiap.budget.latency import LatencyCost
from hiap.models.registry import sites
from hiap.pruning.attach import gates_by_block
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
    assert measured.importance[measured.by_measure].any()
    run("stopped")
    assert same(tmp_path / "whole", tmp_path / "stopped")


def test_the_teacher_is_asked_once_for_all_branches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synthetic(dim=16, tokens=5, mode="eager", device="elsewhere").save(tmp_path / "t.json")
    given = {"model_args": SHAPE, "dense_epochs": 0, "epochs": 1, "freeze_at": 0.9, "batch_size": 64, "accumulate": 2}
    given |= {"target": "1.4x", "cost": str(tmp_path / "t.json"), "distill_features": 10.0}
    asked: list[int] = []
    usual = Teacher.__call__

    def counted(teacher: Teacher, x: torch.Tensor) -> torch.Tensor:
        asked.append(len(x))
        return usual(teacher, x)

    monkeypatch.setattr(Teacher, "__call__", counted)
    run = Run(read_config("digits", given), tmp_path / "run")
    run.begin()
    asked.clear()
    x, y = next(iter(run.parts.data.train(0, 0, 64, 0, 1)))
    run.phase.train_step(x, y)  # the first, which measures
    assert asked == [32] * 4  # twice two parts of a batch: to measure, and to train
    assert run.phase.controller.importance[run.phase.controller.by_measure].any()
