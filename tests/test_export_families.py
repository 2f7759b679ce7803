"""Every family can be exported: its graph is traced and compared, and folders hold it or are refused at once."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import nn

import any_family
import conftest
import hiap
import test_timm_variants as variants
import test_torchvision as torchvision_models
from hiap.export.exporting import export_model
from hiap.export.network import Deployable, traced
from hiap.models.family import logits_of
from hiap.models.registry import family_of, sites

pytestmark = pytest.mark.slow


def made(name: str) -> nn.Module:
    """A tiny model of a family in float32: "timm:", "variant:", "torchvision:" or "transformers:" and a kind of it."""
    source, _, kind = name.partition(":")
    if source == "transformers":
        pytest.importorskip("transformers")
        import small_transformers as transformers_models

        return transformers_models.make(kind).float()
    makers: dict[str, Any] = {
        "timm": conftest.make,
        "variant": variants.make,
        "torchvision": torchvision_models.make,
    }
    return makers[source](kind).float()


def images_for(model: nn.Module, count: int) -> torch.Tensor:
    shape = family_of(model).input_shape(model)
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(5))


def equal(model: nn.Module) -> nn.Module:
    """Half of the neurons of each block: what timm's constructor can make."""
    halves = [site.widths.neurons // 2 for site in sites(model)]
    return hiap.extract(model, hiap.Topology.from_counts(model, neurons=halves), 1)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and bool((found - expected).abs().max() <= 1e-4 * expected.abs().max())


@torch.no_grad()
@pytest.mark.parametrize("kind", ["augreg", "siglip", "features", "all_tokens", "one_channel", "rectangle"])
def test_the_network_that_is_exported_computes_what_the_model_does(kind: str) -> None:
    model = conftest.make(kind).float()
    for network in (Deployable(model), Deployable(model, flat=True)):
        images = torch.randn(3, *network.shape)
        assert torch.allclose(network(images), model(images), atol=1e-4 * float(model(images).abs().max()))


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["variant:beit", "torchvision:pre_logits", "transformers:dinov3_glu"],  # positions, stems and MLPs of all kinds
)
def test_the_graph_of_a_ragged_model_gives_its_outputs_for_any_number_of_images(name: str) -> None:
    model = made(name)
    compact = hiap.extract(model, any_family.ragged(model, 4), 1)
    network = Deployable(compact)
    program = traced(network, network.shape, None).module()
    images = images_for(compact, 7)
    expected = logits_of(compact(images))
    assert all(close(program(images[:count]), expected[:count]) for count in (1, 2, 7))


@torch.no_grad()
def test_a_model_that_takes_any_image_size_is_exported_for_one() -> None:
    """timm resamples its positions in every forward that is traced, by an operator that OpenVINO does not have."""
    model = conftest.make("dynamic_size", depth=1).float()
    network, images = Deployable(model), images_for(model, 3)
    assert close(network(images), model(images))
    program = traced(network, network.shape, None)
    assert not [node for node in program.graph.nodes if "upsample" in str(node.target)]
    with pytest.raises((AssertionError, RuntimeError), match="32"):
        program.module()(torch.zeros(1, 3, 48, 48))


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    [
        *("timm:rms_norm", "timm:drop_path", "variant:eva02", "variant:dinov3_swiglu", "variant:beit"),
        "variant:plain_glu",
    ],
)
def test_timm_reads_every_family_of_its_own_if_the_blocks_are_alike(name: str, tmp_path: Path) -> None:
    compact = equal(made(name))
    report = export_model(compact, tmp_path / "plain", "timm")
    found = timm.create_model(f"local-dir:{tmp_path / 'plain'}", pretrained=True).eval()
    assert type(found) is type(compact) and type(found.blocks[0]).__module__.startswith("timm.")
    assert close(found(images_for(compact, 3)), compact(images_for(compact, 3)))
    assert max(report["difference"].values()) <= 1e-5 and hiap.macs(found) == hiap.macs(compact)


TIMM_INSTEAD = r"\. Load the folder of hiap\.save by timm\.create_model\('local-dir:FOLDER'\) after `import hiap`, or "


@pytest.mark.parametrize(
    ("name", "form", "message"),
    [
        ("timm:siglip", "timm", r"its attn_pool\.mlp\.fc1\.bias has the shape \(96,\), timm's \(48,\)" + TIMM_INSTEAD),
        ("variant:geglu", "timm", "its mlp_layer is geglu, timm's None" + TIMM_INSTEAD),
        ("variant:sapiens2", "timm", "num_kv_heads sequence must have one entry per block" + TIMM_INSTEAD),
        ("timm:augreg", "transformers", "found a VisionTransformer of timm" + TIMM_INSTEAD),
        (
            "torchvision:plain",
            "transformers",
            r"found a VisionTransformer of torchvision\. Load the folder of hiap\.save by hiap\.load, or export to ",
        ),
        ("torchvision:plain", "timm", r"Load the folder of hiap\.save by hiap\.load, or export to onnx"),
        ("transformers:vit", "timm", r"found a ViTForImageClassification\. Export it to transformers, or to onnx"),
    ],
)
def test_a_family_that_a_folder_cannot_hold_is_refused_with_what_to_do_instead(
    name: str, form: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(hiap.InputError, match=message):
        export_model(equal(made(name)), tmp_path / "plain", form)
    assert not list(tmp_path.iterdir())


@torch.no_grad()
def test_a_bias_of_keys_that_timm_has_not_is_refused_where_it_matters_and_left_out_where_not(tmp_path: Path) -> None:
    for name in ("variant:dinov3_swiglu", "variant:beit"):
        compact = equal(made(name))
        attention = compact.blocks[1].attn
        attention.qkv.bias.split(attention.split)[1].fill_(0.5)
        if name == "variant:beit":  # all scores of a query change alike
            assert max(export_model(compact, tmp_path / "plain", "timm")["difference"].values()) <= 1e-5
        else:
            with pytest.raises(hiap.InputError, match=r"the keys of blocks\.1 have a bias, timm's have none"):
                export_model(compact, tmp_path / "plain", "timm")


@torch.no_grad()
def test_a_dense_model_of_transformers_is_read_by_its_own_class(tmp_path: Path) -> None:
    model: Any = made("transformers:clip_projection")
    export_model(model, tmp_path / "dense", "transformers")
    found = type(model).from_pretrained(tmp_path / "dense").eval()
    images = images_for(model, 2)
    assert close(found(images).image_embeds, model(images).image_embeds)
    with pytest.raises(hiap.ExportError, match=r"Transformers adds 'pooler\.dense\.bias' to a ViTModel that it reads"):
        export_model(made("transformers:vit_tokens"), tmp_path / "tokens", "transformers")
    assert {file.name for file in tmp_path.iterdir()} == {"dense", "dense.json"}
