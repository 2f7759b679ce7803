"""A family told in a dozen lines: the class of the models, and where in them the parts are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from hiap.errors import CheckpointError, InputError, UnsupportedModelError
from hiap.models.block_paths import BlockPaths, find
from hiap.models.family import Family, ImageSize, Preprocessing, Recipe, Site, compact_widths, put
from hiap.models.sight import Outside, empty_block, outside, verify
from hiap.models.usage import check_entries, with_usage
from hiap.nn.compact import Attention, Block, Constant, Mlp

__all__ = ["DescribedFamily"]

Model = TypeVar("Model", bound=nn.Module)

_MARK = "_hiap_verified"  # attribute of a model whose blocks were compared with converted ones
_MOST = 1 << 24  # classes
_Arguments = Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]


class DescribedFamily(Family):
    """A kind of ViT of your own, by the paths of its parts. Give an instance to `hiap.register_family`.

    Paths are attributes joined by dots, such as "encoder.layers" or, in an nn.Sequential, "mlp.0". When a model is
    first seen, a copy of it runs on random images with its own blocks and with converted ones. If the results differ,
    the model is refused with the reason. Tokens and MACs outside the blocks are measured.

    Args:
        name: in config.json of saved models. Whoever loads one must register the description first.
        model: the class of the models.
        blocks: path of the nn.ModuleList or nn.Sequential of blocks.
        stem: path of the module that every forward enters first, and only once.
        head: path of the Linear that gives the logits.
        norm1, norm2: paths, inside a block, of the norms before the attention and before the MLP.
        attention: path of an nn.MultiheadAttention; or
        qkv, out, heads: paths of the Linear that gives queries, keys and values, of the output Linear, and of the
            number of heads (or the number itself); or
        q, k, v, out, heads: the same with three Linears.
        fc1, act, fc2: paths of the MLP; `act` may be a module instead, such as nn.GELU().
        q_norm, k_norm: of the norms of queries and keys, each (images, tokens, heads, dims), if there are any.
        scale1, scale2: of what the branches are multiplied with (layer scale), modules or parameters, if any.
        attn_drop, proj_drop, drop1, drop2: of dropout on attention weights, after `out`, after `act` and after `fc2`.
        drop_path1, drop_path2: of stochastic depth on the two branches.
        size: of the images, a number or height and width; or the path of an attribute of the model with it.
        channels: of the images, or the path of an attribute.
        mean, std: normalisation of the images, one value a channel.
        interpolation, crop_pct: how images are resized and cropped for evaluation.
        arguments: what `make` is called with to build a model again: JSON values, or a function from a model to them.
            Without it models are pruned but not saved.
        make: gives a dense model; the class itself by default.
        without_decay: names of parameters without weight decay, besides biases and norms.
        tolerance: the largest difference that converted blocks may make, in float64, relative to the largest output.

    Raises:
        InputError: the description contradicts itself.
    """

    def __init__(
        self,
        name: str,
        model: type[nn.Module],
        *,
        blocks: str,
        stem: str,
        head: str,
        norm1: str,
        norm2: str,
        fc1: str,
        act: str | nn.Module,
        fc2: str,
        attention: str | None = None,
        qkv: str | None = None,
        q: str | None = None,
        k: str | None = None,
        v: str | None = None,
        out: str | None = None,
        heads: str | int | None = None,
        q_norm: str | None = None,
        k_norm: str | None = None,
        scale1: str | None = None,
        scale2: str | None = None,
        attn_drop: str | None = None,
        proj_drop: str | None = None,
        drop1: str | None = None,
        drop2: str | None = None,
        drop_path1: str | None = None,
        drop_path2: str | None = None,
        size: int | tuple[int, int] | str,
        channels: int | str = 3,
        mean: Sequence[float],
        std: Sequence[float],
        interpolation: str = "bicubic",
        crop_pct: float = 1.0,
        arguments: _Arguments | None = None,
        make: Callable[..., nn.Module] | None = None,
        without_decay: Sequence[str] = (),
        tolerance: float = 1e-9,
    ) -> None:
        if not (isinstance(model, type) and issubclass(model, nn.Module)):
            raise InputError(f"model must be the class of the models, such as MyViT; found {model!r}")
        if len(mean) != len(std):
            raise InputError(f"mean and std must have one value per channel; found {mean} and {std}")
        self.name, self.model, self.tolerance = name, model, tolerance
        self.blocks_path, self.stem_path, self.head_path = blocks, stem, head
        self.paths = BlockPaths(
            *(norm1, norm2, fc1, fc2, act, attention, qkv, q, k, v, out, heads, q_norm, k_norm, scale1, scale2),
            *(attn_drop, proj_drop, drop1, drop2, drop_path1, drop_path2),
        )
        self.size, self.channels, self.arguments, self.make = size, channels, arguments, make or model
        self.mean, self.std = tuple(mean), tuple(std)
        self.interpolation, self.crop_pct, self.exempt = interpolation, crop_pct, set(without_decay)

    # -- blocks -----------------------------------------------------------------------------------------------------

    def accepts(self, model: nn.Module) -> bool:
        return isinstance(model, self.model)

    def sites(self, model: nn.Module) -> list[Site]:
        found = {name: model.get_submodule(name) for name in self._names(model)}
        own = {name: block for name, block in found.items() if not isinstance(block, Block)}
        told = {name: self.paths.widths(self.paths.parts(name, block)) for name, block in own.items()}
        if own:
            self._check(model, told)
        dim = next(iter(told.values()))[0] if told else self._dim(model, [*found.values()])
        return [
            Site(
                self,
                name,
                block,
                dim,
                told[name][1] if name in told else compact_widths(cast(Block, block)),
                self.paths.q_norm is not None or self.paths.k_norm is not None,
            )
            for name, block in found.items()
        ]

    def _names(self, model: nn.Module) -> list[str]:
        blocks = find(model, self.blocks_path, "blocks", "the model")
        if not isinstance(blocks, nn.ModuleList | nn.Sequential) or not len(blocks):
            raise UnsupportedModelError(
                f"blocks={self.blocks_path!r} is a {type(blocks).__name__}; an nn.ModuleList or an nn.Sequential of "
                "blocks is needed"
            )
        return [f"{self.blocks_path}.{name}" for name in blocks._modules]

    def _dim(self, model: nn.Module, blocks: Sequence[nn.Module]) -> int:
        """The width of the tokens of a model whose blocks are all ours."""
        for block in cast("Sequence[Block]", blocks):
            if isinstance(block.attn, Attention):
                return block.attn.qkv.in_features
            if isinstance(block.mlp, Mlp):
                return block.mlp.fc1.in_features
            constant = block.attn or block.mlp
            if isinstance(constant, Constant):
                return constant.bias.numel()
        return self._outside(model).dim

    def _check(self, model: nn.Module, told: Mapping[str, Any]) -> None:
        """Compare a model with its description, once; what it was then like is noted with it."""
        self.classifier(model)
        self.stem(model)
        like = [id(self), *((name, type(model.get_submodule(name)), *widths) for name, widths in told.items())]
        if vars(model).get(_MARK) == like or any(p.is_meta for p in model.parameters()):
            return
        self._verify(model, {name: dim for name, (dim, _) in told.items()})
        vars(model)[_MARK] = like

    def _verify(self, model: nn.Module, widths: Mapping[str, int]) -> None:
        verify(model, widths, self.stem_path, self.paths, self.input_shape(model), self.tolerance)

    def to_block(self, block: nn.Module) -> Block:
        return self.paths.to_block(block)

    def from_block(self, block: Block) -> nn.Module:
        return self.paths.from_block(block)

    def close(self, model: nn.Module) -> None:
        for site in self.sites(model):
            if isinstance(site.module, Block):
                put(model, site.name, self.from_block(site.module))

    def take_blocks(self, model: nn.Module) -> list[nn.Module]:
        found = self.sites(model)
        for site in found:  # not an empty list: a forward may count on its length
            put(model, site.name, empty_block())
        return [site.module for site in found]

    # -- what goes in and out ---------------------------------------------------------------------------------------

    def stem(self, model: nn.Module) -> nn.Module:
        return self._module(model, self.stem_path, "stem")

    def _module(self, model: nn.Module, path: str, role: str) -> nn.Module:
        found = find(model, path, role, "the model")
        if not isinstance(found, nn.Module):
            raise UnsupportedModelError(f"{role}={path!r} is a {type(found).__name__}, not a module")
        return found

    def input_shape(self, model: nn.Module, size: ImageSize = None) -> tuple[int, int, int]:
        channels, own = (
            cast(Any, find(model, value, role, "the model") if isinstance(value, str) else value)
            for role, value in (("channels", self.channels), ("size", self.size))
        )
        height, width = own if isinstance(own, Sequence) else (own, own)
        if size is not None and (tuple(size) if isinstance(size, Sequence) else (size, size)) != (height, width):
            raise InputError(f"the model takes images of {height}x{width}; found {size}")
        return int(channels), int(height), int(width)

    def _outside(self, model: nn.Module, size: ImageSize = None) -> Outside:
        return outside(model, self._names(model), self.input_shape(model, size))

    def tokens(self, model: nn.Module, size: ImageSize = None) -> int:
        return self._outside(model, size).tokens

    def fixed_macs(self, model: nn.Module, size: ImageSize = None) -> int:
        return self._outside(model, size).macs

    def outputs(self, model: nn.Module, images: Tensor) -> tuple[Tensor, ...]:
        features: list[Tensor] = []  # a new classifier may be all zeros, and its logits would tell nothing
        hook = self._linear(model).register_forward_pre_hook(lambda head, args: features.append(args[0]))
        try:
            logits = model(images)
        finally:
            hook.remove()
        return *features, logits

    def without_decay(self, model: nn.Module) -> set[str]:
        return self.exempt

    def preprocessing(self, model: nn.Module) -> Preprocessing:
        _, height, width = self.input_shape(model)
        own = Preprocessing((height, width), self.mean, self.std, self.interpolation, self.crop_pct)
        return with_usage(own, self.usage(model))

    def check_usage(self, where: str, usage: Mapping[str, Any]) -> None:
        check_entries(where, usage)

    # -- the classifier ---------------------------------------------------------------------------------------------

    def _linear(self, model: nn.Module) -> nn.Linear:
        found = self._module(model, self.head_path, "head")
        if not isinstance(found, nn.Linear):
            raise UnsupportedModelError(
                f"head={self.head_path!r} is a {type(found).__name__}; the nn.Linear that gives the logits is needed"
            )
        return found

    def classes(self, model: nn.Module) -> int:
        return self._linear(model).out_features

    def set_classes(self, model: nn.Module, classes: int) -> None:
        old = self._linear(model)
        like = {"device": old.weight.device, "dtype": old.weight.dtype}
        put(model, self.head_path, nn.Linear(old.in_features, classes, old.bias is not None, **like))

    def classifier(self, model: nn.Module) -> list[nn.Module]:
        return [self._linear(model)]

    # -- saving and loading -----------------------------------------------------------------------------------------

    def describe(self, model: nn.Module, origin: Recipe | None = None) -> Recipe:
        if self.arguments is None:
            raise CheckpointError(
                f"the description of {self.name!r} does not say how a model is built again: give it arguments= (what "
                f"{getattr(self.make, '__name__', 'make')} is called with)"
            )
        return {"arguments": self._arguments(model), "classes": self.classes(model)}

    def _arguments(self, model: nn.Module) -> dict[str, Any]:
        told = self.arguments(model) if callable(self.arguments) else self.arguments
        try:
            return cast("dict[str, Any]", json.loads(json.dumps(dict(told or {}))))
        except (TypeError, ValueError) as error:
            raise CheckpointError(f"the arguments of {self.name!r} cannot be written as JSON: {error}") from error

    def build(self, recipe: Recipe) -> nn.Module:
        if not isinstance(recipe, dict) or set(recipe) != {"arguments", "classes"}:
            raise CheckpointError("the skeleton must be an object with 'arguments' and 'classes'")
        arguments, classes = recipe["arguments"], recipe["classes"]
        if not isinstance(arguments, dict) or type(classes) is not int or not 1 <= classes <= _MOST:
            raise CheckpointError("the skeleton must have arguments by name and a count of classes")
        if isinstance(self.arguments, Mapping) and arguments != json.loads(json.dumps(dict(self.arguments))):
            raise CheckpointError(
                f"the model was saved with the arguments {arguments}, {self.name!r} is registered with "
                f"{dict(self.arguments)}"
            )
        # Made with values first: a constructor may compute with them, and some buffers are in no file.
        with torch.random.fork_rng([]), torch.device("cpu"):
            try:
                model = self.make(**arguments)
            except Exception as error:  # whatever the code of somebody's own makes of them
                raise CheckpointError(
                    f"{self.name!r} cannot be made with {arguments}: {type(error).__name__}: {error}"
                ) from error
        if not isinstance(model, self.model):
            raise CheckpointError(
                f"make gives a {type(model).__name__}; {self.name!r} is described for {self.model.__name__}"
            )
        if self.classes(model) != classes:
            self.set_classes(model, classes)
        return _without_weights(model)


def _without_weights(model: Model) -> Model:
    """Move what a file of weights holds to the meta device, in place; the rest stays."""
    held = [*model.parameters()]  # tied ones stay tied
    moved = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in held}
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = None if p is None else moved[id(p)]
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
    return model
