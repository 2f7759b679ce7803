"""Layers of Transformers' encoders as blocks of ours, and back."""

from __future__ import annotations

import copy
import functools
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.models.family import compact_widths, refuse
from hiap.models.transformers_parts import ViT, first_of, place_of
from hiap.nn.compact import Attention, Block, Mlp, Widths

__all__ = ["EncoderBlock", "block_of", "layer_of", "layer_widths"]

_LAYERS = ("ViTLayer", "DeiTLayer", "Dinov2Layer", "Dinov2WithRegistersLayer", "CLIPEncoderLayer", "SiglipEncoderLayer")

# Our member -> the names it has in a layer, of which a layer has one (or none, where it has no such member).
_PLACES = {
    "norm1": ("layernorm_before", "norm1", "layer_norm1"),
    "norm2": ("layernorm_after", "norm2", "layer_norm2"),
    "query": ("attention.q_proj", "self_attn.q_proj"),
    "key": ("attention.k_proj", "self_attn.k_proj"),
    "value": ("attention.v_proj", "self_attn.v_proj"),
    "proj": ("attention.o_proj", "self_attn.out_proj"),
    "fc1": ("mlp.fc1",),
    "fc2": ("mlp.fc2",),
    "act": ("mlp.activation_fn", "mlp.activation"),
    "proj_drop": ("dropout",),
    "drop2": ("dropout",),
    "drop_path": ("drop_path",),
    "ls1": ("layer_scale1",),
    "ls2": ("layer_scale2",),
}
_HEAD_DIM = ("attention.head_dim", "self_attn.head_dim")
_SCALE = ("attention.scaling", "self_attn.scale")
_ATTN_DROP = ("attention.attention_dropout", "self_attn.dropout")


class EncoderBlock(Block):
    """A block that the encoders of Transformers can call.

    Attributes:
        layer: the layer it was made from, without weights, so that it can become one again; none once it was cut.
    """

    layer: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no part of the network

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        wanted = [name for name in _REFUSED if options.get(name) is not None and options[name] is not False]
        if wanted:
            raise InputError(f"a pruned model has no {wanted[0]}; register forward hooks on its blocks instead")
        return super().forward(hidden_states, attention_mask)


_REFUSED = ("output_attentions", "output_hidden_states", "head_mask")


