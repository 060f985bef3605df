"""Write docs/records.md and docs/cli.md from the code they describe.

    python docs/generate.py           # rewrite both
    python docs/generate.py --check   # exit 1 and name what is not current

The records page comes from the dataclasses in records.py, the command page from each command's
`--help`. No command body runs, so torch is not imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
import types
import typing
from pathlib import Path
from typing import Any

import click

from optima_lite.cli.main import cli
from optima_lite.records import KINDS, Record

HERE = Path(__file__).parent
WIDTH = 100
MADE = "<!-- Written by docs/generate.py: do not edit. -->\n"

RECORDS_HEAD = """\
# Records

Commands exchange JSON Lines: UTF-8, one JSON object a line, `\\n` at the end of each. A record is
self-contained (a trajectory holds its task and its team), so a pipe needs no side files.

    tasks -> Task -> gen -> Trajectory -> score -> Trajectory + reward -> select -> Example -> sft
             Task -> tree -> Tree -> select -> Pair -> dpo

A field that a class below does not know is kept and written back by every command, at every level.
An optional field that is not set is left out of the line. A required field of a type "or null" has
to stand in the line, as null if need be.
"""

CLI_HEAD = """\
# Commands

What each command prints with `--help`. Records go to stdout, everything else to stderr.
"""

#: Python type -> JSON type in words: one of it, several of it.
WORDS: dict[Any, tuple[str, str]] = {
    str: ("text", "texts"),
    int: ("whole number", "whole numbers"),
    float: ("number", "numbers"),
    bool: ("true or false", "true or false"),
}


def records_page() -> str:
    """docs/records.md: a section a kind, with its docstring and its fields."""
    return MADE + RECORDS_HEAD + "".join(map(record_section, KINDS))


def record_section(kind: type[Record]) -> str:
    """One kind's heading, docstring and table of fields."""
    hints = typing.get_type_hints(kind)
    lines = [f"\n## {kind.__name__}\n\n{inspect.getdoc(kind)}\n\n"]
    lines += ["| field | type | | what it is |\n", "|---|---|---|---|\n"]
    for field in dataclasses.fields(kind):
        if field.name == "extra":
            continue
        words = json_type(hints[field.name])
        need = "required"
        if has_default(field):
            need = f"optional{default(field)}"
            # Unset is left out of the line: nobody has to write null.
            words = words.removesuffix(" or null") if field.default is None else words
        text = field.metadata["doc"].replace("|", "\\|")
        lines.append(f"| `{field.name}` | {words} | {need} | {text} |\n")
    return "".join(lines)


def json_type(hint: Any, several: bool = False) -> str:
    """A field's type in JSON words; records link to their sections."""
    if hint in WORDS:
        return WORDS[hint][several]
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        inner = [arg for arg in args if arg is not type(None)]
        null = "nulls" if several else "null"
        return " or ".join([*(json_type(arg, several) for arg in inner), null])
    if origin is tuple:
        return f"{'lists' if several else 'list'} of {json_type(args[0], several=True)}"
    if origin is dict:
        return "objects" if several else "object"
    if isinstance(hint, type) and issubclass(hint, Record):
        link = f"[{hint.__name__}](#{hint.__name__.lower()})"
        return f"{link} objects" if several else link
    raise TypeError(f"no words for the type {hint}")


def has_default(field: dataclasses.Field[Any]) -> bool:
    """Whether a line may leave the field out."""
    made = field.default_factory is not dataclasses.MISSING
    return made or field.default is not dataclasses.MISSING


def default(field: dataclasses.Field[Any]) -> str:
    """The value that stands for a missing field, in words; nothing where that is "none"."""
    value = field.default
    if value is dataclasses.MISSING or value is None or value == ():
        return ""
    return f", default `{value}`"


def cli_page() -> str:
    """docs/cli.md: the group's help, then each command's, in the order of the pipeline."""
    parent = click.Context(
        cli,
        info_name="optima-lite",
        terminal_width=WIDTH,
        max_content_width=WIDTH,
        **cli.context_settings,
    )
    parts = [MADE, CLI_HEAD, f"\n## optima-lite\n\n{block(cli, parent)}"]
    for name in cli.list_commands(parent):
        command = cli.get_command(parent, name)
        assert command is not None
        context = click.Context(command, info_name=name, parent=parent)
        parts.append(f"\n## {name}\n\n{block(command, context)}")
    return "".join(parts)


def block(command: click.Command, context: click.Context) -> str:
    """A command's help as a code block."""
    lines = (line.rstrip() for line in command.get_help(context).splitlines())
    return "```text\n" + "\n".join(lines).strip() + "\n```\n"


def main(argv: list[str] | None = None) -> int:
    """Write or check the pages; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(argv).check
    stale = 0
    for name, page in (("records.md", records_page()), ("cli.md", cli_page())):
        path = HERE / name
        if not check:
            path.write_text(page, encoding="utf-8", newline="\n")
        elif not path.is_file() or path.read_bytes() != page.encode():
            print(f"docs/{name} is not current: run python docs/generate.py", file=sys.stderr)
            stale += 1
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
