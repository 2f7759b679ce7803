"""A compact model as a plain model of timm, where timm's constructor can make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from hiap.errors import ExportError, HiapError, InputError
from hiap.models.family import Family, Site, put
from hiap.models.registry import family_of
from hiap.models.timm_recipe import mlp_ratio_of
from hiap.nn.compact import Attention, Widths

__all__ = ["instead_of", "plain_arguments", "read_timm", "write_timm"]

SIZES = ("img_size", "patch_size", "in_chans", "num_classes", "global_pool", "embed_dim", "num_heads")
LAYERS = ("norm_layer", "embed_norm_layer", "act_layer")  # that timm also knows by a name in small letters
UNNAMED = ("embed_norm", "norm_eps", "embed_norm_eps", "mlp_layer")  # that no value of JSON stands for
TRAINING = ("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate")


def instead_of(model: nn.Module) -> str:
    """What to do with a model that a folder of another library cannot hold."""
    name = family_of(model).name
    if name.startswith("timm"):
        load = "timm.create_model('local-dir:FOLDER') after `import hiap`"
        return f"Load the folder of hiap.save by {load}, or export to onnx"
    if name == "transformers":
        return "Export it to transformers, or to onnx"
    return "Load the folder of hiap.save by hiap.load, or export to onnx"


def plain_arguments(model: nn.Module) -> tuple[str, dict[str, Any], list[int]]:
    """timm's name and arguments of a model, and its blocks that are left.

    Raises:
        InputError: the constructor of timm cannot make it.
    """
    import timm

    family, instead = family_of(model), instead_of(model)
    name = str(family.usage(model).get("architecture"))
    if not family.name.startswith("timm") or not timm.is_model(name):
        raise InputError(f"timm is for models that timm knows by name; found a {type(model).__name__}. {instead}")
    sites = family.sites(model)
    left = [i for i, site in enumerate(sites) if (site.widths.heads, site.widths.neurons) != (None, None)]
    if not left:
        raise InputError(f"timm cannot make a network without blocks. {instead}")
    wanted = dict(family.describe(model, None)["arguments"])
    _check_widths([sites[i].widths for i in left], left, wanted, instead)
    wanted["depth"] = len(left)
    try:
        arguments = _found_arguments(name, family, wanted, int(sites[left[0]].widths.neurons or 0))
        with torch.device("meta"):
            plain = timm.create_model(name, pretrained=False, **arguments)
        _check_fits(model, plain, family, left)
    except (AssertionError, HiapError, RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"timm's {name} cannot hold this model: {error}. {instead}") from error
    return name, arguments, left


def _check_widths(widths: list[Widths], left: list[int], arguments: dict[str, Any], instead: str) -> None:
    """Refuse blocks that are not alike, or have lost heads or dims."""
    heads = arguments["num_heads"]
    dim = arguments["embed_dim"] // heads
    for i, own in zip(left, widths, strict=True):
        if (own.heads, own.qk_dim, own.value_dim) != (heads, dim, dim) or not own.neurons:
            raise InputError(
                f"timm cannot make block {i} ({own}): it has whole branches of {heads} heads only. {instead}"
            )
        if own.neurons != widths[0].neurons:
            raise InputError(
                f"timm cannot make blocks of different widths: block {left[0]} has {widths[0].neurons} neurons, "
                f"block {i} {own.neurons}. {instead}"
            )


def _found_arguments(name: str, family: Family, wanted: dict[str, Any], neurons: int) -> dict[str, Any]:
    """The arguments that, beside what its name brings, make timm's model the one that is wanted.

    Args:
        wanted: what the family says of the model.
        neurons: of each block.
    """
    import timm

    arguments = {key: wanted[key] for key in SIZES} | {"depth": wanted["depth"]}
    for packed in (2, 1):  # some gated MLPs count both halves, which timm wants to be an even number
        arguments["mlp_ratio"] = mlp_ratio_of(packed * neurons, wanted["embed_dim"])
        with torch.device("meta"):
            plain = timm.create_model(name, pretrained=False, **arguments)
        if family.sites(plain)[0].widths.neurons == neurons:
            break
    own = family.describe(plain, None)["arguments"]
    for key in sorted((wanted.keys() | own.keys()) - {*SIZES, *TRAINING, "depth", "mlp_ratio"}):
        value = wanted.get(key)
        if value != own.get(key) and key not in UNNAMED:
            arguments[key] = value.lower() if key in LAYERS and isinstance(value, str) else value
    return arguments


def _check_fits(model: nn.Module, plain: nn.Module, family: Family, left: list[int]) -> None:
    """Raise a ValueError if a model of timm differs from a model in more than its weights."""
    ours, theirs = family.describe(model, None), family.describe(plain, None)
    for key in ours["arguments"].keys() - {"depth", "mlp_ratio", *TRAINING}:
        values = [one["arguments"].get(key) for one in (ours, theirs)]
        if values[0] != values[1]:
            raise ValueError(f"its {key} is {values[0]}, timm's {values[1]}")
    if ours.get("rope") != theirs.get("rope"):
        raise ValueError(f"its rotary positions are {ours.get('rope')}, timm's {theirs.get('rope')}")
    sites = family.sites(model)
    pairs = [("", _outside(model), _outside(plain))]
    for i, site in zip(left, family.sites(plain), strict=True):
        _check_key_bias(sites[i], site)
        pairs.append((f"{site.name}.", sites[i].block.state_dict(), site.block.state_dict()))
    for prefix, mine, others in pairs:
        for key in sorted(mine.keys() | others.keys()):
            shapes = [tuple(one[key].shape) if key in one else None for one in (mine, others)]
            if shapes[0] != shapes[1]:
                raise ValueError(f"its {prefix}{key} has the shape {shapes[0]}, timm's {shapes[1]}")


def _check_key_bias(own: Site, plain: Site) -> None:
    bias = own.attention.qkv.bias
    if own.pairs is None or bias is None or _has_key_bias(plain.module):
        return
    if bool(torch.split(bias, own.attention.split)[1].any()):
        raise ValueError(f"the keys of {own.name} have a bias, timm's have none")


def _has_key_bias(block: nn.Module) -> bool:
    return any(name.endswith(("qkv.bias", "k_proj.bias")) for name, _ in block.named_parameters())


def _outside(model: nn.Module) -> dict[str, Tensor]:
    """All weights but those of the blocks."""
    return {key: tensor for key, tensor in model.state_dict().items() if not key.startswith("blocks.")}


def write_timm(model: nn.Module, folder: Path, about: dict[str, Any]) -> None:
    import timm
    from timm.models import save_for_hf

    name, arguments, left = plain_arguments(model)
    family = family_of(model)
    network = timm.create_model(name, pretrained=False, **arguments).to(next(model.parameters()).dtype)
    try:
        network.load_state_dict(_outside(model), strict=False)
        sites = family.sites(model)
        for i, site in zip(left, family.sites(network), strict=True):
            block = site.block
            block.load_state_dict(sites[i].block.state_dict())
            attention = cast(Attention, block.attn)
            if not _has_key_bias(site.module) and attention.qkv.bias is not None:
                # Without rotary positions it adds the same to all scores of a query, which changes nothing.
                torch.split(attention.qkv.bias.detach(), attention.split)[1].zero_()
            put(network, site.name, family.from_block(block))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"timm's {name} cannot hold this model: {error}. {instead_of(model)}") from error
    usage = {key: value for key, value in family.usage(model).items() if key not in ("url", "hf_hub_id")}
    network.pretrained_cfg = {**usage, "custom_load": False, "num_classes": about["classes"]}
    more = {"label_names": about["class_names"]} if about["class_names"] else {}
    save_for_hf(network, str(folder), model_config=more, model_args=arguments, safe_serialization=True)


def read_timm(folder: Path, like: nn.Module) -> nn.Module:
    import timm

    found: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return found
