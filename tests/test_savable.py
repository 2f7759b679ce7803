"""What cannot be saved is refused, before training where possible."""

from functools import partial
from pathlib import Path

import pytest
import timm
import torch
from torch import nn

import hiap
from conftest import images, make
from hiap.models.timm import TIMM
from hiap.pruning.saving import check_savable
from test_checkpoint import compact_of
from test_gates import granularities


class TestRefusesToSave:
    def test_models_that_are_not_compact(self, tmp_path: Path) -> None:
        for model in (make(), hiap.attach(make()), hiap.attach(compact_of())):
            with pytest.raises(hiap.CheckpointError, match=r"make one with hiap\.extract"):
                hiap.save(model, tmp_path / "model")
        assert not list(tmp_path.iterdir())

    def test_models_the_recipe_cannot_express(self, tmp_path: Path) -> None:
        other_head = compact_of()
        other_head.head = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 7)).double()
        other_norm = compact_of()
        other_norm.norm.eps = 1e-7
        other_scale = compact_of(seed=1)
        next(b for b in other_scale.blocks if hasattr(b.attn, "head_dim")).attn.head_dim = 9
        other_drop = compact_of()
        next(b for b in other_drop.blocks if hasattr(b.mlp, "drop2")).mlp.drop2.p = 0.5
        own_class = compact_of()
        own_class.__class__ = type("MyViT", (type(own_class),), {})
        for model in (other_head, other_norm, other_scale, other_drop, own_class):
            with pytest.raises(hiap.CheckpointError, match="recipe"):
                hiap.save(model, tmp_path / "model")
        assert not list(tmp_path.iterdir())

    def test_into_a_folder_that_holds_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(hiap.CheckpointError, match=r"holds 'notes\.txt', which saving would remove"):
            hiap.save(compact_of(), tmp_path)
        with pytest.raises(hiap.CheckpointError, match="is a file; name a folder"):
            hiap.save(compact_of(), tmp_path / "notes.txt")
        other = tmp_path / "other"
        other.mkdir()
        (other / "config.json").write_text('{"model_type": "vit"}')
        with pytest.raises(hiap.CheckpointError, match="another project's"):
            hiap.save(compact_of(), other)
        assert (other / "config.json").read_text() == '{"model_type": "vit"}'

    def test_into_the_working_folder_or_below_a_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(hiap.CheckpointError, match="is or holds the working folder"):
            hiap.save(compact_of(), ".")
        Path("file").write_text("mine")
        with pytest.raises(hiap.CheckpointError, match="cannot be created as a folder"):
            hiap.save(compact_of(), "file/model")
        hiap.save(compact_of(), "model/")
        assert hiap.load("model").training is False

    def test_wrong_class_names(self, tmp_path: Path) -> None:
        with pytest.raises(hiap.CheckpointError, match="2 class names for 7 classes"):
            hiap.save(compact_of(), tmp_path / "model", class_names=["cat", "dog"])

    def test_weights_that_are_not_finite(self, tmp_path: Path) -> None:
        compact = compact_of()
        with torch.no_grad():
            compact.head.weight[0, 0] = torch.nan
        with pytest.raises(hiap.CheckpointError, match="weights are not finite"):
            hiap.save(compact, tmp_path / "model")
        assert not (tmp_path / "model").exists()


ODD = {"act_layer": "hard_swish", "norm_layer": "rmsnorm", "embed_norm_layer": "layernorm", "final_norm": False}


DROPS = {"proj_drop_rate": 0.1, "attn_drop_rate": 0.2, "drop_path_rate": 0.3, "init_values": 0.1}


@pytest.mark.parametrize("left", [0, None])
@pytest.mark.parametrize("branches", [["heads"], ["neurons"], ["heads", "neurons"]])
def test_what_is_gone_everywhere_is_known_from_the_dense_model(
    branches: list[str], left: int | None, tmp_path: Path
) -> None:
    model = make(**ODD, **DROPS)
    compact = hiap.extract(model, hiap.Topology.from_counts(model, **{name: [left] * 3 for name in branches}))
    assert compact.hiap.recipe == TIMM.describe(model)
    hiap.save(compact, tmp_path / "model")
    loaded = hiap.load(tmp_path / "model")
    assert torch.equal(loaded(images(model)), compact(images(model))) and loaded.hiap == compact.hiap
    again = hiap.extract(loaded, hiap.Topology.from_counts(loaded, heads=[None] * 3, neurons=[None] * 3))
    again.reset_classifier(5, "avg")
    again.set_input_size((40, 48))
    again.double()
    hiap.save(again, tmp_path / "again")
    loaded = hiap.load(tmp_path / "again")
    assert torch.equal(loaded(images(again)), again(images(again)))
    known = {"act_layer": "Hardswish", "norm_layer": "RmsNorm", "embed_norm_layer": "LayerNorm", "attn_drop_rate": 0.2}
    now = {"num_classes": 5, "img_size": [40, 48], "global_pool": "avg"}
    assert (known | now).items() <= loaded.hiap.recipe["arguments"].items()


class TestSavable:
    def test_every_kind(self, kind: str) -> None:
        check_savable(make(kind))
        check_savable(hiap.attach(make(kind), granularities(kind)))

    def test_compact_models_and_models_without_weights(self) -> None:
        check_savable(compact_of())
        with torch.device("meta"):
            check_savable(timm.create_model("vit_base_patch16_224"))

    @pytest.mark.parametrize(
        "options",
        [
            {"proj_drop_rate": 0},
            {"act_layer": "hard_swish"},
            {"norm_layer": "simplenorm"},
            {"embed_norm_layer": "rmsnorm"},
            {"mlp_ratio": 1.7},
        ],
        ids=str,
    )
    def test_what_can_be_saved(self, options: dict, tmp_path: Path) -> None:
        check_savable(make(**options))
        compact = compact_of(**options)
        hiap.save(compact, tmp_path / "model")
        assert torch.equal(hiap.load(tmp_path / "model")(images(compact)), compact(images(compact)))

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"act_layer": partial(nn.LeakyReLU, 0.2)}, r"the activation LeakyReLU\(negative_slope=0\.2\) has no name"),
            ({"norm_layer": partial(nn.LayerNorm, bias=False)}, r"blocks\.0\.norm1 is LayerNorm\(.*bias=False\), the"),
            ({"drop_rate": True}, "has drop_rate 'True', which no model has"),
        ],
        ids=["activation", "norm", "rate"],
    )
    def test_what_cannot(self, options: dict, message: str) -> None:
        with pytest.raises(hiap.CheckpointError, match=message):
            check_savable(make(**options))

    def test_parts_that_were_exchanged(self) -> None:
        other_norm, other_head, other_cfg = make("rms_norm"), make(), make()
        other_norm.blocks[1].norm2.eps = 1e-3
        other_head.head = nn.Sequential(nn.Linear(24, 8), nn.Linear(8, 7))
        other_cfg.pretrained_cfg = {"input_size": torch.Size([3, 8, 8]), "dtype": torch.float16}
        for model, message in (
            (other_norm, r"blocks\.1\.norm2 is RmsNorm\(eps=0\.001\), the recipe gives RmsNorm\(eps=1e-06\)"),
            (
                other_head,
                r"head is Sequential\(\), the recipe gives Linear\(in_features=24, out_features=7, bias=True\)",
            ),
            (other_cfg, "pretrained_cfg cannot be written as JSON: Object of type dtype"),
        ):
            with pytest.raises(hiap.CheckpointError, match=message):
                check_savable(model)
