"""The reference of all commands, written from the code: `python -m suite.cli.reference > docs/reference.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

HEAD = """# Every command and option

Made from the code by `python -m suite.cli.reference`; do not edit by hand. What the commands print, exit codes and
environment variables: [the command line](cli.md).
"""


def reference() -> str:
    """The whole page, as Markdown."""
    from typer.main import get_command

    from suite.cli.app import app

    sections = (_section(command, name) for name, command in _commands(get_command(app), "suite"))
    return "\n".join([HEAD, *sections]).rstrip() + "\n"


def _commands(group: Any, at: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{at} {name}")
        else:
            yield f"{at} {name}", command


def _section(command: Any, name: str) -> str:
    from typer import Context

    context = Context(command)
    pieces = [
        piece
        for p in command.params
        if p.param_type_name == "argument"
        for piece in p.get_usage_pieces(context)
    ]
    rows = [_row(p, context) for p in command.params if p.name != "help"]
    if rows:
        table = ["| | |", "| --- | --- |", *rows, ""]
    else:
        table = []
    example = (command.epilog or "").removeprefix("Example: ")
    title = f"## {name}\n\n```text\n{' '.join([name, '[OPTIONS]', *pieces])}\n```"
    return "\n".join(
        [title, "", _paragraphs(command.help), "", *table, f"```bash\n{example}\n```", ""]
    )


def _row(parameter: Any, context: Any) -> str:
    """Names and value, then what --help says of it."""
    names, text = parameter.get_help_record(context)
    if parameter.multiple and "often" not in text:
        often = " May be given often."
    else:
        often = ""
    return f"| `{names.replace('|', ', ')}` | {_escaped(text.removesuffix('[required]'))}{often} |"


def _paragraphs(text: str | None) -> str:
    return "\n\n".join(
        _escaped(" ".join(part.split())) for part in re.split(r"\n\s*\n", text or "")
    )


def _escaped(text: str) -> str:
    """What Markdown and HTML would take for their own is kept as text."""
    return (
        " ".join(text.split())
        .replace("|", r"\|")
        .replace("<", "&lt;")
        .replace("*", r"\*")
        .replace("_", r"\_")
    )


if __name__ == "__main__":
    print(reference(), end="")
