"""Layers of Transformers' encoders as blocks of ours, and back."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from hiap.errors import InputError
from hiap.models.family import compact_pairs, compact_widths, refuse
from hiap.models.linears import joined, parted
from hiap.models.transformers_parts import ViT, first_of, place_of
from hiap.nn.compact import Attention, Block, GluMlp, Mlp, Widths, is_glu
from hiap.nn.rotary import Rotary

__all__ = [
    "EncoderBlock",
    "block_of",
    "has_gated_mlp",
    "is_rotary",
    "layer_of",
    "layer_widths",
    "let_record",
    "stop_recording",
]

_LAYERS = (
    "ViTLayer",
    "DeiTLayer",
    "Dinov2Layer",
    "Dinov2WithRegistersLayer",
    "CLIPEncoderLayer",
    "SiglipEncoderLayer",
    "DINOv3ViTLayer",
)

# Our member -> the names it has in a layer, of which a layer has one (or none, where it has no such member).
_PLACES = {
    "norm1": ("layernorm_before", "norm1", "layer_norm1"),
    "norm2": ("layernorm_after", "norm2", "layer_norm2"),
    "query": ("attention.q_proj", "self_attn.q_proj"),
    "key": ("attention.k_proj", "self_attn.k_proj"),
    "value": ("attention.v_proj", "self_attn.v_proj"),
    "proj": ("attention.o_proj", "self_attn.out_proj"),
    "fc1": ("mlp.fc1", "mlp.up_proj"),
    "fc2": ("mlp.fc2", "mlp.down_proj"),
    "gate": ("mlp.gate_proj",),
    "act": ("mlp.activation_fn", "mlp.activation", "mlp.act_fn"),
    "proj_drop": ("dropout",),
    "drop2": ("dropout",),
    "drop_path": ("drop_path",),
    "ls1": ("layer_scale1",),
    "ls2": ("layer_scale2",),
}
_HEAD_DIM = ("attention.head_dim", "self_attn.head_dim")
_SCALE = ("attention.scaling", "self_attn.scale")
_ATTN_DROP = ("attention.attention_dropout", "self_attn.dropout", "attention.dropout")


class EncoderBlock(Block):
    """A block that the encoders of Transformers can call.

    Attributes:
        layer: the layer it was made from, without weights, so that it can become one again; none once it was cut.
        gradient_checkpointing: what is computed here is not kept for the gradients, but computed again.
    """

    layer: tuple[nn.Module, ...] = ()  # in a tuple, so that it is no part of the network
    gradient_checkpointing = False  # Transformers sets this, and the function that does it
    _gradient_checkpointing_func: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> Any:
        call = functools.partial(super().__call__, **options)
        return (
            self._gradient_checkpointing_func(call, *args)
            if self.gradient_checkpointing and self.training
            else call(*args)
        )

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **options: Any,
    ) -> Tensor:
        """
        Args:
            position_embeddings: cosines and sines of rotary positions.
        """
        wanted = [name for name in _REFUSED if options.get(name) is not None and options[name] is not False]
        if wanted:
            raise InputError(f"a pruned model has no {wanted[0]}: its attention does not keep the weights of tokens")
        rope = None if position_embeddings is None else (position_embeddings[1], position_embeddings[0])
        return super().forward(hidden_states, attention_mask, rope=rope)


_REFUSED = ("output_attentions", "head_mask")


class _Scale(nn.Module):
    """Layer scale. (D)"""

    def __init__(self, gamma: nn.Parameter) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def block_of(layer: ViT) -> Block:
    """The block that computes what a layer does."""
    at = functools.partial(_found, layer)
    query, key, value, proj, fc2 = (at(name) for name in ("query", "key", "value", "proj", "fc2"))
    qkv, fc1 = joined([query, key, value]), at("fc1") if at("gate") is None else joined([at("gate"), at("fc1")])
    dim, width, drop = query.in_features, first_of(layer, _HEAD_DIM), first_of(layer, _ATTN_DROP)
    heads, drops = query.out_features // width, [_dropout(at(name)) for name in ("proj_drop", "drop2")]
    rotary = Rotary(heads, width, width, "halves") if is_rotary(layer) else None
    with torch.device("meta"):  # their Linears come at once
        attn = Attention(
            *(dim, heads, width, width, width, qkv.bias is not None, proj.bias is not None),
            *(nn.Identity(), nn.Identity(), nn.Dropout(float(drop or 0.0)), drops[0], rotary),
        )
        kind = Mlp if at("gate") is None else GluMlp
        mlp = kind(dim, fc2.in_features, True, True, at("act"), nn.Identity(), drops[1])
    attn.qkv, attn.proj, mlp.fc1, mlp.fc2 = qkv, proj, fc1, fc2
    scales = [_Scale(scale.lambda1) if scale is not None else nn.Identity() for scale in (at("ls1"), at("ls2"))]
    paths = [copy.deepcopy(path) if path is not None else nn.Identity() for path in [at("drop_path")] * 2]
    made = EncoderBlock(at("norm1"), attn, scales[0], paths[0], at("norm2"), mlp, scales[1], paths[1])
    vars(made).update({name: value for name, value in vars(layer).items() if "gradient_checkpointing" in name})
    made.layer, made.glu = (_without_values(layer),), kind is GluMlp
    return made.train(layer.training)


def layer_of(block: Block) -> nn.Module:
    """The layer that a block was made from, with the weights that the block has now; a block that was cut stays."""
    attn, mlp = cast(Attention, block.attn), cast(Mlp, block.mlp)
    if not isinstance(block, EncoderBlock) or not block.layer:
        return block
    layer = copy.deepcopy(block.layer[0])
    parts: dict[str, nn.Module] = {"norm1": block.norm1, "norm2": block.norm2, "proj": attn.proj, "fc2": mlp.fc2}
    for names, whole in ((("query", "key", "value"), attn.qkv), (_inner(layer), mlp.fc1)):
        like = {name: _found(layer, name) for name in names}
        parts |= _parted(whole, like) if len(like) > 1 else dict.fromkeys(like, whole)
    for name, module in parts.items():
        parent, _, last = cast(str, place_of(layer, _PLACES[name])).rpartition(".")
        setattr(layer.get_submodule(parent), last, module)
    for name, scale in (("ls1", block.ls1), ("ls2", block.ls2)):
        if isinstance(scale, _Scale):
            _found(layer, name).lambda1 = scale.gamma
    return layer.train(block.training)


def is_rotary(layer: nn.Module) -> bool:
    """Whether a layer turns queries and keys by their positions."""
    if isinstance(layer, Block):
        return compact_pairs(layer) is not None
    return "position_embeddings" in inspect.signature(type(layer).forward).parameters


def has_gated_mlp(layer: nn.Module) -> bool:
    """Whether the neurons of a layer or a block are gated."""
    return is_glu(layer) if isinstance(layer, Block) else _found(layer, "gate") is not None


def _inner(layer: nn.Module) -> tuple[str, ...]:
    """The Linears that the first one of our MLP is made of."""
    return ("fc1",) if _found(layer, "gate") is None else ("gate", "fc1")


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
    linears = {part: _found(layer, part) for part in ("query", "key", "value", "proj", "fc2", *_inner(layer))}
    for part, linear in linears.items():
        if linear is None or type(linear) is not nn.Linear or "weight" not in linear._parameters:
            place = place_of(layer, _PLACES[part]) or part
            reason = "it is not a plain nn.Linear with a weight of its own"
            refuse(f"{name}.{place}", linear or layer, reason, "the layer in its plain form")
    for inside, module in layer.named_modules():
        if not type(module).__module__.startswith(("transformers.", "torch.nn.modules.")):
            refuse(f"{name}.{inside}", module, "it is not of Transformers", "rules to gate and cut this module")
    width, scale = first_of(layer, _HEAD_DIM), first_of(layer, _SCALE)
    if not math.isclose(scale, width**-0.5):
        refuse(name, layer, f"its softmax scale is {scale}, not that of {width} dims", "the usual scale")
    return Widths(linears["query"].out_features // width, width, width, linears["fc2"].in_features)


def _parted(whole: nn.Linear, like: Mapping[str, nn.Linear]) -> dict[str, nn.Module]:
    """The Linears that were joined. One that had no bias has none again, unless it has learned one."""
    parts = parted(whole, [one.out_features for one in like.values()])
    for part, old in zip(parts, like.values(), strict=True):
        if part.bias is not None and old.bias is None and not part.bias.any():
            part.register_parameter("bias", None)
    return dict(zip(like, parts, strict=True))


def _without_values(layer: nn.Module) -> nn.Module:
    """A copy of a layer that keeps no weights; it shares the configuration."""
    shared = {id(config): config for module in layer.modules() if (config := vars(module).get("config")) is not None}
    return copy.deepcopy(layer, {**shared, **{id(p): _on_meta(p) for p in layer.parameters()}})


def _on_meta(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)


def let_record(model: nn.Module) -> None:
    """Let Transformers record what leaves our blocks as it does for its layers (`output_hidden_states`)."""
    for module in model.modules():
        recorded: Any = getattr(module, "_can_record_outputs", None) or {}
        kinds = recorded.get("hidden_states", EncoderBlock)
        kinds = kinds if isinstance(kinds, list) else [kinds]
        if EncoderBlock not in kinds:
            recorded["hidden_states"] = [*kinds, EncoderBlock]


def stop_recording(model: nn.Module) -> None:
    """Take out the hooks that record outputs, which do not move to other blocks. Transformers puts new ones in."""
    for module in model.modules():
        vars(module).pop("_output_capturing_hooks_installed", None)
        hooks = module._forward_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "__module__", None) == _RECORDER]:
            del hooks[key]


_RECORDER = "transformers.utils.output_capturing"
