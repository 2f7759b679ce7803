"""The study of penalty ratios: what it prints and draws of finished runs."""

import statistics
import sys
from pathlib import Path

import pytest

import penalty_ratios
from hiap.report.gathering import RunData
from hiap.training.snapshots import unpack
from made_runs import made_run


def closed_by_hand(one: RunData) -> list[str]:
    """The first snapshot from which on a unit is closed: of whole structures, and of parts of what is open."""
    masks = [unpack(snapshot["decisions"], one.searched) for snapshot in one.snapshots]
    macro, micro = [], []
    parents = {"heads": "heads", "ffns": "ffns", "value_dims": "heads", "neurons": "ffns"}
    for kind, parent in parents.items():
        for unit in range(len(masks[0][kind])):
            states = [bool(mask[kind][unit]) for mask in masks]
            part = len(masks[0][kind]) // len(masks[0][parent])  # every branch of this model has as many
            if states[-1] or not any(states) or (kind != parent and not masks[-1][parent][unit // part]):
                continue
            since = max(i for i, state in enumerate(states) if state) + 1
            (macro if kind == parent else micro).append(one.snapshots[since]["at"])
    return [f"{statistics.median(times):.1f} ({len(times)} closed)" if times else "-" for times in (macro, micro)]


def test_the_largest_fall_is_from_any_earlier_high() -> None:
    assert penalty_ratios.fall([70.0, 72.0, 69.5, 71.0, 73.0, 72.5]) == 2.5
    assert penalty_ratios.fall([70.0, 71.0]) == 0.0


def test_what_is_shown_of_the_runs_is_counted_from_their_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("2to1", "micro-only"):
        made_run(tmp_path / "runs" / folder, 6)
    monkeypatch.setattr(
        sys, "argv", ["penalty_ratios.py", "show", "--out", str(tmp_path / "runs"), "--plots", str(tmp_path / "plots")]
    )
    penalty_ratios.main()
    lines = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    rows = {name: values for name, *values in lines if len(values) == 2}
    one = penalty_ratios.gather(tmp_path / "runs" / "2to1")
    heads, neurons = [len(block.heads) for block in one.blocks], [block.now.neurons for block in one.blocks]
    assert rows["heads kept"] == [f"{sum(heads)} of 12"] * 2
    assert rows["FFNs kept"] == [f"{sum(map(bool, neurons))} of 4"] * 2
    assert rows["MACs"] == [f"{one.record['macs'] / one.record['dense_macs']:.1%}"] * 2
    macro, micro = closed_by_hand(one)
    assert rows["closed heads and FFNs, median epoch"] == [macro] * 2
    assert rows["closed dims and neurons of what is kept, median epoch"] == [micro] * 2
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"penalty_ratios.png", "penalty_pareto.png"}
    monkeypatch.setattr(sys, "argv", ["penalty_ratios.py", "show", "--out", str(tmp_path), "--plots", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"holds none of the runs macro-only, 5:1, 2:1, 1\.5:1, micro-only, finished"):
        penalty_ratios.main()
