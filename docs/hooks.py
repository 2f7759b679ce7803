"""Pages that mkdocs builds from the sources, so that they cannot go out of date.

`options.md` and `commands.md` come from the configuration and the parsers of the command line, `changelog.md` from
CHANGELOG.md. Links to files of the repository that are no pages become text with the path of the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import hiap
from hiap.cli.main import _parser
from hiap.training.config import recipes

DOCS = Path(__file__).resolve().parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
IN_WORDS = {"workers": "1 to 4", "batch_size": "16 to 256"}  # defaults that depend on the machine or the data
TABLE = '<div class="options" markdown>\n\n| option | default | meaning |\n|---|---|---|'
END = "\n</div>"
AS_TYPED = r"(timm|hiap|cuda|fp32|ms)\b"  # first words of help texts that no capital may change
WIDTH = 88  # characters of a line of code

OPTIONS = """# Options

Every option of `hiap prune` and `hiap plan`. Most people need only these: {first}.

Options come from three places. A recipe or a YAML file (`--config`) comes first, the command line overrides it, and
everything else has the default below. In YAML and in Python an option is written with underscores, as in `batch_size`.
`hiap prune --print-config` shows what a command would use.

```python
config = hiap.Config(target="50%", keep_blocks=[0, 11])
```

Recipes that come with the package: {recipes}.
"""

COMMANDS = """# Command line

Each command has its help: `hiap prune --help` shows the usual options, `hiap prune --help-all` shows all of them. A
command ends with status 0, with 1 after an error (one line says what to do), or with 2 if it cannot be read.
"""


def command_line(every_option: bool = True) -> argparse.ArgumentParser:
    """The parser of the whole command line.

    Args:
        every_option: its help has all options, not only those that most people need.
    """
    return _parser(every_option)


def parsers(every_option: bool = True) -> dict[str, argparse.ArgumentParser]:
    """The parser of each command, by its name."""
    for action in command_line(every_option)._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    raise LookupError("the command line has no commands")


def option_names() -> list[str]:
    """The options of a run."""
    return [field.name for field in dataclasses.fields(hiap.Config)]


def options_page() -> str:
    """All options of a run, in groups, with defaults, choices and help."""
    names, defaults = option_names(), hiap.Config()
    usual = [a.dest for a in parsers(every_option=False)["prune"]._actions if a.help != argparse.SUPPRESS]
    first = ", ".join(f"[`{_flag(name)}`](#option-{_flag(name)[2:]})" for name in names if name in usual)
    page = [OPTIONS.format(first=first, recipes=", ".join(f"`{name}`" for name in recipes()))]
    for group in parsers()["prune"]._action_groups:
        rows = [
            _option(action, getattr(defaults, action.dest)) for action in group._group_actions if action.dest in names
        ]
        if rows:
            title = str(group.title)
            about = f"{group.description}\n\n" if group.description else ""
            page.append(f"\n## {title[0].upper()}{title[1:]}\n\n{about}{TABLE}\n" + "\n".join(rows) + f"\n{END}")
    return "\n".join(page) + "\n"


def _option(action: argparse.Action, default: Any) -> str:
    """The row of an option; its first spelling is what links lead to."""
    first, *others = action.option_strings
    names = " or ".join([f"`{first}`{{ #option-{first[2:]} }}", *(f"`{other}`" for other in others)])
    text = (action.help or "").replace("%%", "%").removesuffix(f" (default {default})")
    words = str(action.metavar or "")
    choices = f" One of {', '.join(f'`{word}`' for word in words[1:-1].split(','))}." if words.startswith("{") else ""
    return f"| {names} | {IN_WORDS.get(action.dest) or _default(default)} | {_sentence(text)}{choices} |"


def commands_page() -> str:
    """Every command with its own options and its examples."""
    shared = {_flag(name) for name in option_names()}
    page = [COMMANDS]
    for name, parser in parsers().items():
        page.append(f"\n## hiap {name}\n\n{parser.description}\n")
        own = [a for a in parser._actions if not isinstance(a, argparse._HelpAction) and a.help != argparse.SUPPRESS]
        whole = shared <= {flag for action in own for flag in action.option_strings}
        if whole:
            own = [action for action in own if not shared & set(action.option_strings)]
        page.append('<div class="arguments" markdown>\n\n| argument | meaning |\n|---|---|')
        page += [f"| {_spelling(action)} | {_sentence(_help(action, parser))} |" for action in own]
        page.append(END)
        if whole:
            page.append("\nIt also takes every option of a run: see [Options](options.md).")
        examples = [line.strip() for line in (parser.epilog or "").splitlines() if line.startswith("  ")]
        if examples:
            page.append("\n```sh\n" + "\n".join(map(_wrapped, examples)) + "\n```")
    return "\n".join(page) + "\n"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _default(value: Any) -> str:
    if value is None or value in ([], {}, ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list):
        value = ":".join(f"{one:g}" for one in value)
    return f"`{value}`"


def _sentence(text: str) -> str:
    """A help text as a cell of a table."""
    text = text.replace("|", "\\|").replace("<", "&lt;")
    start = text if re.match(AS_TYPED, text) else text[:1].upper() + text[1:]
    return start + ("" if text.endswith(".") else ".")


def _help(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    return (action.help or "").replace("%%", "%") % {"prog": parser.prog} if action.help else ""


def _wrapped(command: str) -> str:
    """A command on lines that fit the page."""
    return " \\\n    ".join(textwrap.wrap(command, WIDTH, break_long_words=False, break_on_hyphens=False))


def _spelling(action: argparse.Action) -> str:
    if not action.option_strings:
        return f"`{action.dest.upper()}`"
    value = action.metavar if isinstance(action.metavar, str) else action.dest.upper().replace("_", "-")
    value = "" if action.nargs == 0 else f" {value}"
    if len(action.option_strings) == 1 or isinstance(action, argparse.BooleanOptionalAction):
        return " ".join(f"`{flag}{value}`" for flag in action.option_strings)
    *others, last = action.option_strings
    return ", ".join(f"`{flag}`" for flag in others) + f", `{last}{value}`"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that have no file in docs/."""
    pages = {
        "options.md": options_page(),
        "commands.md": commands_page(),
        "changelog.md": (DOCS.parent / "CHANGELOG.md").read_text(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links to files of the repository that are not in the site into their text and the path of the file."""
    home = (DOCS / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        target = (home / link[2]).resolve()
        outside = target.exists() and (not target.is_relative_to(DOCS) or target.is_dir())
        if not outside:
            return link[0]
        path = target.relative_to(DOCS.parent).as_posix()
        named = link[1].strip("`") == path or (target.is_file() and link[1].strip("`") == target.name)
        return f"`{path}`" if named else f"{link[1]} in `{path}`"

    return LINK.sub(plain, markdown)
