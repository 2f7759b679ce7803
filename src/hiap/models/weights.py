"""Dense models and their weights: of timm or Transformers, read from files, and explained where they do not fit."""

from __future__ import annotations

import argparse
import os
import reprlib
from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import safetensors.torch
import timm
import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from hiap.errors import ConfigError, InputError
from hiap.models.timm_weights import classes_in, guess_weights
from hiap.models.transformers_hub import PREFIX, hub_model

__all__ = [
    "check_weights",
    "create_model",
    "load_weights",
    "read_weights",
    "short_reason",
    "teacher_model",
    "trained_model",
    "unwrapped",
]

NESTED = ("state_dict_ema", "state_dict", "model_ema", "model")  # where training scripts put the weights
WRAPPERS = ("module.", "model.", "backbone.", "encoder.", "vit.", "net.", "student.", "base_model.")
TORCHVISION = "torchvision:"  # before the names of models that are torchvision's
DEEPEST = 256  # blocks; a thousand take timm a quarter of a minute
SHORT = reprlib.Repr()
SHORT.maxdict = SHORT.maxlist = SHORT.maxtuple = 12
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 80


def trained_model(
    name: str, weights: str | None, pretrained: bool, arguments: dict[str, Any], features: bool = False
) -> nn.Module:
    """A model with its weights; its own number of classes, 0 where they hold no classifier.

    Args:
        name: of timm, or of torchvision with `torchvision:` before it.
        weights: a file. Without one, `pretrained` weights are fetched.
        arguments: what `timm.create_model` is given besides the name.
        features: of Transformers, the bare model where its class has one (`hub_model`).

    Raises:
        ConfigError: timm cannot make it, or the weights cannot be had or do not fit.
    """
    if name.startswith(PREFIX) and weights is None:
        return hub_model(name, pretrained, arguments, features)
    if weights is not None and name.startswith(PREFIX):
        raise ConfigError(f"{name} comes with weights of its own; leave out --weights {weights}")
    if weights is not None:
        state, arguments = read_weights(weights), dict(arguments)
        if name.startswith(TORCHVISION):
            from hiap.models.torchvision import classes_of, present_names

            state = present_names(unwrapped(state, own=("encoder.",)))
            classes = classes_of(state)
        else:
            state = unwrapped(state)
            classes = classes_in(state)
        if classes is not None:
            arguments["num_classes"] = classes
        model = create_model(name, False, arguments)
        load_weights(model, state, weights, name, f"model {name}")
        return model
    if pretrained:  # those of the weights, so that a new classifier is noticed
        arguments = {key: value for key, value in arguments.items() if key != "num_classes"}
    return create_model(name, pretrained, arguments)


def teacher_model(name: str, weights: str | None, classes: int) -> tuple[nn.Module, tuple[int | None, int]]:
    """Any model of timm as a teacher, with the classes and the channels it has.

    Args:
        weights: a file of one with so many classes; without it, pretrained weights are fetched.

    Raises:
        ConfigError: timm does not know it, or its weights cannot be had or do not fit.
    """
    own = {"num_classes": classes} if weights else {}
    try:
        model: nn.Module = timm.create_model(name, pretrained=weights is None, **own)
    except Exception as error:
        raise ConfigError(
            f"the teacher {name} cannot be loaded ({short_reason(error)}). "
            "Pass --teacher-weights FILE, or --teacher self"
        ) from error
    if weights is not None:
        what = f"teacher {name} with the {classes} classes of the data"
        load_weights(model, read_weights(weights), weights, name, what)
    channels = resolve_data_config({}, model=model)["input_size"][0]
    return model, (cast("int | None", getattr(model, "num_classes", None)), channels)


