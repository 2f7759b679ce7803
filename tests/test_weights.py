"""Weights as they come: wrapped, nested, of another model, or none at all."""

import json
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

import hiap
from conftest import SMALL
from hiap.models.weights import check_weights, create_model, read_weights, unwrapped
from hiap.training.config import Config, ConfigError
from hiap.training.setup import dense_model, other_teacher

NAME = "vit_tiny_patch16_224"
DINO = "vit_small_patch14_reg4_dinov2"


def state_of(name: str = NAME, **arguments: object) -> dict[str, Tensor]:
    torch.manual_seed(0)
    return timm.create_model(name, **{**SMALL, **arguments}).state_dict()


def small(**given: object) -> Config:
    return Config(**{"model": NAME, "model_args": dict(SMALL), "pretrained": False, "target": "50%", **given})


def refusal(state: dict[str, Tensor], path: Path, **given: object) -> str:
    save_file(state, path / "file.safetensors")
    with pytest.raises(ConfigError) as caught:
        dense_model(small(weights=str(path / "file.safetensors"), **given))
    text = str(caught.value).replace(str(path) + "/", "")
    assert text.count("\n") <= 2
    return text


@pytest.mark.parametrize(
    "prefix", ["_orig_mod.", "module.", "model.", "backbone.", "encoder.", "module._orig_mod.", "model.backbone."]
)
@pytest.mark.parametrize("nested", [None, "state_dict", "model"])
def test_the_prefix_of_a_wrapper_is_taken_off(prefix: str, nested: str | None, tmp_path: Path) -> None:
    state = state_of()
    wrapped = {prefix + name: tensor for name, tensor in state.items()}
    torch.save(wrapped if nested is None else {nested: wrapped, "epoch": 3}, tmp_path / "file.pth")
    model = dense_model(small(weights=str(tmp_path / "file.pth")))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_blocks_compiled_one_by_one_and_a_classifier_beside_the_backbone_load(tmp_path: Path) -> None:
    state = state_of()
    parts = {re.sub(r"^(blocks\.\d+\.)", r"\1_orig_mod.", name): tensor for name, tensor in state.items()}
    assert sum("_orig_mod" in name for name in parts) == 36
    save_file(
        {name if name.startswith("head") else f"backbone.{name}": tensor for name, tensor in parts.items()},
        tmp_path / "file.safetensors",
    )
    model = dense_model(small(weights=str(tmp_path / "file.safetensors")))
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_prefix_that_few_tensors_have_or_that_would_merge_two_stays() -> None:
    one = torch.ones(1)
    for names in (["model.a", "b", "c"], ["model.a", *(f"model.{i}" for i in range(19)), "a"]):
        assert list(unwrapped(dict.fromkeys(names, one))) == names
    assert list(unwrapped(dict.fromkeys(["model.model.a", "model.model.b"], one))) == ["a", "b"]


def test_a_teacher_whose_own_names_begin_like_a_wrapper_keeps_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = timm.create_model("resnet18", num_classes=7)

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = inner
            self.num_classes, self.pretrained_cfg = 7, inner.pretrained_cfg

    save_file(Wrapped().state_dict(), tmp_path / "file.safetensors")
    monkeypatch.setattr("timm.create_model", lambda *names, **options: Wrapped())
    config = small(teacher="resnet18", teacher_weights=str(tmp_path / "file.safetensors"))
    assert isinstance(other_teacher(config, 7, 3), Wrapped)


