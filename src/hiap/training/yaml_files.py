"""YAML files of plain values: the recipes of the package, and files of users, which may hold anything."""

from __future__ import annotations

import os
import reprlib
from importlib.resources import files
from typing import Any, NoReturn

import yaml

from hiap.errors import ConfigError

__all__ = ["SHORT", "read_yaml", "recipes"]

LONGEST = 100_000  # bytes of a configuration file
DEEPEST = 20  # levels of a value
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
SHORT = reprlib.Repr()  # how values are shown in messages
SHORT.maxdict = SHORT.maxlist = SHORT.maxtuple = 12
SHORT.maxstring = SHORT.maxother = 200


def recipes() -> list[str]:
    """The names of the recipes that come with the package."""
    return sorted(entry.name.removesuffix(".yaml") for entry in (files("hiap") / "configs").iterdir())


def read_yaml(source: str) -> dict[str, Any]:
    """The options and values of a recipe or a file.

    Raises:
        ConfigError: there is no such recipe or file, or it does not hold options and values.
    """
    if source in recipes():
        return dict(yaml.safe_load((files("hiap") / "configs" / f"{source}.yaml").read_text()))
    if not os.path.isfile(source):
        if os.path.exists(source):
            raise ConfigError(f"{source} is not a file; --config takes a YAML file or a recipe: {', '.join(recipes())}")
        raise ConfigError(f"no recipe and no file {SHORT.repr(source)}; recipes: {', '.join(recipes())}")
    try:
        with open(source, "rb") as file:
            content = file.read(LONGEST + 1)
        if len(content) > LONGEST:
            raise ConfigError(f"{source} has more than {LONGEST} bytes: it is not a configuration")
        values = yaml.load(content.decode(), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not text in UTF-8: it is not a configuration") from error
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{source} is not valid YAML: {error.problem or error.context}{line}") from error
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{source} cannot be read: {str(error).splitlines()[0]}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{source} must hold options and values, one per line")
    return values


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """Reads plain values of bounded size and depth: no aliases, which can grow without end, and no key twice."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if getattr(event, "anchor", None) is not None:
            self._refuse("anchors and aliases (& and *) are not read", event)
        if self.depth >= DEEPEST:
            self._refuse(f"values are nested more than {DEEPEST} deep", event)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen: set[str] = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                self._refuse(f"{SHORT.repr(key.value)} is given twice", key)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: Any, deep: bool = False) -> Any:
        """A value; what cannot be the number or the date that it looks like is refused where it stands."""
        if node.tag in NUMBERS and len(node.value) > 40:
            self._refuse(f"{SHORT.repr(node.value)} is too long for a number", node)
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            self._refuse(f"{SHORT.repr(node.value)} is not a valid {node.tag.rpartition(':')[2]} ({error})", node)

    def _refuse(self, problem: str, at: Any) -> NoReturn:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=at.start_mark)
