"""The configuration of a run: one flat record from YAML and the command line, checked as a whole before any work."""

from __future__ import annotations

import dataclasses
import math
import os
import types
import typing
from importlib.util import find_spec
from typing import Any

import yaml

from hiap.budget.deploy import Deployment
from hiap.budget.target import BudgetError, Target, check_falling
from hiap.errors import ConfigError, InputError
from hiap.nn.granularities import GRANULARITIES, PAPER, present_name
from hiap.training.metrics import ERROR, TOP1, Metric
from hiap.training.options import CHOICES, TRACKERS, Options, help_of
from hiap.training.yaml_files import SHORT, read_yaml, recipes

__all__ = ["Config", "ConfigError", "read_config", "recipes"]

LARGEST = {  # where 2**31 - 1 is too much, or too little
    "batch_size": 2**20,
    "dense_epochs": 10**6,
    "epochs": 10**6,
    "img_size": 2**14,
    "seed": 2**63 - 1,
    "warmup_epochs": 10**6,
    "workers": 1024,
}


class Config(Options):
    """What `hiap prune` does. Recipes: `hiap prune --config NAME`; `--print-config` shows the whole."""

    def check(self) -> None:
        """Raise one ConfigError with everything that is wrong."""
        wrong = [f"{name} must be {need}; found {SHORT.repr(getattr(self, name))}" for name, need in self._misses()]
        if self.target is not None:
            try:
                unit, *_ = [Target.parse(one).unit for one in self.targets]
                check_falling(self.targets)
                if self.cost is not None and unit.endswith(("macs", "params")):
                    wrong.append(f"target {self.target!r} does not go with cost: write it as 1.8ms, 2.0x or 42%")
            except BudgetError as error:
                wrong.append(str(error))
        elif self.cost is not None:
            wrong.append("cost needs a target, such as 1.8ms or 2.0x")
        if self.deploy is not None:
            try:
                Deployment.parse(self.deploy, cuda=False)
            except InputError as error:
                wrong.append(str(error))
            if self.cost is not None:
                wrong.append("deploy does not go with cost: the table says how it was measured")
            elif not self.timed:
                wrong.append("deploy needs a target in time, such as 1.8ms or 2.0x")
        wrong += self._wrong_lengths()
        wrong += self._wrong_merging() if self.merge_tokens > 0 else []
        if (self.target is None) == (self.lambda_macro is None and self.lambda_micro is None):
            wrong.append("give either target, or lambda_macro and lambda_micro")
        if "qk_dim" in (self.granularities or ()) and (self.lambda_macro or (self.target and len(set(self.ratio)) > 1)):
            wrong.append("with qk_dim gates heads have no fixed cost: lambda_macro must be 0 and the ratio 1:1")
        for name in self.trackers:
            if name in TRACKERS and find_spec(name) is None:
                wrong.append(f"the tracker {name} is not installed: pip install 'hiap[{name}]'")
        if wrong:
            raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(wrong))

    def _wrong_lengths(self) -> list[str]:
        """What is wrong with the lengths of several targets."""
        count, given = len(self.targets), self.rung_epochs
        if count < 2:
            return [] if given is None else ["rung_epochs needs several targets, such as 70%,50%"]
        wrong = []
        if given is not None and (len(given) != count or min(given, default=0) < 1):
            wrong.append(f"rung_epochs must be {count} numbers, one for each target, at least 1; found {given}")
        if given is None and self.epochs < count:
            wrong.append(f"epochs must be at least {count}, one for each target; found {self.epochs}")
        if self.stop_after is not None:
            wrong.append("stop_after does not go with several targets")
        return wrong

    def _wrong_merging(self) -> list[str]:
        """What does not go with merging tokens."""
        alone = "merge_tokens needs"
        needs = [
            ("a target, such as 42%", self.target is not None),
            ("a target in MACs or parameters: tables of latencies are measured without merging", not self.measured),
            (
                "the objective labels: with features, every token is compared with that of the dense model",
                self.labelled,
            ),
            ("min_heads of at least 1: a block without attention merges nothing", self.min_heads >= 1),
            (
                "granularities without attention: a block without attention merges nothing",
                "attention" not in (self.granularities or ()),
            ),
            ("shrink: it is the extracted network that is trained with merging", self.shrink),
            ("a freeze_at below 1: the network is trained with merging after the freeze", (self.freeze_at or 0.0) < 1),
        ]
        return [f"{alone} {need}" for need, met in needs if not met]

    def _misses(self) -> list[tuple[str, str]]:
        """Options with what they must be and are not: what every number must be first, then rules of their own."""
        odd = {}
        for name, value in vars(self).items():
            numbers = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, int | float)]
            most = LARGEST.get(name, 2**31 - 1)
            if not all(isinstance(one, int) or math.isfinite(one) for one in numbers):
                odd[name] = "finite"
            elif max(numbers, default=0) > most:
                odd[name] = f"at most {most}"
            elif min(numbers, default=0) < -most:
                odd[name] = f"at least {-most}"
        return [*odd.items(), *((name, need) for name, need, ok in self._rules() if not ok and name not in odd)]

    def _rules(self) -> list[tuple[str, str, bool]]:
        share = "a share from 0 to 1"
        rules = [
            (name, "at least 1", getattr(self, name) >= 1)
            for name in ("epochs", "accumulate", "round_to", "eval_every")
        ]
        for name in (
            "lr",
            "dense_lr",
            "gate_lr",
            "tau_start",
            "tau_floor",
            "distill_temperature",
            "sharp_start",
            "ramp_power",
        ):
            rules.append((name, "positive", (value := getattr(self, name)) is None or value > 0))
        if self.objective == "features":
            rules += self._feature_rules()
        else:
            rules += [
                (name, "left out unless the objective is features", self._default(name))
                for name in ("tokens_weight", "pooled_weight")
            ]
        for name in ("crop", "flip", "erase", "smoothing", "distill_weight", "ema", "min_value_dims", "min_neurons"):
            rules.append((name, share, 0 <= getattr(self, name) <= 1))
        chosen = self.granularities
        return [
            *rules,
            (
                "granularities",
                f"some of {', '.join(GRANULARITIES)}",
                chosen is None or (bool(chosen) and {present_name(one) for one in chosen} <= set(GRANULARITIES)),
            ),
            (
                "ratio",
                "two numbers, macro and micro, not both 0",
                len(self.ratio) == 2 and min(self.ratio) >= 0 < max(self.ratio),
            ),
            ("freeze_at", "above 0 and at most 1", self.freeze_at is None or 0 < self.freeze_at <= 1),
            ("stop_after", "from 1 to epochs", self.stop_after is None or 1 <= self.stop_after <= self.epochs),
            ("ramp_end", "above ramp_start and at most 1", 0 <= self.ramp_start < self.ramp_end <= 1),
            ("sharp_end", "at least sharp_start", self.sharp_end >= self.sharp_start),
            ("tau_decay", "above 0 and at most 1", 0 < self.tau_decay <= 1),
            ("val_split", "a share above 0 and below 1", self.val_split is None or 0 < self.val_split < 1),
            *((name, " or ".join(words), getattr(self, name) in words) for name, words in CHOICES.items()),
            ("trackers", f"some of {', '.join(TRACKERS)}", set(self.trackers) <= set(TRACKERS)),
            *(
                (name, "at least 0", (getattr(self, name) or 0) >= 0)
                for name in (
                    *("dense_epochs", "workers", "seed", "min_heads", "min_lr", "warmup_epochs", "weight_decay"),
                    *("mixup", "cutmix", "clip_grad", "batch_size", "merge_tokens"),
                )
            ),
            (
                "distill_features",
                "at least 0, and 0 unless the teacher is 'self' and sees the same patches (no patch_drop_rate)",
                self.features_weight == 0 or (self.features_weight > 0 and self._comparable),
            ),
            ("checkpoint_every", "at least 1", self.checkpoint_every is None or self.checkpoint_every >= 1),
            ("img_size", "at least 1", self.img_size is None or self.img_size >= 1),
            ("std", "positive", self.std is None or all(one > 0 for one in self.std)),
            (
                "opt",
                "one of timm's optimisers, of first order",
                _optimiser(self.opt.removeprefix("lookahead_")),
            ),
            ("policy", "one of timm's, such as rand-m9-mstd0.5-inc1", _policy(self.policy)),
            *(
                (name, "a file that exists", _file(getattr(self, name)))
                for name in ("weights", "teacher_weights", "cost")
            ),
        ]

    def _feature_rules(self) -> list[tuple[str, str, bool]]:
        """What else holds where features are learned, and no labels."""
        alone = "with objective features"
        weights = (self.tokens_weight, self.pooled_weight)
        return [
            *((name, "at least 0", getattr(self, name) >= 0) for name in ("tokens_weight", "pooled_weight")),
            ("pooled_weight", "above 0 where tokens_weight is 0", max(weights) > 0),
            ("teacher", f"'self' {alone}: the features are those of the dense model", self.teacher == "self"),
            ("dense_epochs", f"0 {alone}: there are no labels to train the dense model with", not self.dense_epochs),
            ("model_args", f"without patch_drop_rate {alone}: all tokens are compared", self._every_patch),
            ("distill_features", f"left out {alone}: set tokens_weight", self.distill_features is None),
            *((name, f"0 {alone}", getattr(self, name) == 0) for name in ("mixup", "cutmix", "smoothing")),
            *(
                (name, f"left out {alone}: no logits are learned", self._default(name))
                for name in ("distill_weight", "distill_temperature", "teacher_weights")
            ),
        ]

    def _default(self, name: str) -> bool:
        """Whether an option has its default."""
        return bool(getattr(self, name) == getattr(type(self), name))

    @property
    def targets(self) -> list[str]:
        """The targets, the largest first."""
        return [] if self.target is None else [one.strip() for one in self.target.split(",")]

    @property
    def labelled(self) -> bool:
        """Whether labels are learned."""
        return self.objective == "labels"

    @property
    def metric(self) -> Metric:
        """What the run is judged by."""
        return TOP1 if self.labelled else ERROR

    @property
    def features_weight(self) -> float:
        """The weight of the features, default or given."""
        if self.distill_features is not None:
            return self.distill_features
        return 10.0 if self.labelled and self.target and self.distill_weight and self._comparable else 0.0

    @property
    def compares_features(self) -> bool:
        """Whether features of the dense model are learned."""
        return not self.labelled or self.features_weight > 0

    @property
    def _comparable(self) -> bool:
        """Whether the teacher has the features of the model, token by token."""
        return self.teacher == "self" and self._every_patch

    @property
    def _every_patch(self) -> bool:
        """Whether the model sees all patches in training."""
        return not self.model_args.get("patch_drop_rate")

    @property
    def taught(self) -> bool:
        """Whether there is a teacher to learn from."""
        return not self.labelled or (self.teacher != "none" and (self.distill_weight > 0 or self.features_weight > 0))

    @property
    def trained(self) -> bool:
        """Whether the dense model begins with weights that were trained before."""
        return self.weights is not None or self.pretrained

    @property
    def timed(self) -> bool:
        """Whether the target is in time or energy, and so needs a table."""
        try:
            return self.target is not None and Target.parse(self.targets[0]).unit in ("ms", "mJ", "x")
        except BudgetError:
            return False

    @property
    def measured(self) -> bool:
        """Whether the cost is read from a table of latencies."""
        return self.cost is not None or self.timed

    def gate_kinds(self, qk_norm: bool) -> tuple[str, ...]:
        """What has gates: by default the paper's four, and more with a target.

        Q/k dims join where the ratio weights both kinds alike and the model allows it; whole attention branches where
        the cost is measured, since their norms and launches go with them.
        """
        if self.granularities is not None:
            return tuple(dict.fromkeys(present_name(one) for one in self.granularities))
        joined = self.target is not None and len(set(self.ratio)) == 1 and not qk_norm
        return (*PAPER, *(["qk_dim"] if joined else []), *(["attention"] if self.measured else []))

    def to_yaml(self) -> str:
        text: str = yaml.safe_dump(dataclasses.asdict(self), sort_keys=False)
        return text


