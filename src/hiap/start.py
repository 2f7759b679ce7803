"""What a run is made of: the dense model, data, teacher, schedule, cost and controller of a target; and a dry run."""

from __future__ import annotations

import argparse
import copy
import math
import os
import re
import reprlib
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import safetensors.torch
import timm
import torch
from timm.data import resolve_data_config
from torch import Tensor, nn

from hiap.attach import attach, gates
from hiap.budget import Controller, Floors, Target
from hiap.config import Config, ConfigError
from hiap.cost import Cost, MacCost, ParamCost, macs
from hiap.data import Augmentation, ByteData, Data, open_data
from hiap.families import timm as family
from hiap.families.timm import ViT
from hiap.images import Loading
from hiap.latency import UNITS, LatencyCost
from hiap.objective import Teacher
from hiap.schedule import Schedule

__all__ = [
    "check_finite",
    "check_parts",
    "create_model",
    "dense_model",
    "fit_classifier",
    "load_data",
    "make_controller",
    "make_cost",
    "make_schedule",
    "make_teacher",
    "model_arguments",
    "normalisation",
    "note_preprocessing",
    "other_teacher",
    "plan",
    "read_weights",
    "steps_per_epoch",
    "unwrapped",
]

NESTED = ("state_dict_ema", "state_dict", "model_ema", "model")  # where training scripts put the weights
WRAPPERS = ("module.", "model.", "backbone.", "encoder.", "vit.", "net.", "student.", "base_model.")
STEM = "patch_embed.proj.weight"
TOKENS = ("cls_token", "reg_token", "dist_token")
MARKS = ("reg_token", "dist_token", "blocks.0.ls1.gamma")  # what tells kinds of ViT apart
SIZES = {  # width and depth -> the word in timm's names
    (192, 12): "tiny",
    (384, 12): "small",
    (512, 12): "medium",
    (768, 12): "base",
    (1024, 24): "large",
    (1280, 32): "huge",
    (1408, 40): "giant",
    (1664, 48): "gigantic",
    (1152, 27): "so400m",
}
DEEPEST = 256  # blocks; a thousand take timm a quarter of a minute
SHORT = reprlib.Repr()
SHORT.maxdict = SHORT.maxlist = SHORT.maxtuple = 12
SHORT.maxstring = SHORT.maxlong = SHORT.maxother = 80
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std, a value a channel


def dense_model(config: Config) -> ViT:
    """The model of a configuration with its weights; its own number of classes, 0 where they hold no classifier.

    Raises:
        ConfigError: timm cannot make it, or the weights cannot be had or do not fit.
    """
    arguments = model_arguments(config)
    if config.weights is not None:
        state = unwrapped(read_weights(config.weights))
        if "head.weight" in state and state["head.weight"].ndim == 2:
            arguments["num_classes"] = state["head.weight"].shape[0]
        elif STEM in state and not any(name.startswith("head") for name in state):
            arguments["num_classes"] = 0
        model = create_model(config.model, False, arguments)
        _load(model, state, config.weights, config.model, f"model {config.model}")
        return model
    if config.pretrained:  # those of the weights, so that a new classifier is noticed
        arguments = {name: value for name, value in arguments.items() if name != "num_classes"}
    return create_model(config.model, config.pretrained, arguments)


def create_model(name: str, pretrained: bool, arguments: dict[str, Any]) -> Any:
    """A model of timm; one with arguments is measured before it takes memory.

    Raises:
        ConfigError: timm does not know it or refuses the arguments, or it is larger than the memory here.
    """
    given = f" with {SHORT.repr(arguments)}" if arguments else ""
    try:
        if arguments:
            _check_size(name, arguments)
    except Exception as error:  # whatever the constructor of a model makes of odd arguments
        raise ConfigError(f"timm cannot make the model {name}{given}: {_reason(error)}") from error
    try:
        return timm.create_model(name, pretrained=pretrained, **arguments)
    except Exception as error:
        if pretrained and timm.is_model(name) and not isinstance(error, TypeError):
            raise ConfigError(
                f"the pretrained weights of {name} cannot be had ({_reason(error)}). Pass --weights FILE, or "
                "--no-pretrained (with --dense-epochs) to begin without"
            ) from error
        raise ConfigError(f"timm cannot make the model {name}{given}: {_reason(error)}") from error


def _check_size(name: str, arguments: dict[str, Any]) -> None:
    """Build the model without its weights, and refuse one that cannot be held."""
    if "checkpoint_path" in arguments:
        raise ValueError("checkpoint_path is not read; pass --weights FILE")
    depth = arguments.get("depth")
    if isinstance(depth, int) and depth > DEEPEST:
        raise ValueError(f"depth must be at most {DEEPEST}; found {depth}")
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, **arguments)
    size, memory = sum(4 * p.numel() for p in model.parameters()), _memory()
    if size > memory:
        raise ValueError(f"its weights would take {size / 1e9:.0f} GB, the memory here is {memory / 1e9:.0f} GB")


