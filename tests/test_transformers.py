"""ViTs of Hugging Face Transformers go all the way, each class exactly.

One file, though a long one: all tests share the same small models.
"""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hiap
from any_family import it_can_be_timed
from any_family import ragged as ragged_by_chance
from conftest import SHARED, randomise
from hiap.cli.main import main
from hiap.models.family import logits_of
from hiap.models.transformers import FAMILY, EncoderBlock
from hiap.models.transformers_parts import library
from hiap.models.weights import trained_model
from hiap.speed.bench import dense_like
from runs import noise_data, pruned_twice

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")
pytestmark = pytest.mark.slow

SIZE, LABELS = 16, 5
SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": SIZE, "patch_size": 4}
WIDE = {**SMALL, "intermediate_size": 40}
TEXT = {
    **{"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20},
    **{"max_position_embeddings": 6, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "projection_size": 24},
}


def whole(config: str, vision: str, text_config: Any = None, **more: Any) -> Any:
    """The configuration of a model of images and texts."""
    vision_config = getattr(transformers, vision)(**WIDE, **more).to_dict()
    made = getattr(transformers, config)(vision_config=vision_config, text_config=text_config)
    made.num_labels = LABELS
    return made


def both(family: str) -> Any:
    """A small model of images and texts, in float64 and eval."""
    text = getattr(transformers, f"{family}TextConfig")(**TEXT).to_dict()
    config = whole(f"{family}Config", f"{family}VisionConfig", text_config=text, projection_dim=9)
    config.projection_dim = 9
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config)
    randomise(model)
    return model.double().eval()


def vit(config: str, **more: Any) -> Any:
    return getattr(transformers, config)(**WIDE, num_labels=LABELS, **more)


def dino(config: str, **more: Any) -> Any:
    return getattr(transformers, config)(**SMALL, mlp_ratio=2, num_labels=LABELS, layerscale_value=0.5, **more)


def dino3(**more: Any) -> Any:
    return transformers.DINOv3ViTConfig(**WIDE, num_register_tokens=2, layerscale_value=0.5, **more)


def clip(**more: Any) -> Any:
    return transformers.CLIPVisionConfig(**WIDE, **more)


# name of a case -> class, configuration and further arguments
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", lambda **k: vit("ViTConfig", **k), {}),
    "vit_no_bias": ("ViTForImageClassification", lambda **k: vit("ViTConfig", qkv_bias=False, hidden_act="relu"), {}),
    "vit_features": ("ViTForImageClassification", lambda **k: transformers.ViTConfig(**WIDE, num_labels=0), {}),
    "vit_bare": ("ViTModel", lambda **k: vit("ViTConfig", **k), {}),
    "vit_tokens": ("ViTModel", lambda **k: vit("ViTConfig", **k), {"add_pooling_layer": False, "use_mask_token": True}),
    "deit": ("DeiTForImageClassification", lambda **k: vit("DeiTConfig", **k), {}),
    "deit_teacher": ("DeiTForImageClassificationWithTeacher", lambda **k: vit("DeiTConfig", **k), {}),
    "deit_bare": ("DeiTModel", lambda **k: vit("DeiTConfig", **k), {}),
    "dinov2": ("Dinov2ForImageClassification", lambda **k: dino("Dinov2Config", **k), {}),
    "dinov2_bare": ("Dinov2Model", lambda **k: dino("Dinov2Config", **k), {}),
    "registers": ("Dinov2WithRegistersForImageClassification", lambda **k: dino("Dinov2WithRegistersConfig", **k), {}),
    "registers_bare": ("Dinov2WithRegistersModel", lambda **k: dino("Dinov2WithRegistersConfig", **k), {}),
    "swiglu": ("Dinov2ForImageClassification", lambda **k: dino("Dinov2Config", use_swiglu_ffn=True, **k), {}),
    "stages": ("Dinov2Backbone", lambda **k: dino("Dinov2Config", out_features=["stage1", "stage3"], **k), {}),
    "stages_registers": (
        "Dinov2WithRegistersBackbone",
        lambda **k: dino("Dinov2WithRegistersConfig", apply_layernorm=False, reshape_hidden_states=False, **k),
        {},
    ),
    "dinov3": ("DINOv3ViTModel", lambda **k: dino3(**k), {}),
    "dinov3_glu": ("DINOv3ViTModel", lambda **k: dino3(use_gated_mlp=True, query_bias=False, value_bias=False), {}),
    "dinov3_stages": ("DINOv3ViTBackbone", lambda **k: dino3(out_features=["stage2", "stage3"], **k), {}),
    "clip": ("CLIPForImageClassification", lambda **k: whole("CLIPConfig", "CLIPVisionConfig", **k), {}),
    "clip_bare": ("CLIPVisionModel", clip, {}),
    "clip_projection": ("CLIPVisionModelWithProjection", lambda **k: clip(projection_dim=9, **k), {}),
    "siglip": ("SiglipForImageClassification", lambda **k: whole("SiglipConfig", "SiglipVisionConfig", **k), {}),
    "siglip_bare": ("SiglipVisionModel", lambda **k: transformers.SiglipVisionConfig(**WIDE, **k), {}),
    "siglip_tokens": (
        "SiglipVisionModel",
        lambda **k: transformers.SiglipVisionConfig(**WIDE, vision_use_head=False),
        {},
    ),
}
BARE = {name for name, (cls, _, _) in CASES.items() if "Classification" not in cls}


