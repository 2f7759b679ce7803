"""Small ViTs of Hugging Face Transformers, of every class that is known, and what their tests share."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hiap
from conftest import randomise
from hiap.models.transformers import FAMILY

transformers = pytest.importorskip("transformers", reason="Transformers is not installed")

SIZE, LABELS = 16, 5
SMALL = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": SIZE, "patch_size": 4}
WIDE = {**SMALL, "intermediate_size": 40}
TEXT = {
    **{"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16, "vocab_size": 20},
    **{"max_position_embeddings": 6, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "projection_size": 24},
}


def whole(config: str, vision: str, text_config: Any = None, **more: Any) -> Any:
    """The configuration of a model of images and texts."""
    vision_config = getattr(transformers, vision)(**WIDE, **more).to_dict()
    made = getattr(transformers, config)(vision_config=vision_config, text_config=text_config)
    made.num_labels = LABELS
    return made


def both(family: str) -> Any:
    """A small model of images and texts, in float64 and eval."""
    text = getattr(transformers, f"{family}TextConfig")(**TEXT).to_dict()
    config = whole(f"{family}Config", f"{family}VisionConfig", text_config=text, projection_dim=9)
    config.projection_dim = 9
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(config)
    randomise(model)
    return model.double().eval()


def vit(config: str, **more: Any) -> Any:
    return getattr(transformers, config)(**WIDE, num_labels=LABELS, **more)


def dino(config: str, **more: Any) -> Any:
    return getattr(transformers, config)(**SMALL, mlp_ratio=2, num_labels=LABELS, layerscale_value=0.5, **more)


def dino3(**more: Any) -> Any:
    return transformers.DINOv3ViTConfig(**WIDE, num_register_tokens=2, layerscale_value=0.5, **more)


def clip(**more: Any) -> Any:
    return transformers.CLIPVisionConfig(**WIDE, **more)


# name of a case -> class, configuration and further arguments
CASES: dict[str, tuple[str, Callable[..., Any], dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", lambda **k: vit("ViTConfig", **k), {}),
    "vit_no_bias": ("ViTForImageClassification", lambda **k: vit("ViTConfig", qkv_bias=False, hidden_act="relu"), {}),
    "vit_features": ("ViTForImageClassification", lambda **k: transformers.ViTConfig(**WIDE, num_labels=0), {}),
    "vit_bare": ("ViTModel", lambda **k: vit("ViTConfig", **k), {}),
    "vit_tokens": ("ViTModel", lambda **k: vit("ViTConfig", **k), {"add_pooling_layer": False, "use_mask_token": True}),
    "deit": ("DeiTForImageClassification", lambda **k: vit("DeiTConfig", **k), {}),
    "deit_teacher": ("DeiTForImageClassificationWithTeacher", lambda **k: vit("DeiTConfig", **k), {}),
    "deit_bare": ("DeiTModel", lambda **k: vit("DeiTConfig", **k), {}),
    "dinov2": ("Dinov2ForImageClassification", lambda **k: dino("Dinov2Config", **k), {}),
    "dinov2_bare": ("Dinov2Model", lambda **k: dino("Dinov2Config", **k), {}),
    "registers": ("Dinov2WithRegistersForImageClassification", lambda **k: dino("Dinov2WithRegistersConfig", **k), {}),
    "registers_bare": ("Dinov2WithRegistersModel", lambda **k: dino("Dinov2WithRegistersConfig", **k), {}),
    "swiglu": ("Dinov2ForImageClassification", lambda **k: dino("Dinov2Config", use_swiglu_ffn=True, **k), {}),
    "stages": ("Dinov2Backbone", lambda **k: dino("Dinov2Config", out_features=["stage1", "stage3"], **k), {}),
    "stages_registers": (
        "Dinov2WithRegistersBackbone",
        lambda **k: dino("Dinov2WithRegistersConfig", apply_layernorm=False, reshape_hidden_states=False, **k),
        {},
    ),
    "dinov3": ("DINOv3ViTModel", lambda **k: dino3(**k), {}),
    "dinov3_glu": ("DINOv3ViTModel", lambda **k: dino3(use_gated_mlp=True, query_bias=False, value_bias=False), {}),
    "dinov3_stages": ("DINOv3ViTBackbone", lambda **k: dino3(out_features=["stage2", "stage3"], **k), {}),
    "clip": ("CLIPForImageClassification", lambda **k: whole("CLIPConfig", "CLIPVisionConfig", **k), {}),
    "clip_bare": ("CLIPVisionModel", clip, {}),
    "clip_projection": ("CLIPVisionModelWithProjection", lambda **k: clip(projection_dim=9, **k), {}),
    "siglip": ("SiglipForImageClassification", lambda **k: whole("SiglipConfig", "SiglipVisionConfig", **k), {}),
    "siglip_bare": ("SiglipVisionModel", lambda **k: transformers.SiglipVisionConfig(**WIDE, **k), {}),
    "siglip_tokens": (
        "SiglipVisionModel",
        lambda **k: transformers.SiglipVisionConfig(**WIDE, vision_use_head=False),
        {},
    ),
}
BARE = {name for name, (cls, _, _) in CASES.items() if "Classification" not in cls}


def make(case: str, **more: Any) -> Any:
    """A small model, every parameter random, in float64 and eval."""
    cls, config, options = CASES[case]
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config(**more), **options)
    randomise(model)
    model = model.double().eval()
    for module in model.modules():  # stays in float32 when Transformers loads a model in another precision
        if hasattr(module, "inv_freq"):
            module.inv_freq = module.inv_freq.float()
    return model


def pixels() -> torch.Tensor:
    return torch.randn(3, 3, SIZE, SIZE, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def close(first: torch.Tensor, second: torch.Tensor, allowed: float = 1e-12) -> bool:
    return bool((first - second).abs().max() <= allowed * first.abs().max())


def ragged(model: nn.Module) -> hiap.Topology:
    """Units of every granularity gone: dims, heads, neurons, an attention, an FFN, and one of each to its bias."""
    paired = any(site.pairs for site in FAMILY.sites(model))
    return hiap.Topology.from_counts(
        model,
        heads=[[1], None, [0, 2]],
        value_dims=[5, 8, [[0, 3], 7]],
        qk_dims=[[[0, 1, 3, 4, 5, 7]], 8, [[0, 2, 4, 6], [1, 5]]] if paired else [6, 8, [4, 3]],
        neurons=[[1, 4, 9], None, 0],
    )


def flops(model: nn.Module, images: torch.Tensor) -> int:
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(images)
    return int(counter.get_total_flops())
