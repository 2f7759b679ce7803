"""The configuration of a run: one flat record from YAML and the command line, checked as a whole before any work."""

from __future__ import annotations

import dataclasses
import math
import os
import reprlib
import types
import typing
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from typing import Any, NoReturn

import yaml

from hiap.budget.target import BudgetError, Target
from hiap.errors import ConfigError
from hiap.nn.granularities import GRANULARITIES, PAPER

__all__ = ["CHOICES", "FIRST", "GROUPS", "Config", "ConfigError", "help_of", "read_config", "recipes"]

CHOICES = {  # of options that are one of a few words
    "data_device": ("loader", "cpu", "cuda"),
    "accounting": ("exact", "paper"),
    "gate_mode": ("importance", "gradient"),
    "precision": ("fp32", "bf16", "fp16"),
    "keep": ("last", "best"),
}
GROUPS = {  # of options, by the first of each
    "model": "model",
    "data": "data",
    "target": "what may go, and how much",
    "epochs": "course of the run",
    "batch_size": "optimisation",
    "teacher": "distillation",
    "keep": "the run itself",
}
FIRST = (  # options that most people need
    *("model", "weights", "img_size", "data", "val_split", "target", "cost", "epochs", "batch_size", "lr"),
    *("precision", "teacher", "keep"),
)
TRACKERS = ("tensorboard", "wandb")  # also the names of their packages and of our extras
LONGEST = 100_000  # bytes of a configuration file
DEEPEST = 20  # levels of a value
LARGEST = {  # where 2**31 - 1 is too much, or too little
    "batch_size": 2**20,
    "dense_epochs": 10**6,
    "epochs": 10**6,
    "img_size": 2**14,
    "seed": 2**63 - 1,
    "warmup_epochs": 10**6,
    "workers": 1024,
}
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
SHORT = reprlib.Repr()
SHORT.maxdict = SHORT.maxlist = SHORT.maxtuple = 12
SHORT.maxstring = SHORT.maxother = 200


