"""torchvision's ViTs go all the way, like timm's."""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn
from torchvision.models import vision_transformer as library

import any_family
import hiap
from conftest import randomise
from hiap.models.registry import family_of
from hiap.models.weights import create_model, trained_model
from runs import noise_data, pruned_twice

pytestmark = pytest.mark.slow

SMALL = {"image_size": 16, "patch_size": 8, "num_layers": 3, "num_heads": 3, "hidden_dim": 24, "mlp_dim": 40}
KINDS = {
    "plain": {},
    "pre_logits": {"representation_size": 9, "dropout": 0.1, "attention_dropout": 0.2},
    "conv_stem": {"conv_stem_configs": [library.ConvStemConfig(6, 3, 2), library.ConvStemConfig(6, 4, 4)]},
}


def make(kind: str = "plain", **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model = library.VisionTransformer(**{**SMALL, "num_classes": 7, **KINDS[kind], **changes})
    randomise(model)
    return model.double().eval()


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> nn.Module:
    return make(request.param)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def small_vit_b(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision's vit_b_16 is tiny, and its pretrained weights are out of reach."""

    def vit_b_16(weights: str | None = None, **given: Any) -> nn.Module:
        if weights is not None:
            raise OSError("no network")
        return library.VisionTransformer(**{**SMALL, **given})

    monkeypatch.setattr(library, "vit_b_16", vit_b_16)


def test_open_gates_change_nothing_and_come_out_again(model: nn.Module, x: torch.Tensor) -> None:
    any_family.gates_come_and_go(model, x)


def test_extraction_and_the_count_of_macs_are_exact(model: nn.Module, x: torch.Tensor) -> None:
    any_family.extraction_is_exact(model, x)


@pytest.mark.parametrize("kind", ["plain", "pre_logits"])
def test_a_saved_model_comes_back(kind: str, x: torch.Tensor, tmp_path: Path) -> None:
    loaded = any_family.a_folder_holds_it(make(kind), x, tmp_path / "compact")
    saved = json.loads((tmp_path / "compact/config.json").read_text())
    assert saved["family"] == "torchvision" and "torchvision" in saved["versions"]
    assert saved["skeleton"]["num_heads"] == 3 and loaded.num_classes == 7


def test_a_model_without_any_branch_comes_back(x: torch.Tensor, tmp_path: Path) -> None:
    model = make()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[None] * 3, neurons=[None] * 3))
    hiap.save(compact, tmp_path / "compact")
    loaded = hiap.load(tmp_path / "compact")
    assert torch.equal(loaded(x), compact(x)) and hiap.macs(loaded) == any_family.counted(loaded, x)


def test_a_model_that_no_recipe_expresses_is_not_saved(tmp_path: Path) -> None:
    for model, message in (
        (make("conv_stem"), "a torchvision model with conv_stem_configs cannot be rebuilt from a recipe"),
        (
            make(norm_layer=functools.partial(nn.RMSNorm, eps=1e-6)),
            "the norm RMSNorm has no name in a recipe; known: LayerNorm",
        ),
    ):
        compact = hiap.extract(model, any_family.ragged(model, 0))
        with pytest.raises(hiap.CheckpointError, match=re.escape(message)):
            hiap.save(compact, tmp_path / "compact")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**7}, "the skeleton has num_layers '10000000', which no model has"),
        ({"mlp_dim": "40"}, "the skeleton has mlp_dim '40', which no model has"),
        ({"dropout": 2.0}, "the skeleton has dropout '2.0', which no model has"),
        ({"num_heads": 5}, "the skeleton has num_heads 5, which does not divide hidden_dim 24"),
        ({"more": 1}, "the skeleton must have attention_dropout, dropout, hidden_dim"),
    ],
)
def test_an_odd_recipe_is_refused(changes: dict[str, Any], message: str) -> None:
    family = family_of(make())
    with pytest.raises(hiap.CheckpointError, match=message):
        family.build({**family.describe(make()), **changes})


def test_aligned_heads_compute_the_same(x: torch.Tensor) -> None:
    any_family.alignment_changes_nothing(make(), x)


def test_the_optimised_network_has_the_same_logits(model: nn.Module, x: torch.Tensor) -> None:
    any_family.optimising_changes_nothing(model, x)
    folded = hiap.optimize(model).stem is not None
    assert folded == isinstance(model.conv_proj, nn.Conv2d)


def test_it_can_be_timed() -> None:
    any_family.it_can_be_timed(make())


def test_a_run_prunes_it_and_can_be_resumed(tmp_path: Path) -> None:
    model = make("pre_logits").float()
    half = [0.5, 0.5, 0.5]
    whole, resumed = pruned_twice(model, noise_data(512, 16, 3), tmp_path, mean=half, std=half)
    loaded = hiap.load(tmp_path / "whole/compact")
    assert type(loaded) is library.VisionTransformer and loaded.num_classes == 10
    assert 0 < hiap.macs(loaded) <= 0.6 * whole.record["dense_macs"]
    assert family_of(loaded).preprocessing(loaded).mean == (0.5, 0.5, 0.5)  # of the data it was trained on
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_extraction_is_checked_by_features_where_the_classifier_is_all_zeros(x: torch.Tensor) -> None:
    model = library.VisionTransformer(**SMALL).double().eval()
    features, logits = family_of(model).outputs(model, x)
    assert features.shape == (3, 24) and bool(features.any()) and not logits.any()
    compact = hiap.extract(model, any_family.ragged(model, 1), round_to=1)
    assert 0 < compact.hiap.logit_difference < 1e-12