def make(case: str, **more: Any) -> Any:
    """A small model, every parameter random, in float64 and eval."""
    cls, config, options = CASES[case]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config(**more), **options)
    randomise(model)
    model = model.double().eval()
    for module in model.modules():  # stays in float32 when Transformers loads a model in another precision
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.float()
    return model


@pytest.fixture(params=list(CASES))
def model(request: pytest.FixtureRequest) -> Any:
    made = make(request.param)
    made.case = request.param
    return made


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def close(first: torch.Tensor, second: torch.Tensor, allowed: float = 1e-12) -> bool:
    return bool((first - second).abs().max() <= allowed * first.abs().max())


def ragged(model: nn.Module) -> hiap.Topology:
    """Units of every granularity gone: dims, heads, neurons, an attention, an FFN, and one of each to its bias."""
    paired = any(site.pairs for site in FAMILY.sites(model))
    return hiap.Topology.from_counts(
        model,
        heads=[[1], None, [0, 2]],
        value_dims=[5, 8, [[0, 3], 7]],
        qk_dims=[[[0, 1, 3, 4, 5, 7]], 8, [[0, 2, 4, 6], [1, 5]]] if paired else [6, 8, [4, 3]],
        neurons=[[1, 4, 9], None, 0],
    )


def flops(model: nn.Module, images: torch.Tensor) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    return int(counter.get_total_flops())


def test_open_gates_change_nothing_and_come_out_again(model: Any, x: torch.Tensor) -> None:
    before, state = logits_of(model(x)), copy.deepcopy(model.state_dict())
    kinds = [type(layer.module) for layer in FAMILY.sites(model)]
    hiap.attach(model, hiap.GRANULARITIES)
    assert all(type(site.module) is EncoderBlock for site in FAMILY.sites(model))
    assert close(before, logits_of(model(x)))
    hiap.detach(model)
    assert [type(layer.module) for layer in FAMILY.sites(model)] == kinds
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert torch.equal(before, logits_of(model(x)))


