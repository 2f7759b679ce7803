"""The grid of a sweep: its values, its combinations, and what is checked before the first run."""

import argparse
from pathlib import Path

import pytest

from hiap.cli.main import _parser, main
from hiap.cli.sweep_command import planned_runs
from hiap.sweep.grid import combinations, parse_axis, run_name
from hiap.training.config import read_config


def parsed(*words: str) -> argparse.Namespace:
    return _parser().parse_args(["sweep", *words])


def test_every_combination_has_a_folder_named_after_its_values() -> None:
    found = combinations([parse_axis("target=35%,50%"), parse_axis("--ratio = 5:1, 2:1")])
    assert found[1] == {"target": "35%", "ratio": "2:1"}
    assert [run_name(one) for one in found] == [
        "target=35%_ratio=5-1",
        "target=35%_ratio=2-1",
        "target=50%_ratio=5-1",
        "target=50%_ratio=2-1",
    ]
    assert run_name({"target": "50% params", "weights": "a/b.pth"}) == "target=50%-params_weights=a-b.pth"
    long = [run_name({"weights": "x" * 300 + end}) for end in "ab"]
    assert long[0] != long[1] and max(map(len, long)) == 120


def test_values_are_read_as_the_command_line_reads_them() -> None:
    words = ["--grid", "keep-blocks=0,11;0", "--grid", "shrink=true,false", "--grid", "lr=1e-3", "--data", "digits"]
    found = [config for _, _, config in planned_runs(parsed(*words, "--grid", "target=70%,50%;60%"))]
    assert [one.keep_blocks for one in found] == [[0, 11]] * 4 + [[0]] * 4
    assert [one.shrink for one in found] == [True, True, False, False] * 2
    assert [one.targets for one in found[:2]] == [["70%", "50%"], ["60%"]]
    assert {one.lr for one in found} == {1e-3}


def test_recipes_can_be_a_grid_too() -> None:
    planned = planned_runs(parsed("--grid", "config=ablation_5to1,ablation_2to1", "--data", "photos/"))
    assert [name for _, name, _ in planned] == ["config=ablation_5to1", "config=ablation_2to1"]
    assert [config for _, _, config in planned] == [
        read_config(recipe, {"data": "photos/"}) for recipe in ("ablation_5to1", "ablation_2to1")
    ]


WRONG = {
    "target=35%,135% lr=1e-3,-1": "hiap: 3 of 4 combinations cannot run:\n"
    "  target=35%_lr=-1:\n    lr must be positive; found -1.0\n"
    "  target=135%_lr=1e-3:\n    a target of 135% is more than the dense model: nothing to prune; choose less\n"
    "  target=135%_lr=-1:\n    lr must be positive; found -1.0\n"
    "    a target of 135% is more than the dense model: nothing to prune; choose less\n",
    "lr=fast epochs=1.5": "hiap: the grid is wrong:\n  --grid lr: must be a number; found 'fast'\n"
    "  --grid epochs: must be a whole number; found '1.5'\n",
    "shrink=yes": "hiap: the grid is wrong:\n  --grid shrink: must be true or false; found 'yes'\n",
    "targt=35%": "hiap: --grid 'targt=35%': there is no option 'targt'; did you mean target?\n",
    "target": "hiap: --grid 'target' must be an option and its values, such as target=35%,50%\n",
    "target=,": "hiap: --grid 'target=,' has no values: separate them with commas, such as target=35%,50%\n",
    "target=50%,50%": "hiap: --grid 'target=50%,50%' has the value '50%' twice\n",
    "seed=1 seed=2": "hiap: --grid seed is given twice: write all of its values in one\n",
    "model=a:b,a-b": "hiap: the values 'a:b' and 'a-b' of model would share the folder model=a-b; write one of them "
    "differently\n",
    "data=digits": "hiap: --data is given and also in the grid: leave one of them out\n",
    "": "hiap: hiap sweep needs something to vary, such as --grid target=35%,50%; or --resume --out FOLDER\n",
}


@pytest.mark.parametrize("grid", WRONG)
def test_everything_is_checked_before_the_first_run(
    grid: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word for one in grid.split() for word in ("--grid", one)]
    assert main(["sweep", *words, "--data", "digits", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err == WRONG[grid]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_lists_the_runs_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["sweep", "--config", "digits", "--grid", "target=35%,50%", "--out", str(out), "--dry-run"]) == 0
    assert capsys.readouterr().out == f"{out}/target=35%\n{out}/target=50%\n"
    assert not out.exists()


def test_options_beside_resume_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "--resume", "--lr", "1e-3"]) == 1
    assert capsys.readouterr().err == "hiap: --resume uses the options of the sweep: leave out --lr\n"
