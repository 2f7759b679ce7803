"""The paper's study of its two penalties, on ViT-Ti and Tiny-ImageNet: five ratios of macro to micro.

    python research/penalty_ratios.py run --data DIR --weights FILE --out RUNS [--ratios 2:1,5:1] [--strength 12]
    python research/penalty_ratios.py show --out RUNS --plots DIR

`run` trains in the paper's way: logits learned by gradient, penalties instead of a target, noise and the whole
temperature schedule, the gates hardened at the end. What differs is the scale: the schedule of 300 epochs is squeezed
into `--epochs`, and to have the same say in a shorter time the penalties are `--strength` times as large. The dense
model is the teacher. A run that is there is not repeated; every ratio is a folder that `hiap report` takes.

`show` draws how the networks came about and accuracy against MACs, and prints what the paper's findings are judged by.
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch

from hiap.report.decisions import MACRO_UNITS, decisions_of
from hiap.report.gathering import RunData, gather
from hiap.training.config import read_config
from hiap.training.loop import prune
from prune_tiny_imagenet import STARTS, tenths

RATIOS = {  # as the paper writes them, with our recipe of each
    "macro-only": "ablation_macro_only",
    "5:1": "ablation_5to1",
    "2:1": "ablation_2to1",
    "1.5:1": "ablation_1.5to1",
    "micro-only": "ablation_micro_only",
}
MICRO_UNITS = ("value_dims", "neurons")
EDGE = 2  # first blocks, which the paper excepts
GRID = {"sharex": True, "sharey": True, "squeeze": False}


def run(options: argparse.Namespace) -> None:
    """Train the ratios that are not there yet."""
    model, size, (mean, std) = STARTS["vit_tiny"]
    own = {"model": model, "img_size": size, "mean": list(mean), "std": list(std), "weights": options.weights}
    own |= {"teacher": "self", "epochs": options.epochs, "stop_after": None, "warmup_epochs": options.epochs / 60}
    own |= {"batch_size": 512, "lr": 2e-4, "gate_lr": 1e-2, "mixup": 0.0, "cutmix": 0.0, "seed": options.seed}
    for ratio in options.ratios.split(","):
        out = options.out / folder_of(ratio)
        if (out / "report.json").is_file():
            print(f"{ratio}: there already", flush=True)
            continue
        config = read_config(RATIOS[ratio], own)
        strength = options.strength
        config.lambda_macro, config.lambda_micro = strength * config.lambda_macro, strength * config.lambda_micro
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        result = prune(config, out, data=tenths(options.data, config, True, device, options.limit))
        share = result.record["macs"] / result.record["dense_macs"]
        print(f"{ratio}: {result.record['top1']:.2f} %, {share:.1%} of the MACs", flush=True)


def folder_of(ratio: str) -> str:
    return ratio.replace(":", "to")


def show(options: argparse.Namespace) -> None:
    """Draw the plots and print the table."""
    runs = {
        ratio: gather(options.out / folder_of(ratio)) for ratio in RATIOS if (options.out / folder_of(ratio)).is_dir()
    }
    if not runs:
        raise SystemExit(f"penalty_ratios.py: {options.out} holds none of the runs {', '.join(RATIOS)}")
    options.plots.mkdir(parents=True, exist_ok=True)
    evolution(runs, options.plots / "penalty_ratios.png")
    trade_off(runs, options.plots / "penalty_pareto.png")
    found = {ratio: findings(one) for ratio, one in runs.items()}
    names = list(next(iter(found.values())))
    print("| | " + " | ".join(found) + " |\n|---|" + "---|" * len(found))
    for name in names:
        print(f"| {name} | " + " | ".join(str(one[name]) for one in found.values()) + " |")


def findings(one: RunData) -> dict[str, Any]:
    """What the paper's findings are judged by."""
    blocks, record = one.blocks, one.record
    heads = [len(block.heads) for block in blocks]
    ffns = [block.now.neurons for block in blocks if block.now.neurons]
    values = [block.now.value_dim for block in blocks if block.now.heads]
    later = [block.now.value_dim for block in blocks[EDGE:] if block.now.heads]
    scores = [line["top1"] for line in one.metrics if "top1" in line]
    low = int(np.argmin(scores))
    decided = decisions_of(one.snapshots, one.searched)
    assert decided is not None
    back = {kind: f"{decided.returned.get(kind, 0)} of {decided.units[kind]}" for kind in ("heads", "ffns", "neurons")}
    settled = [decided.settled(kinds, 0.95) for kinds in (MACRO_UNITS, MICRO_UNITS)]
    return {
        "top-1": f"{record['top1']:.2f}",
        "MACs": f"{record['macs'] / record['dense_macs']:.1%}",
        "heads kept": f"{sum(heads)} of {sum(block.dense.heads or 0 for block in blocks)}",
        "FFNs kept": f"{len(ffns)} of {len(blocks)}",
        "neurons of those FFNs": f"{np.mean(ffns or [0]) / (blocks[0].dense.neurons or 1):.0%}",
        "value dims of the heads, first two blocks": " ".join(str(v) for v in values[: len(values) - len(later)])
        or "-",
        "value dims of the heads, other blocks": f"{min(later)} to {max(later)}" if later else "-",
        "dip of the accuracy": f"{max(scores[-1] - scores[low], 0):.1f} in epoch {low + 1}",
        "95 % of macro decisions final": f"epoch {settled[0]:.1f}",
        "95 % of micro decisions final": f"epoch {settled[1]:.1f}",
        **{f"closed {kind} that came back": value for kind, value in back.items()},
    }


