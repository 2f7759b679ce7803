"""What the docs show is run, what they link to exists, and the site builds.

Every page may use the names that `scratch` provides: `model` and `my_vit` (tiny timm ViTs of two classes),
`train_loader`, `val_loader`, `images` (a batch), `hiap`, `timm`, `torch`, the folder `photos/` and the weights
`my.safetensors`. Models that a page makes with timm are made tiny and without pretrained weights, and runs have a few
epochs and no loader workers, whatever the page says. Blocks of a page share one namespace and one folder, in order.
"""

import ast
import importlib.util
import json
import os
import pydoc
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import timm
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

import hiap
from conftest import write_photos
from hiap.cli.main import main
from hiap.models import registry
from hiap.report import plotting

ROOT = Path(__file__).resolve().parents[1]
TINY = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
GENERATED = ["docs/options.md", "docs/commands.md"]
RESEARCH = ("docs/results.md",)  # its commands are of research/ and need a GPU
GUIDES = [page for page in PAGES if page not in RESEARCH] + GENERATED
LAUNCHERS = ("accelerate", "torchrun")
FOREIGN = re.compile(r"(accelerate|torchrun)\b.*?-m hiap|(^|`)(pip|make|python)\b[^`\n]*", re.MULTILINE)  # commands
FENCE = re.compile(r"^( *)```([^\n`]*)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"""(?:\]\(|\bsrc(?:set)?=")([^)\s"]+)[)"]""")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
MAKE, PRUNE = timm.create_model, hiap.prune
CHOICES = {
    "data_device": "loader cpu cuda",
    "accounting": "exact paper",
    "gate_mode": "importance gradient",
    "precision": "fp32 bf16 fp16",
    "keep": "last best",
    "objective": "labels features",
}
EPOCHS = 3  # of every run


def hooks() -> ModuleType:
    """docs/hooks.py, which writes the generated pages."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HOOKS = hooks()
NAMES = HOOKS.option_names()


def text_of(page: str) -> str:
    made = {"docs/options.md": HOOKS.options_page, "docs/commands.md": HOOKS.commands_page}
    return made[page]() if page in made else (ROOT / page).read_text()


def fences(page: str) -> list[tuple[str, str]]:
    """The language and the text of each code block of a page."""
    return [(found[2].strip(), found[3]) for found in FENCE.finditer(text_of(page))]


def blocks(file: str) -> list[str]:
    return [text for language, text in fences(file) if language == "python"]


def commands(block: str) -> list[list[str]]:
    """The words of each command of a shell block."""
    lines = block.replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def short_prune(config: hiap.Config, *given: Any, **named: Any) -> Any:
    """What `hiap.prune` does in a page: the run it is asked for, in a few epochs."""
    return PRUNE(replace(config, epochs=EPOCHS, workers=0), *given, **named)


def small_model(name: str, pretrained: bool = False, **given: Any) -> torch.nn.Module:
    """What `timm.create_model` gives back in a page: the same kind of model, tiny and with random weights."""
    return MAKE(name, **given) if name.startswith("local-dir:") else MAKE(name, **{**TINY, **given})


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """A folder to run a page in, and the names it may use."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timm, "create_model", small_model)
    monkeypatch.setattr(hiap, "prune", short_prune)
    monkeypatch.setattr(plotting, "_svg", lambda *drawing: "<svg></svg>")  # reports have tests of their own
    monkeypatch.setattr(registry, "_FAMILIES", dict(registry._FAMILIES))  # what a page registers is gone after it
    write_photos(tmp_path / "photos")
    torch.manual_seed(0)
    vit = small_model("vit_tiny_patch16_224", num_classes=2).eval()
    safetensors.torch.save_file(vit.state_dict(), "my.safetensors")
    torch.save(vit.state_dict(), "my.pth")
    Path("imagenet").symlink_to("photos")
    loaders = [
        DataLoader(TensorDataset(torch.randn(n, 3, 32, 32), torch.arange(n) % 2), batch_size=8, shuffle=n > 16)
        for n in (32, 16)
    ]
    yield {
        "hiap": hiap,
        "timm": timm,
        "torch": torch,
        "model": vit,
        "my_vit": small_model("vit_tiny_patch16_224", num_classes=2).eval(),
        "train_loader": loaders[0],
        "val_loader": loaders[1],
        "images": torch.randn(4, 3, 32, 32),
    }


