"""What the records of a comparison say: tables and plots."""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from pathlib import Path
from typing import Any

from record import CLOCK, SPEED, Record, read

SHOWN = 20.0  # points below the best that plots show
TITLES = {"vit_tiny": "ViT-Ti on Tiny-ImageNet", "dinov2_small": "DINOv2-S on Tiny-ImageNet"}
LABELS = {  # of methods, in plots; their order gives the colours, the strong ones first
    "hiap": "HiAP",
    "hiap_time": "HiAP, latency target",
    "taylor": "one-shot Taylor",
    "depth": "whole blocks dropped",
    "torch_pruning_taylor": "Torch-Pruning, Taylor",
    "l1": "L1 on gates",
    "paper": "the paper's penalties",
    "magnitude_global": "magnitude, global",
    "magnitude_uniform": "magnitude, uniform",
    "taylor_five": "one-shot Taylor, HiAP's units",
    "random": "random widths",
    "hiap_scratch": "HiAP's widths, random weights",
    "torch_pruning_isomorphic": "Torch-Pruning, isomorphic",
    "torch_pruning_aligned": "Torch-Pruning, Taylor, aligned widths",
}


@dataclass(frozen=True)
class Times:
    """Seconds of training, evaluations aside, and for each mode the last timing of a forward of this very network.

    Other seeds may end with the same network. Their timings count only where the run's own is missing.
    """

    seconds: float | None
    forwards: dict[str, Record]


def timed(record: Record, records: list[Record], strict: bool) -> Times:
    """What is known of the times of a run.

    Training is timed once per method, whatever the learning rate. The time of a forward belongs to one network, so it
    is shown only for runs that ended with that network.

    Args:
        strict: only what `clock` timed; else a run that it did not is taken to have had the device to itself.
    """

    def place(one: Record) -> tuple[str, ...]:
        return one.start, one.weights, one.set, one.target, one.method

    own = [one for one in records if place(one) == place(record)]
    clock = next((one for one in reversed(own) if one.final == CLOCK), None if strict else record)
    seconds = None
    if clock:
        searching = clock.epoch_s.get("search", 0.0)
        epoch_s = record.search * searching + (1 - record.search) * clock.epoch_s.get("recover", searching)
        seconds = record.epochs * epoch_s
    forwards = [one for one in own if one.final == SPEED and _same_network(one, record, own)]
    return Times(seconds, {one.mode: one for one in sorted(forwards, key=lambda one: one.seed == record.seed)})


def _same_network(timing: Record, record: Record, records: list[Record]) -> bool:
    """Whether a forward of the network that a run ended with was timed.

    A timing names the run, or the `clock`, whose widths it took. Where a method records no widths, it prunes before it
    trains: the seed alone decides what its network is.
    """
    sources = [one for one in records if one.final is not False and one.key[:-1] == timing.key[:-1]]
    widths = next((one.widths for one in sources if one.widths), None)
    return widths == record.widths if widths else not record.widths and timing.seed == record.seed


def table(options: argparse.Namespace) -> None:
    """Print a table for every start, target and length, and draw the plots."""
    everything = read(options.records)
    unique = {record.key: record for record in everything}.values()
    tried = {_trial(record, record.epochs): record.top1 for record in unique if record.final is False}
    strict = any(record.final == CLOCK for record in unique)
    groups: dict[Any, list[Record]] = defaultdict(list)
    for record in unique:
        if record.final is True:
            groups[record.start, record.weights, record.target, record.like or record.epochs].append(record)
    for (*where, length), group in groups.items():
        if isinstance(length, str):  # the method whose training time it is
            method, epochs = length.split()
            variants = {record.set for record in group}
            whose = groups.get((*where, int(epochs)), ())
            group += [record for record in whose if record.method == method and record.set in variants]
    if not groups:
        raise SystemExit(f"{options.records} holds no finished runs")
    times = {record.key: timed(record, everything, strict) for group in groups.values() for record in group}
    tables = {where: summaries(group, tried, times) for where, group in groups.items()}
    for (start, _, target, length), rows in tables.items():
        words = f"the training time of {length} epochs" if isinstance(length, str) else f"{length} epochs"
        goal = f"{target} of the MACs" if target.endswith("%") else target
        print(f"\n{start}, {goal}, {words} ({rows[0]['device']})\n")
        modes = modes_of(rows)
        head = ["method", "top-1, mean", "spread", "seeds", "MACs", "training", *map("forward, {}".format, modes)]
        head += ["learning rate", "held-out tenth"]
        print("|", " | ".join(head), "|")
        print("|", " | ".join("---" for _ in head), "|")
        for row in sorted(rows, key=lambda row: -row["top1"]):
            cells = [
                row["method"],
                f"{row['top1']:.2f}",
                f"{row['spread']:.2f}",
                str(row["seeds"]),
                f"{row['macs']:.2%}",
            ]
            cells += ["" if row["seconds"] is None else f"{row['seconds']:.0f} s"]
            cells += [_forward(row["forwards"].get(mode, [])) for mode in modes]
            cells += [f"{row['lr']:g}", "" if row["held_out"] is None else f"{row['held_out']:.2f}"]
            print("|", " | ".join(cells), "|")
    if options.plots:
        plot(tables, options.plots)


