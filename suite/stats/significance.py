"""From variances to intervals and p-values: the error of a mean score has a part of the items and a part of the seeds.

The items' part is what the choice of items does to all seeds alike. It is normal: there are many, and the bootstrap gives its
variance. The seeds' part, with whatever an item does to one seed only, is a Student t: three seeds give its variance with two
degrees of freedom. The error is the sum of the two, the distribution of Behrens and Fisher (Fisher, "The fiducial argument in
statistical inference", 1935), which errs on the wide side where it errs. A plain bootstrap over seeds takes three seeds for
all there are: where seeds matter most, its intervals of "95%" hold the truth three times in four.
"""

from __future__ import annotations

import functools

import numpy as np
from scipy import optimize, special

from suite.metrics.quality import Values

LEVEL = 0.95
NODES, POWER = 100, 8


@functools.lru_cache(maxsize=256)
def _mixture(df: float) -> tuple[Values, Values]:
    """Student's t as a mixture of normal distributions: their variances and weights.

    Gauss-Legendre in the eighth root of the chi-square's quantile, which puts nodes where the long tails come from; p-values
    down to 1e-12 are within 1e-4 of scipy's for 1 to 30 degrees of freedom.
    """
    x, weights = np.polynomial.legendre.leggauss(NODES)
    root = (x + 1) / 2
    return df / (2 * special.gammaincinv(df / 2, root**POWER)), weights / 2 * POWER * root ** (
        POWER - 1
    )


def two_sided(
    difference: Values | float, items: Values | float, seeds: Values | float, df: float
) -> Values:
    """P of an error at least as large as `difference`.

    Args:
        difference: In the unit of the score.
        items: Variance of the part that is normal.
        seeds: Variance of the part that is Student's t, as estimated with `df` degrees of freedom.
        df: Above 0; without meaning where `seeds` is 0.

    Returns:
        0 to 1; 1 where there is neither a difference nor a variance.
    """
    difference, items, seeds = np.broadcast_arrays(np.abs(difference), items, seeds)
    scales, weights = _mixture(df) if df > 0 else (np.ones(1), np.ones(1))
    deviation = np.sqrt(items[..., None] + seeds[..., None] * scales)
    with np.errstate(divide="ignore", invalid="ignore"):
        far = difference[..., None] / deviation
    found: Values = np.where(
        difference == 0, 1.0, np.clip((2 * special.ndtr(-far) * weights).sum(-1), 0.0, 1.0)
    )
    return found


def half_width(items: float, seeds: float, df: float, *, level: float = LEVEL) -> float:
    """What the error exceeds in either direction with probability 1 - `level`; arguments as of `two_sided`."""
    total = float(np.sqrt(items + seeds))
    if total == 0:
        return 0.0
    return total * float(
        optimize.brentq(
            lambda h: float(two_sided(h * total, items, seeds, df)) - (1 - level),
            0.0,
            1e4,
            xtol=1e-10,
        )
    )


def holm(p: Values) -> Values:
    """P-values of a family, adjusted by Holm's step-down (Scandinavian Journal of Statistics, 1979): at most 5% of families err.

    Args:
        p: (m,), of any dependence.
    """
    order = np.argsort(p, kind="stable")
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
    return adjusted
