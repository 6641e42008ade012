"""What an arm is called where it stands beside others, and how it is drawn."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from suite.config.reference import MEAN
from suite.report import values

KEY_SHOWN = 8
"""Characters of a key, which ends in a hash."""


@dataclass(frozen=True, slots=True)
class Arm:
    """An arm of a sweep.

    Attributes:
        key: Its key.
        label: The shortest name that no other arm of the sweep has: `lora`, or `minilm gqa lora rank=8`. Where architectures competed,
            the chosen one goes by the method alone.
        settings: What tells its architecture from those it competed with: `rank=32`.
        style: Its place in the palette; the same in all figures.
        row: One of its rows, for its names.
    """

    key: str
    label: str
    settings: str
    style: int
    row: Mapping[str, Any]

    @property
    def anchor(self) -> str:
        """Its id on the page."""
        return "arm-" + re.sub(r"[^A-Za-z0-9_-]", "-", self.key)


def arms_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Arm]:
    """The arms of a sweep's rows by key, those with test scores first, the best first."""
    first: dict[str, Mapping[str, Any]] = {}
    for row in sorted(rows, key=_merit):
        first.setdefault(row["arm"], row)
    names = [_parts(row) for row in first.values()]
    whole = dict(zip(first, distinct(names), strict=True))
    alone = dict(
        zip(
            first,
            differing([" ".join(name[:3]) for name in names], [name[3] for name in names]),
            strict=True,
        )
    )
    winners = {key: _parts(row) for key, row in first.items() if row["status"] != "not chosen"}
    short = dict(zip(winners, distinct([*winners.values()], among=names), strict=True))
    labels = _unlike({key: short.get(key, whole[key]) for key in first})
    return {
        key: Arm(key, labels[key], " ".join(alone[key]), style, row)
        for style, (key, row) in enumerate(first.items())
    }


def _unlike(labels: Mapping[str, str]) -> dict[str, str]:
    """The end of the key behind labels that several arms have: they differ in something that is in no name."""
    many = Counter(labels.values())
    return {
        key: f"{label} {key[-KEY_SHOWN:]}" if many[label] > 1 else label
        for key, label in labels.items()
    }


def _merit(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
    score = row["score_mean"]
    better = 0.0 if score is None else score if row["higher_is_better"] is not False else -score
    return score is None, row["task"] != MEAN, -better


def _parts(row: Mapping[str, Any]) -> Names:
    return (
        values.backbone(row),
        values.attention(row),
        str(row["method"]),
        row["architecture"] or {},
    )


Names = tuple[str, str, str, Mapping[str, Any]]
"""Backbone, attention, method, architecture."""


def distinct(arms: Sequence[Names], *, among: Sequence[Names] = ()) -> list[str]:
    """A name for each: the backbone and the attention that all share (all of `among`, if given) are left out.

    The method is always there; the settings are those that differ between arms that are called the same otherwise.
    """
    shown = [n for n in (0, 1) if len({arm[n] for arm in among or arms}) > 1]
    names = [" ".join([*(str(arm[n]) for n in shown), arm[2]]) for arm in arms]
    return [
        " ".join([name, *own])
        for name, own in zip(names, differing(names, [arm[3] for arm in arms]), strict=True)
    ]


def differing(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Of each arm, `key=value` of the settings that tell it from others of the same name."""
    same: dict[str, list[Mapping[str, Any]]] = {}
    for name, own in zip(names, settings, strict=True):
        same.setdefault(name, []).append(own)
    return [
        [f"{k}={v}" for k, v in own.items() if any(other.get(k) != v for other in same[name])]
        for name, own in zip(names, settings, strict=True)
    ]


def listed(items: Iterable[str], *, most: int = 8) -> str:
    """`a, b and c`; of more than `most`, the first ones and how many others there are."""
    found = list(items)
    if len(found) > most:
        found = [*found[:most], f"{len(found) - most} more"]
    return (
        found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else ""
    )