class _Scale(nn.Module):
    """Layer scale. (D)"""

    def __init__(self, gamma: nn.Parameter) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def block_of(block: ViT) -> Block:
    """The block that computes what a layer does."""
    at = functools.partial(_found, block)
    query, key, value, proj, fc1, fc2 = (at(name) for name in ("query", "key", "value", "proj", "fc1", "fc2"))
    dim, width, drop = query.in_features, first_of(block, _HEAD_DIM), first_of(block, _ATTN_DROP)
    norms, drops = (nn.Identity(), nn.Identity()), [_dropout(at(name)) for name in ("proj_drop", "drop2")]
    biases = query.bias is not None, proj.bias is not None
    with torch.device("meta"):  # their Linears come at once
        attn = Attention(
            *(dim, query.out_features // width, width, width, width, *biases),
            *(*norms, nn.Dropout(float(drop or 0.0)), drops[0]),
        )
        mlp = Mlp(dim, 1, True, True, at("act"), nn.Identity(), drops[1])
    attn.qkv, attn.proj, mlp.fc1, mlp.fc2 = _joined(query, key, value), proj, fc1, fc2
    scales = [_Scale(scale.lambda1) if scale is not None else nn.Identity() for scale in (at("ls1"), at("ls2"))]
    paths = [copy.deepcopy(path) if path is not None else nn.Identity() for path in [at("drop_path")] * 2]
    made = EncoderBlock(at("norm1"), attn, scales[0], paths[0], at("norm2"), mlp, scales[1], paths[1])
    made.layer = (_weightless(block),)
    return made.train(block.training)


def layer_of(block: Block) -> nn.Module:
    """The layer that a block was made from, with the weights that the block has now; a block that was cut stays."""
    attn, mlp = cast(Attention, block.attn), cast(Mlp, block.mlp)
    if not isinstance(block, EncoderBlock) or not block.layer:
        return block
    layer = copy.deepcopy(block.layer[0])
    parts: dict[str, nn.Module] = dict(zip(("query", "key", "value"), _parted(attn.qkv), strict=True))
    parts |= {"norm1": block.norm1, "norm2": block.norm2, "proj": attn.proj, "fc1": mlp.fc1, "fc2": mlp.fc2}
    for name, module in parts.items():
        parent, _, last = cast(str, place_of(layer, _PLACES[name])).rpartition(".")
        setattr(layer.get_submodule(parent), last, module)
    for name, scale in (("ls1", block.ls1), ("ls2", block.ls2)):
        if isinstance(scale, _Scale):
            _found(layer, name).lambda1 = scale.gamma
    return layer.train(block.training)


def _found(layer: nn.Module, name: str) -> Any:
    return first_of(layer, _PLACES[name])


def _dropout(drop: nn.Dropout | None) -> nn.Module:
    return nn.Identity() if drop is None else nn.Dropout(drop.p)


def layer_widths(name: str, layer: ViT) -> Widths:
    """The widths of a layer or a block; a layer that cannot be cut exactly is refused."""
    if isinstance(layer, Block):
        return compact_widths(layer)
    if type(layer).__name__ not in _LAYERS:
        refuse(name, layer, "it is not a standard pre-norm layer of these models", "rules to gate and cut this layer")
    if _found(layer, "fc1") is None:
        gated = "a gated MLP joins its neurons in pairs" if "glu" in type(layer.mlp).__name__.lower() else "no fc1, fc2"
        refuse(f"{name}.mlp", layer.mlp, gated, "rules to cut this MLP")
    linears = {part: _found(layer, part) for part in ("query", "key", "value", "proj", "fc1", "fc2")}
    for part, linear in linears.items():
        if linear is None or type(linear) is not nn.Linear or "weight" not in linear._parameters:
            place = place_of(layer, _PLACES[part]) or part
            reason = "it is not a plain nn.Linear with a weight of its own"
            refuse(f"{name}.{place}", linear or layer, reason, "the layer in its plain form")
    for inside, module in layer.named_modules():
        if not type(module).__module__.startswith(("transformers.", "torch.nn.modules.")):
            refuse(f"{name}.{inside}", module, "it is not of Transformers", "rules to gate and cut this module")
    if len({linears[part].bias is None for part in ("query", "key", "value")}) > 1:
        refuse(name, layer, "only some of q, k and v have a bias", "a model where all or none have one")
    width, scale = first_of(layer, _HEAD_DIM), first_of(layer, _SCALE)
    if not math.isclose(scale, width**-0.5):
        refuse(name, layer, f"its softmax scale is {scale}, not that of {width} dims", "the usual scale")
    return Widths(linears["query"].out_features // width, width, width, linears["fc1"].out_features)


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One Linear with the outputs of several."""
    with torch.device("meta"):
        joined = nn.Linear(linears[0].in_features, sum(one.out_features for one in linears))
    for name in ("weight", "bias"):
        tensors = [getattr(one, name) for one in linears]
        whole = None
        if tensors[0] is not None:
            whole = nn.Parameter(torch.cat([t.detach() for t in tensors]), tensors[0].requires_grad)
        setattr(joined, name, whole)
    return joined


def _parted(joined: nn.Linear) -> list[nn.Linear]:
    """The Linears of queries, keys and values."""
    parts = []
    for i in range(3):
        with torch.device("meta"):
            part = nn.Linear(joined.in_features, joined.out_features // 3)
        for name in ("weight", "bias"):
            whole = getattr(joined, name)
            own = None if whole is None else nn.Parameter(whole.detach().chunk(3)[i].clone(), whole.requires_grad)
            setattr(part, name, own)
        parts.append(part)
    return parts


def _weightless(layer: nn.Module) -> nn.Module:
    """A copy of a layer that keeps no weights; it shares the configuration."""
    memo: dict[int, Any] = {id(p): nn.Parameter(torch.empty_like(p, device="meta")) for p in layer.parameters()}
    for module in layer.modules():
        config = vars(module).get("config")
        if config is not None:
            memo[id(config)] = config
    return copy.deepcopy(layer, memo)
