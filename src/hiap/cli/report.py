"""What `hiap prune` prints at the end: the dense model beside the compact one, and what to do next."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hiap.atomic import write_text
from hiap.budget.cost import in_words
from hiap.budget.target import Target
from hiap.data.files import SHARE, is_labelled
from hiap.speed.deployed import Speed, speeds
from hiap.training.config import Config

__all__ = ["evaluation_options", "report", "speed_note"]

SHORT = 0.05  # by which a speed-up may fall short of what was asked for, before the report says so


def report(result: Any) -> None:
    """Print the table and the course of a finished run, and write them to `report.json` in its folder."""
    record, config = result.record, result.config
    found = speeds(result.dense, result.model, next(result.model.parameters()).device)
    record["speed"] = [speed.to_json() for speed in found]
    run = shlex.quote(str(result.folder.parent))
    for row in _rows(record, found, config.target):
        print(f"{row[0]:18} {row[1]:>12} {row[2]:>12}  {row[3]}")
    print(speed_note(found))
    if missed := _missed(record, config.target):
        print(f"{missed}; `hiap bench {run}` times both again, best on an idle machine")
    search, recover = (record["course"].get(stage) for stage in ("search", "recover"))
    saved = recover["epochs"] * (search["fastest"] - recover["fastest"]) if search and recover else 0.0
    more = f"; without the shrink about {saved:.0f} s more" if saved >= 0.5 and record["shrunk"] else ""
    print(f"training took {record['seconds']:.0f} s{more}")
    cut, many = record["dense_macs"] / record["macs"], found[-1]
    share = many.dense_ms / many.compact_ms / cut
    print(f"realised: {share:.0%} of the MAC cut of {cut:.2f}x, at batch {many.batch}")
    metric = config.metric
    start, soft, hard = (record[name.format(metric.key)] for name in ("soft_{}_start", "soft_{}", "hard_{}"))
    print(f"gates: soft {metric.say(start)} at step 0; at the freeze:")
    print(
        f"  {record['undecided']:.0%} undecided; MACs soft {record['expected_macs']:.1%}, hard "
        f"{record['hard_macs']:.1%}; {metric.label} soft {soft:.2f} %, hard {hard:.2f} %"
    )
    write_text(result.folder.parent / "report.json", json.dumps(record, indent=1) + "\n")
    if best := record.get("best"):
        print(f"kept the best epoch on the validation images, {best['epoch']} of {config.epochs}")
    else:
        print("kept the last epoch; --keep best keeps the best on the validation images")
    print(f"saved in {result.folder}; next:")
    print(f"  hiap info {run}")
    print(f"  hiap evaluate {run} {evaluation_options(config)}")
    print(f"  hiap bench {run}")
    print(_written(result.folder.parent))


def _written(folder: Path) -> str:
    """Write the page of the run; a run that is finished must not fail for its report."""
    try:
        from hiap.report.plotting import why_not
        from hiap.report.writing import write_report

        path, without = write_report(folder), why_not()
        if (folder.parent / "ladder.json").is_file():
            path = write_report(folder.parent)
    except Exception as error:
        run = shlex.quote(str(folder))
        return f"the report could not be written ({error}); `hiap report {run}` tries again"
    return f"report: {path}" + (f" (without charts: {without})" if without else "")


def evaluation_options(config: Config) -> str:
    """The options with which `hiap evaluate` scores the model of a run."""
    data, given = config.data or "", {name: getattr(config, name) for name in ("val_split", "input_key", "target_key")}
    if not config.labelled and (os.path.isdir(data) or Path(data).suffix.lower() == ".csv"):
        shares = [share for share in (config.val_split, SHARE) if is_labelled(data, share)]
        data, given = (data, {"val_split": shares[0]}) if shares else ("LABELLED", {})
    words = [f"--data {shlex.quote(data)}"]
    words += [f"--{name.replace('_', '-')} {shlex.quote(str(value))}" for name, value in given.items() if value]
    if not config.labelled:
        words += ["--knn", *(["--against dense"] if config.trained else [])]
    return " ".join(words)


def speed_note(found: Sequence[Speed]) -> str:
    """In which form each network was timed."""
    forms = [f"  batch {one.batch}: dense {one.dense_form}; compact {one.compact_form}" for one in found]
    return "\n".join([f"timed in {found[0].precision}, each in its fastest form:", *forms])


def _missed(record: dict[str, Any], target: str | None) -> str | None:
    """By how much the network is slower than asked for, if it is."""
    if target is None or "predicted" not in record or "measured" not in record:
        return None
    asked = record["dense_predicted"] / Target.parse(target).absolute(record["dense_predicted"])
    got = record["dense_measured"] / record["measured"]
    return f"asked for {asked:.2f}x, measured {got:.2f}x" if got < (1 - SHORT) * asked else None


def _rows(record: dict[str, Any], found: Sequence[Speed], target: str | None) -> list[tuple[str, str, str, str]]:
    """The table: name, dense, compact, and how they compare."""
    rows = [("", "dense", "compact", "")]
    if "top1" in record:
        change = f"{record['top1'] - record['dense_top1']:+.2f} points"
        rows.append(("top-1", f"{record['dense_top1']:.2f} %", f"{record['top1']:.2f} %", change))
    else:
        rows.append(("feature error", "0.00 %", f"{record['error']:.2f} %", f"cosine {record['cosine']:.4f}"))
    for name, key in (("MACs", "macs"), ("parameters", "params")):
        dense, compact = record[f"dense_{key}"], record[key]
        rows.append((name, in_words(dense), in_words(compact), f"{compact / dense:.1%}"))
    for one in found:
        times = (f"{one.dense_ms:.2f} ms", f"{one.compact_ms:.2f} ms", one.comparison())
        rows.append((f"latency, batch {one.batch}", *times))
    if "predicted" in record:
        table, dense = "table, corrected" if "table_error" in record else "by the table", record["dense_predicted"]
        costs = [] if target is None else [("asked for", dense, Target.parse(target).absolute(dense))]
        costs += [
            (name, record[f"dense_{key}"], record[key])
            for name, key in ((table, "predicted"), ("measured like it", "measured"))
            if key in record
        ]
        for name, dense, compact in costs:
            unit = record["unit"]
            rows.append((name, f"{dense:.3f} {unit}", f"{compact:.3f} {unit}", f"{dense / compact:.2f}x"))
    return rows