def test_what_is_extracted_computes_what_the_gates_did_costs_what_torch_counts_and_comes_back_from_disk(
    model: Any, x: torch.Tensor, tmp_path: Path
) -> None:
    gated = hiap.attach(copy.deepcopy(model), hiap.GRANULARITIES)
    hiap.set_topology(gated, ragged(model))
    compact = hiap.extract(gated, round_to=1)
    assert type(compact) is type(model) and close(logits_of(gated(x)), logits_of(compact(x)))
    assert 2 * hiap.macs(model) == flops(model, x[:1])
    assert 2 * hiap.macs(compact) == flops(compact, x[:1]) < flops(model, x[:1])
    hiap.save(compact, tmp_path / "compact")
    loaded = hiap.load(tmp_path / "compact")
    assert type(loaded) is type(model) and torch.equal(logits_of(loaded(x)), logits_of(compact(x)))
    assert json.loads((tmp_path / "compact/config.json").read_text())["family"] == "transformers"
    dense = dense_like(loaded)
    assert hiap.macs(dense) == hiap.macs(model) and logits_of(dense(x.float())).shape == logits_of(model(x)).shape


def test_aligned_and_optimised_networks_have_the_same_outputs(model: Any, x: torch.Tensor) -> None:
    before, compact = logits_of(model(x)), hiap.extract(model, ragged(model))
    for one in (model, compact):
        assert close(logits_of(one(x)), hiap.optimize(one)(x))
    first = copy.deepcopy(model.state_dict())
    hiap.align_heads(model, [x])
    assert close(before, logits_of(model(x)), 1e-9)
    assert any(not torch.equal(tensor, first[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("case", "rates"),
    [
        ("vit", {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}),
        ("dinov2", {"drop_path_rate": 0.4, "attention_probs_dropout_prob": 0.3}),
        ("clip", {"attention_dropout": 0.3}),
    ],
)
def test_dropout_in_training_is_the_same(case: str, rates: dict[str, float], x: torch.Tensor, tmp_path: Path) -> None:
    model = make(case, **rates).train()
    blocks = copy.deepcopy(model)
    FAMILY.open(blocks)
    compact = hiap.extract(model, hiap.Topology.from_counts(model))
    hiap.save(compact, tmp_path / "compact")
    outputs = []
    for one in (model, blocks, compact, hiap.load(tmp_path / "compact").train()):
        torch.manual_seed(0)
        outputs.append(one(x).logits)
    assert all(close(outputs[0], other) for other in outputs[1:])
    assert not close(outputs[0], model(x).logits)


def test_bare_models_say_which_class_has_a_classifier() -> None:
    for case in BARE:
        assert FAMILY.classes(make(case)) == 0
    with pytest.raises(
        hiap.InputError, match=r"a CLIPVisionModel has no classifier: .* as a CLIPForImageClassification"
    ):
        FAMILY.set_classes(make("clip_bare"), 3)
    with pytest.raises(
        hiap.InputError, match="a DINOv3ViTModel has no classifier: Transformers has no such class with"
    ):
        FAMILY.set_classes(make("dinov3"), 3)


def test_a_new_classifier_has_the_shape_that_the_class_gives_it(x: torch.Tensor) -> None:
    for case in CASES.keys() - BARE:
        model = make(case)
        FAMILY.set_classes(model, 7)
        assert model(x).logits.shape == (3, 7) and model.config.num_labels == 7
        assert hiap.extract(model, ragged(model))(x).logits.shape == (3, 7)


@pytest.mark.parametrize("case", ["vit", "clip", "swiglu"])
def test_a_run_prunes_it_and_can_be_resumed(case: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, CASES[case][0])(CASES[case][1](num_channels=1))
    given = {"batch_size": 64, "mean": [0.5], "std": [0.5], "checkpoint_every": 2}
    result, again = pruned_twice(model, noise_data(256, SIZE), tmp_path, stop=7, **given)
    loaded = hiap.load(tmp_path / "whole/compact")
    assert type(loaded) is type(model) and FAMILY.classes(loaded) == loaded.config.num_labels == 10
    assert loaded.usage["input_size"] == [1, SIZE, SIZE]
    assert 0 < hiap.macs(loaded) <= 0.6 * result.record["dense_macs"]
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), result.model.parameters(), strict=True))


