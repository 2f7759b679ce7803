"""A family of one file: a hand-written ViT whose members have names of their own, and how hiap is told about it.

Queries, keys and values are three Linears, blocks live in `encoder.layers`, and the stem is a bare convolution.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hiap
from hiap.models.family import ImageSize, Preprocessing, Recipe, compact_widths
from hiap.nn.compact import Attention, Block, Mlp, Widths


class Layer(nn.Module):
    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query, self.key, self.value, self.output = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before_attention(x)
        q, k, v = (
            part(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.output(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class TinyViT(nn.Module):
    def __init__(
        self, size: int = 8, patch: int = 4, channels: int = 1, dim: int = 16, depth: int = 2, heads: int = 2,
        hidden: int = 32, classes: int = 10,
    ) -> None:  # fmt: skip
        super().__init__()
        self.size, self.patch, self.heads, self.hidden, self.labels = size, patch, heads, hidden, classes
        self.patchify = nn.Conv2d(channels, dim, patch, patch)
        self.positions = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.02)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(Layer(dim, heads, hidden) for _ in range(depth))})
        self.last_norm, self.to_labels = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def embed(self, images: Tensor) -> Tensor:
        return self.patchify(images).flatten(2).transpose(1, 2) + self.positions

    def read(self, tokens: Tensor) -> Tensor:
        return self.to_labels(self.last_norm(tokens).mean(1))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        for layer in self.encoder["layers"]:
            x = layer(x)
        return self.read(x)


class TinyFamily(hiap.Family):
    name = "tiny"

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, TinyViT)

    def sites(self, model: TinyViT) -> list[hiap.Site]:
        return [
            hiap.Site(self, f"encoder.layers.{i}", layer, model.positions.shape[-1], self._widths(layer))
            for i, layer in enumerate(model.encoder["layers"])
        ]

    def _widths(self, layer: nn.Module) -> Widths:
        if isinstance(layer, Block):
            return compact_widths(layer)
        width = layer.query.out_features // layer.heads
        return Widths(layer.heads, width, width, layer.up.out_features)

    def to_block(self, layer: Layer) -> Block:
        dim, width = layer.query.in_features, layer.query.out_features // layer.heads
        drop, same = nn.Dropout(0.0), nn.Identity
        attn = Attention(dim, layer.heads, width, width, width, True, True, same(), same(), drop, same())
        attn.qkv, attn.proj = _joined([layer.query, layer.key, layer.value]), layer.output
        mlp = Mlp(dim, 1, True, True, nn.GELU(), same(), same())
        mlp.fc1, mlp.fc2 = layer.up, layer.down
        block = Block(layer.before_attention, attn, same(), same(), layer.before_mlp, mlp, same(), same())
        return block.train(layer.training)

    def from_block(self, block: Block) -> Layer:
        layer = Layer(1, 1, 1)
        layer.heads, layer.before_attention, layer.before_mlp = block.attn.num_heads, block.norm1, block.norm2
        layer.query, layer.key, layer.value = _parted(block.attn.qkv)
        layer.output, layer.up, layer.down = block.attn.proj, block.mlp.fc1, block.mlp.fc2
        return layer.train(block.training)

    def stem(self, model: TinyViT) -> nn.Module:
        return model.patchify

    def input_shape(self, model: TinyViT, size: ImageSize = None) -> tuple[int, int, int]:
        if size not in (None, model.size, (model.size, model.size)):
            raise hiap.InputError(f"the model takes images of {model.size} pixels; found {size}")
        return model.patchify.in_channels, model.size, model.size

    def tokens(self, model: TinyViT, size: ImageSize = None) -> int:
        return model.positions.shape[1]

    def fixed_macs(self, model: TinyViT, size: ImageSize = None) -> int:
        return self.tokens(model) * model.patchify.weight.numel() + model.to_labels.weight.numel()

    def embed(self, model: TinyViT, images: Tensor) -> Tensor:
        return model.embed(images)

    def head(self, model: TinyViT, tokens: Tensor) -> Tensor:
        return model.read(tokens)

    def describe(self, model: TinyViT, origin: Recipe | None = None) -> Recipe:
        return {
            "size": model.size,
            "patch": model.patch,
            "channels": model.patchify.in_channels,
            "dim": model.positions.shape[-1],
            "depth": len(model.encoder["layers"]),
            "heads": model.heads,
            "hidden": model.hidden,
            "classes": model.labels,
        }

    def build(self, recipe: Recipe) -> nn.Module:
        if not all(type(value) is int and 0 < value < 10_000 for value in recipe.values()):
            raise hiap.CheckpointError("the skeleton of a tiny ViT is made of counts")
        with torch.device("meta"):
            return TinyViT(**recipe)

    def classes(self, model: TinyViT) -> int:
        return model.labels

    def set_classes(self, model: TinyViT, classes: int) -> None:
        model.labels, model.to_labels = classes, nn.Linear(model.to_labels.in_features, classes)

    def classifier(self, model: TinyViT) -> list[nn.Module]:
        return [model.to_labels]

    def preprocessing(self, model: TinyViT) -> Preprocessing:
        return Preprocessing((model.size, model.size), (0.5,), (0.5,))


def _joined(linears: list[nn.Linear]) -> nn.Linear:
    first = linears[0].weight
    joined = nn.Linear(first.shape[1], 3 * first.shape[0], device=first.device, dtype=first.dtype)
    for name in ("weight", "bias"):
        tensors: list[Any] = [getattr(linear, name) for linear in linears]
        setattr(joined, name, nn.Parameter(torch.cat([t.detach() for t in tensors]), tensors[0].requires_grad))
    return joined


def _parted(joined: nn.Linear) -> list[nn.Linear]:
    linears = []
    for weight, bias in zip(joined.weight.chunk(3), joined.bias.chunk(3), strict=True):
        linear = nn.Linear(*reversed(weight.shape), device="meta")
        linear.weight, linear.bias = (nn.Parameter(t.detach().clone(), t.requires_grad) for t in (weight, bias))
        linears.append(linear)
    return linears


hiap.register_family(TinyFamily())
