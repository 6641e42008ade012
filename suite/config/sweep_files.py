"""Reads sweep files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from suite.config.loader import Lines, apply_overrides, load_yaml, validate, with_overrides
from suite.config.names import BY_HAND
from suite.config.sweep import SweepConfig
from suite.config.trust import check_named, refuse_trust, with_trust
from suite.errors import ConfigError


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file.

    Args:
        path: The file.
        overrides: Items `key=value` from the command line.

    Raises:
        ConfigError: With file, line and key.
    """
    data, lines = load_yaml(path)
    # before the check of trust, so that `--set` cannot grant it either
    data = apply_overrides(data, overrides)
    return checked_sweep(data, where=str(path), lines=with_overrides(lines, overrides))


def checked_sweep(
    data: Mapping[str, Any], *, where: str, lines: Lines | None = None
) -> SweepConfig:
    """The sweep that plain keys and values describe.

    Args:
        data: The keys of a sweep's file.
        where: What errors call it.
        lines: The line of each key; None = there are none.

    Raises:
        ConfigError: A key or value cannot be used.
    """
    given = data.get("backbones")
    if isinstance(given, list):
        # before validation, because trust may stand in the file of whoever wrote the sweep
        for number, backbone in enumerate(given):
            refuse_trust(backbone, where=f"{where}: backbones[{number}]")
    config = validate(SweepConfig, data, where=where, lines=lines)
    if config.name == BY_HAND:
        raise ConfigError(
            f"{where}: name: {BY_HAND!r} is what the runs of `suite trial` are kept under, and they"
            " would count as this sweep's; give another name"
        )
    # a mistyped name on the command line would otherwise grant nothing, without a word
    check_named([backbone.name for backbone in config.backbones], where=where)
    backbones = []
    for backbone in config.backbones:
        backbones.append(with_trust(backbone, where=f"{where}: backbones"))
    return config.model_copy(update={"backbones": backbones})
