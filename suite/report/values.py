"""Values as a person reads them, the same in terminals, documents and reports."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from suite.config.reference import MEAN
from suite.meters.record import ESTIMATE
from suite.plan.cell_state import CellStatus

MISSING = "-"
REJECTED = "rejected"
ITEMS_ONLY = "over items only"
"""What the interval of a single seed is: it knows nothing of the spread over seeds."""
UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit that suits some values.

    Attributes:
        unit: Its name.
        size: One of it in the unit of the values, kWh or bytes.
    """

    unit: str
    size: float

    def show(self, value: float | None) -> str:
        """A value in this unit, which stands elsewhere: `70.4`, `0.0286`, `1,230`."""
        if value is None:
            return MISSING
        shown = value / self.size
        # 999.7 would become 1.00e+03.
        if abs(shown) >= 999.5:
            return count(shown)
        # `#` keeps the zeros, so that the digits of a column stand below each other.
        return f"{shown:#.3g}".rstrip(".")


SCALES = {
    "kWh": (Scale("mWh", 1e-6), Scale("Wh", 1e-3), Scale("kWh", 1.0)),
    "bytes": tuple(Scale(unit, 1024.0**power) for power, unit in enumerate(UNITS)),
}


def sizes_of_units() -> dict[str, float]:
    """Units that a filter of the page may name, in those of rows: kWh, bytes and seconds."""
    sizes = {"s": 1.0, "min": 60.0, "h": 3600.0}
    for scales in SCALES.values():
        sizes |= {scale.unit: scale.size for scale in scales}
    # Nothing is shown in these, but people type them.
    return sizes | {"KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "MWh": 1e3}


def scale_of(unit: str, values: Iterable[float | None]) -> Scale:
    """The largest unit of which the largest value holds at least one.

    Args:
        unit: `kWh` or `bytes`, the unit of the values.
        values: None = not known.
    """
    known = [abs(value) for value in values if value is not None]
    largest = max(known, default=0.0)
    chosen = SCALES[unit][0]
    for scale in SCALES[unit]:
        if largest >= scale.size:
            chosen = scale
    return chosen


def text(value: Any) -> str:
    """A value as it stands: a dash for what is absent, the items of a list with commas."""
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
    """The chosen rate; it says so where scores may rise beyond the searched range."""
    shown = brief(row["learning_rate"])
    if row["edge"]:
        shown += " (edge)"
    return shown


def status(row: Mapping[str, Any]) -> str:
    """How far a row is, or that it is rejected: `done (dirty)`, `done, not verifiable here`."""
    # None = not checked, which is no reason to reject.
    if row["admitted"] is False:
        return REJECTED
    shown = str(row["status"])
    # The code had changes that no commit holds, so the row cannot be repeated exactly.
    if row["dirty"]:
        shown += " (dirty)"
    if row["unverified"] is not None:
        from suite.leaderboard.fields import NOT_VERIFIABLE

        shown += f", {NOT_VERIFIABLE}"
    return shown


def flaw(row: Mapping[str, Any]) -> str:
    """Why a test score is no result to choose by: `rejected` or `failed`; empty where it is one."""
    # None = not checked, which is no reason to reject.
    if row["admitted"] is False:
        return REJECTED
    # What is left is a mean of the seeds that survived.
    if row["status"] == CellStatus.FAILED:
        return CellStatus.FAILED.value
    return ""


def mean_score(row: Mapping[str, Any]) -> str:
    """The test score of a row: `83.1 ± 0.4`; an arrow marks scores of which less is better."""
    shown = score_of(row)
    if row["score_mean"] is None:
        return shown
    if row["score_std"] is not None:
        shown += f" ± {score_of(row, 'score_std')}"
    # Not in the head of the column: one table may hold tasks of both kinds.
    if row["higher_is_better"] is False:
        shown += " ↓"
    return shown


def interval(row: Mapping[str, Any], *, short: bool = False) -> str:
    """The interval of a row's score: `79.9 to 82.4`, `79.9 to 82.4 (over items only)`.

    Args:
        row: The row.
        short: Write a star instead of the words, because a terminal is narrow.
    """
    if row["ci_low"] is None:
        return MISSING
    shown = f"{score_of(row, 'ci_low')} to {score_of(row, 'ci_high')}"
    if row["ci_of"] != "items":
        return shown
    if short:
        return f"{shown} *"
    return f"{shown} ({ITEMS_ONLY})"


def has_one_seed(row: Mapping[str, Any]) -> bool:
    """Whether a row has no rank because it has a single seed."""
    # It takes a while to import, and most commands show no rank.
    from suite.stats.compare import NO_RANK

    return bool(row["rank_missing"] == NO_RANK)


def rank(row: Mapping[str, Any], *, short: bool = False) -> str:
    """The rank of a row: `1`, `2-4`, `none: one seed`.

    Args:
        row: The row.
        short: Write `one seed` alone, because a terminal is narrow.
    """
    # An empty cell would read as if the rank were still to come.
    if has_one_seed(row):
        if short:
            return "one seed"
        return "none: one seed"
    return text(row["rank"])


def shows_baseline(row: Mapping[str, Any]) -> bool:
    """Whether a row of a table needs the constant-answer baseline beside its score.

    A row that is shown to learn does not need it, and a mean row is not tested against one.
    """
    known = row["task"] != MEAN and row["constant_score"] is not None
    return known and row["shown_to_learn"] is not True


def baseline(row: Mapping[str, Any]) -> str:
    """The constant-answer baseline, where a row is not significantly better."""
    if not shows_baseline(row):
        return MISSING
    return score(row["constant_score"])


def shown_to_learn(row: Mapping[str, Any]) -> str:
    """`yes`, `no`, or a dash where it was not tested."""
    if row["shown_to_learn"] is None:
        return MISSING
    if row["shown_to_learn"]:
        return "yes"
    return "no"


def is_estimate(row: Mapping[str, Any]) -> bool:
    """Whether some of a row's energy was estimated, not measured."""
    # A row over several runs names all of their sources.
    return ESTIMATE in (row["energy_source"] or "")


def on_several_machines(rows: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some rows were computed on several models of machine, or a row of them was."""
    machines = {row["machine"] for row in rows if row.get("machine")}
    # A row whose runs were on different ones names them all.
    return len(machines) > 1 or any("+" in machine for machine in machines)


def comparable_energy(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the energies of some rows may be compared.

    They have one and the same source, and are of one model of machine.
    """
    if on_several_machines(rows):
        return False
    sources = {row["energy_source"] for row in rows}
    # A row of several sources was measured in another way from run to run.
    return len(sources) == 1 and "+" not in (sources.pop() or "")


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


def seeds(rows: Sequence[Mapping[str, Any]]) -> str:
    """The seeds behind the scores of some rows: `1 seed`, `3 seeds`, `2 to 5 seeds`."""
    counts = [row["seeds"] for row in rows]
    least = min(counts)
    most = max(counts)
    if least < most:
        return f"{least} to {most} seeds"
    if most == 1:
        return "1 seed"
    return f"{most} seeds"


def score(value: float | None) -> str:
    """A metric in percent, to a tenth: a test set of a few hundred rows cannot tell more."""
    return number(value, ".1f")


def score_of(row: Mapping[str, Any], key: str = "score_mean") -> str:
    """A row's score, or what is said of it, to a tenth; of a perplexity below 10 to a hundredth.

    A tenth is one percent or more of such a perplexity.
    """
    mean = row["score_mean"]
    if row["higher_is_better"] is False and mean is not None and abs(mean) < 10:
        return number(row[key], ".2f")
    return score(row[key])


def signed(value: float | None) -> str:
    """A difference of two scores, with its sign: `+0.4`."""
    return number(value, "+.1f")


def brief(value: float | None) -> str:
    """Three significant digits: `0.00125`, `3.1e-06`."""
    return number(value, ".3g")


def size(value: float | None) -> str:
    """Bytes in binary units: `12.5 MiB`."""
    if value is None:
        return MISSING
    scale = scale_of("bytes", [value])
    if scale.size == 1:
        return f"{value:.0f} {scale.unit}"
    return f"{value / scale.size:.1f} {scale.unit}"


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


def spent(measured_kwh: Sequence[float], estimated_kwh: Sequence[float]) -> str:
    """Measured and estimated energy, which are not added: `1.23 Wh and 0.400 Wh estimated`."""
    parts = []
    if measured_kwh:
        parts.append(energy(fsum(measured_kwh)))
    if estimated_kwh:
        parts.append(f"{energy(fsum(estimated_kwh))} estimated")
    # 0 would claim that nothing was used.
    return " and ".join(parts) or MISSING


def energy(value: float | None) -> str:
    """kWh in the unit that suits it: `66.0 mWh`, `1.23 Wh`, `250 kWh`."""
    if value is None:
        return MISSING
    scale = scale_of("kWh", [value])
    return f"{scale.show(value)} {scale.unit}"


SHOW: dict[str, Callable[[Any], str]] = {
    "": brief,
    "count": count,
    "percent": score,
    "bytes": size,
    "s": duration,
    "kWh": energy,
}
"""How a number of the leaderboard's fields is shown, by its unit."""