def _memory() -> float:
    """Bytes of memory of the machine."""
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):  # not on every system
        return 1e11


def _reason(error: BaseException) -> str:
    """The first line of an error, or its kind where it has no words."""
    lines = str(error).strip().splitlines()
    first = lines[0] if lines else ""
    kind = type(error).__name__
    if not first:
        return kind
    first = first if len(first) <= 300 else first[:300] + "..."
    return f"{kind}: {first}" if isinstance(error, KeyError) else first


def _load(model: nn.Module, state: dict[str, Tensor], file: str, name: str, what: str) -> None:
    """Give a model its weights.

    Raises:
        ConfigError: with what differs, and what the weights look like.
    """
    own = model.state_dict()
    if own.keys() != state.keys():
        state = unwrapped(state)
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
        guess = _guess(model, state, name)
        raise ConfigError(f"{file} does not fit the {what}: {'; '.join(parts)}" + (f"\n  {guess}" if guess else ""))
    model.load_state_dict(state)


def _by(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _and_more(count: int) -> str:
    return f" (and {count} more)" if count > 0 else ""


def _guess(model: Any, state: dict[str, Tensor], name: str) -> str | None:
    """What to pass for weights that do not fit a ViT, as far as their sizes tell."""
    own = model.state_dict()
    if STEM not in own or STEM not in state or state[STEM].ndim != 4 or not hasattr(model, "blocks"):
        return None
    width, _, patch, _ = state[STEM].shape
    depth = len({found[1] for key in state if (found := re.match(r"blocks\.(\d+)\.", key))})
    tokens = {key: state[key].shape[1] for key in TOKENS if key in state and state[key].ndim == 3}
    size = _image_size(model, state, tokens)
    like = (width, depth, patch, [key in state for key in MARKS])
    if like == (own[STEM].shape[0], len(model.blocks), own[STEM].shape[2], [key in own for key in MARKS]):
        if size and size != model.patch_embed.img_size[0]:
            return f"these look like weights for img_size {size}: pass --img-size {size}"
        return None
    word = SIZES.get((width, depth))
    if word is None:
        return None
    kinds = [re.sub("|".join(SIZES.values()), word, re.sub(r"patch\d+", f"patch{patch}", name))]
    if "dist_token" in state:
        kinds.insert(0, f"deit_{word}_distilled_patch{patch}_224")
    elif "dist_token" in own:
        kinds.insert(0, f"deit_{word}_patch{patch}_224")
    elif "blocks.0.ls1.gamma" in state:
        registers = f"reg{tokens['reg_token']}_" if "reg_token" in tokens else ""
        kinds += [f"vit_{word}_patch{patch}_{registers}dinov2", f"deit3_{word}_patch{patch}_224"]
    kinds.append(f"vit_{word}_patch{patch}_224")
    best = next((kind for kind in kinds if kind != name and timm.is_model(kind)), None)
    if best is None:
        return None
    preset = timm.get_pretrained_cfg(best)
    at = f" --img-size {size}" if size and preset and size != preset.input_size[-1] else ""
    return f"looks like {best} (width {width}, {depth} blocks, patch {patch}): pass --model {best}{at}"


def _image_size(model: Any, state: dict[str, Tensor], tokens: dict[str, int]) -> int | None:
    """The size of the square images that position embeddings are for; some models have them for patches alone."""
    if "pos_embed" not in state or state["pos_embed"].ndim != 3:
        return None
    prefixes = [sum(tokens.values()), 0]
    for prefix in reversed(prefixes) if getattr(model, "no_embed_class", False) else prefixes:
        patches = max(state["pos_embed"].shape[1] - prefix, 0)
        side = math.isqrt(patches)
        if side and side * side == patches:
            return side * int(state[STEM].shape[2])
    return None


def fit_classifier(config: Config, model: ViT, classes: int) -> None:
    """Give the model as many classes as the data has.

    Raises:
        ConfigError: it would have to teach itself with a new, random classifier.
    """
    if model.num_classes == classes:
        return
    trained = config.weights is not None or config.pretrained
    if trained and config.teacher == "self" and config.taught and not config.dense_epochs:
        raise ConfigError(
            f"the weights of {config.model} are for {model.num_classes} classes, the data has {classes}: with a new "
            "classifier the dense model has nothing to teach. Pass --weights FILE of one trained on this data, "
            "--dense-epochs N to train it first, or --teacher none"
        )
    model.reset_classifier(classes)


def other_teacher(config: Config, classes: int, channels: int) -> nn.Module | None:
    """The teacher where it is another model than the dense one.

    Raises:
        ConfigError: timm does not know it, its weights cannot be had, or it does not fit the data.
    """
    if config.teacher == "self" or not config.taught:
        return None
    given = config.teacher_weights
    try:
        model: nn.Module = timm.create_model(
            config.teacher, pretrained=given is None, **({"num_classes": classes} if given else {})
        )
    except Exception as error:
        raise ConfigError(
            f"the teacher {config.teacher} cannot be had ({_reason(error)}). Pass --teacher-weights FILE, or "
            "--teacher self"
        ) from error
    if given is not None:
        what = f"teacher {config.teacher} with the {classes} classes of the data"
        _load(model, read_weights(given), given, config.teacher, what)
    own = getattr(model, "num_classes", None), resolve_data_config({}, model=model)["input_size"][0]
    if own != (classes, channels):
        raise ConfigError(
            f"the teacher {config.teacher} has {own[0]} classes and {own[1]} channels, the data {classes} and "
            f"{channels}. Pass --teacher-weights FILE of one trained on this data, or --teacher self"
        )
    return model


def make_teacher(config: Config, dense: ViT, norm: Normalisation, other: nn.Module | None) -> Teacher | None:
    """The teacher of a run, if it has one: the other model, else the dense one as it is now."""
    if not config.taught:
        return None
    device = next(dense.parameters()).device
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    if other is None:
        return Teacher(copy.deepcopy(dense), norm, norm, None, device, dtype, watched=config.features_weight > 0)
    found = resolve_data_config({}, model=other)
    own = tuple(found["mean"]), tuple(found["std"])
    return Teacher(other, norm, own, found["input_size"][1:], device, dtype)


def model_arguments(config: Config) -> dict[str, Any]:
    """What `timm.create_model` is given besides the name."""
    return config.model_args | ({} if config.img_size is None else {"img_size": config.img_size})


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
            f"{path} does not hold weights: a .safetensors or .pth file of tensors is needed ({_reason(error)})"
        ) from error
    check_finite(state, path)
    return dict(state)


