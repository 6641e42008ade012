"""Reads sweep files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from suite.config.loader import apply_overrides, load_yaml, validate, with_overrides
from suite.config.sweep import SweepConfig
from suite.config.trust import check_named, refuse_trust, with_trust


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
    given = data.get("backbones")
    if isinstance(given, list):
        # before validation, because trust may stand in the file of whoever wrote the sweep
        for number, backbone in enumerate(given):
            refuse_trust(backbone, where=f"{path}: backbones[{number}]")
    lines = with_overrides(lines, overrides)
    config = validate(SweepConfig, data, where=str(path), lines=lines)
    # a mistyped name on the command line would otherwise grant nothing, without a word
    check_named([backbone.name for backbone in config.backbones], where=str(path))
    backbones = []
    for backbone in config.backbones:
        backbones.append(with_trust(backbone, where=f"{path}: backbones"))
    return config.model_copy(update={"backbones": backbones})