def create_model(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    """A model of timm, torchvision or (with "hf:") Transformers; one with arguments is measured before it takes memory.

    Raises:
        ConfigError: the library does not know it or refuses the arguments, or it is larger than the memory here.
    """
    if name.startswith(PREFIX):
        return hub_model(name, pretrained, arguments)
    given = f" with {SHORT.repr(arguments)}" if arguments else ""
    maker = "torchvision" if name.startswith(TORCHVISION) else "timm"
    try:
        if arguments:
            _check_size(name, arguments)
    except Exception as error:  # whatever the constructor of a model makes of odd arguments
        raise ConfigError(f"{maker} cannot make the model {name}{given}: {short_reason(error)}") from error
    try:
        return _make(name, pretrained, arguments)
    except Exception as error:
        known = timm.is_model(name) or maker == "torchvision"
        if pretrained and known and not isinstance(error, TypeError | InputError):
            raise ConfigError(
                f"the pretrained weights of {name} cannot be loaded ({short_reason(error)}). Pass --weights FILE, or "
                "--no-pretrained (with --dense-epochs) to start without"
            ) from error
        raise ConfigError(f"{maker} cannot make the model {name}{given}: {short_reason(error)}") from error


def _make(name: str, pretrained: bool, arguments: dict[str, Any]) -> nn.Module:
    if name.startswith(TORCHVISION):
        from hiap.models.torchvision import create

        return create(name.removeprefix(TORCHVISION), pretrained, arguments)
    model: nn.Module = timm.create_model(name, pretrained=pretrained, **arguments)
    return model


def _check_size(name: str, arguments: dict[str, Any]) -> None:
    """Build the model without its weights, and refuse one that cannot be held."""
    if "checkpoint_path" in arguments:
        raise InputError("checkpoint_path is not read; pass --weights FILE")
    depth = arguments.get("depth")
    if isinstance(depth, int) and depth > DEEPEST:
        raise InputError(f"depth must be at most {DEEPEST}; found {depth}")
    with torch.device("meta"):
        model = _make(name, False, arguments)
    size, memory = sum(4 * p.numel() for p in model.parameters()), _memory()
    if size > memory:
        raise InputError(f"its weights would take {size / 1e9:.0f} GB, the memory here is {memory / 1e9:.0f} GB")


def _memory() -> float:
    """Bytes of memory of the machine."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # not on every system
        return 1e11


def short_reason(error: BaseException) -> str:
    """The first line of an error, or its kind where it has no words."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    kind = type(error).__name__
    if not first:
        return kind
    first = first if len(first) <= 300 else first[:300] + "..."
    return f"{kind}: {first}" if isinstance(error, KeyError) else first


def load_weights(model: nn.Module, state: dict[str, Tensor], file: str, name: str, what: str) -> None:
    """Give a model its weights.

    Raises:
        ConfigError: with what differs, and what the weights look like.
    """
    own = model.state_dict()
    if own.keys() != state.keys():
        state = unwrapped(state, own)
    other = [key for key in own if key in state and own[key].shape != state[key].shape]
    missing, more = [key for key in own if key not in state], [key for key in state if key not in own]
    parts = []
    if other:
        sizes = " in the file, ".join(_by(one[other[0]].shape) for one in (state, own))
        parts.append(f"size of {other[0]} is {sizes} in the model{_and_more(len(other) - 1)}")
    for keys, verb in ((missing, "lacks"), (more, "holds unknown")):
        if keys:
            parts.append(f"the file {verb} {', '.join(keys[:3])}{_and_more(len(keys) - 3)}")
    if parts:
        guess = guess_weights(model, state, name)
        raise ConfigError(f"{file} does not fit the {what}: {'; '.join(parts)}" + (f"\n  {guess}" if guess else ""))
    model.load_state_dict(state)


def _by(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def read_weights(path: str) -> dict[str, Tensor]:
    """Tensors of a .safetensors file, or of one that `torch.load` reads without running code.

    Raises:
        ConfigError: it is neither, or its values are not finite.
    """
    try:
        if path.endswith(".safetensors"):
            state: Any = safetensors.torch.load_file(path)
        else:
            with _harmless():
                state = torch.load(path, map_location="cpu", weights_only=True)
            if isinstance(state, dict):
                state = next((state[key] for key in NESTED if isinstance(state.get(key), dict)), state)
        _check_tensors(state)
        state = {name: tensor.float() for name, tensor in state.items()}
    except Exception as error:  # a file that is something else fails anywhere in the reader
        raise ConfigError(
            f"{path} does not hold weights: a .safetensors or .pth file of tensors is needed ({short_reason(error)})"
        ) from error
    check_weights(state, path)
    return dict(state)


def _check_tensors(state: Any) -> None:
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}")
    if not state:
        raise InputError("it holds nothing")
    if "param_groups" in state and "state" in state:
        raise TypeError("it holds the state of an optimiser")
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {SHORT.repr(name)} is not text")
        if not isinstance(value, Tensor):
            raise TypeError(f"{SHORT.repr(name)} is of type {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise TypeError(f"{SHORT.repr(name)} is sparse, quantised or without values")


def check_weights(state: dict[str, Tensor], file: str) -> None:
    """Refuse weights with values that are not finite.

    Raises:
        ConfigError: with the first of them.
    """
    wrong = [name for name, tensor in state.items() if not bool(tensor.isfinite().all())]
    if wrong:
        raise ConfigError(
            f"{file} holds values that are not finite, in {wrong[0]}{_and_more(len(wrong) - 1)}: the run that wrote it "
            "has diverged, or the file is damaged"
        )


def unwrapped(state: dict[str, Tensor], own: Collection[str] = ()) -> dict[str, Tensor]:
    """Weights by the names they have in the bare model: what compilers, wrappers and whole systems add is taken off.

    A prefix goes where at least nine tenths of the tensors have it: a classifier may stand beside a backbone.

    Args:
        own: names of tensors in the bare model, as far as they are known; what they begin with is no wrapper.
    """
    wrappers = [wrapper for wrapper in WRAPPERS if not any(name.startswith(wrapper) for name in own)]
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
    while True:
        shared = (w for w in wrappers if sum(name.startswith(w) for name in state) >= 0.9 * len(state))
        prefix = next(shared, None)
        if prefix is None:
            return state
        bare = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
        if len(bare) < len(state):  # two tensors would have one name
            return state
        state = bare


def _harmless() -> AbstractContextManager[Any]:
    """Let `torch.load` read the options that training scripts of timm save beside the weights."""
    allowed = getattr(torch.serialization, "safe_globals", None)  # torch 2.5
    return nullcontext() if allowed is None else allowed([argparse.Namespace])
