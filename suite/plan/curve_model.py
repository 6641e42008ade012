"""Model how the score depends on the learning rate: a Gaussian process over few, noisy trials.

The unknowns are the log learning rate and, where a study has them, a few choices such as the
architecture. Its length scale, height and noise are not fitted but averaged: a handful of trials
cannot tell them, and the one that fits best is too sure of itself. So the model is a mixture of
Gaussian processes, one for each setting of a grid, weighted by how well it explains the trials.
Everything is numpy on small matrices; a fit takes milliseconds.

Two beliefs are built in, both weak enough for eight trials to overrule:

- A curve bends down towards both ends. This is a random parabola under the process.
- Where finished studies are known (`Hint`), half of the weight says that this curve looks like
  theirs, at most a decade further left or right, and the other half knows nothing of them. Trials
  that disagree move the weight to the other half.

`benchmarks/protocol/search.py` simulates what the model finds; docs/search.md has its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.config.space import End, rounded

Array = NDArray[np.float64]

LENGTHS = {0.3: 0.5, 0.5: 1.0, 0.8: 1.5, 1.3: 1.5, 2.0: 1.0, 3.0: 0.5}
"""Length scales of the process in decades of the learning rate, with their prior weights."""
SIGNALS = (2.0, 5.0, 12.0)
"""Heights of the process, points."""
NOISES = (0.3, 0.6, 1.2, 2.4)
"""Standard deviations of what seed and validation set add to a score, points."""
CHOICES_APART = (0.3, 1.5)
"""How far the curves of two choices lie apart, points; of this a half changes with the rate."""
FAILURE_APART = 8.0
"""The same where a trial failed or fell by more than `KNEE`: another choice may do well there."""
OFFSET = 2.0
"""Standard deviation of a curve's level, in heights."""
BEND = (3.0, 3.0, 2.0)
"""The parabola: its mean bend, the deviation of its slope and of its bend, points per decade^n."""
KNEE = 8.0
"""A gap to the best of more points than this counts by its logarithm.

A rate that fell to chance says only that it is bad: the curve need not pass through its score.
"""
SHIFTS = {-1.0: 0.07, -0.6: 0.10, -0.3: 0.18, 0.0: 0.30, 0.3: 0.18, 0.6: 0.10, 1.0: 0.07}
"""How far a curve may lie from the hint, decades, with the weights of these hypotheses."""
HINT_WEIGHT = 0.5
HINT_LENGTHS = (0.5, 1.3)
HINT_SIGNALS = (2.0, 5.0)
LEAST_WEIGHT = 0.004
"""Settings with a smaller share of the weight than this are left out."""
STEP = 0.05
"""Distance of the learning rates that are looked at, decades; double with several choices."""
LEAST_PLACES = 17
"""Learning rates that are looked at in the narrowest range: more than a study tries (ours)."""
CURVES = 256
"""Curves drawn from each setting for the stop rule (ours)."""
# Nodes and weights of a normal distribution, for what a trial might show.
_NODES, _WEIGHTS = np.polynomial.hermite_e.hermegauss(7)
_WEIGHTS = _WEIGHTS / _WEIGHTS.sum()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A learning rate and the levels of a study's other choices, () where it has none."""

    rate: float
    levels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """A trial that ended: what was tried, and its utility in points; None = it has no score."""

    tried: Candidate
    utility: float | None


