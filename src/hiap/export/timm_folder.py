"""A compact model as a plain model of timm, where timm's constructor can make it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hiap.errors import ExportError, InputError
from hiap.models.registry import family_of

__all__ = ["INSTEAD", "plain_arguments", "read_timm", "write_timm"]

INSTEAD = "Load the folder of hiap.save by timm.create_model('local-dir:FOLDER') after `import hiap`, or export to onnx"


def plain_arguments(model: nn.Module) -> tuple[str, dict[str, Any], list[int]]:
    """timm's name and arguments of a model, and its blocks that are left.

    Raises:
        InputError: the constructor of timm cannot make it.
    """
    import timm

    family = family_of(model)
    usage = family.usage(model)
    name = str(usage.get("architecture"))
    if family.name != "timm" or not timm.is_model(name):
        raise InputError(f"timm is for models that timm knows by name; found a {type(model).__name__}. {INSTEAD}")
    sites = family.sites(model)
    left = [i for i, site in enumerate(sites) if (site.widths.heads, site.widths.neurons) != (None, None)]
    arguments = dict(family.describe(model, None)["arguments"])
    widths = [sites[i].widths for i in left]
    dim, heads = arguments["embed_dim"], arguments["num_heads"]
    for i, own in zip(left, widths, strict=True):
        if (own.heads, own.qk_dim, own.value_dim) != (heads, dim // heads, dim // heads) or not own.neurons:
            raise InputError(
                f"timm cannot make block {i} ({own}): it has whole branches of {heads} heads only. {INSTEAD}"
            )
        if own.neurons != widths[0].neurons:
            raise InputError(
                f"timm cannot make blocks of different widths: block {left[0]} has {widths[0].neurons} neurons, "
                f"block {i} {own.neurons}. {INSTEAD}"
            )
    if not left:
        raise InputError(f"timm cannot make a network without blocks. {INSTEAD}")
    layers = ("act_layer", "norm_layer", "norm_eps", "embed_norm", "embed_norm_layer", "embed_norm_eps", "mlp_layer")
    plain = {key: value for key, value in arguments.items() if key not in layers}  # those come with the name
    plain |= {"depth": len(left), "mlp_ratio": (int(widths[0].neurons or 0) + 0.5) / dim}
    return name, plain, left


def write_timm(model: nn.Module, folder: Path, about: dict[str, Any]) -> None:
    import timm
    from timm.models import save_for_hf

    name, arguments, left = plain_arguments(model)
    try:
        network = timm.create_model(name, pretrained=False, **arguments).to(next(model.parameters()).dtype)
        state = {}
        for key, tensor in model.state_dict().items():
            parts = key.split(".")
            if parts[0] == "blocks":
                if int(parts[1]) not in left:
                    continue
                parts[1] = str(left.index(int(parts[1])))
            state[".".join(parts)] = tensor
        network.load_state_dict(state)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ExportError(f"timm's {name} cannot hold this model: {error}. {INSTEAD}") from error
    usage = {key: value for key, value in family_of(model).usage(model).items() if key not in ("url", "hf_hub_id")}
    network.pretrained_cfg = {**usage, "custom_load": False, "num_classes": about["classes"]}
    more = {"label_names": about["class_names"]} if about["class_names"] else {}
    save_for_hf(network, str(folder), model_config=more, model_args=arguments, safe_serialization=True)


def read_timm(folder: Path, like: nn.Module) -> nn.Module:
    import timm

    found: nn.Module = timm.create_model(f"local-dir:{folder}", pretrained=True)
    return found
