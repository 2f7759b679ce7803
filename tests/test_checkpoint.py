import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import hiap
from conftest import images, make
from hiap.models.timm import TIMM
from test_gates import granularities, scatter_logits


def compact_of(kind: str = "augreg", seed: int = 3, **overrides: object) -> nn.Module:
    model = hiap.attach(make(kind, **overrides), granularities(kind))
    scatter_logits(model, seed)
    return hiap.extract(model, round_to=3)


def test_save_and_load(kind: str, tmp_path: Path) -> None:
    for seed in range(3):
        compact = compact_of(kind, seed)
        hiap.save(compact, tmp_path / "model")
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]
        assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]
        loaded = hiap.load(tmp_path / "model")
        x = images(compact)
        assert torch.equal(loaded(x), compact(x)) and not loaded.training
        assert loaded.state_dict().keys() == compact.state_dict().keys()
        assert str(loaded.train()) == str(compact.train())  # dropout and drop path come back too
        assert loaded.hiap == compact.hiap and loaded.pretrained_cfg == compact.pretrained_cfg
        assert hiap.macs(loaded) == hiap.macs(compact)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    compact = compact_of().to(dtype)
    hiap.save(compact, tmp_path / "model")
    assert {p.dtype for p in hiap.load(tmp_path / "model").parameters()} == {dtype}


def test_what_was_changed_since_extraction_is_saved(tmp_path: Path) -> None:
    compact = compact_of("siglip_gap")
    compact.reset_classifier(5)
    compact.set_input_size((40, 48))
    compact.double()  # older timm makes the new classifier in float32
    hiap.save(compact, tmp_path / "model", class_names=np.array(list("abcde")))
    loaded = hiap.load(tmp_path / "model")
    assert torch.equal(loaded(images(compact)), compact(images(compact)))
    assert loaded.class_names == list("abcde")
    hiap.save(loaded, tmp_path / "again")
    assert hiap.load(tmp_path / "again").class_names == list("abcde")


def test_pruned_twice_and_saved(tmp_path: Path) -> None:
    once = hiap.attach(compact_of("dinov2"))
    scatter_logits(once, 5, mean=1.0)
    twice = hiap.extract(once)
    hiap.save(twice, tmp_path / "model")
    assert torch.equal(hiap.load(tmp_path / "model")(images(twice)), twice(images(twice)))


def test_config_says_what_the_model_is(tmp_path: Path) -> None:
    compact = compact_of()
    hiap.save(compact, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert config["format"] == 1 and config["family"] == "timm" and config["round_to"] == 3
    assert config["macs"] == hiap.macs(compact) and config["dense_macs"] == hiap.macs(make())
    larger = hiap.load(tmp_path / "model")
    larger.set_input_size((48, 48))
    hiap.save(larger, tmp_path / "larger")
    found = json.loads((tmp_path / "larger/config.json").read_text())
    assert found["dense_macs"] == hiap.macs(make(img_size=48)) > found["macs"] == hiap.macs(larger)
    assert config["versions"] == {"hiap": hiap.__version__, "torch": torch.__version__, "timm": timm.__version__}
    assert config["logit_difference"] == compact.hiap.logit_difference <= config["tolerance"]
    assert hiap.Topology.from_json(config["topology"]) == compact.hiap.topology
    heads = [b.attn.num_heads if hasattr(b.attn, "num_heads") else None for b in compact.blocks]
    assert [block["heads"] or None for block in config["blocks"]] == heads


def test_timm_creates_it(tmp_path: Path) -> None:
    compact = compact_of()
    hiap.save(compact, tmp_path / "model")
    x = images(compact)
    for pretrained in (False, True):
        model = timm.create_model(f"local-dir:{tmp_path / 'model'}", pretrained=pretrained).eval()
        assert torch.equal(model(x), compact(x))
    model = timm.create_model(f"local-dir:{tmp_path / 'model'}", num_classes=4, img_size=48)
    assert model.num_classes == 4 and model.patch_embed.grid_size == (6, 6)
    with pytest.raises(ValueError, match="num_classes, img_size, features_only and out_indices; found drop_rate"):
        timm.create_model(f"local-dir:{tmp_path / 'model'}", drop_rate=0.1)
    with pytest.raises(ValueError, match="local-dir:FOLDER"):
        timm.create_model("hiap_vit")


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def apply(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))

    return apply


