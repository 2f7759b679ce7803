"""What stands around the package: how to cite it, what the public workflow runs, and the table of the README."""

import json
import re
import runpy
import statistics
from pathlib import Path
from typing import Any

import pytest
import yaml

import hiap

ROOT = Path(__file__).resolve().parents[1]
METHODS = {  # columns of the README's table, as the records name them
    "HiAP": "hiap",
    "one-shot Taylor": "taylor",
    "l1 on gates": "l1",
    "Torch-Pruning": "torch_pruning_taylor",
}
STARTS = {"ViT-Ti": "vit_tiny", "DINOv2-S": "dinov2_small"}


def test_the_citation_names_the_software_at_this_version_and_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= set(citation)  # what CFF 1.2.0 requires
    assert citation["cff-version"] == "1.2.0" and citation["type"] == "software"
    (version,) = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert citation["version"] == hiap.__version__ == version
    assert citation["license"] == "Apache-2.0"
    (paper,) = citation["references"]
    assert {"type", "title", "authors"} <= set(paper)
    assert paper["title"] == "HiAP: A Multi-Granular Stochastic Auto-Pruning Framework for Vision Transformers"
    assert [author["family-names"] for author in paper["authors"]] == ["Li", "Durrant", "Markovic", "Leontidis"]


def test_the_public_workflow_runs_targets_that_the_makefile_has() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    runs = {entry["target"]: entry["python"] for entry in job["strategy"]["matrix"]["include"]}
    assert [step["run"] for step in job["steps"] if "run" in step] == ["make ${{ matrix.target }}"]
    assert runs == {"test": "3.12", "quick": "3.10", "docs": "3.12"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(runs) <= targets


def table(number: int) -> list[dict[str, str]]:
    """A table of the README, a dictionary a row."""
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "README.md").read_text(), re.MULTILINE)
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in tables[number].splitlines()]
    return [dict(zip(lines[0], row, strict=True)) for row in lines[2:]]


def read_records(start: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The script of the picture, which knows how a learning rate is chosen, and the records it reads."""
    picture: dict[str, Any] = runpy.run_path(str(ROOT / "research" / "picture.py"))
    return picture, picture["read"](ROOT / "research" / "records" / "compare.jsonl", start)


def dense_top1(start: str) -> float:
    """Top-1 of a dense model on the validation images, as the runs at equal speed recorded it."""
    lines = (ROOT / "research" / "records" / "equal_speed_5db299c.jsonl").read_text().splitlines()
    (found,) = {record["dense_top1"] for record in map(json.loads, lines) if record["start"] == start}
    return float(found)


@pytest.mark.parametrize("row", table(0), ids=lambda row: next(iter(row.values())))
def test_the_table_of_the_readme_is_what_the_records_say(row: dict[str, str]) -> None:
    start, share = re.fullmatch(r"(\S+), (\d+) %", next(iter(row.values()))).groups()  # type: ignore[union-attr]
    picture, records = read_records(STARTS[start])
    assert row["dense"] == f"{dense_top1(STARTS[start]):.1f}"
    for column, method in METHODS.items():
        runs = picture["chosen"](records, method, f"{share}%")
        found = f"{statistics.mean(run['top1'] for run in runs):.1f}" if runs else ""
        assert row[column].strip("*") == found, column
        assert len(runs) in ((0, 3) if start == "ViT-Ti" else (0, 2))


AT_EQUAL_TIME = {  # start, and the target of the records
    "ViT-Ti, 2.0x": ("vit_tiny", "0.768ms"),
    "ViT-Ti, 2.5x": ("vit_tiny", "0.614ms"),
    "DINOv2-S, 1.5x": ("dinov2_small", "2.48ms"),
    "DINOv2-S, 2.0x": ("dinov2_small", "1.86ms"),
    "DINOv2-S, 2.5x": ("dinov2_small", "1.49ms"),
}
TIMED = {"HiAP, target in time": "hiap_time", "HiAP, target in MACs": "hiap"}
TIMED |= {"whole blocks dropped": "depth", "one-shot Taylor": "taylor", "Torch-Pruning": "torch_pruning_taylor"}


@pytest.mark.parametrize("row", table(1), ids=lambda row: next(iter(row.values())))
def test_the_table_at_equal_time_is_what_the_records_say(row: dict[str, str]) -> None:
    start, time = AT_EQUAL_TIME[next(iter(row.values()))]
    lines = (ROOT / "research" / "records" / "equal_time.jsonl").read_text().splitlines()
    for column, method in TIMED.items():
        target = "45%" if column == "Torch-Pruning" and time == "0.768ms" else time
        runs = [
            run
            for run in map(json.loads, lines)
            if (run["start"], run["method"]) == (start, method) and run["target"].split()[0] == target
        ]
        tried = {run["lr"]: run["top1"] for run in runs if run["final"] is False}
        best = max(tried, key=lambda lr: tried[lr], default=None)
        final = {run["seed"]: run["top1"] for run in runs if run["final"] is True and best in (None, run["lr"])}
        found = f"{statistics.mean(final.values()):.1f}" if final else ""
        assert row[column].replace("**", "").rstrip("*") == found, column
        assert len(final) in (0, 2 if start == "dinov2_small" else 3)  # as the text below the table says


def test_the_note_on_the_learning_rates_at_35_percent_is_what_the_records_say() -> None:
    picture, records = read_records("vit_tiny")
    note = " ".join((ROOT / "README.md").read_text().split())
    means = []
    for method, rates in {"hiap": (2e-4, 5e-4), "taylor": (5e-4, 1e-3)}.items():
        (at_half,) = {run["lr"] for run in picture["chosen"](records, method, "50%")}
        (own,) = {run["lr"] for run in picture["chosen"](records, method, "35%")}
        assert (at_half, own) == rates
        at_35 = [r for r in records if (r["method"], r["target"]) == (method, "35%")]
        assert {r["lr"] for r in at_35 if not r["final"]} == {2e-4, 5e-4, 1e-3}  # "the same three"
        runs = [r["top1"] for r in at_35 if r["final"] and r["lr"] == at_half]
        assert len(runs) == 3
        means.append(f"{statistics.mean(runs):.1f}")
    assert not [r for r in records if (r["method"], r["target"], r["final"]) == ("l1", "35%", False)]
    assert (
        "It is reused at 70 %, and for l1 at 35 %. For HiAP and Taylor at 35 % it is again the best of the same" in note
    )
    assert (
        f"(for Taylor the largest of them); with the learning rate of 50 % they reach {' and '.join(means)} %." in note
    )


def test_the_learning_rates_of_dinov2_were_chosen_in_runs_as_short_as_the_readme_says() -> None:
    picture, records = read_records("dinov2_small")
    epochs = {record["epochs"] for record in records if not record["final"]}
    assert epochs == {picture["TRIALS"]["dinov2_small"]} == {5}
    assert "(DINOv2-S: in runs of 5 epochs)" in " ".join((ROOT / "README.md").read_text().split())
