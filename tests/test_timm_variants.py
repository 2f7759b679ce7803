"""timm's ViTs with rotary or relative positions, gated MLPs and hybrid stems go all the way, like its plain ones."""

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.layers import apply_rot_embed_cat
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.vitamin import GeGluMlp
from torch import nn

import any_family
import hiap
from conftest import randomise
from hiap.budget.controller import Controller
from hiap.models.registry import family_of, sites
from hiap.nn.rotary import Rotary, by_dim, by_pair, padded_pairs
from runs import noise_data, pruned_twice

SMALL = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4, "num_classes": 7}

# kind -> (timm name, overrides). The names bring the attention, the MLP, the rotary positions and the tokens.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dinov3": ("vit_small_patch16_dinov3", {"global_pool": "token"}),  # halves, layer scale, four registers
    "dinov3_swiglu": ("vit_huge_plus_patch16_dinov3_qkvb", {}),  # fc1_g and fc1_x, biases of q and v alone
    "eva02": ("eva02_tiny_patch14_224", {}),  # separate q, k and v, packed gated MLP, mean of the tokens
    "eva": ("eva_giant_patch14_224", {}),  # no rotary positions
    "pe": ("vit_pe_core_tiny_patch16_384", {}),  # norm before the blocks, attention pool
    "rope": ("vit_small_patch16_rope_224", {"dynamic_img_size": True}),
    "rope_mixed": ("vit_small_patch16_rope_mixed_ape_224", {}),  # a table for each head
    "rope_gap": ("vit_medium_patch16_rope_reg1_gap_256", {"drop_path_rate": 0.2, "proj_drop_rate": 0.1}),
    "sapiens2": ("vit_base_patch16_sapiens2", {"num_kv_heads": 4}),  # norms of queries and keys
    "beit": ("beit_base_patch16_224", {}),  # relative positions of each head, biases of q and v alone
    "beit_token": ("beitv2_base_patch16_224", {"global_pool": "token", "use_abs_pos_emb": True, "init_values": None}),
    # and VisionTransformers
    "plain_glu": ("vit_giant_patch14_dinov2", {}),
    "geglu": ("vit_tiny_patch16_224", {"mlp_layer": GeGluMlp, "act_layer": nn.GELU}),  # ViTamin's MLP
    "hybrid": ("vit_tiny_r_s16_p8_224", {"img_size": 64, "patch_size": 4}),
}
QUICK = ("dinov3", "dinov3_swiglu", "rope_mixed")


def make(kind: str, **changes: Any) -> nn.Module:
    name, own = KINDS[kind]
    if not timm.is_model(name):
        pytest.skip(f"this timm has no {name}")
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **own, **changes})
    if kind == "rope_mixed" and not hasattr(model.rope, "shift_coords"):
        pytest.skip("this timm cannot compute mixed rotary positions in float64")
    randomise(model)
    return model.double().eval()


def kinds_of(kind: str) -> tuple[str, ...]:
    return tuple(one for one in hiap.GRANULARITIES if not (kind == "sapiens2" and one == "qk_dim"))


