"""What stands around the package: how to cite it, what the public workflow runs, and the table of the README."""

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
    if not (ROOT / "mkdocs.yml").exists():  # a checkout without the site
        del runs["docs"]
    assert set(runs) <= targets


def table() -> list[dict[str, str]]:
    """The first table of the README, a dictionary a row."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|")]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(head, row, strict=True)) for row in rows if len(row) == len(head)]


def read_records(start: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The script of the picture, which knows how a learning rate is chosen, and the records it reads."""
    picture: dict[str, Any] = runpy.run_path(str(ROOT / "research" / "picture.py"))
    (path,) = ROOT.glob("*/records/compare.jsonl")
    return picture, picture["read"](path, start)


@pytest.mark.parametrize("row", table(), ids=lambda row: next(iter(row.values())))
def test_the_table_of_the_readme_is_what_the_records_say(row: dict[str, str]) -> None:
    start, share = re.fullmatch(r"(\S+), (\d+) %", next(iter(row.values()))).groups()  # type: ignore[union-attr]
    picture, records = read_records(STARTS[start])
    for method, arm in METHODS.items():
        runs = picture["chosen"](records, arm, f"{share}%")
        found = f"{statistics.mean(run['top1'] for run in runs):.1f}" if runs else ""
        assert row[method].strip("*") == found, method
        assert len(runs) in ((0, 3) if start == "ViT-Ti" else (0, 2))


def test_the_note_on_the_learning_rate_at_35_percent_is_what_the_records_say() -> None:
    picture, records = read_records("vit_tiny")
    (at_half,) = {run["lr"] for run in picture["chosen"](records, "hiap", "50%")}
    (own,) = {run["lr"] for run in picture["chosen"](records, "hiap", "35%")}
    assert (at_half, own) == (2e-4, 5e-4)
    runs = [r for r in records if (r["method"], r["target"], r["lr"], r["final"]) == ("hiap", "35%", at_half, True)]
    mean = statistics.mean(run["top1"] for run in runs)
    assert (
        len(runs) == 3
        and f"with the learning rate of 50 % it reaches {mean:.1f} %." in (ROOT / "README.md").read_text()
    )
