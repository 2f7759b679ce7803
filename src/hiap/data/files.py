"""Lists of image files: folders with one folder for each class, CSV files, and parts of them."""

from __future__ import annotations

import csv
import os
import sys
import warnings
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from timm.data.readers.img_extensions import get_img_extensions
from timm.utils.misc import natural_key

from hiap.data.images import mix_seed, named
from hiap.errors import InputError

__all__ = [
    "SHARE",
    "Files",
    "Listing",
    "folder_parts",
    "is_labelled",
    "list_folder",
    "list_images",
    "read_table",
    "split_off",
]

EXTENSIONS = (".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm", ".pgm")  # of images, besides timm's own
VALIDATION = ("val", "validation", "valid", "test")  # names of the validation part; the first found is taken
HINT = "without a validation part, pass --val-split 0.1 to take a tenth of the training images"
UNLABELLED = "unlabelled"  # the one class of images whose labels are not read
LOOSE = chr(sys.maxunicode)  # the class of images in no folder of their own; it sorts last, so it moves no other class
SHARE, MOST = 0.1, 5000  # of such images, and how many at most, to validate on where nothing else is said
Listing = list[tuple[str, str]]  # paths and the names of their classes


class Files:
    """Images by their paths, with the label of each.

    Args:
        listing: paths and names of classes.
        class_names: in the order of their labels.
        root: what paths are relative to in messages.
    """

    def __init__(self, listing: Listing, class_names: list[str], root: str) -> None:
        index = {name: label for label, name in enumerate(class_names)}
        self.paths = [path for path, _ in listing]
        self.labels = [index[name] for _, name in listing]
        self.class_names, self.root = class_names, root

    def __len__(self) -> int:
        return len(self.paths)

    def name(self, index: int) -> str:
        return os.path.relpath(self.paths[index], self.root)


def folder_parts(data: str, share: float | None) -> tuple[bool, list[str]]:
    """Whether a folder directly holds the folders of classes, and the names of its validation parts.

    Raises:
        ValueError: the folder is not of a form that `list_folder` reads.
    """
    found = sorted(entry.name for entry in os.scandir(data) if entry.is_dir())
    parts = [name for name in VALIDATION if name in found]
    whole = "train" not in found
    if (share is None and (whole or not parts)) or (whole and (parts or not found)):
        hint = f"; {HINT}" if share is None else ""
        raise InputError(
            f"{data} must hold the folders train and val, each with one folder for every class; found {found}{hint}"
        )
    return whole, parts


def list_folder(data: str, share: float | None) -> tuple[Files, Files]:
    """The training and validation images of a folder.

    It holds `train` and one of `val`, `validation`, `valid` and `test`, with a folder for each class; or, if a share is
    given, just the folders of classes.

    Args:
        share: of the training images, to validate on; a validation folder is then not used.

    Raises:
        ValueError: the folder is not of this form.
    """
    whole, parts = folder_parts(data, share)
    train = _walk(data if whole else os.path.join(data, "train"), data)
    if share is not None:
        class_names = _class_names(train, data)
        return _parted(train, class_names, data, share)
    if len(set(parts) - {"test"}) > 1:
        warnings.warn(f"{data} has the folders {', '.join(parts)}: {parts[0]} is used for validation", stacklevel=2)
    val = _walk(os.path.join(data, parts[0]), data)
    class_names = _class_names(train, data)
    return Files(train, class_names, data), Files(_trained(val, class_names, data), class_names, data)


def list_images(data: str, share: float | None) -> tuple[Files, Files]:
    """The training and validation images of a folder whose classes, if it has any, do not matter.

    It holds images, at any depth; or `train` with images and, to validate on, one of `val`, `validation`, `valid` and
    `test`. A folder called `train` among others, none of them for validation, is a class.

    Args:
        share: of the images of each folder, to validate on; by default the validation folder or, where there is none,
            a tenth, about 5,000 images at most.

    Raises:
        ValueError: there are no two images.
    """
    folders = {entry.name for entry in os.scandir(data) if entry.is_dir() and not entry.name.startswith(".")}
    parts = [name for name in VALIDATION if name in folders]
    split = "train" in folders and (bool(parts) or len(folders) == 1)  # else `train` is a class like the others
    if split and (others := folders - {"train", *VALIDATION}):
        warnings.warn(f"{data} has the folders train and {parts[0]}; left out: {named(sorted(others))}", stacklevel=2)
    train = _walk(os.path.join(data, "train") if split else data, data, labels=False)
    val = _walk(os.path.join(data, parts[0]), data, labels=False) if split and parts and share is None else []
    return _unlabelled(train, val, data, data, share)


