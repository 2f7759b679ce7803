"""What a run is made of: the dense model, data, teacher, schedule, cost and controller of a target."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hiap.budget.controller import Controller
from hiap.budget.cost import Cost, in_words
from hiap.budget.latency import LatencyCost, LatencyTable
from hiap.data.images import Loading
from hiap.data.sources import Augmentation, ByteData, Data, LoaderData, check_source, open_data
from hiap.errors import BudgetError, KindError
from hiap.models.registry import family_of, sites, widths_of
from hiap.models.timm import preprocessing_of
from hiap.models.weights import teacher_model
from hiap.pruning.attach import attach, check_finite, gates
from hiap.pruning.count import macs, macs_of_widths
from hiap.pruning.merging import unmerged
from hiap.pruning.saving import check_savable
from hiap.training.batches import ENOUGH, check_parts, default_batch, steps_per_epoch
from hiap.training.config import Config, ConfigError
from hiap.training.costs import make_controller, make_cost, measure_here
from hiap.training.dense_models import dense_model, model_arguments
from hiap.training.descent import Descent
from hiap.training.merging_rules import cost_without_merging, plain_model
from hiap.training.objective import Teacher
from hiap.training.schedule import dense_rate, make_schedule, pruning_rate

__all__ = [
    "Setup",
    "as_data",
    "check_parts",
    "dense_model",
    "fit_classifier",
    "load_data",
    "make_schedule",
    "make_teacher",
    "model_arguments",
    "normalisation",
    "note_preprocessing",
    "other_teacher",
    "steps_per_epoch",
]

Normalisation = tuple[tuple[float, ...], tuple[float, ...]]  # mean and std, a value a channel


def fit_classifier(config: Config, model: nn.Module, name: str, trained: bool, classes: int) -> bool:
    """Give the model as many classes as the data has. Returns whether its classifier is new.

    Args:
        name: of the model, for errors.
        trained: whether it has weights that were trained before.

    Raises:
        ConfigError: it would have to teach itself with a new, random classifier.
    """
    family = family_of(model)
    own = family.classes(model)
    if own == classes:
        return False
    if trained and config.dense_epochs == 0 and config.teacher == "self" and config.taught:
        raise ConfigError(
            f"the weights of {name} are for {own or 'no'} classes, the data has {classes}: with "
            "a new classifier the dense model has nothing to teach. Pass --weights FILE of one trained on this data, "
            "--dense-epochs N to fine-tune it first, or --teacher none"
        )
    family.set_classes(model, classes)
    return True


def other_teacher(config: Config, classes: int, channels: int) -> nn.Module | None:
    """The teacher where it is another model than the dense one.

    Raises:
        ConfigError: timm does not know it, its weights cannot be had, or it does not fit the data.
    """
    if config.teacher == "self" or not config.taught:
        return None
    model, own = teacher_model(config.teacher, config.teacher_weights, classes)
    if own != (classes, channels):
        raise ConfigError(
            f"the teacher {config.teacher} has {own[0]} classes and {own[1]} channels, the data {classes} and "
            f"{channels}. Pass --teacher-weights FILE of one trained on this data, or --teacher self"
        )
    return model


def make_teacher(config: Config, dense: nn.Module, norm: Normalisation, other: nn.Module | None) -> Teacher | None:
    """The teacher of a run, if it has one: the other model, else the dense one as it is now."""
    if not config.taught:
        return None
    device = next(dense.parameters()).device
    dtype = torch.bfloat16 if config.precision == "bf16" else None
    if other is None:
        return Teacher(copy.deepcopy(dense), norm, norm, None, device, dtype, watched=config.compares_features)
    found = preprocessing_of(other)
    return Teacher(other, norm, (found.mean, found.std), found.size, device, dtype)


def normalisation(config: Config, model: nn.Module) -> Normalisation:
    """Mean and std of the input: the configuration's, else the model's own."""
    family = family_of(model)
    channels, own = family.input_shape(model)[0], family.preprocessing(model)
    found = []
    for given, usual in ((config.mean, own.mean), (config.std, own.std)):
        same = len(set(usual)) == 1  # the same for every channel, however many there are
        found.append(tuple(given or (usual[:1] * channels if same else usual)))
    mean, std = found
    if len(mean) != channels or len(std) != channels:
        raise ConfigError(
            f"mean and std must have {channels} values, one per channel; found {list(mean)} and {list(std)}"
        )
    return mean, std


def note_preprocessing(model: nn.Module, norm: Normalisation, data: Data) -> None:
    """Let the model itself say what it is trained on, for whoever loads it: size, normalisation, crop and classes."""
    family = family_of(model)
    size, classes = family.input_shape(model), family.classes(model)
    own: dict[str, Any] = {"input_size": size, "mean": norm[0], "std": norm[1], "num_classes": classes}
    if isinstance(data, ByteData):  # holds whole images, of one size
        own |= {"crop_pct": 1.0, "crop_mode": "squash"}
    family.set_usage(model, {**family.usage(model), **own})


def load_data(config: Config, model: nn.Module, device: torch.device) -> Data:
    """What `config.data` names, as the model sees it: its size, normalisation, interpolation and crop."""
    assert config.data is not None
    family = family_of(model)
    own, (channels, *size) = family.preprocessing(model), family.input_shape(model)
    loading = Loading(
        size=(size[0], size[1]),
        normalisation=normalisation(config, model),
        augmentation=Augmentation(config.crop, config.flip, config.policy, config.erase),
        device=torch.device("cpu") if config.data_device == "cpu" and config.data != "digits" else device,
        seed=config.seed,
        workers=config.workers,
        strict=config.strict_data,
        channels=channels,
        interpolation=own.interpolation,
        crop_pct=own.crop_pct,
        crop_mode=own.crop_mode,
    )
    return open_data(
        config.data,
        loading,
        config.data_device != "loader",
        config.model_args.get("num_classes"),
        labels=config.labelled,
        **{name: getattr(config, name) for name in ("val_split", "input_key", "target_key", "download")},
    )


def _epochs(count: int) -> str:
    return f"{count} epoch{'s' if count > 1 else ''}"


def as_data(data: Any, config: Config, device: torch.device, world: int = 1) -> Data:
    """What `hiap.prune` is given as `data`: an object like `Data`, or a pair of loaders of torch.

    Args:
        world: number of processes.

    Raises:
        TypeError: it is neither.
        ValueError: the loaders do not fit the configuration.
    """
    if isinstance(data, tuple | list) and len(data) == 2:
        data = LoaderData(data[0], data[1], labels=config.labelled)
    if isinstance(data, LoaderData):
        return data.bound(config.batch_size, device, config.seed, world)
    if isinstance(data, Data) and not isinstance(data, type):
        return data
    raise KindError(
        f"data must be a pair of loaders (train, val), or an object like hiap.Data; found {type(data).__name__}"
    )


class Setup:
    """Everything a run is made of, made and checked before anything is written: `plan` prints it, `prune` trains it.

    Args:
        data, cost, model: of one's own, instead of what the configuration names.
        table: gives the latency table of a target in time, by measuring it or from where it was kept.
        say: prints a line while the table is measured.
        descent: the place of the run among those of several targets.

    Attributes:
        model: the dense model, on the CPU, with as many classes as the data has.
        start: the compact network that the search begins with, on the CPU; None where it is the dense model.
        new_classifier: whether its classifier is random while the rest was trained before.
        kinds: what gets gates.
        per_epoch: steps of an epoch.
        lr, dense_lr: peak learning rates.
        cost: what the target or the penalties are about.
        dense_cost: of the dense model, which a target in percent is a share of.
        controller: of a gated copy of what the search begins with, if there is a target.

    Raises:
        ConfigError, BudgetError, UnsupportedModelError, CheckpointError: whatever would make the run fail later.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        data: Data | tuple[Any, Any] | None = None,
        cost: Callable[[nn.Module], Cost] | None = None,
        model: nn.Module | None = None,
        processes: int = 1,
        table: Callable[[Callable[[], LatencyTable]], LatencyTable] = lambda measured: measured(),
        say: Callable[[str], None] = lambda text: None,
        descent: Descent | None = None,
    ) -> None:
        config.check()
        self.descent = descent
        if data is None:
            if config.data is None:
                raise ConfigError(
                    "there are no images: set data in the configuration, or pass data=(train_loader, val_loader)"
                )
            check_source(config.data, config.val_split, config.labelled)
        dense = dense_model(config) if model is None else copy.deepcopy(model).cpu()
        self.model = dense = plain_model(dense, config)
        self.name = config.model if model is None else type(model).__name__
        self.trained = config.trained or model is not None
        self.sites = sites(self.model)
        check_finite(self.model)
        self.mean_std = normalisation(config, self.model)
        given = None if data is None else as_data(data, config, device, processes)
        self.data = given or (descent.data if descent else None) or load_data(config, self.model, device)
        self.config = config = replace(config, batch_size=config.batch_size or default_batch(config, self.data))
        check_parts(config, processes)
        self.new_classifier = False
        if config.labelled:
            fitted = fit_classifier(config, self.model, self.name, self.trained, self.data.classes)
            self.new_classifier = fitted and self.trained
        if descent is not None:
            descent.check_dense(dense)
        before = None if descent is None else descent.network
        self.start = None if before is None else copy.deepcopy(unmerged(before))
        for network in [dense, *([] if self.start is None else [self.start])]:
            for parameter in family_of(network).unread(network):  # processes would wait for their gradients
                parameter.requires_grad_(False)
            for layer in [] if config.labelled else family_of(network).classifier(network):
                layer.requires_grad_(False)
            note_preprocessing(network, self.mean_std, self.data)
            check_savable(network)
        self.dense_epochs = self._dense_epochs()
        self.per_epoch = steps_per_epoch(config, self.data)
        self.schedule = make_schedule(config, config.epochs * self.per_epoch)
        self.lr = config.lr or pruning_rate(config.batch_size, self.schedule.total * config.batch_size)
        self.dense_lr = config.dense_lr or dense_rate(config.batch_size, self.trained)
        self.other_teacher = other_teacher(config, self.data.classes, family_of(dense).input_shape(dense)[0])
        self.dense_macs = macs(self.model)
        self.kinds = config.gate_kinds(any(site.qk_norm for site in self.sites))
        gated = attach(copy.deepcopy(self.model), self.kinds, config.keep_blocks)
        self.gates = sum(gate.logit.numel() for gate in gates(gated))
        self.table_error = 1.0
        self.table: LatencyTable | None = None
        if config.timed and config.cost is None and cost is None:
            self.table = table(lambda: measure_here(self.model, config, device, say))

        def cost_of(network: nn.Module) -> Cost:
            return cost(network) if cost is not None else make_cost(network, config, self.table)

        self.cost = cost_of(gated)
        self.dense_cost = self.cost.of_widths(gated, widths_of(gated))
        if config.merge_tokens:
            self.dense_cost = cost_without_merging(self.cost, config, self.dense_cost, self.dense_macs)
        self.controller = self.control(gated) if config.target else None
        for later in descent.later if descent is not None else ():
            make_controller(gated, replace(config, target=later), self.cost, self.schedule.total, self.dense_cost)
        if self.start is not None:
            assert descent is not None
            self.table_error = descent.table_error
            gated = attach(copy.deepcopy(self.start), self.kinds, config.keep_blocks)
            self.gates, self.cost = sum(gate.logit.numel() for gate in gates(gated)), cost_of(gated)
            self._check_below(gated)
            self.controller = self.control(gated)

    def _check_below(self, gated: nn.Module) -> None:
        """Refuse a target that what the search begins with meets already."""
        assert self.controller is not None and self.descent is not None
        goal, there, say = self.controller.target, self.cost.of_widths(gated, widths_of(gated)), self.cost.say
        there *= self.table_error
        if goal >= there:
            raise BudgetError(
                f"a target of {self.config.target} ({say(goal)}) is not below the last size: the model in "
                f"{self.descent.above} has {say(there)}, {there / self.dense_cost:.1%} of the dense model; "
                "name a smaller one"
            )

    def _dense_epochs(self) -> int:
        config = self.config
        if self.start is not None:  # the run before has done it
            return 0
        if config.dense_epochs is not None:
            return config.dense_epochs
        needed = self.new_classifier and config.teacher == "self" and config.taught
        return math.ceil(max(config.epochs, self.descent.total if self.descent else 0) / 3) if needed else 0

    def control(self, gated: nn.Module) -> Controller:
        """The controller of the target for a gated model."""
        origin = None if self.start is None else [site.widths for site in self.sites]
        steps, error = self.schedule.total, self.table_error
        return make_controller(gated, self.config, self.cost, steps, self.dense_cost, origin, error)

    def warn(self) -> None:
        """Say what is likely to disappoint."""
        config, steps, random = self.config, self.schedule.total, not (self.trained or self.dense_epochs or self.start)
        if steps < ENOUGH:
            images = self.per_epoch * config.batch_size
            smaller = 2 ** max(0, int(math.log2(max(1, images * config.epochs / ENOUGH))))
            mend = f"--batch-size {smaller}" if smaller >= 8 else f"--epochs {math.ceil(ENOUGH / self.per_epoch)}"
            warnings.warn(
                f"the run has only {steps} steps ({config.epochs} epochs of {self.per_epoch}), too few to learn what "
                f"to prune and to recover: pass {mend}, for about {ENOUGH} steps",
                stacklevel=2,
            )
        if random and config.teacher == "self" and config.taught:
            other = ", --dense-epochs N to train it first, or --teacher none" if config.labelled else ""
            warnings.warn(
                "the dense model has random weights and is its own teacher, so it teaches nothing: pass --weights "
                f"FILE{other}",
                stacklevel=2,
            )

    def lines(self) -> list[str]:
        """What the run is, in lines of at most 80 columns."""
        config, data = self.config, self.data
        name = self.name if len(self.name) <= 40 else f"{self.name[:37]}..."
        classes = f"{data.classes} classes" if config.labelled else "no labels"
        lines = [
            f"model    {name}: {in_words(self.dense_macs)} MACs, {len(self.sites)} blocks",
            f"data     {data.train_size} training and {data.val_size} validation images, {classes}",
        ]
        if self.start is not None:  # the run before has said that
            count = macs_of_widths(self.start, widths_of(self.start), merge_tokens=config.merge_tokens)
            lines = [f"start    {in_words(count)} MACs, {count / self.dense_macs:.1%} of the dense model"]
        lines.append(f"gates    {self.gates} ({', '.join(self.kinds)})")
        if config.merge_tokens:
            lines.append(f"merging  {config.merge_tokens} tokens in each block, once the search is over")
        if self.dense_epochs:
            what = "fine-tuned" if self.trained else "trained"
            why = ", with a new classifier" if self.new_classifier else ""
            lines.append(
                f"dense    {what} first for {_epochs(self.dense_epochs)}, learning rate {self.dense_lr:.1e}{why}"
            )
        lines.append(f"run      {_epochs(config.epochs)} of {self.per_epoch} steps, learning rate {self.lr:.1e}")
        if self.controller:
            whole, say, error = self.dense_cost, self.controller.cost.say, self.table_error
            goal, low = error * self.controller.target, error * self.controller.low
            most = error * self.controller.dense_cost / whole
            least = f", from {say(low)} on" if isinstance(self.cost, LatencyCost) else ""
            upper = "100%" if most == 1 else f"{most:.1%}"
            lines.append(f"reach    {low / whole:.1%} to {upper} of the dense cost, {say(whole)}{least}")
            lines.append(f"target   {config.target} = {goal / whole:.1%} ({say(goal)})")
        return lines
