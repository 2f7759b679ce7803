"""The commands of the comparisons: what they refuse before they run, batches, and lists of commands."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import compare
import hiap
from methods import METHODS

FOLDER = Path(compare.__file__).parent


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--methods hiap,slim", "unknown method slim; known: hiap, "),
        ("--like haip", "unknown method haip"),
        ("--target 2Mparams", "must be in MACs"),
        ("--target 2ms", "must be in MACs, such as 50% or 0.6G, or pass --cost TABLE; found 2ms"),
        ("--methods hiap_time", "hiap_time has a target in time: pass --cost TABLE"),
        ("--methods hiap_time --target 2ms --cost table.json", "table.json is not a table of `hiap measure`"),
        ("--set lr=1e-3", "use --rates"),
        ("--set dense_epochs=3", "different starts"),
        ("--set distill_features=1 --methods hiap,torch_pruning_taylor", "whose networks are narrower"),
        ("--set freeze_at=0.3 --methods hiap,taylor", "means nothing to taylor"),
        ("--data nowhere", "--data nowhere is no folder"),
        ("--model resnet18", "it is not a timm VisionTransformer"),
        ("--set foo=1", "unknown option 'foo'"),
        ("times --methods hiap", "`times` is for peers with targets in MACs"),
        ("times --methods taylor --target 2ms", "must be in MACs"),
    ],
)
def test_comparisons_refuse_before_they_run(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command, given = ("times", given.removeprefix("times ")) if given.startswith("times ") else ("run", given)
    base = (
        f"compare.py {command} --data . --model test_vit --methods hiap --set pretrained=false --records records.jsonl"
    )
    monkeypatch.setattr(sys, "argv", [*base.split(), *given.split()])
    with pytest.raises(SystemExit, match=re.escape(message)):
        compare.main()
    assert not (tmp_path / "records.jsonl").exists()


def test_an_arm_out_of_reach_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def run_method(options: object, method: str, config: object, final: bool, device: object) -> dict:
        if method == "taylor":
            raise hiap.BudgetError("a target of 5% is out of reach")
        done.append(method)
        return {"top1": 70.0, "macs": 5, "dense_macs": 100}

    monkeypatch.setattr(compare, "run_method", run_method)
    base = f"compare.py run --data {tmp_path} --model test_vit --set pretrained=false --records {tmp_path / 'r.jsonl'}"
    monkeypatch.setattr(sys, "argv", f"{base} --methods taylor,depth --rates 1e-3 --seeds 0 --target 5%".split())
    with pytest.raises(SystemExit, match="these methods were not run:\ntaylor: a target of 5% is out of reach"):
        compare.main()
    assert done == ["depth"]


@pytest.mark.parametrize(
    ("line", "jobs", "message"),
    [
        ("run --methods slim", 2, "unknown method slim"),
        ("prune --methods hiap", 2, "run, clock, speed, times or wait; found prune"),
        ("run", 0, "--jobs must be at least 1; found 0"),
    ],
)
def test_a_batch_refuses_before_it_runs(
    line: str, jobs: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "list.txt").write_text(f"run --methods hiap\nwait\n{line}\n")
    given = f"--data {tmp_path} --model test_vit --records {tmp_path / 'records.jsonl'} --jobs {jobs}"
    monkeypatch.setattr(sys, "argv", f"compare.py batch --list {tmp_path / 'list.txt'} {given}".split())
    begun = []
    monkeypatch.setattr(compare.subprocess, "run", lambda *_, **__: begun.append(1))
    with pytest.raises(SystemExit, match=re.escape(message)):
        compare.main()
    assert not begun


def test_a_batch_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list is gone through, what stands below `wait` last; what failed is named in the end."""
    (tmp_path / "list.txt").write_text("clock --methods hiap\nclock --methods depth\nwait\nclock --methods taylor\n")
    given = f"--data {tmp_path} --model test_vit --set pretrained=false --records {tmp_path / 'none.jsonl'}"
    batch = f"compare.py batch --list {tmp_path / 'list.txt'} --jobs 2 {given}"
    monkeypatch.setattr(sys, "argv", batch.split())
    done: list[str] = []

    def process(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess:
        method = command[-1]
        assert method != "taylor" or sorted(done) == ["depth", "hiap"]
        time.sleep(0.3 * (method == "depth"))
        done.append(method)
        return subprocess.CompletedProcess([], {"depth": 0, "hiap": 1, "taylor": -9}[method])

    resumed: list[int] = []
    monkeypatch.setattr(compare, "resume_all", lambda: resumed.append(len(done)))
    monkeypatch.setattr(compare.subprocess, "run", process)
    with pytest.raises(SystemExit, match=r"these failed.*\nclock .* --methods hiap\nclock .* --methods taylor$"):
        compare.main()
    assert done == ["hiap", "depth", "taylor"]
    assert resumed == [3]  # after the run that was killed


def test_the_old_spelling_of_methods_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = f"compare.py run --data {tmp_path} --model test_vit --records {tmp_path / 'r.jsonl'} --arms slim"
    monkeypatch.setattr(sys, "argv", base.split())
    with pytest.raises(SystemExit, match="unknown method slim; known: hiap, "):
        compare.main()


def test_the_lists_of_runs_are_accepted_as_they_stand() -> None:
    """Every line names a command and methods that exist."""
    for path in sorted((FOLDER / "lists").glob("*.txt")):
        commands = [line.split() for line in path.read_text().splitlines() if line and line[0] != "#"]
        assert {words[0] for words in commands} <= {"run", "clock", "speed", "wait"}
        methods = {words[words.index("--methods") + 1] for words in commands if "--methods" in words}
        assert {name for names in methods for name in names.split(",")} <= set(METHODS)
