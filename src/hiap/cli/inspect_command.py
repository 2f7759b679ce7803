"""`hiap inspect`: what a model is made of, where its MACs go, and what one percent of them is."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hiap.cli.arguments import positive
from hiap.cli.bars import bar
from hiap.cli.lookup import check_one_size
from hiap.errors import InputError

if TYPE_CHECKING:
    from hiap.nn.compact import Widths

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Show the widths of a model as bars, where its MACs go, and what one more percent would cost."
EXAMPLES = """examples:
  hiap inspect runs/deit_s
  hiap inspect deit_small_patch16_224
"""


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument("model", help="a folder of a run or of a compact model, or the timm name of a dense one")
    command.add_argument("--img-size", type=positive, help="input size of a dense model; its own by default")


def run(options: argparse.Namespace) -> int:
    if Path(options.model).is_dir():
        if options.img_size:
            raise InputError(f"--img-size is for dense models given by name; {options.model} is a folder")
        check_one_size(Path(options.model))
        return _inspect_folder(Path(options.model))
    from hiap.cli.lookup import random_model
    from hiap.models.registry import widths_of
    from hiap.pruning.count import geometry

    model = random_model(options)
    widths = widths_of(model)
    size = geometry(model)
    _print_blocks([(w, w) for w in widths])
    _print_parts(size, widths, widths)
    _print_prices(size, widths)
    return 0


def _inspect_folder(folder: Path) -> int:
    from hiap.pruning.count import geometry
    from hiap.report.gathering import gather
    from hiap.report.margins import one_percent

    found = gather(folder)
    for note in found.missing:
        print(f"note: {note}")
    if not found.blocks:
        return 0
    size = found.record.get("geometry")
    if size is None:
        from hiap.pruning.saving import load

        size = geometry(load(folder if (folder / "config.json").is_file() else folder / "compact"))
    now, dense = [block.now for block in found.blocks], found.dense
    _print_blocks(list(zip(now, dense, strict=True)))
    _print_parts(size, now, dense)
    _print_prices(size, now)
    for sentence in one_percent(found.record):
        print(sentence)
    return 0


def _print_blocks(pairs: list[tuple[Widths, Widths]]) -> None:
    """One line a block, with bars for heads and neurons."""
    print("block  heads                 q/k dims   value dims   neurons")
    for i, (now, dense) in enumerate(pairs):
        heads = _cell(now.heads, dense.heads)
        dims = [f"{one}/{of}" if now.heads else "-" for one, of in _dims(now, dense)]
        bars = [bar((one or 0) / of if of else 0.0, n) for one, of, n in _branches(now, dense)]
        print(
            f"{i:5}  {bars[0]} {heads:>7}  {dims[0]:>8}   {dims[1]:>10}   {bars[1]} {_cell(now.neurons, dense.neurons)}"
        )


def _dims(now: Widths, dense: Widths) -> list[tuple[int, int]]:
    return [(now.qk_dim, dense.qk_dim), (now.value_dim, dense.value_dim)]


def _branches(now: Widths, dense: Widths) -> list[tuple[int | None, int | None, int]]:
    return [(now.heads, dense.heads, 12), (now.neurons, dense.neurons, 24)]


def _cell(now: int | None, dense: int | None) -> str:
    return "gone" if now is None else f"{now}/{dense}"


def macs_by_part(size: dict[str, Any], widths: list[Widths]) -> dict[str, int]:
    """MACs of the parts of a network of these widths; together they are those of the network."""
    tokens = size.get("merged") or [[size["tokens"], size["tokens"], 0]] * len(widths)
    parts = {"outside the blocks": size["fixed_macs"]}
    parts |= dict.fromkeys(("attention, projections", "attention, scores and values", "FFN"), 0)
    parts |= {"token merging": 0} if "merged" in size else {}
    for one, dim, glu, (n, left, compared) in zip(widths, size["dims"], size["glu"], tokens, strict=True):
        inner = (one.heads or 0) * (one.qk_dim + one.value_dim)
        parts["attention, projections"] += 2 * n * dim * inner
        parts["attention, scores and values"] += n * n * inner
        parts["FFN"] += (one.neurons or 0) * (2 + glu) * left * dim
        if compared and one.heads:
            parts["token merging"] += compared * one.qk_dim
    return parts


def _print_parts(size: dict[str, Any], now: list[Widths], dense: list[Widths]) -> None:
    from hiap.budget.cost import in_words

    parts = macs_by_part(size, now)
    before = dict.fromkeys(parts, 0) | macs_by_part({k: v for k, v in size.items() if k != "merged"}, dense)
    total, whole = sum(parts.values()), sum(before.values())
    print(f"\nMACs  {in_words(total)}" + (f", {total / whole:.1%} of {in_words(whole)}" if total != whole else ""))
    for name, count in parts.items():
        was = f"  of {in_words(before[name])}" if count != before[name] else ""
        print(f"  {name:30} {bar(count / max(total, 1), 24)} {count / max(total, 1):6.1%}  {in_words(count):>10}{was}")


def _print_prices(size: dict[str, Any], widths: list[Widths]) -> None:
    """What one percent of the MACs of the network is, in units of one block."""
    from hiap.budget.cost import in_words

    one = sum(macs_by_part(size, widths).values()) / 100
    n, dim, glu = size["tokens"], size["dims"][0], size["glu"][0]
    per_dim, neuron = 2 * n * dim + n * n, (2 + glu) * n * dim
    head = next(((w.qk_dim + w.value_dim) * per_dim for w in widths if w.heads), 0)
    heads = f", or {one / head:.2g} heads" if head else ""
    print(f"\none percent of these MACs, {in_words(one)}, is about {one / neuron:.0f} neurons{heads} of a block")