def test_other_modules_in_its_place_are_refused() -> None:
    class Mine(library.VisionTransformer):
        pass

    with pytest.raises(hiap.UnsupportedModelError, match="the model is a Mine: it is not torchvision's own class"):
        hiap.attach(Mine(**SMALL))
    model = make()
    model.encoder.layers[1].mlp = nn.Sequential(*model.encoder.layers[1].mlp)
    message = "encoder.layers.encoder_layer_1.mlp is a Sequential: it is not torchvision's MLPBlock"
    with pytest.raises(hiap.UnsupportedModelError, match=message):
        hiap.attach(model)
    model = make()
    model.heads = nn.Linear(24, 5)
    message = "head='heads.head': heads is a Linear without a member 'head'"
    with pytest.raises(hiap.UnsupportedModelError, match=message):
        hiap.attach(model)


def test_the_preprocessing_is_that_of_the_published_weights() -> None:
    def of(size: int, dim: int, patch: int) -> tuple[Any, ...]:
        with torch.device("meta"):
            model = library.VisionTransformer(size, patch, 1, 1, dim, 8)
        found = family_of(model).preprocessing(model)
        assert (found.mean, found.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        return found.size, found.interpolation, found.crop_pct

    assert of(224, 768, 16) == ((224, 224), "bilinear", 224 / 256)
    assert of(224, 1024, 16) == ((224, 224), "bilinear", 224 / 242)
    assert of(384, 768, 16) == ((384, 384), "bicubic", 1.0)
    assert of(518, 1280, 14) == ((518, 518), "bicubic", 1.0)
    assert of(64, 24, 8) == ((64, 64), "bilinear", 224 / 256)


@pytest.mark.usefixtures("small_vit_b")
def test_the_command_line_knows_it_by_its_name(tmp_path: Path) -> None:
    source = library.VisionTransformer(**SMALL, num_classes=5)
    old = {".mlp.0.": ".mlp.linear_1.", ".mlp.3.": ".mlp.linear_2."}  # as in the published files
    state = {
        functools.reduce(lambda k, new: k.replace(new, old[new]), old, k): t for k, t in source.state_dict().items()
    }
    for wrapper in ("", "module."):
        save_file({wrapper + name: t for name, t in state.items()}, tmp_path / "weights.safetensors")
        model = trained_model("torchvision:vit_b_16", str(tmp_path / "weights.safetensors"), True, {"img_size": 16})
        assert type(model) is library.VisionTransformer and model.num_classes == 5
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), source.parameters(), strict=True))
    with pytest.raises(hiap.ConfigError, match=r"does not fit the model torchvision:vit_b_16: size of .*pos_embedding"):
        trained_model("torchvision:vit_b_16", str(tmp_path / "weights.safetensors"), True, {"img_size": 32})


@pytest.mark.usefixtures("small_vit_b")
def test_a_name_or_weights_that_torchvision_does_not_have_are_refused() -> None:
    with pytest.raises(hiap.ConfigError) as error:
        create_model("torchvision:resnet18", False, {})
    assert str(error.value) == (
        "torchvision cannot make the model torchvision:resnet18: it has no ViT 'resnet18'; known: vit_b_16, vit_b_32, "
        "vit_l_16, vit_l_32, vit_h_14"
    )
    with pytest.raises(hiap.ConfigError, match=r"weights of torchvision:vit_b_16 cannot be loaded \(no network\)"):
        create_model("torchvision:vit_b_16", True, {})
    with pytest.raises(
        hiap.ConfigError, match=r"torchvision cannot make the model torchvision:vit_b_16 with \{'heads'"
    ):
        create_model("torchvision:vit_b_16", False, {"heads": 3})


def test_the_family_is_looked_up_only_where_torchvision_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    assert family_of(model).name == "torchvision"
    monkeypatch.delitem(sys.modules, "torchvision")
    with pytest.raises(hiap.UnsupportedModelError, match="it is not a timm VisionTransformer"):
        family_of(model)


def test_options_of_timm_are_refused_for_a_folder_of_torchvision(tmp_path: Path) -> None:
    compact = hiap.extract(make(), any_family.ragged(make(), 0))
    hiap.save(compact, tmp_path / "compact")
    assert type(timm.create_model(f"local-dir:{tmp_path / 'compact'}")) is type(compact)
    with pytest.raises(hiap.InputError, match="VisionTransformer, which is not a timm model: img_size cannot be set"):
        timm.create_model(f"local-dir:{tmp_path / 'compact'}", img_size=32)
