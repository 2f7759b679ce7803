"""Pruned models go through `save_pretrained` and `from_pretrained` of Transformers, after `import hiap` alone."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hiap
from hiap.models.family import logits_of
from hiap.models.registry import widths_of
from hiap.models.transformers import FAMILY
from hiap.models.weights import trained_model
from small_transformers import BARE, CASES, SIZE, both, close, make, ragged, transformers

pytestmark = pytest.mark.slow

IMAGES = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WORDS = torch.tensor([[0, 5, 6, 1], [0, 7, 8, 1], [0, 9, 3, 1]])


def pruned(case: str, **more: Any) -> Any:
    model = make(case, **more)
    return hiap.extract(model, ragged(model))


def read(case: str, folder: Path) -> Any:
    """What the auto class of a case makes of a folder, which has all that it needs and nothing else."""
    auto = transformers.AutoModel if case in BARE else transformers.AutoModelForImageClassification
    model, report = auto.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    return model.eval()


@pytest.mark.parametrize("case", list(CASES))
def test_a_folder_of_either_kind_gives_the_same_model(case: str, tmp_path: Path) -> None:
    compact = pruned(case)
    expected = logits_of(compact(IMAGES))
    compact.save_pretrained(tmp_path / "first")
    hiap.save(compact, tmp_path / "hiap")
    for folder in ("first", "hiap"):
        loaded = read(case, tmp_path / folder)
        assert isinstance(loaded, type(compact)) and loaded.dtype == torch.float64
        assert torch.equal(logits_of(loaded(IMAGES)), expected)
        assert loaded.hiap == compact.hiap and hiap.macs(loaded) == hiap.macs(compact)
    loaded.save_pretrained(tmp_path / "again")
    assert torch.equal(logits_of(read(case, tmp_path / "again")(IMAGES)), expected)
    hiap.save(loaded, tmp_path / "back")
    assert torch.equal(logits_of(hiap.load(tmp_path / "back")(IMAGES)), expected)


def test_the_configuration_has_the_widths_of_every_layer_in_words_of_transformers_too(tmp_path: Path) -> None:
    pruned("vit").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["architectures"]) == ("hiap_vit", ["ViTForImageClassification"])
    assert config["per_layer_config"] == {
        "0": {"num_attention_heads": 1, "head_dim": 8, "v_head_dim": 8, "intermediate_size": 8},
        "1": {"skip": ["attention", "mlp"]},
        "2": {"num_attention_heads": 2, "head_dim": 8, "v_head_dim": 8, "intermediate_size": 0},
    }
    assert "auto_map" not in config and [path.suffix for path in tmp_path.glob("*.py")] == []


def test_names_of_classes_come_along(tmp_path: Path) -> None:
    hiap.save(pruned("vit"), tmp_path, class_names=list("abcde"))
    assert read("vit", tmp_path).config.id2label == dict(enumerate("abcde"))


@pytest.mark.parametrize("case", ["dinov2", "clip", "siglip"])
def test_a_classifier_of_no_classes_stays_one(case: str, tmp_path: Path) -> None:
    model = make(case)
    FAMILY.set_classes(model, 0)
    compact = hiap.extract(model, ragged(model))
    compact.save_pretrained(tmp_path)
    assert torch.equal(read(case, tmp_path)(IMAGES).logits, compact(IMAGES).logits)


def test_a_model_pruned_twice_keeps_the_record_of_its_dense_model(tmp_path: Path) -> None:
    pruned("dinov2").save_pretrained(tmp_path / "one")
    first = trained_model(f"hf:{tmp_path / 'one'}", None, True, {}).double().eval()
    second = hiap.extract(first, hiap.Topology.from_counts(first, heads=[1, None, 1], neurons=[4, None, None]))
    second.save_pretrained(tmp_path / "two")
    loaded = read("dinov2", tmp_path / "two")
    assert torch.equal(loaded(IMAGES).logits, second(IMAGES).logits)
    assert loaded.hiap.dense == first.hiap.dense and widths_of(loaded)[2].heads == 1


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
@pytest.mark.parametrize("tower", ["VisionModel", "VisionModelWithProjection", "ForImageClassification"])
def test_a_pruned_tower_goes_back_into_the_model_of_images_and_texts(family: str, tower: str, tmp_path: Path) -> None:
    if not hasattr(transformers, family + tower):
        pytest.skip(f"Transformers has no {family + tower}")
    model = both(family)
    inside = model.vision_model
    if tower != "VisionModel":
        inside = make("clip_projection" if "Proj" in tower else family.lower())
        (inside.vision_model.load_state_dict)(model.vision_model.state_dict())
    compact = hiap.extract(inside, ragged(inside))
    hiap.set_tower(model, compact)
    scores = model(input_ids=WORDS, pixel_values=IMAGES).logits_per_image
    features = model.get_image_features(IMAGES).pooler_output
    if "Proj" in tower:
        assert close(features, compact(IMAGES).image_embeds)
    model.save_pretrained(tmp_path)
    for auto in (transformers.AutoModel, transformers.AutoModelForZeroShotImageClassification):
        loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
        assert isinstance(loaded, type(model)) and not any(report.values())
        assert torch.equal(loaded.eval()(input_ids=WORDS, pixel_values=IMAGES).logits_per_image, scores)
        assert torch.equal(loaded.get_image_features(IMAGES).pooler_output, features)
        assert hiap.macs(loaded.vision_model) == hiap.macs(model.vision_model) < hiap.macs(both(family).vision_model)


def test_a_tower_that_does_not_fit_says_why() -> None:
    clip, tower = both("CLIP"), pruned("clip_bare")
    other = hiap.extract(both("Siglip").vision_model, ragged(both("Siglip").vision_model))
    for model, found, words in (
        (make("vit"), tower, "a tower goes into a CLIPModel or a SiglipModel; found a ViTForImageClassification"),
        (clip, make("clip_bare"), "the tower must be a pruned one, of hiap.extract or hiap.load; found a CLIPVision"),
        (clip, other, "a SiglipVisionModel does not fit into a CLIPModel"),
        (
            clip,
            pruned("clip_bare", num_channels=1),
            "does not fit into the CLIPModel: its num_channels is 1 instead of 3",
        ),
    ):
        with pytest.raises(hiap.InputError, match=words):
            hiap.set_tower(model, found)


def test_pipelines_take_a_folder(tmp_path: Path) -> None:
    compact = pruned("vit").float()
    compact.config.id2label = dict(enumerate("abcde"))
    compact.save_pretrained(tmp_path)
    transformers.ViTImageProcessor(size={"height": SIZE, "width": SIZE}).save_pretrained(tmp_path)
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 20, 3), dtype=np.uint8))
    x = transformers.AutoImageProcessor.from_pretrained(tmp_path)(photo, return_tensors="pt")["pixel_values"]
    scores = compact(x).logits.softmax(-1)[0]
    best = transformers.pipeline("image-classification", model=str(tmp_path))(photo, top_k=1)[0]
    assert best["label"] == "abcde"[scores.argmax()] and best["score"] == pytest.approx(float(scores.max()), 1e-5)
    found = transformers.pipeline("image-feature-extraction", model=str(tmp_path))(photo)
    assert torch.allclose(torch.tensor(found), compact.vit(x).last_hidden_state, atol=1e-5)


@pytest.mark.parametrize(
    "size",
    [
        {"size": {"height": SIZE, "width": SIZE}},
        {"size": {"shortest_edge": 20}, "crop_size": {"height": 16, "width": 16}},
    ],
)
def test_a_model_from_a_folder_takes_its_processor_along(size: dict[str, Any], tmp_path: Path) -> None:
    make("vit").float().save_pretrained(tmp_path / "dense")
    own = {**size, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    kind = transformers.CLIPImageProcessor if "crop_size" in size else transformers.ViTImageProcessor
    kind(**own).save_pretrained(tmp_path / "dense")
    photo = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), dtype=np.uint8))
    dense = trained_model(f"hf:{tmp_path / 'dense'}", None, True, {}).eval()
    compact: Any = hiap.extract(dense, ragged(dense))
    compact.save_pretrained(tmp_path / "first")
    hiap.save(compact, tmp_path / "hiap")
    hiap.save(hiap.load(tmp_path / "hiap"), tmp_path / "hiap")
    expected = transformers.AutoImageProcessor.from_pretrained(tmp_path / "dense")(photo, return_tensors="pt")
    scores = compact(**expected).logits.softmax(-1)[0]
    for folder in ("first", "hiap"):
        found = transformers.AutoImageProcessor.from_pretrained(tmp_path / folder)(photo, return_tensors="pt")
        assert torch.equal(found["pixel_values"], expected["pixel_values"])
        best = transformers.pipeline("image-classification", model=str(tmp_path / folder))(photo, top_k=1)[0]
        assert best["score"] == pytest.approx(float(scores.max()), 1e-5)


def test_a_folder_of_an_earlier_version_keeps_its_preprocessing(tmp_path: Path) -> None:
    model = make("vit").float()
    FAMILY.set_usage(model, {"mean": [0.1] * 3, "std": [0.2] * 3})
    hiap.save(hiap.extract(model, ragged(model)), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["pretrained_cfg"] = config.pop("preprocessing")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for loaded in (hiap.load(tmp_path), read("vit", tmp_path)):
        assert FAMILY.preprocessing(loaded).mean == (0.1,) * 3
        assert "pretrained_cfg" not in loaded.config.to_dict()


def test_a_processor_in_the_folder_stays_when_another_model_is_saved_there(tmp_path: Path) -> None:
    with_own, without = tmp_path / "with_own", tmp_path / "without"
    transformers.ViTImageProcessor(size={"height": 9, "width": 9}).save_pretrained(with_own)
    for number in (0.1, 0.2):
        model = make("vit")
        FAMILY.set_usage(model, {"mean": [number] * 3, "std": [0.2] * 3})
        compact = hiap.extract(model, ragged(model))
        for folder in (with_own, without):
            hiap.save(compact, folder)
        assert transformers.AutoImageProcessor.from_pretrained(with_own).size["height"] == 9
        assert tuple(transformers.AutoImageProcessor.from_pretrained(without).image_mean) == (number,) * 3


def test_auto_backbone_knows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compact = pruned("stages")
    compact.save_pretrained(tmp_path)
    # Transformers asks the hub whether a folder is one of its names, and does not read it otherwise.
    monkeypatch.setattr("huggingface_hub.HfApi.repo_exists", lambda *args, **options: True)
    loaded = transformers.AutoBackbone.from_pretrained(tmp_path, out_features=["stage1", "stage3"]).eval()
    assert type(loaded).__name__ == "Dinov2Backbone"
    maps = zip(loaded(IMAGES).feature_maps, compact(IMAGES).feature_maps, strict=True)
    assert all(torch.equal(*each) for each in maps)


def test_a_configuration_alone_makes_a_model_with_random_weights() -> None:
    config = pruned("dinov2").config
    model = transformers.AutoModelForImageClassification.from_config(config).eval()
    assert widths_of(model) == widths_of(pruned("dinov2"))
    assert all(bool(p.isfinite().all()) for p in model.parameters()) and model(IMAGES.float()).logits.isfinite().all()


def test_an_edited_configuration_is_refused(tmp_path: Path) -> None:
    pruned("vit").save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    for entry, words in (
        ({"blocks": config["blocks"][:2]}, "2 blocks, 3 dense ones and a depth of 3 do not agree"),
        (
            {"blocks": [{**config["blocks"][0], "heads": "1"}, *config["blocks"][1:]]},
            "heads must be a count; found '1'",
        ),
        ({"blocks": 3}, "does not describe a pruned ViTForImageClassification: 'int' object is not iterable"),
        ({"blocks": [{}, {}, {}]}, "does not describe a pruned ViTForImageClassification: .* missing 4 required"),
        ({"skeleton": "x", "blocks": None}, "does not describe a pruned ViTForImageClassification: 'blocks'"),
        ({"blocks": None, "dense": None}, "pruned ViTForImageClassification: 'blocks', 'dense' are missing"),
        ({"topology": 3}, "does not describe a pruned ViTForImageClassification"),
    ):
        file.write_text(json.dumps({**config, **entry}))
        with pytest.raises(hiap.CheckpointError, match=words):
            transformers.AutoModelForImageClassification.from_pretrained(tmp_path)


def test_a_folder_of_save_pretrained_says_what_reads_it(tmp_path: Path) -> None:
    pruned("vit").save_pretrained(tmp_path)
    with pytest.raises(hiap.CheckpointError, match=r"written by save_pretrained: .* from_pretrained"):
        hiap.load(tmp_path)


@pytest.mark.parametrize("first", ["hiap", "transformers.models.auto.modeling_auto"])
def test_it_works_whichever_is_imported_first(first: str, tmp_path: Path) -> None:
    compact = pruned("vit")
    compact.save_pretrained(tmp_path)
    torch.save((IMAGES, compact(IMAGES).logits), tmp_path / "images.pt")
    code = f"""
