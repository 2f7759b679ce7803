"""`hiap export`: a saved model as a file for another runtime."""

from __future__ import annotations

import argparse
import sys

from hiap.cli.arguments import positive
from hiap.cli.lookup import compact_folder
from hiap.export.formats import FORMATS, PRECISIONS_OUT

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Write a saved compact model as a file for another runtime. The file is run and compared with PyTorch first."
EXAMPLES = """examples:
  hiap export runs/mine -o mine.onnx
  hiap export runs/mine --format openvino --precision fp16 -o mine.xml
  hiap export runs/mine --format pt2 --batch 8 -o mine.pt2
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    add = command.add_argument
    add("folder", help="a folder written by hiap.save, or that of a run")
    add("--format", choices=FORMATS, help="by default what the name of the file says: .onnx, .xml (OpenVINO) or .pt2")
    add("--precision", choices=PRECISIONS_OUT, default="fp32", help="of the weights (default fp32)")
    batch = "images at a time: a number, or dynamic for any number (default dynamic)"
    add("--batch-size", "--batch", dest="batch", type=_batch, default=None, metavar="N", help=batch)
    add("-o", "--out", dest="out", metavar="FILE", required=True, help="file to write; a report goes to FILE.json")
    add("--overwrite", action="store_true", help="replace files that are there")


def run(options: argparse.Namespace) -> int:
    import hiap

    report = hiap.export_model(
        hiap.load(compact_folder(options.folder)),
        options.out,
        options.format,
        options.precision,
        options.batch,
        options.overwrite,
        say=lambda text: print(text, file=sys.stderr),
    )
    worst, (own, other) = max(report["difference"].values()), report["ms"].items()
    print(f"saved in {options.out}: {report['bytes'] / 1e6:.1f} MB, {report['precision']}")
    print(f"checked     logits within {worst:.1e} of PyTorch's (relative; allowed {report['tolerance']:g})")
    print(f"batch {report['timed_batch']:<5} {own[1]:.2f} ms in {own[0]}, {other[1]:.2f} ms in {other[0]}")
    return 0


def _batch(text: str) -> int | None:
    return None if text == "dynamic" else positive(text)
