"""Folders of Hugging Face Transformers, and the package itself: there, missing, broken or too old."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import hiap
from hiap.cli.main import main
from hiap.models.transformers import FAMILY
from hiap.models.transformers_parts import library
from hiap.models.weights import trained_model
from small_transformers import BARE, CASES, WIDE, flops, make, pixels, ragged, transformers

pytestmark = pytest.mark.slow


@pytest.fixture
def x() -> torch.Tensor:
    return pixels()


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
            ("empty", {}, "cannot be loaded .* Pass hf: and a folder that save_pretrained wrote"),
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
