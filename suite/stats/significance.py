"""Turns variances into intervals and p-values.

The error of a mean score has two parts. The items' part is what the choice of items does to all
seeds alike; it is normal, because there are many items, and the bootstrap gives its variance. The
seeds' part, which includes whatever an item does to one seed only, follows a Student t: three
seeds give its variance with two degrees of freedom. The error is the sum of the two. Its
distribution is that of Behrens and Fisher (Fisher, "The fiducial argument in statistical
inference", 1935), which is rather too wide than too narrow. A plain bootstrap over seeds would
take three seeds for all there are: where seeds matter most, its intervals of "95%" hold the truth
three times in four.
"""

from __future__ import annotations

import functools

import numpy as np

from suite.metrics.values import Values

LEVEL = 0.95
NODES = 100
"""Normal distributions in the mixture that stands for a Student t."""
POWER = 8
"""Root of the quantile in which the nodes are spread."""


@functools.lru_cache(maxsize=256)
def _student_mixture(df: float) -> tuple[Values, Values]:
    """Variances and weights of the normal distributions whose mixture is Student's t.

    Gauss-Legendre quadrature in the eighth root of the chi-square's quantile puts nodes where the
    long tails come from. P-values down to 1e-12 are within 1e-4 of scipy's for 1 to 30 degrees of
    freedom.
    """
    # here and below: who only reads stored intervals does without scipy
    from scipy.special import gammaincinv

    x, weights = np.polynomial.legendre.leggauss(NODES)
    root = (x + 1) / 2  # from [-1, 1] to [0, 1]
    variances = df / (2 * gammaincinv(df / 2, root**POWER))
    return variances, weights / 2 * POWER * root ** (POWER - 1)


def two_sided(
    difference: Values | float, items: Values | float, seeds: Values | float, df: Values | float
) -> Values:
    """Probability of an error at least as large as `difference`, in either direction.

    Args:
        difference: In the unit of the score.
        items: Variance of the normal part.
        seeds: Variance of the Student t part, estimated with `df` degrees of freedom.
        df: 1 or more, rounded down to a tenth; without a meaning where `seeds` is 0.

    Returns:
        0 to 1; 1 where there is neither a difference nor a variance.
    """
    from scipy.special import ndtr

    difference, items, seeds, df = np.broadcast_arrays(np.abs(difference), items, seeds, df)
    # every pair has degrees of freedom of its own, and a mixture takes a millisecond to make
    known, which = np.unique(np.floor(10 * np.maximum(df, 1.0)) / 10, return_inverse=True)
    mixtures = np.array(list(map(_student_mixture, known.tolist())))  # (known, 2, NODES)
    scales = mixtures[which.reshape(df.shape), 0]
    # The nodes are spread alike for all degrees of freedom, so the weights are the same.
    weights = mixtures[0, 1]
    deviation = np.sqrt(items[..., None] + seeds[..., None] * scales)  # (..., NODES)
    # without any variance this divides by 0; the `where` below replaces 0 / 0
    with np.errstate(divide="ignore", invalid="ignore"):
        far = difference[..., None] / deviation
    p = np.clip((2 * ndtr(-far) * weights).sum(-1), 0.0, 1.0)
    found: Values = np.where(difference == 0, 1.0, p)
    return found


def half_width(items: float, seeds: float, df: float, *, error: float = 1 - LEVEL) -> float:
    """Half the width of the interval that fails to hold the error with probability `error`.

    Args:
        items, seeds, df: As in `two_sided`.
        error: Above 0 and below 1.
    """
    from scipy.optimize import brentq

    total = float(np.sqrt(items + seeds))
    if total == 0:
        return 0.0

    def excess(deviations: float) -> float:
        return float(two_sided(deviations * total, items, seeds, df)) - error

    # solved in standard deviations of the error, so that the tolerance suits every unit
    return total * float(brentq(excess, 0.0, 1e9, xtol=1e-10))


def counted(p: Values | float, looks: Values | int) -> Values:
    """The p-value of scores that were looked at several times with other runs; at most 1.

    This is Bonferroni's correction over the looks. Whoever adds seeds until two equal arms are told
    apart then succeeds in at most 5% of simulated sweeps, as after a single look
    (`python -m benchmarks.protocol.looks`).

    Args:
        p: Of the present look alone.
        looks: How many there were, at least 1.
    """
    found: Values = np.minimum(np.asarray(p) * np.asarray(looks), 1.0)
    return found


def holm(p: Values, *, family: int = 0) -> Values:
    """Adjust the p-values of a family, so that at most 5% of families hold an error.

    Source: Holm's step-down procedure, Scandinavian Journal of Statistics, 1979.

    Args:
        p: (k,); the tests may depend on each other in any way.
        family: Tests that are planned, those without a p-value yet among them; these count as if
            theirs were 1. Fewer than k = the k tests are all.
    """
    order = np.argsort(p, kind="stable")
    planned = max(family, len(p))
    # the smallest p-value counts once for every test, the next for one test less, and none less
    # than one before it
    stepped = np.maximum.accumulate(p[order] * np.arange(planned, planned - len(p), -1))
    adjusted = np.empty(len(p))
    adjusted[order] = np.minimum(stepped, 1.0)
    return adjusted
