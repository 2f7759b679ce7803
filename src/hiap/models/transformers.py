"""Vision Transformers of Hugging Face Transformers: ViT, DeiT, DINOv2, CLIP's and SigLIP's image towers.

A model qualifies by its class and by the members of its layers. Members have had several names over the years; they
are told apart by which of them a layer has. Layers become `EncoderBlock`s when gates are attached, and layers again
when they are taken out. Transformers itself is imported where one of its models is named or already exists.

One file, though a long one: nothing else in the package knows a member of these models.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from hiap.errors import CheckpointError, ConfigError, InputError
from hiap.models.family import Family, ImageSize, Preprocessing, Recipe, Site, compact_widths, logits_of, refuse
from hiap.nn.compact import Attention, Block, Mlp, Widths
from hiap.nn.stem import Stem

__all__ = ["FAMILY", "PREFIX", "EncoderBlock", "TransformersFamily", "hub_model"]

# nn.Module types every attribute as Tensor | Module; here the members of a model are known.
ViT: TypeAlias = Any

PREFIX = "hf:"  # of a folder or a name on the hub, in --model
INSTALL = 'pip install "hiap[transformers]"'
_DEPTH_LIMIT = 1_000  # layers, so that a wrong number does not build for hours
_SIZE_LIMIT = 1 << 24  # every other count


@dataclass(frozen=True)
class _Use:
    """How images are usually made ready for a kind of model."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    crop_mode: str = "center"


