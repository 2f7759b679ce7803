"""Random ViTs and random topologies: what holds for the models of the registry holds for odd ones too."""

import copy
import functools
import random
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import timm.layers as layers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import hiap
from conftest import images, randomise
from hiap.pruning.saving import check_savable
from test_cost import counted_macs

pytestmark = pytest.mark.slow

CASES, GROUPS = 300, 15  # groups, so that several processes can share them
NORMS = [
    "layernorm",
    "layernormfp32",
    "rmsnorm",
    "rmsnormfp32",
    "simplenorm",
    functools.partial(nn.LayerNorm, eps=1e-5),
]
ACTIVATIONS = [
    *("gelu", "gelu_tanh", "quick_gelu", "relu", "relu6", "leaky_relu", "elu", "celu", "selu", "prelu"),
    *("silu", "mish", "sigmoid", "tanh", "hard_sigmoid", "hard_swish", "hard_mish", "identity"),
    *(nn.GELU, functools.partial(nn.GELU, approximate="tanh"), layers.GELUTanh),
]
RATES = [0, 0, 0.0, 0.1, 0.25]


def random_options(chance: random.Random) -> dict[str, Any]:
    """Arguments of a tiny VisionTransformer."""
    heads, patch = chance.randint(1, 3), (chance.randint(1, 4), chance.randint(1, 4))
    token, pad = chance.random() < 0.7, chance.random() < 0.2
    dynamic = pad or chance.random() < 0.2
    pools = ["avg", "avgmax", "max", "map", "prr", ""] + ["token"] * 4 * token
    head_dim = chance.randint(1, 5)
    width = heads * head_dim
    norms = [norm for norm in NORMS if head_dim > 1 or norm != "simplenorm"]  # it divides by the spread of one value
    return {
        "img_size": tuple(chance.randint(1, 3) * side + (chance.randrange(side) if pad else 0) for side in patch),
        "patch_size": patch,
        "in_chans": chance.randint(1, 3),
        "num_classes": chance.choice([0, 1, 3, 7]),
        "global_pool": chance.choice(pools),
        "embed_dim": width,
        "depth": chance.choice([1, 1, 1, 2]),
        "num_heads": heads,
        "mlp_ratio": (chance.randint(1, 3 * width) + 0.5) / width,
        "qkv_bias": chance.random() < 0.7,
        "qk_norm": chance.random() < 0.25,
        "proj_bias": chance.random() < 0.7,
        "init_values": chance.choice([None, 1e-5, 1]),
        "class_token": token,
        "pos_embed": chance.choice(["learn", "learn", "none"]),
        "no_embed_class": chance.random() < 0.3,
        "reg_tokens": chance.choice([0, 0, 1, 3]),
        "pre_norm": chance.random() < 0.3,
        "final_norm": chance.random() < 0.8,
        "fc_norm": chance.choice([None, True, False]),
        "pool_include_prefix": chance.random() < 0.3,
        "dynamic_img_size": dynamic,
        "dynamic_img_pad": pad,
        "embed_norm_layer": chance.choice([None, None, None, *norms]),
        "norm_layer": chance.choice(norms),
        "act_layer": chance.choice(ACTIVATIONS),
        **{f"{name}_rate": chance.choice(RATES) for name in DROPS},
    }


DROPS = ("drop", "pos_drop", "patch_drop", "proj_drop", "attn_drop", "drop_path")


def some(chance: random.Random, size: int) -> list[int]:
    return sorted(chance.sample(range(size), chance.randint(0, size)))


def random_topology(chance: random.Random, model: nn.Module, qk_dims: bool) -> hiap.Topology:
    """Any units of a model; in some a kind of branch is gone, or a constant, everywhere."""
    everywhere = {name: chance.choice(["any", "any", "any", None, 0]) for name in ("heads", "neurons")}
    columns: dict[str, list[Any]] = {"heads": [], "neurons": [], "value_dims": [], "qk_dims": []}
    for widths in hiap.Topology.from_counts(model).dense:
        for name, size in (("heads", widths.heads), ("neurons", widths.neurons)):
            kind = everywhere[name] if everywhere[name] != "any" else chance.choice(["any", "any", "any", None, 0])
            columns[name].append(None if size is None else some(chance, size) if kind == "any" else kind)
        kept = len(columns["heads"][-1] or ())
        columns["value_dims"].append([some(chance, widths.value_dim) for _ in range(kept)])
        columns["qk_dims"].append([some(chance, widths.qk_dim) if qk_dims else widths.qk_dim for _ in range(kept)])
    return hiap.Topology.from_counts(model, **columns)


def same_bytes(first: Path, second: Path) -> bool:
    return all(
        (first / name).read_bytes() == (second / name).read_bytes() for name in ("config.json", "model.safetensors")
    )


@pytest.mark.parametrize("group", range(GROUPS))
def test_random_models(group: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    @hypothesis.seed(group)
    @settings(max_examples=CASES // GROUPS, deadline=None, database=None)
    @given(chance=st.randoms(use_true_random=False), seed=st.integers(0, 2**31))
    def holds(chance: random.Random, seed: int) -> None:
        one_model(chance, seed, tmp_path_factory.mktemp("model"))

    holds()


def one_model(chance: random.Random, seed: int, folder: Path) -> None:
    options = random_options(chance)
    dense = VisionTransformer(**options, weight_init="skip").eval()
    randomise(dense, seed)
    dtype = chance.choice([torch.float64, torch.float32])
    dense = dense.to(dtype)
    x = images(dense)
    expected = dense(x)
    check_savable(dense)

    kinds = [kind for kind in hiap.GRANULARITIES if not (kind == "qk_dim" and options["qk_norm"])]
    gated = hiap.attach(copy.deepcopy(dense), kinds)
    assert torch.equal(gated(x), expected)
    randomise(gated, seed + 1)
    for gate in hiap.gates(gated):
        gate.logit.data.fill_(1.0)
    gated.load_state_dict(dense.state_dict())
    assert torch.equal(gated(x), expected)

    topology = random_topology(chance, dense, "qk_dim" in kinds)
    round_to = chance.choice([1, 2, 8])
    hiap.set_topology(gated, topology)
    compact = hiap.extract(gated, round_to=round_to).eval()
    assert compact.hiap.logit_difference <= compact.hiap.tolerance
    assert hiap.macs(compact) == hiap.macs(gated, round_to=round_to) == counted_macs(compact, x)

    hiap.save(compact, folder / "one")
    loaded = hiap.load(folder / "one")
    assert torch.equal(loaded(x), compact(x)) and loaded.hiap == compact.hiap
    if seed % 5:
        return
    hiap.save(loaded, folder / "two")
    assert same_bytes(folder / "one", folder / "two")
    again = hiap.extract(loaded, random_topology(chance, loaded, "qk_dim" in kinds), round_to=1)
    hiap.save(again, folder / "two")
    assert torch.equal(hiap.load(folder / "two")(x), again(x))
