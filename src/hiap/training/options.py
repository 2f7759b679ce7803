"""The options of a run, in groups: name, type, default and the words that explain each."""

from __future__ import annotations

import dataclasses
import os
import typing
from dataclasses import dataclass, field
from typing import Any

from hiap.nn.granularities import GRANULARITIES

__all__ = ["ABLATIONS", "CHOICES", "FIRST", "GROUPS", "TRACKERS", "Options", "help_of"]

CHOICES = {  # of options that are one of a few words
    "data_device": ("loader", "cpu", "cuda"),
    "accounting": ("exact", "paper"),
    "gate_mode": ("importance", "gradient"),
    "precision": ("fp32", "bf16", "fp16"),
    "keep": ("last", "best"),
    "objective": ("labels", "features"),
}
GROUPS = {  # of options, by the first of each
    "model": "model",
    "data": "data",
    "target": "budget and what may be pruned",
    "epochs": "length and schedule",
    "batch_size": "optimisation",
    "objective": "objective and distillation",
    "keep": "the run itself",
    "gate_mode": "for ablations",
}
ABLATIONS = "To reproduce the paper and to compare parts of the method; everyday runs need none of these."
FIRST = (  # options that most people need
    *("model", "weights", "img_size", "data", "val_split", "target", "cost", "epochs", "batch_size", "lr"),
    *("precision", "objective", "teacher", "keep"),
)
TRACKERS = ("tensorboard", "wandb")  # also the names of their packages and of our extras


