import argparse
import copy
import gc
import json
import weakref
from pathlib import Path

import pytest
import timm
import torch

import hiap
from conftest import images, make
from hiap.budget.controller import BudgetError
from hiap.models.registry import sites
from hiap.models.weights import read_weights
from hiap.pruning.attach import gates_by_block
from hiap.pruning.extract import slices
from hiap.training.config import ConfigError
from hiap.training.loop import Run, prune
from hiap.training.optimizer_state import carry_optimizer
from hiap.training.plan import plan
from runs import TINY, noise_data, tiny

BUDGET_MODEL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "in_chans": 1}


@pytest.mark.parametrize(
    ("steps", "ratio"), [(steps, ratio) for steps in (20, 60) for ratio in ([5.0, 1.0], [2.0, 1.0], [1.0, 2.0])]
)
@pytest.mark.parametrize("share", [25, 50, 75, 95])
@pytest.mark.slow
def test_the_budget_is_met(steps: int, share: int, ratio: list[float], tmp_path: Path) -> None:
    config = tiny(
        model_args=BUDGET_MODEL,
        epochs=steps // 20,
        batch_size=4,
        target=f"{share}%",
        ratio=ratio,
        freeze_at=0.8,
        checkpoint_every=steps,
        teacher="none",
    )
    result = prune(config, tmp_path / "run", data=noise_data(100))
    saved = hiap.load(tmp_path / "run/compact")
    target = share / 100 * result.record["dense_macs"]
    group = 8 * 2 * 17 * 32  # 8 neurons weigh more than 1 % of the smaller targets
    assert target - max(0.01 * target, group) < hiap.macs(saved) <= target


def test_targets_out_of_reach_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for overrides in (
        {"target": "1%"},
        {"target": "50%", "ratio": [1.0, 0.0]},
        {"target": "50%", "keep_blocks": [0, 1]},
    ):
        with pytest.raises((BudgetError, ValueError), match=r"out of reach|nothing to gate"):
            prune(tiny(**overrides), tmp_path / "run", data=noise_data(512, 8))
    assert not (tmp_path / "run").exists()


def test_paper_mode_terms_are_the_formulas(tmp_path: Path) -> None:
    config = tiny(target=None, lambda_macro=0.9, lambda_micro=0.45, freeze_at=None, min_heads=2, min_value_dims=0.999)
    run = Run(config, tmp_path / "run", data=noise_data(512, 8))
    run.resume_or_begin()
    for gate in hiap.gates(run.phase.network):
        gate.logit.data.uniform_(-1, 3)
    before = {
        (i, k): torch.sigmoid(g.logit.detach()).view(g.shape)
        for i, b in enumerate(gates_by_block(run.phase.network))
        for k, g in b.items()
    }
    x, y = next(run.parts.data.train(0, 0, 256, 0, 1))
    terms = run.train_step(x, y)
    N, D, H, Dh, F = 5, 16, 2, 8, 64
    macro = sum(before[i, "head"].sum() * Dh * (2 * N * D + N * N) for i in range(2))
    micro = sum(
        (before[i, "head"] * before[i, "value_dim"]).sum() * (2 * N * D + N * N)
        + (before[i, "ffn"] * before[i, "neuron"]).sum() * 2 * N * D
        for i in range(2)
    )
    dense = 2 * (2 * H * Dh * (2 * N * D + N * N) + F * 2 * N * D)
    relu = torch.nn.functional.relu
    expected = {
        "macro": macro / dense,
        "micro": micro / dense,
        "feasible_head": sum(relu(2 - before[i, "head"].sum()) ** 2 for i in range(2)),
        "feasible_dim": sum(
            (before[i, "head"] * relu(0.999 - before[i, "value_dim"].mean(1, keepdim=True)) ** 2).sum()
            for i in range(2)
        ),
        "feasible_ffn": sum(
            before[i, "ffn"] * relu(0.02 - before[i, "neuron"].mean()) ** 2 for i in range(2)
        ).squeeze(),
    }
    for name, value in expected.items():
        assert float(terms[name]) == pytest.approx(float(value), rel=1e-5, abs=1e-9), name
    weighted = run.phase.weighted(terms)
    rest = (
        0.5 * terms["task"]
        + 0.5 * terms["distill"]
        + terms["feasible_head"]
        + terms["feasible_dim"]
        + terms["feasible_ffn"]
    )
    assert float(weighted) == pytest.approx(float(rest + 0.9 * terms["macro"] + 0.45 * terms["micro"]), rel=1e-6)


