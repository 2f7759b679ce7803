"""Token merging: against a slow reference in plain loops, in counts, in files and on the command line."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torchvision.models.vision_transformer import VisionTransformer

import hiap
import merging
from any_family import close, counted
from any_family import ragged as random_topology
from conftest import images, make, randomise
from exported import file_of, open_again
from hiap.cli.main import main
from hiap.data.sources import digits
from hiap.models.registry import family_of
from hiap.nn.compact import Attention, Block, Constant
from hiap.nn.token_merging import match_tokens, merge_pairs, merged_count, token_bias
from tiny_family import TinyFamily, TinyViT

R = 3


def mean_of_keys(attn: Attention, x: list[Tensor]) -> list[Tensor]:
    """The key of each token, as the mean over heads."""
    width = attn.num_heads * attn.qk_dim
    keys = []
    for token in x:
        own = attn.qkv(token)[width : 2 * width]
        heads = [attn.k_norm(own[h * attn.qk_dim : (h + 1) * attn.qk_dim]) for h in range(attn.num_heads)]
        keys.append(sum(heads) / attn.num_heads)
    return keys


def attention(attn: Attention, x: list[Tensor], sizes: list[int]) -> list[Tensor]:
    """Attention in which a token counts as often as it has patches."""
    rows, width = [attn.qkv(token) for token in x], attn.num_heads * attn.qk_dim
    outputs = []
    for i in range(len(x)):
        joined = []
        for h in range(attn.num_heads):
            first, last = h * attn.qk_dim, (h + 1) * attn.qk_dim
            query = attn.q_norm(rows[i][first:last])
            values = [row[2 * width + h * attn.value_dim :][: attn.value_dim] for row in rows]
            scores = [query @ attn.k_norm(row[width + first : width + last]) / attn.head_dim**0.5 for row in rows]
            weights = [size * score.exp() for size, score in zip(sizes, scores, strict=True)]
            joined.append(sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights))
        outputs.append(attn.proj(torch.cat(joined)))
    return outputs


def pairs(keys: list[Tensor], r: int) -> list[tuple[int, int]]:
    """The most similar pairs of an even and an odd token."""
    found = []
    for i in range(0, len(keys), 2):
        similarity = [(float(keys[i] @ keys[j] / keys[i].norm() / keys[j].norm()), j) for j in range(1, len(keys), 2)]
        if similarity:
            found.append((*max(similarity), i))
    found.sort(reverse=True)
    return [(i, j) for _, j, i in found[: min(r, len(keys) // 2)]]


def reference(blocks: list[Block], x: list[Tensor], r: int, prefix: int) -> tuple[list[Tensor], list[list[int]]]:
    """One image through blocks that merge. Each token comes with the list of tokens of the image that are in it."""
    held = [[i] for i in range(len(x))]
    for block in blocks:
        merges: list[tuple[int, int]] = []
        if isinstance(block.attn, Attention):
            normed = [block.norm1(token) for token in x]
            merges = pairs(mean_of_keys(block.attn, normed)[prefix:], r)
            added = attention(block.attn, normed, [len(one) for one in held])
            x = [token + block.ls1(more) for token, more in zip(x, added, strict=True)]
        elif isinstance(block.attn, Constant):
            x = [token + block.ls1(block.attn(token)) for token in x]
        totals = [len(one) * token for token, one in zip(x, held, strict=True)]
        for source, target in merges:
            totals[prefix + target] = totals[prefix + target] + totals[prefix + source]
            held[prefix + target] = held[prefix + target] + held[prefix + source]
        gone = {prefix + source for source, _ in merges}
        x = [total / len(one) for total, one in zip(totals, held, strict=True)]
        x, held = ([one for i, one in enumerate(many) if i not in gone] for many in (x, held))
        if block.mlp is not None:
            x = [token + block.ls2(block.mlp(block.norm2(token))) for token in x]
    return x, held


def slow_logits(model: nn.Module, x: Tensor, r: int) -> Tensor:
    """Logits of a model by the reference; every token of the image reads the one that it was merged into."""
    merged = hiap.merge_tokens(model, 0)
    family, source = merged.family, merged.model
    blocks = [site.block for site in family.sites(source)]
    rows = []
    for image in family.embed(source, x):
        tokens, held = reference(blocks, list(image), r, family.prefix_tokens(source))
        where = {place: token for token, places in zip(tokens, held, strict=True) for place in places}
        rows.append(torch.stack([where[place] for place in range(len(image))]))
    return family.head(source, torch.stack(rows))


def ragged(model: nn.Module) -> nn.Module:
    """A compact model with unequal widths, a closed attention and closed FFNs."""
    counts: dict[str, Any] = {"heads": [2, None, 3], "neurons": [40, 0, None], "value_dims": [[3, 5], [], 8]}
    return hiap.extract(model, hiap.Topology.from_counts(model, **counts), round_to=1)


POOLS = ["deit_distilled", "siglip", "siglip_gap"]  # class tokens, attention over all tokens, a mean of them


@pytest.mark.parametrize("name", [*POOLS, "dinov2_registers", "qk_norm", "all_tokens"])
def test_merging_is_what_the_loops_of_the_reference_compute(name: str) -> None:
    model = make(name)
    x = images(model)
    for one in (model, ragged(model)) if name in POOLS else (ragged(model),):
        merged = hiap.merge_tokens(one, R)
        with torch.no_grad():
            assert close(slow_logits(one, x, R), merged(x), 1e-10)
            assert not close(one(x), merged(x), 1e-3)


@pytest.mark.parametrize("name", ["augreg", "clip", "mae", "drop_path", "dynamic_size", "rms_norm"])
def test_without_merging_the_model_computes_what_it_did(name: str) -> None:
    model = make(name)
    x, before = images(model), copy.deepcopy(model.state_dict())
    merged = hiap.merge_tokens(model, 0)
    assert close(model(x), merged(x))
    assert hiap.macs(merged) == hiap.macs(model)
    for p in merged.parameters():
        p.data.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("name", [*POOLS, "all_tokens"])
def test_macs_are_those_that_torch_counts(name: str) -> None:
    model = make(name)
    closed = hiap.extract(model, random_topology(model, 1), 1)
    assert None in [site.widths.heads for site in family_of(closed).sites(closed)]
    for one, r in ((model, 1), (model, 100), (ragged(model), R), (closed, R)):
        merged = hiap.merge_tokens(one, r)
        assert hiap.macs(merged) == counted(merged, images(model)) != hiap.macs(one)


def test_a_block_merges_at_most_half_of_its_patches() -> None:
    assert [merged_count(17, 1, most) for most in (0, 5, 8, 9)] == [0, 5, 8, 8]
    assert [merged_count(n, 1, 4) for n in (1, 2, 3, 4, 9)] == [0, 0, 1, 1, 4]


def test_pairs_merge_into_weighted_means() -> None:
    keys = torch.tensor([[[1.0, -1.0], [0.0, 1.0], [0.1, 2.0], [1.0, -0.3], [5.0, -1.0]]])
    matching = match_tokens(keys, 2)  # 2 and 1 are most similar, then 4 and 3; 0 and 3 less so
    assert [part.tolist() for part in matching] == [[[2, 4]], [[1, 3]], [[0, 1, 3]]]
    x, sizes = merge_pairs(torch.arange(5.0).view(1, 5, 1), torch.tensor([[1.0, 1.0, 3.0, 2.0, 2.0]]), matching)
    assert x.flatten().tolist() == [0.0, 7 / 4, 14 / 4] and sizes.tolist() == [[1.0, 4.0, 4.0]]


def test_a_token_of_three_patches_counts_three_times_in_attention() -> None:
    attn, x = hiap.merge_tokens(make(), 0).model.blocks[0].attn, torch.randn(1, 4, 24, dtype=torch.float64)
    repeated = attn(torch.cat([x, x[:, 3:], x[:, 3:]], dim=1))[:, :4]
    bias = token_bias(torch.tensor([[1, 1, 1, 3]], dtype=torch.float64), torch.float64)
    assert close(repeated, attn(x, bias))


@pytest.mark.parametrize("name", POOLS)
def test_optimised_models_merge_alike(name: str) -> None:
    model = make(name)
    for one in (model, ragged(model)):
        merged, x = hiap.merge_tokens(one, R), images(one)
        assert close(merged(x), hiap.optimize(merged, pad=False)(x))


def test_a_compiled_model_merges_alike_in_one_graph() -> None:
    merged = hiap.merge_tokens(make("siglip_gap", depth=2), R)
    with torch.no_grad():
        x = images(merged.model)
        assert close(merged(x), torch.compile(merged, backend="aot_eager", fullgraph=True)(x))


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_close(half: torch.dtype) -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3)
    merged, x = hiap.merge_tokens(model.eval(), R), torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert close(merged(x), copy.deepcopy(merged).to(half)(x.to(half)).float(), 0.05)


@pytest.mark.parametrize(
    ("build", "shape"),
    [(lambda: TinyViT(size=16), (1, 16, 16)), (lambda: VisionTransformer(16, 4, 2, 2, 24, 40), (3, 16, 16))],
    ids=["own", "torchvision"],
)
def test_models_of_other_families_merge(
    build: Callable[[], nn.Module], shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hiap.models.registry._FAMILIES", {"tiny": TinyFamily()})
    torch.manual_seed(0)
    model, x = build().double().eval(), torch.randn(2, *shape, dtype=torch.float64)
    randomise(model)
    merged = hiap.merge_tokens(model, R)
    with torch.no_grad():
        assert close(slow_logits(model, x, R), merged(x), 1e-10)
    assert hiap.macs(merged) == counted(merged, x) < hiap.macs(model)


def test_models_of_transformers_merge() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    torch.manual_seed(0)
    config = transformers.Dinov2Config(**small, image_size=32, patch_size=8, num_labels=5)
    model = transformers.Dinov2ForImageClassification(config)  # reads the class token, and a mean of the others
    randomise(model)
    model, x = model.double().eval(), torch.randn(2, 3, 32, 32, dtype=torch.float64)
    merged = hiap.merge_tokens(model, R)
    with torch.no_grad():
        assert close(slow_logits(model, x, R), merged(x), 1e-10)
    assert hiap.macs(merged) == counted(merged, x) < hiap.macs(model)


def test_what_cannot_merge_is_refused_with_the_reason() -> None:
    model = make()
    rotary = timm.create_model("vit_small_patch16_rope_224", embed_dim=24, depth=1, num_heads=3, img_size=32)
    relative = timm.create_model("beit_base_patch16_224", embed_dim=24, depth=1, num_heads=3, img_size=32)
    closed = hiap.extract(model, hiap.Topology.from_counts(model, heads=[None] * 3))
    for given, r, message in (
        (model, -1, "must be a whole number, 0 or more; found -1"),
        (model, 1.5, "must be a whole number, 0 or more; found 1.5"),
        (hiap.merge_tokens(model, 1), 1, "the model merges tokens already"),
        (hiap.attach(copy.deepcopy(model)), 1, "the model has gates: extract it first"),
        (closed, 1, "no block of the model has attention"),
        (rotary, 1, "blocks.0 has rotary positions"),
        (relative, 1, "blocks.0 has relative positions"),
    ):
        with pytest.raises(hiap.HiapError, match=message):
            hiap.merge_tokens(given, r)


def test_a_dense_merging_model_is_not_saved_and_has_no_fused_kernels(tmp_path: Path) -> None:
    merged = hiap.merge_tokens(make(), 1)
    with pytest.raises(hiap.CheckpointError, match=r"only a compact model can be saved; make one with hiap\.extract"):
        hiap.save(merged, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    with pytest.raises(hiap.InputError, match="they do not merge tokens"):
        hiap.optimize(merged, kernels=True)


def test_a_compact_model_that_merges_is_saved_with_plain_weights_and_merges_again_when_loaded(tmp_path: Path) -> None:
    model = make("siglip_gap")
    compact, x = ragged(model), images(model)
    merged = hiap.merge_tokens(compact, R)
    for one, name in ((compact, "plain"), (merged, "merged"), (hiap.merge_tokens(compact, 0), "none")):
        hiap.save(one, tmp_path / name, list("abcdefg"))
    weights = [load_file(tmp_path / name / "model.safetensors") for name in ("plain", "merged")]
    assert list(weights[0]) == list(weights[1])
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["merge_tokens"], config["macs"]) == (R, counted(merged, x))
    assert config["dense_macs"] == hiap.macs(model)
    loaded = hiap.load(tmp_path / "merged")
    with torch.no_grad():
        assert torch.equal(loaded(x), merged(x))
        timms = timm.create_model(f"local-dir:{tmp_path / 'merged'}").eval()  # which knows nothing of merging
        assert isinstance(timms, timm.models.VisionTransformer) and torch.equal(timms(x), compact(x))
    assert loaded.class_names == list("abcdefg")
    assert hiap.macs(loaded) == config["macs"] and loaded.hiap == loaded.model.hiap
    assert type(hiap.load(tmp_path / "none")) is type(hiap.load(tmp_path / "plain")) is type(compact)
    config["merge_tokens"] = "3"
    (tmp_path / "merged" / "config.json").write_text(json.dumps(config))
    with pytest.raises(hiap.CheckpointError, match="merge_tokens must be a count; found '3'"):
        hiap.load(tmp_path / "merged")


# -- the command line -------------------------------------------------------------------------------------------------


DIGITS = {"img_size": 8, "patch_size": 2, "embed_dim": 16, "depth": 2, "num_heads": 2, "in_chans": 1, "num_classes": 10}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved compact model for the digits, with a mean over its tokens; the dense one is beside it."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", **DIGITS, global_pool="avg").eval()
    randomise(model)
    path = tmp_path_factory.mktemp("merging") / "compact"
    save_file(model.state_dict(), path.parent / "dense.safetensors")
    hiap.save(hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 2], neurons=[None, 24])), path)
    return path


def test_evaluate_scores_the_model_that_merges(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pixels, labels = digits()[1]
    merged, out = hiap.merge_tokens(hiap.load(folder), 4), folder.parent / "scores.json"
    with torch.no_grad():
        right = merged((pixels / 255 - 0.5) / 0.5).argmax(-1) == labels
    given = ["--data", "digits", "--mean", "0.5", "--std", "0.5", "--merge-tokens", "4", "--out", str(out)]
    assert main(["evaluate", str(folder), *given]) == 0
    top1 = 100 * right.float().mean().item()
    assert capsys.readouterr().out.startswith(f"top-1 {top1:.2f} %")
    assert json.loads(out.read_text())["merge_tokens"] == 4
    assert main(["evaluate", "mine.onnx", *given]) == 1
    assert "mine.onnx is an exported file: merge tokens when you write it" in capsys.readouterr().err


def test_bench_times_both_models_with_and_without_merging(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, quick = folder.parent / "speed.json", ["--batch", "2", "--warmup", "1", "--runs", "2", "--device", "cpu"]
    assert main(["bench", str(folder), "--merge-tokens", "4", "--out", str(out), *quick]) == 0
    found = {row["network"]: row["macs"] for row in json.loads(out.read_text())["rows"]}
    names = ["dense", "compact", "dense merged", "compact merged"]
    assert list(found) == [form for name in names for form in (name, f"{name}, optimised")]
    compact = hiap.load(folder)
    assert found["compact merged"] == hiap.macs(hiap.merge_tokens(compact, 4)) < found["compact"] == hiap.macs(compact)
    assert main(["bench", str(folder), "--merge-tokens", "4", "--kernels", *quick]) == 1
    assert "the fused kernels do not merge tokens" in capsys.readouterr().err


def test_every_command_merges_by_itself_in_a_folder_that_says_so(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, out, given = tmp_path / "own", tmp_path / "out.json", ["--data", "digits", "--mean", "0.5", "--std", "0.5"]
    compact = hiap.load(folder)
    merged = hiap.merge_tokens(compact, 4)
    hiap.save(merged, own)
    for one, more in ((folder, ["--merge-tokens", "4"]), (own, [])):
        assert main(["evaluate", str(one), *given, *more, "--out", str(out)]) == 0
    first, second = capsys.readouterr().out.splitlines()[:2]
    assert first == second and json.loads(out.read_text())["merge_tokens"] == 4
    quick = ["--batch", "2", "--warmup", "1", "--runs", "2", "--device", "cpu", "--out", str(out)]
    assert main(["bench", str(own), *quick]) == 0
    rows = {row["network"]: row["macs"] for row in json.loads(out.read_text())["rows"]}
    dense = hiap.pruning.saving.macs_of_widths(compact, compact.hiap.dense)
    assert (rows["dense"], rows["compact"]) == (dense, hiap.macs(merged))
    capsys.readouterr()
    assert main(["info", str(own)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == f"MACs        {hiap.macs(merged) / 1e3:.3f} k, {hiap.macs(merged) / dense:.1%} of {dense / 1e3:.3f} k"
    )
    assert lines[2] == "merging     4 tokens in each block; the MACs are those with merging"
    assert main(["inspect", str(own)]) == 0
    total = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("MACs"))
    assert total == f"MACs  {hiap.macs(merged) / 1e3:.3f} k, {hiap.macs(merged) / dense:.1%} of {dense / 1e3:.3f} k"
    file = file_of("pt2", tmp_path)
    assert main(["export", str(own), "-o", str(file)]) == 0
    assert json.loads(Path(f"{file}.json").read_text())["merge_tokens"] == 4
    assert main(["evaluate", str(own), *given, "--merge-tokens", "2"]) == 1
    assert "the model merges tokens already, 4 in each block" in capsys.readouterr().err


def test_an_onnx_file_merges_like_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, merged = file_of("onnx", folder.parent), hiap.merge_tokens(hiap.load(folder), 4)
    assert main(["export", str(folder), "--merge-tokens", "4", "-o", str(file)]) == 0
    x = torch.randn(3, 1, 8, 8)
    with torch.no_grad():
        assert close(merged(x), torch.from_numpy(open_again(file).run(x.numpy())), 1e-5)
    report = json.loads(Path(f"{file}.json").read_text())
    assert (report["merge_tokens"], report["macs"]) == (4, hiap.macs(merged))
    assert main(["export", str(folder), "--merge-tokens", "4", "--format", "timm", "-o", "new"]) == 1
    assert "--merge-tokens is for files; timm is a folder of plain weights" in capsys.readouterr().err


def test_the_script_compares_pruning_merging_and_both(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compact, out = hiap.load(folder), folder.parent / "table.json"
    dense = [
        "--model-args",
        json.dumps({**DIGITS, "global_pool": "avg"}),
        "--weights",
        f"{out.parent}/dense.safetensors",
    ]
    how = ["--device", "cpu", "--precision", "fp32", "--mode", "eager", "--batch-size", "64", "--runs", "2"]
    given = ["--compact", str(folder), *dense, "--data", "digits", *how]
    merging.main([*given, "--merge-tokens", "0,4", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    names = [(row["network"], row["merge_tokens"]) for row in rows]
    assert names == [("dense", 0), ("dense", 4), ("compact", 0), ("compact", 4)]
    assert [row["macs"] for row in rows[2:]] == [hiap.macs(compact), hiap.macs(hiap.merge_tokens(compact, 4))]
    printed = capsys.readouterr().out.splitlines()[-4:]
    assert [line.split(" | ")[3] for line in printed] == [f"{row['top1']:.2f} %" for row in rows]
