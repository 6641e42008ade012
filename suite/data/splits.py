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
    """The splits of the source that are read at all."""
    return config.sources


def plan_splits(
    config: SplitConfig,
    sizes: Mapping[str, int],
    limit: LimitConfig,
    *,
    where: str,
    in_order: bool = False,
    groups: Mapping[str, Rows] | None = None,
) -> dict[SplitName, Part]:
    """The rows of each split, after `limit`.

    Args:
        sizes: Rows of every source split that `source_splits` names.
        limit: At most so many rows; a smaller limit draws a subset of what a larger one draws.
        where: For errors.
        in_order: Rows are one running text: a limit takes the first ones.
        groups: Per source split the number of each row's group; None = every row is its own. Groups are drawn whole, as many
            as fit into the number of rows asked for.

    Raises:
        DataError: A split would be empty.
    """
    rules = {"named": _named, "read": _by_read, "held-out": _by_held_out}
    groups = groups or {split: np.arange(size) for split, size in sizes.items()}
    parts = rules[config.rule](config, groups, where)
    for name, part in parts.items():
        if not len(part.rows):
            raise DataError(
                f"{where}: split {name!r} is empty (from {part.source!r} with {sizes[part.source]:,} rows); use other splits"
            )
    return {
        name: _limited(part, groups[part.source], name, limit, where=where, in_order=in_order)
        for name, part in parts.items()
    }


def _named(config: SplitConfig, groups: Mapping[str, Rows], where: str) -> dict[SplitName, Part]:
    assert config.test is not None
    sources = zip(SPLIT_NAMES, (config.train, config.validation, config.test), strict=True)
    return {name: Part(source, np.arange(len(groups[source]))) for name, source in sources}


def _by_read(config: SplitConfig, groups: Mapping[str, Rows], where: str) -> dict[SplitName, Part]:
    train, validation = len(groups[config.train]), len(groups[config.validation])
    if train < SMALL_TRAIN_ROWS:
        first = _places(groups[config.validation], "halves") <= validation // 2
        return {
            "train": Part(config.train, np.arange(train)),
            "validation": Part(config.validation, np.flatnonzero(first)),
            "test": Part(config.validation, np.flatnonzero(~first)),
        }
    kept, held_out = _hold_out(config, groups[config.train], 1, where)
    return {
        "train": Part(config.train, kept),
        "validation": Part(config.train, held_out),
        "test": Part(config.validation, np.arange(validation)),
    }


def _by_held_out(
    config: SplitConfig, groups: Mapping[str, Rows], where: str
) -> dict[SplitName, Part]:
    """A named test set changes nothing about the validation rows."""
    kept, *held_out = _hold_out(
        config, groups[config.train], 1 if config.test is not None else 2, where
    )
    test = (
        Part(config.train, held_out[-1])
        if config.test is None
        else Part(config.test, np.arange(len(groups[config.test])))
    )
    return {
        "train": Part(config.train, kept),
        "validation": Part(config.train, held_out[0]),
        "test": test,
    }


def _hold_out(config: SplitConfig, train: Rows, times: int, where: str) -> list[Rows]:
    """The rows of train, given by their groups, that stay, then `times` sets of `held_out` others."""
    if times * config.held_out >= len(train):
        raise DataError(
            f"{where}: splits.held_out is {config.held_out:,}, but there are {len(train):,} training rows; hold out fewer"
        )
    part = (
        _places(train, "held out") - 1
    ) // config.held_out  # 0, 1, ...: which set a row falls in
    return [np.flatnonzero(part >= times), *(np.flatnonzero(part == n) for n in range(times))]


def _limited(
    part: Part, groups: Rows, name: str, limit: LimitConfig, *, where: str, in_order: bool
) -> Part:
    at_most: int | None = getattr(limit, name)
    if at_most is None or in_order:
        return Part(part.source, part.rows[:at_most])
    rows = part.rows[_places(groups[part.rows], "limit", name) <= at_most]
    if not len(rows):
        raise DataError(
            f"{where}: limit.{name} is {at_most}, less than a single group of rows that belong together; raise it"
        )
    return Part(part.source, rows)


def _places(groups: Rows, *stream: str) -> Rows:
    """Groups drawn in a random order: for every row, how many rows have come once its whole group has."""
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.random.default_rng(derive_seed("data splits", *stream)).permutation(len(sizes))
    places = np.empty(len(sizes), dtype=np.int64)
    places[order] = np.cumsum(sizes[order])
    return places[number]