def _optimiser(name: str) -> bool:
    from timm.optim import list_optimizers  # timm brings torch: not for `--help`

    return name in list_optimizers() and not name.startswith(("kron", "adahessian"))


def _policy(name: str | None) -> bool:
    from timm.data import create_transform

    try:
        create_transform((3, 32, 32), is_training=True, auto_augment=name)
    except (AssertionError, KeyError, ValueError):
        return False
    return True


def _file(name: str | None) -> bool:
    return name is None or os.path.isfile(name)  # unlike a Path it takes any text


def read_config(source: str | os.PathLike[str] | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """A configuration from a recipe or YAML file, with overrides, checked.

    Raises:
        ConfigError: unknown keys and impossible values, all at once.
    """
    values: dict[str, Any] = {}
    if source is not None:
        values = read_yaml(os.fspath(source))
    values |= overrides or {}
    known = {name: kind for name, kind, _ in help_of()}
    values = {name: _number(value, known.get(name)) for name, value in values.items()}
    wrong = [f"unknown option {SHORT.repr(name)}" for name in values if name not in known]
    wrong += [
        f"{name} must be {_say(known[name])}; found {SHORT.repr(value)}"
        for name, value in values.items()
        if name in known and not _fits(value, known[name])
    ]
    if wrong:
        more = [f"and {len(wrong) - 20} more"] if len(wrong) > 20 else []
        raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(wrong[:20] + more))
    config = Config(**values)
    config.check()
    return config


def _number(value: Any, kind: Any) -> Any:
    """A number in place of its text where one is wanted: YAML takes 1e-3, which has no point, for a text."""
    wanted = {kind, *typing.get_args(kind)}
    if list[float] in wanted and isinstance(value, list):
        return [_number(one, float) for one in value]
    if isinstance(value, str) and float in wanted:
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _fits(value: Any, kind: Any) -> bool:
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    for option in options:
        origin = typing.get_origin(option)
        if origin is list:
            if isinstance(value, list) and all(_fits(one, typing.get_args(option)[0]) for one in value):
                return True
        elif origin is dict:
            if isinstance(value, dict) and all(isinstance(key, str) for key in value):
                return True
        elif option is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif type(value) is option:
            return True
    return False


def _say(kind: Any) -> str:
    return str(kind).replace("<class '", "").replace("'>", "").replace("None", "null").replace("typing.Any", "any")
