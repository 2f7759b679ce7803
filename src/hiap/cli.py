"""The `hiap` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="hiap",
        description="Make Vision Transformers smaller and really faster.",
        epilog="example: hiap info compact/",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", title="commands")
    info = commands.add_parser(
        "info",
        help="show what a saved compact model is made of",
        description="Show what a saved compact model is made of, block by block.",
        epilog="example: hiap info runs/deit_s/compact",
    )
    info.add_argument("folder", help="a folder written by hiap.save")
    options = parser.parse_args(arguments)
    if options.version:
        from importlib.metadata import version

        print(f"hiap {version('hiap')}")
        return 0
    if options.command is None:
        parser.print_help()
        return 0
    return _info(options.folder)


def _info(folder: str) -> int:
    import hiap
    from hiap.cost import macs_of_widths
    from hiap.families import timm as family

    try:
        model = hiap.load(folder)
    except hiap.CheckpointError as error:
        print(f"hiap: {error}", file=sys.stderr)
        return 1
    macs, dense = hiap.macs(model), macs_of_widths(model, model.hiap.dense)
    params = sum(p.numel() for p in model.parameters())
    print(f"MACs        {macs / 1e9:.4f} G, {macs / dense:.1%} of {dense / 1e9:.4f} G")
    print(f"parameters  {params / 1e6:.3f} M")
    print(f"classes     {model.num_classes}")
    print(f"checked     logits within {model.hiap.logit_difference:.1e} of the gated model's (relative)")
    print("block  heads  qk_dim  value_dim  neurons")
    for i, site in enumerate(family.sites(model)):
        cells = [site.widths.heads, site.widths.qk_dim, site.widths.value_dim, site.widths.neurons]
        heads, qk_dim, value_dim, neurons = ("-" if cell is None else str(cell) for cell in cells)
        print(f"{i:5}  {heads:>5}  {qk_dim:>6}  {value_dim:>9}  {neurons:>7}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
