"""An export in a process of its own that is killed at a moment: killed_export.py MOMENT FORMAT OUT.

MOMENT is the beginning of a progress message, "quantize" (in the middle of an INT8 file), or the number of the rename
that does not happen any more.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from conftest import make
from hiap.atomic import scratch_beside
from hiap.export.exporting import export_model, publish
from hiap.export.formats import find_format


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_rename(number: int) -> None:
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename":
            seen[0] += 1
            if seen[0] == number:
                die()

    sys.addaudithook(hook)


def write(program: Any, file: Path, *rest: Any) -> None:
    file.write_bytes(b"fp32")


def quantize(file: Path, out: Path, *rest: Any) -> None:
    out.write_bytes(b"half of a file")
    die()


def main(moment: str, form: str, out: Path) -> None:
    torch.set_num_threads(1)
    if moment.isdecimal():
        die_at_rename(int(moment))
    if form == "two files":
        with scratch_beside(out) as folder:
            made = [folder / out.name, folder / out.with_suffix(".bin").name, folder / f"{out.name}.json"]
            for file in made:
                file.write_text("new")
            publish(made[0], [made[1]], made[2], out)
        return
    options: dict[str, Any] = {}
    if moment == "quantize":
        kind = find_format(form)
        kind.write, kind.quantize = write, quantize  # type: ignore[method-assign]
        options = {"quantize": "int8"}
    model = make("augreg", depth=1).float()
    export_model(
        model, out, form, overwrite=True, say=lambda text: die() if text.startswith(moment) else None, **options
    )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
