"""Files for other runtimes: each is compared with the model's own forward, read by its own runtime."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import hiap
from conftest import make
from hiap.cli.main import main
from hiap.export.exporting import export_model
from hiap.export.formats import FORMATS, SUFFIXES, Opened, find_format
from hiap.export.network import Deployable

pytestmark = pytest.mark.slow

NAMES = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]


def file_of(name: str, folder: Path) -> Path:
    """A file of a format; the test is skipped where its runtime is missing."""
    kind = find_format(name)
    try:
        kind.check()
    except hiap.InputError as error:
        pytest.skip(str(error))
    return folder / f"model{kind.suffix}"


def ragged(**given: Any) -> nn.Module:
    """Unequal q/k and value widths, a block without attention and one without FFN, and a constant branch."""
    model = make("deit_distilled", **given).float()
    dims = {"value_dims": [[3, 5], [], 8], "qk_dims": [[2, 6], [], 4]}
    compact = hiap.extract(
        model, hiap.Topology.from_counts(model, heads=[2, None, 3], neurons=[40, 0, None], **dims), 1
    )
    compact.class_names = NAMES
    return compact


@pytest.fixture(scope="module")
def compact() -> nn.Module:
    return ragged()


@pytest.fixture(scope="module", params=FORMATS)
def exported(request: pytest.FixtureRequest, compact: nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model as a file of each format."""
    file = file_of(request.param, tmp_path_factory.mktemp(request.param))
    export_model(compact, file)
    return file


def open_again(file: Path) -> Opened:
    return find_format(SUFFIXES[file.suffix]).open(file, 1)


@torch.no_grad()
def agree(model: nn.Module, opened: Opened, count: int, allowed: float = 1e-4) -> bool:
    images = torch.randn(count, *hiap.models.registry.family_of(model).input_shape(model))
    expected = hiap.models.family.logits_of(model(images)).numpy()
    found = opened.run(images.numpy())
    return found.shape == expected.shape and np.abs(found - expected).max() <= allowed * np.abs(expected).max()


def test_a_file_computes_what_the_model_does_for_any_number_of_images(compact: nn.Module, exported: Path) -> None:
    opened = open_again(exported)
    assert all(agree(compact, opened, count) for count in (1, 3, 8))


def test_a_file_carries_its_preprocessing_and_class_names(exported: Path) -> None:
    about = json.loads(open_again(exported).about or "")
    assert (
        about["size"] == [32, 32] and about["mean"] == [0.485, 0.456, 0.406] and about["std"] == [0.229, 0.224, 0.225]
    )
    assert (about["interpolation"], about["crop_pct"], about["crop_mode"]) == ("bicubic", 0.9, "center")
    assert about["class_names"] == NAMES and about["classes"] == 7 and about["batch"] == "dynamic"


def test_the_report_beside_a_file_has_its_difference_size_and_times(exported: Path) -> None:
    report, about = json.loads(Path(f"{exported}.json").read_text()), json.loads(open_again(exported).about or "")
    assert {name: report[name] for name in about} == about
    assert report["difference"].keys() == {"1", "2", "7"} and report["tolerance"] == 1e-4
    assert max(report["difference"].values()) <= 1e-5
    files = [file for file in exported.parent.iterdir() if file.suffix != ".json"]
    assert report["bytes"] == sum(file.stat().st_size for file in files)
    assert report["ms"].keys() == {find_format(about["format"]).runtime, "torch"} and min(report["ms"].values()) > 0


def test_images_of_another_size_are_refused_by_the_runtime(exported: Path) -> None:
    opened = open_again(exported)
    with pytest.raises(Exception, match=r"(?s)48.*32|32.*48|== 32"):
        opened.run(np.zeros((1, 3, 48, 48), np.float32))


def test_a_damaged_file_is_refused_in_one_line(exported: Path, tmp_path: Path) -> None:
    cut = tmp_path / exported.name
    cut.write_bytes(exported.read_bytes()[:1000])
    with pytest.raises(hiap.InputError, match="cannot be read by"):
        open_again(cut)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["augreg", "siglip", "features", "all_tokens", "one_channel", "rectangle"])
def test_the_network_that_is_exported_computes_what_the_model_does(kind: str) -> None:
    model = make(kind).float()
    network = Deployable(model)
    images = torch.randn(3, *network.shape)
    assert torch.allclose(network(images), model(images), atol=1e-4 * float(model(images).abs().max()))


def test_a_file_is_scored_like_the_folder_it_came_from(
    exported: Path, compact: nn.Module, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = np.random.default_rng(0)
    for number in range(56):
        place = tmp_path / "photos" / ("train", "val")[number % 2] / NAMES[number % 7]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(chance.integers(0, 255, (40, 36, 3), dtype=np.uint8)).save(place / f"{number}.png")
    hiap.save(compact, tmp_path / "folder")
    scores = []
    for name in (tmp_path / "folder", exported):
        assert (
            main(["evaluate", str(name), "--data", str(tmp_path / "photos"), "--workers", "0", "--batch-size", "5"])
            == 0
        )
        scores.append(capsys.readouterr().out)
    assert scores[0] == scores[1] and scores[0].endswith("28 images\n")