@pytest.mark.parametrize("case", list(CASES))
def test_parameters_that_no_logit_depends_on_are_left_alone(case: str, x: torch.Tensor) -> None:
    """Processes that train together would wait for their gradients."""
    model = make(case)
    for parameter in FAMILY.unread(model):
        parameter.requires_grad_(False)
    logits_of(model(x)).square().sum().backward()
    assert all((p.grad is None) is not p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("case", ["siglip", "swiglu", "dinov3_glu", "stages"])
def test_it_can_be_timed(case: str) -> None:
    it_can_be_timed(make(case))


def test_a_mask_of_tokens_is_heeded(x: torch.Tensor) -> None:
    model, mask = make("vit"), torch.ones(3, 17)
    mask[:, 5:9] = 0
    expected = model(x, attention_mask=mask).logits
    assert close(expected, hiap.attach(copy.deepcopy(model))(x, attention_mask=mask).logits)
    assert not close(expected, model(x).logits, 1e-6)


@pytest.mark.parametrize("case", ["vit", "deit", "dinov2", "dinov3", "clip_bare", "siglip_bare"])
def test_hidden_states_are_those_of_the_dense_model_however_often_gates_come_and_go(case: str, x: torch.Tensor) -> None:
    model = make(case)
    expected = model(x, output_hidden_states=True).hidden_states
    for form in (hiap.attach, hiap.detach, hiap.attach):
        form(model)
        for _ in range(2):
            found = model(x, output_hidden_states=True).hidden_states
            assert len(found) == 4 and all(close(*both) for both in zip(expected, found, strict=True))
    whole = hiap.extract(hiap.detach(model), hiap.Topology.from_counts(model))
    found = whole(x, output_hidden_states=True).hidden_states
    assert all(close(*both) for both in zip(expected, found, strict=True))
    compact = hiap.extract(model, ragged(model))
    tokens = [FAMILY.embed(compact, x)]
    for block in hiap.optimize(compact, last_block=False).blocks:
        tokens.append(block(tokens[-1]))
    found = compact(x, output_hidden_states=True).hidden_states
    assert all(close(*both) for both in zip(tokens, found, strict=True))


@pytest.mark.parametrize("case", ["dinov2", "dinov3"])
def test_gradient_checkpointing_gives_the_same_gradients(case: str, x: torch.Tensor) -> None:
    calls: list[Any] = []
    model = make(case)
    model.gradient_checkpointing_enable()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 2, 3], neurons=[8, 16, 9]))
    compact.gradient_checkpointing_enable()
    FAMILY.open(model)
    for one in (model.train(), compact.train()):
        found = []
        for site in FAMILY.sites(one):
            site.module.register_forward_pre_hook(lambda *args: calls.append(args[0]))
        for again in (True, False):
            if not again:
                one.gradient_checkpointing_disable()
            calls.clear()
            torch.manual_seed(0)
            logits_of(one(x)).square().sum().backward()
            found.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
            assert len(calls) == (6 if again else 3)
            one.zero_grad()
        assert all(close(*both) for both in zip(*found, strict=True))


@pytest.mark.parametrize("case", ["stages", "stages_registers", "dinov3_stages"])
def test_a_backbone_gives_the_feature_maps_of_its_stages(case: str, x: torch.Tensor) -> None:
    model = make(case)
    whole = hiap.extract(model, hiap.Topology.from_counts(model))
    maps = model(x).feature_maps
    assert len(maps) == len(model.out_features)
    assert all(close(*both) for both in zip(maps, whole(x).feature_maps, strict=True))
    compact = hiap.extract(model, ragged(model))
    assert [one.shape for one in compact(x).feature_maps] == [one.shape for one in maps]
    model.config.out_features = ["stage1"]
    with pytest.raises(
        hiap.InputError, match=r"only the feature map of the last stage .* found stage1, expected stage3"
    ):
        hiap.optimize(model)


