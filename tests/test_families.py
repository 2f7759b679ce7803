"""Which models qualify, by their real names in timm's registry, built on the meta device."""

import itertools
import re
from pathlib import Path

import pytest
import timm
import torch
from torch import nn
from torch.nn.utils import prune

import hiap
import registry
from conftest import make
from hiap.models.registry import sites
from hiap.models.weights import create_model

ACCEPTED = [
    "vit_tiny_patch16_224",
    "vit_base_patch16_224.augreg2_in21k_ft_in1k",
    "vit_base_patch16_clip_224.openai",
    "vit_base_patch32_clip_quickgelu_224",
    "vit_base_patch16_siglip_224",
    "vit_so400m_patch14_siglip_224",
    "vit_base_patch16_siglip_gap_224",
    "vit_base_patch16_224.mae",
    "deit_base_patch16_224",
    "deit_base_distilled_patch16_224",
    "deit3_base_patch16_224",
    "vit_small_patch14_dinov2",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_gap_224",
    "vit_medium_patch16_reg4_gap_256",
    "vit_base_patch16_384",
    "vit_tiny_r_s16_p8_224",
]
CONVERTED = [  # whose blocks become ours while they have gates
    "vit_small_patch16_dinov3",
    "vit_pe_core_tiny_patch16_384",
    "vit_small_patch16_rope_224",
    "eva02_tiny_patch14_224",
]

REFUSED = {
    "vit_small_patch16_18x2_224": r"blocks\.0 is a ParallelThingsBlock: .*parallel.*would need",
    "vit_pwee_patch16_reg1_gap_256": r"blocks\.0 is a ParallelScalingBlock: .*parallel",
    "vit_dwee_patch16_reg1_gap_256": r"blocks\.0\.attn is a DiffAttention: its heads normalise their values",
    "vit_base_patch16_rpn_224": r"blocks\.0 is a ResPostBlock: it normalises after",
    "vit_relpos_small_patch16_224": "the model is a VisionTransformerRelPos: .*relative position",
    "eva02_base_patch16_clip_224": r"blocks\.0\.attn\.norm is a LayerNorm: a norm between the units",
    "eva02_enormous_patch14_clip_224": r"blocks\.0 is a EvaBlockPostNorm: it normalises after",
    "swin_tiny_patch4_window7_224": "the model is a SwinTransformer: it is not a timm VisionTransformer",
    "resnet18": "the model is a ResNet: it is not a timm VisionTransformer",
}


def on_meta(name: str, **changes: int) -> nn.Module:
    if not timm.is_model(name.partition(".")[0]):
        pytest.skip(f"this timm has no {name}")
    with torch.device("meta"):
        return timm.create_model(name, **changes)


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name: str) -> None:
    model = on_meta(name)
    depth = len(model.blocks)
    before = dict(model.named_parameters())
    hiap.attach(model, hiap.GRANULARITIES)
    after = dict(model.named_parameters())
    assert before.items() <= after.items()
    gated = {key.partition(".gates.")[0] for key in after if ".gates." in key}
    assert gated == {f"blocks.{i}.{m}" for i in range(depth) for m in ("attn.proj", "attn.qkv", "mlp.fc2")}


@pytest.mark.parametrize("name", CONVERTED)
def test_accepted_and_converted(name: str) -> None:
    model = on_meta(name)
    before = {key: tuple(p.shape) for key, p in model.named_parameters()}
    hiap.attach(model, hiap.GRANULARITIES)
    gated = {key.partition(".gates.")[0] for key, _ in model.named_parameters() if ".gates." in key}
    blocks = range(len(model.blocks))
    assert gated == {f"blocks.{i}.{m}" for i in blocks for m in ("attn.proj", "attn.qkv", "mlp.fc2")}
    hiap.detach(model)
    assert {key: tuple(p.shape) for key, p in model.named_parameters()} == before


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model = on_meta(name)
    with pytest.raises(hiap.UnsupportedModelError, match=REFUSED[name]):
        hiap.attach(model)
    with pytest.raises(hiap.UnsupportedModelError, match=REFUSED[name]):
        hiap.macs(model)
    assert not list(hiap.gates(model))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("scale_attn_norm", r"blocks\.0\.attn\.norm is a LayerNorm: a norm between the units"),
        ("scale_mlp_norm", r"blocks\.0\.mlp\.norm is a LayerNorm: a norm between the units"),
    ],
)
def test_norms_between_units_and_their_readers_are_refused(option: str, message: str) -> None:
    with pytest.raises(hiap.UnsupportedModelError, match=message):
        hiap.attach(make(**{option: True}))


def test_masked_weights_are_refused_and_nothing_is_changed() -> None:
    model = make()
    prune.l1_unstructured(model.blocks[1].mlp.fc2, "weight", 0.3)
    for _ in range(2):
        with pytest.raises(hiap.UnsupportedModelError, match=r"blocks\.1\.mlp\.fc2 is a Linear: .* weight of its own"):
            hiap.attach(model)


def test_gated_attention_is_refused() -> None:
    model = make()
    model.blocks[1].attn.gate = nn.Linear(24, 24)
    with pytest.raises(hiap.UnsupportedModelError, match=r"blocks\.1\.attn\.gate is a Linear: gated attention"):
        hiap.attach(model)