@dataclass(frozen=True, slots=True)
class Hint:
    """What finished studies say about the curve.

    Attributes:
        log_rates: log10 of learning rates, rising.
        values: Mean utility there, relative to the best, points.
    """

    log_rates: tuple[float, ...]
    values: tuple[float, ...]

    def moved(self, times: float) -> Hint:
        """The same curve at learning rates so many times as large."""
        shift = math.log10(times)
        return Hint(tuple(x + shift for x in self.log_rates), self.values)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The grid of settings; every attribute is an array of the same length.

    `shift` is NaN where the setting knows no hint and has the parabola.
    """

    length: Array
    signal: Array
    noise: Array
    apart: Array
    shift: Array
    log_prior: Array

    def some(self, keep: Any) -> _Settings:
        return _Settings(
            self.length[keep],
            self.signal[keep],
            self.noise[keep],
            self.apart[keep],
            self.shift[keep],
            self.log_prior[keep],
        )


@lru_cache(maxsize=8)
def _settings(with_choices: bool, with_hint: bool, with_failures: bool) -> _Settings:
    aparts: tuple[float, ...] = (0.0,)
    if with_choices:
        aparts = CHOICES_APART
    if with_choices and with_failures:
        aparts = (*CHOICES_APART, FAILURE_APART)
    rows = []
    weights = []
    for length, signal, noise, apart in product(LENGTHS, SIGNALS, NOISES, aparts):
        rows.append((length, signal, noise, apart, math.nan))
        weights.append(LENGTHS[length])
    cold = sum(weights)
    if with_hint:
        hinted = []
        for length, signal, noise, apart in product(HINT_LENGTHS, HINT_SIGNALS, NOISES, aparts):
            for shift, share in SHIFTS.items():
                rows.append((length, signal, noise, apart, shift))
                hinted.append(LENGTHS[length] * share)
        # Both halves have the weight that `HINT_WEIGHT` gives them, however many settings they are.
        scale = cold / sum(hinted) * HINT_WEIGHT / (1 - HINT_WEIGHT)
        weights += [weight * scale for weight in hinted]
    length, signal, noise, apart, shift = np.array(rows).T
    return _Settings(length, signal, noise, apart, shift, np.log(np.array(weights)))


class CurveModel:
    """What the trials of a study say about all of its learning rates.

    Args:
        low: Lowest learning rate of the range.
        high: Highest one.
        observed: The trials that have ended.
        pending: Trials without a result yet: where they are, less is left to learn.
        levels: The choices besides the learning rate that may be proposed.
        hint: What finished studies say.
    """

    def __init__(
        self,
        low: float,
        high: float,
        observed: Sequence[Observation],
        *,
        pending: Sequence[Candidate] = (),
        levels: Sequence[tuple[int, ...]] = ((),),
        hint: Hint | None = None,
    ) -> None:
        self._lowest = low
        self._highest = high
        self.low = math.log10(low)
        self.high = math.log10(high)
        self._hint = hint
        self._levels = list(levels)
        self._observed = [observation.tried for observation in observed]
        self._scored = [o.tried for o in observed if o.utility is not None]
        self._failing = {o.tried.levels for o in observed if o.utility is None}
        self._pending = list(pending)
        step = STEP if len(self._levels) == 1 else 2 * STEP
        count = max(LEAST_PLACES, round((self.high - self.low) / step) + 1)
        self._grid = np.linspace(self.low, self.high, count)
        settings = _settings(len(self._levels) > 1, hint is not None, _any_fell(observed))
        # What `_utilities` measures its gaps from.
        self._top = max((o.utility for o in observed if o.utility is not None), default=0.0)
        self._fit(settings, _utilities(observed))

    def _fit(self, settings: _Settings, utilities: Array) -> None:
        """Weigh the settings by the trials, and compute the mean under each."""
        n = len(utilities)
        grid_levels = np.repeat(np.array(self._levels, dtype=float), len(self._grid), axis=0)
        here = self._places(self._observed)
        grid = np.column_stack([np.tile(self._grid, len(self._levels)), grid_levels])
        centre = utilities.mean() if n else 0.0
        means = self._means(here, settings)
        # The level of the curve is unknown, so only the shape of the mean function counts.
        level = means.mean(1, keepdims=True) if n else np.zeros((len(means), 1))
        gap = (utilities - centre)[None] - (means - level)  # (settings, n)
        factor = np.linalg.cholesky(self._noisy(here, settings))
        solved = np.linalg.solve(factor, gap[..., None])[..., 0]
        determinant = np.log(np.diagonal(factor, axis1=1, axis2=2)).sum(1)
        score = settings.log_prior - determinant - 0.5 * (solved**2).sum(1)
        weight = np.exp(score - score.max())
        weight /= weight.sum()
        keep = weight > LEAST_WEIGHT
        self._settings = settings.some(keep)
        self._weight = weight[keep] / weight[keep].sum()
        to_grid = self._kernel(here, grid, self._settings)
        share = np.linalg.solve(factor[keep], to_grid)  # (settings, n, grid)
        mean = (share * solved[keep][..., None]).sum(1)
        self._mean = mean + self._means(grid, self._settings) - level[keep] + centre
        self._places_of_grid = grid

    @cached_property
    def _covariance(self) -> Array:
        """Covariance of the curve on the grid under each setting, (settings, grid, grid).

        It is computed on first use: it is large, and most questions of a study do not need it.
        """
        grid = self._places_of_grid
        # Nobody knows how a pending trial will change the mean, but how it changes the variance is
        # known.
        known = self._places([*self._observed, *self._pending])
        factor = np.linalg.cholesky(self._noisy(known, self._settings))
        share = np.linalg.solve(factor, self._kernel(known, grid, self._settings))
        own = self._kernel(grid, grid, self._settings)
        found: Array = own - share.transpose(0, 2, 1) @ share
        return found

    def _places(self, candidates: Sequence[Candidate]) -> Array:
        """Log rate and levels of some candidates, (n, 1 + choices)."""
        width = 1 + len(self._levels[0])
        rows = [(math.log10(c.rate), *map(float, c.levels)) for c in candidates]
        return np.array(rows, dtype=float).reshape(len(rows), width)

    def _means(self, places: Array, settings: _Settings) -> Array:
        """The mean functions of all settings, (settings, n)."""
        x = places[:, 0]
        cold = -BEND[0] * (x - (self.low + self.high) / 2) ** 2
        means = np.tile(cold, (len(settings.shift), 1))
        if self._hint is not None:
            for shift in SHIFTS:
                moved = np.interp(x - shift, self._hint.log_rates, self._hint.values)
                means[settings.shift == shift] = moved
        return means

    def _noisy(self, places: Array, settings: _Settings) -> Array:
        noise = (settings.noise**2)[:, None, None] * np.eye(len(places))
        return self._kernel(places, places, settings) + noise

    def _kernel(self, a: Array, b: Array, settings: _Settings) -> Array:
        """Covariance of the curves between two lists of places, (settings, len(a), len(b))."""
        distance = np.abs(a[:, None, 0] - b[None, :, 0])
        scaled = math.sqrt(5) * distance[None] / settings.length[:, None, None]
        # Matern 5/2: twice differentiable, as smooth as one may ask of such a curve.
        smooth = (1 + scaled + scaled**2 / 3) * np.exp(-scaled)
        found = (settings.signal**2)[:, None, None] * (smooth + OFFSET**2)
        centre = (self.low + self.high) / 2
        one = a[:, None, 0] - centre
        other = b[None, :, 0] - centre
        parabola = BEND[1] ** 2 * one * other + BEND[2] ** 2 * (one * other) ** 2
        found += np.isnan(settings.shift)[:, None, None] * parabola[None]
        for n in range(1, a.shape[1]):
            same = (a[:, None, n] == b[None, :, n])[None]
            found += (settings.apart**2)[:, None, None] * same * (1 + smooth) / 2
        return found

    def _candidate(self, place: int) -> Candidate:
        row = self._places_of_grid[place]
        levels = tuple(int(level) for level in row[1:])
        # Rounding must not lead out of the range.
        rate = min(self._highest, max(self._lowest, rounded(10.0 ** float(row[0]))))
        return Candidate(rate, levels)

    @property
    def _average(self) -> Array:
        """Mean utility at every place of the grid, over the settings."""
        average: Array = (self._weight[:, None] * self._mean).sum(0)
        return average

    def curve(self) -> Hint:
        """The mean of the best choice's curve, as a hint for other studies."""
        by_level = self._average.reshape(len(self._levels), len(self._grid))
        best = by_level[int(by_level.max(1).argmax())]
        values = best - best.max()
        return Hint(tuple(map(float, self._grid)), tuple(map(float, values)))

    def best(self, levels: tuple[int, ...] | None = None) -> tuple[Candidate, float]:
        """Where the mean is highest, and how high, between the outermost rates with a score.

        Of a choice with a trial without a score, only that choice's own rates count.

        Args:
            levels: Look only at this choice.
        """
        average = self._average.copy()
        # Beyond the rates with a score nothing was seen: a model must not choose what it only
        # extrapolates. A little room is for the grid, whose places are not the rates that were
        # tried.
        room = float(self._grid[1] - self._grid[0])
        x = self._places_of_grid[:, 0]
        for choice in self._levels:
            here = (self._places_of_grid[:, 1:] == np.array(choice, dtype=float)).all(1)
            seen = self._rates_of(choice)
            if levels in (None, choice) and seen:
                low, high = math.log10(min(seen)) - room, math.log10(max(seen)) + room
                here &= (x < low) | (x > high)
            average[here] = -math.inf
        place = int(average.argmax())
        found = self._candidate(place)
        if found.levels in self._failing:
            seen = self._rates_of(found.levels)
            found = Candidate(min(max(seen), max(min(seen), found.rate)), found.levels)
        return found, self._top - _unsquashed(self._top - float(average[place]))

    def _rates_of(self, choice: tuple[int, ...]) -> list[float]:
        """The rates with a score that tell what a choice does; both ends before there is one."""
        if not self._scored:
            return [self._lowest, self._highest]
        # What others can do at a rate says nothing of a choice that was seen to fail.
        if choice in self._failing:
            return [tried.rate for tried in self._scored if tried.levels == choice]
        return [tried.rate for tried in self._scored]

    def at(self, candidates: Sequence[Candidate]) -> list[float]:
        """The mean at some candidates, from the nearest place of the grid."""
        average = self._average
        found = []
        for candidate in candidates:
            distance = np.abs(self._places_of_grid[:, 0] - math.log10(candidate.rate))
            for n, level in enumerate(candidate.levels):
                distance = distance + 100.0 * (self._places_of_grid[:, 1 + n] != level)
            found.append(float(average[int(distance.argmin())]))
        return found

    def rises_to(self) -> End | None:
        """The end of the range at which the mean is highest; None where that lies inside."""
        place = int(self._average.argmax())
        x = self._places_of_grid[place, 0]
        # The ends of a narrow range are no wider than a quarter of it.
        end = min(STEP, (self.high - self.low) / 4)
        if x - self.low <= end:
            return "low"
        if self.high - x <= end:
            return "high"
        return None

    def next(self, *, levels: tuple[int, ...] | None = None) -> Candidate:
        """The trial after which the highest mean is expected to be highest: knowledge gradient.

        Source: Frazier, Powell, Dayanik, "The knowledge-gradient policy for correlated normal
        beliefs", INFORMS Journal on Computing 21(4), 2009. The expectation is by quadrature, and
        its average over the settings is ours.

        Args:
            levels: Propose only this choice.
        """
        gain = np.zeros(len(self._places_of_grid))
        for weight, mean, covariance, noise in zip(
            self._weight, self._mean, self._covariance, self._settings.noise, strict=True
        ):
            spread = np.sqrt(np.maximum(np.diag(covariance), 0.0) + noise**2)
            moves = covariance / spread[None, :]  # of all means, by what is tried
            after = mean[:, None, None] + moves[:, :, None] * _NODES
            gain += weight * (after.max(0) * _WEIGHTS).sum(-1)
        if levels is not None:
            others = (self._places_of_grid[:, 1:] != np.array(levels, dtype=float)).any(1)
            gain[others] = -math.inf
        known = {*self._observed, *self._pending}
        # The search runs one seed, so the same trial again would teach nothing.
        for place in np.argsort(-gain, kind="stable"):
            candidate = self._candidate(int(place))
            if candidate not in known:
                return candidate
        return self._candidate(int(gain.argmax()))

    def gain_left(self) -> float:
        """What knowing the curve exactly would add to the score of the rate chosen now, points.

        It bounds what any further search can gain, under the model: the expected value of perfect
        information (Howard, 1966), from `CURVES` curves.
        """
        chosen = int(self._average.argmax())
        rng = np.random.default_rng(0)
        gain = 0.0
        for weight, mean, covariance in zip(
            self._weight, self._mean, self._covariance, strict=True
        ):
            values, vectors = np.linalg.eigh(covariance)
            root = vectors * np.sqrt(np.maximum(values, 0.0))
            drawn = mean + rng.standard_normal((CURVES, len(mean))) @ root.T
            gain += weight * float((drawn.max(1) - drawn[:, chosen]).mean())
        return gain


def _any_fell(observed: Sequence[Observation]) -> bool:
    """Whether a trial has no score, or one that lies far below the best."""
    scored = [o.utility for o in observed if o.utility is not None]
    return len(scored) < len(observed) or any(max(scored) - u > KNEE for u in scored)


def _utilities(observed: Sequence[Observation]) -> Array:
    """Utilities with large gaps to the best made small; no score counts as the worst one seen."""
    scored = [o.utility for o in observed if o.utility is not None]
    if not scored:
        return np.zeros(len(observed))
    worst = min(scored)
    given = np.array([worst if o.utility is None else o.utility for o in observed])
    best = given.max()
    squashed: Array = best - KNEE * np.arcsinh((best - given) / KNEE)
    return squashed


def _unsquashed(gap: float) -> float:
    """A gap to the best as it was before `_utilities` made it small."""
    return KNEE * math.sinh(gap / KNEE)
