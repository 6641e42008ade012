"""Which rows of which source split become train, validation and test: the same for every arm, seed and machine.

Source: READ (arXiv 2305.15348), section 4; the paper gives no seed, so ours is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from suite.config.hashing import derive_seed
from suite.config.sweep import LimitConfig
from suite.config.task import SplitConfig
from suite.errors import DataError

Rows = np.ndarray[Any, np.dtype[np.int64]]
SplitName = Literal["train", "validation", "test"]
SPLIT_NAMES: tuple[SplitName, ...] = ("train", "validation", "test")
SMALL_TRAIN_ROWS = 10_000
"""READ: below this many training rows the validation split is halved."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Row numbers, ascending, of one split of the source."""

    source: str
    rows: Rows


def source_splits(config: SplitConfig) -> list[str]:
    """The splits of the source that are read at all; GLUE's unlabelled `test` is never among them."""
    return list(dict.fromkeys(name for name in (config.train, config.validation, config.test) if name is not None))


def plan_splits(
    config: SplitConfig, sizes: Mapping[str, int], limit: LimitConfig, *, where: str, in_order: bool = False
) -> dict[SplitName, Part]:
    """The rows of each split, after `limit`.

    Args:
        sizes: Rows of every source split that `source_splits` names.
        limit: At most so many rows; a smaller limit draws a subset of what a larger one draws.
        where: For errors.
        in_order: Rows are one running text: a limit takes the first ones.

    Raises:
        DataError: A split would be empty.
    """
    parts = _named(config, sizes) if config.rule == "named" else _by_read(config, sizes, where)
    for name, part in parts.items():
        if not len(part.rows):
            raise DataError(f"{where}: split {name!r} is empty (from {part.source!r} with {sizes[part.source]:,} rows); use other splits")
    return {name: Part(part.source, _limited(part.rows, getattr(limit, name), name, in_order)) for name, part in parts.items()}


def _named(config: SplitConfig, sizes: Mapping[str, int]) -> dict[SplitName, Part]:
    assert config.test is not None
    sources = zip(SPLIT_NAMES, (config.train, config.validation, config.test), strict=True)
    return {name: Part(source, np.arange(sizes[source])) for name, source in sources}


def _by_read(config: SplitConfig, sizes: Mapping[str, int], where: str) -> dict[SplitName, Part]:
    train, validation = sizes[config.train], sizes[config.validation]
    if train < SMALL_TRAIN_ROWS:
        half = validation // 2
        order = _shuffled(validation, "halves")
        first, second = np.sort(order[:half]), np.sort(order[half:])
        return {
            "train": Part(config.train, np.arange(train)),
            "validation": Part(config.validation, first),
            "test": Part(config.validation, second),
        }
    if config.held_out >= train:
        raise DataError(f"{where}: splits.held_out is {config.held_out:,}, but there are {train:,} training rows; hold out fewer")
    order = _shuffled(train, "held out")
    return {
        "train": Part(config.train, np.sort(order[config.held_out :])),
        "validation": Part(config.train, np.sort(order[: config.held_out])),
        "test": Part(config.validation, np.arange(validation)),
    }


def _limited(rows: Rows, limit: int | None, name: str, in_order: bool) -> Rows:
    if limit is None or in_order:
        return rows[:limit]
    return np.sort(rows[_shuffled(len(rows), "limit", name)[:limit]])


def _shuffled(count: int, *stream: str) -> Rows:
    return np.random.default_rng(derive_seed("data splits", *stream)).permutation(count)