class TestMisfits:
    """Weights for another model than the one that was named."""

    def test_another_image_size(self, tmp_path: Path) -> None:
        assert refusal(state_of(img_size=64), tmp_path) == (
            "file.safetensors does not fit the model vit_tiny_patch16_224: size of pos_embed is 1x65x24 in the file, "
            "1x17x24 in the model\n  these look like weights for img_size 64: pass --img-size 64"
        )

    def test_the_image_size_counts_registers_where_they_have_positions(self, tmp_path: Path) -> None:
        text = refusal(state_of(DINO, img_size=48), tmp_path, model=DINO)
        assert text.endswith("pass --img-size 48")  # no_embed_class: positions of the patches alone
        own = {"model_args": {**SMALL, "reg_tokens": 4}}
        assert refusal(state_of(img_size=48, reg_tokens=4), tmp_path, **own).endswith("pass --img-size 48")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("name", "arguments", "asked", "made_of"),
        [
            ("vit_small_patch16_224", {}, "vit_tiny_patch16_224", "width 384, 12 blocks, patch 16"),
            ("deit_small_patch16_224", {}, "deit_base_patch16_224", "width 384, 12 blocks, patch 16"),
            ("vit_tiny_patch16_224", {}, "vit_base_patch32_224", "width 192, 12 blocks, patch 16"),
            (DINO, {"img_size": 126}, "vit_small_patch16_224", "width 384, 12 blocks, patch 14"),
            ("deit_tiny_distilled_patch16_224", {}, "deit_tiny_patch16_224", "width 192, 12 blocks, patch 16"),
            ("deit_tiny_patch16_224", {}, "deit_tiny_distilled_patch16_224", "width 192, 12 blocks, patch 16"),
        ],
    )
    def test_another_model(self, name: str, arguments: dict, asked: str, made_of: str, tmp_path: Path) -> None:
        torch.save(timm.create_model(name, **arguments).state_dict(), tmp_path / "file.pth")
        with pytest.raises(ConfigError) as caught:
            dense_model(Config(model=asked, weights=str(tmp_path / "file.pth"), target="50%"))
        at = f" --img-size {arguments['img_size']}" if arguments else ""
        lines = str(caught.value).splitlines()
        assert lines[1:] == [f"  looks like {name} ({made_of}): pass --model {name}{at}"]
        again = Config(model=name, weights=str(tmp_path / "file.pth"), target="50%", **arguments)
        assert dense_model(again).num_classes == (0 if name == DINO else 1000)  # DINOv2 has no classifier

    def test_missing_and_unknown_tensors_are_counted(self, tmp_path: Path) -> None:
        state = state_of()
        for name in [name for name in state if name.startswith("blocks.2.")]:
            state["extra." + name] = state.pop(name)
        assert refusal(state, tmp_path) == (
            "file.safetensors does not fit the model vit_tiny_patch16_224: the file lacks blocks.2.norm1.weight, "
            "blocks.2.norm1.bias, blocks.2.attn.qkv.weight (and 9 more); the file holds unknown "
            "extra.blocks.2.attn.proj.bias, extra.blocks.2.attn.proj.weight, extra.blocks.2.attn.qkv.bias (and 9 more)"
        )

    @pytest.mark.parametrize("kind", [NAME, "deit_tiny_distilled_patch16_224"])
    def test_weights_without_a_classifier_make_a_model_without_one(self, kind: str, tmp_path: Path) -> None:
        state = {name: tensor for name, tensor in state_of(kind).items() if not name.startswith("head")}
        save_file(state, tmp_path / "file.safetensors")
        model = dense_model(small(model=kind, weights=str(tmp_path / "file.safetensors")))
        assert model.num_classes == 0 and model.state_dict().keys() == state.keys()

    def test_a_classifier_without_a_width(self, tmp_path: Path) -> None:
        text = refusal({**state_of(), "head.weight": torch.tensor(1.0)}, tmp_path)
        assert "size of head.weight is a number in the file, 7x24 in the model" in text


def truncated(path: Path) -> None:
    torch.save(state_of(), path)
    path.write_bytes(path.read_bytes()[:20000])


def with_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")


def with_optimiser(path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    optimiser = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 2)).sum().backward()
    optimiser.step()
    torch.save(optimiser.state_dict(), path)


