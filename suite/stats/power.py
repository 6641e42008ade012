"""What a comparison could tell apart: the difference that so many seeds show four times in five.

A difference is shown where it exceeds the half width of its interval at the level that Holm's
correction leaves to the hardest of all comparisons. It does so in 80% of cases where the true
difference is that half width plus the 80% quantile of the error. Both come from the error's own
distribution (`significance`): the items' part, and the seeds' part with the degrees of freedom that
`compare` gives two arms that are equally noisy. Where the items' part is 0 this is close to the
noncentral t test. Few items may allow no verdict at all (`exact`), and then nothing is shown.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from suite.stats.compare import OWN, Evidence, items_part, seed_variances
from suite.stats.exact import least_p
from suite.stats.significance import LEVEL, half_width

POWER = 0.8
"""How often a difference of this size is shown, by convention."""
POINT = 1.0
"""The difference, in the unit of the score, for which the seeds are counted."""
MOST_SEEDS = 1000


@dataclass(frozen=True, slots=True)
class Spread:
    """How much scores vary, as far as is known.

    Attributes:
        seeds: Variance between the seeds of an arm, squared units of the score.
        items: Variance that the choice of items gives the difference of two arms.
        units: How many items, or groups of items, were resampled; None = many.
    """

    seeds: float
    items: float
    units: int | None = None


@dataclass(frozen=True, slots=True)
class Power:
    """What could be told apart.

    Attributes:
        seeds: Seeds of every arm.
        pairs: Comparisons that share the level of 5%, by Holm's correction.
        shown: The least difference that is shown in 80% of cases; None with one seed, where the
            items are too few for any verdict, and where nothing varies: arms that answer alike do
            not say how others would vary.
        seeds_for_point: Seeds that show a difference of `POINT` as often; None where the items
            alone hide it, or more than `MOST_SEEDS` would be needed.
    """

    seeds: int
    pairs: int
    shown: float | None
    seeds_for_point: int | None


def unit_of(higher_is_better: bool | None) -> str:
    """The unit of a difference of scores, after the number 1.

    Elsewhere a point is 1% of a perplexity, so a whole unit of one has another name.
    """
    # Less is better for perplexities alone.
    return "of perplexity" if higher_is_better is False else "point"


def sentence(
    seeds: int,
    shown: float | None,
    seeds_for_point: int | None,
    *,
    higher_is_better: bool | None = True,
) -> str:
    """The same in words: what so many seeds tell apart, and what one point would take.

    Args:
        seeds: Seeds of every arm.
        shown, seeds_for_point: As in `Power`.
        higher_is_better: Whether a higher score is better, which tells the unit.
    """
    if shown is None and seeds < 2:
        return "one seed can tell nothing apart"
    if shown is None:
        return (
            "scores do not vary here, or the test items are too few for a verdict: nothing says"
            f" what {seeds} seeds could show"
        )
    unit = unit_of(higher_is_better)
    units = "points" if unit == "point" else unit
    more = f"{POINT:g} {unit} is out of reach ({MOST_SEEDS:,} seeds would not do)"
    if seeds_for_point is not None:
        more = f"a difference of {POINT:g} {unit} takes {seeds_for_point} seeds"
    return f"{seeds} seeds can show a difference of {size_text(shown)} {units}; {more}"


def size_text(shown: float) -> str:
    """A smallest difference to a tenth, and below that its first digit: 0.0 would mean any."""
    if shown < 0.1:
        return f"{shown:.1g}"
    return f"{shown:.1f}"


def sentence_of(row: Mapping[str, Any]) -> str:
    """`sentence` of a row of the leaderboard, of a comparison or of a dry run's verdicts."""
    return sentence(
        row["seeds"],
        row["shown_difference"],
        row["seeds_for_point"],
        higher_is_better=row["higher_is_better"],
    )


def spread_of(evidence: Evidence) -> Spread | None:
    """The spread of A arms, each one's variance counted alike; None with one seed or arm."""
    arms, seeds = evidence.scores.shape
    if arms < 2 or seeds < 2:
        return None
    # The diagonal is 0: an arm does not differ from itself.
    items = items_part(evidence).sum() / (arms * (arms - 1))
    seeds_part = float(seed_variances(evidence.scores).mean())
    return Spread(seeds_part, float(items), evidence.units)


def power_of(spread: Spread, *, seeds: int, pairs: int, looks: float = 1) -> Power:
    """What `seeds` seeds could tell apart, and how many a difference of `POINT` takes.

    Args:
        spread: What varies.
        seeds: Seeds of every arm, 1 or more.
        pairs: Comparisons that are corrected together: A (A - 1) / 2 for the ranks of A arms.
        looks: How often the test scores were looked at; every p-value is multiplied by it.
    """
    if spread.seeds == 0 and spread.items == 0:
        return Power(seeds, pairs, None, None)
    error = (1 - LEVEL) / (pairs * looks)
    if spread.units is not None and least_p(spread.units) >= error:
        return Power(seeds, pairs, None, None)
    shown = None
    if seeds > 1:
        shown = _shown(spread, seeds, error)
    # More seeds never show less, so the least number is found by halving.
    enough = None
    low = 1
    high = MOST_SEEDS
    if _shown(spread, high, error) <= POINT:
        while high - low > 1:
            middle = (low + high) // 2
            if _shown(spread, middle, error) <= POINT:
                high = middle
            else:
                low = middle
        enough = high
    return Power(seeds, pairs, shown, enough)


def _shown(spread: Spread, seeds: int, error: float) -> float:
    """The least difference that is shown in 80% of cases with this many seeds, 2 or more.

    `error` is the level that the correction leaves to the hardest comparison.
    """
    variance = 2 * spread.seeds / seeds
    # Satterthwaite's degrees of freedom for two equal variances are twice those of one.
    df = (seeds - 1) * (1 + OWN)
    level = half_width(spread.items, variance, df, error=error)
    # The error exceeds this in one direction in 20% of cases, so in both in 40%.
    return level + half_width(spread.items, variance, df, error=2 * (1 - POWER))
