"""What an arm is called beside others, and how it is drawn."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.config.reference import MEAN
from suite.leaderboard.names import Names, differing, distinct, with_keys
from suite.plan.cell_state import CellStatus
from suite.report import values


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm of a sweep.

    Attributes:
        key: Its key, as `key_in_home` gives it where several homes have results of the sweep.
        label: The shortest name that no other arm of the sweep has: `lora`, or
            `minilm gqa lora rank=8`. Where architectures competed, the chosen one goes by the
            method alone. Where the key has a home, so has the label: `lora @ 3f2a91c04b7d`.
        settings: What tells its architecture from those it competed with: `rank=32`.
        style: Its place in the palette, the same in all figures.
        row: One of its rows, for its names.
    """

    key: str
    label: str
    settings: str
    style: int
    row: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        """The arm's id on the page."""
        # A key's dots would begin the names of classes in a selector.
        return "arm-" + re.sub(r"[^A-Za-z0-9_-]", "-", self.key)


def key_in_home(home: str, arm: str) -> str:
    """An arm's key beside those of other homes: `3f2a91c04b7d/minilm.pretrained.lora.1f2e3d4c`."""
    # Neither a home's name nor an arm's key holds a slash.
    return f"{home}/{arm}"


def own_key(key: str) -> str:
    """An arm's key without its home."""
    return key.rpartition("/")[2]


def arms_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Arm]:
    """The arms of a sweep's rows by key; those with test scores first, the best first."""
    first_rows: dict[str, Mapping[str, Any]] = {}
    # The order decides the colours: the best arms get the plainest ones.
    for row in sorted(rows, key=_order):
        first_rows.setdefault(row["arm"], row)
    keys = list(first_rows)
    names = [names_of(row) for row in first_rows.values()]

    labels = dict(zip(keys, distinct(names), strict=True))
    # The chosen architectures are compared with each other alone, so they get shorter names.
    chosen = []
    chosen_names = []
    for key, row in first_rows.items():
        if row["status"] != CellStatus.NOT_CHOSEN:
            chosen.append(key)
            chosen_names.append(names_of(row))
    labels |= dict(zip(chosen, distinct(chosen_names, among=names), strict=True))

    # Architectures of one method competed with each other.
    rivals = []
    architectures = []
    for name in names:
        rivals.append(" ".join(name[:3]))
        architectures.append(name.architecture)
    settings = differing(rivals, architectures)
    for key in keys:
        home = key.rpartition("/")[0]
        if home:
            labels[key] += f" @ {home}"
    labels = with_keys(labels)
    arms = {}
    for style, key in enumerate(keys):
        arms[key] = Arm(key, labels[key], " ".join(settings[style]), style, first_rows[key])
    return arms


def _order(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
    """A sort key that puts rows with a score first, then means, then the best scores."""
    score = row["score_mean"]
    if score is None:
        return True, row["task"] != MEAN, 0.0
    # A row that does not say counts as one where more is better.
    if row["higher_is_better"] is not False:
        score = -score
    return False, row["task"] != MEAN, score


def names_of(row: Mapping[str, Any]) -> Names:
    return Names(
        values.backbone(row),
        values.attention(row),
        str(row["method"]),
        row["architecture"] or {},
    )


def architecture_of(rows: Sequence[Mapping[str, Any]]) -> Callable[[Mapping[str, Any]], str]:
    """A function that shows the settings of a row's architecture that other rows lack.

    A method of `peft` has dozens of settings, and two architectures differ in one or two of them.
    """
    methods = [row["method"] for row in rows]
    settings = [row["architecture"] or {} for row in rows]
    shown = {}
    for row, own in zip(rows, differing(methods, settings), strict=True):
        shown[row["method"], str(row["architecture"])] = " ".join(own) or values.MISSING

    def show(row: Mapping[str, Any]) -> str:
        return shown[row["method"], str(row["architecture"])]

    return show


def listed(items: Iterable[str], *, most: int = 8) -> str:
    """Items as `a, b and c`; beyond `most` of them, only how many others there are."""
    shown = list(items)
    if len(shown) > most:
        shown = [*shown[:most], f"{len(shown) - most} more"]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"