def test_shrinking_in_flight_changes_nothing() -> None:
    """In float64, without dropout: the same loss, and the next optimiser step moves what is left alike."""

    model = hiap.attach(make("layer_scale"), hiap.GRANULARITIES).train()
    optimizer = torch.optim.AdamW(hiap.parameter_groups(model)[:-1], lr=1e-3)
    x = images(model)
    for _ in range(3):
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    counts = {"heads": [2, 0, 3], "neurons": [8, 16, None], "value_dims": [8, 8, 3], "qk_dims": [4, 8, 8]}
    topology = hiap.Topology.from_counts(model, **counts)
    hiap.set_topology(model, topology)
    small = hiap.extract(model, topology, round_to=1)
    after = torch.optim.AdamW(hiap.parameter_groups(small)[:-1], lr=1e-3)
    widths = topology.widths()
    carry_optimizer(optimizer, model, after, small, slices(sites(model), topology, widths))
    hiap.set_gates(model, temperature=1e-3, noise_scale=0.0)
    for _ in range(2):
        big_loss, small_loss = model(x).square().sum(), small(x).square().sum()
        assert small_loss.item() == pytest.approx(big_loss.item(), rel=1e-10)
        for loss, one in ((big_loss, optimizer), (small_loss, after)):
            loss.backward()
            one.step()
            one.zero_grad()
    assert small(x).square().sum().item() == pytest.approx(model(x).square().sum().item(), rel=1e-9)


def test_a_training_loop_of_ones_own() -> None:

    model, steps = make(embed_dim=32, num_heads=4).train(), 40
    weights = list(model.parameters())
    hiap.attach(model)
    schedule = hiap.Schedule(total=steps, freeze=steps * 15 // 100)
    budget = hiap.Controller(model, hiap.MacCost(model), target=0.5 * hiap.macs(model))
    optimizer = torch.optim.AdamW(weights, lr=1e-4)
    for step in range(schedule.freeze):
        model(images(model)).square().sum().backward()
        optimizer.step()
        model.zero_grad()
        budget.observe()
        budget.project(schedule.budget(step + 1, budget.dense_cost, budget.target), schedule.sharpness(step + 1))
    compact = hiap.extract(model, budget.decide())
    assert 0.95 * budget.target < hiap.macs(compact) <= budget.target


@pytest.mark.parametrize("accumulate", [3, 4])
def test_gradients_of_parts_add_up_to_those_of_the_batch(accumulate: int, tmp_path: Path) -> None:
    gradients, data = [], noise_data(64, 8)
    for parts in (1, accumulate):
        given = {"teacher": "none", "precision": "fp32", "batch_size": 10, "accumulate": parts, "noise_start": 0.0}
        run = Run(tiny(**given), tmp_path / str(parts), data=data)
        run.begin()
        found = {}
        run.phase.prepared_optimizer.step = lambda run=run, found=found: found.update(
            {name: p.grad.clone() for name, p in run.phase.network.named_parameters() if p.grad is not None}
        )
        terms = run.train_step(*next(data.train(0, 0, 10, 0, 1)))
        gradients.append({**found, "task": terms["task"]})
    assert len(gradients[0]) > 10
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-4, atol=1e-6)


def test_what_would_fail_late_is_refused_first(tmp_path: Path) -> None:
    def refused(error: type[Exception], message: str, **given: object) -> None:
        with pytest.raises(error, match=message):
            Run(tiny(**given), tmp_path / "run", data=noise_data(512, 8))
        assert not (tmp_path / "run/config.yaml").exists()

    refused(ConfigError, "accumulate 9 is more than the 8 images of a process", batch_size=8, accumulate=9)
    refused(ConfigError, "pair images, and a process has 9", batch_size=9, mixup=0.2)
    with pytest.raises(ConfigError, match="accumulate 9 is more"):
        plan(tiny(batch_size=8, accumulate=9))
    (tmp_path / "run/compact").mkdir(parents=True)
    (tmp_path / "run/compact/notes.txt").write_text("mine")
    refused(hiap.CheckpointError, r"holds 'notes\.txt', which saving would remove")


@pytest.mark.slow
def test_without_shrink_the_optimiser_is_prepared_once(tmp_path: Path) -> None:
    run = Run(tiny(shrink=False), tmp_path / "run", data=noise_data(1024, 8))
    run.go()
    assert len(run.context.accelerator._optimizers) == 1  # float16 would be unscaled once for each