def test_weights_of_attention_are_not_silently_left_out(x: torch.Tensor) -> None:
    compact = hiap.extract(make("vit"), ragged(make("vit")))
    with pytest.raises(hiap.InputError, match="a pruned model has no output_attentions: its attention does not keep"):
        compact(x, output_attentions=True)
    model = make("vit")
    model.config._attn_implementation = "eager"
    model.config.output_attentions = True
    with pytest.raises(hiap.UnsupportedModelError, match=r"would need config.output_attentions = False\."):
        hiap.attach(model)


def test_a_key_bias_that_was_learned_stays(x: torch.Tensor) -> None:
    model = hiap.attach(make("dinov3"))
    for site in FAMILY.sites(model):
        nn.init.normal_(site.attention.qkv.bias)
    expected = model(x).pooler_output
    assert close(expected, hiap.extract(model)(x).pooler_output)
    assert close(expected, hiap.detach(model)(x).pooler_output)


class TestRefused:
    def test_packed_patches_of_siglip2(self) -> None:
        config = transformers.Siglip2VisionConfig(**{**WIDE, "num_patches": 16})
        with pytest.raises(
            hiap.UnsupportedModelError,
            match=r"a Siglip2VisionModel: it takes packed patches .* which Transformers loads as a SiglipModel",
        ):
            hiap.attach(transformers.Siglip2VisionModel(config))

    def test_a_model_of_images_and_texts(self) -> None:
        with pytest.raises(
            hiap.UnsupportedModelError,
            match=r"a CLIPModel: it reads texts besides images.* need its image tower alone: prune model.vision_model",
        ):
            hiap.attach(both("CLIP"))

    def test_another_class(self) -> None:
        model = transformers.ViTForMaskedImageModeling(vit("ViTConfig"))
        with pytest.raises(
            hiap.UnsupportedModelError,
            match=r"is a ViTForMaskedImageModeling: its class is not among .* need a family of its own",
        ):
            hiap.attach(model)

    def test_a_layer_that_is_no_plain_linear(self) -> None:
        model = make("vit")
        torch.nn.utils.parametrizations.weight_norm(model.vit.layers[1].mlp.fc2)
        with pytest.raises(
            hiap.UnsupportedModelError,
            match=r"vit.layers.1.mlp.fc2 is a ParametrizedLinear: it is not a plain nn.Linear",
        ):
            hiap.attach(model)

    def test_a_module_of_ones_own(self) -> None:
        class Attention(nn.Module):
            def __init__(self, like: nn.Module) -> None:
                super().__init__()
                self.__dict__.update(like.__dict__)

        model = make("vit")
        model.vit.layers[2].attention = Attention(model.vit.layers[2].attention)
        with pytest.raises(
            hiap.UnsupportedModelError, match=r"vit.layers.2.attention is a Attention: it is not of Transformers"
        ):
            hiap.attach(model)

    def test_a_recipe_that_no_model_has(self) -> None:
        recipe = FAMILY.describe(make("vit"))
        for name, value, words in (
            ("hidden_size", "24", "the skeleton has hidden_size '24', which no model has"),
            ("num_hidden_layers", 10**6, "the skeleton has num_hidden_layers '1000000', which no model has"),
            ("hidden_act", "os.system", "the skeleton has hidden_act 'os.system', which no model has"),
            ("num_attention_heads", 7, "the skeleton has 7 heads, which do not divide 24"),
            ("auto_map", {"AutoModel": "x.y"}, "the skeleton has an unknown entry auto_map"),
        ):
            with pytest.raises(hiap.CheckpointError, match=words):
                FAMILY.build({**recipe, "config": {**recipe["config"], name: value}})
        with pytest.raises(hiap.CheckpointError, match="the class of the skeleton must be one of ViTForImage"):
            FAMILY.build({**recipe, "class": "AutoModel"})
        with pytest.raises(hiap.CheckpointError, match="must have exactly class, config, num_labels"):
            FAMILY.build({**recipe, "code": "x"})


