"""Options of the command line: one for each field of the configuration, and the kinds of values they take."""

from __future__ import annotations

import argparse
import json
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hiap.errors import InputError
from hiap.training.config import Config, read_config, recipes
from hiap.training.options import ABLATIONS, CHOICES, FIRST, GROUPS, help_of

__all__ = ["add_config", "given_options", "listed", "positive", "read_options", "read_value"]

METAVARS = {  # what stands for the value of an option in help
    **{"model": "NAME", "teacher": "NAME", "data": "FOLDER", "target": "BUDGET"},
    **{"weights": "FILE", "teacher_weights": "FILE", "cost": "TABLE"},
}


def add_config(command: argparse.ArgumentParser, every_option: bool, only: Sequence[str] | None = None) -> None:
    """One option for each field of the configuration, or for some of them, in groups.

    Args:
        every_option: help shows all of them, not only those that most people need.
        only: the fields; all of them by default.
    """
    if only is None:
        command.add_argument("--config", help=f"recipe or YAML file; recipes: {', '.join(recipes())}")
        command.add_argument("--help-all", nargs=0, action="help_all", help="show all options, not only the usual ones")
    defaults, group = Config(), command.add_argument_group("model")
    for name, kind, text in help_of():
        if GROUPS.get(name, "model") != "model":
            about = ABLATIONS if GROUPS[name] == "for ablations" and every_option and only is None else None
            group = command.add_argument_group(GROUPS[name], about)
        if only is not None and name not in only:
            continue
        required = only is not None and name == "data"
        default = None if name == "data" or (only and name == "model") else getattr(defaults, name)
        text = f"{text} (default {default})" if default not in (None, [], {}, 0) else text
        text = text.replace("%", "%%") if every_option or name in FIRST else argparse.SUPPRESS
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, default=None, help=text, required=required, **_reading(name, kind))


def _reading(name: str, kind: Any) -> dict[str, Any]:
    """How argparse reads the value of an option, by the type of its field."""
    if bool in (kind, *typing.get_args(kind)):
        return {"action": argparse.BooleanOptionalAction}
    if name == "ratio":
        return {"type": _ratio, "metavar": "MACRO:MICRO"}
    if "list" in str(kind):
        inner = next(a for a in (kind, *typing.get_args(kind)) if typing.get_origin(a) is list)
        return {"type": listed(typing.get_args(inner)[0]), "metavar": "A,B"}
    if name == "model_args":
        return {"type": _object, "metavar": "JSON"}
    plain = next(t for t in (*typing.get_args(kind), kind) if t in (int, float, str))
    words = f"{{{','.join(CHOICES[name])}}}" if name in CHOICES else {int: "N", float: "X"}.get(plain, "TEXT")
    return {"type": plain, "metavar": METAVARS.get(name, words)}


def read_options(options: argparse.Namespace) -> Config:
    """The configuration of a run: that of its folder where it is resumed, else the recipe or file, with all options."""
    given = given_options(options)
    if getattr(options, "resume", False) and options.config is None and options.out:
        from hiap.training.run_folder import CONFIG, RunFolder

        RunFolder.check(Path(options.out), resume=True)
        return read_config(Path(options.out, CONFIG), given)
    if options.config is None and "data" not in given:
        raise InputError(
            f"hiap {options.command} needs images: --data FOLDER with train/ and val/ (or --val-split 0.1), the model "
            "they are for (--model NAME, --weights FILE) and a --target such as 50%. `hiap demo` needs none of these"
        )
    return read_config(options.config, given)


def given_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the configuration that a command line has."""
    return {name: getattr(options, name) for name, _, _ in help_of() if getattr(options, name) is not None}


def read_value(name: str, text: str) -> Any:
    """The value of an option of the configuration from its text, as the command line reads it.

    Raises:
        InputError: with what the value must be.
    """
    reading = _reading(name, next(kind for one, kind, _ in help_of() if one == name))
    if "type" not in reading:
        if text.lower() not in ("true", "false"):
            raise InputError(f"must be true or false; found {text[:80]!r}")
        return text.lower() == "true"
    try:
        return reading["type"](text)
    except argparse.ArgumentTypeError as error:
        raise InputError(str(error)) from error
    except ValueError as error:
        need = "a whole number" if reading["type"] is int else "a number"
        raise InputError(f"must be {need}; found {text[:80]!r}") from error


def positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 999999999; found {text[:80]!r}")
    return int(text)


def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    """Reads values of a kind with commas between them."""

    def read(text: str) -> list[Any]:
        try:
            found = [kind(part) for part in text.split(",") if part]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"must be comma-separated values: {error}") from error
        if text and not found:
            raise argparse.ArgumentTypeError(f"must be comma-separated values; found {text!r}")
        return found

    return read


def _ratio(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(":")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be two numbers such as 2:1; found {text[:80]!r}") from None


def _object(text: str) -> Any:
    """A JSON object; what JSON does not have, NaN say, is refused."""

    def refuse(constant: str) -> Any:
        raise InputError(f"{constant} is not JSON")

    try:
        found = json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise argparse.ArgumentTypeError("must be a JSON object; found values nested too deeply") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"must be a JSON object such as '{{\"depth\": 6}}'; found {text[:80]!r} ({error})"
        ) from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object such as '{{\"depth\": 6}}'; found {text[:80]!r}")
    return found
