"""Learning from a teacher: logits and features."""

import json
from pathlib import Path

import pytest
import timm
import torch

import hiap
from conftest import images, make
from hiap.training.config import ConfigError
from hiap.training.loop import Run, prune
from hiap.training.objective import Teacher, distillation, feature_distance, task_loss, watch_blocks, watched_blocks
from hiap.training.plan import plan
from runs import noise_data, tiny


def test_distillation_and_mixed_targets() -> None:
    logits, teacher = torch.randn(4, 10, dtype=torch.float64), torch.randn(4, 10, dtype=torch.float64)
    p, q = torch.softmax(teacher / 2, 1), torch.softmax(logits / 2, 1)
    expected = 4 * (p * (p.log() - q.log())).sum(1).mean()
    assert float(distillation(logits, teacher, 2.0)) == pytest.approx(float(expected), rel=1e-5)
    mixed = torch.softmax(torch.randn(4, 10), 1).double()
    assert float(task_loss(logits, mixed)) == pytest.approx(float(-(mixed * logits.log_softmax(1)).sum(1).mean()))


def naive_distance(student: torch.nn.Module, teacher: torch.nn.Module, x: torch.Tensor, blocks: list[int]) -> float:
    """By what timm itself hands out of these blocks."""
    shares = []
    for own, goal in zip(
        *(
            model.forward_intermediates(
                x, indices=blocks, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True
            )
            for model in (student, teacher)
        ),
        strict=True,
    ):
        (own, own_prefix), (goal, goal_prefix) = own, goal
        own, goal = torch.cat([own_prefix, own], 1), torch.cat([goal_prefix, goal], 1)
        shares.append((own - goal).square().mean() / (goal - goal.mean((0, 1))).square().mean())
    return torch.stack(shares).mean().item()


def test_features_are_compared_with_those_of_the_dense_model(tmp_path: Path) -> None:
    run = Run(tiny(distill_features=3.0), tmp_path / "run", data=noise_data(512, 8))
    run.resume_or_begin()
    x, y = next(run.parts.data.train(0, 0, 64, 0, 1))
    run.phase.network.eval()
    assert run.phase.terms(run.phase.model, x, y)["features"].item() < 1e-9  # all gates are open
    for gate in hiap.gates(run.phase.network):
        gate.logit.data.uniform_(-1, 3)
    terms = run.phase.terms(run.phase.model, x, y)
    blocks = list(range(len(run.phase.network.blocks)))
    assert terms["features"].item() == pytest.approx(
        naive_distance(run.phase.network, run.phase.teacher.model, x, blocks), rel=1e-4
    )
    expected = 0.5 * terms["task"] + 0.5 * terms["distill"] + 3 * terms["features"]
    assert float(run.phase.weighted(terms)) == pytest.approx(float(expected), rel=1e-6)
    terms["features"].backward()
    assert run.phase.network.blocks[0].mlp.fc1.weight.grad.abs().max() > 0
    assert all(
        not block._forward_hooks for model in (run.phase.network, run.phase.teacher.model) for block in model.blocks
    )


@pytest.mark.slow
def test_features_alone_can_teach(tmp_path: Path) -> None:
    found = {}
    for weight in (0.0, 10.0):
        config = tiny(distill_features=weight, distill_weight=0.0, lr=1e-2)
        prune(config, tmp_path / str(weight), data=noise_data(512, 8))
        lines = [json.loads(line) for line in (tmp_path / str(weight) / "metrics.jsonl").read_text().splitlines()]
        found[weight] = [line.get("features") for line in lines if line["stage"] == "recover"]
    assert all(value is None for value in found[0.0])
    assert 0 < found[10.0][-1] < found[10.0][0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "size", "taught"),
    [({}, 8, True), ({"dynamic_img_size": True}, 12, True), ({"patch_drop_rate": 0.5}, 8, False)],
)
def test_features_are_learned_where_tokens_are_the_same(given, size: int, taught: bool, tmp_path: Path) -> None:
    """By default; images of another size than the model's own are seen by the dense model as they are."""
    config = tiny(distill_features=None, epochs=2, model_args=tiny().model_args | given)
    prune(config, tmp_path / "run", data=noise_data(512, size))
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert [("features" in line, "distill" in line) for line in lines] == [(taught, True)] * 2