def check_command(words: list[str]) -> list[str] | None:
    """Check a command of a page; returns the arguments of a `hiap` command, also behind a launcher."""
    program, *rest = words
    if program in LAUNCHERS:
        start = rest.index("-m") + 1
        assert rest[start] == "hiap", f"{words}: a launcher of the docs starts `-m hiap`"
        return check_command(rest[start:])
    if program == "hiap":
        check_options(HOOKS.command_line().parse_args(rest))
        return rest
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert rest and set(rest) <= set(targets), f"{words}: no such target"
    elif program == "pip":
        known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
        named = re.findall(r"\[([\w,]+)\]", " ".join(rest))
        assert {extra for names in named for extra in names.split(",")} <= set(known), f"{words}: no such extra"
    elif program in ("python", "python3"):
        assert (ROOT / rest[0]).is_file(), f"{words}: no such file"
    elif program != "cd":
        raise AssertionError(f"{words}: {program} is no program that the tests can check")
    return None


def check_options(options: Any) -> None:
    """Check the values of a `hiap prune` or `plan`, with empty files in the place of those it names."""
    given = {name: value for name in NAMES if (value := getattr(options, name, None)) is not None}
    if options.command not in ("prune", "plan") or getattr(options, "resume", False):
        return
    for name in ("weights", "teacher_weights", "cost"):
        if name in given and not os.path.exists(given[name]):
            Path(given[name]).touch()
    hiap.read_config(options.config, given)


def shortened(arguments: list[str]) -> list[str]:
    """The arguments of a command that takes seconds on a CPU; of two values of an option the last counts."""
    command, here = arguments[0], []
    if command == "demo":
        small = json.dumps({**TINY, "img_size": 8, "patch_size": 4, "in_chans": 1})
        short = ["--model-args", small, "--epochs", "1", "--dense-epochs", "1"]
        return ["prune", "--config", "digits", *short, "--out", "demo"]
    if command in ("prune", "plan", "evaluate"):
        here += ["--workers", "0"]
    if command in ("prune", "plan") and "--resume" not in arguments:
        here += ["--epochs", str(EPOCHS)]
        target = arguments[arguments.index("--target") + 1] if "--target" in arguments else ""
        here += ["--target", "1.05x"] if target.endswith(("x", "ms")) else []  # small networks gain little time
        here += ["--deploy", "1"] if "--deploy" in arguments else []
    if command == "measure":
        here += ["--device", "cpu", "--precision", "fp32", "--batch-size", "2", "--mode", "eager"]
    if command == "bench":
        here += ["--precision", "fp32", "--batch-size", "2", "--mode", "eager", "--runs", "3", "--warmup", "1"]
        here += ["--runtime", "torch,pt2"] if "--runtime" in arguments else []  # which exports fastest
        here += ["--quantize", "int8"] if "--quantize" in arguments else []  # fp8 needs a GPU
    return [*arguments, *here]