def test_pretrained_weights_of_another_class_count_do_not_teach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = timm.create_model
    monkeypatch.setattr("timm.create_model", lambda *names, pretrained, **options: create(*names, **options))
    own = {"pretrained": True, "model_args": {**TINY["model_args"], "num_classes": 10}}
    with pytest.raises(ConfigError, match=r"1000 classes, the data has 10.*nothing to teach"):
        Run(tiny(**own), tmp_path / "run", data=noise_data(512, 8))
    assert Run(tiny(**own, teacher="none"), tmp_path / "run", data=noise_data(512, 8)).parts.model.num_classes == 10


@pytest.mark.skipif(not hasattr(torch.serialization, "safe_globals"), reason="torch 2.5")
def test_weights_of_timms_training_script_are_read(tmp_path: Path) -> None:
    state = {"head.weight": torch.ones(2, 3)}
    torch.save({"state_dict": state, "args": argparse.Namespace(lr=0.1, model="vit")}, tmp_path / "last.pth.tar")
    assert read_weights(str(tmp_path / "last.pth.tar"))["head.weight"].sum() == 6
    torch.save({"state_dict": state, "path": tmp_path}, tmp_path / "other.pth")
    with pytest.raises(ConfigError, match=r"does not hold weights.*Weights only load failed"):
        read_weights(str(tmp_path / "other.pth"))


def test_weights_of_another_class_count_get_a_new_classifier(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = Run(tiny(), tmp_path / "a", data=noise_data(512, 8)).parts.model
    model.reset_classifier(3)
    save_file(model.state_dict(), tmp_path / "three.safetensors")
    torch.save({"model": model.state_dict()}, tmp_path / "three.pth")
    for name in ("three.safetensors", "three.pth"):
        own, out = {"weights": str(tmp_path / name), "pretrained": True}, tmp_path / name.replace(".", "-")
        with pytest.raises(ConfigError, match=r"3 classes, the data has 10.*--dense-epochs N .*or --teacher none"):
            Run(tiny(**own), out, data=noise_data(512, 8))
        assert not out.exists()
        run = Run(tiny(**own, teacher="none"), out, data=noise_data(512, 8))
        assert run.parts.model.num_classes == 10
        assert torch.equal(run.parts.model.blocks[0].mlp.fc1.weight, model.blocks[0].mlp.fc1.weight)


def test_the_result_comes_with_the_dense_model_it_began_with(tmp_path: Path) -> None:
    run = Run(tiny(teacher="none"), tmp_path / "run", data=noise_data(512, 8))
    before = copy.deepcopy(run.parts.model.state_dict())
    dense = run.go().dense
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


def alive(shape: tuple[int, ...]) -> list[torch.nn.Parameter]:
    gc.collect()
    return [one for one in gc.get_objects() if type(one) is torch.nn.Parameter and one.shape == shape]


@pytest.mark.parametrize("teacher", ["none", "self"])
def test_after_the_shrink_the_dense_network_stays_only_to_teach(teacher: str, tmp_path: Path) -> None:
    whole = (3 * 16, 16)  # of qkv
    before = alive(whole)
    run = Run(tiny(teacher=teacher, ema=0.9), tmp_path / "run", data=noise_data(512, 8))
    kept = [*before, *run.parts.model.parameters(), *run.parts.controller.model.parameters()]  # on the CPU
    run.begin()
    searched = weakref.ref(run.phase.network)
    run.phase.step = run.phase.end
    run.phase = run.phase.next()
    left = {id(one) for one in alive(whole)} - {id(one) for one in kept}
    assert searched() is None
    assert len(left) == (2 if teacher == "self" else 0)  # a copy of the two blocks


@pytest.mark.slow
def test_no_shrink_ends_with_the_same_budget(tmp_path: Path) -> None:
    result = prune(tiny(shrink=False), tmp_path / "run", data=noise_data(1024, 8))
    assert result.record["macs"] <= 0.6 * result.record["dense_macs"]
    assert hiap.macs(hiap.load(tmp_path / "run/compact")) == result.record["macs"]


@pytest.mark.slow
def test_tensorboard_gets_the_loss_terms(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    prune(tiny(trackers=["tensorboard"], epochs=2), tmp_path / "run", data=noise_data(1024, 8))
    written = EventAccumulator(str(tmp_path / "run/hiap")).Reload()
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    for name in ("task", "distill", "hard_macs", "lr"):
        found = [(event.step, event.value) for event in written.Scalars(name)]
        assert found == [(line["step"], pytest.approx(line[name])) for line in lines]


def test_stop_after_ends_early(tmp_path: Path) -> None:
    config = tiny(target=None, lambda_macro=0.1, lambda_micro=0.1, freeze_at=None, epochs=6, stop_after=2)
    prune(config, tmp_path / "run", data=noise_data(1024, 8))
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch"] == 2 and last["step"] == 8
