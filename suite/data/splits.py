"""Which rows of which source split become train, validation and test.

They are the same for every arm, seed and machine.

Source: READ (arXiv 2305.15348), section 4; the paper gives no seed, so ours is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from suite.config.hashing import derive_seed
from suite.config.sweep import LimitConfig
from suite.config.task import SplitConfig
from suite.config.task_base import SplitName
from suite.errors import DataError, IncompatibleError

Rows = np.ndarray[Any, np.dtype[np.int64]]
SMALL_TRAIN_ROWS = 10_000
"""READ: with fewer training rows than this the validation split is halved."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Row numbers, ascending, of one split of the source."""

    source: str
    rows: Rows


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
        config: How the task makes its splits.
        sizes: Rows of every split of the source in `config.sources`.
        limit: At most so many rows; a smaller limit draws a subset of what a larger one draws.
        where: Task and data set, for errors.
        in_order: Rows are one running text, so a limit takes the first ones.
        groups: By source split, the number of each row's group; None = every row is its own group.
            Groups are drawn whole, as many as fit into the number of rows that is asked for.

    Raises:
        DataError: A split would be empty.
    """
    rules = {"named": _named, "read": _by_read, "held-out": _by_held_out}
    if groups is None:
        groups = {split: np.arange(size) for split, size in sizes.items()}
    parts = rules[config.rule](config, groups, where)
    for name, part in parts.items():
        if not len(part.rows):
            advice = "use other splits"
            grouped = len(np.unique(groups[part.source])) < sizes[part.source]
            if grouped and part.source == config.train:
                advice = (
                    f"no group fits into the {config.held_out:,} rows of splits.held_out; raise "
                    "it, or use other splits"
                )
            elif grouped:
                advice = "no group fits into half of its rows; use other splits"
            raise DataError(
                f"{where}: split {name!r} is empty (from {part.source!r} with "
                f"{sizes[part.source]:,} rows); {advice}"
            )
    # after the rule, so that a limit never moves a row from one split to another
    limited = {}
    for name, part in parts.items():
        limited[name] = _limited(
            part, groups[part.source], name, limit, where=where, in_order=in_order
        )
    return limited


def check_batch_fits(
    rows: int, batch_size: int, *, where: str, key: str = "training.batch_size"
) -> None:
    """Check that an epoch holds at least one whole batch; an incomplete last one is dropped.

    Raises:
        IncompatibleError: There are fewer rows.
    """
    if rows < batch_size:
        raise IncompatibleError(
            f"{where}: {key} is {batch_size}, but there are only {rows} training rows; "
            "use a smaller batch_size"
        )


def _named(config: SplitConfig, groups: Mapping[str, Rows], where: str) -> dict[SplitName, Part]:
    """Each split is a whole split of the source."""
    assert config.test is not None
    return {
        "train": _whole(config.train, groups),
        "validation": _whole(config.validation, groups),
        "test": _whole(config.test, groups),
    }


def _whole(source: str, groups: Mapping[str, Rows]) -> Part:
    return Part(source, np.arange(len(groups[source])))


def _by_read(config: SplitConfig, groups: Mapping[str, Rows], where: str) -> dict[SplitName, Part]:
    """READ's rule: the source's validation split becomes the test split.

    Validation rows come from a large training split. A small one is kept whole, and the source's
    validation split is halved.
    """
    train = groups[config.train]
    validation = groups[config.validation]
    if len(train) < SMALL_TRAIN_ROWS:
        # at most half, in whole groups
        first = _places(validation, "halves") <= len(validation) // 2
        return {
            "train": _whole(config.train, groups),
            "validation": Part(config.validation, np.flatnonzero(first)),
            "test": Part(config.validation, np.flatnonzero(~first)),
        }
    kept, held_out = _hold_out(config, train, 1, where)
    return {
        "train": Part(config.train, kept),
        "validation": Part(config.train, held_out),
        "test": _whole(config.validation, groups),
    }


def _by_held_out(
    config: SplitConfig, groups: Mapping[str, Rows], where: str
) -> dict[SplitName, Part]:
    """Validation rows, and test rows where no test split is named, come from the training split.

    A named test split changes nothing about the validation rows.
    """
    train = groups[config.train]
    if config.test is not None:
        kept, validation = _hold_out(config, train, 1, where)
        test = _whole(config.test, groups)
    else:
        kept, validation, test_rows = _hold_out(config, train, 2, where)
        test = Part(config.train, test_rows)
    return {
        "train": Part(config.train, kept),
        "validation": Part(config.train, validation),
        "test": test,
    }


def _hold_out(config: SplitConfig, train: Rows, times: int, where: str) -> list[Rows]:
    """The training rows that stay, then `times` sets of `held_out` others.

    Args:
        train: The group of each training row.
    """
    if times * config.held_out >= len(train):
        raise DataError(
            f"{where}: splits.held_out is {config.held_out:,}, but there are {len(train):,} "
            "training rows; hold out fewer (where it is not given, it is a fifth of a file's rows)"
        )
    # 0, 1, ...: the set that each row falls into
    number = (_places(train, "held out") - 1) // config.held_out
    # a group falls into the set of its last row; what lies beyond the sets stays in training
    sets = [np.flatnonzero(number >= times)]
    for wanted in range(times):
        sets.append(np.flatnonzero(number == wanted))
    return sets


def _limited(
    part: Part, groups: Rows, name: str, limit: LimitConfig, *, where: str, in_order: bool
) -> Part:
    """Keep at most as many rows as `limit` says."""
    at_most: int | None = getattr(limit, name)
    if at_most is None or in_order:
        return Part(part.source, part.rows[:at_most])
    # whole groups in their random order, as long as they fit
    rows = part.rows[_places(groups[part.rows], "limit", name) <= at_most]
    if not len(rows):
        raise DataError(
            f"{where}: limit.{name} is {at_most}, less than a single group of rows that belong "
            "together; raise it"
        )
    return Part(part.source, rows)


def _places(groups: Rows, *stream: str) -> Rows:
    """Draw groups in a random order; say how many rows have come with each row's group.

    Args:
        groups: The group of each row.
        stream: Names of the random stream.

    Returns:
        For each row, the number of rows drawn once its whole group is drawn.
    """
    _, number, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    # a stream of its own for each use, so that a limit draws independently of the split
    order = np.random.default_rng(derive_seed("data splits", *stream)).permutation(len(sizes))
    places = np.empty(len(sizes), dtype=np.int64)
    # a group's place is the number of rows up to its end, so a limit never cuts it
    places[order] = np.cumsum(sizes[order])
    return places[number]
