"""The report of a run: its facts, its formats, and folders of every state."""

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import hiap
from hiap.cli.inspect_command import macs_by_part
from hiap.cli.main import main
from hiap.errors import InputError
from hiap.nn.compact import Widths
from hiap.pruning.count import geometry
from hiap.pruning.topology import Topology
from hiap.report.decisions import decisions_of
from hiap.report.gathering import gather, gather_all
from hiap.report.margins import one_percent
from hiap.report.writing import report_text, write_report
from hiap.training.run_folder import RunFolder
from hiap.training.snapshots import snapshot
from made_runs import made_run, write_lines

LIMIT = 3_000_000  # bytes of a page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_run(tmp_path_factory.mktemp("report") / "run", 20)


@pytest.fixture(scope="module")
def page(run: Path) -> str:
    return write_report(run).read_text()


def charts(page: str) -> list[str]:
    return re.findall(r'<figure class="chart" role="img" aria-label="([^"]*)"', page)


def test_a_finished_run_has_all_of_its_sections_and_charts(page: str) -> None:
    assert re.findall("<h2>(.*?)</h2>", page) == [
        "The network",
        "How it came about",
        "Training",
        "When it was decided",
        "Gate probabilities",
        "Topology",
        "Verification",
        "Where it comes from",
    ]
    assert charts(page)[:4] == ["Heads", "Value dims", "Q/k dims", "Neurons"]
    assert {"Accuracy, percent", "Loss and its terms", "Cost, share of the dense model"} < set(charts(page))
    assert {"Temperature", "Decisions that are final", "Closed units that came back"} < set(charts(page))
    assert page.count("<svg") == len(charts(page)) + 2 * 4  # two drawings a block
    assert "79.20 %" in page and "-0.80 points" in page and "1.29x faster" in page
    assert "This run has no distillation" not in page and 'class="notes"' not in page
    assert "hiap prune --data photos/ --out &lt;run&gt;" in page  # what a user typed is text, never markup


def test_a_page_refers_to_nothing_outside_itself(page: str) -> None:
    assert not re.findall(r'(?:src|href)="(?!data:|#)[^"]*"', page)
    assert not re.findall(r"url\((?!#)|@import|https?://(?!www\.w3\.org/)", page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"done": 0.3, "taught": False}, "The run was stopped before its end: final accuracy, speed and verification"),
        ({"epochs": 1, "taught": False}, ""),
        ({"done": 0.0}, "There is no record of an epoch."),
    ],
)
def test_a_page_says_what_is_missing(given: dict[str, Any], note: str, tmp_path: Path) -> None:
    page = write_report(made_run(tmp_path / "run", **{"epochs": 10, "depth": 2, **given})).read_text()
    assert note in page and bool(note) == ('class="notes"' in page)
    assert ("This run has no distillation" in page) == (given.get("taught") is False)
    assert '<div class="network"' in page
    assert ("<h3>Epochs done</h3>" in page) == (given.get("done") == 0.3)


