"""A family of one file (tiny_family.py) goes all the way: nothing else knows of its members."""

import copy
import re
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import hiap
from conftest import randomise
from hiap.models.registry import find_family
from hiap.nn.compact import Block
from hiap.pruning.saving import check_savable
from hiap.speed.bench import bench, dense_like
from hiap.speed.measure import measure
from runs import noise_data, pruned_twice
from tiny_family import Layer, TinyFamily, TinyViT

CPU = torch.device("cpu")
SOURCE = Path(hiap.__file__).parent


@pytest.fixture
def model() -> TinyViT:
    torch.manual_seed(0)
    model = TinyViT()
    randomise(model)
    return model.double().eval()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def close(first: torch.Tensor, second: torch.Tensor, allowed: float = 1e-12) -> bool:
    return bool((first - second).abs().max() <= allowed * first.abs().max())


def ragged(model: TinyViT) -> hiap.Topology:
    return hiap.Topology.from_counts(
        model, heads=[[1], 2], value_dims=[5, [[0, 3], 7]], qk_dims=[6, [4, 3]], neurons=[[1, 4, 9], None]
    )


def test_open_gates_change_nothing_and_come_out_again(model: TinyViT, x: torch.Tensor) -> None:
    before, state = model(x), copy.deepcopy(model.state_dict())
    hiap.attach(model, hiap.GRANULARITIES)
    assert close(before, model(x))
    hiap.detach(model)
    assert all(type(layer) is Layer for layer in model.encoder["layers"])
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_macs_are_those_torch_counts(model: TinyViT, x: torch.Tensor) -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for one in (model, hiap.extract(model, ragged(model), round_to=1)):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter, torch.no_grad():
            one(x[:1])
        assert hiap.macs(one) == counter.get_total_flops() // 2


def test_what_is_extracted_computes_what_the_gates_did_and_comes_back_from_disk(
    model: TinyViT, x: torch.Tensor, tmp_path: Path
) -> None:
    gated = hiap.attach(copy.deepcopy(model), hiap.GRANULARITIES)
    hiap.set_topology(gated, ragged(model))
    compact = hiap.extract(gated, round_to=1)
    assert isinstance(compact, TinyViT) and close(gated(x), compact(x))
    assert hiap.macs(compact) == hiap.macs(gated) < hiap.macs(model)
    hiap.save(compact, tmp_path / "compact", class_names=list("abcdefghij"))
    loaded = hiap.load(tmp_path / "compact")
    assert isinstance(loaded, TinyViT) and torch.equal(loaded(x), compact(x))
    assert loaded.class_names == list("abcdefghij")
    assert hiap.macs(dense_like(loaded)) == hiap.macs(model)


def test_a_model_of_a_family_that_is_not_registered_says_so(
    model: TinyViT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiap.save(hiap.extract(model, ragged(model)), tmp_path / "compact")
    monkeypatch.delitem(hiap.register_family.__globals__["_FAMILIES"], "tiny")
    known = r"\(known: 'timm', 'timm_eva', 'timm_beit'\)"
    with pytest.raises(hiap.CheckpointError, match=rf"names the family 'tiny', which is not known here {known}"):
        hiap.load(tmp_path / "compact")
    with pytest.raises(hiap.UnsupportedModelError, match="the model is a TinyViT: it is not a timm VisionTransformer"):
        hiap.attach(model)


def test_aligned_heads_compute_the_same(model: TinyViT, x: torch.Tensor) -> None:
    before, weight = model(x), model.encoder["layers"][0].value.weight.clone()
    hiap.align_heads(model, [x])
    layer = model.encoder["layers"][0]
    assert type(layer) is Layer and not torch.equal(weight, layer.value.weight)
    assert close(before, model(x), 1e-9)


def test_the_optimised_network_has_the_same_logits(model: TinyViT, x: torch.Tensor) -> None:
    for one in (model, hiap.extract(model, ragged(model))):
        assert close(one(x), hiap.optimize(one)(x))
    assert type(model.encoder["layers"][0]) is Layer


def test_it_can_be_timed(model: TinyViT) -> None:
    model = model.float()
    table = measure(model, CPU, "fp32", 2, grid={"heads": [1, 2], "qk_dim": [8], "value_dim": [8], "neurons": [8, 32]})
    cost = hiap.LatencyCost(hiap.attach(copy.deepcopy(model)), table)
    assert 0 < cost.outside < cost.outside + cost.dense
    rows = bench({"dense": model}, CPU, [2], ["fp32"], ["eager"], 1, 2)
    assert [row.macs for row in rows] == [hiap.macs(model)] * 2


def test_parameters_are_counted(model: TinyViT) -> None:
    gated = hiap.attach(copy.deepcopy(model))
    cost = hiap.ParamCost(gated)
    assert cost.total(hiap.hard_counts(hiap.harden(gated))) == sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_a_run_prunes_it_and_can_be_resumed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = TinyViT(classes=7)
    result, again = pruned_twice(model, noise_data(512, 8), tmp_path, stop=6, epochs=4)
    loaded = hiap.load(tmp_path / "whole/compact")
    assert isinstance(loaded, TinyViT) and loaded.labels == 10 and loaded.usage["input_size"] == [1, 8, 8]
    assert 0 < hiap.macs(loaded) <= 0.6 * result.record["dense_macs"]
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), result.model.parameters(), strict=True))