def evolution(runs: dict[str, RunData], path: Path) -> None:
    """A row for heads, value dims and neurons, a column for each ratio; blocks upwards, time to the right."""
    kinds = {"heads": "heads", "value_dims": "value dims", "neurons": "neurons"}
    figure, axes = plt.subplots(len(kinds), len(runs), figsize=(2.6 * len(runs), 6.4), **GRID)
    picture = None
    for column, (ratio, one) in enumerate(runs.items()):
        ends = [snapshot["at"] for snapshot in one.snapshots]
        for row, (kind, label) in enumerate(kinds.items()):
            counts = np.array([snapshot[kind] for snapshot in one.snapshots], dtype=float).T  # (blocks, time)
            if counts.ndim == 3:
                counts = counts.sum(0)
            ax = axes[row][column]
            limits = (ends[0], ends[-1], 0.5, len(counts) + 0.5)
            picture = ax.imshow(
                counts / counts[:, :1].max(),
                **{"origin": "lower", "aspect": "auto", "extent": limits, "vmin": 0, "vmax": 1, "cmap": "Blues"},
                interpolation="nearest",
            )
            if row == 0:
                ax.set_title(ratio, fontsize=11)
            if column == 0:
                ax.set_ylabel(f"{label}\nblock", fontsize=10)
            if row == len(kinds) - 1:
                ax.set_xlabel("epoch", fontsize=10)
            ax.set_yticks([1, 4, 8, 12])
    bar = figure.colorbar(picture, ax=axes, fraction=0.02, pad=0.015)
    bar.ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    bar.set_label("kept")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def trade_off(runs: dict[str, RunData], path: Path) -> None:
    """Accuracy with hard gates against MACs: the way of each ratio, and where it ends."""
    figure, ax = plt.subplots(figsize=(6.4, 4.2))
    for i, (ratio, one) in enumerate(runs.items()):
        lines = [line for line in one.metrics if "top1" in line and "hard_macs" in line]
        x, y = [line["hard_macs"] for line in lines], [line["top1"] for line in lines]
        ax.plot(x, y, color=f"C{i}", alpha=0.5, linewidth=1, marker=".", markersize=4)
        share = one.record["macs"] / one.record["dense_macs"]
        ax.plot([share], [one.record["top1"]], color=f"C{i}", marker="o", markersize=8, linestyle="", label=ratio)
    ax.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    ax.set_xlabel("MACs, share of the dense model")
    ax.set_ylabel("top-1 accuracy, percent")
    ax.grid(alpha=0.3)
    ax.legend(title="macro : micro", frameon=False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    train = commands.add_parser("run", help=run.__doc__)
    train.set_defaults(go=run)
    train.add_argument("--data", type=Path, required=True, help="folder made by tiny_imagenet.py")
    train.add_argument("--weights", required=True, help="of the dense ViT-Ti")
    train.add_argument("--ratios", default=",".join(RATIOS), help="some of " + ", ".join(RATIOS))
    train.add_argument("--epochs", type=int, default=10)
    train.add_argument("--strength", type=float, default=12.0, help="factor of both penalties")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--limit", type=int, default=50, help="images of a class in each tenth; fewer for a quick try")
    draw = commands.add_parser("show", help=show.__doc__)
    draw.set_defaults(go=show)
    draw.add_argument("--plots", type=Path, required=True, help="folder for the plots")
    for command in (train, draw):
        command.add_argument("--out", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
