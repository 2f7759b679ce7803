"""Pruning without labels: the loss, what units are ranked by, and runs of every family."""

import copy
import json
import re
import runpy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hiap
import own_vit
from conftest import pictures, randomise
from hiap.cli.main import main
from hiap.errors import ConfigError
from hiap.models.family import logits_of
from hiap.models.registry import family_of
from hiap.models.weights import trained_model
from hiap.pruning.attach import gates
from hiap.training.config import read_config
from hiap.training.features import FeatureObjective, feature_scores
from hiap.training.objective import Teacher
from runs import noise_data, pruned_twice
from tiny_family import TinyViT

SHAPE = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 4, "num_heads": 2, "in_chans": 1}
HALF = ((0.5,), (0.5,))
CPU = torch.device("cpu")
FREE = {"objective": "features", "target": "60%", "data": "none"}


def vit(**changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **{**SHAPE, "num_classes": 10, **changes})
    randomise(model)
    return model.double().eval()


def objective(dense: nn.Module, **options: Any) -> FeatureObjective:
    config = read_config(None, {**FREE, **options})
    teacher = Teacher(copy.deepcopy(dense), HALF, HALF, None, CPU)
    return FeatureObjective(config, teacher, nullcontext, lambda model: model)


def images(count: int = 6) -> Tensor:
    return torch.randn(count, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


# -- the loss ---------------------------------------------------------------------------------------------------------


def reference(model: Any, x: Tensor) -> tuple[list[Tensor], Tensor]:
    """Tokens after each block, after a norm without weights, and what the classifier reads; by timm's own members."""
    x, tokens = model._pos_embed(model.patch_embed(x)), []
    for block in model.blocks:
        x = block(x)
        tokens.append(((x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()).float())
    return tokens, model.forward_head(model.norm(x), pre_logits=True)


def share(own: Tensor, goal: Tensor) -> Tensor:
    own, goal = (one.reshape(-1, one.shape[-1]) for one in (own, goal))
    return (own - goal).square().sum() / (goal - goal.mean(0)).square().sum()


@torch.no_grad()
@pytest.mark.parametrize("classes", [10, 0])
def test_the_loss_is_the_distance_from_the_tokens_and_the_pooled_output_of_the_dense_model(classes: int) -> None:
    dense, other, x = vit(num_classes=classes), vit(num_classes=classes), images()
    randomise(other, seed=2)
    terms = objective(dense).terms(other, x, torch.zeros(6))
    (tokens, pooled), (goals, goal) = reference(other, x), reference(dense, x)
    expected = torch.stack([share(one, its) for one, its in zip(tokens, goals, strict=True)]).mean()
    assert list(terms) == ["tokens", "pooled"]
    assert float(terms["tokens"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(terms["pooled"]) == pytest.approx(float(share(pooled, goal)), rel=1e-5)
    same = objective(dense).terms(dense, x, torch.zeros(6))
    assert float(same["tokens"]) == float(same["pooled"]) == 0.0


def test_weights_say_how_much_tokens_and_pooled_output_count() -> None:
    goal = objective(vit(), tokens_weight=0.5, pooled_weight=3.0)
    terms = {"tokens": torch.tensor(2.0), "pooled": torch.tensor(7.0)}
    assert float(goal.weighted(terms)) == 0.5 * 2 + 3 * 7
    assert float(objective(vit(), pooled_weight=0.0).weighted(terms)) == 2.0


def test_the_squared_gradient_of_the_probe_estimates_how_much_the_loss_grows_without_a_unit() -> None:
    """The gradient of the loss is 0 at the dense model; its second derivative in a gate is what the probe estimates."""
    dense, x, step = vit(depth=2), images(), 1e-2
    goal = objective(dense, tokens_weight=0.7, pooled_weight=1.3)
    gated = hiap.attach(copy.deepcopy(dense), ("head", "neuron"), logit=40.0).train()  # as open as float64 has it
    hiap.set_gates(gated, temperature=1.0, noise_scale=0.0)
    logits = [gate.logit for gate in gates(gated)]
    for gate in gates(gated):
        gate.gradient = torch.zeros_like(gate.logit)
    loss = goal.weighted(goal.terms(gated, x, x))
    torch.autograd.grad(loss, logits)
    assert max(float(gate.gradient.abs().max()) for gate in gates(gated)) < 1e-5
    found, rounds = [torch.zeros_like(logit) for logit in logits], 300
    torch.manual_seed(0)
    for _ in range(rounds):
        for gate in gates(gated):
            gate.gradient.zero_()
        torch.autograd.grad(goal.terms_and_probe(gated, x)[1], logits)
        for total, gate in zip(found, gates(gated), strict=True):
            total += gate.gradient.square() / rounds
    head = next(gate for gate in gates(gated) if gate.logit.numel() == 2)
    estimated = found[[id(gate) for gate in gates(gated)].index(id(head))]
    for unit in range(2):
        with torch.no_grad():
            head.logit[unit] = torch.logit(torch.tensor(1 - step))
            grown = goal.weighted(goal.terms(gated, x, x))
            head.logit[unit] = 40.0
        assert float(estimated[unit]) == pytest.approx(float(grown) / step**2, rel=0.15)


@torch.no_grad()
def test_scores_are_the_error_and_the_cosine_of_the_pooled_output() -> None:
    dense, other = vit().float(), vit().float()
    randomise(other, seed=2)
    data = noise_data(16, 8)
    teacher = Teacher(copy.deepcopy(dense), HALF, HALF, None, CPU)
    scores = feature_scores(other, teacher, data, batch=5)
    x = torch.cat([x for x, _ in data.val(16)])
    (_, own), (_, goal) = reference(other, x), reference(dense, x)
    assert scores["error"] == pytest.approx(100 * float(share(own, goal)), rel=1e-4)
    assert scores["cosine"] == pytest.approx(float(F.cosine_similarity(own, goal).mean()), rel=1e-4)
    assert scores["images"] == 16
    parts = [torch.zeros(5 + 16, dtype=torch.float64)]

    def collected(sums: Tensor) -> Tensor:
        parts[0] = parts[0] + sums
        return parts[0]

    for rank in range(5):  # the last has no images
        shared = feature_scores(other, teacher, data, batch=5, reduce=collected, rank=rank, world=5)
    assert shared == pytest.approx(scores)


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def families() -> Iterator[None]:
    """What a test registers is gone after it."""
    known = hiap.register_family.__globals__["_FAMILIES"]
    before = dict(known)
    yield
    known.clear()
    known.update(before)


def of_transformers(cls: str, config: str, **more: Any) -> nn.Module:
    library = pytest.importorskip("transformers", reason="Transformers is not installed")
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    made: nn.Module = getattr(library, cls)(getattr(library, config)(**shape, num_channels=1, **more))
    return made


def of_torchvision() -> nn.Module:
    from torchvision.models.vision_transformer import VisionTransformer

    return VisionTransformer(8, 4, 2, 2, 16, 32, num_classes=10)


def described() -> nn.Module:
    hiap.register_family(own_vit.describe("packed"))
    return own_vit.make("packed").float()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "timm": lambda: vit(depth=2).float(),
    "timm, without a classifier": lambda: vit(depth=2, num_classes=0).float(),
    "timm, all tokens": lambda: vit(depth=2, num_classes=0, global_pool="").float(),
    "torchvision": of_torchvision,
    "one file": TinyViT,
    "described": described,
    "CLIP": lambda: of_transformers(
        "CLIPVisionModelWithProjection", "CLIPVisionConfig", intermediate_size=32, projection_dim=12
    ),
    "SigLIP": lambda: of_transformers("SiglipVisionModel", "SiglipVisionConfig", intermediate_size=32),
    "DINOv3": lambda: of_transformers("DINOv3ViTModel", "DINOv3ViTConfig", intermediate_size=32),
    "DINOv2": lambda: of_transformers("Dinov2Model", "Dinov2Config", mlp_ratio=2),
    "ViT": lambda: of_transformers("ViTForImageClassification", "ViTConfig", intermediate_size=32),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_without_labels_prunes_it_resumes_and_leaves_the_classifier_as_it_was(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MODELS[kind]()
    data = noise_data(96, 8, 3 if kind == "torchvision" else 1)
    channels = 3 if kind == "torchvision" else 1
    given = {"objective": "features", "distill_features": None, "dense_epochs": 0, "batch_size": 32, "stop": 4}
    given |= {"mean": [0.5] * channels, "std": [0.5] * channels, "checkpoint_every": 2, "keep": "best", "eval_every": 1}
    whole, resumed = pruned_twice(model, data, tmp_path, **given)
    assert 0 < hiap.macs(whole.model) <= 0.6 * whole.record["dense_macs"]
    assert all(
        torch.equal(one, other) for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    )
    assert whole.record["error"] == resumed.record["error"] == whole.record["best"]["error"]
    assert whole.record["objective"] == "features" and -1 <= whole.record["cosine"] <= 1
    assert not {"top1", "dense_top1"} & whole.record.keys()
    before, after = (family_of(one).classifier(one) for one in (model, whole.model))
    for layer, same in zip(before, after, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(layer.parameters(), same.parameters(), strict=True))
    loaded = hiap.load(tmp_path / "whole/compact")
    assert type(loaded) is type(model)


@pytest.mark.parametrize("given", [{"precision": "bf16"}, {"accumulate": 2}, {"gate_mode": "gradient"}])
def test_runs_without_labels_take_the_options_of_others(given: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(
        "digits", {**FREE, "epochs": 1, "batch_size": 16, "freeze_at": 0.5, "dense_epochs": 0, **given}
    )
    result = hiap.prune(replace(config, mixup=0.0), tmp_path / "run", data=noise_data(32, 8), model=vit().float())
    assert result.record["macs"] <= 0.6 * result.record["dense_macs"]


def test_loaders_may_give_images_alone(tmp_path: Path) -> None:
    loader = DataLoader(TensorDataset(torch.randn(32, 1, 8, 8)), batch_size=16)
    config = read_config(None, {"objective": "features", "target": "60%", "epochs": 1, "mean": [0.5], "std": [0.5]})
    result = hiap.prune(config, tmp_path / "run", data=(loader, loader), model=vit().float())
    assert result.record["objective"] == "features"


# -- data and options -------------------------------------------------------------------------------------------------


def test_the_command_line_prunes_from_a_flat_folder_and_says_what_was_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures(tmp_path / "photos", 20)
    shape = json.dumps({**SHAPE, "in_chans": 3, "num_classes": 0})
    command = ["prune", "--objective", "features", "--no-pretrained", "--model-args", shape, "--target", "60%"]
    command += ["--data", str(tmp_path / "photos"), "--epochs", "2", "--workers", "0", "--batch-size", "8"]
    with pytest.warns(UserWarning, match="random weights|only 4 steps"):
        assert main([*command, "--out", str(tmp_path / "run")]) == 0
    said = capsys.readouterr().out
    assert "18 training and 2 validation images, no labels" in said
    assert re.search(r"^feature error +0\.00 % +\d+\.\d\d %  cosine -?\d\.\d{4}$", said, re.MULTILINE)
    assert f"  hiap evaluate {tmp_path / 'run'} --data LABELLED --knn\n" in said
    assert main(["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "photos"), "--knn"]) == 1
    assert f"nearest neighbours need labelled images: {tmp_path / 'photos'} must hold" in capsys.readouterr().err
    record = json.loads((tmp_path / "run/report.json").read_text())
    assert record["objective"] == "features" and {"error", "cosine", "soft_error", "hard_error"} <= record.keys()
    assert main(["info", str(tmp_path / "run")]) == 0
    assert "classes     none: a backbone with 16 features" in capsys.readouterr().out


@pytest.mark.slow
def test_a_segmentation_head_is_trained_on_frozen_features_of_both_backbones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example, on photos of two classes of plain colours: a linear layer tells them apart."""
    torch.manual_seed(0)
    photos = tmp_path / "photos"
    for part in ("train", "val"):
        for name, colour in (("red", (200, 30, 30)), ("blue", (20, 60, 180))):
            pictures(photos / part / name, 8, colour)
    shape = {**SHAPE, "img_size": 32, "patch_size": 8, "in_chans": 3, "num_classes": 0}
    torch.save(timm.create_model("vit_tiny_patch16_224", **shape).state_dict(), tmp_path / "dense.pth")
    given = {**FREE, "data": str(photos), "weights": str(tmp_path / "dense.pth"), "model_args": shape, "workers": 0}
    hiap.prune(hiap.read_config(None, {**given, "epochs": 1, "batch_size": 8}), tmp_path / "run")
    capsys.readouterr()
    script = Path(__file__).parents[1] / "examples/segmentation.py"
    monkeypatch.setattr("sys.argv", [str(script), str(tmp_path / "run"), "--data", str(photos), "--steps", "60"])
    runpy.run_path(str(script), run_name="__main__")
    said = re.findall(
        r"^(\w+) +(\d+\.\d) M MACs  mean IoU (\d+\.\d\d) %  patches right (\d+\.\d\d) %$", capsys.readouterr().out, re.M
    )
    assert [row[0] for row in said] == ["dense", "compact"] and float(said[1][1]) < float(said[0][1])
    assert all(float(row[3]) > 75 for row in said)  # half would be chance


@pytest.mark.parametrize(
    "options, words",
    [
        ({"teacher": "resnet18"}, "the features are those of the dense model; found 'resnet18'"),
        ({"dense_epochs": 2}, "dense_epochs must be 0 with objective features: there are no labels"),
        ({"mixup": 0.2}, "mixup must be 0 with objective features"),
        ({"smoothing": 0.1}, "smoothing must be 0 with objective features"),
        ({"distill_features": 1.0}, "distill_features must be left out with objective features: set tokens_weight"),
        ({"tokens_weight": -1.0}, "tokens_weight must be at least 0; found -1.0"),
        ({"tokens_weight": 0.0, "pooled_weight": 0.0}, "pooled_weight must be above 0 where tokens_weight is 0"),
        ({"model_args": {"patch_drop_rate": 0.5}}, "model_args must be without patch_drop_rate"),
        ({"distill_weight": 0.7}, "distill_weight must be left out with objective features: no logits are learned"),
        ({"distill_temperature": 2.0}, "distill_temperature must be left out with objective features"),
        ({"teacher_weights": __file__}, "teacher_weights must be left out with objective features"),
        ({"objective": "labels", "tokens_weight": 2.0}, "tokens_weight must be left out unless the objective is feat"),
        ({"objective": "labels", "pooled_weight": 0.0}, "pooled_weight must be left out unless the objective is feat"),
        ({"objective": "tokens"}, "objective must be labels or features; found 'tokens'"),
    ],
)
def test_options_that_mean_nothing_to_the_objective_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as refused:
        read_config(None, {**FREE, **options})
    assert str(refused.value).count("\n") == 1  # nothing else is wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["CLIP", "SigLIP"])
def test_a_folder_of_images_and_texts_gives_the_image_tower_with_the_embedding_they_share(
    kind: str, tmp_path: Path
) -> None:
    library = pytest.importorskip("transformers", reason="Transformers is not installed")
    tower = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    vision, text = {**tower, "image_size": 8, "patch_size": 4}, {**tower, "vocab_size": 50}
    more = {"projection_dim": 12} if kind == "CLIP" else {}
    torch.manual_seed(0)
    name = "CLIP" if kind == "CLIP" else "Siglip"
    config = getattr(library, f"{name}Config")(vision_config=vision, text_config=text, **more)
    model = getattr(library, f"{name}Model")(config).eval()
    model.save_pretrained(tmp_path)
    found = trained_model(f"hf:{tmp_path}", None, True, {}, features=True).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        expected = model.get_image_features(pixel_values=x)
        expected = getattr(expected, "pooler_output", expected)
        assert torch.allclose(logits_of(found(x)), expected, atol=1e-6)
