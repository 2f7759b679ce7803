"""A ViT of one's own, described by paths, goes all the way; what does not fit its description is refused."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import any_family
import hiap
from hiap.models.registry import family_of
from own_vit import DIM, HEADS, KINDS, NONE, PACKED, Layer, OwnViT, describe, kinds_of, make
from runs import noise_data, pruned_twice

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is gone after it."""
    known = hiap.register_family.__globals__["_FAMILIES"]
    before = dict(known)
    yield
    known.clear()
    known.update(before)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    hiap.register_family(describe(request.param))
    return request.param


def test_open_gates_change_nothing_and_come_out_again(kind: str, x: Tensor) -> None:
    any_family.gates_come_and_go(make(kind), x, kinds_of(kind))


def test_extraction_and_the_count_of_macs_are_exact(kind: str, x: Tensor) -> None:
    any_family.extraction_is_exact(make(kind), x, kinds_of(kind), cases=2)


def test_a_saved_model_comes_back(kind: str, x: Tensor, tmp_path: Path) -> None:
    any_family.a_folder_holds_it(make(kind, classes=5), x, tmp_path / "compact", kind != "qk_norm")
    saved = json.loads((tmp_path / "compact/config.json").read_text())
    assert saved["skeleton"] == {"arguments": {"kind": kind, "depth": 3, "size": 8}, "classes": 5}


def test_aligned_heads_compute_the_same(kind: str, x: Tensor) -> None:
    any_family.alignment_changes_nothing(make(kind), x)


def test_the_optimised_network_has_the_same_logits(kind: str, x: Tensor) -> None:
    any_family.optimising_changes_nothing(make(kind), x, kind != "qk_norm")


def test_it_can_be_timed() -> None:
    hiap.register_family(describe("packed"))
    any_family.it_can_be_timed(make("packed"))


def test_tokens_and_macs_outside_the_blocks_are_measured(kind: str) -> None:
    family, model = family_of(make(kind)), make(kind)
    assert family.tokens(model) == 5
    assert family.fixed_macs(model) == 4 * 16 * DIM + DIM * 9 + 9 * 7
    assert [site.dim for site in family.sites(model)] == [DIM] * 3


def test_a_model_without_any_branch_still_knows_its_width(x: Tensor) -> None:
    hiap.register_family(describe("split"))
    model = make()
    compact = hiap.extract(model, hiap.Topology.from_counts(model, heads=[None] * 3, neurons=[None] * 3))
    assert [site.dim for site in family_of(compact).sites(compact)] == [DIM] * 3
    assert hiap.macs(compact) == any_family.counted(compact, x) == 4 * 16 * DIM + DIM * 9 + 9 * 7


def test_a_run_prunes_it_and_can_be_resumed(tmp_path: Path) -> None:
    hiap.register_family(describe("packed"))
    whole, resumed = pruned_twice(make("packed").float(), noise_data(512, 8), tmp_path)
    loaded = hiap.load(tmp_path / "whole/compact")
    assert isinstance(loaded, OwnViT) and family_of(loaded).classes(loaded) == 10
    assert 0 < hiap.macs(loaded) <= 0.6 * whole.record["dense_macs"]
    assert loaded.usage["input_size"] == [1, 8, 8] and family_of(loaded).preprocessing(loaded).crop_mode == "squash"
    assert all(torch.equal(a, b) for a, b in zip(resumed.model.parameters(), whole.model.parameters(), strict=True))


def test_a_model_is_compared_once_and_again_where_its_blocks_or_its_description_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hiap.models import described

    calls, verify = [], described.verify
    monkeypatch.setattr(described, "verify", lambda *given: (calls.append(1), verify(*given)))
    hiap.register_family(describe("split"))
    model, state = make(), torch.get_rng_state()
    hiap.macs(model)
    hiap.attach(copy.deepcopy(model))
    assert len(calls) == 1 and torch.equal(torch.get_rng_state(), state)
    model.encoder["layers"][1].mlp = nn.Sequential(nn.Linear(DIM, 8), nn.SiLU(), nn.Linear(8, DIM)).double()
    hiap.macs(model)
    assert len(calls) == 2
    hiap.register_family(describe("split", act=nn.ReLU()))
    with pytest.raises(hiap.UnsupportedModelError, match="does not compute what its description says"):
        hiap.macs(model)


# -- what is refused ---------------------------------------------------------------------------------------------------

