"""What all metrics share: the type of their numbers, and what an answer that is no label counts as.

It imports numpy alone, so that a reader of scores does not wait for scikit-learn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Values = np.ndarray[Any, np.dtype[np.float64]]


def answered(predicted: Values, gold: Values) -> Values:
    """Predictions in which an answer that is no label (-1) is a class other than the right one.

    As a class of its own it would pass as a true negative.
    """
    wrong = np.where(gold == 0, 1.0, 0.0)
    return np.where(predicted < 0, wrong, predicted)
