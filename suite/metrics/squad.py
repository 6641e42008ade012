"""Answers to questions: exact match and overlap of words, as the official evaluation of SQuAD counts them.

Source: SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250), section 6.1; SQuAD 2.0 (arXiv 1806.03822); their evaluation scripts.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from suite.metrics.quality import Values

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> list[str]:
    """The words of an answer in small letters, without punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, gold: str) -> float:
    """1.0 where the two have the same words in the same order, else 0.0."""
    return float(normalise(answer) == normalise(gold))


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of words, 0 to 1; where one of the two has none, whether the other has none either."""
    given, wanted = normalise(answer), normalise(gold)
    if not given or not wanted:
        return float(given == wanted)
    shared = sum((Counter(given) & Counter(wanted)).values())
    return 2.0 * shared / (len(given) + len(wanted))


SPAN_METRICS: dict[str, Callable[[str, str], float]] = {"em": exact_match, "token_f1": token_f1}


def span_rows(metric: str, predictions: Sequence[str], golds: Sequence[Sequence[str]]) -> Values:
    """What each answer scores against the best of its accepted texts, 0 to 1, (items,).

    Args:
        metric: "em" or "token_f1".
        predictions: One each; "" = no answer.
        golds: Accepted texts; `[""]`, or none, where there is no answer. Of several, those without words do not count.

    Raises:
        ValueError: No items, or not as many golds.
    """
    if len(predictions) != len(golds) or not len(golds):
        raise ValueError(
            f"{len(predictions)} answers for {len(golds)} questions; expected the same number, at least one"
        )
    of = SPAN_METRICS[metric]
    return np.array(
        [
            max(of(answer, gold) for gold in _accepted(texts))
            for answer, texts in zip(predictions, golds, strict=True)
        ]
    )


def score_spans(
    metrics: Sequence[str], predictions: Sequence[str], golds: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Every metric over all questions at once, in percent (0 to 100); arguments and errors as `span_rows`."""
    return {
        name: 100.0 * math.fsum(span_rows(name, predictions, golds)) / len(golds)
        for name in metrics
    }


def _accepted(texts: Sequence[str]) -> Sequence[str]:
    return [text for text in texts if normalise(text)] or [""]
