"""Make the dense models that the comparisons start from: fine-tune timm's pretrained weights on Tiny-ImageNet.

    python research/dense_starts.py vit_tiny --data DIR --out vit_tiny_tin128.safetensors
    python research/dense_starts.py dinov2_small --data DIR --out dinov2_small_tin126.safetensors

DIR is made by `tiny_imagenet.py`. `vit_tiny` is ViT-Ti at 128 pixels, `dinov2_small` is DINOv2-S at 126 pixels; both
are trained on all training images and scored on the validation set. Written are the weights (float16 safetensors, timm
names) and, beside them, a JSON file with the accuracy, the SHA-256 and every setting. The files behind the published
numbers are in `dense_starts.json`. How they were trained was not recorded: this script makes models like them, not the
same ones. `--no-pretrained` starts from random weights and needs no download.
"""

import argparse
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from hiap.data.sources import ByteData
from prune_tiny_imagenet import STARTS, configuration, tenths

RECIPE = {"epochs": 10, "batch": 256, "lr": 1e-4, "head_factor": 10.0}


def finetune(
    model: Any, data: ByteData, epochs: int, batch: int, lr: float, head_factor: float, precision: str = "bf16"
) -> float:
    """Train with AdamW, warm-up and a cosine; return the top-1 on the validation images (%).

    Args:
        lr: of the body; the classifier has `head_factor` times as much.
    """
    head = list(model.head.parameters())
    body = [p for name, p in model.named_parameters() if not name.startswith("head.")]
    peaks = (lr, lr * head_factor)
    groups = [{"params": body, "lr": peaks[0]}, {"params": head, "lr": peaks[1]}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.05)
    steps = epochs * (data.train_size // batch)
    warmup, step = max(1, steps // 10), 0
    model.train()
    for epoch in range(epochs):
        for x, y in data.train(epoch, 0, batch, 0, 1):
            factor = min((step + 1) / warmup, 0.5 * (1 + math.cos(math.pi * step / steps)))
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            with torch.autocast(x.device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        print(f"epoch {epoch + 1} of {epochs}: loss {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data.val(250))
    return 100 * right / data.val_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("start", choices=sorted(STARTS))
    parser.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    parser.add_argument("--out", type=Path, required=True, help="file for the weights (.safetensors)")
    parser.add_argument("--no-pretrained", action="store_true", help="start from random weights, without a download")
    parser.add_argument("--epochs", type=int, default=RECIPE["epochs"])
    parser.add_argument("--batch", type=int, default=RECIPE["batch"])
    parser.add_argument("--lr", type=float, default=RECIPE["lr"], help="peak learning rate of the body")
    parser.add_argument(
        "--head-factor", type=float, default=RECIPE["head_factor"], help="the classifier's, as a multiple"
    )
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=50, help="images of a class in each tenth; fewer for a quick try")
    options = parser.parse_args()
    if options.out.suffix != ".safetensors":
        raise SystemExit(f"dense_starts.py: --out must end in .safetensors; found {options.out}")
    name, size, _ = STARTS[options.start]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    data = tenths(options.data, configuration(options.start, None, {"seed": options.seed}), True, device, options.limit)
    if options.batch > data.train_size:
        raise SystemExit(f"dense_starts.py: --batch {options.batch} is more than the {data.train_size} training images")
    torch.manual_seed(options.seed)
    model = timm.create_model(name, pretrained=not options.no_pretrained, img_size=size, num_classes=data.classes)
    recipe = (options.epochs, options.batch, options.lr, options.head_factor, options.precision)
    top1 = finetune(model.to(device), data, *recipe)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.half().cpu().contiguous() for key, tensor in model.state_dict().items()}, options.out)
    record = {
        "model": name,
        "img_size": size,
        "top1": top1,
        "sha256": hashlib.sha256(options.out.read_bytes()).hexdigest(),
        "pretrained": not options.no_pretrained,
        **{key: getattr(options, key) for key in (*RECIPE, "precision", "seed", "limit")},
        "torch": torch.__version__,
        "timm": timm.__version__,
    }
    options.out.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n")
    print(f"{options.out}: {top1:.2f} % top-1 on {data.val_size} validation images")


if __name__ == "__main__":
    main()
