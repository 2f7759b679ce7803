"""The picture of the README: what pruning leaves of a network, and what accuracy it costs.

python research/picture.py --records research/records/compare.jsonl --out docs/pictures/overview.svg
python research/picture.py --records research/records/compare.jsonl --out docs/pictures/overview_narrow.svg --narrow
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

EPOCHS, CHOSEN_AT = 15, "50%"
TRIALS = {"vit_tiny": 15, "dinov2_small": 5}  # epochs of the runs that tried learning rates on held-out images
DENSE_TOP1 = 78.00  # of vit_tiny: docs/results.md, "The library"
DENSE = {"heads": 3, "qk_dim": 64, "value_dim": 64, "neurons": 768}  # of every block of vit_tiny_patch16_224
METHODS = {  # as the records name them: label, colour, marker
    "hiap": ("HiAP", "#1f5fbf", "o"),
    "taylor": ("one-shot Taylor", "#d9822b", "s"),
    "l1": ("l1 on gates", "#5a9e4b", "^"),
    "torch_pruning_taylor": ("Torch-Pruning", "#8c6bb1", "D"),
}
INK, FAINT, BLUE, LIGHT = "#24292f", "#8b949e", "#1f5fbf", "#8fb4e8"

Record = dict[str, Any]


def read(path: Path, start: str = "vit_tiny") -> list[Record]:
    """Plain runs from a dense start, the last one where a run was repeated."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows = [{"method": row.get("arm"), **row} for row in rows]  # `arm` is the name of the field in old records
    plain = [
        row
        for row in rows
        if (row["start"], row["set"], row["like"]) == (start, "", None)
        and isinstance(row["final"], bool)
        and row["epochs"] == (EPOCHS if row["final"] else TRIALS[start])
    ]
    return list({tuple(row[key] for key in ("method", "target", "lr", "seed", "final")): row for row in plain}.values())


def chosen(records: list[Record], method: str, target: str) -> list[Record]:
    """The final runs of a method at the learning rate that is best on held-out images.

    Where at most one learning rate was tried at this target, the one chosen at half of the MACs counts.
    """

    def tried(at: str) -> dict[float, float]:
        return {r["lr"]: r["top1"] for r in records if (r["method"], r["target"], r["final"]) == (method, at, False)}

    scores = tried(target) if len(tried(target)) > 1 else tried(CHOSEN_AT)
    lr = max(scores, key=lambda one: scores[one], default=None)
    return [r for r in records if (r["method"], r["target"], r["final"], r["lr"]) == (method, target, True, lr)]


def draw_network(figure: Any, grid: Any, record: Record) -> None:
    """Each block's widths, the dense ones as outlines."""
    blocks = range(len(record["widths"]))
    rows = grid.subgridspec(2, 1, hspace=0.28)
    upper, lower = figure.add_subplot(rows[0]), figure.add_subplot(rows[1])
    width = {key: [w["heads"] * w[key] for w in record["widths"]] for key in ("qk_dim", "value_dim")}
    neurons = [w["neurons"] or 0 for w in record["widths"]]
    full = DENSE["heads"] * (DENSE["qk_dim"] + DENSE["value_dim"])
    outline = {"facecolor": "#f3f5f7", "edgecolor": FAINT, "linewidth": 0.8, "width": 0.78}
    upper.bar(blocks, [full] * len(blocks), **outline)
    upper.bar(blocks, width["value_dim"], 0.78, color=BLUE, label="value dims")
    upper.bar(blocks, width["qk_dim"], 0.78, bottom=width["value_dim"], color=LIGHT, label="query/key dims")
    lower.bar(blocks, [DENSE["neurons"]] * len(blocks), **outline)
    lower.bar(blocks, neurons, 0.78, color=BLUE)
    upper.set_title(
        f"What is left of ViT-Ti at {record['macs'] / record['dense_macs']:.0%} of its MACs",
        loc="left",
        fontsize=11,
        fontweight="bold",
        pad=24,
    )
    upper.legend(
        loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncol=2, frameon=False, fontsize=8.5, handlelength=1, borderpad=0
    )
    for ax, top, name in ((upper, full, "attention"), (lower, DENSE["neurons"], "FFN neurons")):
        ax.set_ylim(0, top * 1.02)
        ax.set_yticks([0, top])
        ax.set_ylabel(name)
        ax.set_xlim(-0.6, len(blocks) - 0.4)
        ax.set_xticks(list(blocks), [str(i + 1) for i in blocks] if ax is lower else [])
        ax.tick_params(length=0)
        ax.spines[["top", "right", "left", "bottom"]].set_visible(False)
    lower.set_xlabel("block (grey: the dense model)")


