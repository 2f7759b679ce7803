"""Puts gates into a model, finds them again, and takes them out.

`proj`, `fc2` and (for qk_dim) `qkv` of every block become a `GatedLinear` on the same parameters. No tensor of a timm
model is renamed, so a dense checkpoint loads into a gated model, and no forward of the model is touched. Blocks of
other families are converted first, and back when the gates are taken out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hiap.errors import InputError, UnsupportedModelError
from hiap.models.family import Site
from hiap.models.registry import family_of, find_family, sites
from hiap.nn.gated_linear import GatedLinear, NoiseSource
from hiap.nn.gates import START_LOGIT, Gate
from hiap.nn.granularities import GRANULARITIES, PAPER, present_name
from hiap.nn.rotary import pair_count

__all__ = [
    "attach",
    "check_finite",
    "detach",
    "gates",
    "gates_by_block",
    "is_gated",
    "noise_source",
    "parameter_groups",
    "set_gates",
    "weight_groups",
]

Model = TypeVar("Model", bound=nn.Module)


def attach(
    model: Model,
    granularities: Iterable[str] = PAPER,
    keep_blocks: Iterable[int] = (),
    *,
    logit: float = START_LOGIT,
    seed: int = 0,
) -> Model:
    """Gate a dense or compact ViT in place, all gates open, and return it.

    In eval, open gates multiply weights by 1, so the outputs are those of the model before, bit by bit. Compare them
    under the same grad mode: torch may take another attention kernel where gradients are recorded.

    Args:
        granularities: any of head, ffn, value_dim, neuron (the paper's four), qk_dim, attention. `ffn` gates the whole
            FFN of a block; `block`, its name in the paper, is accepted too.
        keep_blocks: indices of blocks that get no gate; negative ones count from the end.
        logit: of every gate at the start; sigmoid(logit) is the probability that it is open.
        seed: of the gate noise. All processes of a run must share it.

    Raises:
        UnsupportedModelError: the model cannot be pruned exactly; nothing has been changed.
        ValueError: an unknown granularity or block, or a model that already has gates.
    """
    family = family_of(model)
    blocks = family.sites(model)
    if not math.isfinite(logit):
        raise InputError(f"logit must be finite; found {logit}")
    chosen = _check_granularities(granularities)
    kept = _check_blocks(keep_blocks, len(blocks))
    if is_gated(model):
        raise InputError("the model already has gates; remove them with hiap.detach first")
    for i, site in enumerate(blocks):
        if "qk_dim" in chosen and site.qk_norm and i not in kept:
            raise UnsupportedModelError(
                f"{site.name}.attn normalises queries and keys (qk_norm), which ties the q/k dims of a head together. "
                "Leave qk_dim out of the granularities."
            )
    for i, site in enumerate(family.open(model)):
        if i not in kept:
            _gate_block(site, chosen, logit)
    found = [module for module in model.modules() if isinstance(module, GatedLinear)]
    if not found:
        family.close(model)
        raise InputError("nothing to gate: every block is protected by keep_blocks or has no such units")
    family.stem(model).register_forward_pre_hook(NoiseSource(found, seed))
    model.register_load_state_dict_post_hook(_forgive_dense_checkpoint)  # type: ignore[no-untyped-call]
    return model


def check_finite(model: nn.Module) -> None:
    """Raise a ValueError that names the first tensor with values that are not finite."""
    for name, tensor in model.state_dict().items():
        wrong = 0 if tensor.is_meta else tensor.numel() - int(tensor.isfinite().sum())
        if wrong:
            raise InputError(
                f"{name} has {wrong} value{'s' * (wrong > 1)} that {'are' if wrong > 1 else 'is'} not finite. "
                "The checkpoint is damaged, or the run that trained it has diverged"
            )


def _check_granularities(names: Iterable[str]) -> set[str]:
    chosen = {present_name(name) for name in ([names] if isinstance(names, str) else names)}
    unknown = sorted(chosen - set(GRANULARITIES))
    if unknown or not chosen:
        raise InputError(f"granularities must be some of {', '.join(GRANULARITIES)}; found {unknown or 'none'}")
    return chosen


def _check_blocks(indices: Iterable[int] | int, depth: int) -> set[int]:
    indices = [indices] if isinstance(indices, int) else list(indices)
    wrong = [i for i in indices if not -depth <= i < depth]
    if wrong:
        raise InputError(f"keep_blocks {wrong}: the model has blocks 0 to {depth - 1}")
    return {i % depth for i in indices}


def _gate_block(site: Site, chosen: set[str], logit: float) -> None:
    widths = site.widths
    if widths.heads:
        values = (widths.heads, widths.value_dim)
        shapes = {"head": (widths.heads, 1), "value_dim": values, "attention": (1,)}
        _gate_linear(site.attention, "proj", values, shapes, chosen, logit)
        queries = (widths.heads, widths.qk_dim)
        units = (widths.heads, pair_count(widths.qk_dim, site.pairs))
        if units[1]:
            _gate_linear(site.attention, "qkv", queries, {"qk_dim": units}, chosen, logit, site.pairs)
    if widths.neurons:
        neurons = (widths.neurons,)
        _gate_linear(site.ffn, "fc2", neurons, {"neuron": neurons, "ffn": (1,)}, chosen, logit)


def _gate_linear(
    parent: nn.Module,
    name: str,
    units: tuple[int, ...],
    shapes: dict[str, tuple[int, ...]],
    chosen: set[str],
    logit: float,
    pairs: str | None = None,
) -> None:
    linear: nn.Linear = getattr(parent, name)
    made = {kind: Gate(shape, logit, linear.weight.device) for kind, shape in shapes.items() if kind in chosen}
    if made:
        setattr(parent, name, GatedLinear(linear, units, made, pairs))


def _forgive_dense_checkpoint(module: nn.Module, incompatible: _IncompatibleKeys) -> None:
    """Let a checkpoint without a single gate load strictly: the gates then stay as they are."""
    missing = [key for key in incompatible.missing_keys if ".gates." in key]
    if len(missing) == sum(1 for _ in gates(module)):
        for key in missing:
            incompatible.missing_keys.remove(key)


def detach(model: Model) -> Model:
    """Take all gates out in place, leaving the dense model on the same parameters, and return it."""
    gated = is_gated(model)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, GatedLinear):
                setattr(module, name, child.plain())
        _remove(module._forward_pre_hooks, lambda hook: isinstance(hook, NoiseSource))
        _remove(module._load_state_dict_post_hooks, lambda hook: hook is _forgive_dense_checkpoint)
    for module in list(model.modules()) if gated else ():  # the model itself, or what is wrapped in it
        if (family := find_family(module)) is not None:
            family.close(module)
            break
    return model


def _remove(hooks: dict[int, Any], ours: Callable[[Any], bool]) -> None:
    for key in [key for key, hook in hooks.items() if ours(hook)]:
        del hooks[key]


def gates(model: nn.Module) -> Iterator[Gate]:
    """All gates of a model, in order."""
    return (module for module in model.modules() if isinstance(module, Gate))


def is_gated(model: nn.Module) -> bool:
    return next(gates(model), None) is not None


def gates_by_block(model: nn.Module) -> list[dict[str, Gate]]:
    """The gates of each block by granularity; a protected block has none."""
    return [
        {
            kind: gate
            for linear in site.module.modules()
            if isinstance(linear, GatedLinear)
            for kind, gate in linear.by_kind().items()
        }
        for site in sites(model)
    ]


def set_gates(
    model: nn.Module,
    *,
    temperature: float | None = None,
    noise_scale: float | None = None,
    seed: int | None = None,
    draws: int | None = None,
) -> None:
    """Set the temperature, the noise scale or the state of the noise of all gates at once.

    Args:
        draws: the number of draws taken so far; with `seed` it fixes the next one, so a run can be resumed.
    """
    if temperature is not None and not temperature > 0:
        raise InputError(f"temperature must be positive; found {temperature}")
    if noise_scale is not None and not noise_scale >= 0:
        raise InputError(f"noise_scale must not be negative; found {noise_scale}")
    source = noise_source(model)
    source.seed = source.seed if seed is None else seed
    source.draws = source.draws if draws is None else draws
    for gate in source.gates:
        gate.temperature = gate.temperature if temperature is None else temperature
        gate.noise_scale = gate.noise_scale if noise_scale is None else noise_scale


def noise_source(model: nn.Module) -> NoiseSource:
    """The object that draws the noise of a gated model."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, NoiseSource):
                return hook
    raise InputError("the model has no gates; attach them with hiap.attach first")


def parameter_groups(
    model: nn.Module, weight_decay: float = 0.05, gate_lr: float | None = None
) -> list[dict[str, Any]]:
    """Optimiser groups: weights with decay, biases and norms without, gate logits without and at their own rate."""
    exempt = family_of(model).without_decay(model)
    logits = {id(gate.logit) for gate in gates(model)}
    groups: list[dict[str, Any]] = param_groups_weight_decay(model, weight_decay, exempt)
    for group in groups:
        group["params"] = [p for p in group["params"] if id(p) not in logits]
    group = {"params": [gate.logit for gate in gates(model) if gate.logit.requires_grad], "weight_decay": 0.0}
    return [*groups, group if gate_lr is None else {**group, "lr": gate_lr}]


def weight_groups(model: nn.Module, weight_decay: float = 0.05) -> list[dict[str, Any]]:
    """Optimiser groups of the weights alone, for gates that a `Controller` sets: they learn nothing by gradient."""
    return parameter_groups(model, weight_decay)[:-1]