def _check_tensors(state: Any) -> None:
    if not isinstance(state, dict):
        raise TypeError(f"it holds a {type(state).__name__}")
    if not state:
        raise ValueError("it holds nothing")
    if "param_groups" in state and "state" in state:
        raise TypeError("it holds the state of an optimiser")
    for name, value in state.items():
        if not isinstance(name, str):
            raise TypeError(f"the name {SHORT.repr(name)} is no text")
        if not isinstance(value, Tensor):
            raise TypeError(f"{SHORT.repr(name)} is of type {type(value).__name__}, not a tensor")
        if value.layout != torch.strided or value.is_meta or value.is_quantized:
            raise TypeError(f"{SHORT.repr(name)} is sparse, quantised or without values")


def check_finite(state: dict[str, Tensor], file: str) -> None:
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


def unwrapped(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights by the names they have in the bare model: what compilers, wrappers and whole systems add is taken off.

    A prefix goes where at least nine tenths of the tensors have it: a classifier may stand beside a backbone.
    """
    state = {name.replace("_orig_mod.", ""): tensor for name, tensor in state.items()}
    while True:
        shared = (w for w in WRAPPERS if sum(name.startswith(w) for name in state) >= 0.9 * len(state))
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


def normalisation(config: Config, model: ViT) -> Normalisation:
    """Mean and std of the input: the configuration's, else the model's own."""
    channels, own = model.patch_embed.proj.in_channels, resolve_data_config({}, model=model)
    for name in ("mean", "std"):
        if len(set(own[name])) == 1:  # the same for every channel, however many there are
            own[name] = own[name][:1] * channels
    mean, std = config.mean or own["mean"], config.std or own["std"]
    if len(mean) != channels or len(std) != channels:
        raise ConfigError(
            f"mean and std must have {channels} values, one a channel; found {list(mean)} and {list(std)}"
        )
    return tuple(mean), tuple(std)


def note_preprocessing(model: ViT, norm: Normalisation, data: Data) -> None:
    """Let the model itself say what it is trained on, for whoever loads it: size, normalisation, crop and classes."""
    size = (model.patch_embed.proj.in_channels, *family.image_size(model))
    own = {"input_size": size, "mean": norm[0], "std": norm[1], "num_classes": model.num_classes}
    if isinstance(data, ByteData):  # holds whole images, of one size
        own |= {"crop_pct": 1.0, "crop_mode": "squash"}
    model.pretrained_cfg = model.default_cfg = {**model.pretrained_cfg, **own}


def load_data(config: Config, model: ViT, device: torch.device) -> Data:
    """What `config.data` names, as the model sees it: its size, normalisation, interpolation and crop."""
    own = resolve_data_config({}, model=model)
    loading = Loading(
        size=family.image_size(model),
        normalisation=normalisation(config, model),
        augmentation=Augmentation(config.crop, config.flip, config.policy, config.erase),
        device=torch.device("cpu") if config.data_device == "cpu" and config.data != "digits" else device,
        seed=config.seed,
        workers=config.workers,
        strict=config.strict_data,
        channels=model.patch_embed.proj.in_channels,
        **{name: own[name] for name in ("interpolation", "crop_pct", "crop_mode")},
    )
    return open_data(config.data, loading, config.data_device != "loader", config.model_args.get("num_classes"))


def steps_per_epoch(config: Config, data: Data) -> int:
    """Whole batches of the training images.

    Raises:
        ConfigError: there is none.
    """
    steps = data.train_size // config.batch_size
    if steps == 0:
        raise ConfigError(f"batch_size {config.batch_size} is more than the {data.train_size} training images")
    return steps


def check_parts(config: Config, processes: int = 1) -> None:
    """Refuse batches that processes cannot take apart as the configuration wants it."""
    size = config.batch_size
    shares = [(rank + 1) * size // processes - rank * size // processes for rank in range(processes)]
    if min(shares) < config.accumulate:
        raise ConfigError(f"accumulate {config.accumulate} is more than the {min(shares)} images of a process")
    odd = [share for share in shares if share % 2]
    if odd and (config.mixup or config.cutmix):
        raise ConfigError(
            f"mixup and cutmix pair images, and a process has {odd[0]}: choose a batch_size that gives each an even "
            "number"
        )


def plan(config: Config) -> list[str]:
    """What a run would do, in lines; nothing is trained or written.

    Raises:
        ConfigError, BudgetError, UnsupportedModelError: what the run itself would refuse.
    """
    config.check()
    check_parts(config)
    model = dense_model(config)
    family.sites(model)
    data = load_data(config, model, torch.device("cpu"))
    fit_classifier(config, model, data.classes)
    other_teacher(config, data.classes, model.patch_embed.proj.in_channels)
    kinds = config.gate_kinds(any(site.qk_norm for site in family.sites(model)))
    dense = macs(model)
    gated = attach(model, kinds, config.keep_blocks)
    per_epoch = steps_per_epoch(config, data)
    dense_first = f"{config.dense_epochs} epochs of the dense model, then " if config.dense_epochs else ""
    lines = [
        f"model    {config.model}: {dense / 1e9:.4f} G MACs, {len(family.sites(model))} blocks",
        f"data     {data.train_size} training and {data.val_size} validation images, {data.classes} classes",
        f"gates    {sum(gate.logit.numel() for gate in gates(gated))} ({', '.join(kinds)})",
        f"run      {dense_first}{config.epochs} epochs of {per_epoch} steps",
    ]
    if config.target:
        controller = make_controller(gated, config, make_cost(gated, config), config.epochs * per_epoch)
        whole, say = controller.dense_cost, controller.cost.say
        lines.append(f"reach    {controller.low / whole:.1%} to 100% of the dense cost, {say(whole)}")
        lines.append(f"target   {config.target} = {controller.target / whole:.1%} ({say(controller.target)})")
    return lines


def make_cost(model: ViT, config: Config) -> Cost:
    """The cost a configuration's target or penalties are about."""
    target = Target.parse(config.target) if config.target else None
    if target is None:
        return MacCost(model, config.accounting)
    if config.cost is None:
        return ParamCost(model) if target.unit == "params" else MacCost(model)
    cost = LatencyCost.load(config.cost, model)
    if target.unit in UNITS and target.unit != cost.table.unit:
        raise ConfigError(f"the target is in {target.unit}, the table {config.cost} in {cost.table.unit}")
    return cost


def make_schedule(config: Config, steps: int) -> Schedule:
    """The course of a run of so many steps; with a target it freezes early and without noise."""
    freeze, noise = (0.15, 0.0) if config.target else (1.0, 1.0)
    same = ("tau_start", "tau_decay", "tau_floor", "noise_start", "ramp_start", "ramp_end", "ramp_power")
    return Schedule(
        total=steps,
        freeze=max(1, round((config.freeze_at or freeze) * steps)),
        noise_end=noise if config.noise_end is None else config.noise_end,
        **{name: getattr(config, name) for name in (*same, "sharp_start", "sharp_end")},
    )


def make_controller(model: ViT, config: Config, cost: Cost, steps: int) -> Controller:
    """The controller of a configuration's target."""
    assert config.target is not None
    dense = cost.of_widths(model, [site.widths for site in family.sites(model)])
    floors = Floors(config.min_heads, config.min_value_dims, config.min_neurons)
    window = max(10, round(config.gate_window * steps))
    ratio = (config.ratio[0], config.ratio[1])
    target = Target.parse(config.target).absolute(dense)
    return Controller(model, cost, target, ratio, floors, config.round_to, config.gate_mode, window)
