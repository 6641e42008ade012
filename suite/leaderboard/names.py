"""The shortest names that tell the arms of a sweep apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Characters of a key that are shown; a key ends in a hash.
KEY_SHOWN = 8


class Names(NamedTuple):
    """The parts of an arm's name."""

    backbone: str
    attention: str
    method: str
    architecture: Mapping[str, Any]


def distinct(arms: Sequence[Names], *, among: Sequence[Names] = ()) -> list[str]:
    """Give each arm a name.

    The method is always there. The backbone and the attention are left out where all arms share
    them (all of `among`, if given). The settings are those that differ between arms that would
    have the same name otherwise.
    """
    everyone = among or arms
    several_backbones = len({arm.backbone for arm in everyone}) > 1
    several_attentions = len({arm.attention for arm in everyone}) > 1
    names = []
    architectures = []
    for arm in arms:
        architectures.append(arm.architecture)
        parts = [arm.method]
        if several_attentions:
            parts.insert(0, arm.attention)
        if several_backbones:
            parts.insert(0, arm.backbone)
        names.append(" ".join(parts))
    labels = []
    for name, own in zip(names, differing(names, architectures), strict=True):
        labels.append(" ".join([name, *own]))
    return labels


def with_keys(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels by key; those that several keys have get the ends of these, and so are distinct."""
    counts = Counter(labels.values())
    found = {}
    for key, label in labels.items():
        found[key] = label
        # These arms differ in something that no name shows.
        if counts[label] > 1:
            found[key] = f"{label} {key[-KEY_SHOWN:]}"
    return found


def differing(names: Sequence[str], settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each arm, `key=value` of the settings that tell it from others of the same name."""
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for name, own in zip(names, settings, strict=True):
        by_name.setdefault(name, []).append(own)
    found = []
    for name, own in zip(names, settings, strict=True):
        shown = []
        for key, value in own.items():
            # `get`: another arm may not have this setting at all.
            if any(other.get(key) != value for other in by_name[name]):
                shown.append(f"{key}={value}")
        found.append(shown)
    return found
