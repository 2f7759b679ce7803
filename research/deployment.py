"""Dense and compact in fp32, bf16 and INT8 on a CPU: accuracy, size and time of what one would ship.

    python research/deployment.py --data FOLDER --weights vit_tiny_tin128.safetensors --compact RUN --out FILE

FOLDER holds train/ and val/ with a folder for each class; INT8 is calibrated on 300 training images. fp32 and INT8 are
files of onnxruntime, bf16 is PyTorch. Let nothing else run meanwhile.
"""

import argparse
import functools
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hiap
from accuracy import vit_tiny
from hiap.cli.calibration import calibration_images
from hiap.cli.evaluate_file import evaluate_file
from hiap.cli.lookup import compact_folder
from hiap.data.images import Augmentation, Loading
from hiap.data.sources import open_data
from hiap.export.network import Deployable, description
from hiap.export.running import ExportedModel
from hiap.speed.clock import device_name, timings
from hiap.training.evaluate import evaluate

CPU = torch.device("cpu")


def validation(model: nn.Module, folder: str) -> Any:
    """The data in a folder, made ready as the model wants it."""
    about = description(model, "", "", None)
    common = {name: about[name] for name in ("channels", "interpolation", "crop_pct", "crop_mode")}
    size, normalisation = (about["size"][0], about["size"][1]), (about["mean"], about["std"])
    return open_data(folder, Loading(size, normalisation, Augmentation(), CPU, **common))


def rows_of(name: str, model: nn.Module, data: str, batches: tuple[int, ...]) -> list[dict[str, Any]]:
    """A row for each precision, with the accuracy, the bytes, and the ms of each batch size."""
    config, calibration = hiap.Config(data=data), calibration_images(data, model, 300)
    half = Deployable(model, torch.bfloat16)
    forms: dict[str, tuple[nn.Module, int, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for precision, more in (("fp32", {}), ("int8", {"quantize": "int8", "calibration": calibration})):
            file = str(Path(folder, f"{precision}.onnx"))
            report = hiap.export_model(model, file, **more)
            forms[precision] = ExportedModel(file), report["bytes"], evaluate_file(file, config)["top1"]
        size = 2 * sum(weight.numel() for weight in model.parameters())
        forms["bf16"] = half, size, evaluate(half, validation(model, data), 64)["top1"]
        times: dict[int, list[list[float]]] = {}
        for batch in batches:
            images = torch.randn(batch, *half.shape)
            with torch.inference_mode():
                calls = [functools.partial(one, images) for one, _, _ in forms.values()]
                times[batch] = timings(calls, CPU, 5, 50)
    return [
        {
            **{"network": name, "precision": precision, "top1": top1, "bytes": size, "macs": hiap.macs(model)},
            "ms": {batch: statistics.median(found[i]) for batch, found in times.items()},
        }
        for i, (precision, (_, size, top1)) in enumerate(forms.items())
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder with train/ and val/")
    parser.add_argument("--weights", type=Path, required=True, help="of the dense ViT-Ti")
    parser.add_argument("--compact", required=True, help="folder of a run, or that hiap.save wrote")
    parser.add_argument("--out", help="JSON file to write")
    options = parser.parse_args()
    compact = hiap.load(compact_folder(options.compact))
    networks = {"dense": vit_tiny(options.weights).eval(), "compact": compact}
    networks["dense"].pretrained_cfg = compact.pretrained_cfg  # the same preprocessing
    rows = [row for name, model in networks.items() for row in rows_of(name, model, options.data, (1, 8))]
    print("| network | precision | top-1 | MB | ms, batch 1 | ms, batch 8 |\n|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["network"], row["precision"], f"{row['top1']:.2f} %", f"{row['bytes'] / 1e6:.1f}"]
        print("| " + " | ".join([*cells, *(f"{ms:.2f}" for ms in row["ms"].values())]) + " |")
    if options.out:
        found = {"device": device_name(CPU), "torch": torch.__version__, "rows": rows}
        Path(options.out).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
