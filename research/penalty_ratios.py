"""The paper's study of its two penalties, on ViT-Ti and Tiny-ImageNet: five ratios of macro to micro.

    python research/penalty_ratios.py run --data DIR --weights FILE --out RUNS [--ratios 2:1,5:1] [--strength 12]
    python research/penalty_ratios.py show --out RUNS [RUNS ...] --plots DIR

`run` trains in the paper's way: logits learned by gradient, penalties instead of a target, noise and the whole
temperature schedule, the gates hardened at the end. What differs is the scale: the schedule of 300 epochs is squeezed
into `--epochs`, and to have the same say in a shorter time the penalties are `--strength` times as large. The dense
model is the teacher. A run that is there is not repeated; every ratio is a folder that `hiap report` takes.

`show` draws how the networks came about and accuracy against MACs, and prints what the paper's findings are judged by.
Of several folders (one for each strength, say) all are in the plot of accuracy; the networks and the table are of the
first. A run that is not finished is only in the plot of accuracy.
"""

import argparse
from collections.abc import Sequence
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.lines import Line2D

from hiap.report.decisions import MACRO_UNITS, decisions_of
from hiap.report.gathering import RunData, gather
from hiap.training.config import read_config
from hiap.training.loop import prune
from hiap.training.snapshots import unpack
from prune_tiny_imagenet import STARTS, tenths

RATIOS = {  # as the paper writes them, with our recipe of each
    "macro-only": "ablation_macro_only",
    "5:1": "ablation_5to1",
    "2:1": "ablation_2to1",
    "1.5:1": "ablation_1.5to1",
    "micro-only": "ablation_micro_only",
}
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
    found = {folder: runs_in(folder) for folder in options.out}
    finished = {ratio: one for ratio, one in found[options.out[0]].items() if one.state == "finished"}
    if not finished:
        raise SystemExit(f"penalty_ratios.py: {options.out[0]} holds none of the runs {', '.join(RATIOS)}, finished")
    options.plots.mkdir(parents=True, exist_ok=True)
    evolution(finished, options.plots / "penalty_ratios.png")
    trade_off(found, options.plots / "penalty_pareto.png")
    columns = {ratio: findings(one) for ratio, one in finished.items()}
    print("| | " + " | ".join(columns) + " |\n|---|" + "---|" * len(columns))
    for name in next(iter(columns.values())):
        print(f"| {name} | " + " | ".join(str(one[name]) for one in columns.values()) + " |")


def runs_in(folder: Path) -> dict[str, RunData]:
    return {ratio: gather(folder / folder_of(ratio)) for ratio in RATIOS if (folder / folder_of(ratio)).is_dir()}


def findings(one: RunData) -> dict[str, Any]:
    """What the paper's findings are judged by."""
    blocks, record, last = one.blocks, one.record, one.snapshots[-1]
    heads = [len(block.heads) for block in blocks]
    ffns = [count for count in last["neurons"] if count]
    values = [
        f"{dims / kept:.0f}" if kept else "-" for dims, kept in zip(last["value_dims"], last["heads"], strict=True)
    ]
    decided = decisions_of(one.snapshots, one.searched)
    assert decided is not None
    back = {kind: f"{decided.returned.get(kind, 0)} of {decided.units[kind]}" for kind in ("heads", "ffns", "neurons")}
    macro, micro = closings(one)
    return {
        "top-1": f"{record['top1']:.2f}",
        "MACs": f"{record['macs'] / record['dense_macs']:.1%}",
        "heads kept": f"{sum(heads)} of {sum(block.dense.heads or 0 for block in blocks)}",
        "FFNs kept": f"{len(ffns)} of {len(blocks)}",
        "neurons of those FFNs": f"{np.mean(ffns or [0]) / (blocks[0].dense.neurons or 1):.0%}",
        "value dims of a kept head, by block": " ".join(values),
        "largest fall of the accuracy": f"{fall([line['top1'] for line in one.metrics if 'top1' in line]):.1f}",
        "closed heads and FFNs, median epoch": macro,
        "closed dims and neurons of what is kept, median epoch": micro,
        **{f"closed {kind} that came back": value for kind, value in back.items()},
    }


def fall(scores: Sequence[float]) -> float:
    """The most that the accuracy of an epoch is below that of an earlier one."""
    return max((high - score for high, score in zip(accumulate(scores, max), scores, strict=True)), default=0.0)


def closings(one: RunData) -> tuple[str, str]:
    """When whole structures closed for good, and when parts of those that stayed did: median epochs."""
    masks = [unpack(snapshot["decisions"], one.searched) for snapshot in one.snapshots]
    at = np.array([snapshot["at"] for snapshot in one.snapshots])
    sizes = {"value_dims": ("heads", [w.value_dim for w in one.searched for _ in range(w.heads or 0)])}
    sizes["neurons"] = ("ffns", [w.neurons for w in one.searched if w.neurons])

    def closed(kind: str, among: Any = True) -> list[float]:
        rows = np.stack([mask[kind] for mask in masks])
        open_until = len(rows) - np.argmax(rows[::-1], axis=0)  # the snapshot after the last in which a unit is open
        gone = ~rows[-1] & rows.any(0) & among
        return [float(time) for time in at[open_until[gone]]]

    macro = [time for kind in MACRO_UNITS for time in closed(kind)]
    micro = [
        time for kind, (parent, count) in sizes.items() for time in closed(kind, np.repeat(masks[-1][parent], count))
    ]
    return median(macro), median(micro)


def median(times: Sequence[float]) -> str:
    return f"{np.median(times):.1f} ({len(times)} closed)" if times else "-"


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
            ax.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(2, integer=True))
    bar = figure.colorbar(picture, ax=axes, fraction=0.02, pad=0.015)
    bar.ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    bar.set_label("kept")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def trade_off(found: dict[Path, dict[str, RunData]], path: Path) -> None:
    """Accuracy with hard gates against MACs: the way of each ratio, and where it ends."""
    figure, ax = plt.subplots(figsize=(6.8, 4.4))
    colours = {ratio: f"C{i}" for i, ratio in enumerate(RATIOS)}
    shapes = dict(zip(found, cycle("osD^v"), strict=False))
    for folder, runs in found.items():
        for ratio, one in runs.items():
            lines = [line for line in one.metrics if "top1" in line and "hard_macs" in line]
            x, y = [line["hard_macs"] for line in lines], [line["top1"] for line in lines]
            ax.plot(x, y, color=colours[ratio], alpha=0.35, linewidth=1, marker=".", markersize=3)
            ax.plot(x[-1:], y[-1:], color=colours[ratio], marker=shapes[folder], markersize=8)
    ax.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0))
    ax.set_xlabel("MACs, share of the dense model")
    ax.set_ylabel("top-1 accuracy, percent")
    ax.grid(alpha=0.3)
    names = [Line2D([], [], color=colour, linewidth=3, label=ratio) for ratio, colour in colours.items()]
    ends = [Line2D([], [], color="gray", marker=shape, linestyle="", label=f.name) for f, shape in shapes.items()]
    shown = names + (ends if len(ends) > 1 else [])
    ax.legend(handles=shown, title="macro : micro", frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
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
    train.add_argument("--out", type=Path, required=True, help="folder of the runs")
    draw.add_argument("--out", type=Path, required=True, nargs="+", help="folders of the runs")
    options = parser.parse_args()
    options.go(options)


if __name__ == "__main__":
    main()
