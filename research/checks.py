"""What `compare.py` refuses before it runs anything."""

import argparse
from importlib.util import find_spec

from bookkeeping import label_free
from hiap.budget.latency import LatencyTable
from hiap.budget.target import Target, check_falling
from methods import METHODS, PEERS, TIMED
from prune_tiny_imagenet import assignments

OF_SEARCH = {  # options that methods without a search do not read
    *("keep_blocks", "granularities", "ratio", "min_heads", "min_value_dims", "min_neurons", "gate_mode", "gate_lr"),
    *("gate_window", "freeze_at", "shrink", "start_logit", "tau_start", "tau_decay", "tau_floor", "noise_start"),
    *("noise_end", "ramp_start", "ramp_end", "ramp_power", "sharp_start", "sharp_end", "lambda_macro", "lambda_micro"),
}


def check(options: argparse.Namespace) -> None:
    """Refuse what would fail, or mean something else, after hours."""
    methods = options.methods.split(",")
    for method in [*methods, *([options.like] if options.like else [])]:
        if method not in METHODS:
            raise ValueError(f"unknown method {method}; known: {', '.join(METHODS)}")
    if any("torch_pruning" in method for method in methods):
        if label_free(options):
            raise ValueError("--set objective=features does not go with Torch-Pruning, whose networks are narrower")
        if "distill_features" in assignments(options.set):
            raise ValueError("--set distill_features does not go with Torch-Pruning, whose networks are narrower")
        if find_spec("torch_pruning") is None:
            raise ValueError(
                "the methods of Torch-Pruning need it: pip install torch-pruning, or choose other --methods"
            )
    if options.compile and label_free(options):
        raise ValueError("--compile does not go with objective=features, which reads the pooled output: leave it out")
    if not options.data.is_dir():
        raise ValueError(f"--data {options.data} is no folder")
    if not (options.weights or options.model):
        raise ValueError("--weights FILE is missing: those of the dense start")
    targets, untrained = options.target.split(","), options.go.__name__ == "times"
    if untrained and (options.cost or not set(methods) <= set(PEERS)):
        raise ValueError("`times` is for peers with targets in MACs: it takes --methods of those and no --cost")
    if len(targets) > 1 and not untrained:
        check_falling(targets)
        own = TIMED if options.cost else "hiap"
        if options.keep:
            raise ValueError("--keep does not go with several targets")
        if methods != [own] or "," in options.rates or options.like or options.go.__name__ != "run":
            raise ValueError(
                f"several targets are the sizes of one run: `run` them with --methods {own}, one --rates and no --like"
            )
    unit = Target.parse(targets[0]).unit
    if options.cost:
        if unit not in ("x", LatencyTable.load(options.cost).unit):
            raise ValueError(
                f"--target must be in the unit of the table, such as 1.8ms or 2.0x; found {options.target}"
            )
        narrower = [method for method in methods if "torch_pruning" in method]
        if narrower:
            raise ValueError(f"no table knows the time of {narrower[0]}, whose networks are narrower: leave it out")
    elif TIMED in methods:
        raise ValueError(f"{TIMED} has a target in time: pass --cost TABLE")
    elif unit not in ("share", "macs"):
        raise ValueError(f"--target must be in MACs, such as 50% or 0.6G, or pass --cost TABLE; found {options.target}")
    own = {"lr": "rates", "seed": "seeds", "epochs": "epochs", "target": "target", "data": "data", "model": "model"}
    for name in assignments(options.set):
        if name in own:
            raise ValueError(f"--set {name} would contradict the records: use --{own[name]}")
        if name == "dense_epochs":
            raise ValueError(
                "--set dense_epochs would give methods different starts: train it first and pass --weights"
            )
        if name in OF_SEARCH and not set(methods).isdisjoint(PEERS):
            peers = ", ".join(method for method in methods if method in PEERS)
            raise ValueError(f"--set {name} means nothing to {peers}: run it for the other --methods alone")
    options.records.parent.mkdir(parents=True, exist_ok=True)