@pytest.fixture(params=[one if one in QUICK else pytest.param(one, marks=pytest.mark.slow) for one in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def x(request: pytest.FixtureRequest) -> torch.Tensor:
    size = 64 if "hybrid" in request.node.name else 16
    return torch.randn(3, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_open_gates_change_nothing_and_come_out_again(kind: str, x: torch.Tensor) -> None:
    any_family.gates_come_and_go(make(kind), x, kinds_of(kind))


def test_extraction_and_the_count_of_macs_are_exact(kind: str, x: torch.Tensor) -> None:
    any_family.extraction_is_exact(make(kind), x, kinds_of(kind), cases=2)


def test_a_saved_model_comes_back(kind: str, x: torch.Tensor, tmp_path: Path) -> None:
    loaded = any_family.a_folder_holds_it(make(kind), x, tmp_path / "compact", kind != "sapiens2")
    saved = json.loads((tmp_path / "compact/config.json").read_text())
    assert saved["family"] == {Eva: "timm_eva", Beit: "timm_beit"}.get(type(loaded), "timm")
    assert loaded.num_classes == 7


def test_aligned_heads_compute_the_same(kind: str, x: torch.Tensor) -> None:
    any_family.alignment_changes_nothing(make(kind), x)


def test_the_optimised_network_has_the_same_logits(kind: str, x: torch.Tensor) -> None:
    any_family.optimising_changes_nothing(make(kind), x, kind != "sapiens2")


@pytest.mark.parametrize(("kind", "keys"), [("dinov3_swiglu", 32), ("beit", 32), ("rope_mixed", 0), ("geglu", 0)])
def test_it_can_be_timed(kind: str, keys: int) -> None:
    any_family.it_can_be_timed(make(kind), 2 * keys)  # biases of keys that timm's blocks do not have


@pytest.mark.parametrize("kind", ["dinov3_swiglu", "rope_mixed"])
def test_a_compact_model_is_cut_again(kind: str, x: torch.Tensor) -> None:
    model = make(kind)
    half = [[2, 3, 6, 7], [0, 1, 4, 5], [2, 3, 6, 7]]
    topology = hiap.Topology.from_counts(model, heads=[[0, 1, 3]] * 2, qk_dims=[half] * 2)
    once = hiap.extract(model, topology, round_to=1)
    assert [site.widths.qk_dim for site in sites(once)] == [4, 4]
    any_family.extraction_is_exact(once, x, cases=2)


@pytest.mark.parametrize("round_to", [1, 3, 8])
def test_a_head_without_q_k_dims_attends_uniformly(round_to: int, x: torch.Tensor) -> None:
    model = make("dinov3")
    gated = hiap.attach(copy.deepcopy(model), hiap.GRANULARITIES)
    hiap.set_topology(gated, hiap.Topology.from_counts(model, qk_dims=[0, [[0, 4], [], [1, 5], [0, 3, 4, 7]]]))
    compact = hiap.extract(gated, round_to=round_to)
    assert any_family.close(gated(x), compact(x))
    again = hiap.extract(compact, hiap.Topology.from_counts(compact), round_to=1)
    assert any_family.close(gated(x), again(x))


def test_q_k_dims_go_in_pairs() -> None:
    model = make("dinov3")
    topology = hiap.Topology.from_counts(model, heads=[2, [0, 1, 3]], qk_dims=[6, [2, 8, 0]])
    assert topology.blocks[0].qk_dims == ((0, 1, 2, 4, 5, 6),) * 2  # the first three pairs
    assert topology.blocks[1].qk_dims == ((0, 4), tuple(range(8)), ())
    assert hiap.Topology.from_json(topology.to_json()) == topology
    with pytest.raises(hiap.TopologyError) as error:
        hiap.extract(model, hiap.Topology.from_counts(model, qk_dims=[8, [[0, 4, 1], 8, 8, 8]]))
    assert str(error.value) == (
        "block 1, head 0: keeps the q/k dim 1 without the one that rotary positions turn with it. Keep q/k dims in "
        "pairs: i and i + 4"
    )


def test_a_run_prunes_it_and_can_be_resumed(tmp_path: Path) -> None:
    half = [0.5, 0.5, 0.5]
    whole, resumed = pruned_twice(make("dinov3_swiglu").float(), noise_data(512, 16, 3), tmp_path, mean=half, std=half)
    loaded = hiap.load(tmp_path / "whole/compact")
    assert type(loaded) is Eva and 0 < hiap.macs(loaded) <= 0.6 * whole.record["dense_macs"]
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["importance", "gradient"])
@pytest.mark.parametrize(("round_to", "share"), [(1, 0.93), (2, 0.93), (3, 0.97)])
def test_a_budget_is_spent_on_whole_pairs(mode: str, round_to: int, share: float) -> None:
    model = hiap.attach(make("dinov3_swiglu", depth=4).float(), ["qk_dim"])
    cost = hiap.MacCost(model)
    assert (
        cost.total(hiap.expected_counts(model)) < hiap.macs(model) == cost.total(hiap.hard_counts(hiap.harden(model)))
    )
    target = share * hiap.macs(model)
    controller = Controller(model, cost, target, round_to=round_to, mode=mode)
    chance = torch.Generator().manual_seed(0)
    for gate in hiap.gates(model):
        gate.logit.data.copy_(torch.rand(gate.logit.shape, generator=chance) * 3 + 1)
    controller.restore(torch.rand(controller.importance.shape, generator=chance).square(), 1)
    controller.project(target, sharpness=1.0)
    assert hiap.macs(model, round_to=round_to) <= target
    topology = controller.decide()
    topology.check(model)  # which refuses half a pair
    assert any(0 < len(dims) < 8 for block in topology.blocks for dims in block.qk_dims)
    hiap.set_topology(model, topology)
    assert 0.98 * target <= hiap.macs(model) <= target


def test_timm_reads_features_of_a_compact_model(x: torch.Tensor, tmp_path: Path) -> None:
    model = make("dinov3")
    compact = hiap.extract(model, any_family.ragged(model, 1))
    features, maps = compact.forward_intermediates(x, indices=[0, 1])
    assert [tuple(one.shape) for one in maps] == [(3, 32, 4, 4)] * 2
    assert torch.equal(features, compact.forward_features(x))
    hiap.save(compact, tmp_path / "compact")
    getter = timm.create_model(f"local-dir:{tmp_path / 'compact'}", features_only=True, out_indices=[1]).eval()
    assert torch.equal(getter(x)[0], maps[1])


def test_a_compact_model_takes_other_sizes_but_for_relative_positions(tmp_path: Path) -> None:
    folder, x = tmp_path / "compact", torch.randn(1, 3, 24, 24, dtype=torch.float64)
    for kind in ("dinov3", "beit"):
        model = make(kind)
        compact = hiap.extract(model, any_family.ragged(model, 1))
        hiap.save(compact, folder)
        if kind == "beit":
            with pytest.raises(hiap.InputError) as error:
                timm.create_model(f"local-dir:{folder}", img_size=24)
            assert str(error.value) == "a pruned BEiT is for images of one size, 16x16; found 24"
            assert timm.create_model(f"local-dir:{folder}", img_size=16).patch_embed.img_size == (16, 16)
        else:
            larger = timm.create_model(f"local-dir:{folder}", img_size=24).eval()
            assert torch.isfinite(larger(x)).all() and hiap.macs(larger) == any_family.counted(larger, x)


@pytest.mark.parametrize("layout", ["adjacent", "halves"])
@pytest.mark.parametrize("per_head", [False, True])
def test_a_cut_head_turns_its_dims_as_the_whole_head_does(layout: str, per_head: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    heads, dims, tokens = 3, 8, 5
    angles = torch.randn(*([heads] if per_head else []), tokens, dims // 2, generator=generator, dtype=torch.float64)
    angles = by_dim(angles, layout, dims)
    q, k = (torch.randn(2, heads, tokens + 2, dims, generator=generator, dtype=torch.float64) for _ in range(2))
    expected = apply_rot_embed_cat(q[:, :, 2:], torch.cat([angles.sin(), angles.cos()], -1), half=layout == "halves")
    whole = Rotary(heads, dims, dims, layout, per_head)
    table = (angles.sin(), angles.cos())
    assert torch.equal(whole(q, k, table)[0], torch.cat([q[:, :, :2], expected], dim=2))
    for kept, new in itertools.product(([0, 1, 4, 5], [2, 3, 6, 7]), (4, 5, 6)):
        small = whole.shrunk(2, new)
        index = [padded_pairs(kept, dims, new, layout)] * 2
        flat = torch.tensor([[dim + (h * dims if per_head else 0) for dim in index[0]] for h in (0, 2)]).flatten()
        small.dims.copy_(flat.clamp(min=0))
        part = q[:, [0, 2]][..., index[0]] * (torch.tensor(index[0]) >= 0)
        turned = small(part, part, table)[0]
        reference = whole(q, k, table)[0][:, [0, 2]][..., index[0]] * (torch.tensor(index[0]) >= 0)
        assert torch.allclose(turned, reference, atol=1e-14)
        each = [one.expand(2, heads if per_head else 1, tokens, dims) for one in table]  # a table for each image
        assert torch.equal(small(part, part, (each[0], each[1]))[0], turned)
        small.bake(table)
        assert torch.equal(small(part[:, :, :3], part)[0], turned[:, :, :3])  # queries of the first tokens alone


@pytest.mark.parametrize("layout", ["adjacent", "halves"])
def test_what_pairs_have_goes_to_their_dims_and_back(layout: str) -> None:
    values = torch.arange(3.0).expand(2, 3)
    assert by_dim(values, layout, 7).tolist()[0] == (
        [0, 0, 1, 1, 2, 2, 1] if layout == "adjacent" else [0, 1, 2, 0, 1, 2, 1]
    )
    assert torch.equal(by_pair(by_dim(values, layout, 7), layout), 2 * values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"depth": 10**7}, "the skeleton has depth '10000000', which no model has"),
        ({"embed_dim": "32"}, "the skeleton has embed_dim '32', which no model has"),
        ({"num_heads": 5}, "the skeleton has 5 heads, which do not divide the width 32"),
        ({"more": 1}, "the skeleton has an unknown argument more"),
    ],
)
def test_an_odd_recipe_is_refused(changes: dict[str, Any], message: str) -> None:
    model = make("dinov3")
    recipe = family_of(model).describe(model)
    with pytest.raises(hiap.CheckpointError, match=message):
        family_of(model).build({**recipe, "arguments": {**recipe["arguments"], **changes}})
    for rope in ({**recipe["rope"], "type": "mine"}, "cat"):
        with pytest.raises(hiap.CheckpointError, match=r"the skeleton has type 'mine'|the rope of the skeleton must"):
            family_of(model).build({**recipe, "rope": rope})
