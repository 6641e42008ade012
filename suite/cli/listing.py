"""`suite list`: what there is to choose from."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from suite.cli.options import Format, FormatOption, TasksOption
from suite.cli.render import Row, column, render

KEYS = ("name", "description", "source", "families", "start")


class Kind(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    TASKS = "tasks"
    BACKBONES = "backbones"
    SEARCH_SPACES = "search-spaces"
    ATTENTION = "attention"
    SWEEPS = "sweeps"


def listing(
    kind: Annotated[Kind, typer.Argument(help="What to list.")],
    fmt: FormatOption = Format.TABLE,
    tasks: TasksOption = None,
) -> None:
    """What there is to choose from: name, description, source paper, backbone families; how an attention variant starts."""
    readers = {
        Kind.METHODS: _methods,
        Kind.TASKS: _tasks,
        Kind.BACKBONES: _backbones,
        Kind.SEARCH_SPACES: _search_spaces,
        Kind.ATTENTION: _attention,
        Kind.SWEEPS: _sweeps,
    }
    rows = readers[kind]()
    keys = [key for key in KEYS if any(key in row for row in rows)]
    render(rows, [column(key) for key in keys if any(row[key] for row in rows)], fmt, keys=keys)


def _row(name: str, description: str, source: str = "", families: Any = ()) -> Row:
    return {
        "name": name,
        "description": description,
        "source": source,
        "families": sorted(families),
    }


def _methods() -> list[Row]:
    from suite.petl import methods

    classes = {name: methods.get(name) for name in methods.names()}
    return [_row(name, cls.description, cls.source, cls.families) for name, cls in classes.items()]


def _attention() -> list[Row]:
    from suite.attention import variants

    classes = {name: variants.get(name) for name in variants.names()}
    return [
        {**_row(name, cls.description, cls.source, cls.families), "start": cls.start}
        for name, cls in classes.items()
    ]


def _backbones() -> list[Row]:
    from suite.backbones.presets import describe

    return [
        _row(
            b.name,
            f"{b.description}; {b.parameters / 1e6:,.0f}M parameters",
            b.path or "no published weights",
            [b.family],
        )
        for b in describe()
    ]


def _tasks() -> list[Row]:
    """Python files are read, not run: that is for those who ask for one by name."""
    from suite.config.task import load_task
    from suite.config.task_files import describe, task_paths

    paths = sorted(task_paths().items())
    texts = {
        name: describe(path) if path.suffix == ".py" else load_task(name).model_dump()
        for name, path in paths
    }
    return [_row(name, text["description"], text["source"]) for name, text in texts.items()]


def _search_spaces() -> list[Row]:
    from suite.config.space import load_space
    from suite.registry import yaml_names

    spaces = {name: load_space(name) for name in sorted(yaml_names("search_spaces"))}
    return [
        _row(name, f"{_range(space)}; {space.description}", space.source)
        for name, space in spaces.items()
    ]


def _range(space: Any) -> str:
    choices = len(space.architectures)
    low = space.learning_rate.low
    high = space.learning_rate.high
    return f"learning rate {low:g} to {high:g}, {choices} architecture{'s' if choices > 1 else ''}"


def _sweeps() -> list[Row]:
    from suite.config.sweep_files import load_sweep
    from suite.registry import yaml_names

    return [
        _row(name, load_sweep(path).description, str(path))
        for name, path in sorted(yaml_names("sweeps").items())
    ]