NO_WEIGHTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "text": ("a.pth", lambda p: p.write_text("no weights"), ""),
    "empty": ("a.pth", lambda p: p.write_bytes(b""), ""),
    "bytes": ("a.pth", lambda p: p.write_bytes(bytes(range(256)) * 9), ""),
    "an image": ("a.png", lambda p: Image.new("RGB", (9, 9)).save(p), ""),
    "JSON": ("a.json", lambda p: p.write_text(json.dumps({"a": 1})), ""),
    "a list": ("a.pth", lambda p: torch.save([torch.ones(1)], p), "it holds a list"),
    "a plain pickle": ("a.pkl", lambda p: p.write_bytes(pickle.dumps([1, 2])), ""),
    "a zip": ("a.zip", with_zip, ""),
    "a file cut short": ("a.pth", truncated, ""),
    "a safetensors file of text": ("a.safetensors", lambda p: p.write_text("no weights here"), ""),
    "a folder": ("a.pth", lambda p: p.mkdir(), ""),
    "a safetensors folder": ("a.safetensors", lambda p: p.mkdir(), ""),
    "nothing": ("a.pth", lambda p: None, "No such file"),
    "an optimiser": ("a.pth", with_optimiser, "it holds the state of an optimiser"),
    "no tensors": ("a.pth", lambda p: torch.save({}, p), "it holds nothing"),
    "a number": (
        "a.pth",
        lambda p: torch.save({"a": torch.ones(1), "epoch": 3}, p),
        "'epoch' is of type int, not a tensor",
    ),
    "a number for a name": ("a.pth", lambda p: torch.save({1: torch.ones(1)}, p), "the name 1 is not text"),
    "sparse": ("a.pth", lambda p: torch.save({"a": torch.eye(2).to_sparse()}, p), "'a' is sparse"),
    "meta": ("a.pth", lambda p: torch.save({"a": torch.ones(2, device="meta")}, p), "'a' is sparse, quantised or wi"),
    "nested twice": (
        "a.pth",
        lambda p: torch.save({"model": {"model": {}}}, p),
        "'model' is of type dict, not a tensor",
    ),
}


@pytest.mark.parametrize("case", NO_WEIGHTS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_without_weights_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, write, reason = NO_WEIGHTS[case]
    write(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        read_weights(str(tmp_path / name))
    text = str(caught.value)
    assert text.startswith(
        f"{tmp_path / name} does not hold weights: a .safetensors or .pth file of tensors is needed ("
    )
    assert reason in text and "\n" not in text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(value: float, tmp_path: Path) -> None:
    state = state_of()
    state["blocks.1.mlp.fc1.bias"][3] = value
    torch.save(state, tmp_path / "file.pth")
    message = r"file.pth holds values that are not finite, in blocks.1.mlp.fc1.bias: the run that wrote it has diverged"
    with pytest.raises(ConfigError, match=message):
        read_weights(str(tmp_path / "file.pth"))
    state["norm.weight"][:] = value
    with pytest.raises(ConfigError, match=r"in blocks.1.mlp.fc1.bias \(and 1 more\)"):
        check_weights(state, "file.pth")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"num_heads": 5}, "divisible"),
        ({"num_heads": 0}, "zero"),
        ({"patch_size": 0}, ""),
        ({"patch_size": [4]}, ""),
        ({"embed_dim": -8}, ""),
        ({"embed_dim": "wide"}, ""),
        ({"act_layer": "nonsense"}, "nonsense"),
        ({"norm_layer": "nonsense"}, "nonsense"),
        ({"global_pool": "nonsense"}, ""),
        ({"mlp_ratio": 1e308}, ""),
        ({"nonsense": 1}, "unexpected keyword argument 'nonsense'"),
        ({1: 2}, "keywords must be strings"),
        ({"depth": 100000}, "depth must be at most 256; found 100000"),
        ({"embed_dim": 10**9, "num_heads": 1}, ""),
        ({"embed_dim": 10**5, "num_heads": 1}, r"its weights would take \d+ GB, the memory here is \d+ GB"),
        ({"num_classes": 10**12}, r"its weights would take \d+ GB"),
        ({"img_size": 10**7}, r"its weights would take \d+ GB"),
        ({"checkpoint_path": "a.pth"}, "checkpoint_path is not read; pass --weights FILE"),
        ({"embed_dim": [[[[[[[[1]]]]]]]]}, ""),
    ],
)
@pytest.mark.parametrize("pretrained", [False, True])
def test_arguments_that_timm_cannot_take_are_said_with_the_reason(
    arguments: dict, reason: str, pretrained: bool
) -> None:
    with pytest.raises(ConfigError, match=rf"^timm cannot make the model {NAME} with \{{.*{reason}") as caught:
        create_model(NAME, pretrained, arguments)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_a_model_is_the_same_whether_its_size_is_checked_first_or_not() -> None:
    states = []
    for make in (lambda: create_model(NAME, False, SMALL), lambda: timm.create_model(NAME, **SMALL)):
        torch.manual_seed(3)
        states.append(make().state_dict())
    assert all(torch.equal(tensor, states[1][name]) for name, tensor in states[0].items())
    assert hiap.macs(create_model(NAME, False, SMALL)) > 0
