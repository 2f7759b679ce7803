"""The rooms of the package: each imports only those below it, and a name means one thing."""

import ast
import functools
from collections import Counter
from pathlib import Path

import hiap

SOURCE = Path(hiap.__file__).parent
ROOMS = (
    "nn",
    "models",
    "pruning",
    "budget",
    "speed",
    "export",
    "data",
    "training",
    "report",
    "sweep",
    "cli",
)  # from the ground up
GROUND = ("errors", "atomic")  # files that every room may import
RESOURCES = ("configs", "topologies")  # folders without code
ROOF = ("__init__", "__main__", "registration")  # and those that no room may
LONGEST = 400  # lines of a module, unless its docstring gives a reason


@functools.cache
def modules() -> dict[str, Path]:
    """The modules of the package by name, such as "nn.gates"."""
    return {str(f.relative_to(SOURCE).with_suffix("")).replace("/", "."): f for f in sorted(SOURCE.rglob("*.py"))}


@functools.cache
def imports(file: Path) -> set[str]:
    """What a module imports of the package, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        assert not isinstance(node, ast.ImportFrom) or node.level == 0, f"{file} has a relative import"
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "hiap":
            inside = node.module.partition(".")[2]
            found |= {
                f"{inside}.{one.name}" if f"{inside}.{one.name}".strip(".") in modules() else inside
                for one in node.names
            }
        elif isinstance(node, ast.Import):
            found |= {one.name.partition(".")[2] for one in node.names if one.name.split(".")[0] == "hiap"}
    return found


def level(module: str) -> int:
    room = module.split(".")[0]
    if module in GROUND:
        return -1
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def test_a_listing_shows_the_rooms() -> None:
    folders = {path.name for path in SOURCE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*ROOMS, *RESOURCES}
    assert {path.stem for path in SOURCE.glob("*.py")} == {*GROUND, *ROOF}


def test_every_room_imports_only_those_below_it() -> None:
    wrong = [
        f"{name} imports {other}"
        for name, file in modules().items()
        for other in imports(file)
        if not (other == "" and name.startswith("cli."))  # the public names, which the command line is made of
        and (level(other) > level(name) or (level(name) < 0 and level(other) < 0))
    ]
    assert level("errors") < level("nn.gates") < level("training.loop") < level("")
    assert not wrong


def test_no_two_modules_import_each_other() -> None:
    graph = {name: imports(file) & modules().keys() for name, file in modules().items() if name not in ROOF}
    while leaves := [name for name, others in graph.items() if not others & graph.keys()]:
        for name in leaves:
            del graph[name]
    assert not graph


def test_a_name_means_one_thing() -> None:
    stems = Counter(name.split(".")[-1] for name in modules() if not name.endswith("__init__"))
    classes = Counter(
        node.name
        for file in modules().values()
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, times in (stems + classes).items() if times > 1] == []


def test_a_long_module_says_why() -> None:
    root = Path(__file__).resolve().parents[1]
    folders = (SOURCE, root / "tests", root / "research", root / "docs", root / "examples")
    texts = {str(file): file.read_text() for folder in folders for file in folder.rglob("*.py")}
    long = [name for name, text in texts.items() if len(text.splitlines()) > LONGEST]
    assert [name for name in long if "One file" not in (ast.get_docstring(ast.parse(texts[name])) or "")] == []