def draw_accuracy(ax: Any, records: list[Record]) -> None:
    """Top-1 against MACs, a line a method, from the dense model down."""
    for method, (name, colour, marker) in METHODS.items():
        points = []
        for target in ("70%", "50%", "35%"):
            if runs := chosen(records, method, target):
                share = statistics.mean(run["macs"] / run["dense_macs"] for run in runs)
                points.append((100 * share, statistics.mean(run["top1"] for run in runs)))
                print(f"{name:16} {target:>4} lr {runs[0]['lr']:g}: {points[-1][1]:.2f} of {len(runs)} seeds")
        line = [(100.0, DENSE_TOP1), *points] if len(points) > 1 else points
        strong = method == "hiap"
        ax.plot(*zip(*line, strict=True), color=colour, linewidth=2.4 if strong else 1.4, zorder=3 if strong else 2)
        ax.plot(*zip(*points, strict=True), marker, color=colour, markersize=7 if strong else 5.5, zorder=4)
        x, y = points[-1]
        side = {"xytext": (-7, -3), "ha": "right"} if len(points) > 1 else {"xytext": (8, -4), "ha": "left"}
        weight = "bold" if strong else "normal"
        ax.annotate(
            f"{name}", (x, y), textcoords="offset points", color=colour, fontsize=9.5, fontweight=weight, **side
        )
    ax.plot([100], [DENSE_TOP1], "o", color=INK, markersize=7, zorder=5)
    ax.annotate(
        f"dense {DENSE_TOP1:.1f}", (100, DENSE_TOP1), (2, 7), textcoords="offset points", ha="right", fontsize=9.5
    )
    ax.set_title("What it costs: top-1 on Tiny-ImageNet", loc="left", fontsize=11, fontweight="bold", pad=24)
    ax.set_xlabel("MACs (% of the dense model)")
    ax.set_ylabel("top-1 (%)")
    ax.set_xlim(4, 102.5)
    ax.set_xticks([35, 50, 70, 100])
    ax.set_ylim(54.5, 80)
    ax.grid(axis="y", color="#e3e6e9", linewidth=0.8)
    ax.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=Path, required=True, help="JSON lines of compare.py")
    parser.add_argument("--out", type=Path, required=True, help="an .svg or .png file")
    parser.add_argument("--narrow", action="store_true", help="one panel below the other, for small screens")
    options = parser.parse_args()
    records = read(options.records)
    colours = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), INK)
    sizes = {"font.size": 9, "font.family": "DejaVu Sans"}
    plt.rcParams.update({**colours, **sizes, "svg.hashsalt": "hiap"})
    figure = plt.figure(figsize=(4.4, 7.0) if options.narrow else (9.6, 3.7), facecolor="white")
    if options.narrow:
        grid = figure.add_gridspec(2, 1, hspace=0.42, left=0.14, right=0.97, top=0.91, bottom=0.07)
    else:
        edges = {"left": 0.065, "right": 0.985, "top": 0.82, "bottom": 0.135}
        grid = figure.add_gridspec(1, 2, width_ratios=[1.15, 1], wspace=0.2, **edges)
    network = min(chosen(records, "hiap", "50%"), key=lambda record: record["seed"])
    draw_network(figure, grid[0], network)
    draw_accuracy(figure.add_subplot(grid[1]), records)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Date": None} if options.out.suffix == ".svg" else {}
    figure.savefig(options.out, dpi=160, metadata=metadata)


if __name__ == "__main__":
    main()