def truncate(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, os.SEEK_END) // 2)


def strip_metadata(folder: Path) -> None:
    save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated weights": (truncate, r"model\.safetensors is damaged or cut short"),
    "empty weights": (lambda f: (f / "model.safetensors").write_bytes(b""), "is damaged or cut short"),
    "weights of another tool": (strip_metadata, r"was not written by hiap\.save"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors"),
    "no config": (lambda f: (f / "config.json").unlink(), r"has no config\.json: it is not a compact model"),
    "cut config": (lambda f: (f / "config.json").write_text('{"format": 1,'), "is not valid JSON"),
    "config is a list": (lambda f: (f / "config.json").write_text("[]"), "another project's"),
    "another project": (lambda f: (f / "config.json").write_text('{"model_type": "vit"}'), "another project's"),
    "unknown format": (edit(lambda c: c.update(format=2)), "has format 2; this version reads 1. Update hiap"),
    "entry missing": (edit(lambda c: c.pop("blocks")), "lacks blocks; it was edited"),
    "width edited": (edit(lambda c: c["blocks"][0].update(neurons=1)), r"config\.json was edited, or belongs to other"),
    "epsilon edited": (edit(lambda c: c["skeleton"]["arguments"].update(norm_eps=0.1)), "was edited"),
    "macs edited": (edit(lambda c: c.update(macs=1)), "was edited"),
    "another family": (edit(lambda c: c.update(family="other")), "names the family 'other'"),
    "wrong class names": (edit(lambda c: c.update(class_names=["a"])), "class_names must be a list of 7 names"),
    "wrong pretrained_cfg": (edit(lambda c: c.update(pretrained_cfg=[1])), "pretrained_cfg must be an object"),
    "deep config": (lambda f: (f / "config.json").write_text("[" * 100_000), "is not valid JSON"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_folders_are_refused(damage: str, tmp_path: Path) -> None:
    break_it, message = DAMAGE[damage]
    hiap.save(compact_of(), tmp_path / "model")
    break_it(tmp_path / "model")
    with pytest.raises(hiap.CheckpointError, match=message):
        hiap.load(tmp_path / "model")


def test_missing_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(hiap.CheckpointError, match="nowhere: no such folder"):
        hiap.load(tmp_path / "nowhere")


def test_files_of_two_models_do_not_mix(tmp_path: Path) -> None:
    hiap.save(compact_of(seed=1), tmp_path / "a")
    hiap.save(compact_of(seed=2), tmp_path / "b")
    (tmp_path / "a/config.json").write_bytes((tmp_path / "b/config.json").read_bytes())
    with pytest.raises(hiap.CheckpointError, match="belongs to other weights"):
        hiap.load(tmp_path / "a")


def test_class_names_may_be_edited(tmp_path: Path) -> None:
    hiap.save(compact_of(), tmp_path / "model")
    edit(lambda c: c.update(class_names=list("abcdefg")))(tmp_path / "model")
    assert hiap.load(tmp_path / "model").class_names == list("abcdefg")


KILLED_SAVE = """
import os, signal, sys
from pathlib import Path
import safetensors.torch
import timm
import hiap

source, *targets = sys.argv[1:]
load, save = hiap.load, hiap.save  # which imports torch
for step, target in enumerate(targets, 1):  # each in a process of its own; what is imported is imported once
    process = os.fork()
    if not process:
        break
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
else:
    sys.exit()
model = load(source)
calls = 0

def killing(original):
    def call(*arguments, **options):
        global calls
        calls += 1
        if calls == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)
    return call

safetensors.torch.save_file = killing(safetensors.torch.save_file)
Path.write_text = killing(Path.write_text)
Path.rename = killing(Path.rename)
save(model, target)
os._exit(0)  # what the first process has yet to print is not printed twice
"""


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_folder_or_none(tmp_path: Path) -> None:
    old, new = compact_of(seed=1), compact_of(seed=2)
    hiap.save(new, tmp_path / "source")
    targets = [tmp_path / f"target{i}" for i in range(5)]  # weights, config, old folder aside, new in place, no kill
    for target in targets:
        hiap.save(old, target)
    command = [sys.executable, "-c", KILLED_SAVE, str(tmp_path / "source"), *map(str, targets)]
    codes = subprocess.run(command, stdout=-1, text=True, check=True, timeout=120).stdout.split()
    states = []
    for target, code in zip(targets, codes, strict=True):
        killed = int(code) == -signal.SIGKILL
        logits = hiap.load(target)(images(old)) if target.exists() else None
        state = "none" if logits is None else "old" if torch.equal(logits, old(images(old))) else "new"
        assert state != "new" or torch.equal(logits, new(images(new)))
        states.append((killed, state))
        hiap.save(new, target)  # and the next save works
        assert torch.equal(hiap.load(target)(images(new)), new(images(new)))
    assert states == [(True, "old"), (True, "old"), (True, "old"), (True, "none"), (False, "new")]


def test_a_failed_save_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = compact_of(seed=1)
    hiap.save(old, tmp_path / "model")

    def full_disk(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(
        hiap.CheckpointError,
        match=r"model cannot be written: .*No space left on device; the model that was there is unchanged",
    ):
        hiap.save(compact_of(seed=2), tmp_path / "model")
    with pytest.raises(hiap.CheckpointError, match=r"new cannot be written: .*No space left.*; nothing was written"):
        hiap.save(compact_of(seed=2), tmp_path / "new")
    assert torch.equal(hiap.load(tmp_path / "model")(images(old)), old(images(old)))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


def test_an_interrupted_save_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = compact_of(seed=1)
    hiap.save(old, tmp_path / "model")
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        hiap.save(compact_of(seed=2), tmp_path / "model")
    assert torch.equal(hiap.load(tmp_path / "model")(images(old)), old(images(old)))


def test_loading_builds_on_the_meta_device(tmp_path: Path) -> None:
    compact = compact_of()
    hiap.save(compact, tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    assert {p.device.type for p in TIMM.build(config["skeleton"]).parameters()} == {"meta"}
    loaded = hiap.load(tmp_path / "model")
    assert all(p.device.type == "cpu" and p.requires_grad for p in loaded.parameters())
    with pytest.raises(RuntimeError, match="gpu"):
        hiap.load(tmp_path / "model", device="gpu")


def test_a_model_without_timms_metadata(tmp_path: Path) -> None:
    model = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, num_classes=7).eval()
    gelu = partial(nn.GELU, approximate="tanh")
    tanh = VisionTransformer(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, act_layer=gelu).eval()
    for dense in (model, tanh):
        compact = hiap.extract(dense, hiap.Topology.from_counts(dense, heads=[1, 2]))
        hiap.save(compact, tmp_path / "model")
        created = timm.create_model(f"local-dir:{tmp_path / 'model'}").eval()
        assert torch.equal(created(images(dense)), compact(images(dense)))


def test_names_of_an_earlier_classifier_are_dropped(tmp_path: Path) -> None:
    hiap.save(compact_of(), tmp_path / "model", class_names=list("abcdefg"))
    loaded = hiap.load(tmp_path / "model")
    loaded.reset_classifier(5)
    hiap.save(loaded.double(), tmp_path / "model")
    assert not hasattr(hiap.load(tmp_path / "model"), "class_names")


def test_folders_of_the_first_release_load() -> None:
    model = hiap.load(Path(__file__).parent / "fixtures/format1")
    assert {p.dtype for p in model.parameters()} == {torch.float16} and model.class_names == ["cat", "dog", "eel"]
    assert model.blocks[1].attn is None and model.hiap.topology.blocks[0].neurons == (0, 3, 5, 6)
    logits = torch.tensor([[0.6483705956567011, 0.4362797233657123, 0.018874689767510944]], dtype=torch.float64)
    model = model.double()
    assert (model(images(model, 1)) - logits).abs().max() < 1e-12
    model = hiap.load(Path(__file__).parent / "fixtures/format1_registers").double()  # layer scale, q/k norm, ragged
    values = [[-0.37473092077975056, 0.19260882462946358, 0.7549932152399076, 0.6396603752621435]]
    difference = model(images(model, 1)) - torch.tensor(values, dtype=torch.float64)
    assert difference.abs().max() < 1e-12 and hiap.macs(model) == 18448


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    compact = compact_of()
    found = set()
    for i in range(8):
        hiap.save(compact, tmp_path / str(i))
        found.add((tmp_path / str(i) / "model.safetensors").read_bytes())
    assert len(found) == 1


def test_files_can_be_read_by_whom_the_umask_allows(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        hiap.save(compact_of(), tmp_path / "model")
    finally:
        os.umask(before)
    modes = [oct(p.stat().st_mode & 0o777) for p in sorted([tmp_path / "model", *(tmp_path / "model").iterdir()])]
    assert modes == ["0o750", "0o640", "0o640"]


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / ".model.writing-abc/new").mkdir(parents=True)
    (tmp_path / ".model.writing-abc/new/config.json").write_text("{")
    (tmp_path / ".model.previous").mkdir()
    (tmp_path / ".model2.writing-abc").mkdir()
    hiap.save(compact_of(), tmp_path / "model")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".model.previous", ".model2.writing-abc", "model"]


def test_a_model_that_a_killed_save_had_set_aside_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = compact_of(seed=1)
    hiap.save(old, tmp_path / "model")
    (tmp_path / ".model.writing-abc/old").mkdir(parents=True)
    (tmp_path / "model").rename(tmp_path / ".model.writing-abc/old/model")

    def full_disk(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full_disk)
    with pytest.raises(hiap.CheckpointError, match="the model that was there is unchanged"):
        hiap.save(compact_of(seed=2), tmp_path / "model")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert torch.equal(hiap.load(tmp_path / "model")(images(old)), old(images(old)))


def test_timm_gives_its_feature_maps(tmp_path: Path) -> None:
    compact = compact_of()
    hiap.save(compact, tmp_path / "model")
    x = images(compact)
    features = timm.create_model(f"local-dir:{tmp_path / 'model'}", features_only=True).eval()
    expected = compact.forward_intermediates(x, indices=3, intermediates_only=True)
    assert [tuple(one.shape) for one in features(x)] == [(2, 24, 4, 4)] * 3
    assert all(torch.equal(a, b) for a, b in zip(features(x), expected, strict=True))
    one = timm.create_model(f"local-dir:{tmp_path / 'model'}", features_only=True, out_indices=[1]).eval()
    assert len(one(x)) == 1 and torch.equal(one(x)[0], expected[1]) and one.feature_info.channels() == [24]


def test_names_go_with_their_classes(tmp_path: Path) -> None:
    compact = compact_of()
    compact.pretrained_cfg = {"num_classes": 7, "label_names": list("abcdefg")}
    hiap.save(compact, tmp_path / "model")
    assert hiap.load(tmp_path / "model").class_names == list("abcdefg")
    other = timm.create_model(f"local-dir:{tmp_path / 'model'}", num_classes=5).double()
    assert not hasattr(other, "class_names")
    hiap.save(other, tmp_path / "other")
    loaded = hiap.load(tmp_path / "other")
    assert not hasattr(loaded, "class_names") and "label_names" not in loaded.pretrained_cfg
    same = hiap.load(tmp_path / "model")
    same.reset_classifier(7)  # as many classes: the names stay unless others are given
    hiap.save(same.double(), tmp_path / "same", class_names=list("hijklmn"))
    assert hiap.load(tmp_path / "same").class_names == list("hijklmn")


def test_where_it_comes_from_reads_in_a_line() -> None:
    text = repr(compact_of().hiap)
    assert text.startswith("Provenance(3 blocks, round_to=3, logit_difference=") and len(text) < 100