def read_table(data: str, share: float | None, labels: bool = True) -> tuple[Files, Files]:
    """The training and validation images of a CSV file: path, label and, where it has one, split.

    Paths are relative to its folder. A first line `path,label` or `path,label,split` is a header.

    Args:
        share: of the training images, to validate on; lines with another split are then not used.
        labels: whether they matter. If not, they may be empty, `path` may be the only column, and a tenth is taken to
            validate on where the file has no validation images and no share is given.

    Raises:
        ValueError: a line or a file is missing or wrong.
    """
    root = os.path.dirname(os.path.abspath(data))
    parts: dict[str, Listing] = defaultdict(list)
    width, widths = 0, (2, 3) if labels else (1, 2, 3)
    heads = [["path", "label"]] if labels else [["path", "label"], ["path"]]
    forms = f"{'' if labels else 'path, '}path,label or path,label,split"
    with open(data, newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        for cells in _cells(rows, data):
            if not any(cells) or (not width and [cell.lower() for cell in cells[:2]] in heads):
                continue
            width = width or len(cells)
            if len(cells) != width or width not in widths or not all(cells if labels else cells[:1] + cells[2:]):
                raise InputError(f"line {rows.line_num} of {data} must be {forms}; found {cells}")
            part = cells[2].lower() if width == 3 else "train"
            if part not in ("train", *VALIDATION):
                raise InputError(f"line {rows.line_num} of {data}: the split must be train or val; found {cells[2]!r}")
            parts[part].append((os.path.join(root, cells[0]), cells[1] if width > 1 else UNLABELLED))
    train, other = parts["train"], parts["val"] + parts["validation"] + parts["valid"] or parts["test"]
    if not train:
        raise InputError(
            f"{data} must list training images, one per line as {'path,label' if labels else 'path'}; found none"
        )
    missing = [path for path, _ in (*train, *other) if not os.path.isfile(path)]
    if missing:
        told = named([os.path.relpath(path, root) for path in missing])
        raise InputError(f"{len(missing)} files of {data} are missing: {told}; paths are relative to {root}")
    if not labels:
        return _unlabelled(train, other if share is None else [], data, root, share)
    class_names = _class_names(train, data)
    if share is not None:
        return _parted(train, class_names, root, share)
    if not other:
        raise InputError(f"{data} has no validation images, lines with val as a third column; {HINT}")
    return Files(train, class_names, root), Files(_trained(other, class_names, data), class_names, root)


def is_labelled(data: str, share: float | None) -> bool:
    """Whether a folder or a CSV file can be read with labels."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (list_folder if os.path.isdir(data) else read_table)(data, share)
    except (InputError, OSError):
        return False
    return True


def _cells(rows: Iterable[list[str]], data: str) -> Iterator[list[str]]:
    try:
        for row in rows:
            yield [cell.strip() for cell in row]
    except (csv.Error, UnicodeDecodeError) as error:
        raise InputError(f"{data} is not a CSV file in UTF-8: {error}") from error


def _parted(train: Listing, class_names: list[str], root: str, share: float) -> tuple[Files, Files]:
    first, second = split_off([name for _, name in train], share)
    kept, taken = ([train[i] for i in chosen] for chosen in (first, second))
    return Files(kept, class_names, root), Files(taken, class_names, root)


def _unlabelled(train: Listing, val: Listing, data: str, root: str, share: float | None) -> tuple[Files, Files]:
    """The training and validation images of listings whose classes do not matter.

    What is split off is a share of each class nevertheless, so that `hiap evaluate` finds the same images.

    Args:
        val: empty where a share of the training images is to be taken; by default a tenth, at most 5,000.
    """
    if not val:
        if len(train) < 2:
            raise InputError(f"{data} must hold at least two images, to train and to validate on; found {len(train)}")
        names = [name for _, name in train]
        names = names if len(set(names)) < len(names) else [UNLABELLED] * len(names)  # no class has two
        first, second = split_off(names, min(SHARE, MOST / len(train)) if share is None else share)
        train, val = [train[i] for i in first], [train[i] for i in second]
    one, other = (Files([(path, UNLABELLED) for path, _ in part], [UNLABELLED], root) for part in (train, val))
    return one, other


def split_off(labels: Sequence[int | str], share: float) -> tuple[list[int], list[int]]:
    """Indices for training and for validation: a share of each class, always the same images.

    They do not depend on the seed of a run, so that runs with other seeds, and `hiap evaluate`, use the same images.
    Every class of two images or more has images in both parts; a class of one image is for training.

    Raises:
        ValueError: no class has two images.
    """
    members: dict[int | str, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        members[label].append(index)
    taken: set[int] = set()
    for number, label in enumerate(sorted(members, key=str)):
        own = members[label]
        generator = torch.Generator("cpu").manual_seed(mix_seed(number))
        mixed = torch.randperm(len(own), generator=generator, device="cpu").tolist()
        count = min(max(1, round(share * len(own))), len(own) - 1)
        taken.update(own[i] for i in mixed[:count])
    if not taken:
        raise InputError("no class has two images, so that none can be taken for validation")
    return [i for i in range(len(labels)) if i not in taken], sorted(taken)


def _walk(folder: str, root: str, labels: bool = True) -> Listing:
    """The images below a folder, in timm's order; the name of an image's own folder is its class.

    Images that lie right in the folder itself have no class. They are left out, unless labels do not matter.

    Every directory is read once, so that links cannot lead in circles, and under its own name rather than that of a
    link. Only regular files count, since opening another kind might wait for ever. Hidden files and folders do not.
    """
    types = (*get_img_extensions(), *EXTENSIONS)
    found: Listing = []
    stray: Listing = []  # in no folder of a class
    empty, seen = [], set()
    direct, linked = deque([folder]), deque[str]()
    while direct or linked:
        place = direct.popleft() if direct else linked.popleft()
        status = os.stat(place)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        before = len(found)
        label = os.path.basename(place) if place != folder else "" if labels else LOOSE
        folders = []
        for entry in os.scandir(place):
            try:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    folders.append(entry)
                elif entry.name.lower().endswith(types) and entry.is_file():
                    (found if label else stray).append((entry.path, label))
            except OSError:  # a link that leads to itself
                continue
        for entry in sorted(folders, key=lambda entry: entry.name):
            (linked if entry.is_symlink() else direct).append(entry.path)
        if not folders and len(found) == before:
            empty.append(os.path.relpath(place, root))
    if not found:
        raise InputError(
            f"--data {root!r} cannot be read: Found 0 images in {'the class folders of ' if labels else ''}{folder}; "
            f"the kinds are {', '.join(types)}"
        )
    if empty and labels:
        warnings.warn(f"there is no image in {named(sorted(empty))}: it does not count as a class", stacklevel=4)
    if stray:
        names = named(sorted(os.path.relpath(path, root) for path, _ in stray))
        warnings.warn(f"images outside the class folders are left out: {names}", stacklevel=4)
    return sorted(sorted(found), key=lambda one: natural_key(one[0]))  # the same everywhere, where 01 is also 1


def _class_names(train: Iterable[tuple[str, str]], data: str) -> list[str]:
    names = sorted(sorted({name for _, name in train}), key=natural_key)  # 01 and 1, a and A have one key
    if len(names) < 2:
        raise InputError(
            f"{data} must have at least two classes; found {names}"
            if Path(data).is_file()
            else f"{data} must hold one folder per class in train and val, with images directly in it; found {names}"
        )
    return names


def _trained(val: Listing, class_names: list[str], data: str) -> Listing:
    if more := sorted({name for _, name in val} - set(class_names)):
        raise InputError(f"{data} has validation classes that are not in the training part: {more}")
    return val
