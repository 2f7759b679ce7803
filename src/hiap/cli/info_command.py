"""`hiap info`: what a compact model is made of."""

from __future__ import annotations

import argparse
from pathlib import Path

from hiap.cli.lookup import compact_folder
from hiap.training.rungs import read_rungs, rung_table

__all__ = ["EXAMPLES", "HELP", "add_arguments", "run"]

HELP = "Show what a saved compact model is made of, block by block, or the sizes of a run with several targets."
EXAMPLES = "example:\n  hiap info runs/deit_s/compact"


def add_arguments(command: argparse.ArgumentParser, every_option: bool) -> None:
    command.add_argument("folder", help="a folder written by hiap.save, or that of a run")


def run(options: argparse.Namespace) -> int:
    import hiap
    from hiap.budget.cost import in_words
    from hiap.models.registry import family_of
    from hiap.pruning.count import macs_of_widths
    from hiap.pruning.extract import provenance_of
    from hiap.pruning.merging import unmerged
    from hiap.speed.deployed import read_speeds
    from hiap.training.features import feature_width

    if rungs := read_rungs(Path(options.folder)):
        print("\n".join(rung_table(rungs)))
        return 0
    folder = compact_folder(options.folder)
    model = hiap.load(folder)
    family, provenance = family_of(model), provenance_of(model)
    assert provenance is not None
    macs, dense = hiap.macs(model), macs_of_widths(unmerged(model), provenance.dense)
    params = sum(p.numel() for p in model.parameters())
    print(f"MACs        {in_words(macs)}, {macs / dense:.1%} of {in_words(dense)}")
    print(f"parameters  {in_words(params)}")
    if merging := family.merging(model):
        print(f"merging     {merging[0]} tokens in each block; the MACs are those with merging")
    classes = family.classes(model)
    print(f"classes     {classes or f'none: a backbone with {feature_width(model)} features'}")
    print(f"checked     logits within {provenance.logit_difference:.1e} of the gated model's (relative)")
    for one in read_speeds(folder.parent / "report.json"):
        times = f"{one.dense_ms:.2f} ms dense, {one.compact_ms:.2f} ms compact, {one.comparison()}"
        print(f"batch {one.batch:<5} {times} ({one.precision}, {one.compact_form})")
    print("block  heads  qk_dim  value_dim  neurons")
    for i, site in enumerate(family.sites(model)):
        cells = [site.widths.heads, site.widths.qk_dim, site.widths.value_dim, site.widths.neurons]
        heads, qk_dim, value_dim, neurons = ("-" if cell is None else str(cell) for cell in cells)
        print(f"{i:5}  {heads:>5}  {qk_dim:>6}  {value_dim:>9}  {neurons:>7}")
    return 0
