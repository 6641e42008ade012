"""`suite list`: what there is to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from suite.backbones.fit import served_families
from suite.cli.options import Format, FormatOption, TasksOption
from suite.cli.plug_ins import described
from suite.cli.render import Row, column, render
from suite.registry import Registry

ABOUT = ("description", "source", "families")
ATTENTION = (
    *ABOUT,
    "families_why",
    "kinds",
    "keeps_projections",
    "start",
)
FAMILY = ("kind", "fixed_attention", "refused_methods")
KEYS = ("name", "description", "source", "families", "start")
SENTENCES = ("description", "source", "start")
RANKS = {"name": 0, "description": 0, "start": 1, "families": 2, "source": 3}
"""By key, which columns a narrow terminal drops first: those of the highest number."""


class Kind(StrEnum):
    """What can be listed."""

    METHODS = "methods"
    TASKS = "tasks"
    BACKBONES = "backbones"
    SEARCH_SPACES = "search-spaces"
    ATTENTION = "attention"
    SWEEPS = "sweeps"


def listing(
    kind: Annotated[Kind, typer.Argument(metavar="KIND", help="What to list.")],
    fmt: FormatOption = Format.TABLE,
    tasks: TasksOption = None,
) -> None:
    """List what there is to choose from, with description, source paper and backbone families.

    For attention variants the list also says how each one starts from the checkpoint.
    """
    # Each reader imports its own registry: a list of tasks must not wait for torch.
    readers = {
        Kind.METHODS: _methods,
        Kind.TASKS: _tasks,
        Kind.BACKBONES: _backbones,
        Kind.SEARCH_SPACES: _search_spaces,
        Kind.ATTENTION: _attention,
        Kind.SWEEPS: _sweeps,
    }
    rows = readers[kind]()
    # Kinds differ: only attention variants have a start, only some have families.
    keys = [key for key in KEYS if any(key in row for row in rows)]
    columns = []
    for key in keys:
        if any(row[key] for row in rows):
            columns.append(column(key, rank=RANKS[key], wraps=key in SENTENCES))
    render(rows, columns, fmt, keys=keys)


def _row(name: str, description: str, source: str = "", families: Any = ()) -> Row:
    return {
        "name": name,
        "description": description,
        "source": source,
        "families": sorted(families),
    }


def _methods() -> list[Row]:
    from suite.config.space import describe_space, peft_spaces

    found = described("petl", "Method", ABOUT)
    if found is None:
        from suite.petl import methods

        found = _of_classes(methods)
    families = _families()
    rows = []
    for name, about in sorted(found.items()):
        served = served_families(SimpleNamespace(name=name, **about), families)
        rows.append(_row(name, about["description"], about["source"], served))
    # The library has no such lines, and importing it would take seconds.
    for name in peft_spaces():
        rows.append(_row(name, describe_space(name), "the peft library"))
    return rows


def _attention() -> list[Row]:
    found = described("attention", "Variant", ATTENTION)
    if found is None:
        from suite.attention import variants

        found = _of_classes(variants, ATTENTION)
    families = _families()
    rows: list[Row] = []
    for name, about in sorted(found.items()):
        served = served_families(SimpleNamespace(name=name, **about), families)
        row = _row(name, about["description"], about["source"], served)
        rows.append({**row, "start": about["start"]})
    return rows


def _families() -> list[Any]:
    """What the families say about which variants and methods work on them."""
    found = described("backbones", "Family", FAMILY)
    if found is None:
        from suite.backbones import families

        found = _of_classes(families, FAMILY)
    return [SimpleNamespace(name=name, **about) for name, about in found.items()]


def _of_classes(registry: Registry[Any], keys: Sequence[str] = ABOUT) -> dict[str, dict[str, Any]]:
    """What `described` gives, from the classes themselves."""
    found = {}
    for name in registry.names():
        found[name] = {key: getattr(registry.get(name), key) for key in keys}
    return found


def _backbones() -> list[Row]:
    from suite.backbones.presets import describe

    rows = []
    for backbone in describe():
        description = f"{backbone.description}; {backbone.parameters / 1e6:,.0f}M parameters"
        # Some presets are a shape alone: nobody publishes weights for them.
        source = backbone.path or "no published weights"
        rows.append(_row(backbone.name, description, source, [backbone.family]))
    return rows


def _tasks() -> list[Row]:
    """Every task. Python files are read and not run: a list must not start anybody's code."""
    from suite.config.loader import load_yaml
    from suite.config.task_files import describe, task_paths

    rows = []
    for name, path in sorted(task_paths().items()):
        if path.suffix == ".py":
            about = describe(path)
        else:
            # The file alone: whether its data are there is no matter of a list.
            about, _ = load_yaml(path)
        rows.append(_row(name, about.get("description", ""), about.get("source", "")))
    return rows


def _search_spaces() -> list[Row]:
    from suite.config.space import load_space
    from suite.registry import yaml_names

    rows = []
    for name in sorted(yaml_names("search_spaces")):
        space = load_space(name)
        rows.append(_row(name, f"{_range(space)}; {space.description}", space.source))
    return rows


def _range(space: Any) -> str:
    choices = f"{len(space.architectures)} architectures"
    if len(space.architectures) == 1:
        choices = "1 architecture"
    rates = space.learning_rate
    return f"learning rate {rates.low:g} to {rates.high:g}, {choices}"


def _sweeps() -> list[Row]:
    from suite.config.sweep_files import load_sweep
    from suite.registry import yaml_names

    rows = []
    # The file, because most people copy one and change it.
    for name, path in sorted(yaml_names("sweeps").items()):
        rows.append(_row(name, load_sweep(path).description, str(path)))
    return rows
