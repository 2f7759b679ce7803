"""Vision Transformers of Hugging Face Transformers: ViT, DeiT, DINOv2, DINOv3, CLIP's and SigLIP's image towers.

A model qualifies by its class and by the members of its layers. Layers become `EncoderBlock`s when gates are attached,
and layers again when they are taken out. The files `transformers_*.py` know the members of these models, this one
answers what the package asks of a family.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from hiap.errors import CheckpointError, InputError
from hiap.models.family import Family, ImageSize, Preprocessing, Recipe, Site, logits_of, refuse
from hiap.models.transformers_configs import is_pruned, note_in_config
from hiap.models.transformers_layers import (
    EncoderBlock,
    block_of,
    has_gated_mlp,
    is_rotary,
    layer_of,
    layer_widths,
    let_record,
    stop_recording,
)
from hiap.models.transformers_parts import (
    CLASSES,
    HEADS,
    UNDECAYED,
    USES,
    WHOLE,
    ViT,
    attention_pool,
    check_class,
    classifiers,
    config_of,
    core_of,
    home_of,
    is_backbone,
    kind_of,
    library,
    pair,
    patch_of,
    prefix_of,
    read_tokens,
    stem_of,
    width_of,
)
from hiap.models.transformers_processor import PROCESSOR, processor_of
from hiap.models.transformers_recipes import OPTIONS, SHAPES, USAGE, around, check_recipe, made
from hiap.nn.compact import Block
from hiap.nn.rotary import Rope
from hiap.nn.stem import Stem

__all__ = ["FAMILY", "EncoderBlock", "TransformersFamily"]


class TransformersFamily(Family):
    """The ViTs of Hugging Face Transformers, as classifiers or bare."""

    name = "transformers"
    usage_key = "preprocessing"  # Transformers takes a file with pretrained_cfg for one of timm
    casts_buffers = False  # as Transformers itself: rotary frequencies stay in float32

    def accepts(self, model: nn.Module) -> bool:
        hf = sys.modules.get("transformers")  # without it there is no model of it
        return hf is not None and isinstance(model, getattr(hf, "PreTrainedModel", ()))

    def sites(self, model: ViT) -> list[Site]:
        check_class(model)
        home, dim = home_of(model), width_of(model)
        if any(getattr(config, "output_attentions", False) for config in (model.config, config_of(model))):
            reason = "blocks do not keep what output_attentions asks for"
            refuse("the model", model, reason, "config.output_attentions = False")
        return [
            Site(
                *(self, f"{home}.{i}", layer, dim, layer_widths(f"{home}.{i}", layer)),
                pairs="halves" if is_rotary(layer) else None,
                glu=has_gated_mlp(layer),
            )
            for i, layer in enumerate(model.get_submodule(home))
        ]

    def to_block(self, block: nn.Module) -> Block:
        return block_of(block)

    def from_block(self, block: Block) -> nn.Module:
        return layer_of(block)

    def open(self, model: nn.Module) -> list[Site]:
        stop_recording(model)
        let_record(model)
        return super().open(model)

    def close(self, model: nn.Module) -> None:
        stop_recording(model)
        super().close(model)

    def stem(self, model: ViT) -> nn.Module:
        return cast(nn.Module, core_of(model).embeddings)

    def input_shape(self, model: ViT, size: ImageSize = None) -> tuple[int, int, int]:
        own, conv = pair(config_of(model).image_size), stem_of(model)
        height, width = own if size is None else pair(size)
        if (height, width) != own and kind_of(model) not in ("dinov2", "dinov3"):
            raise InputError(
                f"the {type(model).__name__} takes images of {own[0]}x{own[1]}; found {height}x{width}. Its positions "
                "must be interpolated first: pass --img-size with --model hf:FOLDER"
            )
        patch = patch_of(model)
        if size is not None and (height % patch[0] or width % patch[1]):
            raise InputError(f"img_size {height}x{width} is not a multiple of the {patch[0]}x{patch[1]} patch")
        return conv.in_channels, height, width

    def tokens(self, model: ViT, size: ImageSize = None) -> int:
        (_, height, width), patch = self.input_shape(model, size), patch_of(model)
        return int((height // patch[0]) * (width // patch[1]) + prefix_of(model))

    def fixed_macs(self, model: ViT, size: ImageSize = None) -> int:
        n, core = self.tokens(model, size), core_of(model)
        linears = [*self.classifier(model), getattr(model, "visual_projection", None)]
        linears.append(getattr(getattr(core, "pooler", None), "dense", None))
        macs = (n - prefix_of(model)) * stem_of(model).weight.numel()
        macs += sum(linear.weight.numel() for linear in linears if isinstance(linear, nn.Linear))
        pool = attention_pool(core)
        if pool is not None:
            dim = pool.attention.embed_dim  # queries and outputs of one token, keys and values of all
            macs += 2 * (n + 1) * dim * dim + 2 * n * dim + pool.mlp.fc1.weight.numel() + pool.mlp.fc2.weight.numel()
        return int(macs)

    def embed(self, model: ViT, images: Tensor) -> Tensor:
        core = core_of(model)
        x = core.embeddings(images)
        return cast(Tensor, core.pre_layrnorm(x) if hasattr(core, "pre_layrnorm") else x)

    def head(self, model: ViT, tokens: Tensor) -> Tensor:
        return read_tokens(model, tokens)

    def outputs(self, model: ViT, images: Tensor) -> tuple[Tensor, ...]:
        found = model(images)
        if is_backbone(model):
            return tuple(found.feature_maps)
        features = getattr(found, "last_hidden_state", None)
        return (logits_of(found),) if features is None else (features, logits_of(found))

    def ropes(self, model: ViT) -> list[Rope | None]:
        table, core = None, core_of(model)
        if hasattr(core, "rope_embeddings"):
            angles = copy.deepcopy(core.rope_embeddings).eval()
            cos, sin = angles(stem_of(model).weight.new_zeros(1, *self.input_shape(model)))
            table = sin, cos
        return [table] * len(self.sites(model))

    def fold_stem(self, model: ViT) -> nn.Module | None:
        core, conv, shape = core_of(model), stem_of(model), self.input_shape(model)
        nothing = conv.weight.new_zeros(1, *shape)  # on which the stem gives all that is added to the tokens
        stem = Stem(
            conv.weight.flatten(1), core.embeddings(nothing).clone(), shape[1:], patch_of(model), prefix_of(model)
        )
        core.embeddings = nn.Identity()
        return nn.Sequential(stem, core.pre_layrnorm) if hasattr(core, "pre_layrnorm") else stem

    def tokens_read(self, model: ViT) -> int | None:
        kind, bare = kind_of(model), not self.classifier(model)
        if kind in ("vit", "deit"):
            return len(self.classifier(model)) or (None if core_of(model).pooler is None else 1)
        return 1 if bare and kind in ("dinov2", "dinov3", "clip") and not is_backbone(model) else None

    def prefix_tokens(self, model: ViT) -> int:
        return prefix_of(model)

    def without_decay(self, model: ViT) -> set[str]:
        return {name for name, _ in model.named_parameters() if any(word in name for word in UNDECAYED)}

    def unread(self, model: ViT) -> list[nn.Parameter]:
        core, classifier = core_of(model), self.classifier(model)
        found = [p for name, p in model.named_parameters() if name.endswith("mask_token")]
        if is_backbone(model) and not (model.config.apply_layernorm or hasattr(core, "norm")):
            return [*found, *core.layernorm.parameters()]
        idle = core.post_layernorm if kind_of(model) == "clip" else attention_pool(core)
        return [*found, *idle.parameters()] if classifier and idle is not None else found

    def classes(self, model: ViT) -> int:
        heads = self.classifier(model)
        return int(getattr(heads[0], "out_features", 0)) if heads else 0

    def set_classes(self, model: ViT, classes: int) -> None:
        heads = [name for name in HEADS if name in model._modules]
        if not heads:
            cls = type(model).__name__
            others = [name for name, own in CLASSES.items() if own == CLASSES.get(cls) and "Classif" in name]
            mend = f"load the same weights as a {others[0]}" if others else "Transformers has no such class with one"
            raise InputError(f"a {cls} has no classifier: {mend}")
        width, like = 2 * width_of(model) if kind_of(model) == "dinov2" else width_of(model), stem_of(model).weight
        for name in heads:
            head = nn.Linear(width, classes, device=like.device, dtype=like.dtype) if classes else nn.Identity()
            if isinstance(head, nn.Linear):
                nn.init.trunc_normal_(head.weight, std=0.02)
                nn.init.zeros_(head.bias)
            setattr(model, name, head)
        model.config.num_labels = model.num_labels = classes

    def classifier(self, model: ViT) -> list[nn.Module]:
        return classifiers(model)

    def preprocessing(self, model: ViT) -> Preprocessing:
        usual, usage = USES[kind_of(model)], self.usage(model)
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
        if is_pruned(model.config):
            model.config.preprocessing = dict(usage)
        super().set_usage(model, {name: value for name, value in usage.items() if name != "label_names"})

    def check_usage(self, where: str, usage: Mapping[str, Any]) -> None:
        library()  # a saved model says at once what it needs
        for name, value in usage.items():
            fits = USAGE.get(name)
            if value is not None and fits is not None and not fits(value):
                raise CheckpointError(f"{where} has {name} {str(value)[:40]!r}, which cannot be read")

    def note_record(self, model: ViT, record: Mapping[str, Any]) -> None:
        stop_recording(model)
        let_record(model)
        usage = self.usage(model)
        note_in_config(model, {**record, self.usage_key: usage} if usage else record)

    def saved_fields(self, model: ViT) -> dict[str, Any]:
        config = {name: value for name, value in model.config.to_dict().items() if not name.startswith("_")}
        return {**config, "architectures": [type(model).__name__], "dtype": str(model.dtype).removeprefix("torch.")}

    def saved_files(self, config: Mapping[str, Any]) -> dict[str, Any]:
        processor = processor_of(config)
        return {} if processor is None else {PROCESSOR: processor}

    def versions(self) -> dict[str, str]:
        return {"transformers": str(library().__version__)}

    def describe(self, model: ViT, origin: Recipe | None = None) -> Recipe:
        cls = type(model).__name__
        if cls not in CLASSES or not type(model).__module__.startswith(("transformers.", "hiap.")):
            raise CheckpointError(f"{cls} cannot be rebuilt from a recipe: expected one of {', '.join(CLASSES)}")
        config, core = config_of(model), core_of(model)
        found = {name: getattr(config, name) for name in SHAPES[CLASSES[cls][1]] if hasattr(config, name)}
        found = {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}
        recipe: Recipe = {"class": cls, "config": found, "num_labels": self.classes(model)}
        if cls in ("ViTModel", "DeiTModel"):
            tokens = core.embeddings.mask_token is not None
            recipe |= {"add_pooling_layer": core.pooler is not None, "use_mask_token": tokens}
        elif is_backbone(model):
            recipe |= {name: getattr(config, name) for name in OPTIONS[cls]}
        return recipe

    def build(self, recipe: Recipe) -> nn.Module:
        check_recipe(recipe)
        cls = recipe["class"]
        kind, config_class = CLASSES[cls]
        hf = library()
        options = {name: recipe[name] for name in OPTIONS.get(cls, ())}
        stages = options if cls.endswith("Backbone") else {}  # which the configuration has
        try:
            config = getattr(hf, config_class)(**recipe["config"], **stages)
            if kind in WHOLE and "Classification" in cls:
                config = around(kind, config)
            with torch.device("meta"):
                model = made(getattr(hf, cls), config, recipe["num_labels"], **({} if stages else options))
        except Exception as error:  # whatever a configuration or a constructor makes of odd values
            raise CheckpointError(f"Transformers cannot make the {cls} of the skeleton: {error}") from error
        stop_recording(model)  # backbones begin with it
        let_record(model)
        core = core_of(model)
        if hasattr(core, "rope_embeddings"):
            core.rope_embeddings = type(core.rope_embeddings)(config)
        for module in model.modules():
            if isinstance(getattr(module, "position_ids", None), Tensor):  # no part of the weights
                count = module.position_ids.shape[-1]
                module.register_buffer("position_ids", torch.arange(count).expand(1, -1), persistent=False)
        return cast(nn.Module, model)


FAMILY = TransformersFamily()