import {first}, sys
assert {first!r} != "hiap" or not {{"transformers", "torch", "timm"}} & set(sys.modules)
import hiap, torch
from transformers import AutoModelForImageClassification
images, logits = torch.load({str(tmp_path / "images.pt")!r})
model = AutoModelForImageClassification.from_pretrained({str(tmp_path)!r}).eval()
assert torch.equal(model(images).logits, logits)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_model_of_an_auto_class_goes_to_another_process(tmp_path: Path) -> None:
    for case in ("vit", "clip"):  # whose classifier has a configuration of images and texts
        compact = pruned(case)
        compact.save_pretrained(tmp_path / case)
        models = [compact, read(case, tmp_path / case)]
        torch.save([models, IMAGES, compact(IMAGES).logits], tmp_path / f"{case}.pt")
    code = """
import sys, torch
for file in sys.argv[1:]:
    models, images, logits = torch.load(file, weights_only=False)
    assert all(torch.equal(model(images).logits, logits) for model in models)
"""
    subprocess.run([sys.executable, "-c", code, *map(str, tmp_path.glob("*.pt"))], check=True, timeout=120)


def test_a_registration_that_failed_fails_again_for_the_same_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    config, fails = pruned("vit").config.to_dict(), [True]

    def register() -> None:
        if fails:
            raise hiap.ConfigError("too old")

    monkeypatch.setattr("hiap.models.transformers_configs._before_use", [register])
    for _ in range(2):
        with pytest.raises(hiap.ConfigError, match="too old"):
            transformers.AutoConfig.for_model(**config)
    fails.clear()
    assert transformers.AutoConfig.for_model(**config).model_type == "hiap_vit"


