"""What a run is made of: the dense model, data, teacher, schedule, cost and controller of a target; and a dry run."""

from __future__ import annotations

import argparse
import copy
from contextlib import AbstractContextManager, nullcontext
from pickle import UnpicklingError
from typing import Any

import safetensors.torch
import timm
import torch
from safetensors import SafetensorError
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
    "check_parts",
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
]

NESTED = ("state_dict_ema", "state_dict", "model_ema", "model")  # where training scripts put the weights
Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std, a value a channel


def dense_model(config: Config) -> ViT:
    """The model of a configuration with its weights; its own number of classes."""
    arguments = model_arguments(config)
    if config.weights is not None:
        state = read_weights(config.weights)
        if "head.weight" in state:
            arguments["num_classes"] = state["head.weight"].shape[0]
        model = _create(config.model, False, arguments)
        _load(model, state, config.weights, f"model {config.model}")
        return model
    if config.pretrained:  # those of the weights, so that a new classifier is noticed
        arguments = {name: value for name, value in arguments.items() if name != "num_classes"}
    return _create(config.model, config.pretrained, arguments)


def _create(name: str, pretrained: bool, arguments: dict[str, Any]) -> Any:
    try:
        return timm.create_model(name, pretrained=pretrained, **arguments)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        if pretrained and timm.is_model(name) and not isinstance(error, TypeError):
            raise ConfigError(
                f"the pretrained weights of {name} cannot be had ({error}). Pass --weights FILE, or --no-pretrained "
                "(with --dense-epochs) to begin without"
            ) from error
        given = f" with {arguments}" if arguments else ""
        raise ConfigError(f"timm cannot make the model {name}{given}: {error}") from error


def _load(model: nn.Module, state: dict[str, Tensor], file: str, what: str) -> None:
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()[1:]]
        rest = f" (and {len(lines) - 3} more)" if len(lines) > 3 else ""
        raise ConfigError(f"{file} does not fit the {what}: {' '.join(lines[:3])}{rest}") from error


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
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"the teacher {config.teacher} cannot be had ({error}). Pass --teacher-weights FILE, or --teacher self"
        ) from error
    if given is not None:
        _load(model, read_weights(given), given, f"teacher {config.teacher} with the {classes} classes of the data")
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
        ConfigError: it is neither.
    """
    try:
        if path.endswith(".safetensors"):
            state: dict[str, Any] = safetensors.torch.load_file(path)
        else:
            with _harmless():
                state = torch.load(path, map_location="cpu", weights_only=True)
            state = next((state[key] for key in NESTED if key in state), state)
        return {name.removeprefix("module."): tensor.float() for name, tensor in state.items()}
    except (SafetensorError, UnpicklingError, RuntimeError, TypeError, AttributeError, EOFError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"{path} does not hold weights: a .safetensors or .pth file of tensors is needed ({reason})"
        ) from error


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
    return open_data(
        config.data,
        loading,
        config.data_device != "loader",
        config.model_args.get("num_classes"),
        **{name: getattr(config, name) for name in ("val_split", "input_key", "target_key", "download")},
    )


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