def _trial(record: Record, epochs: int) -> tuple[Any, ...]:
    """What tells the run that tried a learning rate on held-out images."""
    return (*record.key[:4], epochs, record.method, record.lr)


def modes_of(rows: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(mode for row in rows for mode in row["forwards"]))


def _forward(found: list[Record]) -> str:
    """The mean time of a forward, and how many times as fast as the dense model's that is, where both were timed."""
    if not found:
        return ""
    ms, dense = statistics.mean(one.ms for one in found), _mean([one.dense_ms for one in found])
    return f"{ms:.3f} ms" + (f" ({dense / ms:.2f}x)" if dense else "")


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else statistics.mean(values)


def mean_top1(values: list[float]) -> float:
    """The mean to two digits; a half is rounded up, as in decimals, not as the nearest binary number has it."""
    mean = sum(Decimal(str(value)) for value in values) / len(values)
    return float(mean.quantize(Decimal("0.01"), ROUND_HALF_UP))


def summaries(group: list[Record], tried: dict[Any, float], times: dict[Any, Times]) -> list[dict[str, Any]]:
    """One row for each method and learning rate: means over the seeds, and the distance of the best from the worst.

    Args:
        tried: what each learning rate scored on held-out images. At equal time, those chosen at equal epochs are used.
        times: of every record, by its key.
    """
    rows = []
    for method, variant, lr in dict.fromkeys((record.method, record.set, record.lr) for record in group):
        own = [record for record in group if (record.method, record.set, record.lr) == (method, variant, lr)]
        top1, first = [record.top1 for record in own], own[0]
        forwards = defaultdict(list)
        for record in own:
            for mode, one in times[record.key].forwards.items():
                forwards[mode].append(one)
        trial = next((record.trial_epochs for record in own if record.trial_epochs), None)
        epochs = trial or (int(first.like.split()[-1]) if first.like else first.epochs)
        rows.append(
            {
                "method": f"{method} ({variant})" if variant else method,
                "lr": lr,
                "top1": mean_top1(top1),
                "seconds": _mean([times[record.key].seconds for record in own]),
                "forwards": dict(forwards),
                "device": first.device,
                "held_out": tried.get(_trial(first, epochs)),
                "plain": not variant,
                "dense_top1": next((record.dense_top1 for record in own if record.dense_top1 is not None), None),
                "spread": max(top1) - min(top1),
                "range": (min(top1), max(top1)),
                "seeds": len(own),
                "macs": statistics.mean(record.macs / record.dense_macs for record in own),
            }
        )
    return rows


def chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every method, variants aside, the row of the learning rate that did best on held-out images."""
    ranked = sorted((row for row in rows if row["plain"]), key=lambda row: row["held_out"] or 0.0)
    return list({row["method"]: row for row in ranked}.values())


def plot(tables: dict[Any, list[dict[str, Any]]], folder: Path) -> None:
    """Top-1 against MACs, training time and the time of a forward, without variants, at the chosen learning rates.

    The time of a forward is plotted only for networks that were timed. Where that is not the network of the chosen
    learning rate, both numbers are of the one that was timed.
    """
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for start in dict.fromkeys(where[0] for where in tables):
        own = {where: rows for where, rows in tables.items() if where[0] == start}
        rows = _placed(own)
        _draw(rows, "macs", "share of the dense model's MACs", start, folder / f"{start}_macs.png")
        if any(row["seconds"] is not None for row in rows):
            _draw(rows, "seconds", "training time (s)", start, folder / f"{start}_seconds.png")
        for mode in modes_of([row for rows in own.values() for row in rows if row["plain"]]):
            rows, key = _placed(own, mode), f"forward_{mode.replace('+', '_')}"
            for row in rows:
                row[key] = statistics.mean(one.ms for one in row["forwards"][mode])
            how = rows[0]["forwards"][mode][0]
            label = f"forward of {how.batch} images (ms; {how.precision}, {mode})"
            _draw(rows, key, label, start, folder / f"{start}_{key}.png", _dense(rows, mode))


def _placed(tables: dict[Any, list[dict[str, Any]]], mode: str | None = None) -> list[dict[str, Any]]:
    """The rows to plot, with target and length; with a mode, those of networks that were timed in it."""
    return [
        row | {"target": target, "length": length}
        for (_, _, target, length), rows in tables.items()
        for row in chosen([row for row in rows if mode is None or mode in row["forwards"]])
    ]


def _dense(rows: list[dict[str, Any]], mode: str) -> list[tuple[str, float, float]]:
    """Label, time and top-1 of the dense model, as it is and optimised, where both are known."""
    top1 = next((row["dense_top1"] for row in rows if row["dense_top1"] is not None), None)
    timings = [one for row in rows for one in row["forwards"][mode]]
    times = {
        "dense, timm's forward": [one.dense_ms for one in timings if one.dense_ms],
        "dense, optimised": [one.dense_optimised_ms for one in timings if one.dense_optimised_ms],
    }
    return [(name, statistics.median(ms), top1) for name, ms in times.items() if ms and top1 is not None]


def _draw(
    rows: list[dict[str, Any]],
    key: str,
    label: str,
    title: str,
    path: Path,
    dense: Sequence[tuple[str, float, float]] = (),
) -> None:
    import matplotlib.pyplot as plt

    usual, best = rows[0], max(row["top1"] for row in rows)
    methods = list(dict.fromkeys(row["method"] for row in sorted(rows, key=lambda row: -row["top1"])))
    shown = [row for row in rows if row[key] is not None and (key == "seconds" or not isinstance(row["length"], str))]
    below = [row for row in shown if row["top1"] < best - SHOWN]
    low = "; ".join(f"{LABELS.get(row['method'], row['method'])}, {row['target']}: {row['top1']:.1f}" for row in below)
    figure, ax = plt.subplots(figsize=(8.4, 4.6), constrained_layout=True)
    lines = defaultdict(list)  # of networks of several sizes, or of trainings of several lengths
    for row in shown:
        if row["top1"] >= best - SHOWN:
            lines[row["method"], row["target"] if key == "seconds" else row["length"]].append(row)
    labels = LABELS | ({"hiap": "HiAP, target in MACs"} if "hiap_time" in methods else {})
    named = set()
    for (method, other), own in sorted(lines.items(), key=lambda line: methods.index(line[0][0])):
        own.sort(key=lambda row: row[key])
        number = list(LABELS).index(method)
        ax.errorbar(
            [row[key] for row in own],
            [row["top1"] for row in own],
            [[abs(row["top1"] - row["range"][end]) for row in own] for end in (0, 1)],
            marker="os^vD<>pP*Xh"[number % 12],
            color="black" if method == "hiap" else plt.get_cmap("tab20")((2 * number - 2 + (number - 1) // 10) % 20),
            linewidth=2.0 if method == "hiap" else 1.0,
            capsize=2,
            label=None if method in named else labels[method],
        )
        named.add(method)
        note = other.split(" by ")[0] if key == "seconds" else f"{other} epochs"
        if other not in (usual["length"], usual["target"]):
            ax.annotate(note, (own[-1][key], own[-1]["top1"]), (5, 3), textcoords="offset points", fontsize=7)
    for (name, x, y), marker in zip(dense, "*P", strict=False):
        ax.plot([x], [y], marker, color="grey", markersize=9, label=name)
    ax.set(xlabel=label, ylabel="top-1 (%)", title=TITLES.get(title, title))
    if low:
        ax.set_title(f"{ax.get_title()}\n", fontsize=12)
        ax.text(0.5, 1.02, f"below the axis: {low}", transform=ax.transAxes, ha="center", fontsize=8)
    left, right = ax.get_xlim()
    if key == "macs" and right - left < 0.1:  # networks of one size stand above each other
        ax.set_xlim((left + right) / 2 - 0.05, (left + right) / 2 + 0.05)
    elif key == "seconds":
        ax.set_xlim(left=0)
    ax.grid(alpha=0.3)
    if named:
        figure.legend(loc="outside right upper", fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    print(path)
