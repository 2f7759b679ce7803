"""The study of penalty ratios: what it prints and draws of finished runs."""

import sys
from pathlib import Path

import pytest

import penalty_ratios
from made_runs import made_run


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
    assert {file.name for file in (tmp_path / "plots").iterdir()} == {"penalty_ratios.png", "penalty_pareto.png"}
    monkeypatch.setattr(sys, "argv", ["penalty_ratios.py", "show", "--out", str(tmp_path), "--plots", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"holds none of the runs macro-only, 5:1, 2:1, 1\.5:1, micro-only"):
        penalty_ratios.main()