def test_blocks_that_are_watched() -> None:
    assert [watched_blocks(depth) for depth in (12, 5, 2, 1)] == [(2, 5, 8, 11), (1, 2, 3, 4), (0, 1), (0,)]
    model = make()
    with pytest.raises(RuntimeError, match="stop"), watch_blocks([model.blocks[0]]) as found:
        model(images(model))
        raise RuntimeError("stop")
    assert len(found) == 1 and not model.blocks[0]._forward_hooks
    one = torch.ones(1, 1, 4)
    assert float(feature_distance([2 * one], [one])) == 1.0  # nothing is spread: as a share of its size


def test_an_optimised_teacher_has_the_features_of_the_plain_one() -> None:
    model, norm = make(depth=2), ((0.5,) * 3, (0.5,) * 3)
    found = []
    for dtype in (None, torch.float64):
        teacher = Teacher(model, norm, norm, (32, 32), torch.device("cpu"), dtype, watched=True)
        with watch_blocks(teacher.blocks[:2]) as features:
            teacher(images(model))
        found.append(features)
    assert teacher.blocks[0] is not model.blocks[0]
    assert found[0][0].dtype == torch.float64 and float(feature_distance(*found)) < 1e-12


def test_the_teacher_sees_its_own_normalisation_and_size() -> None:
    seen = []

    class Spy(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(x)
            return x

    pixels = torch.rand(2, 3, 8, 8)
    student, own = ((0.5,) * 3, (0.5,) * 3), ((0.4, 0.5, 0.6), (0.2, 0.3, 0.4))
    Teacher(Spy(), student, own, (8, 8), torch.device("cpu"))((pixels - 0.5) / 0.5)
    expected = (pixels - torch.tensor(own[0]).view(3, 1, 1)) / torch.tensor(own[1]).view(3, 1, 1)
    torch.testing.assert_close(seen[0], expected)
    Teacher(Spy(), student, own, (12, 12), torch.device("cpu"))(pixels)
    assert seen[1].shape == (2, 3, 12, 12)


def test_a_teacher_in_another_precision() -> None:
    model, norm = make("dinov2"), ((0.5,) * 3, (0.5,) * 3)
    x = images(model)
    expected = model(x)

    def logits(dtype: torch.dtype | None, teacher: torch.nn.Module = model) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return Teacher(teacher, norm, norm, (32, 32), torch.device("cpu"), dtype)(x.to(next(teacher.parameters())))

    assert (logits(torch.float64) - expected).abs().max() <= 1e-12 * expected.abs().max()
    found = logits(torch.bfloat16)
    assert found.dtype == torch.bfloat16 and 0 < (found - expected).abs().max() < 0.1 * expected.abs().max()
    other = timm.create_model("resnet10t", num_classes=7).eval()
    assert torch.equal(logits(torch.bfloat16, other), logits(None, other))


def test_a_teacher_that_does_not_fit_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = timm.create_model
    monkeypatch.setattr("timm.create_model", lambda name, pretrained=False, **rest: create(name, **rest))
    torch.save(create("resnet10t", num_classes=3).state_dict(), tmp_path / "three.pth")
    for teacher, weights, words in (
        ("resnet1000", None, r"teacher resnet1000 cannot be loaded \(Unknown model"),
        ("resnet10t", None, "resnet10t has 1000 classes and 3 channels, the data 10 and 1"),
        ("resnet10t", "three.pth", "three.pth does not fit the teacher resnet10t with the 10 classes of the data"),
    ):
        config = tiny(teacher=teacher, teacher_weights=weights and str(tmp_path / weights))
        with pytest.raises(ConfigError, match=words):
            prune(config, tmp_path / "run", data=noise_data(512, 8))
        with pytest.raises(ConfigError, match=words):
            plan(config)
    assert not (tmp_path / "run").exists()
