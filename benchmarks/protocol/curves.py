"""Made learning-rate curves whose truth is known: score in points over log10 of the learning rate.

Five shapes that fine-tuning gives, each with random places, heights and slopes: a plateau with a
soft shoulder, a rise to a cliff, a parabola that ends in divergence, a rise that comes late, and a
lopsided bump. This file needs numpy alone, so that another version of the suite can be measured
on the same curves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

LOW = -6.0
HIGH = math.log10(3e-3)
"""The range of all search spaces, decades."""
CHANCE = 50.0
SHAPES = ("plateau", "cliff", "divergence", "late rise", "bump")
_FINE = np.linspace(LOW - 1, HIGH + 1, 551)


@dataclass(frozen=True)
class Curve:
    """A curve that is known.

    Attributes:
        truth: Score without noise over log10 of the rate.
        diverges: log10 of the rate beyond which training diverges.
    """

    truth: Callable[[float], float]
    diverges: float = math.inf

    def score(self, x: float) -> float:
        """What a run at this rate is worth; chance where it diverges."""
        if x > self.diverges:
            return CHANCE
        return float(self.truth(x))

    def best(self, low: float = LOW, high: float = HIGH) -> float:
        """The highest score in a range."""
        places = _FINE[(low <= _FINE) & (high >= _FINE)]
        return max(self.score(float(x)) for x in places)

    def moved(self, shift: float) -> Curve:
        """The same curve further right."""
        return Curve(lambda x: self.truth(x - shift), self.diverges + shift)

    def raised(self, points: float) -> Curve:
        """The same curve higher up."""
        return Curve(lambda x: self.truth(x) + points, self.diverges)


def draw(shape: str, rng: np.random.Generator) -> Curve:
    """A curve of a shape, with its best place somewhere in the range."""
    height = rng.uniform(15, 40)
    if shape == "plateau":
        left = rng.uniform(-5.5, -4.2)
        right = rng.uniform(left + 0.8, HIGH + 0.2)
        steep = rng.uniform(3, 6)
        tilt = rng.uniform(-1.5, 1.5)

        def plateau(x: float) -> float:
            inside = _rise(steep * (x - left)) * _rise(4 * (right - x))
            return CHANCE + height * inside + tilt * (x - left) * inside

        return Curve(plateau)
    if shape == "cliff":
        edge = rng.uniform(-4.2, HIGH + 0.1)
        width = rng.uniform(0.8, 2.0)
        steep = rng.uniform(3, 6)
        tilt = rng.uniform(0, 3)

        def cliff(x: float) -> float:
            inside = _rise(steep * (x - edge + width)) * _rise(12 * (edge - x))
            return CHANCE + height * inside + tilt * (x - edge) * inside

        return Curve(cliff)
    if shape == "divergence":
        centre = rng.uniform(-5.0, -3.3)
        bend = rng.uniform(2, 8)
        return Curve(lambda x: 88 - bend * (x - centre) ** 2, centre + rng.uniform(0.3, 1.0))
    if shape == "late rise":
        middle = rng.uniform(-4.0, -2.6)
        steep = rng.uniform(2, 4)
        return Curve(lambda x: CHANCE + height * _rise(steep * (x - middle)))
    centre = rng.uniform(LOW + 0.5, HIGH - 0.2)
    left = rng.uniform(0.6, 1.5)
    right = rng.uniform(0.3, 0.8)

    def bump(x: float) -> float:
        width = left if x < centre else right
        return float(CHANCE + height * math.exp(-(((x - centre) / width) ** 2) / 2))

    return Curve(bump)


def outside(rng: np.random.Generator, beyond: float) -> Curve:
    """A bump whose best place lies so many decades beyond an end of the range."""
    height = rng.uniform(15, 40)
    left = rng.uniform(0.6, 1.5)
    right = rng.uniform(0.3, 0.8)
    centre = HIGH + beyond
    if rng.random() < 0.5:
        centre = LOW - beyond
        left, right = right, left

    def bump(x: float) -> float:
        width = left if x < centre else right
        return float(CHANCE + height * math.exp(-(((x - centre) / width) ** 2) / 2))

    return Curve(bump)


def _rise(x: float) -> float:
    return 1 / (1 + math.exp(-min(max(x, -60.0), 60.0)))