def test_blocks_that_were_cut_stay_compact(model: TinyViT, x: torch.Tensor, tmp_path: Path) -> None:
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[1, 1], neurons=[8, 8]))
    keys, before = compact.state_dict().keys(), compact(x)
    hiap.detach(hiap.attach(compact))
    assert compact.state_dict().keys() == keys and torch.equal(before, compact(x))
    hiap.save(compact, tmp_path / "compact")


def test_what_is_refused_is_left_alone(model: TinyViT, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="nothing to gate"):
        hiap.attach(model, keep_blocks=[0, 1])
    assert all(type(layer) is Layer for layer in model.encoder["layers"])
    to_block, calls = TinyFamily.to_block, []

    def second_fails(self: TinyFamily, layer: Layer) -> Block:
        calls.append(layer)
        if len(calls) == 2:
            raise hiap.UnsupportedModelError("not this one")
        return to_block(self, layer)

    monkeypatch.setattr(TinyFamily, "to_block", second_fails)
    with pytest.raises(hiap.UnsupportedModelError, match="not this one"):
        hiap.attach(model)
    assert all(type(layer) is Layer for layer in model.encoder["layers"])


def test_hooks_of_users_come_along(model: TinyViT, x: torch.Tensor) -> None:
    seen = []
    model.encoder["layers"][0].register_forward_hook(lambda *call: seen.append(call))
    model(x)
    hiap.attach(model)(x)
    hiap.detach(model)(x)
    assert len(seen) == 3


def test_the_family_registered_last_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    class Mine(TinyFamily):
        name = "mine"

    families = hiap.register_family.__globals__["_FAMILIES"]
    monkeypatch.setitem(families, "mine", Mine())
    assert [site.family.name for site in Mine().sites(TinyViT())] == ["mine"] * 2
    assert find_family(TinyViT()).name == "mine"
    with pytest.raises(ValueError, match="there is another family with the name 'tiny': TinyFamily"):
        hiap.register_family(type("Other", (TinyFamily,), {})())
    hiap.register_family(TinyFamily())  # again, as in a notebook


def test_a_recipe_that_is_no_json_is_refused_before_training(model: TinyViT, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = TinyFamily.describe
    monkeypatch.setattr(TinyFamily, "describe", lambda self, *given: describe(self, *given) | {"size": torch.float64})
    with pytest.raises(hiap.CheckpointError, match="the recipe cannot be written as JSON"):
        check_savable(model)


def test_no_other_module_knows_members_of_timms_models() -> None:
    """Blocks are told apart: the members of `nn.compact.Block` are our own, whatever timm calls its."""
    members = [
        "patch_embed",
        "pos_embed",
        "_pos_embed",
        "embed_dim",
        "num_prefix_tokens",
        "global_pool",
        "attn_pool",
        "fc_norm",
        "norm_pre",
        "cls_token",
        "forward_features",
        "forward_head",
        "forward_intermediates",
        "head_dist",
        "reset_classifier",
        "get_classifier",
        "num_features",
        "no_weight_decay",
        "set_input_size",
        "default_cfg",
        "has_class_token",
        "no_embed_class",
        "dynamic_img_size",
    ]
    text = re.compile(rf"\b({'|'.join(members)})\b|\bmodel\.blocks\b|timm\.models|timm\.layers")
    found = {
        str(file.relative_to(SOURCE)): text.findall(file.read_text())
        for file in sorted(SOURCE.rglob("*.py"))
        if text.search(file.read_text())
        and not file.name.startswith(("timm", "transformers"))  # whose models have members of the same names
    }
    assert found == {"registration.py": [""]}  # where timm is told of saved models
