"""`hiap export`: a saved model as a file for another runtime."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hiap.cli.arguments import positive
from hiap.cli.lookup import compact_folder
from hiap.errors import InputError
from hiap.export.formats import FOLDERS, FORMATS, PRECISIONS_OUT, QUANTIZATIONS

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Write a saved compact model as a file for another runtime. The file is run and compared with PyTorch first."
EXAMPLES = """examples:
  hiap export runs/mine -o mine.onnx
  hiap export runs/mine --format openvino --precision fp16 -o mine.xml
  hiap export runs/mine --format pt2 --batch 8 -o mine.pt2
  hiap export runs/mine --merge-tokens 8 -o mine.onnx
  hiap export runs/mine --quantize int8 --calibration-data photos/ -o mine_int8.onnx
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    add = command.add_argument
    add("folder", help="a folder written by hiap.save, or that of a run")
    form = "by default from the file extension: .onnx, .xml (OpenVINO) or .pt2; transformers and timm are folders"
    add("--format", choices=(*FORMATS, *FOLDERS), help=form)
    add("--precision", choices=PRECISIONS_OUT, default="fp32", help="precision of the weights (default fp32)")
    add("--quantize", choices=QUANTIZATIONS, help="round the weights to 8 bits and compute in 8 bits (onnx, openvino)")
    images = "folder or CSV file of images to measure the ranges of activations on; makes the file faster"
    add("--calibration-data", metavar="FOLDER", help=images)
    count = "number of images to use from it (default 300)"
    add("--calibration-images", type=positive, metavar="N", help=count)
    batch = "images at a time: a number, or dynamic for any number (default dynamic)"
    add("--batch-size", "--batch", dest="batch", type=_batch, default=None, metavar="N", help=batch)
    add("--merge-tokens", type=positive, metavar="R", help="merge this many tokens in each block, for speed")
    add("-o", "--out", dest="out", metavar="FILE", required=True, help="file to write; a report goes to FILE.json")
    add("--overwrite", action="store_true", help="replace existing files")


def run(options: argparse.Namespace) -> int:
    import hiap
    from hiap.pruning.merging import Merged

    if options.calibration_data and not options.quantize:
        raise InputError("--calibration-data goes with --quantize int8")
    if options.calibration_images and not options.calibration_data:
        raise InputError("--calibration-images goes with --calibration-data FOLDER")
    if options.merge_tokens and options.format in FOLDERS:
        raise InputError(f"--merge-tokens is for files; {options.format} is a folder of plain weights")
    model = hiap.load(compact_folder(options.folder))
    if options.merge_tokens:
        model = hiap.merge_tokens(model, options.merge_tokens)
    if options.format in FOLDERS and isinstance(model, Merged):
        print(f"{options.format} is a folder of plain weights: tokens are not merged", file=sys.stderr)
        model = model.model
    calibration = None
    if options.calibration_data:
        from hiap.cli.calibration import calibration_images
        from hiap.export.exporting import check_export

        asked = (options.format, options.precision, options.batch, options.overwrite, options.quantize)
        check_export(model, Path(options.out), *asked, calibrated=True)  # before hundreds of images are read
        calibration = calibration_images(options.calibration_data, model, options.calibration_images or 300)
    report = hiap.export_model(
        model,
        options.out,
        options.format,
        options.precision,
        options.batch,
        options.overwrite,
        say=lambda text: print(text, file=sys.stderr),
        quantize=options.quantize,
        calibration=calibration,
    )
    worst = max(report["difference"].values())
    load = {
        "timm": f"timm.create_model({'local-dir:' + options.out!r}, pretrained=True)",
        "transformers": f"from_pretrained({options.out!r}) of an auto class of Transformers, after `import hiap`",
    }.get(options.format)
    times = [f"{ms:.2f} ms in {name}" for name, ms in report.get("ms", {}).items()]
    print(f"saved in {options.out}: {report['bytes'] / 1e6:.1f} MB, {report['precision']}")
    if options.quantize:
        found = report["agreement"]
        same = "" if found["top1_agreement"] is None else f"; the same class for {found['top1_agreement']:.1%}"
        print(f"measured    logits within {found['difference']:.1e} of PyTorch's (relative){same}")
        print(f"            on {found['images']} {found['kind']} images; {report['bytes_fp32'] / 1e6:.1f} MB in fp32")
    else:
        print(f"checked     logits within {worst:.1e} of PyTorch's (relative; allowed {report['tolerance']:g})")
    if times:
        print(f"batch {report['timed_batch']:<5} {', '.join(times)}")
    if load:
        print(f"load with   {load}")
    return 0


def _batch(text: str) -> int | None:
    return None if text == "dynamic" else positive(text)
