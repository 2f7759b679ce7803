"""What the records of a comparison say: tables and plots."""

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

KEY = ("start", "weights", "set", "target", "epochs", "like", "arm", "lr", "seed", "final")
CLOCK, SPEED = "clock", "speed"  # instead of True (scored on the validation set) or False (held out) as `final`
SHOWN = 20.0  # points below the best that plots show


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def timed(record: dict[str, Any], records: list[dict[str, Any]], strict: bool) -> dict[str, Any]:
    """Seconds of training, evaluations aside, and what `speed` found last, in one mode for all.

    Args:
        strict: only what `clock` timed; else a run that it did not is taken to have had the device to itself.
    """

    def last(final: str, **wanted: Any) -> dict[str, Any] | None:
        same = {key: record[key] for key in ("start", "weights", "set", "target", "arm")} | {"final": final} | wanted
        return next((one for one in reversed(records) if same.items() <= one.items()), None)

    clock = last(CLOCK) or (None if strict else record)
    mode = next((one["mode"] for one in reversed(records) if one["final"] == SPEED), None)
    forward = last(SPEED, mode=mode) or {}
    found = {key: forward.get(key) for key in ("ms", "dense_ms", "batch", "precision", "mode")} | {"seconds": None}
    if clock:
        searching = clock["epoch_s"].get("search", 0.0)
        epoch_s = record["search"] * searching + (1 - record["search"]) * clock["epoch_s"].get("recover", searching)
        found["seconds"] = record["epochs"] * epoch_s
    return found


def table(options: argparse.Namespace) -> None:
    """Print a table for every start, target and length, and draw the plots."""
    everything = read(options.records)
    unique = {tuple(record[key] for key in KEY): record for record in everything}.values()
    tried = {_trial(record, record["epochs"]): record["top1"] for record in unique if record["final"] is False}
    strict = any(record["final"] == CLOCK for record in unique)
    groups = defaultdict(list)
    for record in unique:
        if record["final"] is True:
            place = (record["start"], record["weights"], record["target"], record["like"] or record["epochs"])
            groups[place].append(record | timed(record, everything, strict))
    for (*where, length), group in groups.items():
        if isinstance(length, str):  # the arm whose training time it is
            arm, epochs = length.split()
            variants = {record["set"] for record in group}
            whose = groups.get((*where, int(epochs)), ())
            group += [record for record in whose if record["arm"] == arm and record["set"] in variants]
    if not groups:
        raise SystemExit(f"{options.records} holds no finished runs")
    tables = {where: summaries(group, tried) for where, group in groups.items()}
    for (start, _, target, length), rows in tables.items():
        words = f"the training time of {length} epochs" if isinstance(length, str) else f"{length} epochs"
        goal = f"{target} of the MACs" if target.endswith("%") else target
        print(f"\n{start}, {goal}, {words} ({rows[0]['device']})\n")
        print("| arm | top-1, mean | spread | seeds | MACs | training | forward | speed-up | rate | held out |")
        print("|---|---|---|---|---|---|---|---|---|---|")
        for row in sorted(rows, key=lambda row: -row["top1"]):
            forms = {"seconds": "{:.0f} s", "ms": "{:.3f} ms", "speedup": "{:.2f}x", "held_out": "{:.2f}"}
            seconds, ms, speedup, held_out = (
                "" if row[key] is None else form.format(row[key]) for key, form in forms.items()
            )
            print(
                f"| {row['arm']} | {row['top1']:.2f} | {row['spread']:.2f} | {row['seeds']} | {row['macs']:.2%} | "
                f"{seconds} | {ms} | {speedup} | {row['lr']:g} | {held_out} |"
            )
    if options.plots:
        plot(tables, options.plots)


def _trial(record: dict[str, Any], epochs: int) -> tuple[Any, ...]:
    """What tells the run that tried a rate on held-out images."""
    return (*(record[key] for key in KEY[:4]), epochs, record["arm"], record["lr"])


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else statistics.mean(values)


