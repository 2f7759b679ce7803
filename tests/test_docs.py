"""What the docs show is run."""

import re
from pathlib import Path

import pytest

import hiap

ROOT = Path(__file__).resolve().parents[1]


def blocks(file: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_loop_of_ones_own_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (loop,) = blocks("docs/own_loop.md")
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(loop, "own_loop.md", "exec"), names)
    saved = hiap.load(tmp_path / "compact")
    assert 0.99 * names["target"] < hiap.macs(saved) <= names["target"]
    assert re.fullmatch(r"(49|50)\.\d% of the MACs\n", capsys.readouterr().out)


def test_the_loop_of_the_readme_is_python_that_names_what_exists() -> None:
    (loop,) = [block for block in blocks("README.md") if "hiap.Schedule" in block]
    compile(loop, "README.md", "exec")
    for name in re.findall(r"hiap\.(\w+)", loop):
        assert hasattr(hiap, name)
