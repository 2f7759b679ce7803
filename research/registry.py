"""Every ViT of timm's registry, and every image classifier of Transformers: accepted or refused, and its MACs.

    python research/registry.py [--timm-only] [--json FILE]

MACs are compared with torch's own count, and accepted models of timm must have a recipe, so that a compact model can
be saved. Models are built on the meta device: no weights are needed and nothing is computed. Those of Transformers
have the default configuration of their class.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hiap
from hiap.models.registry import family_of
from hiap.pruning.saving import check_savable

PATTERNS = ("vit*", "deit*", "flexivit*", "test_vit*", "naflexvit*", "samvit*", "beit*", "eva*")


def of_timm() -> Iterator[tuple[str, torch.nn.Module]]:
    for name in sorted({name for pattern in PATTERNS for name in timm.list_models(pattern)}):
        with torch.device("meta"):
            model = timm.create_model(name)
        yield name, model


def of_transformers() -> Iterator[tuple[str, torch.nn.Module]]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES

    names = {name for found in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values() for name in _tuple(found)}
    for name in sorted(names):
        try:
            cls = getattr(transformers, name)
            with torch.device("meta"):
                model = cls(cls.config_class())
        except Exception:  # what needs another package, or a configuration of its own
            continue
        yield name, model


def _tuple(found: str | tuple[str, ...]) -> tuple[str, ...]:
    return (found,) if isinstance(found, str) else tuple(found)


def torch_macs(model: torch.nn.Module) -> int:
    image = torch.zeros(1, *family_of(model).input_shape(model), device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(image)
    return counter.get_total_flops() // 2


def sorted_out(models: Iterator[tuple[str, torch.nn.Module]], recipes: bool) -> dict[str, object]:
    """Names of models that are accepted, of those with a wrong count among them, and of the refused by reason."""
    accepted, wrong = [], []
    refused: dict[str, list[str]] = defaultdict(list)
    for name, model in models:
        try:
            if hiap.macs(model) != torch_macs(model):
                wrong.append(name)
            if recipes:
                check_savable(model)
            hiap.attach(model)
            accepted.append(name)
        except hiap.UnsupportedModelError as error:
            refused[reason(error)].append(name)
    return {"accepted": accepted, "wrong": wrong, "refused": dict(refused)}


def reason(error: Exception) -> str:
    """Why a model was refused, the same for every block of every size."""
    text = str(error).partition(". To support")[0]
    return re.sub(r"^the model is a \w+For\w+: ", "", re.sub(r"\.\d+", ".*", text))


def tell(title: str, found: dict[str, object]) -> None:
    accepted, wrong, refused = found["accepted"], found["wrong"], found["refused"]
    count = sum(map(len, refused.values()))
    print(f"{title}: {len(accepted)} accepted, {len(wrong)} of them with a MAC count other than torch's: {wrong}")
    print(f"{title}: {count} refused, for {len(refused)} reasons")
    for why, names in sorted(refused.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):4} {why} ({', '.join(names[:2])}{', ...' if len(names) > 2 else ''})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--timm-only", action="store_true", help="leave Transformers out")
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    result = {"timm": sorted_out(of_timm(), recipes=True)}
    tell("timm", result["timm"])
    if not options.timm_only:
        result["transformers"] = sorted_out(of_transformers(), recipes=False)
        tell("Transformers", result["transformers"])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
