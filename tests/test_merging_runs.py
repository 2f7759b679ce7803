"""Runs that merge tokens: exact counts, a target that is met, the same bits after a stop, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import hiap
from any_family import close, counted
from conftest import images, make
from hiap.budget.cost import MacCost
from hiap.cli.main import main
from hiap.models.registry import family_of, widths_of
from hiap.pruning.count import macs_of_widths
from hiap.pruning.merging import Merged
from hiap.report.gathering import gather
from hiap.training.loop import prune
from hiap.training.objective import watch_blocks
from runs import TINY, noise_data, pruned_twice, same, tiny
from test_merging import reference

R = 3
SHAPE = {**TINY["model_args"], "patch_size": 2}  # 16 patch tokens
DATA = noise_data(512, 8)


def small() -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=10, **SHAPE)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, hiap.Result, hiap.Result]:
    """Two runs that merge, the second stopped within its recovery and taken up again; and their folder."""
    folder = tmp_path_factory.mktemp("merging_runs")
    return folder, *pruned_twice(small(), DATA, folder, merge_tokens=R, target="50%", keep="best", eval_every=1)


def test_a_run_meets_its_target_with_merging_and_the_share_is_of_the_dense_model_without(runs: Any) -> None:
    folder, result, _ = runs
    model, record, x = result.model, result.record, torch.randn(1, 1, 8, 8)
    assert isinstance(model, Merged) and model.most == R
    assert record["dense_macs"] == counted(small(), x)
    assert record["macs"] == counted(model, x) == hiap.macs(model)
    assert 0.4 < record["macs"] / record["dense_macs"] <= 0.5
    lines = [json.loads(line) for line in (folder / "whole/metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["stage"] == "recover" and lines[-1]["features"] > 0
    assert lines[-1]["hard_macs"] == record["macs"] / record["dense_macs"]
    snapshots = [json.loads(line) for line in (folder / "whole/gates.jsonl").read_text().splitlines()]
    dense = hiap.merge_tokens(small(), R)
    assert snapshots[0]["hard"] == snapshots[0]["allowed"] == counted(dense, x) / record["dense_macs"]
    assert snapshots[-1]["target"] == 0.5 and snapshots[-1]["hard"] == lines[-1]["hard_macs"]


def test_a_run_that_was_stopped_ends_with_the_same_bits(runs: Any) -> None:
    folder, whole, resumed = runs
    assert same(folder / "whole", folder / "stopped")
    assert whole.record["top1"] == resumed.record["top1"]


def test_the_folder_of_a_run_remembers_merging_and_holds_plain_weights(runs: Any) -> None:
    folder, result, _ = runs
    path, x = folder / "whole/compact", torch.randn(2, 1, 8, 8)
    loaded = hiap.load(path)
    with torch.no_grad():
        assert torch.equal(loaded(x), result.model(x))
    assert load_file(path / "model.safetensors").keys() == result.model.model.state_dict().keys()
    blocks = gather(folder / "whole").blocks
    fixed = family_of(result.dense).fixed_macs(result.dense)
    assert fixed + sum(block.macs for block in blocks) == result.record["macs"]
    assert fixed + sum(block.dense_macs for block in blocks) == result.record["dense_macs"]


def test_a_run_of_several_sizes_and_one_that_goes_on_from_a_folder_merge_in_every_size(tmp_path: Path) -> None:
    given: dict[str, Any] = {"model_args": SHAPE, "epochs": 2, "merge_tokens": R, "batch_size": 512}
    result = prune(tiny(target="50%,40%", **given), tmp_path / "run", data=DATA)
    for rung, share in zip(result.rungs, (0.5, 0.4), strict=True):
        model = hiap.load(rung.folder)
        assert isinstance(model, Merged)
        assert 0.8 * share < counted(model, torch.randn(1, 1, 8, 8)) / result.record["dense_macs"] <= share
    again: dict[str, Any] = {"model": str(result.folder), "target": "85%", "epochs": 1, "pretrained": True}
    with pytest.raises(hiap.ConfigError, match="the model merges 3 tokens in each block: pass --merge-tokens 3"):
        prune(tiny(**again, model_args={}), tmp_path / "again", data=DATA)
    further = prune(tiny(**again, model_args={}, merge_tokens=2, round_to=1), tmp_path / "again", data=DATA)
    assert isinstance(further.model, Merged) and further.model.most == 2
    assert further.record["dense_macs"] == hiap.macs(hiap.load(result.folder).model)
    assert further.record["macs"] <= 0.85 * further.record["dense_macs"]


@pytest.mark.parametrize("gated", [hiap.GRANULARITIES[:4], ("head", "neuron", "qk_dim", "value_dim")])
def test_the_cost_of_merging_widths_is_what_torch_counts(gated: tuple[str, ...]) -> None:
    model = make("siglip_gap")
    x = images(model)
    cost = MacCost(hiap.attach(make("siglip_gap"), gated), merge_tokens=R)
    open_units = hiap.hard_counts(hiap.Topology.from_counts(model))
    assert cost.total(open_units).item() == pytest.approx(counted(hiap.merge_tokens(model, R), x), rel=1e-12)
    topology = hiap.Topology.from_counts(model, heads=[2, 1, 3], neurons=[40, None, 24], qk_dims=[4, 8, [2, 5, 3]])
    compact = hiap.extract(model, topology, round_to=1)
    expected = counted(hiap.merge_tokens(compact, R), x)
    assert cost.of_widths(model, widths_of(compact)) == expected
    assert macs_of_widths(model, widths_of(compact), merge_tokens=R) == expected


def test_what_blocks_send_on_is_compared_with_every_token_in_its_place() -> None:
    model = make("deit_distilled")
    merged, x = hiap.merge_tokens(model, R), images(model)
    family, source = merged.family, merged.model
    blocks = [site.block for site in family.sites(source)]
    with torch.no_grad(), watch_blocks(family_of(merged).ends(merged)) as found:
        logits = merged(x)
    with torch.no_grad():
        assert torch.equal(logits, merged(x))
        for depth, tokens in enumerate(found, 1):
            for image, own in zip(family.embed(source, x), tokens, strict=True):
                slow, held = reference(blocks[:depth], list(image), R, family.prefix_tokens(source))
                where = {place: token for token, places in zip(slow, held, strict=True) for place in places}
                assert close(torch.stack([where[place] for place in range(len(image))]), own, 1e-10)


REFUSED = [
    ({"merge_tokens": -1}, "merge_tokens must be at least 0; found -1"),
    ({"target": None, "lambda_macro": 1.0, "lambda_micro": 1.0}, "merge_tokens needs a target, such as 42%"),
    ({"target": "2.0x"}, "merge_tokens needs a target in MACs or parameters: tables of latencies are measured without"),
    ({"objective": "features", "smoothing": 0.0, "distill_features": None}, "merge_tokens needs the objective labels"),
    ({"min_heads": 0}, "merge_tokens needs min_heads of at least 1: a block without attention merges nothing"),
    ({"granularities": ["head", "attention"]}, "merge_tokens needs granularities without attention"),
    ({"shrink": False}, "merge_tokens needs shrink: it is the extracted network that is trained with merging"),
    ({"freeze_at": 1.0}, "merge_tokens needs a freeze_at below 1"),
    (
        {"merge_tokens": 8},
        "merging 8 tokens in each of 2 blocks leaves none: an image has 16 patch tokens. Merge at most",
    ),
    ({"target": "90%"}, "leaves nothing to prune: merging 3 tokens in each block gives"),
]


@pytest.mark.parametrize(("given", "message"), REFUSED)
def test_what_does_not_go_with_merging_is_refused_before_anything_is_written(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(hiap.HiapError) as error:
        prune(tiny(**{"model_args": SHAPE, "merge_tokens": R, **given}), tmp_path / "run", data=DATA)
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_model_whose_attention_knows_places_is_refused(tmp_path: Path) -> None:
    model = timm.create_model(
        "vit_small_patch16_rope_224", embed_dim=24, depth=1, num_heads=3, img_size=8, patch_size=2, in_chans=1
    )
    with pytest.raises(hiap.UnsupportedModelError, match=r"blocks\.0 has rotary positions"):
        prune(tiny(merge_tokens=1), tmp_path / "run", data=DATA, model=model)


def test_a_dry_run_says_that_tokens_merge(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--config", "digits", "--model-args", json.dumps(SHAPE), "--target", "50%", "--merge-tokens", "3"]
    assert main(["plan", *given, "--epochs", "1", "--dense-epochs", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "merging  3 tokens in each block, once the search is over" in lines
    assert any(line.startswith("target   50% = 50.0%") for line in lines)