def _option(default: Any, help: str) -> Any:
    """A field with its default and the words that explain it."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Config:
    """What `hiap prune` does. Recipes: `hiap prune --config NAME`; `--print-config` shows the whole."""

    # model
    model: str = _option("vit_tiny_patch16_224", "timm name of the dense model")
    model_args: dict[str, Any] = _option({}, "further arguments of timm.create_model")
    weights: str | None = _option(None, "weights of the dense model: .safetensors, or .pth read with weights_only")
    pretrained: bool = _option(True, "start from timm's pretrained weights where no file is given")
    img_size: int | None = _option(None, "input size; the model's own by default")
    dense_epochs: int | None = _option(
        None,
        "train the dense model this long first; by default a third of epochs where its weights are for other classes "
        "than the data has, else 0",
    )
    dense_lr: float | None = _option(
        None,
        "peak learning rate of the dense epochs; by default 1e-4 for weights that were loaded (ten times that for a "
        "new classifier) and 1e-3 from scratch, more from batches of 256 on (with the square root)",
    )
    # data
    data: str = _option(
        "digits",
        "folder with train/ and val/ (or validation/, valid/, test/); CSV file of path,label; NAME:ROOT of timm, with "
        "an index (torch/..., hfds/...) or streamed (wds/..., hfids/...); or 'digits'",
    )
    val_split: float | None = _option(
        None, "share of the training images to validate on, such as 0.1, instead of a validation part of the data"
    )
    input_key: str | None = _option(None, "column of the images of hfds/... and hfids/...; 'image' by default")
    target_key: str | None = _option(None, "column of the labels of hfds/... and hfids/...; 'label' by default")
    download: bool = _option(False, "fetch a data set of torchvision (torch/...) that is not there")
    data_device: str = _option("loader", "loader reads images as they come; cpu and cuda hold all of them in memory")
    workers: int = _option(min(4, os.cpu_count() or 1), "loader processes; by default one a CPU, up to 4")
    strict_data: bool = _option(False, "fail on an image that cannot be read instead of skipping it")
    mean: list[float] | None = _option(
        None, "normalisation of the input, one value a channel; the model's own by default"
    )
    std: list[float] | None = _option(
        None, "standard deviation of the input, one value a channel; the model's own by default"
    )
    crop: float = _option(0.35, "least share of the area a random crop keeps")
    flip: float = _option(0.5, "probability of a horizontal flip")
    policy: str | None = _option("rand-m9-mstd0.5-inc1", "RandAugment of timm, for data read by a loader")
    erase: float = _option(0.25, "probability of random erasing, for data read by a loader")
    mixup: float = _option(0.0, "mixup alpha; 0 is off")
    cutmix: float = _option(0.0, "cutmix alpha; 0 is off")
    smoothing: float = _option(0.0, "label smoothing")
    # what may go, and how much
    target: str | None = _option(
        None, "budget: 7.4G, 42% (of the dense model's MACs), '1.2M params', '42% params'; with cost: 1.8ms, 2.0x"
    )
    cost: str | None = _option(
        None, "table of `hiap measure`: the target is in its unit, a share of its dense model, or x"
    )
    lambda_macro: float | None = _option(None, "the paper's penalty on heads, instead of a target")
    lambda_micro: float | None = _option(None, "the paper's penalty on value dims and neurons, instead of a target")
    accounting: str = _option("exact", "how the penalties count cost")
    granularities: list[str] | None = _option(
        None, f"what has gates: {', '.join(GRANULARITIES)}; the paper's first four, and with a target q/k dims too"
    )
    keep_blocks: list[int] = _option([], "blocks that are not pruned")
    ratio: list[float] = _option([1.0, 1.0], "macro:micro; how the cost of either kind is weighted against a target")
    min_heads: int = _option(1, "heads every layer keeps")
    min_value_dims: float = _option(0.125, "share of its value dims every open head keeps")
    min_neurons: float = _option(0.02, "share of its neurons every open FFN keeps")
    beta_head: float = _option(1.0, "weight of the head feasibility term, where there is no target")
    beta_dim: float = _option(1.0, "weight of the value-dim feasibility term, where there is no target")
    beta_ffn: float = _option(1.0, "weight of the neuron feasibility term, where there is no target")
    round_to: int = _option(8, "multiple that widths are rounded to")
    align_heads: bool | None = _option(
        None, "turn the dims of heads to axes that can be cut before the search; by default with a target"
    )
    # course
    epochs: int = _option(15, "length of the run")
    stop_after: int | None = _option(None, "end after this many epochs of the schedule")
    freeze_at: float | None = _option(
        None, "share of the run after which the topology is final; 0.15 with a target, else 1"
    )
    gate_mode: str = _option("importance", "how a target moves gates")
    gate_lr: float = _option(5e-3, "learning rate of gate logits, where they are learned by gradient")
    gate_window: float = _option(0.1, "share of the run over which importance is averaged")
    start_logit: float = _option(5.0, "logit of every gate at the start, where logits are learned by gradient")
    tau_start: float = _option(2.0, "first temperature")
    tau_decay: float = _option(
        0.98, "factor of the temperature from one to the next of 300 virtual epochs before the freeze"
    )
    tau_floor: float = _option(0.05, "least temperature")
    noise_start: float = _option(1.0, "noise scale at the first step")
    noise_end: float | None = _option(None, "noise scale at the freeze; 0 with a target, else 1 (the paper)")
    ramp_start: float = _option(0.05, "where the budget begins to fall, as a share of the time before the freeze")
    ramp_end: float = _option(0.9, "where the budget reaches the target, as a share of the time before the freeze")
    ramp_power: float = _option(1.0, "shape of the falling budget: 1 falls evenly, 3 fast first")
    sharp_start: float = _option(2.0, "logits per unit of log-importance at the start")
    sharp_end: float = _option(20.0, "logits per unit of log-importance at the freeze")
    shrink: bool = _option(True, "extract at the freeze and train on the small network")
    # optimisation
    batch_size: int = _option(
        0,
        "images a step, over all processes; by default 256, and less (at least 16) where a run had less than 200 steps",
    )
    accumulate: int = _option(1, "parts a batch is computed in")
    opt: str = _option("adamw", "optimiser of timm")
    lr: float | None = _option(
        None,
        "peak learning rate of the weights; by default 5e-4 * sqrt(batch_size / 256), less where all epochs together "
        "have more than 300,000 images",
    )
    min_lr: float = _option(1e-6, "last learning rate")
    warmup_epochs: float | None = _option(None, "epochs of linear warm-up; by default 5% of them")
    weight_decay: float = _option(0.05, "not applied to biases, norms and gates")
    clip_grad: float | None = _option(1.0, "largest norm of the gradient; 0 is off")
    ema: float = _option(0.0, "decay of an average of the weights, which is then the result; 0 is off")
    precision: str = _option("fp32", "precision of the training")
    # distillation
    teacher: str = _option("self", "'self' (the dense model), 'none', or the timm name of a teacher")
    teacher_weights: str | None = _option(None, "weights of the teacher; timm's pretrained ones by default")
    distill_weight: float = _option(0.5, "share of the distillation in the task loss")
    distill_temperature: float = _option(1.0, "temperature of the distillation")
    distill_features: float | None = _option(
        None,
        "weight of how far the outputs of blocks are from those of the dense model, which is then the teacher; "
        "10 with a target if it teaches anyway, else 0",
    )
    # run
    keep: str = _option("last", "which epoch is the result: the last, or the best on the validation images")
    seed: int = _option(0, "seed of everything random")
    eval_every: int = _option(1, "epochs from one evaluation, and line of output, to the next")
    checkpoint_every: int | None = _option(None, "steps between checkpoints; an epoch by default")
    trackers: list[str] = _option([], f"where metrics go besides metrics.jsonl: {', '.join(TRACKERS)}")

    def check(self) -> None:
        """Raise one ConfigError with everything that is wrong."""
        wrong = [f"{name} must be {need}; found {SHORT.repr(getattr(self, name))}" for name, need in self._misses()]
        if self.target is not None:
            try:
                unit = Target.parse(self.target).unit
                if self.cost is None and unit in ("ms", "mJ", "x"):
                    wrong.append(f"target {self.target!r} needs cost, a table of `hiap measure`")
                if self.cost is not None and unit.endswith(("macs", "params")):
                    wrong.append(f"target {self.target!r} does not go with cost: write it as 1.8ms, 2.0x or 42%")
            except BudgetError as error:
                wrong.append(str(error))
        elif self.cost is not None:
            wrong.append("cost needs a target, such as 1.8ms or 2.0x")
        if (self.target is None) == (self.lambda_macro is None and self.lambda_micro is None):
            wrong.append("give either target, or lambda_macro and lambda_micro")
        if "qk_dim" in (self.granularities or ()) and (self.lambda_macro or (self.target and len(set(self.ratio)) > 1)):
            wrong.append("with qk_dim gates nothing of a head is fixed: lambda_macro must be 0 and the ratio 1:1")
        for name in self.trackers:
            if name in TRACKERS and find_spec(name) is None:
                wrong.append(f"the tracker {name} is not installed: pip install 'hiap[{name}]'")
        if wrong:
            raise ConfigError("the configuration is wrong:\n  " + "\n  ".join(wrong))

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
        for name in ("crop", "flip", "erase", "smoothing", "distill_weight", "ema", "min_value_dims", "min_neurons"):
            rules.append((name, share, 0 <= getattr(self, name) <= 1))
        chosen = self.granularities
        return [
            *rules,
            (
                "granularities",
                f"some of {', '.join(GRANULARITIES)}",
                chosen is None or (bool(chosen) and set(chosen) <= set(GRANULARITIES)),
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
                    *("mixup", "cutmix", "clip_grad", "batch_size"),
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

    @property
    def features_weight(self) -> float:
        """The weight of the features, default or given."""
        if self.distill_features is not None:
            return self.distill_features
        return 10.0 if self.target and self.distill_weight and self._comparable else 0.0

    @property
    def _comparable(self) -> bool:
        """Whether the teacher has the features of the model, token by token."""
        return self.teacher == "self" and not self.model_args.get("patch_drop_rate")

    @property
    def taught(self) -> bool:
        """Whether there is a teacher to learn from."""
        return self.teacher != "none" and (self.distill_weight > 0 or self.features_weight > 0)

    @property
    def trained(self) -> bool:
        """Whether the dense model begins with weights that were trained before."""
        return self.weights is not None or self.pretrained

    def gate_kinds(self, qk_norm: bool) -> tuple[str, ...]:
        """What has gates: by default the paper's four, and more with a target.

        Q/k dims join where the ratio weights both kinds alike and the model allows it; whole attention branches where
        the cost is measured, since their norms and launches go with them.
        """
        if self.granularities is not None:
            return tuple(self.granularities)
        joined = self.target is not None and len(set(self.ratio)) == 1 and not qk_norm
        return (*PAPER, *(["qk_dim"] if joined else []), *(["attention"] if self.cost else []))

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


def help_of() -> list[tuple[str, Any, str]]:
    """Name, type and explanation of every option."""
    kinds = typing.get_type_hints(Config)
    return [(f.name, kinds[f.name], f.metadata["help"]) for f in dataclasses.fields(Config)]


def recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in (files("hiap") / "configs").iterdir())


def read_config(source: str | os.PathLike[str] | None = None, overrides: dict[str, Any] | None = None) -> Config:
    """A configuration from a recipe or YAML file, with overrides, checked.

    Raises:
        ConfigError: unknown keys and impossible values, all at once.
    """
    values: dict[str, Any] = {}
    if source is not None:
        values = _read_yaml(os.fspath(source))
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


def _read_yaml(source: str) -> dict[str, Any]:
    if source in recipes():
        return dict(yaml.safe_load((files("hiap") / "configs" / f"{source}.yaml").read_text()))
    if not os.path.isfile(source):
        if os.path.exists(source):
            raise ConfigError(f"{source} is not a file; --config takes a YAML file or a recipe: {', '.join(recipes())}")
        raise ConfigError(f"no recipe and no file {SHORT.repr(source)}; recipes: {', '.join(recipes())}")
    try:
        with open(source, "rb") as file:
            content = file.read(LONGEST + 1)
        if len(content) > LONGEST:
            raise ConfigError(f"{source} has more than {LONGEST} bytes: it is not a configuration")
        values = yaml.load(content.decode(), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not text in UTF-8: it is not a configuration") from error
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source} is not valid YAML: {error.problem or error.context}{line}") from error
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{source} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must hold options and values, one a line")
    return values


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain values of bounded size and depth: no aliases, which can grow without end, and no key twice."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            self._refuse("anchors and aliases (& and *) are not read", event)
        if self.depth >= DEEPEST:
            self._refuse(f"values are nested more than {DEEPEST} deep", event)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                self._refuse(f"{SHORT.repr(key.value)} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value; what cannot be the number or the date that it looks like is refused where it stands."""
        if node.tag in NUMBERS and len(node.value) > 40:
            self._refuse(f"{SHORT.repr(node.value)} is too long for a number", node)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            self._refuse(f"{SHORT.repr(node.value)} is no {node.tag.rpartition(':')[2]} ({error})", node)

    def _refuse(self, problem: str, at: Any) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)


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
