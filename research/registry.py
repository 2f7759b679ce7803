"""Every ViT of timm's registry: accepted or refused, and its MACs against torch's own count.

    python research/registry.py [--json FILE]

Models are built on the meta device, so no weights are needed and nothing is computed.
"""

import argparse
import json
from collections import Counter
from pathlib import Path

import timm
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hiap

PATTERNS = ("vit*", "deit*", "flexivit*", "test_vit*", "naflexvit*", "samvit*", "beit*", "eva*")


def torch_macs(model: torch.nn.Module) -> int:
    height, width = model.patch_embed.img_size
    image = torch.zeros(1, 3, height, width, device="meta")
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model.eval()(image)
    return counter.get_total_flops() // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    accepted, wrong, refused = [], [], Counter()
    for name in sorted({name for pattern in PATTERNS for name in timm.list_models(pattern)}):
        with torch.device("meta"):
            model = timm.create_model(name)
        try:
            macs = hiap.macs(model)
            if macs != torch_macs(model):
                wrong.append(name)
            hiap.attach(model)
            accepted.append(name)
        except hiap.UnsupportedModelError as error:
            refused[str(error).partition(". To support")[0]] += 1
    print(f"{len(accepted)} accepted, {len(wrong)} of them with a MAC count other than torch's: {wrong}")
    for reason, count in refused.most_common():
        print(f"{count:4} refused: {reason}")
    if options.json:
        options.json.write_text(json.dumps({"accepted": accepted, "wrong": wrong, "refused": refused}) + "\n")


if __name__ == "__main__":
    main()
