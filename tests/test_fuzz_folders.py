"""Folders that were edited, cut short or damaged in any way: they load as they were, or are refused with a reason."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import hiap
from conftest import images, make
from hiap.pruning.saving import DIGEST, TENSORS_DIGEST, _digest

pytestmark = pytest.mark.slow

CASES = 240
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 0.5, -0.5, 1e300, float("nan"), float("inf"), 50_000_000, 10**30),
    *("", "x", "avg", "map", "LayerNorm", [], {}, [0, 0], [1] * 50, [[1, 2], [3]], {"a": {"b": [None]}}, ["a"] * 7),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "model"
    model = make("layer_scale", img_size=8, patch_size=4, embed_dim=8, depth=2, num_heads=2, embed_norm_layer="rmsnorm")
    counts = {"heads": [[1], None], "neurons": [[0, 3, 5], 0], "value_dims": [[[1, 3]], []], "qk_dims": [[3], []]}
    compact = hiap.extract(model, hiap.Topology.from_counts(model, **counts), round_to=2)
    hiap.save(compact, folder, class_names=list("abcdefg"))
    return folder


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in nested JSON values."""
    keys = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, inner in keys for found in [(value, key), *places(inner)]]


def mutate(chance: random.Random, folder: Path) -> bool:
    """Change a folder; True if the digest of the configuration was renewed, so that other logits are rightful."""
    kind = chance.choice(["config", "sealed", "sealed", "sealed", "bytes", "cut", "exchanged"])
    if kind in ("config", "sealed"):
        config = json.loads((folder / "config.json").read_text())
        found = places(config)
        part = chance.choice(["skeleton", "blocks", "dense", "topology", "pretrained_cfg", None])
        found = places(config[part]) if part else found
        for container, key in chance.sample(found, chance.choice([1, 1, 1, 2])):
            what = chance.choice(["replace", "replace", "replace", "remove", "repeat"])
            if what == "remove" and isinstance(container, dict):
                container.pop(key, None)
            elif what == "repeat" and isinstance(container, list):
                container.append(container[0] if container else 1)
            elif isinstance(container, dict) or key < len(container):
                container[key] = chance.choice(ODD)
        (folder / "config.json").write_text(json.dumps(config))
        if kind == "sealed":
            file = folder / "model.safetensors"
            with safe_open(file, "pt") as weights:
                metadata = {**weights.metadata(), DIGEST: _digest(config)}
            save_file(load_file(file), file, metadata)
        return kind == "sealed"
    file = folder / chance.choice(["config.json", "model.safetensors", "model.safetensors"])
    content = bytearray(file.read_bytes())
    if kind == "bytes":
        for _ in range(chance.choice([1, 1, 5])):
            content[chance.randrange(min(len(content), chance.choice([16, 10**9])))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[chance.randrange(len(content)) :]
    else:
        content = bytearray(chance.choice([b"", b"{}", b"[]", b"null", b"\xff\xfe", bytes(200), b"[" * 5000]))
    file.write_bytes(content)
    return False


@pytest.mark.parametrize("seeds", [range(start, start + 20) for start in range(0, CASES, 20)], ids=lambda s: s.start)
def test_changed_folders_load_as_they_were_or_are_refused(seeds: range, saved: Path, tmp_path: Path) -> None:
    expected = hiap.load(saved)
    x = images(expected)
    expected = expected(x)
    for seed in seeds:
        folder = tmp_path / "model"
        shutil.copytree(saved, folder)
        sealed = mutate(random.Random(seed), folder)
        try:
            loaded = hiap.load(folder)
        except hiap.CheckpointError:
            pass
        except Exception as error:
            raise AssertionError(f"the folder of seed {seed}") from error
        else:
            assert sealed or torch.equal(loaded(x), expected), f"the folder of seed {seed}"
        shutil.rmtree(folder)


def test_every_bit_of_the_weights_counts(saved: Path, tmp_path: Path) -> None:
    content = (saved / "model.safetensors").read_bytes()
    shutil.copytree(saved, tmp_path / "model")
    start = 8 + int.from_bytes(content[:8], "little")
    for place in (start, (start + len(content)) // 2, len(content) - 1):
        flipped = bytearray(content)
        flipped[place] ^= 1
        (tmp_path / "model/model.safetensors").write_bytes(flipped)
        with pytest.raises(hiap.CheckpointError, match="is damaged: its tensors are not those that were saved"):
            hiap.load(tmp_path / "model")


def test_folders_without_a_digest_of_their_tensors_load(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "model")
    file = tmp_path / "model/model.safetensors"
    with safe_open(file, "pt") as weights:
        metadata = weights.metadata()
    del metadata[TENSORS_DIGEST]
    save_file(load_file(file), file, metadata)
    model = hiap.load(saved)
    assert torch.equal(hiap.load(tmp_path / "model")(images(model)), model(images(model)))


SEALED: dict[str, tuple[tuple[Any, ...], Any, str]] = {
    "patch of no size": (("skeleton", "arguments", "patch_size"), 0, "has patch_size '0', which no model has"),
    "pool of no kind": (("skeleton", "arguments", "global_pool"), [], r"has global_pool '\[\]', which no model has"),
    "endless depth": (("skeleton", "arguments", "depth"), 100_000, "has depth '100000', which no model has"),
    "another depth": (("skeleton", "arguments", "depth"), 3, "drop_path must be 3 pairs of rates"),
    "heads that do not divide": (("skeleton", "arguments", "num_heads"), 3, "3 heads, which do not divide the width 8"),
    "unknown argument": (("skeleton", "arguments", "rope"), True, "has an unknown argument rope"),
    "wide block": (("blocks", 0, "neurons"), 50_000_000, r"block 0 has Widths\(.*neurons=50000000\), more than the"),
    "wide origin": (("dense", 0, "heads"), -1, "heads must be a count; found '-1'"),
    "wide topology": (("topology", "dense", 0, "neurons"), 50_000_000, "50000.* units; at most 4194304 are read"),
    "round_to": (("round_to",), "8", "round_to must be a count; found '8'"),
    "size of the input": (("pretrained_cfg", "input_size"), "big", "has input_size 'big', which timm cannot read"),
    "mean": (("pretrained_cfg", "mean"), 0.5, "has mean '0.5', which timm cannot read"),
    "numbers for names": (("class_names",), [1] * 7, "class_names must be a list of 7 names"),
}


@pytest.mark.parametrize("name", SEALED)
def test_impossible_values_are_named(name: str, saved: Path, tmp_path: Path) -> None:
    keys, value, message = SEALED[name]
    shutil.copytree(saved, tmp_path / "model")
    config = json.loads((saved / "config.json").read_text())
    container = config
    for key in keys[:-1]:
        container = container[key]
    container[keys[-1]] = value
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    file = tmp_path / "model/model.safetensors"
    with safe_open(file, "pt") as weights:
        metadata = {**weights.metadata(), DIGEST: _digest(config)}
    save_file(load_file(file), file, metadata)
    with pytest.raises(hiap.CheckpointError, match=message):
        hiap.load(tmp_path / "model")