class TestFolder:
    """--model hf:FOLDER"""

    def saved(self, case: str, folder: Path, **preprocessor: Any) -> Any:
        model = make(case).float()
        model.save_pretrained(folder)
        if preprocessor:
            (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor))
        return model

    @pytest.mark.parametrize("case", sorted(CASES.keys() - BARE))
    def test_gives_the_classifier_that_was_saved(self, case: str, x: torch.Tensor, tmp_path: Path) -> None:
        model = self.saved(case, tmp_path)
        found = trained_model(f"hf:{tmp_path}", None, True, {}).eval()
        assert type(found) is type(model) and FAMILY.classes(found) == FAMILY.classes(model)
        assert torch.equal(found(x.float()).logits, model(x.float()).logits)

    @pytest.mark.parametrize("case", ["vit_tokens", "dinov2_bare", "clip_bare", "clip_projection", "siglip_bare"])
    def test_a_bare_backbone_becomes_a_classifier_of_no_classes(self, case: str, tmp_path: Path) -> None:
        model = self.saved(case, tmp_path)
        found = trained_model(f"hf:{tmp_path}", None, True, {})
        assert "ForImageClassification" in type(found).__name__ and FAMILY.classes(found) == 0
        own, prefix = model.state_dict(), "vision_model." if case == "clip_projection" else ""
        for name, tensor in found.state_dict().items():
            inside = name.partition(".")[2]
            assert torch.equal(tensor, own[prefix + inside])
        hiap.save(hiap.extract(found.eval(), ragged(found)), tmp_path / "compact")
        assert FAMILY.classes(hiap.load(tmp_path / "compact")) == 0

    def test_brings_its_preprocessing_and_labels(self, tmp_path: Path) -> None:
        model = make("vit").float()
        model.config.id2label = dict(enumerate("abcde"))
        model.save_pretrained(tmp_path)
        words = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "resample": 3, "do_center_crop": True}
        sizes = {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**words, **sizes}))
        found = trained_model(f"hf:{tmp_path}", None, True, {})
        own = FAMILY.preprocessing(found)
        assert (own.mean, own.std, own.size) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), (16, 16))
        assert (own.interpolation, own.crop_pct, own.crop_mode) == ("bicubic", 0.8, "center")
        hiap.save(hiap.extract(found.eval(), ragged(found)), tmp_path / "compact")
        loaded: Any = hiap.load(tmp_path / "compact")
        assert FAMILY.preprocessing(loaded) == own
        assert loaded.class_names == list("abcde") == list(loaded.config.id2label.values())

    def test_a_processor_of_images_and_texts_is_read_too(self, tmp_path: Path) -> None:
        self.saved("clip", tmp_path, image_mean=[0.5] * 3)  # which Transformers passes over as well
        words = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], "size": {"height": 16, "width": 16}}
        (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": words}))
        own = FAMILY.preprocessing(trained_model(f"hf:{tmp_path}", None, True, {}))
        assert (own.mean, own.std, own.crop_mode) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "squash")

    def test_without_a_file_preprocessing_is_the_usual_one_of_the_class(self, tmp_path: Path) -> None:
        self.saved("clip", tmp_path)
        own = FAMILY.preprocessing(trained_model(f"hf:{tmp_path}", None, True, {}))
        assert (own.mean, own.crop_mode) == ((0.48145466, 0.4578275, 0.40821073), "center")

    @pytest.mark.parametrize("case", ["vit", "deit", "dinov2", "registers", "clip", "siglip"])
    def test_another_image_size_interpolates_the_positions_as_the_model_does(self, case: str, tmp_path: Path) -> None:
        model = self.saved(case, tmp_path)
        found: Any = trained_model(f"hf:{tmp_path}", None, True, {"img_size": 24}).eval()
        images = torch.randn(2, 3, 24, 24)
        how = {} if case in ("dinov2", "registers", "clip") else {"interpolate_pos_encoding": True}
        assert FAMILY.input_shape(found) == (3, 24, 24) and 2 * hiap.macs(found) == flops(found, images[:1])
        if case != "clip":  # whose classifier does not pass the option on
            assert torch.allclose(found(images).logits, model(images, **how).logits, atol=1e-5)

    def test_dinov3_comes_bare_and_for_any_image_size(self, tmp_path: Path) -> None:
        model = self.saved("dinov3", tmp_path)
        found: Any = trained_model(f"hf:{tmp_path}", None, True, {"img_size": 24}).eval()
        images = torch.randn(2, 3, 24, 24)
        assert type(found) is type(model) and FAMILY.classes(found) == 0
        assert FAMILY.input_shape(found) == (3, 24, 24) and 2 * hiap.macs(found) == flops(found, images[:1])
        assert torch.equal(found(images).pooler_output, model(images).pooler_output)
        assert torch.allclose(hiap.optimize(found)(images), model(images).pooler_output, atol=1e-4)

    def test_a_run_of_the_command_line_prunes_it(self, photos: Path, tmp_path: Path) -> None:
        self.saved("vit", tmp_path / "hf", image_mean=[0.5] * 3, image_std=[0.5] * 3)
        options = [
            "--epochs",
            "1",
            "--dense-epochs",
            "1",
            "--target",
            "60%",
            "--batch-size",
            "8",
            "--warmup-epochs",
            "0",
        ]
        command = ["prune", "--model", f"hf:{tmp_path / 'hf'}", "--data", str(photos), *options]
        assert main([*command, "--out", str(tmp_path / "run")]) == 0
        loaded = hiap.load(tmp_path / "run/compact")
        assert isinstance(loaded, transformers.ViTForImageClassification) and loaded.class_names == ["cat", "dog"]
        assert loaded.config.id2label == {0: "cat", 1: "dog"}

    def test_what_cannot_be_had_is_said(self, tmp_path: Path) -> None:
        self.saved("vit", tmp_path / "hf")
        transformers.BertConfig().save_pretrained(tmp_path / "bert")
        transformers.Siglip2VisionConfig(**WIDE).save_pretrained(tmp_path / "siglip2")
        (tmp_path / "empty").mkdir()
        for name, arguments, words in (
            ("hf", {"depth": 3}, "takes img_size and num_classes as model_args; found depth"),
            ("hf", {"img_size": 18}, "img_size must be square and a multiple of the 4x4 patch; found 18"),
            ("bert", {}, "is a bert, which cannot be pruned; known: clip, "),
            ("siglip2", {}, "is a siglip2_vision_model, which cannot be pruned: it takes packed patches"),
            ("empty", {}, "cannot be had .* Pass hf: and a folder that save_pretrained wrote"),
        ):
            with pytest.raises(hiap.ConfigError, match=words):
                trained_model(f"hf:{tmp_path / name}", None, True, arguments)
        with pytest.raises(hiap.ConfigError, match="comes with weights of its own; leave out --weights file"):
            trained_model(f"hf:{tmp_path / 'hf'}", "file", True, {})


