"""Whatever a configuration or a command line holds, a command ends with a status and a message, never a traceback."""

import contextlib
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from hiap.cli.main import main
from hiap.training.config import read_config
from hiap.training.options import help_of

pytestmark = pytest.mark.slow

BASE = read_config(
    "digits", {"model_args": {**read_config("digits").model_args, "depth": 2, "embed_dim": 16}}
).to_yaml()
KEYS = [name for name, _, _ in help_of()]
BOMB = "a: &a [1, 1]\nb: &b [*a, *a, *a, *a, *a, *a]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]\n" for old, new in zip("bcdefghij", "cdefghijk", strict=True)
)
VALUES = [
    *("null", "true", "0", "1", "-1", "2", "0.5", "-0.5", "7", "1e-3", "", "~", "nothing", "'", '"', "[]", "{}", "[1]"),
    *(".nan", ".inf", "-.inf", "nan", "inf", "-inf", "1e999999999", "1.0e+308", "1e-320", "9" * 30, "9" * 5000),
    *("0x" + "f" * 5000, "-" + "9" * 19, "1:30:30", "1_000", "2026-13-45", "2026-01-01", "[1, [2, [3]]]", "a" * 3000),
    *("!!int ''", "!!float x", "!!bool x", "!!binary x", "!!map x", "!!set {a, b}", "!!timestamp x", "!!null x"),
    *("!!python/object/apply:os.system [ls]", "<<", "*a", "&a 1", "? [a]", "{1: 2}", "{a: [b, {c: d}]}", "%"),
    *("é", "50%", "0%", "1e9%", "..%", "3G", "1.2M params", "1.8ms", "2x", "-5%", "9" * 400 + "%", "/", "."),
    *("\t", "\0"),
    *("[" * 200, "{a: " * 200, "- " * 200, "[nan]", "[0.5, .inf]", "[0]", "[-3, 9]", "[1e-3]", "fp16", "cuda", "paper"),
    *("digits", "wds/a:b", "torch/nothing:x", "resnet18", "test_vit", "none", "rand-m9", "lookahead_adamw", "head"),
]  # fmt: skip
SAFE = [name for name in KEYS if name != "pretrained"]  # which an option has without a value
ARGUMENTS = [
    *("", "x", "{}", "[]", "null", "1", '{"depth": NaN}', '{"depth": 1e999}', '{"depth": 100000}', '{"depth": -1}'),
    *('{"embed_dim": 1000000000}', '{"num_heads": 0}', '{"patch_size": 0}', '{"img_size": [8]}', "[" * 100000),
    *('{"a": ' * 5000, '{"depth": ' + "9" * 5000 + "}", '{"act_layer": 1}', '{"": 1}', '{"norm_layer": {}}'),
    *('{"num_classes": -1}', '{"global_pool": "map"}', '{"reg_tokens": 3}', '{"class_token": false}'),
    *('{"in_chans": 0}', '{"in_chans": 5}', '{"qk_norm": true}', '{"depth": 0}', '{"mlp_ratio": 0}'),
    *('{"pretrained_cfg": {"a": 1}}', '{"checkpoint_path": "x"}', '{"features_only": true}', '{"scriptable": true}'),
]


def run(arguments: list[str]) -> tuple[int, str]:
    """Status of a command line, and what it says on either stream."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            status = main(arguments)
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            status = stopped.code
    return status, said.getvalue()


def check(arguments: list[str]) -> None:
    status, said = run(arguments)
    assert status in (0, 1, 2) and said.strip()
    if status == 1:
        assert said.startswith("hiap: ") or "\nhiap: " in said


@pytest.fixture(scope="module", autouse=True)
def offline() -> Any:
    """A mutation may ask for pretrained weights, which are not fetched here."""
    create = timm.create_model

    def without_weights(*names: Any, pretrained: bool = False, **options: Any) -> Any:
        if pretrained:
            raise OSError("no connection")
        return create(*names, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("timm.create_model", without_weights)
        patch.setattr("hiap.training.plan._timed", timed_once)
        yield


def timed_once(call: Callable[[], object], device: Any) -> float:
    """`plan` runs every step four times for the least of its times; here the step itself is what matters."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


@st.composite
def configurations(draw: st.DrawFn) -> bytes:
    """The configuration of the digits with one to four changes."""
    lines = BASE.splitlines()
    content: bytes | None = None
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["value", "value", "value", "line", "bytes", "twice", "more"]))
        at = draw(st.integers(0, len(lines) - 1))
        if kind == "value":
            lines[at] = f"{draw(st.sampled_from(SAFE))}: {draw(st.sampled_from(VALUES))}"
        elif kind == "line":
            lines[at] = draw(st.text(max_size=40))
        elif kind == "twice":
            lines.append(lines[at])
        elif kind == "more":
            lines.append(draw(st.sampled_from([BOMB, "[" * 50000, "a: " * 30000, "x: y\n" * 25000, "---", "..."])))
        else:
            raw = bytearray("\n".join(lines).encode("utf-8", "surrogatepass") if content is None else content)
            for _ in range(draw(st.integers(1, 20))):
                raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
            content = bytes(raw)
    return "\n".join(lines).encode("utf-8", "surrogatepass") if content is None else content


quiet = settings(
    max_examples=200, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.filterwarnings("ignore")
@seed(7)
@quiet
@given(content=configurations(), command=st.sampled_from([["plan"], ["prune", "--print-config"]]))
def test_mutated_configurations_end_with_a_message(content: bytes, command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_bytes(content)
    check([*command, "--config", str(file)])


@st.composite
def options(draw: st.DrawFn) -> list[str]:
    """One to four options with odd values."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(SAFE))
        values = ARGUMENTS if name == "model_args" else VALUES
        found += [f"--{name.replace('_', '-')}={draw(st.sampled_from(values))}"]
    if draw(st.booleans()):
        found.append(f"--model-args={draw(st.sampled_from(ARGUMENTS))}")
    return found


@pytest.mark.filterwarnings("ignore")
@seed(7)
@quiet
@given(given_options=options(), command=st.sampled_from([["plan"], ["prune", "--print-config"]]))
def test_mutated_command_lines_end_with_a_message(given_options: list[str], command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(BASE)
    check([*command, "--config", str(file), *given_options])


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_odd_arguments_of_the_model_end_with_a_message(arguments: str, tmp_path: Path) -> None:
    check(["plan", "--config", "digits", "--model-args", arguments])


def test_the_configuration_that_is_mutated_is_valid(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(BASE)
    status, said = run(["plan", "--config", str(tmp_path / "config.yaml")])
    assert status == 0 and "2 blocks" in said
