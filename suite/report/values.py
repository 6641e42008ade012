"""Values as a person reads them, the same in terminals, documents and reports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING = "-"
# The energy source that is no measurement (docs/metrics.md).
ESTIMATE = "cpu-time-estimate"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def text(value: Any) -> str:
    """A value as it stands: a dash for what is absent, the items of a list with commas."""
    if isinstance(value, (set, frozenset)):
        # A set has no order, but the same value must read the same in every report.
        value = sorted(value)
    if isinstance(value, (list, tuple)):
        value = ", ".join(map(str, value))
    if value is None or value == "":
        return MISSING
    return str(value)


def settings(value: object) -> str:
    """Settings as `rank=8 dropout=0.1`, inner ones in parentheses; a dash for none."""
    if not isinstance(value, dict) or not value:
        return text(value or None)
    parts = []
    for key, own in value.items():
        if isinstance(own, dict):
            own = f"({settings(own)})"
        parts.append(f"{key}={own}")
    return " ".join(parts)


def backbone(row: Mapping[str, Any]) -> str:
    """A backbone by name; the name says so where the checkpoint ran code of its own."""
    name = str(row["backbone"])
    if row.get("own_code"):
        name += " (own code)"
    return name


def attention(row: Mapping[str, Any]) -> str:
    """A variant with its options, as `gqa kv_heads=2`."""
    name = str(row["attention"])
    if row["attention_options"]:
        name += f" {settings(row['attention_options'])}"
    return name


def learning_rate(row: Mapping[str, Any]) -> str:
    """The chosen rate; it says so where the rate lies at an end of the range that was searched."""
    shown = brief(row["learning_rate"])
    if row["edge"]:
        shown += " (edge)"
    return shown


def is_estimate(row: Mapping[str, Any]) -> bool:
    """Whether some of a row's energy was estimated, not measured."""
    # A row over several runs names all of their sources.
    return ESTIMATE in (row["energy_source"] or "")


def rank_bounds(rank: str) -> tuple[int, int]:
    """The best and the worst place of a rank such as `2-4` or `1`."""
    low, _, high = rank.partition("-")
    return int(low), int(high or low)


def number(value: float | None, form: str) -> str:
    """A number in a format of Python's, such as `.1f`; a dash where there is none."""
    if value is None:
        return MISSING
    return f"{value:{form}}"


def count(value: float | None) -> str:
    """A whole number: `12,345`."""
    return number(value, ",.0f")


def score(value: float | None) -> str:
    """A metric in percent, to a tenth: a test set of a few hundred rows cannot tell more."""
    return number(value, ".1f")


def brief(value: float | None) -> str:
    """Three significant digits: `0.00125`, `3.1e-06`."""
    return number(value, ".3g")


def size(value: float | None) -> str:
    """Bytes in binary units: `12.5 MiB`."""
    if value is None:
        return MISSING
    unit = 0
    while unit + 1 < len(UNITS) and abs(value) >= 1024:
        value /= 1024
        unit += 1
    if unit == 0:
        return f"{value:.0f} B"
    return f"{value:.1f} {UNITS[unit]}"


def duration(value: float | None) -> str:
    """Seconds as `4.2 s`, `3 min 20 s` or `2 h 05 min`."""
    if value is None:
        return MISSING
    if value < 60:
        return f"{value:.1f} s"
    # Rounded before it is cut: 119.7 s would read as 1 min 60 s otherwise.
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def energy(value: float | None) -> str:
    """kWh as Wh: the unit in which runs of minutes can be read."""
    if value is None:
        return MISSING
    return f"{value * 1000:.3g} Wh"