def run_command(arguments: list[str]) -> int:
    """Run a `hiap` command of a page. The paper's topologies need whole models, and have tests of their own."""
    if "--topology" in arguments or arguments[0] == "push":  # which needs the hub, and has tests of its own too
        return 0
    if "--quantize" in arguments and arguments[0] != "export" and importlib.util.find_spec("torchao") is None:
        return 0
    if arguments[:2] == ["diff", "runs/mine"]:
        shutil.copytree(arguments[1], arguments[2])
    if arguments[0] == "sweep":  # whose runs are processes of their own, with whole models
        return 0 if "--resume" in arguments else main([*arguments, "--dry-run"])
    if arguments[0] == "prune" and "--out" in arguments and "--resume" not in arguments:
        shutil.rmtree(arguments[arguments.index("--out") + 1], ignore_errors=True)  # of the block before
    if arguments[0] == "export" and not Path(arguments[1]).exists():  # of a run that has ended
        model = small_model("vit_tiny_patch16_224", num_classes=2)
        hiap.save(hiap.extract(model, hiap.Topology.from_counts(model, heads=[1] * 3)), arguments[1], ["cat", "dog"])
    return main(shortened(arguments))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in GUIDES if page != "docs/own_loop.md"])  # which has its own test
def test_every_code_block_of_a_page_runs(page: str, scratch: dict[str, Any]) -> None:
    if page == "docs/export.md":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason='pip install "hiap[onnx]"')
    for number, (language, text) in enumerate(fences(page), 1):
        if language == "python":
            exec(compile(text, f"{page}, block {number}", "exec"), scratch)
        elif language in ("sh", ""):
            for words in commands(text):
                arguments = check_command(words)
                if arguments and page not in GENERATED:  # examples of the help, for models of every size
                    assert run_command(arguments) == 0, words
        elif language == "yaml":
            Path("mine.yaml").write_text(text)
            hiap.read_config("mine.yaml")
        else:
            assert language == "text", f"{page}: a block of {language!r} cannot be run"


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


@pytest.mark.parametrize(
    "command", ["a --target 50%", "prune --data photos/ --target fifty", "prune --data x --tarket 1G"]
)
def test_a_command_that_hiap_does_not_take_is_noticed(command: str, scratch: dict[str, Any]) -> None:
    with pytest.raises((SystemExit, hiap.HiapError)):
        check_command(["hiap", *command.split()])


# -- links ------------------------------------------------------------------------------------------------------------


def slugs(text: str) -> set[str]:
    """The anchors of a page: of its headings, and those it gives itself."""
    text = FENCE.sub("", text)
    found = set(re.findall(r"\{ ?#([\w-]+) ?\}", text))
    for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
        found.add(re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-"))
    return found | set(re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE))


def broken_links(page: str, text: str) -> list[str]:
    """Relative links of a page that lead nowhere."""
    wrong = []
    for link in LINK.findall(FENCE.sub("", text)):
        name, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = os.path.normpath(os.path.join(os.path.dirname(page), name)) if name else page
        in_site = page.startswith("docs/") and target in [*GENERATED, "docs/changelog.md"]  # not in a checkout
        found = target == page or in_site or (ROOT / target).exists()
        if found and anchor and target.endswith(".md"):
            found = anchor in slugs(text if target == page else text_of(target))
        wrong += [] if found else [link]
    return wrong


@pytest.mark.parametrize("page", [*PAGES, *GENERATED, "CONTRIBUTING.md", "CHANGELOG.md"])
def test_every_relative_link_and_anchor_leads_somewhere(page: str) -> None:
    assert broken_links(page, text_of(page)) == []


def test_a_broken_link_is_noticed() -> None:
    text = "# One two\n[a](#one-two) [b](#three) [c](nowhere.md) [d](format.md#nothing) [e](method.md) ![f](x.png)\n"
    text += '<img src="y.png">\n'
    assert broken_links("docs/new.md", text) == ["#three", "nowhere.md", "format.md#nothing", "x.png", "y.png"]
    assert broken_links("README.md", "[a](docs/options.md) [b](docs/method.md)") == ["docs/options.md"]


# -- reference --------------------------------------------------------------------------------------------------------


def test_every_option_is_on_the_options_page_with_its_choices() -> None:
    rows = [line for line in HOOKS.options_page().splitlines() if line.startswith("| `--")]
    assert [re.match(r"\| `--([\w-]+)`", row)[1].replace("-", "_") for row in rows] == NAMES
    for name, words in CHOICES.items():
        assert f" One of {', '.join(f'`{word}`' for word in words.split())}." in rows[NAMES.index(name)]
    assert sum("One of" in row for row in rows) == len(CHOICES)


