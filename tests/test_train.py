import argparse
import copy
import gc
import json
import math
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file

import hiap
from conftest import images, make, write_photos
from driver import SMALL
from hiap.budget.controller import BudgetError
from hiap.data.sources import Augmentation, ByteData
from hiap.models.registry import sites
from hiap.models.weights import read_weights
from hiap.pruning.attach import gates_by_block
from hiap.pruning.extract import slices
from hiap.training.config import Config, ConfigError, read_config, recipes
from hiap.training.loop import Run, prune
from hiap.training.objective import Teacher, distillation, feature_distance, task_loss, watch_blocks, watched_blocks
from hiap.training.optimizer_state import carry_optimizer
from hiap.training.plan import plan
from hiap.training.run_folder import RunError, RunFolder, load_checkpoint

TINY = {**SMALL, "dense_epochs": 0, "ema": 0.0, "mixup": 0.0, "distill_features": 0.0, "eval_every": 1000}


def noise_data(images: int = 64, size: int = 16) -> ByteData:
    """Random pictures of 10 classes: enough for what does not depend on accuracy."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (images, 1, size, size), generator=generator, dtype=torch.uint8)
    labels = torch.arange(images) % 10
    augmentation = Augmentation(crop=1.0, flip=0.0)
    return ByteData(
        (pixels, labels), (pixels[:16], labels[:16]), (size, size), ((0.5,), (0.5,)), augmentation, torch.device("cpu")
    )


def tiny(**overrides: object) -> Config:
    return read_config("digits", {**TINY, **overrides})


BUDGET_MODEL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 4, "in_chans": 1}


@pytest.mark.parametrize(
    ("steps", "ratio"), [(steps, ratio) for steps in (100, 400) for ratio in ([5.0, 1.0], [2.0, 1.0], [1.0, 2.0])]
)
@pytest.mark.parametrize("share", [25, 50, 75, 95])
@pytest.mark.slow
def test_the_budget_is_met(steps: int, share: int, ratio: list[float], tmp_path: Path) -> None:
    config = tiny(
        model_args=BUDGET_MODEL,
        epochs=steps // 25,
        batch_size=4,
        target=f"{share}%",
        ratio=ratio,
        freeze_at=None,
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
    from conftest import images, make

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
    carry_optimizer(optimizer, model, after, small, slices([site.name for site in sites(model)], topology, widths))
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
    from conftest import images, make

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
        ("resnet1000", None, r"teacher resnet1000 cannot be had \(Unknown model"),
        ("resnet10t", None, "resnet10t has 1000 classes and 3 channels, the data 10 and 1"),
        ("resnet10t", "three.pth", "three.pth does not fit the teacher resnet10t with the 10 classes of the data"),
    ):
        config = tiny(teacher=teacher, teacher_weights=weights and str(tmp_path / weights))
        with pytest.raises(ConfigError, match=words):
            prune(config, tmp_path / "run", data=noise_data(512, 8))
        with pytest.raises(ConfigError, match=words):
            plan(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
class TestReliability:
    """Real processes, really killed."""

    @staticmethod
    def run(out: Path, *options: str, check: int | None = 0, launcher: str = "") -> subprocess.CompletedProcess[str]:
        launch = {
            "": "",
            "torchrun": "-m torch.distributed.run --nproc_per_node 2 --master_port 29513",
            "accelerate": "-m accelerate.commands.launch --multi_gpu --num_processes 2 --main_process_port 29514",
        }[launcher].split()
        command = [sys.executable, *launch, str(Path(__file__).parent / "driver.py"), str(out), *options]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env=environment, start_new_session=True
        )
        assert check is None or done.returncode == check, done.stderr[-3000:]
        return done

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp("whole") / "run"
        cls.run(out)
        return out

    @pytest.mark.parametrize(
        "kill",
        [
            "--kill-step=dense:2:SIGKILL",
            "--kill-step=search:5:SIGKILL",
            "--kill-step=search:5:SIGTERM",
            "--kill-step=recover:15:SIGKILL",
            "--kill-save=4",
        ],
    )
    def test_a_killed_run_ends_bit_identical(self, kill: str, whole: Path, tmp_path: Path) -> None:
        out = tmp_path / "run"
        self.run(out, kill, check=143 if "SIGTERM" in kill else -signal.SIGKILL)
        assert not (out / "compact").exists()
        self.run(out, "--resume")
        first, second = (load_file(folder / "compact/model.safetensors") for folder in (whole, out))
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())
        assert (whole / "compact/config.json").read_bytes() == (out / "compact/config.json").read_bytes()
        lines = [
            [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            for folder in (whole, out)
        ]
        for a, b in zip(*lines, strict=True):
            assert all(b[key] == value for key, value in a.items() if key not in ("seconds", "images_per_s"))

    def test_a_killed_run_without_shrink_ends_bit_identical(self, tmp_path: Path) -> None:
        self.run(tmp_path / "whole", "shrink=False")
        self.run(tmp_path / "killed", "shrink=False", "--kill-step=recover:15:SIGKILL", check=-signal.SIGKILL)
        self.run(tmp_path / "killed", "shrink=False", "--resume")
        first, second = (load_file(tmp_path / name / "compact/model.safetensors") for name in ("whole", "killed"))
        assert first.keys() == second.keys() and all(torch.equal(t, second[name]) for name, t in first.items())

    def test_a_killed_run_on_a_stream_ends_bit_identical(self, tmp_path: Path) -> None:
        from conftest import write_shards

        data = write_shards(tmp_path / "shards", {"train": [40, 30, 30, 28], "validation": [10, 6]}, classes=10)
        model = {**SMALL["model_args"], "num_classes": 10}
        options = [f"data={data!r}", f"model_args={model}", "workers=2", "batch_size=16", "epochs=2", "dense_epochs=0"]
        options.append("data_device='loader'")
        self.run(tmp_path / "whole", *options)
        self.run(tmp_path / "killed", *options, "--kill-step=search:5:SIGKILL", check=-signal.SIGKILL)
        self.run(tmp_path / "killed", *options, "--resume")
        first, second = (load_file(tmp_path / name / "compact/model.safetensors") for name in ("whole", "killed"))
        assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())

    def test_sigterm_to_the_whole_group_saves_too(self, tmp_path: Path) -> None:
        data = {"data": write_photos(tmp_path / "photos"), "data_device": "loader", "workers": 2}
        options = [f"{key}={value!r}" for key, value in {**data, "batch_size": 2, "dense_epochs": 0}.items()]
        self.run(tmp_path / "run", *options, "--kill-step=search:2:SIGTERM+", check=143)
        assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-000000003"]

    def test_two_processes_follow_one(self, tmp_path: Path) -> None:
        options = ["mixup=0.0", "crop=1.0", "ema=0.0"]
        self.run(tmp_path / "one", *options)
        self.run(tmp_path / "two", *options, launcher="torchrun")
        one, two = (
            [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            for name in ("one", "two")
        )
        assert len(one) == len(two)
        for a, b in zip(one, two, strict=True):
            assert a["task"] == pytest.approx(b["task"], rel=2e-3)
        topologies = [hiap.load(tmp_path / name / "compact").hiap.topology for name in ("one", "two")]
        assert topologies[0] == topologies[1]

    def test_a_signal_to_one_process_stops_both_and_the_run_goes_on(self, tmp_path: Path) -> None:
        out = tmp_path / "run"
        self.run(out, "dense_epochs=0", "--kill-step=search:4:SIGTERM:1", check=1, launcher="accelerate")
        assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-000000010"]
        self.run(out, "dense_epochs=0", "--resume", launcher="accelerate")
        assert hiap.macs(hiap.load(out / "compact")) > 0

    def test_folders_in_use_or_of_another_run_are_refused(self, tmp_path: Path) -> None:
        RunFolder(tmp_path / "run", "seed: 2\n", resume=False).close()  # without a checkpoint it holds no run
        first = RunFolder(tmp_path / "run", "seed: 0\n", resume=False)
        first.save(1, {"x": torch.ones(2)}, {"step": 1})
        with pytest.raises(RunError, match="is in use by another run"):
            RunFolder(tmp_path / "run", "seed: 0\n", resume=True)
        first.close()
        with pytest.raises(RunError, match="holds a run: pass --resume"):
            RunFolder(tmp_path / "run", "seed: 0\n", resume=False)
        with pytest.raises(RunError, match=r"another configuration: seed: 1 \(was: seed: 0\)"):
            RunFolder(tmp_path / "run", "seed: 1\n", resume=True)

    def test_a_second_checkpoint_of_a_step_does_not_endanger_the_first(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = RunFolder(tmp_path / "run", "", resume=False)
        folder.save(3, {"x": torch.ones(2)}, {"stage": "dense"})

        def killed(*arguments: object, **options: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("hiap.training.run_folder.shutil.rmtree", killed)
            folder.save(3, {"x": torch.zeros(2)}, {"stage": "search"})
        saved = load_checkpoint(tmp_path / "run")
        assert saved is not None and saved[1] == {"stage": "search"} and not saved[0]["x"].any()
        folder.close()
        (tmp_path / "run/.checkpoint.left").mkdir()
        RunFolder(tmp_path / "run", "", resume=True).save(4, {"x": torch.ones(2)}, {})
        assert sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*")) == ["checkpoint-000000004"]

    def test_an_interrupted_run_lets_its_folder_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Run, "train_step", interrupted)
            run = Run(tiny(), tmp_path / "run", data=noise_data(512, 8))
            with pytest.raises(KeyboardInterrupt):
                run.go()
        prune(tiny(), tmp_path / "run", resume=True, data=noise_data(512, 8))
        assert (tmp_path / "run/compact").is_dir()

    def test_a_full_disk_leaves_the_last_checkpoint(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = RunFolder(tmp_path / "run", "", resume=False)
        saved = folder.save(3, {"x": torch.ones(2)}, {"step": 3})

        def full(*arguments: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("safetensors.torch.save_file", full)
        with pytest.raises(RunError, match=r"No space left on device\); the last good one is .*checkpoint-000000003"):
            folder.save(6, {"x": torch.zeros(2)}, {"step": 6})
        assert load_file(saved / "state.safetensors")["x"].tolist() == [1, 1]

    def test_a_loss_that_is_not_finite_stops_the_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(self: Run, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"task": torch.tensor(math.nan if self.phase.step == 4 else 1.0), "distill": torch.tensor(0.5)}

        monkeypatch.setattr(Run, "train_step", broken)
        with pytest.raises(
            RunError, match=r"not finite at step 5 of the search stage \(task nan, distill 0\.5\); .*checkpoint-"
        ):
            prune(tiny(), tmp_path / "run", data=noise_data(1024, 8))


class TestConfig:
    def test_everything_wrong_is_said_at_once(self) -> None:
        with pytest.raises(ConfigError) as caught:
            read_config("digits", {"epochs": 0, "target": "fast", "precision": "int8", "granularities": ["token"]})
        for text in (
            "epochs must be at least 1; found 0",
            "'fast' is not a budget",
            "precision must be",
            "granularities must be",
        ):
            assert text in str(caught.value)
        late = {"eval_every": 0, "min_heads": -1, "seed": -1, "checkpoint_every": 0, "clip_grad": -1.0}
        late |= {"policy": "nonsense", "opt": "kron", "distill_features": -1.0, "mixup": -1.0}
        with pytest.raises(ConfigError) as caught:
            read_config("digits", late)
        assert all(f"\n  {name} must be" in str(caught.value) for name in late)
        with pytest.raises(ConfigError, match=r"unknown option 'epoch'\n.*lr must be float \| null; found 'high'"):
            read_config("digits", {"epoch": 3, "lr": "high"})
        for teacher in ("none", "resnet18"):
            with pytest.raises(ConfigError, match=r"0 unless the teacher is 'self' .*; found 1"):
                tiny(distill_features=1.0, teacher=teacher)
        with pytest.raises(ConfigError, match=r"no patch_drop_rate\); found 1"):
            tiny(distill_features=1.0, model_args={"patch_drop_rate": 0.5})
        with pytest.raises(ConfigError, match="give either target, or lambda_macro"):
            read_config(None, {"model": "vit_tiny_patch16_224"})
        with pytest.raises(ConfigError, match=r"no recipe and no file 'nothing'; recipes: .*digits"):
            read_config("nothing")

    @pytest.mark.parametrize(
        ("given", "features"),
        [
            ({}, 10.0),
            ({"distill_features": 2.0}, 2.0),
            ({"distill_features": 0.0}, 0.0),
            ({"distill_weight": 0.0}, 0.0),
            ({"teacher": "none"}, 0.0),
            ({"teacher": "resnet18"}, 0.0),
            ({"model_args": {"patch_drop_rate": 0.5}}, 0.0),  # other patches than the teacher sees
            ({"target": None, "lambda_macro": 1.0}, 0.0),  # the paper has none
        ],
    )
    def test_features_are_learned_with_a_target_from_a_dense_model_that_teaches(self, given, features) -> None:
        assert (
            read_config(None, {"model": "vit_tiny_patch16_224", "target": "50%", **given}).features_weight == features
        )

    @pytest.mark.parametrize("name", recipes())
    def test_recipes_are_valid(self, name: str) -> None:
        config = read_config(name)
        assert read_config(None, {**vars(config)}) == config

    def test_unreachable_hub_names_the_way_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def offline(*arguments: object, **options: object) -> None:
            raise OSError("no connection")

        monkeypatch.setattr("timm.create_model", offline)
        with pytest.raises(ConfigError, match=r"no connection.*--weights FILE, or --no-pretrained"):
            plan(read_config(None, {"model": "vit_tiny_patch16_224", "target": "50%"}))

    def test_q_k_dims_join_where_a_target_allows_it(self) -> None:
        assert "qk_dim" in Config(target="50%").gate_kinds(qk_norm=False)
        assert "qk_dim" not in Config(target="50%").gate_kinds(qk_norm=True)
        assert "qk_dim" not in Config(target="50%", ratio=[2.0, 1.0]).gate_kinds(qk_norm=False)
        assert "qk_dim" not in Config(lambda_macro=1.0, lambda_micro=1.0).gate_kinds(qk_norm=False)


@pytest.mark.parametrize(
    "given",
    [
        {"opt": "lamb"},
        *(
            pytest.param(given, marks=pytest.mark.slow)
            for given in ({"opt": "lookahead_adamw"}, {"opt": "adafactor"}, {"shrink": False, "ema": 0.9})
        ),
    ],
)
def test_a_stopped_run_ends_bit_identical(given: dict, tmp_path: Path) -> None:
    wide = {**SMALL["model_args"], "embed_dim": 32}  # so that moments are factored

    def run(name: str, stop: int | None = None) -> dict[str, torch.Tensor]:
        resume = (tmp_path / name).exists()
        run = Run(tiny(**given, epochs=2, model_args=wide), tmp_path / name, resume, data=noise_data(1024, 8))
        train_step = run.train_step

        def step(*batch: torch.Tensor) -> dict[str, torch.Tensor]:
            run.signals.number = signal.SIGTERM if run.phase.step + 1 == stop else None
            return train_step(*batch)

        run.train_step = step
        if stop is not None:
            with pytest.raises(SystemExit):
                run.go()
        else:
            run.go()
        return load_file(tmp_path / name / "compact/model.safetensors") if stop is None else {}

    whole = run("whole")
    for stop in (2, 6):  # before and after the freeze
        run(str(stop), stop)
        again = run(str(stop))
        assert whole.keys() == again.keys()
        assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())


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


def test_a_tracker_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"trackers must be some of tensorboard, wandb; found \['logbook'\]"):
        tiny(trackers=["logbook"])
    monkeypatch.setattr("hiap.training.config.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"the tracker wandb is not installed: pip install 'hiap\[wandb\]'"):
        tiny(trackers=["wandb"])


def test_stop_after_ends_early(tmp_path: Path) -> None:
    config = tiny(target=None, lambda_macro=0.1, lambda_micro=0.1, freeze_at=None, epochs=6, stop_after=2)
    prune(config, tmp_path / "run", data=noise_data(1024, 8))
    last = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[-1])
    assert last["epoch"] == 2 and last["step"] == 8
