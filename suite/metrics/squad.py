"""Answers to questions: exact match and overlap of words, as SQuAD's official script counts them.

Source: SQuAD (Rajpurkar et al. 2016, arXiv 1606.05250), section 6.1; SQuAD 2.0 (arXiv 1806.03822);
their evaluation scripts.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from suite.metrics.values import Values

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> list[str]:
    """The words of an answer in lower case, without punctuation and articles."""
    # punctuation first, as in the official script, so that no article hides behind a quote
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def exact_match(answer: str, gold: str) -> float:
    """1.0 where the two have the same words in the same order, else 0.0."""
    return float(normalise(answer) == normalise(gold))


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall of words, 0 to 1.

    Where one of the two has no words, it is 1 if the other has none either.
    """
    given = normalise(answer)
    wanted = normalise(gold)
    if not given or not wanted:
        return float(given == wanted)
    shared = Counter(given) & Counter(wanted)
    return 2.0 * shared.total() / (len(given) + len(wanted))


SPAN_METRICS: dict[str, Callable[[str, str], float]] = {"em": exact_match, "token_f1": token_f1}


def span_rows(metric: str, predictions: Sequence[str], golds: Sequence[Sequence[str]]) -> Values:
    """What each answer scores against the best of its accepted texts, 0 to 1, (items,).

    Args:
        metric: "em" or "token_f1".
        predictions: One per item; "" = no answer.
        golds: Accepted texts of each item; `[""]`, or none, where there is no answer. Where there
            are several, those without words do not count.

    Raises:
        ValueError: There are no items, or the numbers of predictions and golds differ.
    """
    if len(predictions) != len(golds) or not len(golds):
        raise ValueError(
            f"{len(predictions)} answers for {len(golds)} questions; "
            "expected the same number, at least one"
        )
    score = SPAN_METRICS[metric]
    best = []
    for answer, texts in zip(predictions, golds, strict=True):
        # a gold such as "the" has no words left; it must not accept an empty answer
        accepted = [text for text in texts if normalise(text)] or [""]
        best.append(max(score(answer, text) for text in accepted))
    return np.array(best)


def score_spans(
    metrics: Sequence[str], predictions: Sequence[str], golds: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Every metric over all questions at once, in percent (0 to 100).

    Args and errors are those of `span_rows`.
    """
    scores: dict[str, float] = {}
    for name in metrics:
        rows = span_rows(name, predictions, golds)
        scores[name] = 100.0 * math.fsum(rows) / len(golds)
    return scores
