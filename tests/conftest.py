"""Small models of every accepted kind, with parameters away from timm's zeros and ones."""

import gc
import io
import json
import logging
import os
import tarfile
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

# Without a GPU, Triton's kernels run in its interpreter. It asks for this when it is first imported, which torch does.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["HIAP_CACHE"] = os.devnull  # nothing is kept between tests

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.models.vision_transformer import VisionTransformer
from torch import nn

import hiap.training.loop  # noqa: F401

logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # of torchao, which Transformers imports at some time

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # in processes that tests start


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> Iterator[None]:
    """A run collects garbage at every phase; what imports have made need not be searched each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3, "num_classes": 7}

# kind -> (timm name, overrides). The names bring the layer types, pooling, tokens and norms of the real models.
KINDS = {
    "augreg": ("vit_tiny_patch16_224", {}),
    "clip": ("vit_base_patch16_clip_224", {}),
    "clip_quickgelu": ("vit_base_patch16_clip_quickgelu_224", {}),
    "siglip": ("vit_base_patch16_siglip_224", {}),
    "siglip_gap": ("vit_base_patch16_siglip_gap_224", {}),
    "mae": ("vit_base_patch16_224.mae", {}),
    "deit": ("deit_tiny_patch16_224", {}),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", {}),
    "deit3": ("deit3_small_patch16_224", {}),
    "dinov2": ("vit_small_patch14_dinov2", {}),
    "dinov2_registers": ("vit_small_patch14_reg4_dinov2", {}),
    "no_class_token": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "no_qkv_bias": ("vit_tiny_patch16_224", {"qkv_bias": False}),
    "no_proj_bias": ("vit_tiny_patch16_224", {"proj_bias": False}),
    "layer_scale": ("vit_tiny_patch16_224", {"init_values": 0.1}),
    "drop_path": (
        "vit_tiny_patch16_224",
        {
            "drop_path_rate": 0.2,
            "proj_drop_rate": 0.1,
            "attn_drop_rate": 0.15,
            "drop_rate": 0.25,
            "pos_drop_rate": 0.3,
            "patch_drop_rate": 0.35,
            "embed_norm_layer": "layernorm",
        },
    ),
    "qk_norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "rectangle": ("vit_tiny_patch16_224", {"img_size": (32, 48)}),
    "dynamic_size": ("vit_tiny_patch16_224", {"dynamic_img_size": True, "dynamic_img_pad": True}),
    "all_tokens": ("vit_tiny_patch16_224", {"global_pool": ""}),
    "features": ("vit_tiny_patch16_224", {"num_classes": 0}),
    "one_channel": ("vit_tiny_patch16_224", {"in_chans": 1}),
    "rms_norm": ("vit_tiny_patch16_224", {"norm_layer": "rmsnorm", "no_embed_class": True}),
    "no_positions": ("vit_tiny_patch16_224", {"pos_embed": "none", "class_token": False, "global_pool": "avg"}),
}

SHARED = Path(__file__).resolve().parents[2] / "shared"


def make(kind: str = "augreg", **overrides: object) -> VisionTransformer:
    """A small model of a kind, every parameter random, in float64 and eval."""
    name, own = KINDS[kind]
    torch.manual_seed(0)
    model = timm.create_model(name, **{**SMALL, **own, **overrides})
    randomise(model)
    return model.double().eval()


def randomise(model: nn.Module, seed: int = 1) -> None:
    """Move every parameter away from the values that hide a lost bias, norm or branch."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = 0.3 if p.ndim > 1 else 0.5
            p.copy_(torch.randn(p.shape, generator=generator) * spread)
            if "norm" in name and name.endswith("weight"):
                p.add_(1.0)


def images(model: VisionTransformer, count: int = 2, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    like = next(model.parameters())
    channels = model.patch_embed.proj.in_channels
    return torch.randn(count, channels, *model.patch_embed.img_size, generator=generator, dtype=torch.float64).to(like)


def pictures(folder: Path, count: int, colour: tuple[int, int, int] = (0, 0, 0)) -> None:
    """A folder of plain pictures, no two of them alike."""
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        Image.new("RGB", (8, 8), tuple(part + i for part in colour)).save(folder / f"{i}.png")


def grey_photos(root: Path, train: int) -> None:
    """Photos of three classes that differ in their grey: so many of each to train on, and four to score on."""
    for split, pictures in (("train", train), ("val", 4)):
        for label in range(3):
            folder = root / split / str(label)
            folder.mkdir(parents=True)
            for i in range(pictures):
                Image.fromarray(np.full((16, 16, 3), 80 * label + i, dtype=np.uint8)).save(folder / f"{i}.png")


def write_photos(root: Path) -> str:
    """An image folder with grey, palette and transparent pictures among ordinary ones; returns the name for --data."""
    chance = np.random.default_rng(0)
    for split, pictures in (("train", 12), ("val", 4)):
        for name in ("cat", "dog"):
            folder = root / split / name
            folder.mkdir(parents=True)
            for i in range(pictures):
                image = Image.fromarray(chance.integers(0, 255, (20, 24, 3), dtype=np.uint8))
                mode = {0: "L", 1: "P", 2: "RGBA"}.get(i, "RGB")
                image.convert(mode).save(folder / f"{i}.png")
    return str(root)


def write_shards(root: Path, shards: dict[str, list[int]], classes: int = 1000, broken: int | None = None) -> str:
    """Tar shards with so many pictures each, labelled by their number modulo `classes`; returns the name for --data."""
    chance, numbers, splits = np.random.default_rng(0), count(), {}
    root.mkdir(exist_ok=True)
    for split, lengths in shards.items():
        names = [f"{split}-{i:04}.tar" for i in range(len(lengths))]
        splits[split] = {
            "name": split,
            "num_samples": sum(lengths),
            "filenames": names,
            "shard_lengths": lengths,
        }
        for name, length in zip(names, lengths, strict=True):
            with tarfile.open(root / name, "w") as tar:
                for number in islice(numbers, length):
                    pixels = io.BytesIO()
                    picture = Image.fromarray(chance.integers(0, 255, (20, 24, 3), dtype=np.uint8))
                    picture.convert({0: "L", 1: "P", 2: "RGBA"}.get(number % 7, "RGB")).save(pixels, "PNG")
                    image = b"not an image" if number == broken else pixels.getvalue()
                    for kind, content in (("png", image), ("cls", str(number % classes).encode())):
                        member = tarfile.TarInfo(f"{number:06}.{kind}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
    (root / "_info.json").write_text(json.dumps({"splits": splits}))
    return f"wds/shards:{root}"


# kinds that `make quick` tests, with pooling, tokens, norms and biases of every sort; the others are slow
QUICK = ("augreg", "siglip", "deit_distilled", "dinov2_registers", "no_proj_bias", "qk_norm", "rms_norm")


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return Path(write_photos(tmp_path / "photos"))


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest test first, so that no process waits for it in the end."""
    items.sort(key=lambda item: "test_story" not in item.nodeid)