def _option(default: Any, help: str) -> Any:
    """A field with its default and the words that explain it."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata={"help": help})
    return field(default=default, metadata={"help": help})


@dataclass
class Options:
    """All options of a run with their defaults."""

    # model
    model: str = _option(
        "vit_tiny_patch16_224",
        "timm name of the dense model, torchvision:vit_b_16 and the like, or the folder of a pruned model",
    )
    model_args: dict[str, Any] = _option({}, "further arguments of timm.create_model")
    weights: str | None = _option(None, "weights of the dense model: .safetensors, or .pth read with weights_only")
    pretrained: bool = _option(True, "start from timm's pretrained weights if no file is given")
    img_size: int | None = _option(None, "input size; the model's own by default")
    dense_epochs: int | None = _option(
        None,
        "epochs to train the dense model first; by default a third of epochs if its weights are for other classes "
        "than the data has, else 0",
    )
    dense_lr: float | None = _option(
        None,
        "peak learning rate of the dense epochs; by default 1e-4 for loaded weights (ten times that for a new "
        "classifier) and 1e-3 from scratch, times sqrt(batch_size / 256) for larger batches than 256",
    )
    # data
    data: str | None = _option(
        None,
        "folder with train/ and val/ (or validation/, valid/, test/); CSV file of path,label; NAME:ROOT of timm, with "
        "an index (torch/..., hfds/...) or streamed (wds/..., hfids/...); or 'digits'",
    )
    val_split: float | None = _option(
        None, "share of the training images to validate on, such as 0.1, instead of a validation part of the data"
    )
    input_key: str | None = _option(None, "column of the images of hfds/... and hfids/...; 'image' by default")
    target_key: str | None = _option(None, "column of the labels of hfds/... and hfids/...; 'label' by default")
    download: bool = _option(False, "download a missing data set of torchvision (torch/...)")
    data_device: str = _option(
        "loader", "where images are kept: loader reads them when needed; cpu and cuda hold all of them in memory"
    )
    workers: int = _option(min(4, os.cpu_count() or 1), "loader processes; by default one per CPU, up to 4")
    strict_data: bool = _option(False, "fail on an image that cannot be read instead of skipping it")
    mean: list[float] | None = _option(None, "mean of the input, one value per channel; the model's own by default")
    std: list[float] | None = _option(
        None, "standard deviation of the input, one value per channel; the model's own by default"
    )
    crop: float = _option(0.35, "smallest share of the area that a random crop keeps")
    flip: float = _option(0.5, "probability of a horizontal flip")
    policy: str | None = _option("rand-m9-mstd0.5-inc1", "RandAugment policy of timm, for data read by a loader")
    erase: float = _option(0.25, "probability of random erasing, for data read by a loader")
    mixup: float = _option(0.0, "mixup alpha; 0 is off")
    cutmix: float = _option(0.0, "cutmix alpha; 0 is off")
    smoothing: float = _option(0.0, "label smoothing")
    # budget and what may be pruned
    target: str | None = _option(
        None,
        "budget: 7.4G, 42% (of the dense model's MACs), '1.2M params', '42% params'; in time 1.8ms or 2.0x; "
        "several from large to small, such as 70%,50%,35%, give a model for each",
    )
    cost: str | None = _option(
        None, "table of `hiap measure`, for a target in time on another device; by default this one is measured first"
    )
    deploy: str | None = _option(
        None, "how the result will run, for a target in time: bf16,256,compile on CUDA, fp32,1,eager on a CPU"
    )
    granularities: list[str] | None = _option(
        None,
        f"what has gates: {', '.join(GRANULARITIES)}; by default the first four, qk_dim too with a target, and "
        "attention too with a target in time",
    )
    keep_blocks: list[int] = _option([], "blocks that are not pruned")
    min_heads: int = _option(1, "minimum number of heads in every layer")
    min_value_dims: float = _option(0.125, "minimum share of value dims in every open head")
    min_neurons: float = _option(0.02, "minimum share of neurons in every open FFN")
    round_to: int = _option(8, "multiple that widths are rounded to")
    merge_tokens: int = _option(
        0,
        "tokens that each block merges away, in the result and while the small network is trained; a target in "
        "MACs takes this into account; 0 is off",
    )
    align_heads: bool | None = _option(
        None,
        "before the search, an invertible change of basis concentrates each head in few dims; outputs are unchanged; "
        "by default with a target",
    )
    # length and schedule
    epochs: int = _option(15, "length of the run; with several targets, of all sizes together")
    rung_epochs: list[int] | None = _option(
        None, "epochs of each of several targets, such as 4,5,6, instead of equal shares of epochs"
    )
    stop_after: int | None = _option(None, "end after this many epochs of the schedule")
    freeze_at: float | None = _option(
        None, "share of the run after which the topology is final; 0.15 with a target, else 1"
    )
    # optimisation
    batch_size: int = _option(
        0,
        "images per step, over all processes; by default 256, or fewer (at least 16) if the run would have fewer than "
        "200 steps",
    )
    accumulate: int = _option(1, "number of parts in which a batch is computed, to save memory")
    opt: str = _option("adamw", "optimiser of timm")
    lr: float | None = _option(
        None,
        "peak learning rate of the weights; by default 5e-4 * sqrt(batch_size / 256), at most 1e-3, less if all "
        "epochs together have more than 300,000 images",
    )
    min_lr: float = _option(1e-6, "final learning rate")
    warmup_epochs: float | None = _option(None, "epochs of linear warm-up; by default 5% of the epochs")
    weight_decay: float = _option(0.05, "weight decay, not applied to biases, norms and gates")
    clip_grad: float | None = _option(1.0, "gradient clipping: largest norm of the gradient; 0 is off")
    ema: float = _option(0.0, "decay of the moving average of the weights, which is then the result; 0 is off")
    precision: str = _option("fp32", "precision of the training")
    # objective and distillation
    objective: str = _option(
        "labels",
        "what is learned: labels, with the help of a teacher; or features, the tokens and the pooled output of the "
        "dense model, from images alone",
    )
    tokens_weight: float = _option(1.0, "weight of the tokens, with --objective features")
    pooled_weight: float = _option(1.0, "weight of the pooled output, with --objective features")
    teacher: str = _option("self", "'self' (the dense model), 'none', or the timm name of a teacher")
    teacher_weights: str | None = _option(None, "weights of the teacher; timm's pretrained ones by default")
    distill_weight: float = _option(0.5, "share of the distillation in the task loss")
    distill_temperature: float = _option(1.0, "temperature of the distillation")
    distill_features: float | None = _option(
        None,
        "weight of the distance between block outputs and those of the dense model, which must be the teacher; by "
        "default 10 with a target if that is the teacher anyway, else 0",
    )
    # run
    keep: str = _option("last", "which epoch is the result: the last, or the best on the validation images")
    seed: int = _option(0, "seed of everything random")
    eval_every: int = _option(1, "epochs between evaluations, and between lines of output")
    checkpoint_every: int | None = _option(None, "steps between checkpoints; an epoch by default")
    trackers: list[str] = _option([], f"where metrics go besides metrics.jsonl: {', '.join(TRACKERS)}")
    # for ablations
    gate_mode: str = _option("importance", "how gates follow a target: set by importance, or learned by gradient")
    gate_lr: float = _option(5e-3, "learning rate of gate logits, if they are learned by gradient")
    gate_window: float = _option(0.1, "share of the run over which importance is averaged")
    start_logit: float = _option(5.0, "logit of every gate at the start, if logits are learned by gradient")
    ratio: list[float] = _option(
        [1.0, 1.0], "weight of the cost of heads (macro) to that of dims and neurons (micro), with a target"
    )
    ramp_start: float = _option(0.05, "when the budget begins to fall, as a share of the time before the freeze")
    ramp_end: float = _option(0.9, "when the budget reaches the target, as a share of the time before the freeze")
    ramp_power: float = _option(1.0, "shape of the falling budget: 1 falls evenly, 3 fast first")
    sharp_start: float = _option(2.0, "logits per unit of log-importance at the start")
    sharp_end: float = _option(20.0, "logits per unit of log-importance at the freeze")
    noise_start: float = _option(1.0, "scale of the noise in the gates at the first step")
    noise_end: float | None = _option(
        None, "scale of the noise in the gates at the freeze; 0 with a target, else 1 (the paper)"
    )
    tau_start: float = _option(2.0, "temperature of the gates at the first step")
    tau_decay: float = _option(0.98, "factor on the temperature in each of 300 virtual epochs before the freeze")
    tau_floor: float = _option(0.05, "lowest temperature of the gates")
    shrink: bool = _option(True, "extract at the freeze and train on the small network")
    lambda_macro: float | None = _option(None, "the paper's penalty on heads, instead of a target")
    lambda_micro: float | None = _option(None, "the paper's penalty on value dims and neurons, instead of a target")
    accounting: str = _option("exact", "how the penalties count the MACs of a head: exactly, or as the paper does")
    beta_head: float = _option(1.0, "weight of the head feasibility term, without a target")
    beta_dim: float = _option(1.0, "weight of the value-dim feasibility term, without a target")
    beta_ffn: float = _option(1.0, "weight of the neuron feasibility term, without a target")


def help_of() -> list[tuple[str, Any, str]]:
    """Name, type and explanation of every option."""
    kinds = typing.get_type_hints(Options)
    return [(f.name, kinds[f.name], f.metadata["help"]) for f in dataclasses.fields(Options)]
