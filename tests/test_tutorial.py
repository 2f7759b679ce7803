"""The examples are run: the notebook cell by cell at a small scale, the script as it stands."""

import ast
import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import hiap

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK = ROOT / "examples" / "tutorial.ipynb"
SMALL = {"DENSE_EPOCHS": 1, "EPOCHS": 7, "IMAGES": 130}  # in place of the cell that is tagged "parameters"


def code_cells() -> list[dict[str, Any]]:
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_the_tutorial_runs_and_ends_with_a_model_within_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    plt.switch_backend("Agg")
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    drawn = 0
    for number, cell in enumerate(code_cells()):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
        if "parameters" in cell["metadata"].get("tags", ()):
            assert set(names) >= set(SMALL)
            names |= SMALL
        drawn += len(plt.get_fignums())
        plt.close("all")
    assert drawn == 4
    output = capsys.readouterr().out
    assert "train 130 images\nval 130 images\n" in output and "the same logits: True" in output
    saved = hiap.load(tmp_path / "runs" / "tutorial" / "run" / "compact")
    share = hiap.macs(saved) / hiap.macs(names["untrained"])
    assert 0.49 < share <= 0.5
    assert re.search(rf"^trained on .* \({share:.1%}\)$", output, re.MULTILINE)


def test_the_tutorial_is_saved_as_it_ran_from_top_to_bottom() -> None:
    cells = code_cells()
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 4
    assert NOTEBOOK.stat().st_size < 500_000
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert not re.search(r"(^|[\s'\"(])/\w", printed), "an absolute path"


def test_the_numbers_that_the_tutorial_shows_fit_its_settings() -> None:
    cells = code_cells()
    (settings,) = ["".join(cell["source"]) for cell in cells if "parameters" in cell["metadata"].get("tags", ())]
    values = {node.targets[0].id: ast.literal_eval(node.value) for node in ast.parse(settings).body}  # type: ignore
    printed = "".join("".join(output.get("text", ())) for cell in cells for output in cell["outputs"])
    assert "train 1437 images\nval 360 images\n" in printed and values["IMAGES"] is None
    assert f"recover  {values['EPOCHS']}/{values['EPOCHS']}" in printed
    shares = re.findall(r"^trained on .* \((\d+\.\d)%\)$", printed, re.MULTILINE)
    assert len(shares) == 1 and 49.5 <= float(shares[0]) <= 50.0


def test_the_script_of_the_library_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["library.py", str(tmp_path / "compact")])
    runpy.run_path(str(ROOT / "examples" / "library.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "loaded     logits equal: True"
    assert lines[-2] == f"saved      config.json, model.safetensors in {tmp_path / 'compact'}"