def test_layers_replaced_by_the_user_are_refused() -> None:
    class LoraLinear(nn.Linear):
        pass

    model = make()
    model.blocks[2].mlp.fc2 = LoraLinear(96, 24)
    with pytest.raises(hiap.UnsupportedModelError, match=r"blocks\.2\.mlp\.fc2 is a LoraLinear: .*nn\.Linear"):
        hiap.attach(model)


def test_the_attention_pool_is_counted_and_never_gated() -> None:
    model = hiap.attach(make("siglip"), hiap.GRANULARITIES)
    assert not any("attn_pool" in name for name, m in model.named_modules() if isinstance(m, hiap.Gate))
    without = make("siglip")
    without.attn_pool = None
    without.global_pool = "avg"
    N, D, F = 16, 24, without.blocks[0].mlp.fc1.out_features
    pool = D * D + N * 2 * D * D + 2 * N * D + D * D + 2 * D * F
    assert hiap.macs(make("siglip")) - hiap.macs(without) == pool


PAGE = Path(__file__).resolve().parents[1] / "docs/family.md"


def rows(heading: str) -> list[list[str]]:
    """The cells of the table on the page of families whose heading begins so."""
    lines = PAGE.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(heading)) + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[first:])
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def named(example: str) -> nn.Module:
    """The model that a page names, on the meta device; of Transformers, with the default configuration of its class."""
    library, _, name = example.replace("transformers.", "transformers:").rpartition(":")
    if not library:
        whole = "swin" in name or "sapiens2" in name  # which have an argument for each block
        return on_meta(name) if whole else on_meta(name, depth=2)
    with torch.device("meta"):
        if library == "torchvision":
            return create_model(example, False, {})
        cls = getattr(pytest.importorskip("transformers"), name)
        return cls(cls.config_class())


@pytest.mark.parametrize(("example", "cut"), [row[1:] for row in rows("| models | example | cut as well |")])
def test_the_page_of_families_says_what_is_cut(example: str, cut: str) -> None:
    model = named(example.strip("`"))
    site = sites(model)[0]
    queries = [] if site.qk_norm else ["q/k pairs" if site.pairs else "q/k dims"]
    assert cut == ", ".join([*queries, "gated neurons" if site.glu else "neurons"])
    hiap.attach(model, [kind for kind in hiap.GRANULARITIES if not (site.qk_norm and kind == "qk_dim")])


@pytest.mark.parametrize(("example", "reason"), rows("| example | because |"))
def test_the_page_of_families_says_what_is_refused(example: str, reason: str) -> None:
    model = named(example.strip("`"))
    for use in (hiap.attach, hiap.macs):
        with pytest.raises(hiap.UnsupportedModelError, match=re.escape(reason)):
            use(model)


def test_the_registry_script_groups_refusals_by_reason() -> None:
    small = {"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}
    with torch.device("meta"):
        models = {
            "plain": timm.create_model("vit_tiny_patch16_224", **small),
            "hybrid": timm.create_model("vit_tiny_r_s16_p8_224", **small),
            "one": timm.create_model("vit_tiny_patch16_224", scale_mlp_norm=True, **small),
            "two": timm.create_model("vit_small_patch16_224", scale_mlp_norm=True, **small),
        }
    found = registry.sorted_out(iter(models.items()), recipes=True)
    between = "a norm between the units and the layer that reads them changes when a unit is removed"
    assert found == {
        "accepted": ["plain", "hybrid"],
        "wrong": [],
        "refused": {f"blocks.*.mlp.norm is a LayerNorm: {between}": ["one", "two"]},
    }


def test_the_readme_names_the_families_of_the_page() -> None:
    readme = (PAGE.parents[1] / "README.md").read_text()
    table = [line for line in readme.splitlines() if line.startswith("|") and "--model" in line]
    sources = [line.strip("|").split(" | ")[1].strip() for line in table]
    assert sources == ["timm", "torchvision", "Hugging Face Transformers"]
    page = " ".join(row[0] for row in rows("| models | example | cut as well |"))
    for line in (table[0], table[2]):
        names = line.strip("|").split(" | ")[0].removesuffix(", and many more").split(", ")
        missing = [name.strip() for name in names if name.split(" ")[0].strip() not in page]
        assert not missing
    for example in re.findall(r"--model (\S+?)`", " ".join(table[:2])):
        assert sites(named(example))


def test_the_classes_of_transformers_on_the_page_are_all_that_are_known() -> None:
    parts = pytest.importorskip("hiap.models.transformers_parts")
    page = " ".join(row[0] for row in rows("| models | example | cut as well |"))
    families = {
        "ViT": "ViT",
        "DeiT": "DeiT",
        "Dinov2": "DINOv2",
        "DINOv3": "DINOv3",
        "CLIP": "CLIP",
        "Siglip": "SigLIP",
    }
    known = {next(words for start, words in families.items() if name.startswith(start)) for name in parts.CLASSES}
    assert known == set(families.values())
    assert all(words in page for words in known)