def test_a_crash_in_the_middle_of_a_line_loses_that_line_alone(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    for name in ("metrics.jsonl", "gates.jsonl"):
        with (tmp_path / "run" / name).open("a") as file:
            file.write('{"step": 99998, "decisions": "?"}\n{"step": 99999, "he' if "gates" in name else '{"step": 9')
    found, whole = gather(tmp_path / "run"), gather(run)
    assert (found.metrics, found.snapshots) == (whole.metrics, whole.snapshots)


def test_a_run_that_holds_its_folder_is_still_running(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", 10, depth=2, done=0.4)
    config = (folder / "config.yaml").read_text()
    (folder / "checkpoint-000000400").rename(tmp_path / "kept")
    holder = RunFolder(folder, config, resume=False)
    (tmp_path / "kept").rename(folder / "checkpoint-000000400")
    assert gather(folder).state == "running"
    assert "still running" in report_text(gather_all(folder), "run", "md")
    holder.close()
    assert gather(folder).state == "stopped"


def test_a_model_without_its_run_has_a_page_beside_its_folder(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run / "compact", tmp_path / "mine")
    path = write_report(tmp_path / "mine")
    assert path == tmp_path / "mine.report.html" and sorted(p.name for p in tmp_path.iterdir()) == ["mine", path.name]
    page = path.read_text()
    assert "The run that made this model is not in the folder: there are no curves and no accuracy." in page
    assert re.findall("<h2>(.*?)</h2>", page) == ["The network", "Topology", "Verification", "Where it comes from"]
    assert gather(run / "compact").state == "finished"  # its run is around it


def test_a_ladder_in_its_second_rung_shows_both(tmp_path: Path) -> None:
    made_run(tmp_path / "ladder" / "70%", 10, depth=2, share=0.7, target="70%")
    made_run(tmp_path / "ladder" / "50%", 10, depth=2, done=0.4, target="50%")
    (tmp_path / "ladder" / "30%").mkdir()
    (tmp_path / "ladder" / "30%" / "config.yaml").write_text("target: 30%\n")
    listed = [("70%", "done"), ("50%", "running"), ("30%", "waiting")]
    rungs = [{"target": target, "folder": target, "epochs": 10, "state": state} for target, state in listed]
    (tmp_path / "ladder" / "ladder.json").write_text(json.dumps({"format": 1, "rungs": rungs}))
    page = write_report(tmp_path / "ladder").read_text()
    assert re.findall("<summary>Size (.*?)</summary>", page) == ["70%", "50%"]
    rows = re.findall(r"<tr><td>(\d0%)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td>", page)
    assert rows == [
        ("70%", "70%", "finished", "79.20 %"),
        ("50%", "50%", "stopped before the end", "-"),
        ("30%", "30%", "not begun", "-"),
    ]
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert [
        entry["name"] for entry in json.loads(report_text(gather_all(tmp_path / "ladder"), "x", "json"))["runs"]
    ] == [
        "70%",
        "50%",
        "30%",
    ]


def test_a_folder_that_holds_nothing_of_the_kind_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"holds neither a run .* nor a compact model .*: name the folder that"):
        gather(tmp_path)
    assert main(["report", str(tmp_path / "none")]) == 1
    assert capsys.readouterr().err == f"hiap: {tmp_path / 'none'}: there is no such folder\n"


def test_three_hundred_epochs_fit_the_limit(tmp_path: Path) -> None:
    folder = made_run(tmp_path / "run", 300, depth=12, heads=3, dim=48)
    assert write_report(folder).stat().st_size < LIMIT


def test_without_matplotlib_the_page_has_everything_but_the_charts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("plotting", "sections"):
        monkeypatch.setattr(f"hiap.report.{name}.why_not", lambda: "charts need matplotlib")
    page = report_text(gather_all(run), "run", "html")
    assert charts(page) == [] and "<li>Charts need matplotlib.</li>" in page
    assert '<div class="network"' in page and "Macro decisions (heads, FFNs): 90 % were final at epoch" in page


def test_markdown_and_json_say_what_the_page_says(run: Path, tmp_path: Path) -> None:
    text = write_report(run, "md", tmp_path / "card.md").read_text()
    assert "| Top-1 accuracy | 80.00 % | 79.20 % | -0.80 points |" in text.splitlines()
    assert text.count("\n| 0 | ") == 1 and "- Closed at some time and open in the end: " in text
    numbers = json.loads(write_report(run, "json", tmp_path / "x.json").read_text())["runs"][0]
    report = json.loads((run / "report.json").read_text())
    assert {key: numbers[key] for key in ("macs", "dense_macs", "top1")} == {
        key: report[key] for key in ("macs", "dense_macs", "top1")
    }
    assert write_report(run, "json").name == "report.all.json"  # and not the file of the run itself
    assert write_report(run, "png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_decisions_are_final_from_their_last_change_on_and_units_that_came_back_are_counted() -> None:
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=8, patch_size=4, embed_dim=16, depth=1, num_heads=2, in_chans=1
    )
    dense = list(Topology.from_counts(model).dense)
    hiap.attach(model)
    history = [([0, 1], 64), ([0], 64), ([0, 1], 63), ([0, 1], 63)]  # head 1 goes and comes back, neuron 63 goes
    lines = []
    for i, (heads, neurons) in enumerate(history):
        topology = Topology.from_json(
            {
                "format": 1,
                "dense": [asdict(one) for one in dense],
                "blocks": [{"heads": heads, "value_dims": 8, "qk_dims": 8, "neurons": neurons}],
            }
        )
        lines.append(snapshot(model, topology) | {"at": float(i)})
    found = decisions_of(lines, dense)
    assert found is not None and found.units == {
        "heads": 2,
        "value_dims": 16,
        "qk_dims": 16,
        "ffns": 1,
        "neurons": 64,
    }
    assert found.final["heads"] == [0.5, 0.5, 1.0, 1.0] and found.final["ffns"] == [1.0] * 4
    assert found.final["neurons"] == [63 / 64, 63 / 64, 1.0, 1.0]
    assert found.back["heads"] == [0, 0, 1, 0] and found.back["value_dims"] == [0, 0, 8, 0]
    assert found.returned == {"heads": 1, "value_dims": 8, "qk_dims": 8, "ffns": 0, "neurons": 0}
    assert found.settled(("heads", "ffns"), 1.0) == 2.0 and found.settled(("heads", "ffns"), 0.6) == 0.0
    assert decisions_of(lines[:1], dense) is None


def test_one_percent_names_the_widths_that_change() -> None:
    widths = [{"heads": 2, "qk_dim": 8, "value_dim": 8, "neurons": 64}]
    fewer = [{**widths[0], "neurons": 56}]
    entry = {"allowed": 1.0, "cost": 1.0}
    record = {
        "neighbours": [
            {**entry, "step": -1, "loss": 1.05, "widths": fewer},
            {**entry, "step": 0, "loss": 1.0, "widths": widths},
            {**entry, "step": 1, "loss": 1.0, "widths": widths},
        ]
    }
    assert one_percent(record) == [
        "One percent less of the dense cost would change block 0: 64 neurons to 56. "
        "The estimated loss would rise by 5.0%.",
        "One percent more of the dense cost would change nothing. The estimated loss would stay about the same.",
    ]
    assert one_percent({}) == []
    for step, loss in ((-1, 0.5), (1, 2.0)):  # less that is better, more that is worse: the widths are too coarse
        assert (
            one_percent(
                {
                    "neighbours": [
                        {**entry, "step": 0, "loss": 1.0, "widths": widths},
                        {**entry, "step": step, "loss": loss, "widths": fewer},
                    ]
                }
            )
            == []
        )


def test_the_parts_of_the_macs_add_up_to_what_torch_counts() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
    widths = [Widths(**asdict(one)) for one in Topology.from_counts(model).dense]
    parts = macs_by_part(geometry(model.eval()), widths)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, 3, 32, 32))
    assert sum(parts.values()) == counter.get_total_flops() // 2
    assert parts["FFN"] == 2 * 2 * 17 * 48 * 192