_HALF = (0.5, 0.5, 0.5)
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_USES = {
    "vit": _Use(_HALF, _HALF, "bilinear", crop_mode="squash"),
    "deit": _Use(*_IMAGENET, crop_pct=0.875),
    "dinov2": _Use(*_IMAGENET, crop_pct=0.875),
    "clip": _Use((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "siglip": _Use(_HALF, _HALF, crop_mode="squash"),
}

# class -> its kind, and the class of its configuration
_CLASSES = {
    "ViTForImageClassification": ("vit", "ViTConfig"),
    "ViTModel": ("vit", "ViTConfig"),
    "DeiTForImageClassification": ("deit", "DeiTConfig"),
    "DeiTForImageClassificationWithTeacher": ("deit", "DeiTConfig"),
    "DeiTModel": ("deit", "DeiTConfig"),
    "Dinov2ForImageClassification": ("dinov2", "Dinov2Config"),
    "Dinov2Model": ("dinov2", "Dinov2Config"),
    "Dinov2WithRegistersForImageClassification": ("dinov2", "Dinov2WithRegistersConfig"),
    "Dinov2WithRegistersModel": ("dinov2", "Dinov2WithRegistersConfig"),
    "CLIPForImageClassification": ("clip", "CLIPVisionConfig"),
    "CLIPVisionModel": ("clip", "CLIPVisionConfig"),
    "CLIPVisionModelWithProjection": ("clip", "CLIPVisionConfig"),
    "SiglipForImageClassification": ("siglip", "SiglipVisionConfig"),
    "SiglipVisionModel": ("siglip", "SiglipVisionConfig"),
}
_WHOLE = {"clip": "CLIPConfig", "siglip": "SiglipConfig"}  # what a classifier's configuration stands in
_CORES = ("vit", "deit", "dinov2", "dinov2_with_registers", "vision_model")  # the backbone inside a model
_HEADS = ("classifier", "cls_classifier", "distillation_classifier")
_LAYERS = ("ViTLayer", "DeiTLayer", "Dinov2Layer", "Dinov2WithRegistersLayer", "CLIPEncoderLayer", "SiglipEncoderLayer")
_LISTS = ("layers", "encoder.layers", "encoder.layer")

# Our member -> the names it has in a layer, of which a layer has one (or none, where it has no such member).
_PLACES = {
    "norm1": ("layernorm_before", "norm1", "layer_norm1"),
    "norm2": ("layernorm_after", "norm2", "layer_norm2"),
    "query": ("attention.q_proj", "self_attn.q_proj", "attention.attention.query"),
    "key": ("attention.k_proj", "self_attn.k_proj", "attention.attention.key"),
    "value": ("attention.v_proj", "self_attn.v_proj", "attention.attention.value"),
    "proj": ("attention.o_proj", "self_attn.out_proj", "attention.output.dense"),
    "fc1": ("mlp.fc1", "intermediate.dense"),
    "fc2": ("mlp.fc2", "output.dense"),
    "act": ("mlp.activation_fn", "mlp.activation", "intermediate.intermediate_act_fn"),
    "proj_drop": ("attention.output.dropout", "dropout"),
    "drop2": ("output.dropout", "dropout"),
    "drop_path": ("drop_path",),
    "ls1": ("layer_scale1",),
    "ls2": ("layer_scale2",),
}
_HEAD_DIM = ("attention.head_dim", "self_attn.head_dim", "attention.attention.attention_head_size")
_SCALE = ("attention.scaling", "self_attn.scale", "attention.attention.scaling")
_ATTN_DROP = ("attention.attention_dropout", "self_attn.dropout", "attention.attention.dropout_prob")


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


class TransformersFamily(Family):
    """The ViTs of Hugging Face Transformers, as classifiers or bare."""

    name = "transformers"

    def accepts(self, model: nn.Module) -> bool:
        library = sys.modules.get("transformers")  # without it there is no model of it
        return library is not None and isinstance(model, getattr(library, "PreTrainedModel", ()))

    def sites(self, model: ViT) -> list[Site]:
        _check_class(model)
        home, dim = _home(model), _width(model)
        for name in ("output_hidden_states", "output_attentions"):
            if any(getattr(config, name, False) for config in (model.config, _config(model))):
                refuse("the model", model, f"blocks do not record what {name} asks for", f"config.{name} = False")
        return [
            Site(self, f"{home}.{i}", layer, dim, _widths(f"{home}.{i}", layer))
            for i, layer in enumerate(model.get_submodule(home))
        ]

    def to_block(self, block: ViT) -> Block:
        at = functools.partial(_found, block)
        query, key, value, proj, fc1, fc2 = (at(name) for name in ("query", "key", "value", "proj", "fc1", "fc2"))
        dim, width, drop = query.in_features, _value(block, _HEAD_DIM), _value(block, _ATTN_DROP)
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

    def from_block(self, block: Block) -> nn.Module:
        attn, mlp = cast(Attention, block.attn), cast(Mlp, block.mlp)
        if not isinstance(block, EncoderBlock) or not block.layer:
            return block
        layer = copy.deepcopy(block.layer[0])
        parts: dict[str, nn.Module] = dict(zip(("query", "key", "value"), _parted(attn.qkv), strict=True))
        parts |= {"norm1": block.norm1, "norm2": block.norm2, "proj": attn.proj, "fc1": mlp.fc1, "fc2": mlp.fc2}
        for name, module in parts.items():
            parent, _, last = cast(str, _place(layer, _PLACES[name])).rpartition(".")
            setattr(layer.get_submodule(parent), last, module)
        for name, scale in (("ls1", block.ls1), ("ls2", block.ls2)):
            if isinstance(scale, _Scale):
                _found(layer, name).lambda1 = scale.gamma
        return layer.train(block.training)

    def open(self, model: nn.Module) -> list[Site]:
        for module in model.modules():  # hooks on layers do not move to the blocks
            vars(module).pop("_output_capturing_hooks_installed", None)
        return super().open(model)

    def stem(self, model: ViT) -> nn.Module:
        return cast(nn.Module, _core(model).embeddings)

    def input_shape(self, model: ViT, size: ImageSize = None) -> tuple[int, int, int]:
        own, conv = _pair(_config(model).image_size), _stem(model)
        height, width = own if size is None else _pair(size)
        if (height, width) != own and _kind(model) != "dinov2":
            raise InputError(
                f"the {type(model).__name__} takes images of {own[0]}x{own[1]}; found {height}x{width}. Its positions "
                "must be interpolated first: pass --img-size with --model hf:FOLDER"
            )
        patch = _patch(model)
        if size is not None and (height % patch[0] or width % patch[1]):
            raise InputError(f"img_size {height}x{width} is not a multiple of the {patch[0]}x{patch[1]} patch")
        return conv.in_channels, height, width

    def tokens(self, model: ViT, size: ImageSize = None) -> int:
        (_, height, width), patch = self.input_shape(model, size), _patch(model)
        return int((height // patch[0]) * (width // patch[1]) + _prefix(model))

    def fixed_macs(self, model: ViT, size: ImageSize = None) -> int:
        n, core = self.tokens(model, size), _core(model)
        linears = [*self.classifier(model), getattr(model, "visual_projection", None)]
        linears.append(getattr(getattr(core, "pooler", None), "dense", None))
        macs = (n - _prefix(model)) * _stem(model).weight.numel()
        macs += sum(linear.weight.numel() for linear in linears if isinstance(linear, nn.Linear))
        pool = _attention_pool(core)
        if pool is not None:
            dim = pool.attention.embed_dim  # queries and outputs of one token, keys and values of all
            macs += 2 * (n + 1) * dim * dim + 2 * n * dim + pool.mlp.fc1.weight.numel() + pool.mlp.fc2.weight.numel()
        return int(macs)

    def embed(self, model: ViT, images: Tensor) -> Tensor:
        core = _core(model)
        x = core.embeddings(images)
        return cast(Tensor, core.pre_layrnorm(x) if hasattr(core, "pre_layrnorm") else x)

    def head(self, model: ViT, tokens: Tensor) -> Tensor:
        return _READ[_kind(model)](model, _core(model), tokens)

    def outputs(self, model: ViT, images: Tensor) -> tuple[Tensor, ...]:
        found = model(images)
        features = getattr(found, "last_hidden_state", None)
        return (logits_of(found),) if features is None else (features, logits_of(found))

    def fold_stem(self, model: ViT) -> nn.Module | None:
        core, conv, shape = _core(model), _stem(model), self.input_shape(model)
        nothing = conv.weight.new_zeros(1, *shape)  # on which the stem gives all that is added to the tokens
        stem = Stem(conv.weight.flatten(1), core.embeddings(nothing).clone(), shape[1:], _patch(model), _prefix(model))
        core.embeddings = nn.Identity()
        return nn.Sequential(stem, core.pre_layrnorm) if hasattr(core, "pre_layrnorm") else stem

    def tokens_read(self, model: ViT) -> int | None:
        kind, bare = _kind(model), not self.classifier(model)
        if kind in ("vit", "deit"):
            return len(self.classifier(model)) or (None if _core(model).pooler is None else 1)
        return 1 if bare and kind in ("dinov2", "clip") else None

    def without_decay(self, model: ViT) -> set[str]:
        return {name for name, _ in model.named_parameters() if any(word in name for word in _UNDECAYED)}

    def unread(self, model: ViT) -> list[nn.Parameter]:
        core, classifier = _core(model), self.classifier(model)
        found = [p for name, p in model.named_parameters() if name.endswith("mask_token")]
        idle = core.post_layernorm if _kind(model) == "clip" else _attention_pool(core)
        return [*found, *idle.parameters()] if classifier and idle is not None else found

    def classes(self, model: ViT) -> int:
        heads = self.classifier(model)
        return int(getattr(heads[0], "out_features", 0)) if heads else 0

    def set_classes(self, model: ViT, classes: int) -> None:
        heads = [name for name in _HEADS if name in model._modules]
        if not heads:
            cls = type(model).__name__
            other = next(name for name, own in _CLASSES.items() if own == _CLASSES.get(cls) and "Classif" in name)
            raise InputError(f"a {cls} has no classifier: load the same weights as a {other}")
        width, like = 2 * _width(model) if _kind(model) == "dinov2" else _width(model), _stem(model).weight
        for name in heads:
            head = nn.Linear(width, classes, device=like.device, dtype=like.dtype) if classes else nn.Identity()
            if isinstance(head, nn.Linear):
                nn.init.trunc_normal_(head.weight, std=0.02)
                nn.init.zeros_(head.bias)
            setattr(model, name, head)
        model.config.num_labels = model.num_labels = classes

    def classifier(self, model: ViT) -> list[nn.Module]:
        return [model._modules[name] for name in _HEADS if name in model._modules]

    def preprocessing(self, model: ViT) -> Preprocessing:
        usual, usage = _USES[_kind(model)], self.usage(model)
        found = {name: usage.get(name) or value for name, value in vars(usual).items()}
        mean, std = (tuple(found.pop(name)) for name in ("mean", "std"))
        return Preprocessing(self.input_shape(model)[1:], mean, std, **found)

    def usage(self, model: ViT) -> dict[str, Any]:
        usage = super().usage(model)
        names = list((getattr(model.config, "id2label", None) or {}).values())
        if len(names) == self.classes(model) and not all(str(name).startswith("LABEL_") for name in names):
            usage["label_names"] = [str(name) for name in names]
        return usage

    def set_usage(self, model: ViT, usage: Mapping[str, Any]) -> None:
        names = vars(model).get("class_names") or usage.get("label_names") or ()  # of the data it was pruned on, first
        if names and len(names) == self.classes(model):
            model.config.id2label = dict(enumerate(names))
            model.config.label2id = {name: i for i, name in enumerate(names)}
        super().set_usage(model, {name: value for name, value in usage.items() if name != "label_names"})

    def check_usage(self, where: str, usage: Mapping[str, Any]) -> None:
        _library()  # a saved model says at once what it needs
        for name, value in usage.items():
            fits = _USAGE.get(name)
            if value is not None and fits is not None and not fits(value):
                raise CheckpointError(f"{where} has {name} {str(value)[:40]!r}, which cannot be read")

    def versions(self) -> dict[str, str]:
        return {"transformers": str(_library().__version__)}

    def describe(self, model: ViT, origin: Recipe | None = None) -> Recipe:
        cls = type(model).__name__
        if cls not in _CLASSES or type(model) is not getattr(_library(), cls, None):
            raise CheckpointError(f"{cls} cannot be rebuilt from a recipe: expected one of {', '.join(_CLASSES)}")
        config, core = _config(model), _core(model)
        found = {name: getattr(config, name) for name in _SHAPES[_CLASSES[cls][1]] if hasattr(config, name)}
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        recipe: Recipe = {"class": cls, "config": found, "num_labels": self.classes(model)}
        if cls in _OPTIONS:
            tokens = core.embeddings.mask_token is not None
            recipe |= {"add_pooling_layer": core.pooler is not None, "use_mask_token": tokens}
        return recipe

    def build(self, recipe: Recipe) -> nn.Module:
        _check_recipe(recipe)
        cls = recipe["class"]
        kind, config_class = _CLASSES[cls]
        library = _library()
        options = {name: recipe[name] for name in ("add_pooling_layer", "use_mask_token") if cls in _OPTIONS}
        try:
            config = getattr(library, config_class)(**recipe["config"])
            if kind in _WHOLE and "Classification" in cls:
                config = _around(kind, config)
            with torch.device("meta"):
                model = _made(getattr(library, cls), config, recipe["num_labels"], **options)
        except Exception as error:  # whatever a configuration or a constructor makes of odd values
            raise CheckpointError(f"Transformers cannot make the {cls} of the skeleton: {error}") from error
        for module in model.modules():
            if isinstance(getattr(module, "position_ids", None), Tensor):  # no part of the weights
                count = module.position_ids.shape[-1]
                module.register_buffer("position_ids", torch.arange(count).expand(1, -1), persistent=False)
        return cast(nn.Module, model)


FAMILY = TransformersFamily()


# -- members of models ----------------------------------------------------------------------------------------------


_ROTARY = "its rotary position embedding turns q/k dims in pairs, which our compact attention does not do"


def _check_class(model: nn.Module) -> None:
    known = [getattr(_library(), name, ()) for name in _CLASSES]
    if any(isinstance(model, cls) for cls in known):
        return
    kind = type(model).__name__
    if "dinov3" in kind.lower():
        refuse("the model", model, _ROTARY, "an attention that turns q/k dims")
    refuse("the model", model, "its class is not among those that are pruned exactly", f"it as {', '.join(_CLASSES)}")


def _kind(model: nn.Module) -> str:
    return next(_CLASSES[cls.__name__][0] for cls in type(model).__mro__ if cls.__name__ in _CLASSES)


def _core(model: ViT) -> ViT:
    """The backbone, with the embeddings and the norms."""
    return next((model._modules[name] for name in _CORES if name in model._modules), model)


def _home(model: ViT) -> str:
    """The name of the list of layers."""
    core = next((name for name in _CORES if name in model._modules), "")
    return ".".join(part for part in (core, cast(str, _place(_core(model), _LISTS))) if part)


def _config(model: ViT) -> Any:
    """The configuration of the image tower."""
    return getattr(model.config, "vision_config", model.config)


def _stem(model: ViT) -> nn.Conv2d:
    embeddings = _core(model).embeddings
    return cast(nn.Conv2d, _value(embeddings, ("patch_embeddings.projection", "patch_embedding")))


def _patch(model: ViT) -> tuple[int, int]:
    return cast("tuple[int, int]", tuple(_stem(model).kernel_size))


def _width(model: ViT) -> int:
    return _stem(model).out_channels


def _prefix(model: ViT) -> int:
    """The number of tokens before those of the patches."""
    embeddings = _core(model).embeddings
    registers = getattr(embeddings, "register_tokens", None)
    single = sum(hasattr(embeddings, name) for name in ("cls_token", "class_embedding", "distillation_token"))
    return single + (0 if registers is None else int(registers.shape[1]))


def _attention_pool(core: ViT) -> ViT | None:
    return core.head if getattr(core, "use_head", False) else None


_UNDECAYED = ("cls_token", "distillation_token", "register_tokens", "mask_token", "position_embedding", "probe")


def _read_token(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    x, heads = core.layernorm(tokens), FAMILY.classifier(model)
    if heads:
        logits = [head(x[:, i]) for i, head in enumerate(heads)]
        return logits[0] if len(logits) == 1 else cast(Tensor, (logits[0] + logits[1]) / 2)
    return cast(Tensor, x if core.pooler is None else core.pooler(x))


def _read_dinov2(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    x = core.layernorm(tokens)
    if not hasattr(model, "classifier"):
        return cast(Tensor, x[:, 0])
    first = 1 + getattr(model.config, "num_register_tokens", 0)  # not of the stem, which may have been taken out
    return cast(Tensor, model.classifier(torch.cat([x[:, 0], x[:, first:].mean(1)], 1)))


def _read_clip(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    if hasattr(model, "classifier"):
        return cast(Tensor, model.classifier(tokens[:, 1:].mean(1)))
    x = core.post_layernorm(tokens[:, 0])
    return cast(Tensor, model.visual_projection(x) if hasattr(model, "visual_projection") else x)


def _read_siglip(model: ViT, core: ViT, tokens: Tensor) -> Tensor:
    x = core.post_layernorm(tokens)
    if hasattr(model, "classifier"):
        return cast(Tensor, model.classifier(x.mean(1)))
    pool = _attention_pool(core)
    return cast(Tensor, x if pool is None else pool(x))


_READ: dict[str, Callable[[ViT, ViT, Tensor], Tensor]] = {
    "vit": _read_token,
    "deit": _read_token,
    "dinov2": _read_dinov2,
    "clip": _read_clip,
    "siglip": _read_siglip,
}


# -- members of layers ----------------------------------------------------------------------------------------------


def _place(module: nn.Module, names: Iterable[str]) -> str | None:
    """The first of these names that leads to something in a module."""
    return next((name for name in names if _reach(module, name) is not None), None)


def _reach(module: Any, name: str) -> Any:
    for part in name.split("."):
        module = getattr(module, part, None)
    return module


def _value(module: nn.Module, names: Iterable[str]) -> Any:
    place = _place(module, names)
    return None if place is None else _reach(module, place)


def _found(layer: nn.Module, name: str) -> Any:
    return _value(layer, _PLACES[name])


def _dropout(drop: nn.Dropout | None) -> nn.Module:
    return nn.Identity() if drop is None else nn.Dropout(drop.p)


def _widths(name: str, layer: ViT) -> Widths:
    if isinstance(layer, Block):
        return compact_widths(layer)
    if type(layer).__name__ not in _LAYERS:
        refuse(name, layer, "it is not a standard pre-norm layer of these models", "rules to gate and cut this layer")
    if _found(layer, "fc1") is None:
        gated = "a gated MLP joins its neurons in pairs" if "glu" in type(layer.mlp).__name__.lower() else "no fc1, fc2"
        refuse(f"{name}.mlp", layer.mlp, gated, "rules to cut this MLP")
    if "causal_attention_mask" in inspect.signature(type(layer).forward).parameters:
        refuse(name, layer, "it gives its tokens in a tuple, as in Transformers 4", "the model of Transformers 5")
    linears = {part: _found(layer, part) for part in ("query", "key", "value", "proj", "fc1", "fc2")}
    for part, linear in linears.items():
        if linear is None or type(linear) is not nn.Linear or "weight" not in linear._parameters:
            place = _place(layer, _PLACES[part]) or part
            reason = "it is not a plain nn.Linear with a weight of its own"
            refuse(f"{name}.{place}", linear or layer, reason, "the layer in its plain form")
    for inside, module in layer.named_modules():
        if not type(module).__module__.startswith(("transformers.", "torch.nn.modules.")):
            refuse(f"{name}.{inside}", module, "it is not of Transformers", "rules to gate and cut this module")
    if len({linears[part].bias is None for part in ("query", "key", "value")}) > 1:
        refuse(name, layer, "only some of q, k and v have a bias", "a model where all or none have one")
    width, scale = _value(layer, _HEAD_DIM), _value(layer, _SCALE)
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


# -- recipes --------------------------------------------------------------------------------------------------------


def _made(cls: Any, config: Any, classes: int, **options: Any) -> ViT:
    """A model of a configuration; one of SigLIP cannot begin without classes, so that all lose them afterwards."""
    if "Classification" in cls.__name__:
        config.num_labels = classes or 1
    model = cls(config, **options)
    if not classes and FAMILY.classifier(model):
        FAMILY.set_classes(model, 0)
    return model


def _library() -> Any:
    """Transformers.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ConfigError(f"models of Transformers need the package transformers: {INSTALL}") from error


def _is_count(value: Any, least: int = 1, most: int = _SIZE_LIMIT) -> bool:
    return type(value) is int and least <= value <= most


def _is_number(value: Any, most: float) -> bool:
    return type(value) in (int, float) and 0 <= value <= most


def _is_size(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, list) and len(value) == 2 and all(map(_is_count, value)))


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_rate(value: Any) -> bool:
    return _is_number(value, 1.0)


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and value in importlib.import_module("transformers.activations").ACT2FN


_ANY: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_channels"), _is_count),
    "num_hidden_layers": functools.partial(_is_count, most=_DEPTH_LIMIT),
    "hidden_act": _is_activation,
    "layer_norm_eps": functools.partial(_is_number, most=1e9),
    **dict.fromkeys(("image_size", "patch_size"), _is_size),
}
_BERT: dict[str, Callable[[Any], bool]] = {
    **_ANY,
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), _is_rate),
    "qkv_bias": _is_flag,
}
_POOLED: dict[str, Callable[[Any], bool]] = {
    **_BERT,
    **dict.fromkeys(("intermediate_size", "pooler_output_size"), _is_count),
    "pooler_act": _is_activation,
}
_DINO: dict[str, Callable[[Any], bool]] = {
    **_BERT,
    "mlp_ratio": functools.partial(_is_number, most=_SIZE_LIMIT),
    "layerscale_value": functools.partial(_is_number, most=1e9),
    "drop_path_rate": _is_rate,
}
_TOWER: dict[str, Callable[[Any], bool]] = {**_ANY, "intermediate_size": _is_count, "attention_dropout": _is_rate}

# class of a configuration -> what of it shapes the network, and what values it may have
_SHAPES: dict[str, dict[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(("ViTConfig", "DeiTConfig"), _POOLED),
    "Dinov2Config": {**_DINO, "use_mask_token": _is_flag},
    "Dinov2WithRegistersConfig": {**_DINO, "num_register_tokens": functools.partial(_is_count, least=0)},
    "CLIPVisionConfig": {**_TOWER, "projection_dim": _is_count},
    "SiglipVisionConfig": {**_TOWER, "vision_use_head": _is_flag},
}
_OPTIONAL = {"use_mask_token", "vision_use_head", "pooler_output_size", "pooler_act"}  # not in every version
_OPTIONS = ("ViTModel", "DeiTModel")  # whose constructors take more than a configuration


def _check_recipe(recipe: Any) -> None:
    """Refuse what no model has before anything of that size is built."""
    if not isinstance(recipe, dict) or not isinstance(recipe.get("config"), dict):
        raise CheckpointError("the skeleton must be an object with 'class', 'config' and 'num_labels'")
    cls, config = recipe.get("class"), recipe["config"]
    if not isinstance(cls, str) or cls not in _CLASSES:
        raise CheckpointError(f"the class of the skeleton must be one of {', '.join(_CLASSES)}")
    more = {"add_pooling_layer", "use_mask_token"} if cls in _OPTIONS else set()
    if set(recipe) != {"class", "config", "num_labels", *more}:
        raise CheckpointError(f"the skeleton of a {cls} must have exactly class, config, num_labels {sorted(more)}")
    if not _is_count(recipe["num_labels"], 0) or not all(_is_flag(recipe[name]) for name in more):
        raise CheckpointError("the skeleton has a num_labels or an option that no model has")
    known = _SHAPES[_CLASSES[cls][1]]
    odd = sorted(set(config) ^ (set(known) - (_OPTIONAL - set(config))))
    if odd:
        raise CheckpointError(f"the skeleton {'has an unknown' if odd[0] in config else 'lacks the'} entry {odd[0]}")
    for name, value in config.items():
        if not known[name](value):
            raise CheckpointError(f"the skeleton has {name} {str(value)[:40]!r}, which no model has")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise CheckpointError(
            f"the skeleton has {config['num_attention_heads']} heads, which do not divide {config['hidden_size']}"
        )


def _is_list(value: Any, *kinds: type) -> bool:
    return isinstance(value, list) and all(type(one) in kinds for one in value)


_USAGE: dict[str, Callable[[Any], bool]] = {
    "input_size": lambda value: _is_list(value, int) and len(value) == 3 and min(value) > 0,
    **dict.fromkeys(("mean", "std"), lambda value: _is_list(value, int, float) and len(value) > 0),
    "crop_pct": lambda value: type(value) in (int, float) and value > 0,
    **dict.fromkeys(("interpolation", "crop_mode"), lambda value: isinstance(value, str)),
    "num_classes": lambda value: type(value) is int and value >= 0,
    "label_names": lambda value: _is_list(value, str),
}


# -- models by name -------------------------------------------------------------------------------------------------


_BY_TYPE = {
    "vit": "ViTForImageClassification",
    "deit": "DeiTForImageClassification",
    "dinov2": "Dinov2ForImageClassification",
    "dinov2_with_registers": "Dinov2WithRegistersForImageClassification",
    **dict.fromkeys(("clip", "clip_vision_model"), "CLIPForImageClassification"),
    **dict.fromkeys(("siglip", "siglip_vision_model"), "SiglipForImageClassification"),
}
_TOWERS = {"clip_vision_model": "CLIPVisionModel", "siglip_vision_model": "SiglipVisionModel"}
_RESAMPLE = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}


def hub_model(name: str, pretrained: bool, arguments: Mapping[str, Any]) -> nn.Module:
    """The classifier in a folder that `save_pretrained` wrote, or of a name on the hub.

    Args:
        name: "hf:FOLDER" or "hf:NAME".
        pretrained: load its weights. Where they hold no classifier, the model has 0 classes.
        arguments: `img_size`, to which positions are interpolated, and `num_classes`, for a model without weights.

    Raises:
        ConfigError: Transformers is missing or cannot make it, or the model is of a kind that cannot be pruned.
    """
    library, where = _library(), name.removeprefix(PREFIX)
    odd = sorted(set(arguments) - {"img_size", "num_classes"})
    if odd:
        raise ConfigError(f"{name} takes img_size and num_classes as model_args; found {', '.join(odd)}")
    try:
        config = library.AutoConfig.from_pretrained(where, trust_remote_code=False)
        usage = _read_preprocessor(where)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be had ({_reason(error)}). Pass hf: and a folder that save_pretrained wrote"
        ) from error
    cls = _class_for(config)
    if cls is None:
        known = ", ".join(sorted(_BY_TYPE))
        raise ConfigError(f"{name} is a {config.model_type}, which cannot be pruned; known: {known}")
    try:
        if config.model_type in _TOWERS:
            model = _load_tower(library, cls, where, config, pretrained)
        else:
            model = _load(getattr(library, cls), where, config, pretrained)
        if not pretrained and "num_classes" in arguments:
            FAMILY.set_classes(model, arguments["num_classes"])
        size = arguments.get("img_size")
        if size is not None and _pair(size) != _pair(_config(model).image_size):
            model = _resized(model, size)
    except Exception as error:
        raise ConfigError(f"Transformers cannot make the model {name}: {_reason(error)}") from error
    FAMILY.set_usage(model, {**FAMILY.usage(model), **usage})
    return cast(nn.Module, model.float().train())


def _class_for(config: Any) -> str | None:
    given = (getattr(config, "architectures", None) or [""])[0]
    return given if given in _CLASSES and "Classification" in given else _BY_TYPE.get(config.model_type)


def _load(cls: Any, where: str, config: Any, pretrained: bool) -> ViT:
    if not pretrained:
        return cls(config)
    with _quiet():  # what is missing is told below, and what is not needed does not matter
        model, report = cls.from_pretrained(where, config=config, output_loading_info=True)
    missing = sorted(report["missing_keys"])
    heads = [key for key in missing if key.split(".")[0] in _HEADS]
    if len(heads) < len(missing):
        lost = next(key for key in missing if key not in heads)
        raise InputError(f"its weights lack {lost}{f' and {len(missing) - 1} more' if len(missing) > 1 else ''}")
    if report.get("mismatched_keys"):
        raise InputError(f"its weights have another size of {sorted(map(str, report['mismatched_keys']))[0]}")
    if heads:
        FAMILY.set_classes(model, 0)
    return model


def _around(kind: str, config: Any) -> Any:
    """The configuration of images and texts around that of an image tower."""
    with _quiet():  # it warns of its own usual values for texts
        return getattr(_library(), _WHOLE[kind])(vision_config=config.to_dict())


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Transformers from printing what its models do not find in a file."""
    logging = importlib.import_module("transformers.utils.logging")
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _load_tower(library: Any, cls: str, where: str, config: Any, pretrained: bool) -> ViT:
    """A classifier around an image tower that was saved alone."""
    model = _made(getattr(library, cls), _around(_CLASSES[cls][0], config), 0)
    if pretrained:
        given = (getattr(config, "architectures", None) or [""])[0]
        bare = given if given in _CLASSES else _TOWERS[config.model_type]
        tower = _core(_load(getattr(library, bare), where, config, True))
        model.vision_model.to(_stem(tower).weight.dtype).load_state_dict(tower.state_dict())
    return model


def _resized(model: ViT, size: ImageSize) -> ViT:
    """The same model for another image size, its positions interpolated as the model itself does it."""
    patch, embeddings = _patch(model), _core(model).embeddings
    height, width = _pair(size)
    if height % patch[0] or width % patch[1] or height != width:
        raise InputError(f"img_size must be square and a multiple of the {patch[0]}x{patch[1]} patch; found {size}")
    registers = getattr(embeddings, "register_tokens", None)  # they come after the positions
    placed = _prefix(model) - (0 if registers is None else registers.shape[1])
    like = torch.empty(1, (height // patch[0]) * (width // patch[1]) + placed, _width(model))
    with torch.no_grad():
        positions = embeddings.interpolate_pos_encoding(like, height, width)
    config = copy.deepcopy(model.config)
    getattr(config, "vision_config", config).image_size = height
    resized = _made(type(model), config, FAMILY.classes(model))
    state = model.state_dict()
    for name in state:
        if "position_embedding" in name:
            state[name] = positions.reshape(resized.state_dict()[name].shape)
    resized.load_state_dict(state)
    return resized


def _read_preprocessor(where: str) -> dict[str, Any]:
    """What `preprocessor_config.json` says of mean, std, resampling and crop; nothing where there is none."""
    file: Any = Path(where) / "preprocessor_config.json"
    if not Path(where).is_dir():
        quietly = {f"_raise_exceptions_for_{what}": False for what in ("missing_entries", "connection_errors")}
        file = importlib.import_module("transformers.utils").cached_file(where, "preprocessor_config.json", **quietly)
    if file is None or not Path(file).is_file():
        return {}
    given = json.loads(Path(file).read_text(encoding="utf-8"))
    usage = {"mean": given.get("image_mean"), "std": given.get("image_std")}
    usage["interpolation"] = _RESAMPLE.get(given.get("resample"))
    edge, crop = _edge(given.get("size")), _edge(given.get("crop_size"))
    if given.get("do_center_crop") and edge and crop:
        usage |= {"crop_pct": crop / edge, "crop_mode": "center"}
    elif isinstance(given.get("size"), int) or "height" in (given.get("size") or {}):
        usage |= {"crop_pct": 1.0, "crop_mode": "squash"}
    if not given.get("do_normalize", True):
        usage |= {"mean": [0.0] * 3, "std": [1.0] * 3}
    usage = {key: value for key, value in usage.items() if value is not None}
    FAMILY.check_usage(str(file), usage)
    return usage


def _edge(size: Any) -> int | None:
    """One number for a size that is written as one, or as height and width, or as the shortest edge."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return size if isinstance(size, int) and size > 0 else None


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__