def test_an_option_that_blocks_cannot_follow_is_named(tmp_path: Path) -> None:
    pruned("vit").save_pretrained(tmp_path)
    with pytest.raises(hiap.UnsupportedModelError, match="blocks do not keep what output_attentions asks for"):
        transformers.AutoModelForImageClassification.from_pretrained(tmp_path, output_attentions=True)


def test_a_model_that_was_in_half_precision_can_be_saved(tmp_path: Path) -> None:
    compact = pruned("dinov3").bfloat16().float()
    hiap.save(compact, tmp_path)
    compact.rope_embeddings.inv_freq = make("dinov3").rope_embeddings.inv_freq  # not rounded, as it is loaded
    images = IMAGES.float()
    assert torch.equal(hiap.load(tmp_path)(images).pooler_output, compact(images).pooler_output)  # type: ignore[operator]
    compact.rope_embeddings.inv_freq = 2 * compact.rope_embeddings.inv_freq
    with pytest.raises(hiap.CheckpointError, match="has other outputs: some layer was changed"):
        hiap.save(compact, tmp_path)


def test_a_whole_model_with_a_pruned_tower_says_what_saves_and_prunes_it(tmp_path: Path) -> None:
    model = both("CLIP")
    hiap.set_tower(model, hiap.extract(model.vision_model, ragged(model.vision_model)))
    with pytest.raises(hiap.CheckpointError, match=r"save this one with model.save_pretrained, or its tower"):
        hiap.save(model, tmp_path / "hiap")
    hiap.save(model.vision_model, tmp_path / "tower")
    model.save_pretrained(tmp_path / "whole")
    with pytest.raises(hiap.ConfigError, match=r"it reads texts besides images. Load it with AutoModel, prune its vis"):
        trained_model(f"hf:{tmp_path / 'whole'}", None, True, {})


def test_a_lower_precision_leaves_what_is_no_weight_alone(tmp_path: Path) -> None:
    pruned("dinov3").save_pretrained(tmp_path)
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    rotary = FAMILY.sites(model)[0].attention.rotary
    assert (model.dtype, rotary.dims.dtype, model.rope_embeddings.inv_freq.dtype) == (
        torch.bfloat16,
        torch.int64,
        torch.float32,
    )
    expected = pruned("dinov3")(IMAGES).pooler_output
    assert close(expected, model(IMAGES.bfloat16()).pooler_output.double(), 0.1)


def test_training_goes_on_after_loading(tmp_path: Path) -> None:
    pruned("vit").float().save_pretrained(tmp_path)
    model = transformers.AutoModelForImageClassification.from_pretrained(tmp_path).train()
    nn.functional.cross_entropy(model(IMAGES.float()).logits, torch.tensor([0, 1])).backward()
    assert all(p.grad is not None for p in model.parameters() if all(p is not other for other in FAMILY.unread(model)))