def test_inspect_and_diff_print_what_the_folders_hold(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = gather(run).blocks[0]
    assert main(["inspect", str(run)]) == 0
    out = capsys.readouterr().out
    assert f"{block.now.heads}/{block.dense.heads}" in out and "attention, projections" in out
    assert re.search(
        r"^one percent of these MACs, [\d.]+ k, is about \d+ neurons, or [\d.]+ heads of a block$", out, re.M
    )
    shutil.copytree(run, tmp_path / "other")
    report = json.loads((run / "report.json").read_text())
    (tmp_path / "other/report.json").write_text(json.dumps({**report, "top1": 70.0}))
    config = (run / "config.yaml").read_text()
    (tmp_path / "other/config.yaml").write_text(config.replace("epochs: 20", "epochs: 40"))
    assert main(["diff", str(run), str(tmp_path / "other")]) == 0
    out = capsys.readouterr().out
    assert "Top-1 accuracy    79.20 %" in out and "epochs  20  40" in out
    assert out.endswith("the topologies have the same widths\n")
    half = made_run(tmp_path / "half", 10, depth=4, done=0.4)
    assert main(["diff", str(run), str(half)]) == 0
    assert re.search(r"\d of 4 blocks have the same widths in both\n$", capsys.readouterr().out)


def test_old_runs_without_snapshots_still_have_a_page(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run/gates.jsonl").unlink()
    report = json.loads((run / "report.json").read_text())
    for key in ("geometry", "dense_widths", "steps_per_epoch", "answers"):
        del report[key]
    (tmp_path / "run/report.json").write_text(json.dumps(report))
    write_lines(
        tmp_path / "run/metrics.jsonl", [{k: v for k, v in line.items() if k != "at"} for line in gather(run).metrics]
    )
    page = write_report(tmp_path / "run").read_text()
    assert "There is no record of the gates: an older version of hiap made this run." in page
    assert "Cost, share of the dense model" in charts(page) and '<div class="network"' in page
