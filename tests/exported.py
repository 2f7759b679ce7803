"""Networks to export, and the files they become."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

import hiap
from conftest import make
from hiap.export.formats import SUFFIXES, Opened, find_format

NAMES = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu"]


def file_of(name: str, folder: Path) -> Path:
    """A file of a format; the test is skipped where its runtime is missing."""
    kind = find_format(name)
    try:
        kind.check()
    except hiap.InputError as error:
        pytest.skip(str(error))
    return folder / f"model{kind.suffix}"


def ragged(**given: Any) -> nn.Module:
    """Unequal q/k and value widths, a block without attention and one without FFN, and a constant branch."""
    model = make("deit_distilled", **given).float()
    dims = {"value_dims": [[3, 5], [], 8], "qk_dims": [[2, 6], [], 4]}
    compact = hiap.extract(
        model, hiap.Topology.from_counts(model, heads=[2, None, 3], neurons=[40, 0, None], **dims), 1
    )
    compact.class_names = NAMES
    return compact


def open_again(file: Path) -> Opened:
    return find_format(SUFFIXES[file.suffix]).open(file, 1)