def summaries(group: list[dict[str, Any]], tried: dict[Any, float]) -> list[dict[str, Any]]:
    """One row an arm and rate: means over its seeds, and the distance of the best from the worst.

    Args:
        tried: what each rate scored on held-out images. At equal time, rates are those chosen at equal epochs.
    """
    rows = []
    for arm, variant, lr in dict.fromkeys((record["arm"], record["set"], record["lr"]) for record in group):
        own = [record for record in group if (record["arm"], record["set"], record["lr"]) == (arm, variant, lr)]
        top1 = [record["top1"] for record in own]
        epochs = int(own[0]["like"].split()[-1]) if own[0]["like"] else own[0]["epochs"]
        epochs = own[0].get("trial_epochs", epochs)
        rows.append(
            {
                **{key: own[0][key] for key in ("ms", "batch", "precision", "mode", "device")},
                **{key: _mean([record[key] for record in own]) for key in ("seconds", "top1")},
                "speedup": own[0]["dense_ms"] and own[0]["dense_ms"] / own[0]["ms"],
                "arm": f"{arm} ({variant})" if variant else arm,
                "lr": lr,
                "held_out": tried.get(_trial(own[0], epochs)),
                "plain": not variant,
                "spread": max(top1) - min(top1),
                "range": (min(top1), max(top1)),
                "seeds": len(own),
                "macs": statistics.mean(record["macs"] / record["dense_macs"] for record in own),
            }
        )
    return rows


def chosen(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every arm, variants aside, the row of the rate that did best on held-out images."""
    ranked = sorted((row for row in rows if row["plain"]), key=lambda row: row["held_out"] or 0.0)
    return list({row["arm"]: row for row in ranked}.values())


def plot(tables: dict[Any, list[dict[str, Any]]], folder: Path) -> None:
    """Top-1 against MACs, throughput and training time: of every arm the rate that was chosen, and no variants."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    labels = {"macs": "share of the dense model's MACs", "throughput": "images / s", "seconds": "training time (s)"}
    by_start = defaultdict(list)
    for (start, _, target, length), rows in tables.items():
        by_start[start] += [
            row | {"throughput": row["ms"] and 1e3 * row["batch"] / row["ms"], "target": target, "length": length}
            for row in chosen(rows)
        ]
    for start, rows in by_start.items():
        usual, best = rows[0]["length"], max(row["top1"] for row in rows)
        arms = list(dict.fromkeys(row["arm"] for row in sorted(rows, key=lambda row: -row["top1"])))
        low = ", ".join(f"{row['arm']} {row['top1']:.1f}" for row in rows if row["top1"] < best - SHOWN)
        for key, label in labels.items():
            figure, ax = plt.subplots(figsize=(6.8, 4.6), constrained_layout=True)
            lines = defaultdict(list)  # of networks of several sizes, or of trainings of several lengths
            for row in rows:
                equal_time = isinstance(row["length"], str)
                if row[key] is None or row["top1"] < best - SHOWN or (equal_time and key != "seconds"):
                    continue
                lines[row["arm"], row["target"] if key == "seconds" else row["length"]].append(row)
            named = set()
            for (arm, other), own in sorted(lines.items(), key=lambda line: arms.index(line[0][0])):
                own.sort(key=lambda row: row[key])
                number = arms.index(arm)
                ax.errorbar(
                    [row[key] for row in own],
                    [row["top1"] for row in own],
                    [[abs(row["top1"] - row["range"][end]) for row in own] for end in (0, 1)],
                    marker="os^vD<>pP*Xh"[number % 12],
                    color="black"
                    if arm == "hiap"
                    else plt.get_cmap("tab20")((2 * number + number // 10) % 20),  # strong colours first
                    linewidth=2.0 if arm == "hiap" else 1.0,
                    capsize=2,
                    label=None if arm in named else arm,
                )
                named.add(arm)
                note = other.split(" by ")[0] if key == "seconds" else f"{other} epochs"
                if other not in (usual, rows[0]["target"]):
                    ax.annotate(note, (own[-1][key], own[-1]["top1"]), (5, 3), textcoords="offset points", fontsize=7)
            how = [row for row in rows if row["ms"]] if key == "throughput" else []
            if how:
                label += f" ({how[0]['precision']}, batch {how[0]['batch']}, {how[0]['mode']})"
            ax.set(xlabel=label, ylabel="top-1 (%)", title=start + (f"\n(not shown: {low})" if low else ""))
            ax.grid(alpha=0.3)
            ax.legend(fontsize=7, ncol=2)
            figure.savefig(folder / f"{start}_{key}.png", dpi=150)
            plt.close(figure)
            print(folder / f"{start}_{key}.png")