BLOCK = "encoder.layers.0"
WRONG = [  # kind, changes of the description, message
    (
        "split",
        {"q": "attn.query"},
        f"q='attn.query': {BLOCK}.attn is a SplitAttention without a member 'query' (it has q, k, v, out)",
    ),
    (
        "split",
        {"fc1": "ffn.up"},
        f"fc1='ffn.up': {BLOCK} is a Layer without a member 'ffn' (it has ln1, ln2, attn, mlp, path)",
    ),
    (
        "split",
        {"blocks": "layers"},
        "blocks='layers': the model is an OwnViT without a member 'layers' (it has patches, encoder, "
        "norm, head, token)",
    ),
    (
        "split",
        {"blocks": "head.0"},
        "blocks='head.0' is a Linear; an nn.ModuleList or an nn.Sequential of blocks is needed",
    ),
    ("split", {"stem": "token"}, "stem='token' is a Parameter, not a module"),
    (
        "split",
        {"stem": "norm"},
        "a forward must run norm and then every block once, in order; found encoder.layers.0, "
        "encoder.layers.1, encoder.layers.2, norm",
    ),
    ("split", {"head": "head"}, "head='head' is a Sequential; the nn.Linear that gives the logits is needed"),
    ("split", {"q": "mlp.1"}, f"q='mlp.1': {BLOCK}.mlp.1 is a SiLU, not a plain nn.Linear"),
    ("split", {"heads": "attn.q"}, f"heads='attn.q': {BLOCK}.attn.q is a Linear, not a count of heads"),
    ("split", {"heads": 5}, f"{BLOCK}: 5 heads do not divide the 12 outputs of q"),
    ("split", {"q": "attn.v"}, f"{BLOCK}: q has 20 outputs and k has 12: every head must have keys of its own"),
    ("split", {"out": "mlp.2"}, f"{BLOCK}: out reads 24 inputs and v has 20 outputs"),
    (
        "split",
        {"fc1": "attn.q"},
        f"{BLOCK}: fc2 reads 24 inputs and fc1 has 12 outputs: only an MLP of two Linears with an "
        "activation between them can be described",
    ),
    ("packed", {"scale1": ...}, f"{BLOCK}: the description does not name its parameter 'gamma', which would be lost"),
    (
        "packed",
        {"drop_path1": ...},
        "encoder.layers.1: the description does not name 'path', a DropPath, which is random in "
        "training. Name it as one of",
    ),
    (
        "packed",
        {"attn_drop": ...},
        f"{BLOCK}: the description does not name 'attn.drop', a Dropout, which is random in training. "
        "Name it as one of",
    ),
    (
        "hidden_dropout",
        {},
        "encoder.layers.1: in training the block has dropout, the description has none. Name it as one of",
    ),
    (
        "split",
        {"attention": "attn", **NONE},
        f"attention='attn': {BLOCK}.attn is a SplitAttention, not an nn.MultiheadAttention",
    ),
    (
        "seq_first",
        {"attention": "attn", **NONE},
        f"attention='attn': {BLOCK}.attn is a MultiheadAttention without batch_first=True, which cannot be cut exactly",
    ),
    (
        "split",
        {"size": 16},
        "the model cannot run in float64 on random images of the size described: RuntimeError: The size "
        "of tensor a (17) must match",
    ),
    ("split", {"size": "pixels"}, "size='pixels': the model is an OwnViT without a member 'pixels'"),
]


@pytest.mark.parametrize(("kind", "changes", "message"), WRONG, ids=[message[:40] for _, _, message in WRONG])
def test_a_description_that_does_not_fit_says_where(kind: str, changes: dict[str, Any], message: str) -> None:
    hiap.register_family(describe(kind, **changes))
    model = make(kind)
    with pytest.raises(hiap.UnsupportedModelError) as error:
        hiap.attach(model)
    assert str(error.value).startswith(message)
    assert all(type(block) is Layer for block in model.encoder["layers"])


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("post_norm", {}),
        ("odd_scale", {**NONE, **PACKED}),
        ("split", {"act": nn.GELU()}),
        ("split", {"norm1": "ln2", "norm2": "ln1"}),
    ],
    ids=["post-norm", "softmax scale", "activation", "norms exchanged"],
)
def test_a_block_that_computes_something_else_is_refused(kind: str, changes: dict[str, Any]) -> None:
    hiap.register_family(describe(kind, **changes))
    with pytest.raises(hiap.UnsupportedModelError) as error:
        hiap.macs(OwnViT(kind))  # with zeros and ones, which would hide it
    said = (
        r"encoder\.layers\.0 does not compute what its description says: outputs differ by \d\.\de-\d\d of the largest"
    )
    assert re.match(rf"{said}, allowed is 1e-09\. A block must compute x \+ scale1", str(error.value))


def test_a_model_that_uses_its_blocks_otherwise_is_refused() -> None:
    hiap.register_family(describe("split"))

    class Twice(OwnViT):
        def forward(self, images: Tensor) -> Tensor:
            self.encoder["layers"][1](self.encoder["layers"][0](torch.zeros(2, 5, DIM, dtype=images.dtype)))
            return super().forward(images)

    class Several(OwnViT):
        def forward(self, images: Tensor) -> Any:
            return super().forward(images), 1

    class Peeks(OwnViT):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * self.encoder["layers"][0].mlp[0].in_features

    for cls, message in (
        (Twice, "a forward must run patches and then every block once, in order; found encoder.layers.0, encoder"),
        (Several, "the model returns a tuple; a tensor of logits is needed"),
        (Peeks, "the model cannot run with converted blocks: TypeError: 'Mlp' object is not subscriptable"),
    ):
        with pytest.raises(hiap.UnsupportedModelError, match=re.escape(message)):
            hiap.attach(cls())