def test_every_command_is_on_the_page_of_the_command_line() -> None:
    page = HOOKS.commands_page()
    for name, parser in HOOKS.parsers().items():
        assert f"\n## hiap {name}\n\n{parser.description}\n" in page
    for flag in ("--resume", "--topology", "--unit", "--against"):
        assert f"| `{flag}" in page


@pytest.mark.parametrize("page", GUIDES)
def test_every_option_that_a_page_mentions_exists(page: str) -> None:
    known = {
        flag for parser in HOOKS.parsers().values() for action in parser._actions for flag in action.option_strings
    }
    known |= {"--version", "--help"}
    assert unknown_options(text_of(page), known) == set()


def unknown_options(text: str, known: set[str]) -> set[str]:
    """Options that a text mentions and `hiap` does not have, those of other programs' commands aside."""
    return set(OPTION.findall(FOREIGN.sub("", text))) - known


def test_an_option_that_does_not_exist_is_noticed_beside_other_commands() -> None:
    text = (
        "`pip install --quiet x`, then `--here` and `--gone`.\nmake --jobs 2\ntorchrun --nproc 2 -m hiap prune --lost\n"
    )
    assert unknown_options(text, {"--here"}) == {"--gone", "--lost"}


def test_the_api_page_has_every_public_name() -> None:
    listed = re.findall(r"^::: (hiap\.[\w.]+)$", text_of("docs/api.md"), re.MULTILINE)
    assert [path for path in listed if pydoc.locate(path) is None] == []
    assert set(hiap.__all__) <= {path.rpartition(".")[2] for path in listed}


def test_the_messages_that_troubleshooting_quotes_are_those_of_the_sources() -> None:
    said = []
    for file in (ROOT / "src/hiap").rglob("*.py"):
        said += [node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant)]
    said = [text for text in said if isinstance(text, str)]
    quoted = re.findall(r'^#+ "(.*)"$', text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert len(quoted) > 20
    for part in [part for quote in quoted for part in quote.split(" ... ")]:
        assert any(part in text for text in said), part


def test_the_functions_that_the_method_page_names_exist() -> None:
    rows = [line.split("|")[-2] for line in text_of("docs/method.md").splitlines() if line.startswith("| ")]
    named = [name for row in rows for name in re.findall(r"`(hiap\.[\w.]+)`", row)]
    assert len(named) > 15
    assert [name for name in named if pydoc.locate(name) is None] == []


# -- the site ---------------------------------------------------------------------------------------------------------


def test_a_link_out_of_the_site_becomes_the_path_of_the_file() -> None:
    text = "[records](../research/records), [choices](../research/choices.md#x), "
    text += "[h200.json](../research/records/h200.json), [method](method.md#y)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="results.md"))
    assert HOOKS.on_page_markdown(text, page, None, None).split(", ") == [
        "records in `research/records`",
        "choices in `research/choices.md`",
        "`research/records/h200.json`",
        "[method](method.md#y)",
    ]


def test_a_help_text_that_begins_with_a_value_keeps_its_spelling() -> None:
    page = HOOKS.commands_page()
    assert "| cuda or cpu; " in page and "| fp32, tf32, bf16 or fp16 " in page and "| ms, or mJ " in page
    assert "| Images at a time" in page


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(tmp_path / "site"), strict=True)
    config.plugins.on_startup(command="build", dirty=False)
    build(config)
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = re.findall(r"[\w]+\.md", str(nav))
    assert len(named) >= 14
    for name in named:
        html = (tmp_path / "site" / name.replace(".md", ".html")).read_text()
        assert "https://" not in re.sub(r"<a [^>]*>", "", html), f"{name} loads something from elsewhere"