def test_without_the_package_the_command_that_installs_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiap.save(hiap.extract(make("vit"), ragged(make("vit"))), tmp_path / "compact")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (lambda: trained_model("hf:any", None, True, {}), lambda: hiap.load(tmp_path / "compact")):
        with pytest.raises(
            hiap.ConfigError,
            match=r'^models of Transformers need the package transformers: pip install "hiap\[transformers\]"$',
        ):
            call()


def test_a_package_that_is_broken_is_not_called_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers")

    monkeypatch.setattr("hiap.models.transformers_parts.importlib.import_module", broken)
    message = "^Transformers is installed but cannot be imported: No module named 'tokenizers'$"
    with pytest.raises(hiap.ConfigError, match=message):
        library()


def test_a_version_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("vit")
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.1")
    with pytest.raises(
        hiap.ConfigError,
        match=r'^models of Transformers need 5.22 or newer; found 4.57.1: pip install "hiap\[transformers\]"$',
    ):
        hiap.attach(model)


def test_the_package_is_imported_for_its_own_models_alone() -> None:
    code = (
        "import sys, hiap, timm; hiap.attach(timm.create_model('vit_tiny_patch16_224')); assert {0} not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code.format("'transformers'")], check=True, timeout=120)


def test_dinov2_of_timm_with_the_same_weights_is_pruned_to_the_same_network(x: torch.Tensor) -> None:
    name = "vit_small_patch14_dinov2"
    sizes = {"img_size": SIZE, "patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 3, "mlp_ratio": 2}
    other = timm.create_model(name, **sizes, num_classes=0)
    randomise(other)
    other, model = other.double().eval(), make("dinov2_bare")
    model.load_state_dict(from_timm(other.state_dict(), model))
    topology = hiap.Topology.from_counts(
        model, heads=[[1], None, [0, 2]], value_dims=[5, 8, [3, 7]], qk_dims=[6, 6, 6], neurons=[[1, 4, 9], None, 30]
    )
    assert hiap.macs(model) == hiap.macs(other)
    for one, two in ((other, model), (hiap.extract(other, topology), hiap.extract(model, topology))):
        output = two(x)
        assert close(one.forward_features(x), output.last_hidden_state, 1e-8)
        assert close(one(x), output.pooler_output, 1e-8)
    assert hiap.macs(hiap.extract(other, topology)) == hiap.macs(hiap.extract(model, topology))


def test_a_trained_dinov2_pruned_here_equals_the_one_pruned_in_timm() -> None:
    file = SHARED / "models/dinov2_small_tin126.safetensors"
    if not file.exists():
        pytest.skip("the trained DINOv2 is not here")
    other = trained_model("vit_small_patch14_dinov2", str(file), True, {"img_size": 126, "global_pool": "token"})
    other = other.double().eval()
    config = transformers.Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=126, num_labels=200)
    model = transformers.Dinov2ForImageClassification(config).double().eval()
    weights = {name: tensor for name, tensor in other.state_dict().items() if not name.startswith("head.")}
    model.dinov2.load_state_dict(from_timm(weights, model.dinov2))
    with torch.no_grad():  # the classifier of Transformers reads the mean of the patches besides the class token
        model.classifier.weight.copy_(torch.cat([other.head.weight, torch.zeros_like(other.head.weight)], 1))
        model.classifier.bias.copy_(other.head.bias)
    topology = ragged_by_chance(model, 0)
    images = torch.randn(2, 3, 126, 126, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert hiap.macs(other.double()) + 200 * 384 == hiap.macs(model)
    with torch.no_grad():
        for one, two in ((other, model), (hiap.extract(other, topology), hiap.extract(model, topology))):
            assert close(one.forward_features(images), two.dinov2(images).last_hidden_state, 1e-8)
            assert close(one(images), two(images).logits, 1e-8)


def from_timm(weights: dict[str, torch.Tensor], model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights of timm's DINOv2 by the names that they have in Transformers."""
    found = {"embeddings.mask_token": model.state_dict()["embeddings.mask_token"]}
    names = (
        ("cls_token", "embeddings.cls_token"),
        ("pos_embed", "embeddings.position_embeddings"),
        ("patch_embed.proj", "embeddings.patch_embeddings.projection"),
        ("blocks.", "encoder.layer."),
        ("attn.proj", "attention.o_proj"),
        ("ls1.gamma", "layer_scale1.lambda1"),
        ("ls2.gamma", "layer_scale2.lambda1"),
    )
    for name, tensor in weights.items():
        if ".qkv." in name:
            for part, rows in zip("qkv", tensor.chunk(3), strict=True):
                new = name.replace("blocks.", "encoder.layer.").replace("attn.qkv", f"attention.{part}_proj")
                found[new] = rows
            continue
        if name.startswith("norm."):
            name = f"layernorm{name.removeprefix('norm')}"
        for old, new in names:
            name = name.replace(old, new)
        found[name] = tensor
    return found
