"""Writes the reference of all commands: `python -m suite.cli.reference > docs/reference.md`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

HEAD = """# Every command and option

Made from the code by `python -m suite.cli.reference`; do not edit by hand.
[The command line](cli.md) describes what the commands print and their exit codes;
[on a cluster](cluster.md#environment-variables) lists the environment variables.
"""


def reference() -> str:
    """The whole page, as Markdown."""
    from typer.main import get_command

    from suite.cli.app import app

    # A test compares the page with docs/reference.md, so it cannot fall behind.
    parts = [HEAD]
    for name, command in _commands(get_command(app), "suite"):
        parts.append(_section(command, name))
    return "\n".join(parts).rstrip() + "\n"


def _commands(group: Any, at: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        # A group, such as `suite analyze`, has no options of its own worth a section.
        if hasattr(command, "commands"):
            yield from _commands(command, f"{at} {name}")
        else:
            yield f"{at} {name}", command


def _section(command: Any, name: str) -> str:
    from typer import Context

    context = Context(command)
    usage = [name, "[OPTIONS]"]
    table = []
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            usage += parameter.get_usage_pieces(context)
        # --help itself needs no row in each table.
        if parameter.name != "help":
            table.append(_row(parameter, context))
    if table:
        table = ["| | |", "| --- | --- |", *table, ""]
    # app.py puts the example of each command there.
    example = (command.epilog or "").removeprefix("Example: ")
    title = f"## {name}\n\n```text\n{' '.join(usage)}\n```"
    return "\n".join(
        [title, "", _paragraphs(command.help), "", *table, f"```bash\n{example}\n```", ""]
    )


def _row(parameter: Any, context: Any) -> str:
    """Names and value of an option, then what --help says about it."""
    names, text = parameter.get_help_record(context)
    # The line of usage shows which arguments are required.
    about = _escaped(text.removesuffix("[required]"))
    # Some help texts say so themselves.
    if parameter.multiple and "often" not in text:
        about += " May be given often."
    return f"| `{names.replace('|', ', ')}` | {about} |"


def _paragraphs(text: str | None) -> str:
    paragraphs = [_escaped(part) for part in re.split(r"\n\s*\n", text or "")]
    return "\n\n".join(paragraphs)


def _escaped(text: str) -> str:
    """The text on one line, with what Markdown or HTML would read as markup escaped."""
    line = " ".join(text.split())
    for character, escaped in (("|", r"\|"), ("<", "&lt;"), ("*", r"\*"), ("_", r"\_")):
        line = line.replace(character, escaped)
    return line


if __name__ == "__main__":
    print(reference(), end="")
