"""Tiny-ImageNet as the comparisons read it: made from the public archive, and read back.

    python research/tiny_imagenet.py tiny-imagenet-200.zip --out DIR

The archive is the public one (http://cs231n.stanford.edu/tiny-imagenet-200.zip, 100,000 training and 10,000 validation
images of 64 pixels, 200 classes). DIR gets ten contact sheets `train_0.jpg` to `train_9.jpg`, each with a tenth of the
training images, `val.jpg` and `classes.json`. A sheet has one row of 64-pixel tiles for each class, in the order of the
WordNet ids, and one column for each image, in the order of the numbers in the file names: `train_0.jpg` has images 0 to
49 of every class, `train_9.jpg` images 450 to 499. Learning rates are chosen on `train_9.jpg`, the held-out tenth.
Sheets are JPEG of quality 75, as those behind the published numbers; `--quality 100` loses less.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from zipfile import BadZipFile, ZipFile

import numpy as np
import torch
from PIL import Image

TILE, CLASSES, TENTHS = 64, 200, 10
JPEG = {"quality": 75, "optimize": True, "progressive": True}


def read_tiles(sheet: Path, columns: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images (N, 3, 64, 64) as bytes and their labels: these columns of every row of a contact sheet."""
    pixels = torch.from_numpy(np.array(Image.open(sheet).convert("RGB")))
    tiles = pixels.view(len(pixels) // TILE, TILE, -1, TILE, 3).permute(0, 2, 4, 1, 3)  # (class, column, 3, 64, 64)
    chosen = tiles[:, list(columns)]
    labels = torch.arange(len(chosen)).repeat_interleave(chosen.shape[1])
    return chosen.flatten(0, 1), labels


class Archive:
    """The public archive, opened.

    Attributes:
        classes: WordNet ids, sorted: class i is the i-th of them.
        train, val: names of the images of each class, in the order of their numbers.

    Raises:
        ValueError: the file has another layout, or the classes have different numbers of images.
    """

    def __init__(self, path: Path) -> None:
        try:
            self.zip = ZipFile(path)
        except BadZipFile as error:
            raise ValueError(f"{path} is no zip archive: is the download complete?") from error
        names = self.zip.namelist()
        roots = [name.removesuffix("wnids.txt") for name in names if Path(name).name == "wnids.txt"]
        if len(roots) != 1:
            raise ValueError(f"{path} must have one wnids.txt, as tiny-imagenet-200.zip has; found {len(roots)}")
        (self.root,) = roots
        self.classes = sorted(self._text("wnids.txt").split())
        self.train: dict[str, list[str]] = {wnid: [] for wnid in self.classes}
        pattern = re.compile(re.escape(self.root) + r"train/(n\d+)/images/[^/]+\.JPEG")
        for name in names:
            if (match := pattern.fullmatch(name)) and match[1] in self.train:
                self.train[match[1]].append(name)
        self.val = defaultdict(list)
        for line in self._text("val/val_annotations.txt").splitlines():
            image, wnid = line.split("\t")[:2]
            self.val[wnid].append(f"{self.root}val/images/{image}")
        for part, found in (("training", self.train), ("validation", self.val)):
            counts = {len(found[wnid]) for wnid in self.classes}
            if len(counts) != 1 or 0 in counts:
                raise ValueError(
                    f"every class must have the same number of {part} images; found {min(counts)} to {max(counts)}"
                )
            for wnid in self.classes:
                found[wnid].sort(key=_number)
        if (count := len(self.train[self.classes[0]])) % TENTHS:
            raise ValueError(f"the training images of a class must divide into ten equal parts; found {count}")

    def _text(self, name: str) -> str:
        try:
            return self.zip.read(self.root + name).decode()
        except KeyError:
            raise ValueError(f"{self.zip.filename} has no {name}, as tiny-imagenet-200.zip has") from None

    def names(self) -> list[str]:
        """What the classes are called, in their order."""
        words = dict(line.split("\t", 1) for line in self._text("words.txt").splitlines() if "\t" in line)
        return [words.get(wnid, wnid) for wnid in self.classes]

    def sheet(self, rows: Sequence[Sequence[str]]) -> Image.Image:
        """A contact sheet of these images."""
        sheet = Image.new("RGB", (TILE * len(rows[0]), TILE * len(rows)))
        for y, row in enumerate(rows):
            for x, name in enumerate(row):
                with Image.open(io.BytesIO(self.zip.read(name))) as image:
                    if image.size != (TILE, TILE):
                        raise ValueError(f"{name} must have {TILE} x {TILE} pixels; found {image.size}")
                    sheet.paste(image.convert("RGB"), (TILE * x, TILE * y))  # some are grey
        return sheet


def _number(name: str) -> tuple[int, str]:
    """The number at the end of a file name: n01443537_12.JPEG comes after n01443537_2.JPEG."""
    match = re.search(r"(\d+)\.JPEG$", name)
    return (int(match[1]) if match else -1, name)


def convert(path: Path, out: Path, quality: int = 75) -> None:
    """Write the contact sheets and the list of classes of an archive."""
    archive = Archive(path)
    out.mkdir(parents=True, exist_ok=True)
    tenth = len(archive.train[archive.classes[0]]) // TENTHS
    parts = {
        f"train_{k}": [archive.train[wnid][k * tenth : (k + 1) * tenth] for wnid in archive.classes]
        for k in range(TENTHS)
    }
    parts["val"] = [archive.val[wnid] for wnid in archive.classes]
    for name, rows in parts.items():
        archive.sheet(rows).save(out / f"{name}.jpg", **JPEG | {"quality": quality})
        print(f"{out / name}.jpg: {len(rows)} classes, {len(rows[0])} images each", flush=True)
    named = [{"wnid": wnid, "name": name} for wnid, name in zip(archive.classes, archive.names(), strict=True)]
    (out / "classes.json").write_text(json.dumps(named, indent=0) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path, help="tiny-imagenet-200.zip")
    parser.add_argument("--out", type=Path, required=True, help="folder for the contact sheets")
    parser.add_argument("--quality", type=int, default=75, help="of the JPEG files")
    options = parser.parse_args()
    try:
        convert(options.archive, options.out, options.quality)
    except (ValueError, OSError) as error:
        raise SystemExit(f"tiny_imagenet.py: {error}") from error


if __name__ == "__main__":
    main()