def test_a_block_that_rounds_to_float32_needs_a_tolerance() -> None:
    class Rounds(nn.SiLU):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.float()).to(x)

    model = make()
    model.encoder["layers"][0].mlp[1] = Rounds()
    hiap.register_family(describe("split", act=nn.SiLU()))
    said = r"encoder\.layers\.0 does not .* differ by \d\.\de-\d\d of the largest, allowed is 1e-09\. A difference this"
    with pytest.raises(hiap.UnsupportedModelError, match=said):
        hiap.macs(model)
    hiap.register_family(describe("split", act=nn.SiLU(), tolerance=1e-5))
    block = HEADS * (6 + 10) * (2 * 5 * DIM + 5 * 5) + 24 * 2 * 5 * DIM
    assert hiap.macs(model) == 3 * block + 4 * 16 * DIM + DIM * 9 + 9 * 7


def test_weights_that_are_not_finite_are_named_as_the_cause() -> None:
    hiap.register_family(describe("split"))
    model = make()
    model.encoder["layers"][0].mlp[2].bias.data[0] = torch.nan
    message = "encoder.layers.0 has outputs that are not finite on random images: are its weights finite?"
    with pytest.raises(hiap.UnsupportedModelError, match=re.escape(message)):
        hiap.attach(model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"out": ...}, "q=, k=, v=, out= and heads=; found heads, k, q, v"),
        ({"qkv": "attn.qkv"}, "q=, k=, v=, out= and heads=; found heads, k, out, q, qkv, v"),
        (NONE, "q=, k=, v=, out= and heads=; found none of them"),
        ({"act": F.gelu}, "act must be a path, or a module without parameters such as nn.GELU(); found <built-in"),
        ({"act": nn.PReLU()}, "act must be a path, or a module without parameters such as nn.GELU(); found PReLU("),
        ({"norm1": nn.LayerNorm}, "norm1 must be a path such as 'attn.norm1'; found <class"),
        ({**NONE, "attention": "attn", "attn_drop": "x"}, "an nn.MultiheadAttention has a dropout of its own: leave"),
        ({"std": (0.5, 0.5)}, "mean and std must have one value per channel; found (0.5,) and (0.5, 0.5)"),
    ],
)
def test_a_description_that_contradicts_itself_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hiap.InputError, match=re.escape(message)):
        describe("split", **changes)


def test_a_model_that_cannot_be_built_again_is_not_saved(tmp_path: Path) -> None:
    for arguments, message in (
        (..., "the description of 'own' does not say how a model is built again: give it arguments= (what OwnViT is"),
        ({"kind": nn.Linear}, "the arguments of 'own' cannot be written as JSON: Object of type type is not JSON"),
        ({"depth": 4}, "3 blocks, 3 dense ones and a depth of 4 do not agree"),
        ({"kinds": 1}, "'own' cannot be made with {'kinds': 1}: TypeError: OwnViT.__init__() got an unexpected"),
    ):
        hiap.register_family(describe("split", arguments=arguments))
        compact = hiap.extract(make(), any_family.ragged(make(), 0))
        with pytest.raises(hiap.CheckpointError, match=re.escape(message)):
            hiap.save(compact, tmp_path / "compact")


def test_a_folder_of_other_arguments_says_so(tmp_path: Path) -> None:
    hiap.register_family(describe("split", arguments={"depth": 3}))
    hiap.save(hiap.extract(make(), any_family.ragged(make(), 0)), tmp_path / "compact")
    assert isinstance(hiap.load(tmp_path / "compact"), OwnViT)
    hiap.register_family(describe("split", arguments={"depth": 4}))
    message = "the model was saved with the arguments {'depth': 3}, 'own' is registered with {'depth': 4}"
    with pytest.raises(hiap.CheckpointError, match=re.escape(message)):
        hiap.load(tmp_path / "compact")
    file = tmp_path / "compact/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "pretrained_cfg": {"std": [0.0]}}))
    with pytest.raises(hiap.CheckpointError, match=r"pretrained_cfg has std '\[0.0\]', which cannot be read"):
        hiap.load(tmp_path / "compact")


@pytest.mark.parametrize("name", ["timm", "torchvision"])
def test_the_names_of_families_that_come_along_are_taken(name: str) -> None:
    family = describe("split")
    family.name = name
    with pytest.raises(hiap.InputError, match=f"there is another family with the name '{name}': T"):
        hiap.register_family(family)


def test_of_two_families_that_accept_a_model_the_last_has_it() -> None:
    first, second = describe("packed"), describe("split")
    second.name = "other"
    for family in (first, second):
        hiap.register_family(family)
    assert family_of(make()) is second


def test_images_of_another_size_are_refused() -> None:
    hiap.register_family(describe("split"))
    with pytest.raises(hiap.InputError, match="the model takes images of 8x8; found 16"):
        hiap.macs(make(), img_size=16)
    assert hiap.macs(make(), img_size=8) == hiap.macs(make(), img_size=(8, 8)) == hiap.macs(make())
