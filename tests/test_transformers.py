"""ViTs of Hugging Face Transformers go all the way, each class exactly."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import hiap
from any_family import it_can_be_timed
from any_family import ragged as ragged_by_chance
from conftest import SHARED, randomise
from hiap.models.family import logits_of
from hiap.models.transformers import FAMILY, EncoderBlock
from hiap.models.weights import trained_model
from hiap.speed.bench import dense_like
from runs import noise_data, pruned_twice
from small_transformers import (
    BARE,
    CASES,
    SIZE,
    WIDE,
    both,
    close,
    flops,
    make,
    pixels,
    ragged,
    transformers,
    vit,
)

pytestmark = pytest.mark.slow


@pytest.fixture(params=list(CASES))
def model(request: pytest.FixtureRequest) -> Any:
    made = make(request.param)
    made.case = request.param
    return made


@pytest.fixture
def x() -> torch.Tensor:
    return pixels()


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
        hiap.InputError, match=r"only the last stage.s feature map can be made .* found stage1, expected stage3"
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
