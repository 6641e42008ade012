"""Values as a person reads them: in terminals, documents and reports alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MISSING = "-"
ESTIMATE = "cpu-time-estimate"
"""The energy source that is no measurement (docs/metrics.md)."""


def text(value: Any) -> str:
    """A value as it stands; absent ones as a dash, lists joined."""
    if isinstance(value, (list, tuple, set, frozenset)):
        return (
            ", ".join(map(str, sorted(value) if isinstance(value, (set, frozenset)) else value))
            or MISSING
        )
    return MISSING if value is None or value == "" else str(value)


def settings(value: object) -> str:
    """`rank=8 dropout=0.1`; settings inside settings in parentheses; a dash for none."""
    if not isinstance(value, dict) or not value:
        return text(value or None)
    return " ".join(
        f"{k}=({settings(v)})" if isinstance(v, dict) else f"{k}={v}" for k, v in value.items()
    )


def backbone(row: Mapping[str, Any]) -> str:
    """A backbone by name; one whose checkpoint ran code of its own says so."""
    return f"{row['backbone']} (own code)" if row.get("own_code") else str(row["backbone"])


def attention(row: Mapping[str, Any]) -> str:
    """A variant with its options, as `gqa kv_heads=2`, from a row with `attention` and `attention_options`."""
    return " ".join(
        [
            row["attention"],
            *([settings(row["attention_options"])] if row["attention_options"] else []),
        ]
    )


def count(value: float | None) -> str:
    return MISSING if value is None else f"{value:,.0f}"


def score(value: float | None) -> str:
    """A metric in percent, to a tenth: what a test set of a few hundred rows can tell."""
    return MISSING if value is None else f"{value:.1f}"


def brief(value: float | None) -> str:
    """Three significant digits (`0.00125`, `3.1e-06`)."""
    return MISSING if value is None else f"{value:.3g}"


def size(value: float | None) -> str:
    """Bytes in binary units: `12.5 MiB`."""
    if value is None:
        return MISSING
    unit = max(u for u in range(5) if u == 0 or abs(value) >= 1024**u)
    return (
        f"{value / 1024**unit:.{0 if unit == 0 else 1}f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
    )


def duration(value: float | None) -> str:
    """Seconds as `4.2 s`, `3 min 20 s` or `2 h 05 min`."""
    if value is None:
        return MISSING
    if value < 60:
        return f"{value:.1f} s"
    minutes, seconds = divmod(round(value), 60)
    return (
        f"{minutes} min {seconds:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def energy(value: float | None) -> str:
    """kWh as Wh, the unit in which runs of minutes are readable."""
    return MISSING if value is None else f"{value * 1000:.3g} Wh"
