"""What a run logs for its report: it says what happened, survives a stop, and leaves training alone."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file

import hiap
from hiap.nn.compact import Widths
from hiap.pruning.topology import Topology
from hiap.training.loop import Run
from hiap.training.mistakes import thumbnail
from hiap.training.phases import Search
from hiap.training.run_folder import starts
from hiap.training.snapshots import BINS, snapshot, unpack
from runs import noise_data, signalled, tiny

MODEL = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1, "num_classes": 10}


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def started(folder: Path, stop: int | None = None) -> Run:
    """A run of four epochs of four steps, or one that goes on; it is stopped before this step."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **MODEL)
    config = tiny(epochs=4, eval_every=1, ema=0.9, distill_features=1.0, checkpoint_every=3)
    run = Run(config, folder, folder.exists(), noise_data(1024, 8), model=model)
    step = run.train_step

    def until(*batch: torch.Tensor) -> dict[str, torch.Tensor]:
        signalled(run, stop)
        return step(*batch)

    run.train_step = until
    return run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run that went through, and the same stopped in the search and taken up."""
    folder = tmp_path_factory.mktemp("snapshots")
    started(folder / "whole").go()
    with pytest.raises(KeyboardInterrupt):
        started(folder / "stopped", 5).go()
    with (folder / "stopped/gates.jsonl").open("a") as file:
        file.write('{"step": 7, "heads": [0, 0]}\n{"step"')  # of steps that are done again
    started(folder / "stopped").go()
    return folder / "whole", folder / "stopped"


def test_decisions_come_back_from_a_snapshot_as_they_were() -> None:
    model = timm.create_model("vit_tiny_patch16_224", **MODEL)
    topology = Topology.from_counts(
        model,
        heads=[[1], None],
        value_dims=[[[0, 3, 7]], []],
        qk_dims=[[[2]], []],
        neurons=[None, [5, 63]],
    )
    hiap.attach(model)
    found = snapshot(model, topology)
    masks = unpack(found["decisions"], topology.dense)
    assert {kind: np.flatnonzero(mask).tolist() for kind, mask in masks.items()} == {
        "heads": [1],
        "value_dims": [8, 11, 15],
        "qk_dims": [10],
        "ffns": [1],
        "neurons": [64 + 5, 64 + 63],
    }
    assert [found[kind] for kind in ("heads", "value_dims", "qk_dims", "neurons")] == [[1, 0], [3, 0], [1, 0], [0, 2]]
    assert found["histograms"]["head"] == [0] * (BINS - 1) + [4]
    with pytest.raises(ValueError, match="packed decisions have 25 bytes, the dense model has 99 units"):
        unpack(found["decisions"], topology.dense[:1])


def test_a_run_logs_its_gates_from_the_first_step_to_the_decision(runs: tuple[Path, Path]) -> None:
    lines, report = lines_of(runs[0] / "gates.jsonl"), json.loads((runs[0] / "report.json").read_text())
    dense = [Widths(**widths) for widths in report["dense_widths"]]
    assert [line["step"] for line in lines] == list(range(report["freeze_step"] + 1))
    assert lines[0]["hard"] == 1.0 and lines[0]["heads"] == [2, 2] and lines[0]["neurons"] == [64, 64]
    assert all(sum(bins) == 128 for line in lines for kind, bins in line["histograms"].items() if kind == "neuron")
    kept = hiap.load(runs[0] / "compact").hiap.topology
    assert (
        lines[-1]["decisions"]
        == snapshot(hiap.attach(timm.create_model("vit_tiny_patch16_224", **MODEL)), kept)["decisions"]
    )
    assert unpack(lines[-1]["decisions"], dense)["neurons"].sum() == sum(
        len(block.neurons or ()) for block in kept.blocks
    )
    assert lines[-1]["hard"] == report["macs"] / report["dense_macs"] <= lines[-1]["target"] == 0.6
    metrics = lines_of(runs[0] / "metrics.jsonl")
    assert ["soft_top1" in line for line in metrics] == [
        True,
        False,
        False,
        False,
    ]  # the second epoch ends in the freeze


def test_a_run_that_was_stopped_logs_the_same(runs: tuple[Path, Path]) -> None:
    assert (runs[0] / "gates.jsonl").read_bytes() == (runs[1] / "gates.jsonl").read_bytes()
    assert (runs[0] / "mistakes.json").read_bytes() == (runs[1] / "mistakes.json").read_bytes()
    assert [len(starts(run)) for run in runs] == [1, 2]


def test_logging_leaves_training_alone(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiap.training.phases.log_snapshot", lambda *arguments: None)
    monkeypatch.setattr(Search, "soft_scores", lambda self, epoch, stop: {})
    started(tmp_path / "run").go()
    assert not (tmp_path / "run/gates.jsonl").exists()
    one, two = (load_file(run / "compact/model.safetensors") for run in (runs[0], tmp_path / "run"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_neighbours_of_the_target_cost_and_lose_what_they_should(runs: tuple[Path, Path]) -> None:
    report = json.loads((runs[0] / "report.json").read_text())
    below, at, above = report["neighbours"]
    assert at["cost"] == report["macs"] and at["loss"] == 1.0
    assert below["cost"] <= below["allowed"] == pytest.approx(0.59 * report["dense_macs"])
    assert above["cost"] <= above["allowed"] and below["loss"] >= 1.0 >= above["loss"]


def test_answers_count_every_validation_image_once(runs: tuple[Path, Path]) -> None:
    report = json.loads((runs[0] / "report.json").read_text())
    answers, pictures = report["answers"], json.loads((runs[0] / "mistakes.json").read_text())
    assert sum(answers.values()) == 16
    assert 100 * (answers["both"] + answers["compact_only"]) / 16 == report["top1"]
    assert 100 * (answers["both"] + answers["dense_only"]) / 16 == report["dense_top1"]
    assert len(pictures) == answers["dense_only"]
    assert all(one["label"] == one["dense"] != one["compact"] for one in pictures)


def test_a_thumbnail_shows_the_pixels_that_were_normalised() -> None:
    pixels = torch.zeros(3, 4, 4)
    pixels[0, :2] = 2.0
    png = thumbnail(pixels, ((0.5, 0.0, 0.0), (0.25, 1.0, 1.0)))
    image = Image.open(io.BytesIO(base64.b64decode(str(png)))).convert("RGB")
    assert (
        image.size == (112, 112) and image.getpixel((5, 5)) == (255, 0, 0) and image.getpixel((5, 100))[0] in (127, 128)
    )
    assert thumbnail(torch.zeros(4, 8, 8), ((0.0,) * 4, (1.0,) * 4)) is None
