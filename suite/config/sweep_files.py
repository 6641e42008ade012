"""Reads sweep files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from suite.config.loader import apply_overrides, load_yaml, validate
from suite.config.sweep import SweepConfig
from suite.config.trust import check_named, refuse_trust, with_trust


def load_sweep(path: Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read a sweep file; `overrides` are `key=value` items from the command line, which alone says whose code is trusted.

    Raises:
        ConfigError: With file, line and key.
    """
    data, lines = load_yaml(path)
    data = apply_overrides(data, overrides)
    given = data.get("backbones")
    for i, backbone in enumerate(given if isinstance(given, list) else ()):
        refuse_trust(backbone, where=f"{path}: backbones[{i}]")
    config = validate(SweepConfig, data, where=str(path), lines=lines)
    check_named([backbone.name for backbone in config.backbones], where=str(path))
    return config.model_copy(
        update={"backbones": [with_trust(b, where=f"{path}: backbones") for b in config.backbones]}
    )
